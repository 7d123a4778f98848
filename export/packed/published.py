"""Finds out which linear weights and experts of a checkpoint are published in low bits, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.checkpoint import Array, Checkpoint
from ortolan.export.families.base import Source, Sources
from ortolan.export.hf_config import HfConfig
from ortolan.export.packed.compressed import TensorLayout
from ortolan.export.packed.experts import ExpertLayers, common_format
from ortolan.export.packed.gptq import WordLayout
from ortolan.export.packed.layouts import ExpertLayout, Layout, Tensors
from ortolan.export.packed.mxfp4 import BlockExperts
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.formats.low_bit import InputFormat, LowBit
from ortolan.graphs.formats.plan import DENSE, expert_stems, linear_stems, with_joints
from ortolan.graphs.parts import EXPERT_WEIGHTS, Formats, WeightFormat
from ortolan.graphs.weights import weight_shapes

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
SECTION = "quantization_config"


def read_quantization(config: HfConfig, input_format: InputFormat) -> Published | None:
    """Read `quantization_config` of config.json; None where there is none.

    Args:
        config: of the checkpoint.
        input_format: what linear layers of fp8 are to round their inputs to; experts never do.

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
    if method == "mxfp4":
        return Published(method, None, BlockExperts())
    words = method in ("gptq", "awq")
    if words:
        layout: Layout = WordLayout.of(section, method)
        return Published(method, layout, ExpertLayers(layout))
    tensors = TensorLayout.of(section, method)
    return Published(method, replace(tensors, input_format=input_format), ExpertLayers(tensors))


@dataclass(frozen=True, slots=True)
class Published:
    """How a checkpoint is quantized.

    Attributes:
        method: `quant_method`, as config.json spells it.
        layout: of linear layers; None where all of them are dense.
        experts: of mixtures.
    """

    method: str
    layout: Layout | None
    experts: ExpertLayout

    def weights(self, checkpoint: Checkpoint, sources: Sources, config: ModelConfig) -> PublishedWeights:
        """Read the formats of a checkpoint's weights.

        Raises:
            CheckpointError: tensors are missing, or contradict config.json.
            UnsupportedModelError: a weight is stored in a way that is not supported.
        """
        return PublishedWeights(self, checkpoint, sources, config)


class PublishedWeights:
    """The weights of a checkpoint that are stored in low bits.

    Attributes:
        formats: of every linear weight and mixture.
    """

    def __init__(self, published: Published, checkpoint: Checkpoint, sources: Sources, config: ModelConfig) -> None:
        self._layout, self._experts, self._checkpoint = published.layout, published.experts, checkpoint
        self._sources, self._shapes = sources, weight_shapes(config)
        self._described: dict[str, tuple[LowBit, set[str]]] = {}
        stems = [*linear_stems(config), *([] if config.tied_embeddings or config.drafts else ["head"])]
        by_stem: dict[str, WeightFormat] = {
            stem: self._describe(f"{stem}.weight")[0] for stem in stems if self._holds(f"{stem}.weight")
        }
        mixtures = {stem: self._mixture(stem) for stem in expert_stems(config)}
        experts = {stem: stored for stem, stored in mixtures.items() if stored is not None}
        if not by_stem and not experts and not config.drafts:  # a draft head is often left as it is
            raise CheckpointError(
                f"config.json names the quant_method {published.method}, but the checkpoint has no weights in its form"
            )
        self.formats = with_joints(config, Formats(default=DENSE, by_stem=by_stem, experts=experts))

    def check(self, name: str) -> set[str] | None:
        """Return the names of the tensors that belong to a weight; None where it is dense.

        Raises:
            CheckpointError: a tensor is missing, or has another shape or scales that are 0 or not finite.
            UnsupportedModelError: the weight is stored in a way that is not supported.
        """
        return self._describe(name)[1] if self._holds(name) else None

    def pieces(self, name: str) -> Iterator[dict[str, Array]] | None:
        """Return parts of a weight's arrays by port of LowBitLinear; None where it is dense."""
        if not self._holds(name):
            return None
        source, shape = self._sources[name], self._shapes[name]
        if _is_of_experts(name):
            stored = self.formats.stored(name)
            assert isinstance(stored, LowBit), "a mixture in low bits has such a format"
            return self._experts.pieces(self._checkpoint, source, shape, stored)
        return iter([self._read(source, shape)])

    def _holds(self, name: str) -> bool:
        """Say whether a weight is stored in low bits; those that the config excepts are dense."""
        source = self._sources[name]
        if _is_of_experts(name):
            return self._experts.holds(self._checkpoint, source)
        return self._layout is not None and self._stem(source) is not None

    def _stem(self, source: Source) -> str | None:
        """Return the name of the quantized layer that holds a linear weight."""
        assert self._layout is not None
        names = [name.removesuffix(".weight") for name in (source.name, *source.parts) if name.endswith(".weight")]
        return next((stem for stem in names if self._layout.holds(self._checkpoint, stem)), None)

    def _describe(self, name: str) -> tuple[LowBit, set[str]]:
        if name not in self._described:
            source, shape = self._sources[name], self._shapes[name]
            find = self._experts.describe if _is_of_experts(name) else self._describe_linear
            self._described[name] = find(self._checkpoint, source, shape)
        return self._described[name]

    def _mixture(self, stem: str) -> LowBit | None:
        """Return the format of a mixture's weights; None where they are dense."""
        names = [f"{stem}.{name}" for name in EXPERT_WEIGHTS]
        held = [name for name in names if self._holds(name)]
        if not held:
            return None
        if len(held) != len(names):
            raise UnsupportedModelError(
                f"{self._sources[names[0]].name}: one of the two weights of its experts is in low bits, the other is "
                "dense; supported: both alike"
            )
        columns = [self._shapes[name][-1] for name in names]
        return common_format([self._describe(name)[0] for name in names], columns, self._sources[names[0]].name)

    def _describe_linear(
        self, checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]
    ) -> tuple[LowBit, set[str]]:
        layout, stem = self._layout, self._stem(source)
        assert layout is not None
        assert stem is not None
        if source.is_rearranged:
            raise UnsupportedModelError(f"{source.name} cannot be read in low bits: its values are arranged anew")
        if len(source.parts) > 1 and f"{stem}.weight" in source.parts:
            raise UnsupportedModelError(
                f"{stem}.weight cannot be read in low bits: it is one of {len(source.parts)} tensors of one weight"
            )
        tensors = Tensors(checkpoint, stem)
        stored, endings = layout.describe(tensors, _whole(tensors, source, shape, layout))
        if source.rows is not None and any(edge % stored.scale_rows for edge in source.rows):
            raise UnsupportedModelError(
                f"{source.name}: a block of its scales holds rows of two weights, at row {source.rows[1]}"
            )
        above = stem.rsplit(".", 1)[0]
        idle = {place + ending for ending in layout.idle for place in (stem, above)}
        return stored, {stem + ending for ending in endings} | idle

    def _read(self, source: Source, shape: tuple[int, ...]) -> dict[str, Array]:
        layout, stem = self._layout, self._stem(source)
        assert layout is not None
        assert stem is not None
        tensors = Tensors(self._checkpoint, stem)
        whole = _whole(tensors, source, shape, layout)
        arrays = layout.read(tensors, whole)
        if source.rows is None:
            return arrays
        stored, _ = layout.describe(tensors, whole)
        begin, end = source.rows
        return {port: values[slice(*_cut(stored, port, begin, end))] for port, values in arrays.items()}


def _is_of_experts(name: str) -> bool:
    return name.rpartition(".")[2] in EXPERT_WEIGHTS


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
