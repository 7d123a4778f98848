"""The engine's steps for CUDA on a device of NumPy arrays, against those of the host."""

import dataclasses
import weakref

import numpy as np
import pytest
from fake_cuda import TOTAL_BYTES, FakeSampler, on_fake_cuda

from ortolan import Engine, Eviction, Sampling, SnapKv
from ortolan.errors import CapacityError, NumericError
from ortolan.runtime.caches.plan import plan_pools
from ortolan.runtime.caches.store import CacheStore
from ortolan.runtime.steps import bucket, cuda
from ortolan.runtime.steps.cuda import batch_sizes
from ortolan.runtime.steps.row import Row

SNAPKV = SnapKv(budget=40, window=8, sink=2)
KVZIP = Eviction(policy="kvzip", budget=40, window=8, sink=2, piece=10, lead=4)


@pytest.fixture(params=["paged", "paged_mixed", "paged_sharing"])
def model(request):
    return request.getfixturevalue(f"{request.param}_model")


class SpoiledSession:
    """ONNX Runtime's session of the decoder, whose logits hold NaN in row 1 from a run on."""

    def __init__(self, session, device, monkeypatch):
        self._session, self._bind_output = session, device.bind_output
        self._logits = {}
        self.runs_left = None  # sound runs; None: all are
        monkeypatch.setattr(device, "bind_output", self.bind_output)

    def __getattr__(self, name):
        return getattr(self._session, name)

    def bind_output(self, binding, name, array):
        self._logits[id(binding)] = array
        self._bind_output(binding, name, array)

    def run_with_iobinding(self, binding, options):
        self._session.run_with_iobinding(binding, options)
        if self.runs_left is not None:
            self.runs_left -= 1
            if self.runs_left < 0:
                self._logits[id(binding)][1:2] = np.nan


@pytest.fixture
def fake(model, monkeypatch):
    """The model on the stand-in; the CPU's operators refuse rows of nobody, so that every batch size is whole."""
    monkeypatch.setattr(cuda, "batch_sizes", lambda most: tuple(range(1, most + 1)))
    return on_fake_cuda(model, monkeypatch)


@pytest.fixture
def make_engine(fake):
    engines = []

    def make(max_sequences=4, max_cache_bytes=None, chunk_tokens=24, overcommit=1.0):
        engines.append(Engine(fake, max_sequences, max_cache_bytes, chunk_tokens, overcommit=overcommit))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def core_of(engine):
    return engine.worker.ask(lambda core: core)


def serve(engine, prompts, new=30, options=(), **more):
    def submit_all(_):
        return [
            engine.submit(prompt, new, *options, ignore_eos=True, **{k: v[i] for k, v in more.items()})
            for i, prompt in enumerate(prompts)
        ]

    streams = engine.worker.ask(submit_all)  # between two steps
    results = [stream.result() for stream in streams]
    assert engine.memory().held_bytes == 0
    return results


def test_tokens_are_those_of_the_host(model, make_engine, draw_tokens):
    prompts = [draw_tokens(count, seed=count) for count in (1, 15, 16, 17, 90, 200, 33)]
    results = serve(make_engine(), prompts)
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results == serve(host, prompts)


@pytest.mark.parametrize("eviction", [SNAPKV, KVZIP], ids=lambda each: each.policy)
def test_evictions_and_preemptions_are_those_of_the_host(model, make_engine, draw_tokens, eviction):
    prompts = [draw_tokens(80, seed=seed) for seed in range(6)]
    snapkv = [eviction if seed % 2 else None for seed in range(6)]
    plan = plan_pools(model.manifest, 6, None, 32, cuda=True)
    budget = sum((33 if kind.grows else 6 * kind.pages_for(512)) * kind.page_bytes for kind in plan.kinds)
    engine = make_engine(6, budget, 32, overcommit=5.0)
    results = serve(engine, prompts, 120, snapkv=snapkv)
    assert engine.stats().preemptions > 0
    assert engine.stats().evictions >= 3
    with Engine(model, 6, chunk_tokens=32) as host:
        assert results == serve(host, prompts, 120, snapkv=snapkv)


def test_closing_gives_the_memory_back(fake, make_engine, draw_tokens):
    engine = make_engine()
    serve(engine, [draw_tokens(20)], 5)
    core, trims = core_of(engine), fake.device.cuda.trims
    engine.close()
    assert fake.device.cuda.trims == trims + 1
    assert core.pools.bytes == 0


@pytest.mark.parametrize("eviction", [SNAPKV, KVZIP], ids=lambda each: each.policy)
def test_many_evict_in_one_step(model, make_engine, draw_tokens, eviction):
    prompts = [draw_tokens(60, seed=seed) for seed in range(8)]
    results = serve(make_engine(8, None, 500), prompts, 20, snapkv=[eviction] * 8)
    with Engine(model, 8, chunk_tokens=500) as host:
        assert results == serve(host, prompts, 20, snapkv=[eviction] * 8)


