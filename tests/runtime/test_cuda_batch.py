"""The engine's steps for CUDA on a device of NumPy arrays, against those of the host."""

import itertools
import weakref

import numpy as np
import pytest
from fake_cuda import TOTAL_BYTES, FakeCuda

from ortolan import Engine, Sampling, SnapKv
from ortolan.errors import CapacityError, NumericError
from ortolan.runtime import cuda_batch
from ortolan.runtime.cuda_batch import CudaBatchStepper, batch_sizes, draw_rules
from ortolan.runtime.device_session import DeviceModel
from ortolan.runtime.engine.request import make_choice
from ortolan.runtime.engine_plan import plan_engine
from ortolan.runtime.sampler import distribution, penalize

SNAPKV = SnapKv(budget=40, window=8, sink=2)


class FakeBatchChooser:
    """Chooses as the kernels do, with NumPy's random numbers."""

    def __init__(self, device, logits, state):
        self._logits, self._state = logits, state

    def start(self, sampling, histories):
        assert len(sampling) == len(histories) == len(self._logits)
        self._sampling, self._seen = list(sampling), [set(history) for history in histories]
        assert all(token >= 0 for seen in self._seen for token in seen)
        self._rules = None

    def reseed(self, rules):
        self._rules = rules

    def choose(self, produced, draw, advance_tokens):
        assert draw == 0
        for b, options in enumerate(self._sampling):
            produced[b] = self._choose(b, options) if np.isfinite(self._logits[b]).all() else -1
            self._seen[b].add(int(produced[b]))
            self._state.token_ids[b] = max(0, produced[b])
        for lengths in (self._state.positions, self._state.past_len, self._state.kv_len):
            lengths += advance_tokens

    def _choose(self, b, options):
        logits = self._logits[b]
        if options.repetition_penalty != 1.0:
            logits = penalize(logits, sorted(self._seen[b]), options.repetition_penalty)
        if options.temperature == 0.0:
            return int(np.argmax(logits))
        generator = np.random.default_rng(int(self._rules["seed"][b]))
        return int(generator.choice(len(logits), p=distribution(logits, options)))


@pytest.fixture(params=["paged", "paged_mixed"])
def model(request):
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture
def make_engine(monkeypatch):
    """Make an engine on the stand-in; the CPU's operators refuse rows of nobody, so that every batch size is whole."""
    monkeypatch.setattr(cuda_batch, "TokenChooser", FakeBatchChooser)
    monkeypatch.setattr(cuda_batch, "batch_sizes", lambda most: tuple(range(1, most + 1)))
    engines = []

    def make(model, max_sequences=4, max_cache_bytes=None, chunk_tokens=24, overcommit=1.0):
        plan = plan_engine(model.manifest, max_sequences, max_cache_bytes, chunk_tokens, cuda=True)
        stepper = CudaBatchStepper(
            model._session, model._evict_session, model.manifest, plan, FakeCuda(), itertools.count(1)
        )
        engines.append(Engine._of(model.manifest, plan, stepper, overcommit))
        engines[-1].stepper = stepper
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def serve(engine, prompts, new=30, options=(), **more):
    def submit_all(_):
        return [
            engine.submit(prompt, new, *options, ignore_eos=True, **{k: v[i] for k, v in more.items()})
            for i, prompt in enumerate(prompts)
        ]

    streams = engine._worker.ask(submit_all)  # between two steps
    results = [stream.result() for stream in streams]
    assert engine.memory().held_bytes == 0
    return results


def test_tokens_are_those_of_the_host(model, make_engine, draw_tokens):
    prompts = [draw_tokens(count, seed=count) for count in (1, 15, 16, 17, 90, 200, 33)]
    results = serve(make_engine(model), prompts)
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results == serve(host, prompts)


def test_evictions_and_preemptions_are_those_of_the_host(model, make_engine, draw_tokens):
    prompts = [draw_tokens(80, seed=seed) for seed in range(6)]
    snapkv = [SNAPKV if seed % 2 else None for seed in range(6)]
    plan = plan_engine(model.manifest, 6, None, 32, cuda=True)
    budget = sum((6 * kind.pages_for(512) if kind.is_ring else 33) * kind.page_bytes for kind in plan.kinds)
    engine = make_engine(model, 6, budget, 32, overcommit=5.0)
    results = serve(engine, prompts, 120, snapkv=snapkv)
    assert engine.stats().preemptions > 0
    assert engine.stats().evictions >= 3
    with Engine(model, 6, chunk_tokens=32) as host:
        assert results == serve(host, prompts, 120, snapkv=snapkv)


