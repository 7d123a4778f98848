"""Steps of an engine over random requests, on a model that notices any mix-up of sequences."""

import dataclasses

import numpy as np
import pytest
from fake_batch import BREAKING, NUMBERLESS, FakeSaved, digest_logits, expected_tokens, make_core, make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_drafter import OracleDrafter

from ortolan import Sampling, SnapKv, Speculation
from ortolan.errors import CapacityError, NumericError, OrtolanError, RequestCancelledError
from ortolan.runtime.engine.request import Request
from ortolan.runtime.engine.sequence import TokenSequence
from ortolan.runtime.engine.stream import Outbox
from ortolan.runtime.generate.logprobs import top_logprobs
from ortolan.runtime.generate.turn import Turn, TurnOptions
from ortolan.runtime.speculation.drafter import Speculator

SNAPKV = SnapKv(budget=20, window=8, sink=2)


def make_request(manifest, number, prompt, new, *, eviction=None, saved=None, max_context=256, drafter=None, **options):
    """Make a request, which may follow what a file holds; other options are those of a turn."""
    tokens = list(prompt)
    sequence = TokenSequence(number=number, tokens=tokens, prompt_length=0, max_length=0, eviction=eviction)
    if saved is not None:
        saved.fill(sequence, manifest.rope_limits)
    sequence.prompt_length = len(tokens)
    sequence.max_length = min(len(tokens) + new - 1, max_context)
    turn = TurnOptions(max_new_tokens=new, eos_token_ids=frozenset(manifest.eos_token_ids), **options)
    return Request(
        sequence=sequence,
        turn=Turn(turn, manifest.vocab_size),
        max_context=max_context,
        outbox=Outbox(),
        saved=saved,
        speculator=drafter and Speculator(lambda: drafter, Speculation(tokens=6), manifest.vocab_size),
    )


def drain(core):
    for _ in range(5000):
        if not core.is_busy:
            return
        core.step()
    raise AssertionError("the requests do not end")


def draw_prompt(count, seed):
    return np.random.default_rng(seed).integers(0, 50, count).tolist()


