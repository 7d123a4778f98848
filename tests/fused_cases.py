"""Draws inputs of the fused operators, runs them through ONNX Runtime, and computes them in plain low precision."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import devices
import numpy as np
import onnx
import onnxruntime as ort
from attention_cases import block_table
from expand_fused import expand_fused
from harness import find_operator

import ortolan.custom_ops
from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters, fused_reference
from ortolan.custom_ops.codegen import snake_case

Feeds = dict[str, np.ndarray]
Outputs = dict[str, tuple[tuple[int, ...], np.dtype]]  # shape and type by port
FACTOR_OFFSET = 3  # first column of a FusedLinear's factor
SUM_STEP = 16  # products that a tensor core sums at once


def build_fused_model(
    name: str, feeds: Mapping[str, np.ndarray], outputs: Outputs, attributes: Mapping[str, object]
) -> onnx.ModelProto:
    """Build a model of one node that asks for some of its outputs; shapes are free."""
    ports = [port.name if port.name in outputs else "" for port in find_operator(name).outputs]
    while not ports[-1]:
        ports.pop()
    emit = getattr(emitters, snake_case(name))
    node = emit(**{port: port for port in feeds}, outputs=tuple(ports), name=f"test/{name}", **attributes)
    inputs = [_declare(k, v.dtype, v.ndim) for k, v in feeds.items()]
    results = [_declare(k, dtype, len(shape)) for k, (shape, dtype) in outputs.items()]
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION)]
    graph = onnx.helper.make_graph([node], "test", inputs, results)
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _declare(name: str, dtype: np.dtype, rank: int) -> onnx.ValueInfoProto:
    dims = [f"{name}_{axis}" for axis in range(rank)]
    return onnx.helper.make_tensor_value_info(name, devices.ONNX_TYPES[dtype], dims)


@functools.lru_cache(maxsize=8)
def _session(model: bytes, device: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ortolan.custom_ops.register(options)
    return ort.InferenceSession(model, options, providers=[devices.PROVIDERS[device]])


def run_fused(
    name: str,
    feeds: Mapping[str, np.ndarray],
    outputs: Outputs,
    in_place: Mapping[str, str] | None = None,
    **attributes: object,
) -> Feeds:
    """Run one fused operator on the device of the test; `in_place` binds an output to the buffer of an input."""
    model = build_fused_model(name, feeds, outputs, attributes).SerializeToString(deterministic=True)
    session = _session(model, devices.current())
    return devices.run(session, feeds, outputs, in_place)


def run_expanded(name: str, feeds: Feeds, outputs: Outputs, **attributes: object) -> Feeds:
    """Run standard operators in the place of a fused one, on the CPU."""
    model = build_fused_model(name, feeds, outputs, attributes)
    for value in model.graph.input:
        value.CopyFrom(
            onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, feeds[value.name].shape)
        )
    options = ort.SessionOptions()
    ortolan.custom_ops.register(options)
    expanded = expand_fused(model).SerializeToString()
    session = ort.InferenceSession(expanded, options, providers=[devices.PROVIDERS["cpu"]])
    return dict(zip(outputs, session.run(list(outputs), dict(feeds)), strict=True))


def run_model(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    outputs: Outputs,
    in_place: Mapping[str, str] | None = None,
) -> Feeds:
    """Run any model on the device of the test; `in_place` as in `run_fused`."""
    session = _session(model.SerializeToString(deterministic=True), devices.current())
    return devices.run(session, feeds, outputs, in_place)


def linear_chain(
    nodes: Mapping[str, tuple[str, str, str]], size: int, attributes: Mapping[str, object]
) -> onnx.ModelProto:
    """Build a model of FusedLinear nodes whose shapes ONNX Runtime knows; the last node gives the result.

    Args:
        nodes: by the value [T, size] that each gives, its x, weight [size, size] and residual, or "".
        size: features of all values.
        attributes: of each node.
    """

    def describe(name: str) -> onnx.ValueInfoProto:
        dims = [size, size] if name.startswith("weight") else ["T", size]
        return onnx.helper.make_tensor_value_info(name, devices.ONNX_TYPES[devices.element()], dims)

    protos = [
        emitters.fused_linear(x, weight, residual=residual, outputs=(y,), name=f"test/{y}", **attributes)
        for y, (x, weight, residual) in nodes.items()
    ]
    inputs = sorted({name for ports in nodes.values() for name in ports if name} - nodes.keys())
    *inner, last = map(describe, nodes)
    graph = onnx.helper.make_graph(protos, "test", list(map(describe, inputs)), [last], value_info=inner)
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def angle_feeds(tokens: int, pairs: int) -> Feeds:
    """Positions [T] up to a million, the first ones among them, and frequencies [1, R] as RoPE has them."""
    positions = np.concatenate([np.arange(tokens // 2), np.linspace(tokens, 1e6, tokens - tokens // 2)])
    inv_freq = 10_000.0 ** -(np.arange(pairs) / pairs)
    return {"positions": positions.astype(np.int64), "inv_freq": inv_freq.astype(np.float32)[None]}


def angle_outputs(feeds: Feeds) -> Outputs:
    """Both outputs of RopeAngles."""
    shape = (1, len(feeds["positions"]), feeds["inv_freq"].shape[1])
    return dict.fromkeys(("cosine", "sine"), (shape, np.dtype(np.float32)))


def narrow_outputs(feeds: Feeds) -> Outputs:
    """The outputs of a NarrowStep, with positions where it has them."""
    sources = {"query_start_out": "query_start", "past_len_out": "past_len", "positions_out": "row_indices"}
    given = {port: feeds[source] for port, source in sources.items()}
    if "positions" not in feeds:
        del given["positions_out"]
    return {port: (array.shape, array.dtype) for port, array in given.items()}


def rounded(values: np.ndarray, element: np.dtype) -> np.ndarray:
    """Round float32 values to the element type, as between the operators of a plain graph."""
    return values.astype(element).astype(np.float32)


def plain_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """RMSNorm in float32, rounded to the type of x."""
    wide = x.astype(np.float32)
    scale = 1 / np.sqrt((wide**2).mean(axis=-1, keepdims=True, dtype=np.float32) + np.float32(epsilon))
    return rounded(wide * scale * weight.astype(np.float32), x.dtype)


def norm_feeds(rng, tokens, size, element, follows=("residual",)):
    """Draw the inputs of an RmsNormAdd, with those that follow the norm."""
    shapes = {"x": (tokens, size), "norm_weight": (size,), "residual": (tokens, size), "scale": (1,)}
    names = ("x", "norm_weight", *follows)
    return {name: (3 * rng.standard_normal(shapes[name])).astype(element) for name in names}


def plain_norm_add(feeds, epsilon):
    """Compute an RmsNormAdd by plain operators of its type, rounding after each."""
    y = plain_norm(feeds["x"], feeds["norm_weight"], epsilon)
    if "residual" in feeds:
        y = y + feeds["residual"].astype(np.float32)
    return y * feeds["scale"].astype(np.float32) if "scale" in feeds else y


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCase:
    """Options of one FusedLinear."""

    norm: bool = False
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    float32: bool = False
    factor: bool = False

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the node."""
        offset = {"factor_offset": FACTOR_OFFSET} if self.factor else {}
        return {"epsilon": 1e-5, "activation": self.activation, **offset}

    @property
    def is_two_part(self) -> bool:
        """Whether the weight has rows of gates and as many of factors."""
        return self.activation != "none" and not self.factor

    def __str__(self) -> str:
        given = [name for name in ("norm", "bias", "residual", "factor", "float32") if getattr(self, name)]
        return "-".join([self.activation, *given])


