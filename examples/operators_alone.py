"""Use two of the operators in a graph of your own: attention over a ring that holds a window and the first positions.

python examples/operators_alone.py

The ring has 40 slots, and 200 tokens go through it, one by one. Each output is compared with attention over all keys.
"""

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import ModelProto, TensorProto, checker, helper

import ortolan

QUERY_HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
WINDOW, SINK, CAPACITY, TOKENS = 32, 4, 40, 200

Floats = npt.NDArray[np.float32]
Shape = list[str | int | None]


def build() -> ModelProto:
    """Build a graph of RingKvAppend and SwaAttention; its caches are inputs and outputs."""
    cache: Shape = ["pages", KV_HEADS, CAPACITY, HEAD_SIZE]
    floats: dict[str, Shape] = {
        "query": ["tokens", QUERY_HEADS, HEAD_SIZE],
        "key": ["tokens", KV_HEADS, HEAD_SIZE],
        "value": ["tokens", KV_HEADS, HEAD_SIZE],
        "key_cache": cache,
        "value_cache": cache,
    }
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in floats.items()]
    inputs.append(helper.make_tensor_value_info("query_start", TensorProto.INT32, ["sequences + 1"]))
    inputs.append(helper.make_tensor_value_info("past_len", TensorProto.INT32, ["sequences"]))
    caches = ["key_cache_out", "value_cache_out"]
    shapes: dict[str, Shape] = {"output": floats["query"], "key_cache_out": cache, "value_cache_out": cache}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    lengths = ["query_start", "past_len"]
    nodes = [
        helper.make_node(
            "RingKvAppend", ["key", "value", "key_cache", "value_cache", *lengths], caches, domain="ortolan", sink=SINK
        ),
        # Attention reads the outputs of RingKvAppend, so that it runs after it.
        helper.make_node(
            "SwaAttention", ["query", *caches, *lengths], ["output"], domain="ortolan", window=WINDOW, sink=SINK
        ),
    ]
    graph = helper.make_graph(nodes, "ring_attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ortolan", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)  # onnx's newest may be newer than ONNX Runtime


def open_session() -> onnxruntime.InferenceSession:
    """Check the graph, and open it with the operators."""
    model = build()
    ortolan.custom_ops.register_schemas()  # onnx.checker then knows the operators, too
    checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    ortolan.custom_ops.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(query: Floats, key: Floats, value: Floats) -> Floats:
    """Feed tokens one by one; returns [TOKENS, QUERY_HEADS, HEAD_SIZE]."""
    session, shape = open_session(), [1, KV_HEADS, CAPACITY, HEAD_SIZE]
    binding = session.io_binding()
    for name in ("key_cache", "value_cache"):  # one buffer for input and output: the operator works in place
        cache = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
        binding.bind_ortvalue_input(name, cache)
        binding.bind_ortvalue_output(f"{name}_out", cache)
    outputs = np.empty_like(query)
    for position in range(len(query)):
        step = slice(position, position + 1)
        for name, rows in (("query", query), ("key", key), ("value", value)):
            binding.bind_cpu_input(name, rows[step])
        binding.bind_cpu_input("query_start", np.array([0, 1], np.int32))
        binding.bind_cpu_input("past_len", np.array([position], np.int32))
        binding.bind_output("output")
        session.run_with_iobinding(binding)
        outputs[step] = binding.get_outputs()[2].numpy()
    return outputs


def attend(query: Floats, key: Floats, value: Floats) -> Floats:
    """Compute the same from all keys, with a mask."""
    group = QUERY_HEADS // KV_HEADS
    keys, values = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    logits = np.einsum("thd,shd->hts", query, keys) / np.sqrt(HEAD_SIZE)
    now, then = np.arange(len(query))[:, None], np.arange(len(query))[None]
    visible = (then <= now) & ((then > now - WINDOW) | (then < SINK))
    weights = np.where(visible, np.exp(logits), 0)
    result: Floats = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), values).astype(np.float32)
    return result


def main() -> None:
    """Run the graph on random tokens, and compare."""
    random = np.random.default_rng(0)
    query = random.standard_normal((TOKENS, QUERY_HEADS, HEAD_SIZE), np.float32)
    key, value = (random.standard_normal((TOKENS, KV_HEADS, HEAD_SIZE), np.float32) for _ in range(2))
    difference = np.abs(run(query, key, value) - attend(query, key, value)).max()
    print(f"{TOKENS} tokens went through a ring of {CAPACITY} slots")
    print(f"largest difference from attention over all keys: {difference:.1e}")


if __name__ == "__main__":
    main()
