"""Sessions with drafts: the tokens are those of sessions without."""

import numpy as np
import pytest
from families import shared_checkpoint, shared_model
from oracle_drafter import Oracle
from parity import relative_difference
from tolerances import OTHER_STEPS_LOGPROBS, SAME_LOGITS

from ortolan import DraftModel, Eviction, PromptLookup, Sampling, SnapKv
from ortolan.errors import SessionInterruptedError

SAMPLINGS = {
    "greedy": None,
    "random": Sampling(temperature=1.0, seed=3),
    "penalty": Sampling(temperature=0.7, seed=4, repetition_penalty=1.3, top_k=40, top_p=0.9),
}
SNAPKV = SnapKv(budget=40, window=8, sink=2)


def drafters(prompt, tokens, folder):
    """Every kind of drafter: right, right now and then, wrong, and those that are shipped."""
    right = ((*prompt, *tokens),)
    yield Oracle(tokens=4, right=right, share=1.0)
    yield Oracle(tokens=15, right=right, share=0.8)
    yield Oracle(tokens=3, right=right, share=0.0)
    yield PromptLookup(tokens=5, shortest=1)
    yield DraftModel(folder, tokens=6)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("snapkv", [None, SNAPKV], ids=["whole", "evicts"])
def test_tokens_are_those_without_drafts(model, endless, full_folder, open_session, draw_tokens, sampling, snapkv):
    prompt, question, sampling = draw_tokens(100), draw_tokens(9, 1), SAMPLINGS[sampling]
    endless.draft_model(full_folder)  # before the stand-in for a GPU asks for one there
    plain = open_session(endless, snapkv=snapkv)
    generation = plain.generate(prompt, 40, sampling, logprobs=2)
    tokens, later = list(generation), list(plain.generate(question, 12, sampling))
    for drafter in drafters(prompt, tokens, full_folder):
        session = open_session(endless, snapkv=snapkv)
        drafted = session.generate(prompt, 40, sampling, logprobs=2, speculation=drafter)
        assert list(drafted) == tokens
        for mine, other in zip(drafted.logprobs, generation.logprobs, strict=True):
            assert mine.token == other.token
            assert mine.logprob == pytest.approx(other.logprob, abs=OTHER_STEPS_LOGPROBS)
        assert list(session.generate(question, 12, sampling, speculation=drafter)) == later
        assert session.state.history == plain.state.history
        assert relative_difference(session.step(7), plain.fork().step(7)) <= SAME_LOGITS


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_caches_hold_what_was_accepted(model, endless, draw_tokens, share):
    """Rings wrap several times meanwhile; what a wrong draft wrote is written over."""
    prompt = draw_tokens(30)
    plain = endless.session()
    tokens = list(plain.generate(prompt, 300))
    session = endless.session()
    oracle = Oracle(tokens=15, right=((*prompt, *tokens),), share=share)
    assert list(session.generate(prompt, 300, speculation=oracle)) == tokens
    probe = draw_tokens(25, 2)
    assert relative_difference(session.prefill(probe), plain.prefill(probe)) <= SAME_LOGITS


def test_statistics_add_up(endless_full, draw_tokens):
    prompt = draw_tokens(30)
    tokens = list(endless_full.session().generate(prompt, 60))
    session = endless_full.session()
    generation = session.generate(prompt, 60, speculation=Oracle(tokens=4, right=((*prompt, *tokens),)))
    assert list(generation) == tokens
    made, stats = generation.speculation, session.stats
    assert 0 < made.accepted_tokens < made.drafted_tokens
    assert made.tokens_per_check == 1 + made.accepted_tokens / made.checks
    counted = (stats.drafted_tokens, stats.accepted_tokens, stats.draft_checks)
    assert counted == (made.drafted_tokens, made.accepted_tokens, made.checks)
    assert stats.decode_tokens == 59  # the last one is not fed
    assert stats.as_dict()["tokens_per_draft_check"] == made.tokens_per_check
    assert endless_full.session().generate(prompt, 2).speculation is None


def test_stops_and_limits_cut_a_draft(endless_full, draw_tokens):
    prompt = draw_tokens(30)
    tokens = list(endless_full.session().generate(prompt, 30))
    oracle = Oracle(tokens=8, right=((*prompt, *tokens),), share=1.0)
    for options in ({"max_new_tokens": 7}, {"max_new_tokens": 30, "stop": [tokens[11:13]]}):
        plain, session = endless_full.session(), endless_full.session()
        expected = list(plain.generate(prompt, **options))
        assert list(session.generate(prompt, **options, speculation=oracle)) == expected
        assert (session.finish_reason, session.logical_length) == (plain.finish_reason, plain.logical_length)
        assert session.state.history == plain.state.history