def test_draws_depend_on_seed_and_place_alone(model, make_engine, draw_tokens):
    options = Sampling(temperature=1.5, top_k=30, repetition_penalty=1.2, seed=4)
    prompt = draw_tokens(50)
    alone = make_engine().submit(prompt, 40, options, ignore_eos=True).result()
    engine = make_engine()
    others = [engine.submit(draw_tokens(30 + i, seed=i), 10 + 7 * i) for i in range(3)]
    assert engine.submit(prompt, 40, options, ignore_eos=True).result() == alone
    assert all(other.result() is not None for other in others)
    assert len(set(alone)) > 5


def test_a_penalty_sees_all_tokens_while_prompts_are_read(model, make_engine, draw_tokens, monkeypatch):
    start, unknown = FakeSampler.start, []

    def note(sampler, draws):
        unknown.extend(token for draw in draws if draw is not None for token in draw.seen if token < 0)
        start(sampler, draws)

    monkeypatch.setattr(FakeSampler, "start", note)
    options = Sampling(repetition_penalty=1.3)
    engine = make_engine()

    def submit_both(_):
        return [
            engine.submit(draw_tokens(10), 60, options, ignore_eos=True),
            engine.submit(draw_tokens(400, seed=1), 30, ignore_eos=True),
        ]

    results = [stream.result() for stream in engine.worker.ask(submit_both)]
    assert not unknown
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results[0] == host.submit(draw_tokens(10), 60, options, ignore_eos=True).result()
        assert results[1] == host.submit(draw_tokens(400, seed=1), 30, ignore_eos=True).result()


def test_steps_do_not_wait_for_those_before(model, make_engine, draw_tokens, monkeypatch):
    """Prompts and decodes that join and leave feed what the step before chose, from the device."""
    engine = make_engine()
    stepper = core_of(engine).stepper
    sources, run = [], stepper.run

    def note(rows):
        sources.append([row.source for row in rows])
        return run(rows)

    monkeypatch.setattr(stepper, "run", note)
    prompts = [draw_tokens(count, seed=count) for count in (20, 22, 70, 9)]
    results = serve(engine, prompts, 40)
    decoding = [source for row in sources for source in row]
    assert decoding.count(None) <= 4 + sum(-(-len(prompt) // 20) for prompt in prompts)
    assert any(None in row and set(row) != {None} for row in sources)
    assert any(row and row != list(range(len(row))) and None not in row for row in sources)
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results == serve(host, prompts, 40)


def test_the_host_writes_nothing_but_pages_while_the_same_sequences_decode(fake, make_engine, draw_tokens, monkeypatch):
    engine, written = make_engine(), []  # bytes of each copy since the step before
    first, later = [], []  # the layouts of captured steps, and what each wrote
    write, choose = fake.device.cuda.write, bucket.Bucket.choose

    def note_write(target, source):
        written.append(source.nbytes)
        write(target, source)

    def note_step(target, rows, *, goes_on, staging, **more):
        if staging is None:
            (later if goes_on else first).append((target.layout, tuple(written)))
        written.clear()
        return choose(target, rows, goes_on=goes_on, staging=staging, **more)

    monkeypatch.setattr(fake.device.cuda, "write", note_write)
    monkeypatch.setattr(bucket.Bucket, "choose", note_step)
    serve(engine, [draw_tokens(20 + i, seed=i) for i in range(3)], 60)
    assert 0 < len(first) <= 4
    assert all(copies[-1] == layout.bytes for layout, copies in first)
    assert all(copies in ((), (layout.bytes - layout.tables_begin,)) for layout, copies in later)
    assert 0 < sum(len(copies) for _, copies in later) < engine.stats().steps / 2


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
    model, fake, make_engine, draw_tokens, monkeypatch
):
    engine = make_engine()
    made = refuse(monkeypatch, fake.device.cuda, "bind_output", {1})  # after the prompt's
    results = serve(engine, [draw_tokens(20)], 30)
    assert len(made) >= 3
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results == serve(host, [draw_tokens(20)], 30)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        ("store", "make_captures", 0),
        ("sampler", "start", 0),
        ("sampler", "choose", 0),
        ("device", "bind_output", 0),
        ("device", "event", 1),
    ],
)
def test_a_step_that_fails_waits_for_what_reads_its_pinned_memory(
    fake, make_engine, draw_tokens, monkeypatch, owner, name, call
):
    engine, device = make_engine(), fake.device.cuda
    owners = {"store": CacheStore, "sampler": FakeSampler, "device": device}
    pinned, held = [], []
    pin, synchronize = device.pinned, device.synchronize

    def note_pinned(shape, dtype):
        array = pin(shape, dtype)
        pinned.append(weakref.ref(array))
        return array

    def note_held():
        held.append(pinned[bucket.STAGING_BUFFERS]() is not None)  # the step's inputs, after the bucket's own
        synchronize()

    monkeypatch.setattr(device, "pinned", note_pinned)
    monkeypatch.setattr(device, "synchronize", note_held)
    refuse(monkeypatch, owners[owner], name, {call})
    with pytest.raises(CapacityError):
        serve(engine, [draw_tokens(20)], 30)
    assert held == [True]
    assert len(serve(engine, [draw_tokens(20)], 30)[0]) == 30


