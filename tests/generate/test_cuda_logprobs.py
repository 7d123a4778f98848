"""Log-probabilities on a device: those of the host, the same ones every time."""

import numpy as np
import pytest
from sampling_reference import draw_logits

from ortolan import Sampling
from ortolan.runtime.device.cuda import CudaBuffers
from ortolan.runtime.generate.device_logprobs import DeviceLogprobs, read_logprobs
from ortolan.runtime.generate.device_sampler import DeviceSampler
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.generate.logprobs import top_logprobs

pytestmark = pytest.mark.cuda

TOLERANCE = 2e-6  # of a log-probability near 0: float32 exponentials on the device, float64 on the host


def score(logits: np.ndarray, tokens: np.ndarray, k: int) -> np.ndarray:
    device = CudaBuffers(0)
    rows, vocabulary = logits.shape
    scorer = DeviceLogprobs(device, rows, vocabulary, k)
    results = scorer.results(rows, k)
    uploads = device.upload(logits), device.upload(tokens.astype(np.int32))
    scorer.enqueue(uploads[0].data.ptr, uploads[1].data.ptr, results)
    device.synchronize()
    return results.copy()


def assert_close(actual, expected) -> None:
    for given, wanted in zip(actual, expected, strict=True):
        assert (given.token, [token for token, _ in given.top]) == (wanted.token, [token for token, _ in wanted.top])
        logprobs = [[each.logprob, *(logprob for _, logprob in each.top)] for each in (given, wanted)]
        np.testing.assert_allclose(*logprobs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("vocabulary", [1, 2, 33, 4096, 4097, 50_003, 262_145])
@pytest.mark.parametrize("k", [0, 1, 5, 64])
@pytest.mark.parametrize("rounded", [False, True])
def test_they_are_those_of_the_host(vocabulary, k, rounded):
    logits, k = draw_logits(3, vocabulary), min(k, vocabulary)
    if rounded:
        logits = np.round(logits)  # many are equal: the lower id comes first
    tokens = np.random.default_rng(1).integers(0, vocabulary, 3)
    results = score(logits, tokens, k)
    assert_close(read_logprobs(results, tokens.tolist(), [k] * 3), top_logprobs(logits, tokens, k))
    expected = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(results[:, 0].view(np.float32), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("best", [0, 4095, 4096, 49_999])
def test_large_logits_and_best_tokens_at_the_ends_of_shares(best):
    logits = draw_logits(2, 50_000) * np.float32(1e4)
    logits[:, best] = 3e38
    tokens = np.array([best, 7])
    assert_close(read_logprobs(score(logits, tokens, 3), tokens.tolist(), [3, 3]), top_logprobs(logits, tokens, 3))


def test_they_are_the_same_bits_in_any_batch():
    logits, tokens = draw_logits(70, 30_000), np.arange(70)
    together = score(logits, tokens, 20)
    np.testing.assert_array_equal(score(logits, tokens, 20), together)
    np.testing.assert_array_equal(score(logits[33:34], tokens[33:34], 20), together[33:34])
    np.testing.assert_array_equal(score(logits[:5], tokens[:5], 4)[:, :6], together[:5, :6])


def test_a_token_outside_the_vocabulary_has_none():
    results = score(draw_logits(2, 100), np.array([-1, 100]), 2)
    assert np.isnan(results[:, 1].view(np.float32)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_choice_comes_with_those_of_raw_logits(temperature):
    logits, device = draw_logits(3, 9000), CudaBuffers(0)
    uploaded = device.upload(logits)
    sampler, produced = DeviceSampler(device, uploaded), device.pinned((3,), np.int32)
    sampling = Sampling(temperature=temperature, repetition_penalty=2.0)
    sampler.start([Draw(sampling=sampling, seed=row, position=4, seen=[1, 2, 3]) for row in range(3)])
    before = sampler.bytes
    results = [sampler.logprob_results(k) for k in (5, 2)]
    for each in results:  # of other sizes, in one workspace
        sampler.choose(produced, 1, each)
        device.synchronize()
        k, tokens = each.shape[1] // 2 - 1, produced.tolist()
        assert_close(read_logprobs(each, tokens, [k] * 3), top_logprobs(logits, tokens, k))
    assert sampler.bytes > before


def test_a_row_with_nan_leaves_the_others_alone():
    logits = draw_logits(3, 9000)
    expected = top_logprobs(logits, [1, 2, 3], 4)
    logits[1, 5] = np.nan
    actual = read_logprobs(score(logits, np.array([1, -1, 3]), 4), [1, -1, 3], [4, None, 4])
    assert actual[1] is None
    assert_close([actual[0], actual[2]], [expected[0], expected[2]])