def test_the_context_ends_as_without_drafts(endless_full, draw_tokens):
    prompt = draw_tokens(30)
    tokens = list(endless_full.session().generate(prompt, 60))
    oracle = Oracle(tokens=8, right=((*prompt, *tokens),), share=1.0)
    plain, session = (endless_full.session(max_context=50) for _ in range(2))
    assert list(session.generate(prompt, 60, speculation=oracle)) == list(plain.generate(prompt, 60))
    assert session.finish_reason == plain.finish_reason == "context"


@pytest.mark.parametrize("taken", [1, 2, 5, 9])
def test_a_generation_left_amid_a_draft_goes_on(model, endless, open_session, draw_tokens, taken, tmp_path):
    prompt = draw_tokens(50)
    tokens = list(endless.session().generate(prompt, 30))
    oracle = Oracle(tokens=8, right=((*prompt, *tokens),), share=0.9)
    session = open_session(endless)
    generation = session.generate(prompt, 30, speculation=oracle)
    first = [next(generation) for _ in range(taken)]
    assert session.logical_length == len(prompt) + taken - 1
    session.save(tmp_path / "a.session")
    assert first + list(session.fork().resume()) == tokens
    assert first + list(session.resume()) == tokens
    assert session.generation is None or session.generation.speculation.checks > 0
    restored = endless.restore(tmp_path / "a.session")
    assert first + list(restored.resume(speculation=oracle)) == tokens
    session.rewind(len(prompt))
    assert relative_difference(session.step(3), read(endless, [*prompt, 3])) <= SAME_LOGITS


def read(model, tokens):
    return model.session().prefill(tokens)


def test_an_interrupt_loses_nothing(endless_full, draw_tokens):
    prompt = draw_tokens(50)
    tokens = list(endless_full.session().generate(prompt, 30))
    session = endless_full.session()
    generation = session.generate(prompt, 30, speculation=Oracle(tokens=4, right=((*prompt, *tokens),), share=0.9))
    first = [next(generation) for _ in range(6)]
    session.interrupt()
    with pytest.raises(SessionInterruptedError):
        next(generation)
    assert first + list(session.resume()) == tokens


@pytest.mark.parametrize("during_prefill", [False, True])
def test_a_cache_of_planned_size_evicts_when_it_would_have(endless_full, draw_tokens, during_prefill):
    prompt = draw_tokens(100)
    options = Eviction(policy="snapkv", budget=40, window=8, sink=2, during_prefill=during_prefill)
    plain, session = (endless_full.session(eviction=options) for _ in range(2))
    tokens = list(plain.generate(prompt, 120))
    oracle = Oracle(tokens=8, right=((*prompt, *tokens),), share=0.8)
    assert list(session.generate(prompt, 120, speculation=oracle)) == tokens
    assert session.stats.evictions == plain.stats.evictions
    assert session.stats.accepted_tokens > 20


def test_a_smaller_model_follows_turns_and_rewinds(endless_full, draw_tokens):
    small = shared_model(shared_checkpoint("gemma3", seed=1), max_context=200, chunk_size=16)
    plain, session = endless_full.session(), endless_full.session()
    drafter, sampling = DraftModel(small, tokens=4), Sampling(temperature=0.8, seed=1)
    for turn, count in enumerate((40, 3, 60, 200)):  # the last one is longer than the small model reads
        given = draw_tokens(count, turn)
        expected = list(plain.generate(given, 20, sampling))
        assert list(session.generate(given, 20, sampling, speculation=drafter)) == expected
        for each in (plain, session):
            each.rewind(each.logical_length - 7)
    assert session.stats.draft_checks > 0


def test_drawn_tokens_have_the_model_s_distribution(endless_full, draw_tokens):
    """Over many seeds, tokens behind drafts of a model that draws too are distributed as the model says."""
    prompt, draws = draw_tokens(20), 400
    session = endless_full.session(max_context=64)
    logits = session.prefill(prompt).astype(np.float64)
    first = int(logits.argmax())
    probabilities = np.exp(2 * session.step(first).astype(np.float64))
    probabilities /= probabilities.sum()
    counts = np.zeros(len(probabilities))
    drafter = DraftModel(str(endless_full.folder), tokens=2)
    for seed in range(draws):
        session.rewind(len(prompt))
        tokens = list(session.generate([first], 3, Sampling(temperature=0.5, seed=seed), speculation=drafter))
        counts[tokens[0]] += 1
    top = np.argsort(probabilities)[-5:]
    expected = draws * probabilities[top]
    assert np.all(np.abs(counts[top] - expected) <= 4 * np.sqrt(expected + 1))
