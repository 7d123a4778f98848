"""Kernels of steps that follow one another overlap on CUDA: each step still gets what it gets alone, bit for bit."""

from dataclasses import replace

import devices
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from attention_cases import Feeds, Shape, draw_feeds, one_sequence, run_attention

import ortolan.custom_ops
from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_target")]

STEPS = 6


def run_chain(
    shape: Shape,
    feeds: Feeds,
    ports: list[dict[str, str]],
    nodes: list[onnx.NodeProto],
    options: dict[str, str] | None = None,
) -> np.ndarray:
    """Run SwaAttention so many times in one graph, each on the output of the one before: [STEPS, T, Hq, D].

    Args:
        shape: of each step.
        feeds: inputs of the graph.
        ports: what each step takes row boundaries and lengths from.
        nodes: that write them.
        options: of the execution provider.
    """
    names = ["query", *(f"output.{i}" for i in range(STEPS))]
    caches = {name: name for name in ("key_cache", "value_cache")}
    attends = [
        emitters.swa_attention(
            query=names[i], **ports[i], **caches, outputs=(names[i + 1],), name=f"attend.{i}", **shape.attributes
        )
        for i in range(STEPS)
    ]
    outputs = dict.fromkeys(names[1:], (feeds["query"].shape, feeds["query"].dtype))

    def infos(ports):
        make = onnx.helper.make_tensor_value_info
        return [make(name, devices.ONNX_TYPES[dtype], size) for name, (size, dtype) in ports.items()]

    graph = onnx.helper.make_graph(
        [*nodes, *attends],
        "chain",
        infos({name: (array.shape, array.dtype) for name, array in feeds.items()}),
        infos(outputs),
    )
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session_options = ort.SessionOptions()
    ortolan.custom_ops.register(session_options)
    session = ort.InferenceSession(model, session_options, providers=[(devices.PROVIDERS["cuda"], options or {})])
    results = devices.run(session, feeds, outputs)
    return np.stack([results[name] for name in outputs])


def run_apart(shape: Shape, feeds: Feeds, lengths: list[np.ndarray]) -> np.ndarray:
    """Run the same steps sequence by sequence, each in a session run of its own.

    Args:
        shape: of each step.
        feeds: inputs of a step.
        lengths: past_len of each step.
    """
    steps = [feeds["query"]]
    for past_len in lengths:
        of_step = replace(shape, past=past_len.tolist(), capacity=shape.slots)
        inputs, output = feeds | {"query": steps[-1], "past_len": past_len}, np.empty_like(steps[-1])
        for b, tokens in enumerate(shape.tokens):
            if tokens:
                rows = slice(feeds["query_start"][b], feeds["query_start"][b + 1])
                output[rows] = run_attention(*one_sequence(of_step, inputs, b))[0]
        steps.append(output)
    return np.stack(steps[1:])


@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
@pytest.mark.parametrize(
    "tokens",
    [[300, 0, 129], [65, 40, 300], [200, 1, 1], [500, 70, 20, 3, 1], [40, 20, 0], [33, 5], [4, 9, 16, 1], [1] * 40],
    ids=str,
)
def test_steps_in_a_row(tokens, head_size):
    """Steps with and without work for each of the kernels that they launch."""
    past = np.random.default_rng(1).integers(0, 1500, len(tokens)).tolist()
    shape = Shape(tokens=tokens, past=past, heads=8, kv_heads=2, head_size=head_size, capacity=2048)
    feeds = draw_feeds(shape)
    names = ("query_start", "past_len")
    nodes = [onnx.helper.make_node("Add", [name, "zero"], [f"{name}.sum"]) for name in names]
    ports = [{name: f"{name}.sum" for name in names}] * STEPS
    chain = run_chain(shape, feeds | {"zero": np.zeros(1, np.int32)}, ports, nodes)
    devices.assert_same_bits(chain, run_apart(shape, feeds, [feeds["past_len"]] * STEPS))


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("tokens", [[1], [3], [1] * 40, [2, 1, 0, 2], [4, 9, 16, 1]], ids=str)
def test_lengths_that_the_kernel_in_front_writes(tokens, head_size):
    """Kernels that guess lengths while the one in front still runs take those that it leaves."""
    past = np.random.default_rng(2).integers(100, 1500, len(tokens))
    shape = Shape(tokens=tokens, past=past.tolist(), heads=8, kv_heads=2, head_size=head_size, capacity=2048)
    feeds = draw_feeds(shape)
    lengths = [(past * (i % 3 + 1) // 3).astype(np.int32) for i in range(STEPS)]
    nodes, ports = [], []
    for i in range(STEPS):
        ports.append({"query_start": f"query_start.{i}", "past_len": f"past_len.{i}.out"})
        nodes.append(
            emitters.narrow_step(
                "query_start", f"past_len.{i}", "rows", outputs=tuple(ports[i].values()), name=f"narrow.{i}"
            )
        )
    inputs = {f"past_len.{i}": past_len for i, past_len in enumerate(lengths)}
    inputs |= {name: array for name, array in feeds.items() if name != "past_len"}
    inputs["rows"] = np.arange(sum(tokens), dtype=np.int64)
    captured = {"enable_cuda_graph": "1"}  # else kernels are too far apart to overlap
    chain = run_chain(shape, inputs, ports, nodes, captured)
    devices.assert_same_bits(chain, run_apart(shape, feeds, lengths))