class Job:
    """A request whose prompt is drawn by a seed: equal seeds begin alike."""

    def __init__(self, manifest, number, count, new, evicts, seed, half, share):
        prompt, options = draw_prompt(count, seed), SNAPKV if evicts else None
        self.saved = None
        if half and count > 1:
            read, prompt = prompt[: count // 2], prompt[count // 2 :]
            self.saved = FakeSaved(read, SNAPKV if half == "evicted" and len(read) > SNAPKV.budget else None)
        self.expected = expected_tokens(manifest, prompt, new, options, self.saved)
        drafter = None
        if share is not None:
            whole = [*(self.saved.tokens if self.saved else ()), *prompt, *self.expected]
            drafter = OracleDrafter([whole], share, 50)
        self.request = make_request(manifest, number, prompt, new, eviction=options, saved=self.saved, drafter=drafter)
        lost = 0 if self.saved is None else len(self.saved.tokens) - len(self.saved.full)
        at_prompt, at_end = count - lost, self.request.sequence.max_length - lost
        evicts = evicts and at_prompt > SNAPKV.budget
        self.most_slots = max(at_prompt, SNAPKV.budget + at_end - at_prompt) if evicts else at_end
        limits, sequence = manifest.rope_limits, self.request.sequence
        self.outgrows_rope = sequence.is_unrepeatable and sequence.max_length > limits[sequence.variant]


stored = st.sampled_from([None, None, "whole", "evicted"])  # what of the prompt's first half a file holds
shares = st.sampled_from([None, 0.0, 0.6, 1.0])  # of right tokens in drafts
job_draws = st.tuples(st.integers(1, 100), st.integers(1, 30), st.booleans(), st.integers(0, 3), stored, shares)
short_lists = st.lists(st.one_of(job_draws, st.integers(0, 30), st.none(), st.none()), max_size=40)


def draw_actions(seed):
    """Draw a long list, in which many requests run at once."""
    rng = np.random.default_rng(seed)
    draws = []
    for kind in rng.integers(0, 10, 60):
        if kind < 4:
            half = [None, None, "whole", "evicted"][rng.integers(4)]
            count, new, evicts, other = (int(rng.integers(*range_)) for range_ in ((1, 101), (1, 31), (2,), (4,)))
            share = [None, None, 0.0, 0.7, 1.0][rng.integers(5)]
            draws.append((count, new, bool(evicts), other, half, share))
        else:
            draws.append(None if kind < 9 else int(rng.integers(30)))
    return draws


actions = st.one_of(short_lists, st.integers(0, 10**6).map(draw_actions))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    actions,
    st.booleans(),
    st.sampled_from([7, 10, 16, 64]),  # the longest sequence takes 9 where it does not evict
    st.sampled_from([1.0, 4.0]),
    st.sampled_from([3, 24]),
    st.sampled_from([(256,), (60, 256)]),
    st.booleans(),
)
def test_every_request_gets_the_tokens_that_it_gets_alone(
    actions, rings, pages, overcommit, chunk, rope_limits, runs_ahead
):
    manifest = make_manifest(rings=rings, rope_limits=rope_limits)
    core = make_core(manifest, pages, overcommit, runs_ahead=runs_ahead, chunk_tokens=chunk)
    jobs, cancelled = [], set()
    for action in actions:
        if action is None:
            core.step()
        elif isinstance(action, int):
            if jobs:
                request = jobs[action % len(jobs)].request
                if not request.outbox.is_ended:
                    cancelled.add(request)
                core.cancel(request, RequestCancelledError("cancelled"))
        else:
            jobs.append(Job(manifest, len(jobs), *action))
            core.add(jobs[-1].request)
    drain(core)
    slots = 16 * next(kind.num_pages for kind in core.scheduler.plan.kinds if kind.grows)
    for job in jobs:
        request, outbox = job.request, job.request.outbox
        if request in cancelled:
            assert isinstance(outbox.error, RequestCancelledError)
            assert outbox.tokens == job.expected[: len(outbox.tokens)]
        elif job.most_slots > slots or job.outgrows_rope:
            assert isinstance(outbox.error, CapacityError)
        else:
            assert (outbox.tokens, outbox.reason, outbox.error) == (job.expected, "length", None)
        assert job.saved is None or job.saved.closed == 1
    assert core.scheduler.held_bytes == 0
    assert core.stats().finished + core.stats().failed == len(jobs)
    assert overcommit > 1 or core.stats().preemptions == 0


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_packed_step_that_fails_is_run_one_by_one(runs_ahead):
    manifest = make_manifest(rings=True)
    core = make_core(manifest, runs_ahead=runs_ahead)
    core.stepper.fail_packed = {1, 7, 8, 20}
    prompts = [draw_prompt(10 + seed, seed) for seed in range(3)]
    requests = [make_request(manifest, i, prompt, 20) for i, prompt in enumerate(prompts)]
    for request in requests:
        core.add(request)
    drain(core)
    assert [len(rows) for rows in core.stepper.batches].count(1) >= 9
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.outbox.tokens == expected_tokens(manifest, prompt, 20)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("rings", [False, True])
def test_faulty_requests_fail_alone(rings, runs_ahead):
    manifest = make_manifest(rings=rings)
    core = make_core(manifest, runs_ahead=runs_ahead)
    prompts = [draw_prompt(30, seed) for seed in range(4)]
    prompts[1][20] = NUMBERLESS
    prompts[2][29] = BREAKING
    requests = [make_request(manifest, i, prompt, 10) for i, prompt in enumerate(prompts)]
    for request in requests:
        core.add(request)
    drain(core)
    assert isinstance(requests[1].outbox.error, NumericError)
    assert isinstance(requests[2].outbox.error, OrtolanError)
    for i in (0, 3):
        assert requests[i].outbox.tokens == expected_tokens(manifest, prompts[i], 10)
    assert core.scheduler.held_bytes == 0


def test_pages_of_a_failed_step_serve_nobody():
    manifest = make_manifest(rings=False)
    core = make_core(manifest)
    prompt = [*draw_prompt(40, 0), NUMBERLESS]
    core.add(make_request(manifest, 0, prompt, 5))
    drain(core)
    assert core.scheduler.pools["full"].kept <= 1  # the first chunk was sound


def test_a_request_larger_than_the_pool_fails_alone():
    manifest = make_manifest(rings=False)
    core = make_core(manifest, pages=4)
    requests = [make_request(manifest, i, draw_prompt(count, i), 10) for i, count in enumerate((60, 20))]
    for request in requests:
        core.add(request)
    drain(core)
    assert isinstance(requests[0].outbox.error, CapacityError)
    assert requests[1].outbox.reason == "length"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_requests_that_would_wait_for_ever_fail(monkeypatch, runs_ahead):
    """No rule of the scheduler leads there; were one wrong, the engine's thread would otherwise spin."""
    manifest = make_manifest(rings=False)
    core = make_core(manifest, runs_ahead=runs_ahead)
    requests = [make_request(manifest, i, draw_prompt(20 + i, i), 10) for i in range(3)]
    plan_step = core.scheduler.next_step

    def leave_one_out():  # once nothing else is left, nothing runs
        return tuple(chunk for chunk in plan_step() if chunk.sequence.number != 1)

    monkeypatch.setattr(core.scheduler, "next_step", leave_one_out)
    for request in requests:
        core.add(request)
    drain(core)
    assert [request.outbox.reason for request in requests] == ["length", None, "length"]
    assert isinstance(requests[1].outbox.error, CapacityError)
    assert core.scheduler.held_bytes == 0


