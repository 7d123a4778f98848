"""Reads, checks and writes ortolan.json, the description that travels with an exported model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ortolan import contract
from ortolan.element_types import CODE_TYPES, COMPUTE_TYPES
from ortolan.errors import MAX_LENGTH, ConfigError, ContractMismatchError
from ortolan.folders import GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, not_a_model, pointer_problem
from ortolan.folders import MANIFEST_FILE as MANIFEST_FILE

MODEL_FILE = "model.onnx"
FUSED_FILE, CPU_FILE = "model.fused.onnx", "model.cpu.onnx"
FUSED_FILES = {"cuda": FUSED_FILE, "cpu": CPU_FILE}
HEAD_FILE, HEAD_FUSED_FILES = "mtp.onnx", {"cuda": "mtp.fused.onnx", "cpu": "mtp.cpu.onnx"}  # of a draft head
HEAD_WEIGHTS_FILE = "mtp.onnx.data"
EVICT_FILE = "evict.onnx"
EDITABLE_FILES = (TEMPLATE_FILE, GENERATION_FILE, TOKENIZER_CONFIG_FILE)  # checked by their readers
MANIFEST_METADATA = "ortolan.manifest"  # key of the manifest in a graph's metadata
FORMAT_VERSION = 2
DEFAULT_CHUNK_SIZE = 2048  # prompt tokens per step, where nobody named a number


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """What the runtime must know of one layer.

    Attributes:
        window: keys a query sees, itself included; -1 for full attention.
        num_heads: Hq.
        num_kv_heads: Hkv.
        head_size: D.
        evictable: whether the graph has `kv_len` and `capture` inputs for this layer.
        rope: key of `Manifest.ropes`; None where keys are not rotated.
        scale: softmax scale; 0 means 1/sqrt(D).
        softcap: of attention's logits; 0 means none.
        state: what the layer keeps between steps; "attention": keys and values.
        cache_of: the layer whose keys and values it reads; None where it has caches of its own.
        value_size: of a recurrent state, Dv; its Hk, Hv and Dk are num_kv_heads, num_heads and head_size.
        conv_taps: of the convolution before a recurrent state, K.
    """

    window: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    evictable: bool
    rope: str | None = None
    scale: float = 0.0
    softcap: float = 0.0
    state: str = "attention"
    cache_of: int | None = None
    value_size: int = 0
    conv_taps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """Layers whose paged caches share one block table.

    Attributes:
        name: "full", or "window_{W}".
        window: keys a query of these layers sees; -1 for full attention.
        layers: indices of the layers.
        block_table: the graph's input, [B, M] int32.
    """

    name: str
    window: int
    layers: tuple[int, ...]
    block_table: str


def cache_kinds(layers: Sequence[LayerInfo]) -> tuple[CacheKind, ...]:
    """Sort the layers of a paged model that have caches into kinds, in the order in which they first occur."""
    members: dict[tuple[str, int], list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.cache_of is None:
            name = contract.cache_kind(layer.window) if layer.state == "attention" else layer.state
            members.setdefault((name, layer.window), []).append(index)
    return tuple(
        CacheKind(name=name, window=window, layers=tuple(indices), block_table=contract.block_table(name))
        for (name, window), indices in members.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything the runtime reads of an exported model besides its graph.

    Attributes:
        rope_limits: for each RoPE variant, the longest sequence it serves, ascending; the last one
            equals `max_context`. More than one entry means the graph takes `rope_variant`.
        chunk_chosen: whether whoever made the folder named `chunk_size`; where not, CUDA may read larger chunks.
        ropes: for each rope by name and each of its variants, the radians per position of every rotated pair; None
            in folders that were exported without them.
        snapkv_window: rows of the capture buffers (Wq) by default; 0 where the graph captures nothing.
        paged: whether caches are pools of pages with block tables.
        page_size: P, slots per page; 0 where caches are contiguous.
        cache_kinds: which layers share a block table; empty where caches are contiguous.
        dtype: element type of activations.
        weight_format: how linear weights are stored; "mixed" where they differ, as those of converted models may.
        cache_dtype: element type of caches: the dtype, or that of codes, which scales belong to.
        fused_model: file of the graph for CUDA, with the bindings and the weights file of model.onnx; None where
            there is none.
        cpu_model: the same for the CPU.
        hidden_size: features of `hidden_out`, where the graph returns it for a draft head; else 0.
        drafts: whether this describes a draft head, which reads `hidden`.
        draft_head: of the model; None where it has none.
    """

    architecture: str
    dtype: str
    vocab_size: int
    max_context: int
    chunk_size: int
    sink: int
    snapkv_window: int
    paged: bool
    layers: tuple[LayerInfo, ...]
    rope_limits: tuple[int, ...]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    weight_format: str = "dense"
    cache_dtype: str = ""  # the dtype, where it is left out
    fused_model: str | None = None
    cpu_model: str | None = None
    page_size: int = 0
    cache_kinds: tuple[CacheKind, ...] = ()
    chunk_chosen: bool = True
    hidden_size: int = 0
    drafts: bool = False
    draft_head: Manifest | None = None
    ropes: dict[str, tuple[tuple[float, ...], ...]] | None = None
    ortolan_version: str = ""
    operator_version: int = 1
    format_version: int = FORMAT_VERSION
    files: dict[str, int] = field(default_factory=dict)  # file name -> size in bytes

    def __post_init__(self) -> None:
        if self.dtype not in COMPUTE_TYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; allowed: {', '.join(COMPUTE_TYPES)}")
        if not self.cache_dtype:
            object.__setattr__(self, "cache_dtype", self.dtype)
        if self.cache_dtype not in (self.dtype, *CODE_TYPES):
            allowed = f"the dtype, {self.dtype!r}, {' or '.join(map(repr, CODE_TYPES))}"
            raise ConfigError(f"cache_dtype is {self.cache_dtype!r}; allowed: {allowed}")
        if self.paged and self.page_size not in contract.PAGE_SIZES:
            raise ConfigError(f"page_size is {self.page_size}; allowed: {contract.PAGE_SIZES}")
        if self.cache_kinds != (cache_kinds(self.layers) if self.paged else ()):
            raise ContractMismatchError("cache_kinds do not fit the layers; export the model again")

    @property
    def has_code_caches(self) -> bool:
        """Whether caches hold codes, with a scale for each row."""
        return self.cache_dtype in CODE_TYPES

    def cache_owner(self, index: int) -> int:
        """Return the layer whose cache a layer reads: its own, or an earlier one's."""
        owner = self.layers[index].cache_of
        return index if owner is None else owner

    def fused_file(self, device: str) -> str | None:
        """Return the file of the graph for a device, "cuda" or "cpu"; None where there is none."""
        return self.fused_model if device == "cuda" else self.cpu_model

    def to_json(self) -> str:
        """Serialize to the text of ortolan.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = MANIFEST_FILE) -> Manifest:
        """Parse the text of ortolan.json.

        Raises:
            ContractMismatchError: not JSON, another format version, missing or unknown keys, or values that no export
                writes.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ContractMismatchError(f"{source} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ContractMismatchError(f"{source} holds a {type(raw).__name__}, expected an object")
        version = raw.get("format_version")
        if version != FORMAT_VERSION:
            raise ContractMismatchError(
                f"{source} has format version {version!r}, this Ortolan reads {FORMAT_VERSION}; export the model again"
            )
        try:
            manifest = cls(**_checked_fields(raw, source))
        except ConfigError as error:
            raise ContractMismatchError(f"{source}: {error}") from error
        _check_values(manifest, source)
        return manifest


def _checked_fields(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """Convert JSON lists to tuples and refuse keys that the format does not have."""
    known = {f.name: f for f in dataclasses.fields(Manifest)}
    unknown = sorted(set(raw) - set(known))
    missing = sorted(
        name
        for name, f in known.items()
        if name not in raw and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise ContractMismatchError(f"{source}: unknown keys {unknown}, missing keys {missing}; export the model again")
    values = {name: _with_tuples(value) for name, value in raw.items()}
    try:
        layers = tuple(LayerInfo(**layer) for layer in values["layers"])
        kinds = tuple(CacheKind(**kind) for kind in values.get("cache_kinds", ()))
    except (TypeError, KeyError) as error:
        raise ContractMismatchError(
            f"{source}: layers or cache_kinds do not have the expected keys: {error}; export the model again"
        ) from error
    values |= {"layers": layers, "cache_kinds": kinds}
    if isinstance(head := raw.get("draft_head"), dict):
        values["draft_head"] = _draft_head(head, source)
    for name, hint in get_type_hints(Manifest).items():
        if name in values and not _fits(values[name], hint):
            raise ContractMismatchError(
                f"{source}: {name} has a value of another type than any export writes; export the model again"
            )
    return values


def _draft_head(raw: dict[str, Any], source: str) -> Manifest:
    """Read the description of a draft head. Raises ContractMismatchError."""
    head = Manifest(**_checked_fields(raw, f"{source}, draft_head"))
    _check_values(head, f"{source}, draft_head")
    if not head.drafts or head.draft_head is not None:
        raise ContractMismatchError(f"{source}: draft_head describes something else; export the model again")
    return head


def _with_tuples(value: Any) -> Any:
    """Turn the lists of JSON into tuples, at any depth."""
    if isinstance(value, list):
        return tuple(_with_tuples(each) for each in value)
    if isinstance(value, dict):
        return {key: _with_tuples(each) for key, each in value.items()}
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a value is of the type that a field is annotated with."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, each) for each in arguments)
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(each, arguments[0]) for each in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(each, arguments[1]) for each in value.values())
    if hint in (LayerInfo, CacheKind):
        return all(_fits(getattr(value, name), field) for name, field in get_type_hints(hint).items())
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)


def _check_values(manifest: Manifest, source: str) -> None:
    """Raise ContractMismatchError for numbers that no export writes."""
    limits = manifest.rope_limits
    least = {"vocab_size": 1, "chunk_size": 1, "snapkv_window": 0, "hidden_size": 0}
    checks = {name: number <= getattr(manifest, name) <= MAX_LENGTH for name, number in least.items()} | {
        "sink": 0 <= manifest.sink < manifest.max_context,
        "drafts": manifest.hidden_size > 0 or not manifest.drafts,
        "page_size": manifest.paged or manifest.page_size == 0,
        "max_context": 1 <= manifest.max_context <= MAX_LENGTH,
        "rope_limits": bool(limits) and list(limits) == sorted(limits) and limits[-1] >= manifest.max_context,
        "layers": bool(manifest.layers) and all(_is_sound(manifest.layers, i) for i in range(len(manifest.layers))),
    }
    wrong = [name for name, holds in checks.items() if not holds]
    if wrong:
        raise ContractMismatchError(f"{source}: {', '.join(wrong)}: a value that no export writes; export it again")


def _is_sound(layers: Sequence[LayerInfo], index: int) -> bool:
    layer = layers[index]
    window, sizes = layer.window, (layer.num_heads, layer.num_kv_heads, layer.head_size)
    shares = layer.cache_of is None or (0 <= layer.cache_of < index and layers[layer.cache_of].cache_of is None)
    return shares and (window == -1 or 0 < window <= MAX_LENGTH) and all(0 < size <= MAX_LENGTH for size in sizes)


def read_description(folder: Path) -> Manifest:
    """Read `ortolan.json` of a model folder alone, whatever else is there.

    Raises:
        ContractMismatchError: no manifest, or one that `Manifest.from_json` refuses.
    """
    path = folder / MANIFEST_FILE
    if not os.path.isfile(path):  # unlike Path's, it takes names that are too long
        raise ContractMismatchError(not_a_model(folder))
    if pointer := pointer_problem(path):
        raise ContractMismatchError(pointer)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractMismatchError(f"{path} cannot be read: {error}") from error
    return Manifest.from_json(text, str(path))


def read_manifest(folder: Path) -> Manifest:
    """Read `ortolan.json` of a model folder and check that its files are whole.

    Texts that say how to chat and to sample may have been edited or removed since the export.

    Raises:
        ContractMismatchError: no manifest, another version, or a file that is missing, cannot be read or has another
            size.
    """
    manifest = read_description(folder)
    for name, size in manifest.files.items():
        if name in EDITABLE_FILES:
            continue
        file = folder / name
        if not os.path.isfile(file):
            raise ContractMismatchError(f"{file} is missing, the manifest names it; export the model again")
        try:
            with file.open("rb") as stream:
                actual = os.fstat(stream.fileno()).st_size
        except OSError as error:
            raise ContractMismatchError(f"{file} cannot be read: {error.strerror or error}") from error
        if actual != size:
            if pointer := pointer_problem(file):
                raise ContractMismatchError(pointer)
            raise ContractMismatchError(f"{file}: {actual} bytes, the manifest says {size}; export the model again")
    return manifest
