"""Gives each linear weight its format, and says which tensors lie side by side in the weights file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ortolan.errors import ConfigError
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.formats.dense import Dense
from ortolan.graphs.formats.low_bit import BLOCK_SIZES, INTEGERS, InputFormat, Kind, LowBit, Stored
from ortolan.graphs.kinds import Shapes
from ortolan.graphs.parts import EXPERT_WEIGHTS, Formats, WeightFormat
from ortolan.graphs.weights import joint_weights, weight_groups, weight_shapes

HeadFormat: TypeAlias = Literal["int8", "int4"]

CHANNEL = "channel"
GROUP_SIZES = (32, 64, 128)
EMBEDDING = "embedding"
MXFP4_GROUP = 32
ROUTERS = (".mlp.router.weight", ".mlp.shared_gate.weight")
DENSE = Dense()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the caller asks of weights that are quantized.

    Attributes:
        kind: "int4", "int8", "fp8" or "mxfp4".
        group_size: columns that share a scale; "channel" for a row; None takes a row of fp8, 32 of mxfp4, and of int4
            and int8 the largest size, up to 128, that divides all weights.
        zero_points: whether int4 and int8 have them.
        input_format: what linear layers round their inputs to: "none" or "fp8".
    """

    kind: Kind
    group_size: int | str | None = None
    zero_points: bool = False
    input_format: InputFormat = "none"


def linear_stems(config: ModelConfig) -> list[str]:
    """List the weights of linear layers that are quantized, without the head.

    What chooses experts stays dense: it is small, and a different choice is not a small error.
    """
    inside = (".attention.", ".delta.", ".mlp.")
    names = [
        name
        for name, shape in weight_shapes(config).items()
        if len(shape) == 2 and name.endswith(".weight") and any(part in name for part in inside)
    ]
    return [name.removesuffix(".weight") for name in names if not name.endswith(ROUTERS)]


def expert_stems(config: ModelConfig) -> list[str]:
    """List the mixtures, each by the name that its experts' weights begin with."""
    names = [name.rpartition(".") for name in weight_shapes(config)]
    return [stem for stem, _, last in names if last == EXPERT_WEIGHTS[0] and stem.endswith(".experts")]


def wished_formats(config: ModelConfig, wish: Wish) -> Formats:
    """Choose the formats of a model that is quantized, all but the head's.

    Raises:
        ConfigError: the group size does not divide the columns of a weight.
    """
    shapes, stems = weight_shapes(config), linear_stems(config)
    mixtures = expert_stems(config)
    columns = {stem: shapes[f"{stem}.weight"][1] for stem in stems}
    columns |= {f"{stem}.{name}": shapes[f"{stem}.{name}"][2] for stem in mixtures for name in EXPERT_WEIGHTS}
    chosen = _chosen_format(wish, columns)
    by_stem: dict[str, WeightFormat] = dict.fromkeys(stems, replace(chosen, input_format=wish.input_format))
    return with_joints(config, Formats(default=DENSE, by_stem=by_stem, experts=dict.fromkeys(mixtures, chosen)))


def with_head(config: ModelConfig, formats: Formats, kind: HeadFormat) -> Formats:
    """Quantize a dense head in groups; it stays as it is where no group size divides its columns.

    A head of int8 costs no accuracy that can be measured. Where the head is the embedding, too, the lookup reads the
    same codes: half the bytes of the largest weight, or less, held once.
    """
    size = _largest_divisor(config.hidden_size, (16, *GROUP_SIZES))
    if not size:
        return formats
    stored = LowBit(kind=kind, group_size=size)
    by_stem = {**formats.by_stem, head_stem(config): stored}
    return replace(formats, by_stem=by_stem, lookup=stored if config.tied_embeddings else formats.lookup)


def head_stem(config: ModelConfig) -> str:
    """Return the name of the weight that gives the logits."""
    return EMBEDDING if config.tied_embeddings else "head"


