"""Refuses the file of a sequence whose numbers do not fit each other or the model, though its checksum is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ortolan.errors import MAX_LENGTH, SessionFileError
from ortolan.manifest import Manifest
from ortolan.runtime.caches.layer_state import own_layers
from ortolan.runtime.saved.file import SessionFile


def check_sequence(file: SessionFile, manifest: Manifest) -> None:
    """Check lengths, tokens and the tensors that say what was kept.

    Args:
        file: whose description has the form that this version writes.
        manifest: of the model that saved it.

    Raises:
        SessionFileError: a number is out of its range, or two do not fit each other.
    """
    check = _Check(file)
    described, lengths = file.description, file.description["lengths"]
    logical, evicted_at = lengths["logical"], lengths["evicted_at"]
    check.between("logical", logical, 0, manifest.max_context)
    check.between("evicted_at", evicted_at, 0, logical)
    check.between("captured_from", lengths["captured_from"], 0, logical)
    check.between("variant", described["variant"], 0, len(manifest.rope_limits) - 1)
    for name, value in described["plan"].items():
        check.between(name, value, 1, MAX_LENGTH)
    check.tokens(described["pending"], manifest.vocab_size)
    check.tokens(_generated(described["generation"]), manifest.vocab_size)
    check.shape("history", (logical,))
    check.tokens(file.read("history", np.int32).tolist(), manifest.vocab_size)
    _check_layers(check, described["layers"], logical, manifest)
    _check_eviction(check, lengths["counts"], evicted_at, manifest)


def _check_layers(check: _Check, layers: list[Any], logical: int, manifest: Manifest) -> None:
    for index in own_layers(manifest):
        check.between(f"layer {index}'s capacity", layers[index]["capacity"], 0, MAX_LENGTH)
        check.between(f"layer {index}'s first position", layers[index]["first"], 0, logical)


def _check_eviction(check: _Check, counts: Mapping[str, Any], evicted_at: int, manifest: Manifest) -> None:
    """Check what the last eviction left, of every layer that it evicts; nothing where there was none."""
    evictable = [index for index, layer in enumerate(manifest.layers) if layer.evictable]
    check.that(set(counts) == ({str(index) for index in evictable} if evicted_at else set()), "counts", counts)
    for index in evictable:
        heads, held = manifest.layers[index].num_kv_heads, counts.get(str(index), [])
        check.that(isinstance(held, list) and len(held) in (0, heads), "counts", held)
        check.that(len(held) == (heads if evicted_at else 0), "counts", held)
        for count in held:
            check.between("counts", count, 0, evicted_at)
        if f"layer.{index}.kept" in check.file:
            check.shape(f"layer.{index}.kept", (heads, None))
        for name, end in (("capture", check.logical), ("captured_at_eviction", evicted_at)):
            if f"layer.{index}.{name}" in check.file:
                check.shape(f"layer.{index}.{name}", (None, *_query(manifest, index)))
                check.between(f"{name}'s rows", check.file.shape(f"layer.{index}.{name}")[0], 0, end)


def _query(manifest: Manifest, index: int) -> tuple[int, int]:
    return manifest.layers[index].num_heads, manifest.layers[index].head_size


def _generated(generation: Mapping[str, Any] | None) -> Iterable[int]:
    """Return the tokens that a generation has chosen and not fed yet; what is of another form is refused later."""
    if generation is None:
        return ()
    shown = [*generation["ready"], *([] if generation["chosen"] is None else [generation["chosen"]])]
    return [each[0] for each in shown if isinstance(each, list) and each and isinstance(each[0], int)]


class _Check:
    """Names what is wrong in a file."""

    def __init__(self, file: SessionFile) -> None:
        self.file, self.logical = file, file.description["lengths"]["logical"]

    def that(self, holds: bool, name: str, value: object) -> None:
        """Raise SessionFileError unless something holds."""
        if not holds:
            raise SessionFileError(
                f"{self.file.path} is not a session as this version of Ortolan saves it: {name} is {value!r:.100}"
            )

    def between(self, name: str, value: object, least: int, most: int) -> None:
        """Check that a value is a whole number in a range."""
        self.that(isinstance(value, int) and not isinstance(value, bool) and least <= value <= most, name, value)

    def tokens(self, tokens: Iterable[object], vocab_size: int) -> None:
        """Check that values are tokens of the vocabulary."""
        for token in tokens:
            self.between("a token", token, 0, vocab_size - 1)

    def shape(self, name: str, shape: tuple[int | None, ...]) -> None:
        """Check that a tensor has a shape, of which None is any size."""
        found = self.file.shape(name)
        fits = len(found) == len(shape) and all(b is None or a == b for a, b in zip(found, shape, strict=True))
        self.that(fits, f"the shape of {name}", found)
