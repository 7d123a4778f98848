"""Reads the lists that say which layers have a sliding window, and which ones a mixture of experts."""

from __future__ import annotations

from ortolan.errors import CheckpointError, UnsupportedModelError
from ortolan.export.hf_config import HfConfig

FULL, SLIDING = "full_attention", "sliding_attention"
DENSE, SPARSE = "dense", "sparse"


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


def read_mixtures(config: HfConfig, default: list[bool]) -> list[bool]:
    """Return of each layer whether its MLP is a mixture, as `mlp_layer_types` says.

    Raises:
        CheckpointError: the list has another length than the model has layers.
        UnsupportedModelError: a type is neither dense nor sparse.
    """
    types = config.sequence("mlp_layer_types", str, [SPARSE if is_mixture else DENSE for is_mixture in default])
    count = config.integer("num_hidden_layers")
    if len(types) != count:
        raise CheckpointError(f"config.json: mlp_layer_types lists {len(types)} layers, num_hidden_layers is {count}")
    if unknown := sorted(set(types) - {DENSE, SPARSE}):
        raise UnsupportedModelError(
            f"config.json: mlp_layer_types has {', '.join(unknown)}; supported: {DENSE}, {SPARSE}"
        )
    return [kind == SPARSE for kind in types]
