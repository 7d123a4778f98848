"""The quality benchmark's trials: one reading serves all policies, and answers are counted as they come."""

import numpy as np
import pytest
from quality_tasks import TrialTask, make_trial
from quality_trials import (
    FULL,
    MODES,
    SPARE_TOKENS,
    Settings,
    ask,
    measure,
    measure_batch,
    policy_options,
    read_text,
    says_value,
)
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan.errors import ConfigError
from ortolan.policies import POLICIES
from ortolan.retrieval import load_corpus

LENGTH = 1500
EVICTABLE = (2, 5)  # the shipped model's full-attention layers


def trial_of(kind="single", depth=0.3, seed=1, length=LENGTH, values=2):
    return make_trial(load_corpus("eval"), TrialTask(length=length, depth=depth, kind=kind, values=values, seed=seed))


def test_every_policy_is_measured():
    assert {options["policy"] for options in policy_options().values()} == set(POLICIES)
    assert {"snapkv avg", "snapkv max", "streaming", "pyramidkv", "adakv"} <= policy_options().keys()


@pytest.mark.parametrize("policy", [FULL, *policy_options()])
@pytest.mark.parametrize("mode", MODES)
def test_a_text_that_was_read_once_serves_every_policy(retriever, tmp_path, policy, mode):
    """Kept positions and logits after the question equal those of a session that shares nothing."""
    trial = trial_of("multi_key")
    snapkv = Settings(policies=(policy,), removed=(0.75,)).snapkv(policy, 0.75, LENGTH)
    read_text(retriever, trial, 64, max(64, snapkv.captured_queries if snapkv else 0)).save(tmp_path / "text")
    restored = retriever.restore(tmp_path / "text", eviction=snapkv)
    fresh = retriever.session(LENGTH + SPARE_TOKENS, 512, snapkv)
    encode, texts = retriever.tokenizer.encode, [trial.text, trial.question]
    if mode == "known":
        texts = ["".join(texts)]
    for text in texts:
        expected = fresh.prefill(encode(text))
    for text in [texts[0][len(trial.text) - 1 :], *texts[1:]]:
        got = restored.prefill(encode(text))
    assert np.argmax(got) == np.argmax(expected)
    np.testing.assert_allclose(got, expected, rtol=0, atol=LOGITS_RELATIVE * expected.std())
    assert restored.logical_length == fresh.logical_length == LENGTH
    evictions = {FULL: 0, "kvzip": 1}  # the question alone does not bring a second reading
    assert restored.stats.evictions == evictions.get(policy, len(texts))
    for layer in EVICTABLE:
        np.testing.assert_array_equal(restored.kept_positions(layer), fresh.kept_positions(layer))


def test_answers_leave_the_text_as_it_was_read(retriever, tmp_path):
    trial, snapkv = trial_of(), ortolan.SnapKv(budget=200)
    read_text(retriever, trial, 64, 64).save(tmp_path / "text")
    first = ask(retriever, retriever.restore(tmp_path / "text", eviction=snapkv), trial, "known")
    read = retriever.restore(tmp_path / "text")
    assert read.logical_length == read.physical_length(EVICTABLE[0]) == len(trial.text) - 1
    assert ask(retriever, retriever.restore(tmp_path / "text", eviction=snapkv), trial, "known") == first


def test_what_was_kept_is_answered_and_what_was_not_is_lost(retriever):
    """Recent tokens hold a fact at the end and none at the start; SnapKV that saw the question holds both."""
    for depth, streamed in ((0.0, False), (1.0, True)):
        trial = trial_of(depth=depth)
        settings = Settings(policies=("snapkv avg", "streaming"), removed=(0.75,), modes=("known",))
        full, snapkv, streaming = measure(retriever, settings, trial)
        assert full.right == snapkv.right == (True,)
        assert streaming.right == streaming.covered == (streamed,)
        assert (full.held, snapkv.held, streaming.held) == (LENGTH, LENGTH / 4, LENGTH / 4)
        assert (full.removed, full.covered) == (0.0, (True,))


def test_all_values_of_a_key_are_read_back(retriever):
    trial = trial_of("multi_value", values=4)
    outcome = next(measure(retriever, Settings(policies=("streaming",), removed=(0.5,)), trial))
    assert outcome.policy == FULL
    assert outcome.right == (True,) * 4
    assert outcome.depths == trial.depths


def test_heads_of_their_own_length_hold_the_budget_on_average(retriever):
    trial = trial_of()
    settings = Settings(policies=("adakv",), removed=(0.75,), modes=("known",))
    assert list(measure(retriever, settings, trial))[1].held == pytest.approx(LENGTH / 4, abs=1)


def test_a_longer_number_is_not_the_value(retriever):
    """The value must end where the fact's does: a model that goes on with another digit is wrong."""
    trial = trial_of()

    class Parrot:
        def __init__(self, text):
            self.rest = list(text.encode())

        def step(self, token):
            logits = np.zeros(264, np.float32)
            logits[self.rest.pop(0)] = 1
            return logits

    fact = trial.asked[0]
    for said, expected in ((fact.value + "\n", True), (fact.value + "7", False), (fact.value[:-1] + "\n\n", False)):
        parrot = Parrot(said)
        assert says_value(retriever, parrot, parrot.step(0), fact) is expected


def test_a_batch_names_its_prompts(retriever_folder):
    settings = Settings(policies=("snapkv avg",), removed=(0.5,), modes=("known",))
    outcomes = measure_batch(retriever_folder, settings, [trial_of(seed=4), trial_of(seed=9)])
    assert [(o.seed, o.policy) for o in outcomes] == [(n, p) for n in (4, 9) for p in (FULL, "snapkv avg")]


@pytest.mark.parametrize("removed", [0.0, 1.0, 0.99])
def test_shares_are_checked(removed):
    """0.99 of 2048 leaves less than window and sinks."""
    with pytest.raises(ConfigError):
        Settings(policies=("snapkv avg",), removed=(removed,)).check([2048])
