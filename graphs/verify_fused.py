"""Checks what only a fused graph has: that fused operators fit their weights, and that it stands for the plain one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import onnx

from ortolan.contract import LOGIT_ROWS, MAX_KV_LEN, MAX_QUERY_LEN, OPERATOR_DOMAIN, POSITIONS, QUERY_START, TOKEN_IDS
from ortolan.custom_ops.low_bit_schema import WEIGHT_PORTS
from ortolan.errors import ContractMismatchError
from ortolan.graphs.summary import default_inputs
from ortolan.graphs.verify_low_bit import coded_shape

_CAPTURES = {"QkvRopeAppend": 3, "QkvAttention": 4}  # the capture among the outputs
ACTIVATIONS = ("none", "silu_mul", "gelu_mul", "gelu_tanh_mul")


def check_fused_operators(graph: onnx.GraphProto) -> None:
    """Check the sizes and ports of the fused operators, as far as the graph alone tells them.

    Raises:
        ContractMismatchError: an operator would be refused when it runs, or read weights wrongly.
    """
    checker = _Checker(graph)
    checks = {
        "FusedLinear": checker.linear,
        "LowBitLinear": checker.low_bit_linear,
        "QkvRopeAppend": checker.qkv,
        "QkvAttention": checker.qkv_attention,
        "SwaAttention": checker.swa_attention,
        "NormRope": checker.norm_rope,
        "RopeAngles": checker.angles,
        "RmsNormAdd": checker.norm_add,
        "GatherRows": checker.gather_rows,
        "NarrowStep": checker.narrow_step,
        "GateMul": checker.gate_mul,
        "DeltaGates": checker.delta_gates,
    }
    for node in graph.node:
        if node.domain == OPERATOR_DOMAIN and node.op_type in checks:
            checks[node.op_type](node)


def verify_fused_pair(plain: onnx.ModelProto, fused: onnx.ModelProto) -> None:
    """Check that a fused graph takes the inputs and gives the outputs of the plain one, but for inputs with a default.

    Raises:
        ContractMismatchError: a value is missing, new, or of another type or shape.
    """
    defaults = {name for model in (plain, fused) for name in default_inputs(model.graph)}
    for side in ("input", "output"):
        values = [{v.name: v.type for v in getattr(model.graph, side)} for model in (plain, fused)]
        names = (values[0].keys() | values[1].keys()) - defaults
        differing = sorted(name for name in names if values[0].get(name) != values[1].get(name))
        if differing:
            raise ContractMismatchError(
                f"the fused graph's {side}s {differing[:5]} are not those of the plain graph; export the model again"
            )


class _Checker:
    """Follows the number of features of each value from operator to operator."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._dims = {t.name: list(t.dims) for t in graph.initializer}
        casts = [n for n in graph.node if n.op_type == "Cast" and n.input[0] in self._dims]
        self._dims |= {n.output[0]: self._dims[n.input[0]] for n in casts}  # ONNX Runtime folds them
        self._inputs = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
        self._features: dict[str, int] = {}

    def linear(self, node: onnx.NodeProto) -> None:
        """Check a FusedLinear: weights, activation, and that one output is asked for."""
        x, weight, norm_weight, bias, residual, factor = _ports(node.input, 6)
        rows, columns = self._weight_dims(node, "weight", weight, 2)
        given = {"x": x, "norm_weight": norm_weight, "bias": bias, "residual": residual, "factor": factor}
        self._product(node, (rows, columns), given)

    def low_bit_linear(self, node: onnx.NodeProto) -> None:
        """Check a LowBitLinear: codes and what belongs to them, and all that a FusedLinear has."""
        x, *weight, norm_weight, bias, residual = _ports(node.input, 9)
        ports = dict(zip(WEIGHT_PORTS, weight, strict=True))

        def fail(problem: str) -> NoReturn:
            raise _mismatch(node, problem)

        rows, columns = coded_shape(node, ports, self._dims, 2, fail)
        given = {"x": x, "norm_weight": norm_weight, "bias": bias, "residual": residual, "factor": ""}
        self._product(node, (rows, columns), given)

    def _product(self, node: onnx.NodeProto, shape: tuple[int, int], ports: Mapping[str, str]) -> None:
        rows, columns = shape
        activation = _attribute(node, "activation", b"none").decode(errors="replace")
        if activation not in ACTIVATIONS:
            raise _mismatch(node, f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        factor = ports["factor"]
        if factor and (activation == "none" or ports["residual"]):
            raise _mismatch(node, "factor needs a gated activation, and no residual")
        two_part = activation != "none" and not factor
        if two_part and rows % 2:
            raise _mismatch(node, f"weight '{node.input[1]}' has {rows} rows; a gated activation needs an even number")
        size = rows // 2 if two_part else rows
        if factor:
            self._expect_columns(node, "factor", factor, _attribute(node, "factor_offset", 0) + size)
        self._expect(node, "x", ports["x"], columns)
        self._expect(node, "residual", ports["residual"], size)
        self._expect_dims(node, "norm_weight", ports["norm_weight"], [columns])
        self._expect_dims(node, "bias", ports["bias"], [rows])
        asked = [name for name in _ports(node.output, 2) if name]
        if len(asked) != 1:
            raise _mismatch(node, f"exactly one of the outputs y and y_float32 must be asked for, not {len(asked)}")
        self._features[asked[0]] = size

    def qkv(self, node: onnx.NodeProto) -> None:
        """Check a QkvRopeAppend, or all that a QkvAttention has of one: heads, norms, angles and caches."""
        qkv, key_cache, value_cache, *_ = _ports(node.input, 12)
        query_norm, key_norm, cosine, sine, capture, capture_past_len = _ports(node.input, 12)[6:12]
        if bool(cosine) != bool(sine):
            raise _mismatch(node, "cosine and sine belong together; one is missing")
        if len({bool(capture), bool(capture_past_len), bool(_ports(node.output, 5)[_CAPTURES[node.op_type]])}) != 1:
            raise _mismatch(node, "capture, capture_past_len and capture_out belong together; one is missing")
        shapes = [self._inputs.get(name, []) for name in (key_cache, value_cache)]
        if shapes[0] != shapes[1] or len(shapes[0]) != 4:
            raise _mismatch(
                node, f"caches '{key_cache}' and '{value_cache}' must be inputs of one shape [N, Hkv, P, D]"
            )
        _, kv_heads, _, size = shapes[0]
        heads = _attribute(node, "num_heads", 0)
        if heads < 1 or heads % kv_heads:
            raise _mismatch(node, f"num_heads {heads} must be a positive multiple of the {kv_heads} kv heads")
        others = kv_heads if _attribute(node, "value_is_key", 0) else 2 * kv_heads
        self._expect(node, "qkv", qkv, (heads + others) * size)
        self._expect_dims(node, "query_norm_weight", query_norm, [size])
        self._expect_dims(node, "key_norm_weight", key_norm, [size])

    def qkv_attention(self, node: onnx.NodeProto) -> None:
        """Check a QkvAttention.

        No node writes what it may read before the kernel in front of it has ended, and its bounds are the graph's
        inputs, which need not be fed.
        """
        self.qkv(node)  # caches are inputs
        for port, name in zip(("query_start", "past_len", "block_table"), _ports(node.input, 6)[3:], strict=True):
            if name and name not in self._inputs:
                raise _mismatch(node, f"{port} '{name}' must be an input of the graph; a node returns it")
        longest, most_tokens = _ports(node.input, 18)[16:]
        self._expect_promise(node, MAX_KV_LEN, longest)
        self._expect_promise(node, MAX_QUERY_LEN, most_tokens)
        if longest and _attribute(node, "window", -1) > 0:
            raise _mismatch(node, f"{MAX_KV_LEN} bounds full-attention caches, and the node has a window")

    def swa_attention(self, node: onnx.NodeProto) -> None:
        """Check a SwaAttention: its bound is the graph's input, which need not be fed."""
        self._expect_promise(node, MAX_QUERY_LEN, _ports(node.input, 11)[10])

    def _expect_promise(self, node: onnx.NodeProto, port: str, given: str) -> None:
        if given and (given != port or given not in self._inputs or self._dims.get(given) != [1]):
            raise _mismatch(node, f"{port} is '{given}', not the graph's input '{port}' with a default [1]")

    def norm_rope(self, node: onnx.NodeProto) -> None:
        """Check a NormRope: what it multiplies by is a weight."""
        weight = _ports(node.input, 4)[3]
        if weight:
            self._weight_dims(node, "norm_weight", weight, 1)

    def angles(self, node: onnx.NodeProto) -> None:
        """Check a RopeAngles: one list of frequencies."""
        _, name = _ports(node.input, 2)
        dims = self._weight_dims(node, "inv_freq", name, 2)
        if dims[0] != 1 or dims[1] < 1:
            raise _mismatch(node, f"inv_freq '{name}' has the shape {dims}; expected [1, R]")

    def norm_add(self, node: onnx.NodeProto) -> None:
        """Check an RmsNormAdd: one number of features throughout."""
        x, weight, residual, scale = _ports(node.input, 4)
        (size,) = self._weight_dims(node, "norm_weight", weight, 1)
        self._expect(node, "x", x, size)
        if residual:
            self._expect(node, "residual", residual, size)
        self._expect_dims(node, "scale", scale, [1])
        self._features[node.output[0]] = size

    def gate_mul(self, node: onnx.NodeProto) -> None:
        """Check a GateMul: the rows hold the columns that it takes."""
        x, gate, weight, residual = _ports(node.input, 4)
        size, gates = _attribute(node, "size", 0), _attribute(node, "gate_size", 0)
        gates = gates or size
        if size < 1 or size % gates:
            raise _mismatch(node, f"gate_size {gates} must divide size {size}")
        self._expect_columns(node, "x", x, _attribute(node, "x_offset", 0) + size)
        self._expect_columns(node, "gate", gate, _attribute(node, "gate_offset", 0) + gates)
        if weight and size % self._weight_dims(node, "norm_weight", weight, 1)[0]:
            raise _mismatch(node, f"norm_weight '{weight}' must have a number of elements that divides size {size}")
        if residual:
            self._expect(node, "residual", residual, size)
        self._features[node.output[0]] = size

    def delta_gates(self, node: onnx.NodeProto) -> None:
        """Check a DeltaGates: the rows hold a column for each head."""
        decays, betas, a_log, dt_bias = _ports(node.input, 4)
        (heads,) = self._weight_dims(node, "a_log", a_log, 1)
        self._expect_dims(node, "dt_bias", dt_bias, [heads])
        self._expect_columns(node, "decay_rows", decays, _attribute(node, "decay_offset", 0) + heads)
        self._expect_columns(node, "beta_rows", betas, _attribute(node, "beta_offset", 0) + heads)

    def gather_rows(self, node: onnx.NodeProto) -> None:
        """Check a GatherRows: it takes the rows that the caller wants, or those of tokens in a table."""
        x, indices = _ports(node.input, 2)
        wanted = TOKEN_IDS if x in self._dims else LOGIT_ROWS
        if indices != wanted:
            raise _mismatch(node, f"row_indices is '{indices}', not the graph's input '{wanted}'")
        features = self._weight_dims(node, "rows", x, 2)[1] if x in self._dims else self._features.get(x)
        if features is not None:
            self._features[node.output[0]] = features

    def narrow_step(self, node: onnx.NodeProto) -> None:
        """Check a NarrowStep: it narrows the step's own inputs to the rows that the caller wants."""
        starts, _, indices, positions = _ports(node.input, 4)
        given = {"query_start": (starts, QUERY_START), "row_indices": (indices, LOGIT_ROWS)}
        for port, (name, wanted) in (given | {"positions": (positions or POSITIONS, POSITIONS)}).items():
            if name != wanted:
                raise _mismatch(node, f"{port} is '{name}', not the graph's input '{wanted}'")
        if bool(positions) != bool(_ports(node.output, 3)[2]):
            raise _mismatch(node, "positions and positions_out belong together; one is missing")

    def _weight_dims(self, node: onnx.NodeProto, port: str, name: str, rank: int) -> list[int]:
        dims = self._dims.get(name)
        if dims is None or len(dims) != rank:
            raise _mismatch(node, f"{port} '{name}' must be a weight of rank {rank}; it is {dims or 'no weight'}")
        return dims

    def _expect_dims(self, node: onnx.NodeProto, port: str, name: str, expected: list[int]) -> None:
        if name and self._dims.get(name) != expected:
            raise _mismatch(node, f"{port} '{name}' must be a weight {expected}; it is {self._dims.get(name, 'none')}")

    def _expect(self, node: onnx.NodeProto, port: str, name: str, features: int) -> None:
        """Check a value's features where an operator before told them."""
        if self._features.get(name, features) != features:
            raise _mismatch(node, f"{port} '{name}' has {self._features[name]} features, expected {features}")

    def _expect_columns(self, node: onnx.NodeProto, port: str, name: str, count: int) -> None:
        """Check that a value has so many features or more, where an operator before told them."""
        if self._features.get(name, count) < count:
            raise _mismatch(node, f"{port} '{name}' has {self._features[name]} features, expected {count} or more")


def _ports(names: Iterable[str], count: int) -> list[str]:
    """Return `count` names; an optional port that is left out is empty."""
    return [*names, *[""] * count][:count]


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else onnx.helper.get_attribute_value(found)


def _mismatch(node: onnx.NodeProto, problem: str) -> ContractMismatchError:
    return ContractMismatchError(f"rule 7: node '{node.name}', a {node.op_type}: {problem}")
