"""Refuses models whose layers have shapes that the operators do not compute."""

from __future__ import annotations

from ortolan.errors import UnsupportedModelError
from ortolan.graphs.config import GatedDeltaConfig, ModelConfig

MAX_HEAD_SIZE = 256
MAX_CONV_TAPS = 8
LARGE_HEAD_SIZE = 512


def check_shapes(config: ModelConfig) -> None:
    """Raise UnsupportedModelError where no kernel has a layer's shape."""
    for mixer in dict.fromkeys(layer.mixer for layer in config.layers):
        if isinstance(mixer, GatedDeltaConfig):
            _check_delta(mixer)
        else:
            _check_heads(mixer.num_heads, mixer.num_kv_heads, mixer.head_size)
    for rope in config.ropes:
        if rope.rotary_size < 2 or rope.rotary_size % 2:
            raise UnsupportedModelError(
                f"RoPE over {rope.rotary_size} elements of a head is not supported; it must be even"
            )


def _check_delta(mixer: GatedDeltaConfig) -> None:
    if mixer.num_value_heads % mixer.num_key_heads:
        raise UnsupportedModelError(
            f"{mixer.num_value_heads} value heads of a gated delta network over {mixer.num_key_heads} key heads are "
            "not supported; the key heads must divide them"
        )
    if mixer.key_size > MAX_HEAD_SIZE or mixer.value_size > MAX_HEAD_SIZE:
        raise UnsupportedModelError(
            f"heads of {mixer.key_size} and {mixer.value_size} elements in a gated delta network are not supported; "
            f"supported: up to {MAX_HEAD_SIZE}"
        )
    if not 2 <= mixer.conv_taps <= MAX_CONV_TAPS:
        raise UnsupportedModelError(
            f"a convolution of {mixer.conv_taps} tokens is not supported; supported: 2 to {MAX_CONV_TAPS}"
        )


def _check_heads(heads: int, kv_heads: int, size: int) -> None:
    if size % 8 or not (0 < size <= MAX_HEAD_SIZE or size == LARGE_HEAD_SIZE):
        raise UnsupportedModelError(
            f"head size {size} is not supported; supported: multiples of 8 up to {MAX_HEAD_SIZE}, and {LARGE_HEAD_SIZE}"
        )
    if heads % kv_heads:
        raise UnsupportedModelError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
