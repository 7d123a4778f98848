"""A gated MLP and a mixture of experts side by side (Gemma 4).

    norm(mlp(norm(x))) + norm(experts(norm(x)))

Source: transformers' modeling_gemma4.py, `Gemma4TextDecoderLayer` and `Gemma4TextRouter`.
"""

from __future__ import annotations

from ortolan.graphs.builder import Tensor
from ortolan.graphs.config import BesideConfig
from ortolan.graphs.kinds import LayerKind, Shapes
from ortolan.graphs.mlps import experts, gated
from ortolan.graphs.parts import Normed, Parts

NORMS = ("dense_post_norm", "experts_norm", "experts_post_norm", "router_norm")


def weights(config: BesideConfig, hidden_size: int) -> Shapes:
    """List the weights: those of both, norms, and a factor of each expert."""
    norms: Shapes = {f"mlp.{name}.weight": (hidden_size,) for name in NORMS}
    scale: Shapes = {"mlp.router.expert_scale": (config.experts.num_experts,)}
    return gated.weights(config.dense, hidden_size) | experts.weights(config.experts, hidden_size) | norms | scale


def add(parts: Parts, index: int, x: Tensor | Normed, residual: Tensor | None) -> Tensor:
    """Add both, [T, hidden] -> [T, hidden]; the experts read what the norm before the MLP reads."""
    assert isinstance(x, Normed), "the layer's norms come before and after"
    config, path = parts.config.layers[index].mlp, f"layers.{index}/mlp"
    inner = parts.gated(path, x, config.dense.activation)
    dense = parts.post_norm(f"{path}/dense_post_norm", parts.linear(f"{path}/down", inner))
    mixed = experts.mix(
        parts,
        index,
        config.experts,
        {
            "rows": parts.value(parts.norm(f"{path}/experts_norm", x.x)),
            "logits": _logits(parts, path, x.x),
            "expert_scale": _expert_scale(parts, path),
        },
    )
    both = parts.norm_add(f"{path}/sum", parts.post_norm(f"{path}/experts_post_norm", mixed), parts.value(dense))
    return parts.add_residual(f"{path}/residual", both, residual)


def _logits(parts: Parts, path: str, hidden: Tensor) -> Tensor:
    logits = parts.linear(f"{path}/router", parts.norm(f"{path}/router_norm", hidden))
    scale = parts.scalar(f"{path}/router/scale", parts.config.hidden_size**-0.5)
    return parts.graph.node(f"{path}/router/scale/Mul", "Mul", [logits, scale])


def _expert_scale(parts: Parts, path: str) -> Tensor:
    weight = parts.weight(f"{path}.router.expert_scale".replace("/", "."))
    return parts.in_float32(f"{path}/router/expert_scale/Cast", weight)


MLP = LayerKind(weights=weights, add=add, joint=gated.MLP.joint)