@pytest.mark.parametrize("when", [0, 1, 5])
def test_logits_that_are_no_numbers_fail_their_request_alone(fake, make_engine, draw_tokens, monkeypatch, when):
    session = SpoiledSession(fake.decoder.session, fake.device.cuda, monkeypatch)
    fake.decoder = dataclasses.replace(fake.decoder, session=session)
    engine = make_engine()
    wanted = serve(engine, [draw_tokens(20)], 30)[0]

    def submit_both(_):
        session.runs_left = when
        return [engine.submit(draw_tokens(20 + i, seed=i), 30, ignore_eos=True) for i in range(2)]

    first, second = engine.worker.ask(submit_both)
    with pytest.raises(NumericError):
        second.result()
    assert len(second.tokens) <= when
    assert first.result() == wanted
    assert core_of(engine).scheduler.held_bytes == 0


def test_log_probabilities_of_some_of_a_batch_are_those_of_the_host(model, make_engine, draw_tokens):
    prompts = [draw_tokens(20 + 9 * seed, seed=seed) for seed in range(3)]
    counts = (5, None, 0)

    def serve_all(engine):
        streams = [engine.submit(prompts[i], 30, ignore_eos=True, logprobs=counts[i]) for i in range(3)]
        return [(stream.result(), stream.logprobs) for stream in streams]

    results = serve_all(make_engine())
    with Engine(model, 4, chunk_tokens=24) as host:
        assert results == serve_all(host)
    assert [len(logprobs) for _, logprobs in results] == [30, 0, 30]


@pytest.mark.parametrize("width", [2, 5, 16, 17])
def test_steps_of_several_tokens_of_each_give_all_their_logits(model, fake, draw_tokens, width):
    """Up to 16 tokens replay one graph per batch size and width; longer ones run kernel by kernel."""
    plan = plan_pools(model.manifest, 3, None, 64, 256, cuda=True)
    tokens = draw_tokens(3 * 4 * width)
    pages = [{k.name: list(range(b, 3 * k.pages_for(256), 3)) for k in plan.kinds} for b in range(3)]
    results = []
    for place in (model, fake):
        _, stepper = place.pool_stepper(plan)
        logits = []
        for step, count in enumerate((3, 3, 2, 2)):
            chunks = [tokens[(4 * b + step) * width :][:width] for b in range(3)]
            rows = [
                Row(tokens=chunks[b], logical=step * width, pages=pages[b], draws=(None,) * width) for b in range(count)
            ]
            logits.append(stepper.run(rows).logits().copy())
        results.append(logits)
        stepper.close()
    for host, device in zip(*results, strict=True):
        np.testing.assert_array_equal(host, device)
    assert next(fake.decoder.graph_ids) == (3 if width <= 16 else 1)


def test_batch_sizes_cover_every_number_of_sequences():
    assert batch_sizes(1) == (1,)
    assert batch_sizes(2) == (1, 2)
    assert batch_sizes(48) == (1, 2, 4, 8, 16, 32, 48)
    assert batch_sizes(64) == (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture
def device(fake, monkeypatch):
    """A stand-in that nothing may be allocated on."""
    monkeypatch.setattr(fake.device.cuda, "allocate", lambda *_: pytest.fail("memory is taken"))
    return fake.device.cuda


def test_pools_that_do_not_fit_are_refused_before_any_is_made(fake, device):
    free = f"{TOTAL_BYTES} of {TOTAL_BYTES} are free"
    with pytest.raises(CapacityError, match=rf"of page pools and 0 of .* scratch memory on cuda:0; {free}"):
        Engine(fake, 10**6, 2 * TOTAL_BYTES)
    assert device.trims


def test_a_full_device_is_named(fake, device, monkeypatch):
    monkeypatch.setattr(device, "memory", lambda: (10, TOTAL_BYTES))
    with pytest.raises(CapacityError, match="cuda:0 has 10 bytes free, too few for an engine"):
        Engine(fake, 4)
    assert device.trims