def test_closing_gives_the_memory_back(model, make_engine, draw_tokens):
    engine = make_engine(model)
    serve(engine, [draw_tokens(20)], 5)
    engine.close()
    assert engine.stepper._device.trims == 1
    assert engine.stepper.cache_bytes == 0


def test_many_evict_in_one_step(model, make_engine, draw_tokens):
    prompts = [draw_tokens(60, seed=seed) for seed in range(8)]
    results = serve(make_engine(model, 8, None, 500), prompts, 20, snapkv=[SNAPKV] * 8)
    with Engine(model, 8, chunk_tokens=500) as host:
        assert results == serve(host, prompts, 20, snapkv=[SNAPKV] * 8)


def test_draws_depend_on_seed_and_place_alone(model, make_engine, draw_tokens):
    options = Sampling(temperature=1.5, top_k=30, repetition_penalty=1.2, seed=4)
    prompt = draw_tokens(50)
    alone = make_engine(model).submit(prompt, 40, options, ignore_eos=True).result()
    engine = make_engine(model)
    others = [engine.submit(draw_tokens(30 + i, seed=i), 10 + 7 * i) for i in range(3)]
    assert engine.submit(prompt, 40, options, ignore_eos=True).result() == alone
    assert all(other.result() is not None for other in others)
    assert len(set(alone)) > 5


def test_a_penalty_sees_all_tokens_while_prompts_are_read(model, make_engine, draw_tokens):
    """The histories of the penalty are whole at every step, as the stand-in's chooser asserts."""
    options = Sampling(repetition_penalty=1.3)
    engine = make_engine(model)

    def submit_both(_):
        return [
            engine.submit(draw_tokens(10), 60, options, ignore_eos=True),
            engine.submit(draw_tokens(400, seed=1), 30, ignore_eos=True),
        ]

    results = [stream.result() for stream in engine._worker.ask(submit_both)]
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results[0] == host.submit(draw_tokens(10), 60, options, ignore_eos=True).result()
        assert results[1] == host.submit(draw_tokens(400, seed=1), 30, ignore_eos=True).result()


