"""Steps of an engine that fail once they have moved recurrent states: only requests that fail alone end."""

import functools

import pytest
from fake_cuda import on_fake_cuda
from families import HYBRIDS, shared_checkpoint, shared_model

import ortolan
from ortolan import Engine, SnapKv
from ortolan.contract import RECENT_TOKENS
from ortolan.errors import OrtolanError
from ortolan.runtime.steps.cuda import CudaStepper
from ortolan.runtime.steps.host import HostStepper

SNAPKV = SnapKv(budget=40, window=8, sink=2)


@pytest.fixture(scope="module", params=HYBRIDS)
def paged_hybrid(request):
    options = {"max_context": 512, "chunk_size": 32, "paged": True, "page_size": 16}
    model = ortolan.load(shared_model(shared_checkpoint(request.param, seed=5), **options), device="cpu", num_threads=1)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


@pytest.fixture
def failing_runs(monkeypatch):
    """Let runs fail, once done, that moved a state for good: of several requests, or behind a token in `failing`."""
    failing, failed = [], []

    def run_and_fail(run, stepper, rows):
        result = run(stepper, rows)
        moved = [row for row in rows if row.logical and len(row.tokens) > RECENT_TOKENS]
        if moved and (len(rows) > 1 or rows[0].tokens[-1] in failing):
            failed.append([row.logical for row in rows])
            raise OrtolanError("the step failed")
        return result

    for stepper in (HostStepper, CudaStepper):
        monkeypatch.setattr(stepper, "run", functools.partialmethod(functools.partial(run_and_fail, stepper.run)))
    return failing, failed


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize("evicts", [False, True])
def test_states_that_a_failed_step_has_moved_are_read_anew(
    paged_hybrid, draw_tokens, failing_runs, monkeypatch, is_cuda, evicts
):
    prompts, eviction = [draw_tokens(count, seed=count) for count in (60, 100, 33, 130)], SNAPKV if evicts else None
    expected = [list(paged_hybrid.session(snapkv=eviction).generate(prompt, 40)) for prompt in prompts]
    model = on_fake_cuda(paged_hybrid, monkeypatch) if is_cuda else paged_hybrid
    with Engine(model, 3, chunk_tokens=60) as engine:
        streams = [engine.submit(prompt, 40, eviction=eviction) for prompt in prompts]
        assert [stream.result() for stream in streams] == expected
        memory = engine.memory()
        assert memory.held_bytes == 0
        assert memory.kept_bytes + memory.free_bytes == memory.pool_bytes
    assert failing_runs[1]


def test_a_request_that_fails_alone_ends_after_one_restart(paged_hybrid, draw_tokens, failing_runs):
    prompts = [draw_tokens(count, seed=count) for count in (60, 100, 90)]
    expected = [list(paged_hybrid.session().generate(prompt, 40)) for prompt in prompts]
    prompts[1][-1] = 2
    failing_runs[0].append(2)
    with Engine(paged_hybrid, 3, chunk_tokens=60) as engine:
        streams = [engine.submit(prompt, 40) for prompt in prompts]
        with pytest.raises(OrtolanError, match="the step failed"):
            streams[1].result()
        assert [streams[i].result() for i in (0, 2)] == [expected[i] for i in (0, 2)]
        assert engine.memory().held_bytes == 0


@pytest.mark.parametrize("snapkv", [None, SNAPKV], ids=["whole", "evicted"])
def test_a_saved_state_is_read_from_its_file_again(paged_hybrid, draw_tokens, tmp_path, failing_runs, snapkv):
    """An evicted one cannot be read anew: its later chunks are run alone."""
    session = paged_hybrid.session(snapkv=snapkv)
    session.prefill(draw_tokens(60))
    session.save(tmp_path / "a.session")
    jobs = [(draw_tokens(50), None), (draw_tokens(150, 1), tmp_path / "a.session")]
    with Engine(paged_hybrid, 3, chunk_tokens=60) as engine:
        alone = [engine.submit(prompt, 90, session=path).result() for prompt, path in jobs]
    assert not failing_runs[1]
    with Engine(paged_hybrid, 3, chunk_tokens=60) as engine:
        decoding = engine.submit(jobs[0][0], 90)
        next(decoding)
        reading = engine.submit(jobs[1][0], 90, session=jobs[1][1])
        assert [decoding.result(), reading.result()] == alone
    assert failing_runs[1]
