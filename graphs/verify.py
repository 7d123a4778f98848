"""Checks a decoder graph against Ortolan's own contract, beyond what onnx.checker knows."""

from __future__ import annotations

from itertools import pairwise

import onnx

from ortolan import contract
from ortolan.contract import OPERATOR_DOMAIN
from ortolan.custom_ops import register_schemas
from ortolan.errors import ContractMismatchError
from ortolan.graphs.external_data import read_external_data
from ortolan.graphs.verify_experts import check_experts
from ortolan.graphs.verify_fused import check_fused_operators
from ortolan.graphs.verify_paged import APPENDS, check_pages
from ortolan.graphs.verify_scales import check_scales

# What ONNX Runtime has in the standard domain and ONNX has not; converted graphs keep it.
_RUNTIME_OPERATORS = frozenset(("SimplifiedLayerNormalization",))
_RUNTIME_DOMAIN = "com.microsoft"


def verify_model(model: onnx.ModelProto) -> None:
    """Check names, operators and the order of cache reads of a decoder graph, plain or fused.

    The rules, in order:
        1. onnx.checker accepts the structure, and every operator of Ortolan's domain exists.
        2. Node names are unique and not empty.
        3. The step's inputs and the logits are there, and every cache comes with its output.
        4. Windows, sinks and capacities obey the operator contract.
        5. Attention reads the caches that an append of the same graph returned.
        6. No two weights have bytes in common: a session would hold them twice.
        7. Fused operators fit their weights and each other.
        8. Either no cache is paged, or all are, and each is reached through one block table, that of its window.
        9. The experts of a mixture fit their weights, their gate and its router.
        10. Caches of codes, and no others, come with scales, and attention reads those that an append returned.

    Raises:
        ContractMismatchError: a rule does not hold; the message names the node or value.
    """
    register_schemas()
    _check_onnx(model)
    _check_names(model.graph)
    _check_contract(model.graph)
    for node in model.graph.node:
        if node.domain == OPERATOR_DOMAIN:
            _check_attributes(node)
    _check_reads(model.graph)
    _check_weights(model.graph)
    check_fused_operators(model.graph)
    check_pages(model.graph)
    check_experts(model.graph)
    check_scales(model.graph)


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy for onnx.checker: external weights are inputs, ONNX Runtime's operators have its domain."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for tensor in bare.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            bare.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for node in bare.graph.node:
        if node.op_type in _RUNTIME_OPERATORS and not node.domain:
            node.domain = _RUNTIME_DOMAIN
    kept = [t for t in bare.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    return bare


def _check_onnx(model: onnx.ModelProto) -> None:
    bare = without_weights(model)
    try:
        onnx.checker.check_model(bare)
        onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ContractMismatchError(f"rule 1: onnx rejects the graph: {error}") from error
    for node in model.graph.node:
        if node.domain == OPERATOR_DOMAIN and not onnx.defs.has(node.op_type, OPERATOR_DOMAIN):
            raise ContractMismatchError(f"rule 1: node '{node.name}' is a {node.op_type}, which Ortolan does not have")


def _check_names(graph: onnx.GraphProto) -> None:
    seen: set[str] = set()
    for node in graph.node:
        if not node.name or node.name in seen:
            raise ContractMismatchError(f"rule 2: node name {node.name!r} of a {node.op_type} is empty or not unique")
        seen.add(node.name)


def _check_contract(graph: onnx.GraphProto) -> None:
    inputs, outputs = {i.name for i in graph.input}, {o.name for o in graph.output}
    wanted = {contract.TOKEN_IDS, contract.QUERY_START, contract.PAST_LEN, contract.LOGIT_ROWS}
    if not wanted <= inputs or contract.LOGITS not in outputs:
        raise ContractMismatchError(
            f"rule 3: inputs {sorted(wanted - inputs)} or the output '{contract.LOGITS}' are missing"
        )
    caches = {n for n in inputs if n.endswith((".key_cache", ".value_cache", ".key_scale", ".value_scale", ".capture"))}
    alone = sorted(n for n in caches if contract.output(n) not in outputs)
    if alone or not caches:
        raise ContractMismatchError(f"rule 3: caches without their output: {alone or 'there is no cache'}")


def _check_attributes(node: onnx.NodeProto) -> None:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    window, sink, capacity = values.get("window", -1), values.get("sink", 0), values.get("capacity", 0)
    if window == 0 or window < -1 or sink < 0 or capacity < 0:
        raise ContractMismatchError(
            f"rule 4: node '{node.name}' has window {window}, sink {sink}, capacity {capacity}; "
            "window is -1 or at least 1, the others at least 0"
        )
    if capacity and capacity < sink + max(window, 1):
        raise ContractMismatchError(
            f"rule 4: node '{node.name}' has capacity {capacity}, less than sink {sink} + window {window}"
        )


def _check_reads(graph: onnx.GraphProto) -> None:
    appends = [n for n in graph.node if n.domain == OPERATOR_DOMAIN and n.op_type in APPENDS]
    for index, kind in enumerate(("key", "value")):
        returned = {name for n in appends for name in list(n.output)[APPENDS[n.op_type] + index :][:1]}
        for node in graph.node:
            if node.op_type != "SwaAttention" or node.domain != OPERATOR_DOMAIN or node.input[1 + index] in returned:
                continue
            raise ContractMismatchError(
                f"rule 5: node '{node.name}' reads '{node.input[1 + index]}', which no {' or '.join(APPENDS)} returned "
                f"as {kind} cache; it must read the append's output, or nothing orders the two"
            )


def _check_weights(graph: onnx.GraphProto) -> None:
    placed = [(t.name, read_external_data(t)) for t in graph.initializer if t.external_data]
    placed.sort(key=lambda entry: (entry[1].location, entry[1].offset))
    for (name, where), (other, after) in pairwise(placed):
        if where.location == after.location and where.end > after.offset:
            raise ContractMismatchError(
                f"rule 6: weights '{name}' and '{other}' have bytes of {where.location} in common"
            )
