"""The engine on a GPU: tokens are those of sessions, whatever the batch, and nothing of the pools is lost."""

import gc

import numpy as np
import pytest
from cuda_models import ELEMENTS, GRAPHS, draw_tokens, open_device

from ortolan import Engine, Eviction, Sampling, SnapKv
from ortolan.errors import CapacityError, NumericError
from ortolan.policies import POLICIES

pytestmark = pytest.mark.cuda

FAMILIES = ("llama", "gemma3")
COUNTS = (1, 15, 16, 17, 90, 200, 33, 64, 128)
TIE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.15}  # of the logits' spread


@pytest.fixture(params=GRAPHS)
def graph(request):
    return request.param


@pytest.fixture(params=FAMILIES)
def model(request, graph):
    return open_device(request.param, "float32", graph, page_size=16, sink=2)


def assert_same(model, prompt, tokens, dtype="float32", snapkv=None):
    """Assert that each token is the best of a session that is fed the same, except after a tie."""
    session = model.session(snapkv=snapkv)
    logits = session.prefill(prompt)
    for index, token in enumerate(tokens):
        gap = float(logits.max() - logits[token])
        assert gap <= TIE[dtype] * np.std(logits), f"token {index} is {gap:.3g} below the best"
        logits = session.step(token)


def serve(engine, prompts, new, options=None, snapkv=()):
    def submit_all(_):
        return [
            engine.submit(prompt, new, options, ignore_eos=True, snapkv=snapkv[i] if snapkv else None)
            for i, prompt in enumerate(prompts)
        ]

    streams = engine.worker.ask(submit_all)  # between two steps
    results = [stream.result() for stream in streams]
    memory = engine.memory()
    assert memory.held_bytes == 0
    assert memory.kept_bytes + memory.free_bytes == memory.pool_bytes
    return results


@pytest.mark.parametrize("max_sequences", [1, 3, 6, 9])
def test_tokens_are_those_of_sessions(model, max_sequences):
    """Six and nine sequences share graphs of eight and nine rows with sequences that have no tokens."""
    prompts = [draw_tokens(count, seed=count) for count in COUNTS]
    with Engine(model, max_sequences, chunk_tokens=40) as engine:
        results = serve(engine, prompts, 60)
        assert engine.stats().most_running == max_sequences
    for prompt, tokens in zip(prompts, results, strict=True):
        assert_same(model, prompt, tokens)


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_element_types_and_pages(family, dtype, page_size, graph):
    model = open_device(family, dtype, graph, page_size=page_size, sink=2)
    prompts = [draw_tokens(count, seed=count) for count in COUNTS]
    with Engine(model, 5, chunk_tokens=40) as engine:
        results = serve(engine, prompts, 40)
    for prompt, tokens in zip(prompts, results, strict=True):
        assert_same(model, prompt, tokens, dtype)


def test_captured_steps_equal_eager_ones(model):
    prompts = [draw_tokens(count, seed=count) for count in COUNTS]
    results = []
    for captures in (False, True):
        with Engine(model, 6, chunk_tokens=40) as engine:
            engine.worker.ask(lambda core: core).stepper.captures_graphs = captures
            results.append(serve(engine, prompts, 40))
    assert results[0] == results[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_some_of_a_batch_evict(model, policy):
    again = {"piece": 10, "lead": 4} if policy == "kvzip" else {}
    options = [None, Eviction(budget=40, window=8, sink=2, policy=policy, **again), None, SnapKv(budget=60, window=32)]
    prompts = [draw_tokens(count, seed=count) for count in (70, 100, 130, 111)]
    with Engine(model, 4, chunk_tokens=29) as engine:
        results = serve(engine, prompts, 60, snapkv=options)
        assert engine.stats().evictions == 2
    for prompt, tokens, snapkv in zip(prompts, results, options, strict=True):
        assert_same(model, prompt, tokens, snapkv=snapkv)


def test_sequences_give_way_and_come_back(model):
    plan = model.plan_engine(6, None, 32, 512)
    budget = sum((33 if kind.grows else 6 * kind.pages_for(512)) * kind.page_bytes for kind in plan.kinds)
    prompts = [draw_tokens(80, seed=seed) for seed in range(6)]
    snapkv = [SnapKv(budget=40, window=8, sink=2) if seed % 2 else None for seed in range(6)]
    with Engine(model, 6, budget, 32, overcommit=5.0) as engine:
        results = serve(engine, prompts, 120, snapkv=snapkv)
        assert engine.stats().preemptions > 0
    for prompt, tokens, options in zip(prompts, results, snapkv, strict=True):
        assert_same(model, prompt, tokens, snapkv=options)


def test_draws_depend_on_seed_and_place_alone(model):
    options = Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=4)
    with Engine(model, 8, chunk_tokens=64) as engine:
        alone = engine.submit(draw_tokens(50), 60, options, ignore_eos=True).result()
    with Engine(model, 8, chunk_tokens=64) as engine:
        others = [engine.submit(draw_tokens(30 + i, seed=i), 10 + 9 * i, ignore_eos=True) for i in range(5)]
        together = engine.submit(draw_tokens(50), 60, options, ignore_eos=True).result()
        greedy = [other.result() for other in others]
    assert together == alone
    assert len(set(alone)) > 5
    for i, tokens in enumerate(greedy):
        assert_same(model, draw_tokens(30 + i, seed=i), tokens)


