"""A captured decode step replays with the lengths of the moment: bit for bit what runs without a graph give."""

import devices
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ortolan.custom_ops
from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters

pytestmark = pytest.mark.cuda

HEADS, KV_HEADS = 8, 2
ELEMENTS = [np.dtype(np.float32), np.dtype(np.float16), devices.BFLOAT16]


@pytest.fixture(autouse=True)
def buffers_on_the_gpu():
    """Let `devices` make buffers on the GPU; each test says of which elements."""
    with devices.using(devices.TARGETS["cuda-float32"]):
        yield


class DecodeStep:
    """RingKvAppend and SwaAttention of one token a sequence, over buffers that stay where they are."""

    def __init__(self, element, *, graph, sequences, slots, size, window=-1, sink=0, stream=None):
        import cupy

        self.element = element
        shapes = {
            "query": ((sequences, HEADS, size), element),
            "key": ((sequences, KV_HEADS, size), element),
            "value": ((sequences, KV_HEADS, size), element),
            "key_cache": ((sequences, KV_HEADS, slots, size), element),
            "value_cache": ((sequences, KV_HEADS, slots, size), element),
            "query_start": ((sequences + 1,), np.dtype(np.int32)),
            "past_len": ((sequences, KV_HEADS), np.dtype(np.int32)),
        }
        outputs = {
            "key_cache_out": shapes["key_cache"],
            "value_cache_out": shapes["value_cache"],
            "output": shapes["query"],
        }
        settings = {"enable_cuda_graph": str(int(graph))}
        if stream:
            settings["user_compute_stream"] = str(stream.ptr)
        self._session = self._open(shapes, outputs, settings, window, sink)
        self.buffers = {}
        for name, (shape, dtype) in shapes.items():
            self.buffers[name] = (
                cupy.zeros(shape, np.int32) if dtype == np.int32 else devices.poison(shape, dtype).reshape(shape)
            )
        self.buffers["query_start"][:] = cupy.arange(sequences + 1, dtype=np.int32)
        self.buffers["output"] = devices.poison(*shapes["query"]).reshape(shapes["query"][0])
        for name in ("key_cache", "value_cache"):
            self.buffers[f"{name}_out"] = self.buffers[name]
        self._binding = self._session.io_binding()
        for bind, ports in ((self._binding.bind_input, shapes), (self._binding.bind_output, outputs)):
            for name, (shape, dtype) in ports.items():
                bind(name, "cuda", 0, devices.ONNX_TYPES[dtype], shape, self.buffers[name].data.ptr)
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", "1" if graph else "-1")

    def _open(self, shapes, outputs, settings, window, sink):
        caches = ("key_cache", "value_cache")
        append = emitters.ring_kv_append(
            *("key", "value", *caches, "query_start", "past_len"), outputs=tuple(outputs)[:2], name="append", sink=sink
        )
        names = ("query", "key_cache_out", "value_cache_out", "query_start", "past_len")
        attend = emitters.swa_attention(*names, outputs=("output",), name="attend", window=window, sink=sink)

        def infos(ports):
            make = onnx.helper.make_tensor_value_info
            return [make(name, devices.ONNX_TYPES[dtype], shape) for name, (shape, dtype) in ports.items()]

        model_graph = onnx.helper.make_graph([append, attend], "decode", infos(shapes), infos(outputs))
        opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(OPERATOR_DOMAIN, OPERATOR_VERSION)]
        model = onnx.helper.make_model(model_graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        ortolan.custom_ops.register(options)
        provider = (devices.PROVIDERS["cuda"], settings)
        return ort.InferenceSession(model.SerializeToString(), options, providers=[provider])

    def fill(self, name, values):
        """Write into a buffer, which stays where it is."""
        import cupy

        stored = values.view(np.uint16) if self.element.itemsize == 2 and values.dtype == self.element else values
        target = self.buffers[name]
        target[tuple(slice(0, n) for n in stored.shape)] = cupy.asarray(stored)

    def run(self, past, rows):
        """Append and attend after `past` tokens [B, Hkv]; returns the output's bits."""
        import cupy

        for name, values in {"past_len": past, **rows}.items():
            self.fill(name, values)
        cupy.cuda.runtime.deviceSynchronize()
        self._session.run_with_iobinding(self._binding, self._options)
        cupy.cuda.runtime.deviceSynchronize()
        return cupy.asnumpy(self.buffers["output"]).copy()


def draw(rng, element, sequences, size):
    heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    return {k: rng.standard_normal((sequences, n, size)).astype(element) for k, n in heads.items()}


def compare(element, lengths, *, sequences=2, slots, size=64, **attributes):
    """Run equal steps at the given lengths with and without a graph; every output must have the same bits."""
    rng = np.random.default_rng(0)
    steps = [DecodeStep(element, graph=g, sequences=sequences, slots=slots, size=size, **attributes) for g in (0, 1)]
    held = min(max(lengths), slots)
    history = rng.standard_normal((2, sequences, KV_HEADS, held, size)).astype(element)
    for step in steps:
        for name, values in zip(("key_cache", "value_cache"), history, strict=True):
            step.fill(name, values)
    for length in lengths:
        past = np.full((sequences, KV_HEADS), length, np.int32)
        past[-1, 0] = length // 2 if attributes.get("window", -1) < 0 else length
        rows = draw(rng, element, sequences, size)
        eager, captured = (step.run(past, rows) for step in steps)
        assert np.isfinite(eager.view(element).astype(np.float32)).all()
        np.testing.assert_array_equal(captured, eager)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_across_growing_lengths(element, size):
    """From one split of the keys to many: where a kernel would split again, and around it."""
    lengths = [0, 1, 2, 63, 64, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 2047, 4094]
    compare(element, lengths, slots=4096, size=size)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("sink", [0, 4])
def test_across_a_ring_wrap(element, sink):
    lengths = [0, 5, 126, 127, 128, 129, 191, 192, 193, 255, 256, 1000, 100_000]
    compare(element, lengths, slots=192, window=100, sink=sink)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_lengths_that_fall_after_an_eviction(element):
    compare(element, [3000, 3001, 200, 201, 202, 700, 40], slots=4096)


def test_a_graph_outlives_larger_steps_of_its_stream():
    """Scratch memory that a graph was captured with stays where it is, while that of later steps grows and goes."""
    rng, element, past = np.random.default_rng(0), np.dtype(np.float16), 300

    def make(sequences, *, graph):
        step = DecodeStep(element, graph=graph, sequences=sequences, slots=4096, size=64, stream=devices.stream())
        for name in ("key_cache", "value_cache"):
            step.fill(name, rng.standard_normal((sequences, KV_HEADS, past, 64)).astype(element))
        return step, np.full((sequences, KV_HEADS), past, np.int32), draw(rng, element, sequences, 64)

    captured, *inputs = make(2, graph=1)
    expected = captured.run(*inputs)
    for sequences in (90, 260):  # 8 and 16 MiB
        step, *larger = make(sequences, graph=0)
        first = step.run(*larger)
        np.testing.assert_array_equal(captured.run(*inputs), expected)
        np.testing.assert_array_equal(step.run(*larger), first)
