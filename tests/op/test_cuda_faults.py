"""What fails on a GPU fails with an error that names it, once, and leaves the device to what comes after."""

import ctypes
import threading
from types import SimpleNamespace

import devices
import numpy as np
import pytest
from harness import attention_inputs, empty_caches, open_session, output_types, random_batch, run_op

import ortolan.custom_ops
from ortolan import Sampling
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.generate.device_sampler import DeviceSampler
from ortolan.runtime.generate.draw import Draw

pytestmark = pytest.mark.cuda

TARGETS = {name: target for name, target in devices.TARGETS.items() if target.device == "cuda"}
FLOAT32 = TARGETS["cuda-float32"]
HALF = TARGETS["cuda-float16"]


def attention_feeds(tokens, *, slots=64, size=64, heads=4, kv_heads=2):
    """Draw one sequence's queries and caches of zeros."""
    batch = random_batch(np.random.default_rng(0), [tokens], [0], heads=heads, kv_heads=kv_heads, head_size=size)
    caches = [np.zeros_like(cache) for cache in empty_caches(1, kv_heads, slots, size)]
    return attention_inputs(batch, caches)


def score_feeds():
    element = devices.element()
    return {
        "capture": np.ones((1, 8, 4, 64), element),
        "key_cache": np.ones((1, 2, 64, 64), element),
        "kv_len": np.array([40], np.int32),
    }


class BoundRun:
    """An operator whose inputs and outputs are bound once, at chosen distances from aligned addresses."""

    def __init__(self, name, feeds, offsets=None, **attributes):
        import cupy

        self._session = open_session(name, feeds, attributes)
        self._binding = self._session.io_binding()
        self._buffers = []
        outputs = output_types(name, feeds, attributes)
        types = {port: (array.shape, array.dtype) for port, array in feeds.items()} | outputs
        for port, (shape, dtype) in types.items():
            data = feeds[port] if port in feeds else np.zeros(shape, dtype)
            raw = np.concatenate([np.zeros((offsets or {}).get(port, 0), np.uint8), data.reshape(-1).view(np.uint8)])
            self._buffers.append(cupy.asarray(raw))
            address = self._buffers[-1].data.ptr + len(raw) - data.nbytes
            bind = self._binding.bind_output if port in outputs else self._binding.bind_input
            bind(port, "cuda", 0, devices.ONNX_TYPES[dtype], shape, address)
        devices.synchronize()

    def __call__(self):
        self._session.run_with_iobinding(self._binding)


MISALIGNED = [
    *(
        ("SwaAttention", tokens, port, 2)
        for tokens in (1, 40)
        for port in ("query", "key_cache", "value_cache", "output")
    ),
    ("SwaAttention", 40, "key_cache", 8),
    *(("SnapKvScore", 0, port, offset) for port in ("capture", "key_cache") for offset in (2, 8)),
]


@pytest.mark.parametrize("target", ["cuda-float16", "cuda-bfloat16"])
@pytest.mark.parametrize(("operator", "tokens", "port", "offset"), MISALIGNED)
def test_a_buffer_that_is_not_aligned_is_refused(target, operator, tokens, port, offset):
    with devices.using(TARGETS[target]):
        feeds = attention_feeds(tokens) if operator == "SwaAttention" else score_feeds()
        with pytest.raises(Exception, match=rf"test/{operator}.*cudaErrorMisalignedAddress"):
            BoundRun(operator, feeds, {port: offset})()
        BoundRun(operator, feeds, {port: 16})()
        devices.synchronize()


@pytest.mark.parametrize("port", ["capture", "key_cache"])
def test_scores_of_float32_need_the_same_alignment(port):
    with devices.using(FLOAT32):
        with pytest.raises(Exception, match=r"test/SnapKvScore.*cudaErrorMisalignedAddress"):
            BoundRun("SnapKvScore", score_feeds(), {port: 4})()
        BoundRun("SnapKvScore", score_feeds())()
        devices.synchronize()


def test_attention_of_float32_takes_what_is_aligned_to_its_elements():
    with devices.using(FLOAT32):
        feeds = attention_feeds(3)
        BoundRun("SwaAttention", feeds, dict.fromkeys(("query", "key_cache", "value_cache", "output"), 4))()
        with pytest.raises(Exception, match="cudaErrorMisalignedAddress"):
            BoundRun("SwaAttention", feeds, {"key_cache": 2})()
        devices.synchronize()


def exhaust_memory():
    """Fail in an operator for want of device memory: each sequence decodes from 2^30 slots, all in one page."""
    sequences, page_slots, pages = 16, 4096, 2**18
    with devices.using(HALF):
        tokens, past = [1] * sequences, [0] * sequences
        batch = random_batch(np.random.default_rng(0), tokens, past, heads=64, kv_heads=8, head_size=128)
        caches = [np.zeros_like(cache) for cache in empty_caches(1, 8, page_slots, 128)]
        feeds = attention_inputs(batch, caches) | {"block_table": np.zeros((sequences, pages), np.int32)}
        with pytest.raises(Exception, match=r"test/SwaAttention.*cudaErrorMemoryAllocation"):
            run_op("SwaAttention", feeds)


def test_an_error_is_not_reported_to_those_who_come_after():
    """The choice of tokens, and copies of rows that no vector divides, launch after an operator found no memory."""
    device = CudaBuffers(0)
    logits = np.array([[0.0, 3.0, 1.0]], np.float32)
    state = SimpleNamespace(
        token_ids=device.upload(np.zeros(1, np.int64)),
        positions=device.upload(np.zeros(1, np.int64)),
        past_len=device.upload(np.zeros(1, np.int32)),
        kv_len=device.upload(np.zeros(1, np.int32)),
    )
    sampler, produced = DeviceSampler(device, device.upload(logits), state), device.pinned((1,), np.int32)
    for temperature in (0.0, 1e-3):
        exhaust_memory()
        sampler.start([Draw(sampling=Sampling(temperature=temperature), seed=0, position=0)])
        sampler.choose(produced, advance_tokens=1)
        device.synchronize()
        assert produced.tolist() == [1]
    exhaust_memory()
    cache = np.arange(2 * 8 * 3, dtype=np.float32).reshape(1, 2, 8, 3)
    feeds = {"key_cache": cache, "value_cache": cache, "keep": np.array([[[2, 5]]], np.int32)}
    with devices.using(FLOAT32):
        moved, _ = run_op("KvCompact", feeds)
    np.testing.assert_array_equal(moved[:, :, :2], cache[:, :, [2, 5]])


def test_threads_that_need_different_shared_memory_do_not_meet():
    """One kernel, of 26 KB in one thread and 49 KB in the other."""
    errors: list[Exception] = []

    def repeat(run):
        try:
            for _ in range(4000):
                run()
        except Exception as error:
            errors.append(error)

    with devices.using(FLOAT32):
        runs = [BoundRun("SwaAttention", attention_feeds(1, size=size)) for size in (136, 256)]
    threads = [threading.Thread(target=repeat, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    devices.synchronize()
    assert not errors


def test_the_library_holds_code_for_this_device():
    """Else every kernel for a newer GPU would give way to an older one, and no other test would tell."""
    library = ctypes.CDLL(str(ortolan.custom_ops.library_path()))
    assert library.ortolan_cuda_compute_capability() == devices.compute_capability()
