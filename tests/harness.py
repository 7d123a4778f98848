"""Runs one operator through ONNX Runtime, and draws random caches and batches for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import devices
import numpy as np
import onnx
import onnxruntime as ort

import ortolan.custom_ops
from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters
from ortolan.custom_ops.codegen import snake_case
from ortolan.custom_ops.schema import OPERATORS
from ortolan.custom_ops.schema_parts import Operator, Port
from ortolan.element_types import from_numpy
from ortolan.runtime.device.buffers import wrap

OUTPUT_TYPES = {"tensor(float)": onnx.TensorProto.FLOAT, "tensor(int32)": onnx.TensorProto.INT32}


def find_operator(name: str) -> Operator:
    return next(operator for operator in OPERATORS if operator.name == name)


def build_model(
    name: str, feeds: Mapping[str, np.ndarray], attributes: Mapping[str, object], omitted: Collection[str] = ()
) -> onnx.ModelProto:
    """Build a model of one node, whose inputs are named as in the schema and have free shapes.

    Args:
        name: of the operator.
        feeds: inputs, of which only types and ranks count.
        attributes: of the node.
        omitted: optional outputs, at the end of the list, that the node does not have.
    """
    operator = find_operator(name)
    element = next(iter(feeds.values())).dtype
    ports = [port for port in operator.outputs if port.name not in omitted and _is_possible(operator, port, feeds)]
    outputs = tuple(port.name for port in ports)
    emit = getattr(emitters, snake_case(name))
    node = emit(**{k: k for k in feeds}, outputs=outputs, name=f"test/{name}", **attributes)
    inputs = [
        onnx.helper.make_tensor_value_info(k, devices.ONNX_TYPES[v.dtype], [f"{k}_{axis}" for axis in range(v.ndim)])
        for k, v in feeds.items()
    ]
    results = [
        onnx.helper.make_tensor_value_info(
            port.name,
            OUTPUT_TYPES.get(port.type)
            or devices.ONNX_TYPES[element if port.alias < 0 else feeds[operator.inputs[port.alias].name].dtype],
            [f"{port.name}_{axis}" for axis in range(port.shape.count(",") + 1)],
        )
        for port in ports
    ]
    graph = onnx.helper.make_graph([node], "test", inputs, results)
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _is_possible(operator: Operator, port: Port, feeds: Mapping[str, np.ndarray]) -> bool:
    """Say whether an output can be asked for: an optional one may continue an input that is not there."""
    return not (port.optional and port.alias >= 0) or operator.inputs[port.alias].name in feeds


def open_session(
    name: str,
    feeds: Mapping[str, np.ndarray],
    attributes: Mapping[str, object],
    omitted: Collection[str] = (),
    *,
    provider_options: Mapping[str, str] | None = None,
) -> ort.InferenceSession:
    """Open a session of `build_model`'s model on the current device."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    ortolan.custom_ops.register(options)
    model = build_model(name, feeds, attributes, omitted).SerializeToString()
    return ort.InferenceSession(
        model, options, providers=[(devices.PROVIDERS[devices.current()], dict(provider_options or {}))]
    )


def run_op(name: str, feeds: Mapping[str, np.ndarray], **attributes: object) -> list[np.ndarray]:
    """Run one operator on fresh output buffers; the inputs stay as they are."""
    return run_session(open_session(name, feeds, attributes), name, feeds, attributes)


def run_session(
    session: ort.InferenceSession, name: str, feeds: Mapping[str, np.ndarray], attributes: Mapping[str, object]
) -> list[np.ndarray]:
    """Run a session that holds one operator."""
    if devices.current() == "cpu":
        if all(kind.is_plain for kind in map(from_numpy, (a.dtype for a in feeds.values()))):
            return session.run(None, dict(feeds))
        return _run_bound(session, feeds, output_types(name, feeds, attributes))
    return list(devices.run(session, feeds, output_types(name, feeds, attributes)).values())


def _run_bound(
    session: ort.InferenceSession,
    feeds: Mapping[str, np.ndarray],
    outputs: Mapping[str, tuple[tuple[int, ...], np.dtype]],
) -> list[np.ndarray]:
    """Run a session on the host with types that NumPy itself lacks; outputs have buffers of their own."""
    binding, results = session.io_binding(), {name: np.zeros(*kind) for name, kind in outputs.items()}
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, wrap(array))
    for name, array in results.items():
        binding.bind_ortvalue_output(name, wrap(array))
    session.run_with_iobinding(binding)
    return list(results.values())