def test_an_eviction_that_fails_ends_its_request_alone(monkeypatch):
    manifest = make_manifest(rings=False)
    core = make_core(manifest)

    def fail(sequence):
        raise OrtolanError("the eviction graph failed")

    monkeypatch.setattr(core.pools, "evict", fail)
    requests = [make_request(manifest, i, draw_prompt(40, i), 5, eviction=SNAPKV if i else None) for i in range(2)]
    for request in requests:
        core.add(request)
    drain(core)
    assert requests[0].outbox.reason == "length"
    assert "eviction" in str(requests[1].outbox.error)
    assert core.scheduler.held_bytes == 0


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_generation_ends_at_the_context_as_a_session_does(runs_ahead):
    manifest = make_manifest(rings=True)
    core = make_core(manifest, runs_ahead=runs_ahead)
    request = make_request(manifest, 0, draw_prompt(250, 0), 100)
    core.add(request)
    drain(core)
    assert (len(request.outbox.tokens), request.outbox.reason) == (7, "context")


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_end_of_sequence_is_not_yielded(runs_ahead):
    manifest = make_manifest(rings=False)
    prompt = draw_prompt(9, 1)
    wanted = expected_tokens(manifest, prompt, 12)
    ending = dataclasses.replace(manifest, eos_token_ids=(wanted[6],))
    core = make_core(ending, runs_ahead=runs_ahead)
    request = make_request(ending, 0, prompt, 12)
    core.add(request)
    drain(core)
    end = wanted.index(wanted[6])
    assert (request.outbox.tokens, request.outbox.reason) == (wanted[:end], "eos")


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_stop_sequence_is_held_back(runs_ahead):
    manifest = make_manifest(rings=False)
    prompt = draw_prompt(9, 1)
    wanted = expected_tokens(manifest, prompt, 12)
    core = make_core(manifest, runs_ahead=runs_ahead)
    request = make_request(manifest, 0, prompt, 12, stop=[wanted[5:8], 57])
    core.add(request)
    drain(core)
    assert (request.outbox.tokens, request.outbox.reason) == (wanted[:5], "stop")


def test_seeds_fix_tokens_whatever_else_runs():
    manifest = make_manifest(rings=True)
    options = Sampling(temperature=1.2, top_k=20, repetition_penalty=1.3, seed=5)
    results = []
    for others in (0, 3):
        core = make_core(manifest, pages=20, overcommit=8.0)
        request = make_request(manifest, 9, draw_prompt(30, 7), 40, sampling=options)
        for number in range(others):
            core.add(make_request(manifest, number, draw_prompt(60, number), 60))
        core.add(request)
        drain(core)
        results.append(request.outbox.tokens)
        assert others == 0 or core.stats().preemptions > 0
    assert results[0] == results[1]
    assert len(set(results[0])) > 5


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_only_who_asks_gets_log_probabilities(runs_ahead):
    manifest = make_manifest(rings=False)
    core = make_core(manifest, runs_ahead=runs_ahead)
    prompts, counts = [draw_prompt(20 + seed, seed) for seed in range(3)], (3, None, 0)
    requests = [
        make_request(manifest, i, prompt, 10, logprobs=count)
        for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    for request in requests:
        core.add(request)
    drain(core)
    for request, prompt, count in zip(requests, prompts, counts, strict=True):
        tokens = expected_tokens(manifest, prompt, 10)
        logits = np.stack([digest_logits([*prompt, *tokens[:n]], [], 0) for n in range(10)])
        assert request.outbox.tokens == tokens
        assert request.outbox.logprobs == ([] if count is None else top_logprobs(logits, tokens, count))


def test_what_cannot_be_read_again_is_refused_where_rope_would_change():
    """Its keys would have to be rotated anew, and some were evicted; a session refuses that, too."""
    manifest = make_manifest(rings=False, rope_limits=(60, 256))
    read = draw_prompt(40, 0)
    for options, new, reason in ((SNAPKV, 11, "length"), (SNAPKV, 12, None), (None, 12, "length")):
        core, saved = make_core(manifest), FakeSaved(read, options)
        request = make_request(manifest, 0, draw_prompt(10, 1), new, saved=saved)
        core.add(request)
        drain(core)
        assert request.outbox.reason == reason
        assert saved.closed == 1
        if reason is None:
            assert isinstance(request.outbox.error, CapacityError)
            assert "evicted before the sequence was saved" in str(request.outbox.error)
        else:
            assert request.outbox.tokens == expected_tokens(manifest, draw_prompt(10, 1), new, None, saved)
