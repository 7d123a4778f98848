"""Reads `layer_types`, the list that says which layers have a sliding window."""

from __future__ import annotations

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.hf_config import HfConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(config: HfConfig, default: list[str]) -> list[str]:
    """Return the type of each layer; `default` where the config does not list them.

    Raises:
        CheckpointError: the list has another length than the model has layers.
        UnsupportedModelError: a type is neither full nor sliding attention.
    """
    types = config.sequence("layer_types", str, default)
    count = config.integer("num_hidden_layers")
    if len(types) != count:
        raise CheckpointError(f"config.json: layer_types lists {len(types)} layers, num_hidden_layers is {count}")
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModelError(f"layer types {unknown} are not supported; supported: {FULL}, {SLIDING}")
    return types


def read_layer_types(config: HfConfig, default: list[str], window: int | None) -> list[int]:
    """Return each layer's window, -1 for full attention.

    Raises:
        CheckpointError: a layer is sliding and the config gives no window.
    """
    types = layer_types(config, default)
    if SLIDING in types and window is None:
        raise CheckpointError("config.json: layer_types has sliding_attention, but there is no sliding_window in use")
    return [window if kind == SLIDING and window else -1 for kind in types]