def test_cancelled_requests_leave_the_others_alone(model):
    prompts = [draw_tokens(60, seed=seed) for seed in range(6)]
    with Engine(model, 6, chunk_tokens=64) as engine:
        streams = [engine.submit(prompt, 80, ignore_eos=True) for prompt in prompts]
        for turn, stream in enumerate(streams[::2]):
            for _ in range(5 + 7 * turn):
                next(stream)
            stream.cancel()
        results = [stream.result() for stream in streams[1::2]]
        assert engine.memory().held_bytes == 0
    for prompt, tokens in zip(prompts[1::2], results, strict=True):
        assert_same(model, prompt, tokens)


def test_prefixes_serve_later_requests(graph):
    model = open_device("llama", "float32", graph, page_size=16, sink=0)
    prefix = draw_tokens(100)
    prompts = [[*prefix, *draw_tokens(count, seed=count)] for count in (0, 5, 40)]
    with Engine(model, 4, chunk_tokens=64) as engine:
        results = [serve(engine, [prompt], 30)[0] for prompt in prompts]
        assert engine.stats().reused_tokens == 2 * 96
    for prompt, tokens in zip(prompts, results, strict=True):
        assert_same(model, prompt, tokens)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_snapshots_serve_later_requests(graph, family):
    """Rings and recurrent states are copied on the device, between steps that are enqueued behind each other."""
    model = open_device(family, "float32", graph, page_size=16, sink=0)
    prefix = draw_tokens(450)
    prompts = [[*prefix, *draw_tokens(count, seed=count)] for count in (0, 5, 20)]
    with Engine(model, 4, chunk_tokens=64) as engine:
        results = [serve(engine, [prompt], 12)[0] for prompt in prompts]
        assert engine.stats().reused_tokens == 2 * 448
        assert engine.memory().held_bytes == 0
    for prompt, tokens in zip(prompts, results, strict=True):
        assert_same(model, prompt, tokens)


def test_a_pool_larger_than_the_device_is_refused(model):
    free, total = model.device.cuda.memory()
    with pytest.raises(CapacityError):
        Engine(model, 10**6, 2 * total)
    with Engine(model, 2) as engine:
        assert serve(engine, [draw_tokens(20)], 5)
    assert free <= total


def test_closing_gives_the_memory_back(model):
    buffers = model.device.cuda
    buffers.trim()
    before = buffers.pool_bytes
    with Engine(model, 4, chunk_tokens=64) as engine:
        assert serve(engine, [draw_tokens(20)], 5)
        assert buffers.pool_bytes >= before + engine.plan.bytes
    gc.collect()
    buffers.trim()
    assert buffers.pool_bytes <= before


def test_a_spoiled_cache_fails_its_request_alone(monkeypatch):
    """NaN in the pages of one sequence reaches no other."""
    model = open_device("llama", "float32", "plain", page_size=16, sink=2)
    pool_stepper, stores = model.pool_stepper, []

    def note_store(plan):
        store, stepper = pool_stepper(plan)
        stores.append(store)
        return store, stepper

    def spoil(core):
        (sequence, *_others) = core.scheduler.admitted
        with model.device.cuda.scope():
            stores[0].tensors[0]["value"][sequence.pages["full"][0]] = float("nan")

    monkeypatch.setattr(model, "pool_stepper", note_store)
    with Engine(model, 4, chunk_tokens=64) as engine:
        victim = engine.submit(draw_tokens(40), 400, ignore_eos=True)
        other = engine.submit(draw_tokens(41, seed=1), 60, ignore_eos=True)
        next(victim)
        next(other)
        engine.worker.ask(spoil)
        with pytest.raises(NumericError):
            victim.result()
        assert_same(model, draw_tokens(41, seed=1), other.result())
        assert engine.memory().held_bytes == 0
    stores.clear()
