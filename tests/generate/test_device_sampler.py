"""What the device's choice of tokens is told and what it answers, as far as no device is needed."""

import ctypes

import numpy as np
import pytest

from ortolan import Sampling
from ortolan.errors import OpLibraryError
from ortolan.runtime.generate import device_library
from ortolan.runtime.generate.device_logprobs import read_logprobs
from ortolan.runtime.generate.device_sampler import mark_seen, pack_rules
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.generate.logprobs import TokenLogprobs


SIZES = {"decode_advance": 128, "sampling_rule": 40, "top_logprobs": 72}  # as the kernels' sources have them


class Function:
    """A plain C function that returns a number."""

    def __init__(self, answer: int = 0) -> None:
        self._answer = answer

    def __call__(self, *arguments: object) -> int:
        return self._answer


class Library:
    """Has all functions, and claims sizes of structs."""

    def __init__(self, **sizes: int) -> None:
        for name, size in (SIZES | sizes).items():
            setattr(self, f"ortolan_cuda_{name}_bytes", Function(size))
        for name in ("decode_advance", "decode_workspace", "top_logprobs", "logprobs_workspace", "error_text"):
            setattr(self, f"ortolan_cuda_{name}", Function())


def test_rules_are_laid_out_as_the_kernel_reads_them():
    sampling = Sampling(temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5)
    rules = pack_rules([None, Draw(sampling=sampling, seed=2**64 + 3, position=41)])
    assert rules[0].tolist() == (0.0, 0, 0, np.inf, 0.0, 1.0, 0)
    assert rules[1].tolist() == (0.25, 3, 41, 2.0, 0.25, 1.5, 7)


@pytest.mark.parametrize(("temperature", "inverse"), [(0.0, np.inf), (1e-300, 1e20), (1e300, 1e-37), (4.0, 0.25)])
def test_inverse_temperatures_are_float32_numbers_but_for_greedy(temperature, inverse):
    (rule,) = pack_rules([Draw(sampling=Sampling(temperature=temperature), seed=0, position=0)])
    assert rule["inverse_temperature"] == np.float32(inverse)


def test_a_top_k_beyond_any_vocabulary_fits():
    (rule,) = pack_rules([Draw(sampling=Sampling(top_k=10**12), seed=0, position=0)])
    assert rule["top_k"] == 2**31 - 1


def test_tokens_are_marked_where_a_penalty_needs_them():
    with_penalty, without = Sampling(repetition_penalty=2.0), Sampling()
    draws = [None, *(Draw(sampling=each, seed=0, position=3, seen=[1, 4, 1]) for each in (with_penalty, without))]
    np.testing.assert_array_equal(mark_seen(draws, 5), [[0] * 5, [0, 1, 0, 0, 1], [0] * 5])


@pytest.mark.parametrize("name", SIZES)
def test_a_library_of_another_version_is_refused(name, monkeypatch):
    monkeypatch.setattr(device_library.library_module, "open_library", Library)
    device_library.open_library()
    monkeypatch.setattr(device_library.library_module, "open_library", lambda: Library(**{name: 1}))
    with pytest.raises(OpLibraryError, match="and 1 in the operator library: they are of different versions"):
        device_library.open_library()


def test_a_library_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(device_library.library_module, "open_library", lambda: ctypes.CDLL("libc.so.6"))
    with pytest.raises(OpLibraryError, match="lacks CUDA functions"):
        device_library.open_library()


def test_log_probabilities_are_read_for_those_who_want_them():
    results = np.zeros((4, 6), np.int32)
    results[:, :4].view(np.float32)[:] = [[9, -1, -2, -3], [9, -4, -5, -6], [9, -7, -8, -9], [9, 0, 0, 0]]
    results[:, 4:] = [[30, 31], [32, 33], [34, 35], [0, 0]]
    assert read_logprobs(results, [5, 6, 7], [2, None, 0]) == [
        TokenLogprobs(5, -1.0, ((30, -2.0), (31, -3.0))),
        None,
        TokenLogprobs(7, -7.0),
    ]
