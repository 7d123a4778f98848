"""Log-probabilities on the host: log-softmax in float64, ties, what is refused."""

import numpy as np
import pytest
import torch
from sampling_reference import draw_logits
from tolerances import FLOAT32

from ortolan.errors import ConfigError
from ortolan.runtime.generate.logprobs import MAX_LOGPROBS, TokenLogprobs, check_logprobs, top_logprobs


@pytest.mark.parametrize(("vocabulary", "k"), [(1, 1), (7, 7), (50, 5), (5003, 64), (5003, 0)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_they_are_those_of_a_float64_softmax(vocabulary, k, scale):
    logits = draw_logits(3, vocabulary) * np.float32(scale)
    tokens = np.random.default_rng(1).integers(0, vocabulary, 3).tolist()
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    for row, given in enumerate(top_logprobs(logits, tokens, k)):
        best = np.argsort(-logits[row], kind="stable")[:k].tolist()
        assert (given.token, given.logprob) == (tokens[row], np.float32(expected[row, tokens[row]]))
        assert given.top == tuple((token, np.float32(expected[row, token])) for token in best)


def test_probabilities_of_all_tokens_sum_to_one():
    (given,) = top_logprobs(draw_logits(1, 60), [3], 60)
    assert sum(np.exp(logprob) for _, logprob in given.top) == pytest.approx(1, abs=FLOAT32)


def test_of_equal_logits_the_lower_id_comes_first():
    logits = np.array([[1, 5, 0, 5, 1, 5]], np.float32)
    assert [token for token, _ in top_logprobs(logits, [0], 4)[0].top] == [1, 3, 5, 0]
    assert [token for token, _ in top_logprobs(logits, [0], 2)[0].top] == [1, 3]


def test_no_more_tokens_are_given_than_there_are():
    assert len(top_logprobs(np.zeros((1, 3), np.float32), [0], 5)[0].top) == 3


def test_a_list_restores_what_it_was_made_of():
    given = TokenLogprobs(3, -0.5, ((3, -0.5), (1, -2.0)))
    assert TokenLogprobs.from_list(given.as_list()) == given


@pytest.mark.parametrize("given", [-1, MAX_LOGPROBS + 1, 1.5, True, "5"])
def test_other_counts_are_refused(given):
    with pytest.raises(ConfigError, match="logprobs"):
        check_logprobs(given)


def test_counts_in_range_are_taken():
    assert [check_logprobs(given) for given in (None, 0, np.int64(5), MAX_LOGPROBS)] == [None, 0, 5, MAX_LOGPROBS]