def test_steps_do_not_wait_for_those_before(model, make_engine, draw_tokens, monkeypatch):
    """Prompts and decodes that join and leave feed what the step before chose, from the device."""
    engine = make_engine(model)
    sources, run = [], engine.stepper.run

    def note(rows):
        sources.append([row.source for row in rows])
        return run(rows)

    monkeypatch.setattr(engine.stepper, "run", note)
    prompts = [draw_tokens(count, seed=count) for count in (20, 22, 70, 9)]
    results = serve(engine, prompts, 40)
    decoding = [source for row in sources for source in row]
    assert decoding.count(None) <= 4 + sum(-(-len(prompt) // 20) for prompt in prompts)
    assert any(None in row and set(row) != {None} for row in sources)
    assert any(row and row != list(range(len(row))) and None not in row for row in sources)
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results == serve(host, prompts, 40)


def test_the_host_writes_nothing_but_pages_while_the_same_sequences_decode(
    model, make_engine, draw_tokens, monkeypatch
):
    engine, written = make_engine(model), []
    write = cuda_batch.Bucket.write

    def note(bucket, begin, end):
        written.append(begin == 0)
        write(bucket, begin, end)

    monkeypatch.setattr(cuda_batch.Bucket, "write", note)
    serve(engine, [draw_tokens(20 + i, seed=i) for i in range(3)], 60)
    steps = engine.stats().steps
    assert written.count(True) <= 4
    assert 0 < written.count(False) < steps / 2


def refuse(monkeypatch, target, name, calls):
    """Let some calls of a method, counted from 0, find no memory; returns how often it was called."""
    method, made = getattr(target, name), []

    def count(*arguments, **options):
        made.append(name)
        if len(made) - 1 in calls:
            raise CapacityError("no memory")
        return method(*arguments, **options)

    monkeypatch.setattr(target, name, count)
    return made


def test_a_batch_size_that_was_not_bound_for_want_of_memory_is_bound_by_the_next_step(
    model, make_engine, draw_tokens, monkeypatch
):
    engine = make_engine(model)
    made = refuse(monkeypatch, engine.stepper._pools, "make_captures", {1})  # after the prompt's
    results = serve(engine, [draw_tokens(20)], 30)
    assert len(made) >= 3
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results == serve(host, [draw_tokens(20)], 30)


@pytest.mark.parametrize(
    ("owner", "name"), [("pools", "make_captures"), ("chooser", "start"), ("chooser", "choose"), ("device", "event")]
)
def test_a_step_that_fails_waits_for_what_reads_its_pinned_memory(
    model, make_engine, draw_tokens, monkeypatch, owner, name
):
    engine = make_engine(model)
    device = engine.stepper._device
    owners = {"pools": engine.stepper._pools, "chooser": FakeBatchChooser, "device": device}
    pinned, held = [], []
    pin, synchronize = device.pinned, device.synchronize

    def note_pinned(shape, dtype):
        array = pin(shape, dtype)
        pinned.append(weakref.ref(array))
        return array

    def note_held():
        held.append(pinned[cuda_batch.STAGING_BUFFERS]() is not None)  # the step's inputs, after the bucket's own
        synchronize()

    monkeypatch.setattr(device, "pinned", note_pinned)
    monkeypatch.setattr(device, "synchronize", note_held)
    refuse(monkeypatch, owners[owner], name, {0})
    with pytest.raises(CapacityError):
        serve(engine, [draw_tokens(20)], 30)
    assert held == [True]
    assert len(serve(engine, [draw_tokens(20)], 30)[0]) == 30


@pytest.mark.parametrize("when", [0, 1, 5])
def test_logits_that_are_no_numbers_fail_their_request_alone(model, make_engine, draw_tokens, monkeypatch, when):
    engine = make_engine(model)
    wanted = serve(engine, [draw_tokens(20)], 30)[0]
    run, count = engine.stepper._run, itertools.count()

    def spoil(binding, options):
        run(binding, options)
        if next(count) >= when:
            engine.stepper._logits[1] = np.nan

    monkeypatch.setattr(engine.stepper, "_run", spoil)
    core = engine._worker.ask(lambda core: core)
    first, second = [], []

    def submit_both(_):
        first.append(engine.submit(draw_tokens(20), 30, ignore_eos=True))
        second.append(engine.submit(draw_tokens(21, seed=1), 30, ignore_eos=True))

    engine._worker.ask(submit_both)
    with pytest.raises(NumericError):
        second[0].result()
    assert len(second[0].tokens) <= when
    assert first[0].result() == wanted
    assert core.scheduler.held_bytes == 0


def test_batch_sizes_cover_every_number_of_sequences():
    assert batch_sizes(1) == (1,)
    assert batch_sizes(2) == (1, 2)
    assert batch_sizes(48) == (1, 2, 4, 8, 16, 32, 48)
    assert batch_sizes(64) == (1, 2, 4, 8, 16, 32, 64)


def test_rules_of_a_draw_change_with_length_and_seed():
    choices = [make_choice(Sampling(temperature=1.0, seed=seed), [1] * length) for seed, length in
               ((1, 5), (1, 6), (2, 5), (1, 5))]  # fmt: skip
    seeds = draw_rules([*choices, None])["seed"].tolist()
    assert len(set(seeds[:3])) == 3
    assert seeds[0] == seeds[3]
    assert seeds[4] != seeds[0]


@pytest.fixture
def device(model, monkeypatch):
    """A stand-in that the model believes to be its device, and that nothing may be allocated on."""
    device = FakeCuda()
    monkeypatch.setattr(device, "allocate", lambda *_: pytest.fail("memory is taken"))
    monkeypatch.setattr(model, "_device", DeviceModel(device, itertools.count(1), TOTAL_BYTES, 0))
    # A library without CUDA kernels cannot answer; for float32 the answer is 0.
    monkeypatch.setattr("ortolan.runtime.model.decode_scratch_bytes", lambda query: 0)
    return device


def test_pools_that_do_not_fit_are_refused_before_any_is_made(model, device):
    free = f"{TOTAL_BYTES} of {TOTAL_BYTES} are free"
    with pytest.raises(CapacityError, match=rf"of page pools and 0 of .* scratch memory on cuda:0; {free}"):
        Engine(model, 10**6, 2 * TOTAL_BYTES)
    assert device.trims


def test_a_full_device_is_named(model, device, monkeypatch):
    monkeypatch.setattr(device, "memory", lambda: (10, TOTAL_BYTES))
    with pytest.raises(CapacityError, match="cuda:0 has 10 bytes free, too few for an engine"):
        Engine(model, 4)
    assert device.trims
