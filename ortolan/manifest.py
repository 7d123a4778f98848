"""Reads, checks and writes ortolan.json, the description that travels with an exported model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortolan import contract
from ortolan.errors import ConfigError, ContractMismatchError

MANIFEST_FILE = "ortolan.json"
MODEL_FILE = "model.onnx"
FUSED_FILE = "model.fused.onnx"
EVICT_FILE = "evict.onnx"
FORMAT_VERSION = 1
DEFAULT_CHUNK_SIZE = 2048  # prompt tokens per step, where nobody named a number
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """What the runtime must know of one attention layer.

    Attributes:
        window: keys a query sees, itself included; -1 for full attention.
        num_kv_heads: Hkv.
        head_size: D.
        evictable: whether the graph has `kv_len` and `capture` inputs for this layer.
        rope: key of `Manifest.ropes`; None where keys are not rotated.
    """

    window: int
    num_kv_heads: int
    head_size: int
    evictable: bool
    rope: str | None = None


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
    """Sort the layers of a paged model into kinds, in the order in which they first occur."""
    members: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault(layer.window, []).append(index)
    return tuple(
        CacheKind(
            name=contract.cache_kind(window),
            window=window,
            layers=tuple(indices),
            block_table=contract.block_table(contract.cache_kind(window)),
        )
        for window, indices in members.items()
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
        fused_model: file of the graph for CUDA, with the bindings and the weights file of model.onnx; None where
            there is none.
    """

    architecture: str
    dtype: str
    vocab_size: int
    num_heads: int
    max_context: int
    chunk_size: int
    sink: int
    snapkv_window: int
    paged: bool
    layers: tuple[LayerInfo, ...]
    rope_limits: tuple[int, ...]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    fused_model: str | None = None
    page_size: int = 0
    cache_kinds: tuple[CacheKind, ...] = ()
    chunk_chosen: bool = True
    ropes: dict[str, tuple[tuple[float, ...], ...]] | None = None
    ortolan_version: str = ""
    operator_version: int = 1
    format_version: int = FORMAT_VERSION
    files: dict[str, int] = field(default_factory=dict)  # file name -> size in bytes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if self.paged and self.page_size not in contract.PAGE_SIZES:
            raise ConfigError(f"page_size is {self.page_size}; allowed: {contract.PAGE_SIZES}")
        if self.cache_kinds != (cache_kinds(self.layers) if self.paged else ()):
            raise ContractMismatchError("cache_kinds do not fit the layers; export the model again")

    def to_json(self) -> str:
        """Serialize to the text of ortolan.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = MANIFEST_FILE) -> Manifest:
        """Parse the text of ortolan.json.

        Raises:
            ContractMismatchError: not JSON, another format version, or missing or unknown keys.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ContractMismatchError(f"{source} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ContractMismatchError(f"{source} holds a {type(raw).__name__}, expected an object")
        version = raw.get("format_version")
        if version != FORMAT_VERSION:
            raise ContractMismatchError(
                f"{source} has format version {version!r}, this Ortolan reads {FORMAT_VERSION}; export the model again"
            )
        return cls(**_checked_fields(raw, source))


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
        raise ContractMismatchError(f"{source}: unknown keys {unknown}, missing keys {missing}")
    try:
        layers = tuple(LayerInfo(**layer) for layer in raw["layers"])
        kinds = tuple(CacheKind(**{**kind, "layers": tuple(kind["layers"])}) for kind in raw.get("cache_kinds", ()))
    except (TypeError, KeyError) as error:
        raise ContractMismatchError(
            f"{source}: layers or cache_kinds do not have the expected keys: {error}"
        ) from error
    sequences: dict[str, Any] = {name: tuple(raw[name]) for name in ("rope_limits", "eos_token_ids") if name in raw}
    ropes = raw.get("ropes")
    if ropes is not None:
        sequences["ropes"] = {name: tuple(tuple(variant) for variant in rope) for name, rope in ropes.items()}
    return {**raw, **sequences, "layers": layers, "cache_kinds": kinds}


def read_manifest(folder: Path) -> Manifest:
    """Read `ortolan.json` of a model folder and check that its files are whole.

    Raises:
        ContractMismatchError: no manifest, another version, or a file that is missing or has another size.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ContractMismatchError(
            f"{folder} is not an exported model: it has no {MANIFEST_FILE}; run `ortolan export`"
        )
    manifest = Manifest.from_json(path.read_text(encoding="utf-8"), str(path))
    for name, size in manifest.files.items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            raise ContractMismatchError(f"{file}: {actual} bytes, the manifest says {size}; export the model again")
    return manifest