def output_types(
    name: str, feeds: Mapping[str, np.ndarray], attributes: Mapping[str, object]
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of each output of an operator."""
    operator = find_operator(name)
    types = {}
    for port in operator.outputs:
        if not _is_possible(operator, port, feeds):
            continue
        if port.alias >= 0:
            source = feeds[operator.inputs[port.alias].name]
            types[port.name] = (source.shape, source.dtype)
        elif port.name in ("output", "y"):
            source = feeds[{"SwaAttention": "query", "GatedDeltaRule": "value", "CausalConv": "x"}[name]]
            types[port.name] = (source.shape, source.dtype)
        elif port.name == "lse":
            tokens, heads, _ = feeds["query"].shape
            types[port.name] = ((heads, tokens), np.dtype(np.float32))
        elif port.name == "keep":
            *lists, slots = feeds["score"].shape
            types[port.name] = ((*lists, max(0, min(int(feeds["budget"][0]), slots))), np.dtype(np.int32))
        elif port.name == "kept_len":
            types[port.name] = (feeds["kv_len"].shape, np.dtype(np.int32))
        else:
            assert port.name == "score"
            _, heads, slots, _ = feeds["key_cache"].shape
            if "block_table" in feeds:
                slots *= feeds["block_table"].shape[1]
            types[port.name] = ((len(feeds["capture"]), heads, slots), np.dtype(np.float32))
    return types


def run_in_place(name: str, feeds: Mapping[str, np.ndarray], **attributes: object) -> dict[str, np.ndarray]:
    """Run one operator with each aliased output bound to its input's buffer; returns outputs by name."""
    session = open_session(name, feeds, attributes)
    if devices.current() == "cuda":
        operator = find_operator(name)
        ports = [p for p in operator.outputs if p.alias >= 0 and _is_possible(operator, p, feeds)]
        aliases = {p.name: operator.inputs[p.alias].name for p in ports}
        return devices.run(session, feeds, output_types(name, feeds, attributes), aliases)
    binding = session.io_binding()
    buffers = {k: v.copy() for k, v in feeds.items()}  # an OrtValue does not keep its array alive
    values = {k: wrap(v) for k, v in buffers.items()}
    for key, value in values.items():
        binding.bind_ortvalue_input(key, value)
    operator = find_operator(name)
    ports = [port for port in operator.outputs if _is_possible(operator, port, feeds)]
    for port in ports:
        if port.alias >= 0:
            binding.bind_ortvalue_output(port.name, values[operator.inputs[port.alias].name])
        else:
            binding.bind_output(port.name)
    session.run_with_iobinding(binding)
    given = [
        buffers[operator.inputs[port.alias].name] if port.alias >= 0 else value.numpy().copy()
        for port, value in zip(ports, binding.get_outputs(), strict=True)
    ]
    return dict(zip([port.name for port in ports], given, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Random inputs of one step, after `past` tokens of each sequence were appended."""

    query: np.ndarray  # [T, Hq, D]
    key: np.ndarray  # [T, Hkv, D]
    value: np.ndarray  # [T, Hkv, D]
    query_start: np.ndarray  # [B+1] int32
    past_len: np.ndarray  # [B] int32


def random_batch(
    rng: np.random.Generator,
    tokens: list[int],
    past: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    dtype: np.dtype | None = None,
) -> Batch:
    total = sum(tokens)

    def draw(count: int) -> np.ndarray:
        return rng.standard_normal((total, count, head_size)).astype(dtype or devices.element())

    return Batch(
        query=draw(heads),
        key=draw(kv_heads),
        value=draw(kv_heads),
        query_start=np.cumsum([0, *tokens]).astype(np.int32),
        past_len=np.array(past, np.int32),
    )


def empty_caches(
    pages: int, kv_heads: int, slots: int, head_size: int, dtype: np.dtype | None = None
) -> list[np.ndarray]:
    """Return a key and a value cache whose empty slots hold NaN."""
    return [np.full((pages, kv_heads, slots, head_size), np.nan, dtype or devices.element()) for _ in range(2)]


def attention_inputs(batch: Batch, caches: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Name the inputs of SwaAttention that a batch and its key and value caches make."""
    return {
        "query": batch.query,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "query_start": batch.query_start,
        "past_len": batch.past_len,
    }
