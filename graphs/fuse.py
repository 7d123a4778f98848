"""Writes the fused graph: the plain decoder with CUDA operators of ours where a decode step spends its time."""

from __future__ import annotations

import json
from collections import Counter

import onnx

from ortolan.custom_ops import register_schemas
from ortolan.custom_ops.schema import OPERATORS
from ortolan.graphs.fusions.angles import fuse_angles, list_angles_late
from ortolan.graphs.fusions.gated_mlp import fuse_gated_mlp
from ortolan.graphs.fusions.last_rows import fuse_last_rows
from ortolan.graphs.fusions.linear import fuse_linears
from ortolan.graphs.fusions.norm_add import fuse_norm_adds
from ortolan.graphs.fusions.qkv import fuse_qkv
from ortolan.graphs.fusions.rewriter import GraphRewriter

FUSIONS_METADATA = "ortolan.fusions"
FUSED_DOC_STRING = " Fused for CUDA: computes what model.onnx does, over the same weights and the same bindings."
_PLAIN = ("Gemm", "RMSNormalization", "RotaryEmbedding", "RingKvAppend")


def fuse_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fuse a decoder graph for CUDA; inputs, outputs and the bytes of the weights stay what they are.

    The rewrites, in order: `fusions.qkv`, `fusions.angles`, `fusions.gated_mlp`, `fusions.linear`, `fusions.norm_add`,
    `fusions.last_rows`.
    A part whose pattern, uses or weight layout differ stays plain. Joined weights point at the range of bytes that
    their parts have in common, so a session of the fused graph holds each weight once.

    Args:
        model: what `build_model` made, with external data attached; it is not changed.

    Returns:
        The fused model; its metadata `ortolan.fusions` counts fused operators, and plain ones that are left.

    Raises:
        ContractMismatchError: a weight does not say where its bytes lie.
    """
    register_schemas()
    rewriter = GraphRewriter(model)
    for rewrite in (fuse_qkv, fuse_angles, fuse_gated_mlp, fuse_linears, fuse_norm_adds, fuse_last_rows):
        rewrite(rewriter)
        rewriter.sweep()
    fused = rewriter.finish()
    list_angles_late(fused.graph)
    fused.graph.doc_string = model.graph.doc_string + FUSED_DOC_STRING
    fused.metadata_props.add(key=FUSIONS_METADATA, value=json.dumps(count_fusions(fused)))
    return fused


def count_fusions(model: onnx.ModelProto) -> dict[str, int]:
    """Count the fused operators of a graph, and the plain ones that they could stand for."""
    counts = Counter(node.op_type for node in model.graph.node)
    fused = [operator.name for operator in OPERATORS if operator.cuda_only]
    return {name: counts[name] for name in (*fused, *_PLAIN)}
