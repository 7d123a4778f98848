"""A norm after a branch, then the residual: Add(residual, RMSNormalization(branch)) becomes one RmsNormAdd."""

from __future__ import annotations

from ortolan.custom_ops import emitters
from ortolan.graphs.fusions.gemm import DEFAULT_EPSILON, is_last_axis
from ortolan.graphs.fusions.linear import is_rows_of
from ortolan.graphs.fusions.rewriter import GraphRewriter, Node, Tensor, only_user, produced_by


def fuse_norm_adds(rewriter: GraphRewriter) -> None:
    """Rewrite each Add of a norm that nothing else reads."""
    for add in rewriter.nodes("Add"):
        for branch, residual in (add.inputs, reversed(add.inputs)):
            norm = produced_by(branch, "RMSNormalization")
            if norm is not None and only_user(rewriter, branch) is add and _fits(rewriter, norm, residual):
                _fuse(rewriter, add, norm, residual)
                break


def _fits(rewriter: GraphRewriter, norm: Node, residual: Tensor) -> bool:
    weight = rewriter.weight(norm.inputs[1])
    if weight is None or not is_last_axis(rewriter, norm):
        return False
    features = int(weight.proto.dims[0])
    return all(is_rows_of(rewriter, tensor, features) for tensor in (norm.inputs[0], residual))


def _fuse(rewriter: GraphRewriter, add: Node, norm: Node, residual: Tensor) -> None:
    rewriter.operator(
        f"{str(add.name).rsplit('/', 1)[0]}/RmsNormAdd",
        emitters.rms_norm_add,
        {"x": norm.inputs[0], "norm_weight": norm.inputs[1], "residual": residual},
        [add.outputs[0]],
        epsilon=float(norm.attrs.get("epsilon", DEFAULT_EPSILON)),
    )
