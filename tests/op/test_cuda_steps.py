"""Kernels of steps that follow one another overlap on CUDA: each step still gets what it gets alone, bit for bit."""

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


def run_chain(shape: Shape, feeds: Feeds) -> np.ndarray:
    """Run SwaAttention so many times in one graph, each on the output of the one before: [STEPS, T, Hq, D].

    Row boundaries and lengths are written by the node in front of the first.
    """
    nodes = [onnx.helper.make_node("Add", [name, "zero"], [f"{name}.sum"]) for name in ("query_start", "past_len")]
    ports = {"query_start": "query_start.sum", "past_len": "past_len.sum"}
    ports |= {name: name for name in ("key_cache", "value_cache")}
    names = ["query", *(f"output.{i}" for i in range(STEPS))]
    for i in range(STEPS):
        attend = emitters.swa_attention(
            query=names[i], **ports, outputs=(names[i + 1],), name=f"attend.{i}", **shape.attributes
        )
        nodes.append(attend)
    feeds = feeds | {"zero": np.zeros(1, np.int32)}
    outputs = dict.fromkeys(names[1:], (feeds["query"].shape, feeds["query"].dtype))

    def infos(ports):
        make = onnx.helper.make_tensor_value_info
        return [make(name, devices.ONNX_TYPES[dtype], size) for name, (size, dtype) in ports.items()]

    graph = onnx.helper.make_graph(
        nodes, "chain", infos({name: (array.shape, array.dtype) for name, array in feeds.items()}), infos(outputs)
    )
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = ort.SessionOptions()
    ortolan.custom_ops.register(options)
    session = ort.InferenceSession(model, options, providers=[devices.PROVIDERS["cuda"]])
    results = devices.run(session, feeds, outputs)
    return np.stack([results[name] for name in outputs])


def run_apart(shape: Shape, feeds: Feeds) -> np.ndarray:
    """Run the same steps sequence by sequence, each in a session run of its own."""
    steps = [feeds["query"]]
    for _ in range(STEPS):
        query, output = steps[-1], np.empty_like(steps[-1])
        for b, tokens in enumerate(shape.tokens):
            if tokens:
                rows = slice(feeds["query_start"][b], feeds["query_start"][b + 1])
                output[rows] = run_attention(*one_sequence(shape, feeds | {"query": query}, b))[0]
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
    devices.assert_same_bits(run_chain(shape, feeds), run_apart(shape, feeds))
