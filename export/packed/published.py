"""Finds out which linear weights of a checkpoint are published in low bits, and how."""

from __future__ import annotations

from collections.abc import Mapping

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.families.base import Source
from ortolan.export.hf_config import HfConfig
from ortolan.export.packed.compressed import TensorLayout
from ortolan.export.packed.gptq import WordLayout
from ortolan.export.packed.layouts import Layout, Tensors
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.formats.low_bit import LowBit
from ortolan.graphs.formats.plan import DENSE, linear_stems, with_joints
from ortolan.graphs.parts import Formats, WeightFormat
from ortolan.graphs.weights import weight_shapes

METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
SECTION = "quantization_config"


def read_quantization(config: HfConfig) -> Published | None:
    """Read `quantization_config` of config.json; None where there is none.

    Raises:
        UnsupportedModelError: another `quant_method`, or an option of one that is not supported.
    """
    if config.get(SECTION) is None:
        return None
    section = config.section(SECTION)
    method = section.get("quant_method")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"config.json: quant_method is {method!r}; supported: {', '.join(METHODS)}; or give the checkpoint that "
            "is not quantized"
        )
    layout: Layout = WordLayout.of(section, method) if method in ("gptq", "awq") else TensorLayout()
    return Published(method, layout)


class Published:
    """The quantized linear layers of a checkpoint.

    Attributes:
        method: `quant_method`, as config.json spells it.
    """

    def __init__(self, method: str, layout: Layout) -> None:
        self.method, self._layout = method, layout

    def holds(self, checkpoint: Checkpoint, source: Source) -> bool:
        """Say whether a weight is stored in low bits; those that the config excepts are dense."""
        return source.name.endswith(".weight") and self._layout.holds(checkpoint, _stem(source))

    def formats(self, checkpoint: Checkpoint, sources: Mapping[str, Source], config: ModelConfig) -> Formats:
        """Return the format of every linear weight.

        Raises:
            CheckpointError: tensors are missing, or contradict config.json.
            UnsupportedModelError: a weight is stored in a way that is not supported.
        """
        shapes = weight_shapes(config)
        by_stem: dict[str, WeightFormat] = {}
        stems = [*linear_stems(config), *([] if config.tied_embeddings else ["head"])]
        for stem in stems:
            source = sources[f"{stem}.weight"]
            if self.holds(checkpoint, source):
                by_stem[stem] = self._describe(checkpoint, source, shapes[f"{stem}.weight"])[0]
        if not by_stem:
            raise CheckpointError(
                f"config.json names the quant_method {self.method}, but the checkpoint has no linear layer in its form"
            )
        return with_joints(config, Formats(default=DENSE, by_stem=by_stem))

    def check(self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> set[str]:
        """Check a weight's tensors; returns the names of those that belong to it.

        Raises:
            CheckpointError: a tensor is missing, or has another shape or scales that are 0 or not finite.
            UnsupportedModelError: the weight is stored in a way that is not supported.
        """
        stem = _stem(source)
        endings = self._describe(checkpoint, source, shape)[1] | set(self._layout.idle)
        return {stem + ending for ending in endings} | {
            f"{stem.rsplit('.', 1)[0]}{ending}" for ending in self._layout.idle
        }

    def read(self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> dict[str, Array]:
        """Return a weight's arrays by port of LowBitLinear."""
        tensors = Tensors(checkpoint, _stem(source))
        arrays = self._layout.read(tensors, _whole(tensors, source, shape, self._layout))
        if source.rows is None:
            return arrays
        stored, _ = self._layout.describe(tensors, _whole(tensors, source, shape, self._layout))
        begin, end = source.rows
        return {port: values[slice(*_cut(stored, port, begin, end))] for port, values in arrays.items()}

    def _describe(self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> tuple[LowBit, set[str]]:
        if source.plus_one or source.transposed or source.alternating:
            raise UnsupportedModelError(f"{source.name} cannot be read in low bits: its rows are arranged anew")
        tensors = Tensors(checkpoint, _stem(source))
        stored, endings = self._layout.describe(tensors, _whole(tensors, source, shape, self._layout))
        if source.rows is not None and any(edge % stored.scale_rows for edge in source.rows):
            raise UnsupportedModelError(
                f"{source.name}: a block of its scales holds rows of two weights, at row {source.rows[1]}"
            )
        return stored, endings


def _stem(source: Source) -> str:
    return source.name.removesuffix(".weight")


def _cut(stored: LowBit, port: str, begin: int, end: int) -> tuple[int, int]:
    """Return the rows of a port's array that belong to rows of the weight."""
    rows = stored.scale_rows if port == "float_scales" else 1
    return begin // rows, -(-end // rows)


def _whole(tensors: Tensors, source: Source, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Return the shape of the checkpoint's weight, of which a source may be some rows."""
    if source.rows is None:
        return shape
    if isinstance(layout, WordLayout):
        return (tensors.shape(".scales")[-1], *shape[1:])
    ending = ".weight_packed" if tensors.has(".weight_packed") else ".weight"
    return (tensors.shape(ending)[0], *shape[1:])
