"""Engines with drafts: requests get the tokens that sessions without drafts give."""

import numpy as np
import pytest
from fake_batch import NUMBERLESS, expected_tokens, make_engine, make_manifest
from oracle_drafter import Oracle

from ortolan import DraftModel, Engine, PromptLookup, Sampling, SnapKv
from ortolan.errors import OrtolanError

SAMPLINGS = (None, Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, seed=5, repetition_penalty=1.1))


@pytest.fixture(params=["paged", "paged_mixed", "paged_sharing"])
def model(request):
    return request.getfixturevalue(f"{request.param}_model")


def test_requests_with_and_without_drafts_share_steps(model, endless, full_folder, draw_tokens, tmp_path):
    prompts = [draw_tokens(count, seed=count) for count in (33, 15, 90, 200, 17, 64)]
    samplings = [SAMPLINGS[i % 3] for i in range(len(prompts))]
    sessions = [endless.session() for _ in prompts]
    expected = [list(s.generate(p, 40, g)) for s, p, g in zip(sessions, prompts, samplings, strict=True)]
    right = tuple((*prompt, *tokens) for prompt, tokens in zip(prompts, expected, strict=True))
    drafters = [None, Oracle(tokens=15, right=right, share=0.9), Oracle(tokens=4, right=right, share=0.0)]
    drafters += [PromptLookup(shortest=1), DraftModel(full_folder), Oracle(tokens=8, right=right, share=1.0)]
    with Engine(endless, 4, chunk_tokens=24) as engine:
        streams = [engine.submit(p, 40, g, speculation=d) for p, g, d in zip(prompts, samplings, drafters, strict=True)]
        assert [stream.result() for stream in streams] == expected
        made = [stream.speculation for stream in streams[1:]]
        assert streams[0].speculation is None
        stats = engine.stats()
        assert stats.drafted_tokens == sum(each.drafted_tokens for each in made) > 0
        assert stats.accepted_tokens == sum(each.accepted_tokens for each in made) > 0
        assert stats.generated_tokens == 40 * len(prompts)
        assert engine.memory().held_bytes == 0
        assert made[-1].tokens_per_check > 3


def test_an_evicted_request_drafts(paged_model, draw_tokens):
    prompt, snapkv = draw_tokens(150), SnapKv(budget=40, window=8, sink=2)
    tokens = list(paged_model.session(snapkv=snapkv).generate(prompt, 40))
    with Engine(paged_model, 2) as engine:
        oracle = Oracle(tokens=6, right=((*prompt, *tokens),), share=0.8)
        stream = engine.submit(prompt, 40, snapkv=snapkv, speculation=oracle)
        assert stream.result() == tokens
        assert engine.stats().evictions == 1
        assert stream.speculation.accepted_tokens > 5


def test_a_saved_request_goes_on_with_drafts(paged_model, endless_full, draw_tokens, tmp_path):
    prompt = draw_tokens(50)
    session = paged_model.session()
    tokens = list(session.generate(prompt, 30, Sampling(temperature=0.9, seed=2)))
    half = paged_model.session()
    generation = half.generate(prompt, 30, Sampling(temperature=0.9, seed=2))
    first = [next(generation) for _ in range(7)]
    half.save(tmp_path / "a.session")
    with Engine(paged_model, 2) as engine:
        oracle = Oracle(tokens=6, right=((*prompt, *tokens),), share=0.8)
        stream = engine.restore(tmp_path / "a.session", speculation=oracle)
        assert first + stream.result() == tokens
        assert stream.speculation.checks > 0


class Failing(Oracle):
    """A drafter that cannot be made."""

    def open(self, model, max_context):
        raise OrtolanError("no drafts today")


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_drafter_that_fails_drafts_no_more(runs_ahead, caplog):
    manifest = make_manifest(rings=True)
    prompt = np.random.default_rng(0).integers(0, 50, 30).tolist()
    with make_engine(manifest, runs_ahead=runs_ahead) as engine:
        stream = engine.submit(prompt, 20, speculation=Failing(right=()))
        assert stream.result() == expected_tokens(manifest, prompt, 20)
    assert "request 0 goes on without drafts: no drafts today" in caplog.text


def test_a_wrong_draft_without_numbers_harms_nobody():
    manifest = make_manifest(rings=True)
    prompt = np.random.default_rng(0).integers(0, 50, 30).tolist()
    expected = expected_tokens(manifest, prompt, 20)
    wrong = (*prompt, *expected[:6], NUMBERLESS, *expected[7:])
    with make_engine(manifest) as engine:
        stream = engine.submit(prompt, 20, speculation=Oracle(tokens=8, right=(wrong,), share=1.0))
        assert stream.result() == expected
