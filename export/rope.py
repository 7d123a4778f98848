"""Rotary frequencies of every RoPE type that the supported families use.

Sources: linear, proportional and dynamic NTK scaling as in transformers' modeling_rope_utils.py; llama3 as in Meta's
llama-models; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.hf_config import HfConfig
from ortolan.graphs.config import Rope, RopeVariant

Frequencies: TypeAlias = npt.NDArray[np.float32]

PROPORTIONAL = "proportional"  # turns whole heads, of which a part by an angle of 0
_ALIASES = {"su": "longrope"}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The RoPE keys of one layer type, in one spelling."""

    rope_type: str
    theta: float
    rotary_size: int
    max_position: int
    parameters: HfConfig


def read_rope_spec(
    config: HfConfig, default_theta: float, layer_type: str | None = None, *, partial: bool = False
) -> RopeSpec:
    """Read the RoPE keys, from `rope_parameters` (flat, or nested by layer type) or `rope_scaling`.

    The model's own `original_max_position_embeddings` comes before that of the rope that all its layers share.

    Args:
        config: of the model.
        default_theta: where the config gives none.
        layer_type: whose keys to read, where layers have several ropes.
        partial: whether the family turns a part of each head where `partial_rotary_factor` says so. In transformers
            the others turn whole heads all the same, and fail where the rope is scaled.

    Raises:
        UnsupportedModelError: the RoPE type is not one of `ROPE_TYPES`, or scaled and partial where the family is not.
        CheckpointError: a parameter is not a number, or outside its range.
    """
    parameters = HfConfig(_parameters(config, layer_type))
    rope_type = str(parameters.get("rope_type", parameters.get("type", "default")))
    rope_type = _ALIASES.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(f"RoPE type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    theta = parameters.positive("rope_theta", default_theta)
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta is {theta}; expected a number above 1")
    fraction = parameters.positive("partial_rotary_factor", config.positive("partial_rotary_factor", 1.0))
    if fraction > 1:
        raise CheckpointError(f"config.json: partial_rotary_factor is {fraction}; expected a share of a head, up to 1")
    rotary_size = int(config.head_size * (1 if rope_type == PROPORTIONAL else fraction))
    if not partial and rotary_size != config.head_size:
        if rope_type != "default":
            raise UnsupportedModelError(
                f"partial_rotary_factor {fraction} with RoPE type {rope_type!r} is not supported for this family"
            )
        rotary_size = config.head_size
    max_position = config.integer("max_position_embeddings", 2048)
    original = {"original_max_position_embeddings": config.integer("original_max_position_embeddings", max_position)}
    given = {key: value for key, value in parameters.keys.items() if value is not None}
    is_outer = layer_type is None and config.get("original_max_position_embeddings") is not None
    return RopeSpec(
        rope_type=rope_type,
        theta=theta,
        rotary_size=rotary_size,
        max_position=max_position,
        parameters=HfConfig(given | original if is_outer else original | given),
    )


def rope_keys(config: HfConfig) -> HfConfig:
    """Return `rope_scaling`, where it says anything, else `rope_parameters`: in transformers the former wins."""
    scaling = config.section("rope_scaling")
    return scaling if scaling.keys else config.section("rope_parameters")


def _parameters(config: HfConfig, layer_type: str | None) -> Mapping[str, Any]:
    """Return the flat parameters of a layer type; transformers 4's keys serve full attention only."""
    given, is_scaled = config.section("rope_parameters"), layer_type in (None, "full_attention")
    if layer_type is not None and any(isinstance(value, dict) for value in given.keys.values()):
        own = given.section(layer_type).keys
        return {**own, **config.section("rope_scaling").keys} if is_scaled else own
    theta_key = "rope_local_base_freq" if layer_type == "sliding_attention" else "rope_theta"
    theta = config.get(theta_key)
    flat = rope_keys(config).keys if is_scaled else {}
    return flat if theta is None or "rope_theta" in flat else {**flat, "rope_theta": theta}


def build_rope(name: str, spec: RopeSpec, max_context: int) -> Rope:
    """Compute the frequencies of one rope.

    longrope and dynamic have two variants, for sequences up to the pretrained length and for longer ones;
    dynamic's second is that of `max_context`. A model that is never longer keeps the first alone.
    """
    original = int(spec.parameters.positive("original_max_position_embeddings"))
    variants: tuple[RopeVariant, ...]
    if spec.rope_type == "longrope":
        variants = (_longrope(spec, "short_factor", original), _longrope(spec, "long_factor", max_context))
    elif spec.rope_type == "dynamic":
        original = spec.max_position
        variants = (
            RopeVariant(limit=original, inv_freq=_tuple(_base_frequencies(spec, spec.theta))),
            RopeVariant(limit=max_context, inv_freq=_tuple(_dynamic(spec, max_context))),
        )
    else:
        frequencies, factor = _single(spec)
        return Rope(
            name=name,
            variants=(RopeVariant(limit=max_context, inv_freq=_tuple(frequencies), attention_factor=factor),),
        )
    if max_context <= original:
        short = variants[0]
        variants = (RopeVariant(limit=max_context, inv_freq=short.inv_freq, attention_factor=short.attention_factor),)
    return Rope(name=name, variants=variants)


def share_limits(ropes: tuple[Rope, ...]) -> tuple[Rope, ...]:
    """Give all ropes of a model the same limits, repeating variants where one has fewer."""
    limits = sorted({variant.limit for rope in ropes for variant in rope.variants})

    def at(rope: Rope, limit: int) -> RopeVariant:
        variant = next(v for v in rope.variants if v.limit >= limit)
        return RopeVariant(limit=limit, inv_freq=variant.inv_freq, attention_factor=variant.attention_factor)

    return tuple(Rope(name=rope.name, variants=tuple(at(rope, limit) for limit in limits)) for rope in ropes)


def _tuple(frequencies: Frequencies) -> tuple[float, ...]:
    return tuple(float(f) for f in frequencies)


def _exponents(spec: RopeSpec) -> Frequencies:
    return np.divide(np.arange(0, spec.rotary_size, 2), spec.rotary_size, dtype=np.float32)


def _base_frequencies(spec: RopeSpec, theta: float) -> Frequencies:
    return (np.float32(1) / np.power(np.float32(theta), _exponents(spec))).astype(np.float32)


def _single(spec: RopeSpec) -> tuple[Frequencies, float]:
    if spec.rope_type == "yarn":
        return _yarn(spec)
    frequencies = _base_frequencies(spec, spec.theta)
    if spec.rope_type == "linear":
        frequencies = np.divide(frequencies, np.float32(spec.parameters.positive("factor")), dtype=np.float32)
    if spec.rope_type == "llama3":
        frequencies = _llama3(spec, frequencies)
    if spec.rope_type == PROPORTIONAL:
        frequencies = _proportional(spec, frequencies)
    return frequencies, 1.0


def _proportional(spec: RopeSpec, frequencies: Frequencies) -> Frequencies:
    """Keep the frequencies of the first pairs, a share of all, as they are in a whole head; the others do not turn."""
    turning = int(spec.parameters.positive("partial_rotary_factor", 1.0) * spec.rotary_size // 2)
    factor = np.float32(spec.parameters.positive("factor", 1.0))
    kept: Frequencies = np.where(np.arange(len(frequencies)) < turning, frequencies / factor, 0).astype(np.float32)
    return kept


def _dynamic(spec: RopeSpec, length: int) -> Frequencies:
    factor, size = spec.parameters.positive("factor"), spec.rotary_size
    growth = factor * max(length, spec.max_position) / spec.max_position - (factor - 1)
    return _base_frequencies(spec, spec.theta * growth ** (size / (size - 2)))


def _llama3(spec: RopeSpec, frequencies: Frequencies) -> Frequencies:
    """Divide long wavelengths by the factor, keep short ones, and blend between."""
    factor, low, high = (spec.parameters.positive(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise CheckpointError(f"config.json: high_freq_factor {high} must be above low_freq_factor {low}")
    turns = spec.parameters.positive("original_max_position_embeddings") * frequencies / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    mixed: Frequencies = ((1 - blend) * frequencies / np.float32(factor) + blend * frequencies).astype(np.float32)
    return mixed


def _yarn(spec: RopeSpec) -> tuple[Frequencies, float]:
    original = spec.parameters.positive("original_max_position_embeddings")
    factor = spec.parameters.positive("factor", spec.max_position / original)
    half = spec.rotary_size // 2

    def dimension(rotations: float) -> float:
        return spec.rotary_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = (dimension(spec.parameters.positive(*beta)) for beta in (("beta_fast", 32), ("beta_slow", 1)))
    if spec.parameters.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0), min(high, spec.rotary_size - 1)
    ramp = np.clip((np.arange(half, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
    frequencies = _base_frequencies(spec, spec.theta)
    mixed: Frequencies = (frequencies / np.float32(factor) * ramp + frequencies * (1 - ramp)).astype(np.float32)
    return mixed, _yarn_attention_factor(spec, factor)


def _yarn_attention_factor(spec: RopeSpec, factor: float) -> float:
    if spec.parameters.get("attention_factor") is not None:
        return spec.parameters.positive("attention_factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, all_dims = spec.parameters.number("mscale", 0), spec.parameters.number("mscale_all_dim", 0)
    return magnitude(scale) / magnitude(all_dims) if scale and all_dims else magnitude(1)


def _longrope(spec: RopeSpec, key: str, limit: int) -> RopeVariant:
    original = spec.parameters.positive("original_max_position_embeddings")
    factors = spec.parameters.positives(key)
    if len(factors) != spec.rotary_size // 2:
        raise CheckpointError(
            f"config.json: longrope needs {spec.rotary_size // 2} numbers in {key!r}, got {factors!r}"
        )
    factor = spec.parameters.positive("factor", spec.max_position / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    powers = np.power(np.float32(spec.theta), _exponents(spec))
    frequencies = np.float32(1) / (np.array(factors, np.float32) * powers)
    attention_factor = spec.parameters.positive("attention_factor", default)
    return RopeVariant(limit=limit, inv_freq=_tuple(frequencies), attention_factor=attention_factor)