def linear_feeds(case: LinearCase, tokens: int, size: int, outputs: int, seed: int = 0) -> Feeds:
    """Draw x [T, I], weights and what else the case takes; results are about 1."""
    rng, element = np.random.default_rng([seed, tokens, size, outputs]), devices.element()
    rows = 2 * outputs if case.is_two_part else outputs

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(element)

    feeds = {"x": draw(tokens, size), "weight": draw(rows, size, scale=size**-0.5)}
    optional = {
        "norm_weight": (case.norm, (size,)),
        "bias": (case.bias, (rows,)),
        "residual": (case.residual, (tokens, outputs)),
        "factor": (case.factor, (tokens, FACTOR_OFFSET + outputs + 2)),
    }
    return feeds | {name: draw(*shape) for name, (given, shape) in optional.items() if given}


def linear_outputs(case: LinearCase, feeds: Feeds) -> Outputs:
    """The one output that the case asks for."""
    rows = len(feeds["weight"])
    shape = (len(feeds["x"]), rows // 2 if case.is_two_part else rows)
    return {"y_float32": (shape, np.dtype(np.float32))} if case.float32 else {"y": (shape, feeds["x"].dtype)}


def plain_product(x: np.ndarray, weight: np.ndarray, *, truncate: bool) -> np.ndarray:
    """Return x @ weight^T summed in float32 step by step; tensor cores round each partial sum towards zero."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, x.shape[1], SUM_STEP):
        step = slice(begin, begin + SUM_STEP)
        if not truncate:
            total += x[:, step] @ weight[:, step].T
            continue
        exact = total + x[:, step].astype(np.float64) @ weight[:, step].T.astype(np.float64)
        total = exact.astype(np.float32)
        total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
    return total


def plain_linear(case: LinearCase, feeds: Feeds) -> np.ndarray:
    """Compute the case as standard operators do: float32 inside each, rounded between them, [T, O] float32."""
    element = feeds["x"].dtype
    x = plain_norm(feeds["x"], feeds["norm_weight"], 1e-5) if case.norm else feeds["x"].astype(np.float32)
    y = plain_product(x, feeds["weight"].astype(np.float32), truncate=case.float32 and element != np.float32)
    if case.bias:
        y = y + feeds["bias"].astype(np.float32)
    if case.activation != "none":
        gate, factor = np.split(rounded(y, element), 2, axis=1) if case.is_two_part else (rounded(y, element), None)
        if factor is None:
            factor = feeds["factor"][:, FACTOR_OFFSET : FACTOR_OFFSET + y.shape[1]].astype(np.float32)
        y = (
            rounded(fused_reference.GATES[case.activation](gate.astype(np.float64)).astype(np.float32), element)
            * factor
        )
    if case.residual:
        y = rounded(y, element) + feeds["residual"].astype(np.float32)
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvCase:
    """Sizes and options of one QkvRopeAppend; `past` may be per kv head."""

    tokens: Sequence[int] = (1,)
    past: Sequence[int] | Sequence[Sequence[int]] = (0,)
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    pairs: int = 8  # R; 0: no RoPE
    norms: Sequence[str] = ()
    slots: int = 64  # C
    sink: int = 0
    page_slots: int = 0  # 0: contiguous
    capture_rows: int | None = None  # Wq; None: no capture
    value_norm: bool = False
    value_is_key: bool = False
    code: np.dtype | None = None  # of caches; None: they hold elements

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the node."""
        flags = {"value_norm": int(self.value_norm), "value_is_key": int(self.value_is_key)}
        return {"num_heads": self.heads, "epsilon": 1e-6, "sink": self.sink, "capacity": self.slots, **flags}


def qkv_feeds(case: QkvCase, seed: int = 0) -> Feeds:
    """Draw a step; every slot of the caches holds NaN."""
    rng, element, total = np.random.default_rng(seed), devices.element(), sum(case.tokens)
    heads = case.heads + (1 if case.value_is_key else 2) * case.kv_heads
    width, sequences = heads * case.size, len(case.tokens)
    pages, table = sequences, {}
    if case.page_slots:
        each = -(-case.slots // case.page_slots)
        table, pages = {"block_table": block_table(sequences, each, rng)}, sequences * each + 2
    caches = np.full((pages, case.kv_heads, case.page_slots or case.slots, case.size), np.nan, element)
    feeds = {
        "qkv": (3 * rng.standard_normal((total, width))).astype(element),
        "key_cache": caches,
        "value_cache": caches.copy(),
        "query_start": np.cumsum([0, *case.tokens]).astype(np.int32),
        "past_len": np.array(case.past, np.int32),
        **table,
    }
    if case.code is not None:
        feeds |= {f"{name}_cache": np.full(caches.shape, 7).astype(case.code) for name in ("key", "value")}
        feeds |= {f"{name}_scale": np.full(caches.shape[:3], np.nan, np.float32) for name in ("key", "value")}
    feeds |= {f"{n}_norm_weight": (1 + rng.standard_normal(case.size)).astype(element) for n in case.norms}
    if case.pairs:
        angles = rng.uniform(-1e3, 1e3, (1, total, case.pairs))
        feeds |= {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
    if case.capture_rows is not None:
        feeds["capture"] = np.full((sequences, case.capture_rows, case.heads, case.size), np.nan, element)
        feeds["capture_past_len"] = (1000 + np.arange(sequences)).astype(np.int32)
    return feeds


def norm_rope_feeds(case: QkvCase, qkv: Feeds) -> Feeds:
    """Take the query heads of a joint projection, and what is done to them, as NormRope does it."""
    heads = qkv["qkv"][:, : case.heads * case.size].reshape(-1, case.heads, case.size)
    names = {"cosine": "cosine", "sine": "sine", "query_norm_weight": "norm_weight"}
    return {"heads": heads, **{ours: qkv[theirs] for theirs, ours in names.items() if theirs in qkv}}


def qkv_outputs(case: QkvCase, feeds: Feeds) -> Outputs:
    """All outputs of the operator."""
    element = feeds["qkv"].dtype
    names = ("key_cache", "value_cache", "key_scale", "value_scale")
    caches = {f"{name}_out": (feeds[name].shape, feeds[name].dtype) for name in names if name in feeds}
    if case.capture_rows is not None:
        caches["capture_out"] = ((len(case.tokens), case.capture_rows, case.heads, case.size), element)
    return {"query": ((len(feeds["qkv"]), case.heads, case.size), element), **caches}


def plain_heads(case: QkvCase, feeds: Feeds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute queries [T, Hq, D], and keys and values [T, Hkv, D], as standard operators do."""
    shape = (len(feeds["qkv"]), -1, case.size)
    query, key, value = np.split(feeds["qkv"].reshape(shape), [case.heads, case.heads + case.kv_heads], axis=1)
    results = []
    for name, x in zip(("query", "key"), (query, key), strict=True):
        weight = feeds.get(f"{name}_norm_weight")
        wide = x.astype(np.float32) if weight is None else plain_norm(x, weight, 1e-6)
        if case.pairs:
            c, s = (feeds[angle][0][:, None] for angle in ("cosine", "sine"))
            first, second, rest = np.split(wide, [case.pairs, 2 * case.pairs], axis=2)
            wide = np.concatenate([first * c - second * s, second * c + first * s, rest], axis=2)
        results.append(wide)
    value = key if case.value_is_key else value
    return results[0], results[1], plain_norm(value, np.ones(case.size), 1e-6) if case.value_norm else value