def _chosen_format(wish: Wish, columns: Mapping[str, int]) -> LowBit:
    size = _chosen_group(wish, columns)
    odd = [f"{width} of {stem}" for stem, width in columns.items() if width % 2]
    if odd and wish.kind == "int4":
        raise ConfigError(
            f"int4 packs two weights in a byte; the input features {odd[0]} are an odd number; "
            "give another weight_format"
        )
    rows = size if wish.kind == "fp8" and size else 1
    return LowBit(kind=wish.kind, group_size=size, zero_points=wish.zero_points, scale_rows=rows)


def _chosen_group(wish: Wish, columns: Mapping[str, int]) -> int:
    """Return the columns that share a scale; 0 for all of a row."""
    if wish.group_size == CHANNEL or (wish.group_size is None and wish.kind == "fp8"):
        return 0
    if wish.group_size is None and wish.kind != "mxfp4":
        return next((s for s in reversed(GROUP_SIZES) if all(width % s == 0 for width in columns.values())), 0)
    size, advice = int(wish.group_size or MXFP4_GROUP), f'give one that does, or "{CHANNEL}" for one scale per row'
    wrong = [f"{width} of {stem}" for stem, width in columns.items() if width % size]
    if wrong:
        if wish.kind == "mxfp4":
            advice = "mxfp4 has no other; give another weight_format"
        raise ConfigError(f"group_size {size} does not divide the input features {wrong[0]}; {advice}")
    return size


def _largest_divisor(number: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in reversed(sizes) if number % size == 0), 0)


def with_joints(config: ModelConfig, formats: Formats) -> Formats:
    """Give each joint weight the format of its members, or keep them apart where they cannot be one."""
    by_stem, apart = dict(formats.by_stem), set(formats.apart)
    shapes = weight_shapes(config)
    for whole, members in joint_weights(config).items():
        if not whole.endswith(".weight"):
            continue
        found = [formats.of(member.removesuffix(".weight")) for member in members]
        stem = whole.removesuffix(".weight")
        rows = getattr(found[0], "scale_rows", 1)
        if any(each != found[0] for each in found) or any(shapes[member][0] % rows for member in members[:-1]):
            apart.add(stem)
        else:
            by_stem[stem] = found[0]
    return replace(formats, by_stem=by_stem, apart=frozenset(apart))


def stored_groups(config: ModelConfig, formats: Formats, dtype: str) -> Iterator[list[Stored]]:
    """List what the weights file holds: groups without padding inside, of tensors with their types and shapes.

    Of weights that a graph reads as one, all codes follow each other, then all scales.
    """
    shapes: Shapes = weight_shapes(config)
    for group in weight_groups(config):
        each = [_tensors(formats, name, shapes[name], dtype) for name in group]
        if len({len(tensors) for tensors in each}) > 1:
            yield from ([tensors] for tensors in each)
            continue
        yield [dict(port) for port in zip(*(tensors.items() for tensors in each), strict=True)]


def _tensors(formats: Formats, name: str, shape: tuple[int, ...], dtype: str) -> Stored:
    stored = formats.stored(name)
    return {name: (dtype, shape)} if stored is None else stored.tensors(name, shape, dtype)


def joint_tensors(config: ModelConfig, formats: Formats, dtype: str) -> dict[str, tuple[str, ...]]:
    """List the tensors that a graph may read as one, by the name of the whole."""
    shapes = weight_shapes(config)
    found: dict[str, tuple[str, ...]] = {}
    for whole, members in joint_weights(config).items():
        stem, kind = whole.rsplit(".", 1)
        if stem in formats.apart:
            continue
        if kind != "weight":
            found[whole] = members
            continue
        each = [list(_tensors(formats, member, shapes[member], dtype)) for member in members]
        for tensors in zip(*each, strict=True):
            found[f"{stem}.{tensors[0].rsplit('.', 1)[1]}"] = tensors
    return found


__all__ = [
    "BLOCK_SIZES",
    "CHANNEL",
    "GROUP_SIZES",
    "INTEGERS",
    "Wish",
    "expert_stems",
    "head_stem",
    "joint_tensors",
    "linear_stems",
    "stored_groups",
    "wished_formats",
    "with_head",
    "with_joints",
]
