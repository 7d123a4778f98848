"""Per-layer embeddings: each layer reads a share of its own of a second, wide embedding of the tokens (Gemma 3n, 4).

    share = (RMSNorm(projection(embedding) / sqrt(hidden)) + second embedding * sqrt(size)) / sqrt(2)
    hidden = hidden + RMSNorm(out(activation(gate(hidden)) * share))        after attention and MLP of each layer

Source: transformers' modeling_gemma4.py, `project_per_layer_inputs` and `Gemma4TextDecoderLayer`.
"""

from __future__ import annotations

import math

from ortolan import contract
from ortolan.graphs.builder import Tensor
from ortolan.graphs.config import ModelConfig
from ortolan.graphs.kinds import Shapes, linear_shapes
from ortolan.graphs.parts import Columns, Normed, Parts

STEM = "layer_inputs"
NORM = "layer_input_norm"


def model_shapes(config: ModelConfig) -> Shapes:
    """List the weights that all layers share."""
    if config.layer_inputs is None:
        return {}
    width = len(config.layers) * config.layer_inputs.size
    return {
        contract.LAYER_TABLE: (config.layer_inputs.vocab_size, width),
        f"{STEM}.projection.weight": (width, config.hidden_size),
        f"{STEM}.norm.weight": (config.layer_inputs.size,),
    }


def layer_shapes(config: ModelConfig) -> Shapes:
    """List the weights of one layer, by their names inside it."""
    if config.layer_inputs is None:
        return {}
    size, hidden = config.layer_inputs.size, config.hidden_size
    linear = linear_shapes({"layer_input.gate": (size, hidden, False), "layer_input.out": (hidden, size, False)})
    return linear | {f"{NORM}.weight": (hidden,)}


def prepare_layer_inputs(parts: Parts, token_ids: Tensor, embedded: Tensor) -> Tensor:
    """Compute the shares of all layers once a step.

    Args:
        parts: of the decoder.
        token_ids: [T].
        embedded: the scaled embeddings, [T, hidden].

    Returns:
        [T, layers * size].
    """
    graph, config, options = parts.graph, parts.config, parts.config.layer_inputs
    assert options is not None, "a model without per-layer embeddings has none to prepare"
    count = len(config.layers)
    wide = parts.look_up(f"{STEM}/embedding", parts.weight(contract.LAYER_TABLE), token_ids)
    wide = parts.scale(f"{STEM}/embedding", wide, parts.scalar(f"{STEM}/embedding/scale", math.sqrt(options.size)))
    own = graph.reshape(f"{STEM}/embedding/Reshape", wide, (-1, options.size))
    projected = parts.linear(f"{STEM}/projection", embedded)
    rows = graph.reshape(f"{STEM}/projected/Reshape", projected, (-1, options.size))
    # RMSNorm(x / sqrt(h)) with epsilon e is RMSNorm(x) with epsilon e * h.
    norm = Normed(rows, f"{STEM}/norm", config.norm_epsilon * config.hidden_size)
    total = parts.norm_add(f"{STEM}/sum", norm, own, (f"{count} * {parts.row_axis}", options.size))
    shares = parts.scale(f"{STEM}/sum", total, parts.vector(f"{STEM}/sum/scale", math.sqrt(0.5)))
    return graph.reshape(f"{STEM}/shares/Reshape", shares, (-1, count * options.size))


def add_layer_input(parts: Parts, index: int, hidden: Tensor, shares: Tensor) -> Tensor:
    """Add what a layer makes of its share.

    Args:
        parts: of the decoder.
        index: of the layer.
        hidden: after attention and MLP, [T, hidden].
        shares: of all layers, [T, layers * size].

    Returns:
        [T, hidden].
    """
    options, path = parts.config.layer_inputs, f"layers.{index}/layer_input"
    assert options is not None, "a model without per-layer embeddings has no shares"
    share = Columns(shares, index * options.size)
    gated = parts.open_gate(path, hidden, share, options.size, options.activation)
    branch = Normed(parts.linear(f"{path}/out", gated), f"layers.{index}/{NORM}", parts.config.norm_epsilon)
    return parts.norm_add(f"{path}_residual", branch, hidden)
