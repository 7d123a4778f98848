"""What the device's choice of tokens is told and what it answers, as far as no device is needed."""

import numpy as np
import pytest

from ortolan import Sampling
from ortolan.errors import OpLibraryError
from ortolan.runtime.generate import device_library
from ortolan.runtime.generate.device_logprobs import read_logprobs
from ortolan.runtime.generate.device_sampler import mark_seen, pack_rules
from ortolan.runtime.generate.draw import Draw
from ortolan.runtime.generate.logprobs import TokenLogprobs


class Library:
    """Claims sizes of structs."""

    def __init__(self, **sizes: int) -> None:
        self._sizes = device_library.STRUCT_BYTES | sizes

    def ortolan_cuda_struct_bytes(self, name: bytes) -> int:
        return self._sizes[name.decode()]


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


@pytest.mark.parametrize("name", device_library.STRUCT_BYTES)
def test_a_library_of_another_version_is_refused(name):
    device_library.check_structs(Library())
    with pytest.raises(OpLibraryError, match=rf"{name} to have 1 bytes.*build the library again"):
        device_library.check_structs(Library(**{name: 1}))


def test_a_library_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(device_library, "library_path", lambda: "libc.so.6")
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
