"""The engine's thread, its streams, and what it answers to bad requests."""

import asyncio
import gc
import threading
import time

import numpy as np
import pytest
from fake_batch import BREAKING, expected_tokens, make_manifest
from fake_batch import make_engine as make_fake_engine

from ortolan import SnapKv
from ortolan.errors import CapacityError, ConfigError, EngineClosedError, OrtolanError, RequestCancelledError

SNAPKV = SnapKv(budget=20, window=8, sink=2)
LONG = 200  # tokens: no request of a test ends by itself before it is cancelled


def draw_prompt(count, seed=0):
    return np.random.default_rng(seed).integers(0, 50, count).tolist()


@pytest.fixture
def manifest():
    return make_manifest(rings=False)


@pytest.fixture
def make_engine(manifest):
    engines = []

    def make(pages=64, overcommit=1.0, **options):
        engines.append(make_fake_engine(manifest, pages, overcommit, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def held(make_engine):
    """An engine that takes only as many steps as `allow` was told, until `release` is called."""
    engine, permits, free = make_engine(), threading.Semaphore(0), threading.Event()
    core = core_of(engine)
    run = core.stepper.run

    def wait_and_run(rows):
        if not free.is_set():
            permits.acquire()
        return run(rows)

    def release():
        free.set()
        permits.release()

    core.stepper.run = wait_and_run
    engine.allow, engine.release = permits.release, release
    yield engine
    release()


def core_of(engine):
    return engine.worker.ask(lambda core: core)


def assert_nothing_held(engine):
    memory = engine.memory()
    assert memory.held_bytes == 0
    assert memory.kept_bytes + memory.free_bytes == memory.pool_bytes == engine.plan.bytes


def test_streams_yield_what_each_prompt_gets_alone(make_engine, manifest):
    engine = make_engine()
    prompts = [draw_prompt(count, count) for count in (1, 30, 70, 5, 16)]
    streams = [engine.submit(prompt, 20) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert list(stream) == expected_tokens(manifest, prompt, 20)
        assert (stream.finish_reason, stream.error, stream.done) == ("length", None, True)
        assert stream.prompt_tokens == len(prompt)
    assert_nothing_held(engine)
    stats = engine.stats()
    assert (stats.finished, stats.failed, stats.generated_tokens) == (5, 0, 100)


def test_asynchronous_loops_share_one_event_loop(make_engine, manifest):
    engine = make_engine()
    prompts = [draw_prompt(20 + i, i) for i in range(6)]

    async def read(prompt):
        return [token async for token in engine.submit(prompt, 15)]

    async def read_all():
        return await asyncio.gather(*(read(prompt) for prompt in prompts))

    assert asyncio.run(read_all()) == [expected_tokens(manifest, prompt, 15) for prompt in prompts]
    assert_nothing_held(engine)


def test_many_threads_submit_and_read(make_engine, manifest):
    engine, wrong = make_engine(), []

    def work(seed):
        for turn in range(5):
            prompt = draw_prompt(10 + seed + turn, 10 * seed + turn)
            if engine.submit(prompt, 12).result() != expected_tokens(manifest, prompt, 12):
                wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert engine.stats().finished == 40
    assert_nothing_held(engine)


def divide_by_zero(stream):
    for token in stream:
        raise ZeroDivisionError(token)


@pytest.mark.parametrize("how", ["break", "exception", "cancel", "next and cancel"])
def test_a_loop_that_is_left_cancels_its_request_alone(held, manifest, how):
    engine = held
    other = engine.submit(draw_prompt(30, 1), 40)
    stream = engine.submit(draw_prompt(20), LONG)
    engine.allow(5)
    if how == "break":
        for _ in stream:
            break
    elif how == "exception":
        with pytest.raises(ZeroDivisionError):
            divide_by_zero(stream)
    else:
        if how == "next and cancel":
            next(stream)
        stream.cancel()
    engine.release()
    assert isinstance(stream.error, RequestCancelledError)
    assert stream.done
    assert stream.finish_reason is None
    with pytest.raises(RequestCancelledError):
        list(stream)
    assert other.result() == expected_tokens(manifest, draw_prompt(30, 1), 40)
    assert_nothing_held(engine)
    assert engine.stats().failed == 1


@pytest.mark.parametrize("how", ["exception", "task"])
def test_an_asynchronous_loop_that_is_left_cancels_its_request(held, how):
    engine = held
    engine.allow(5)

    async def read(stream):
        async for _ in stream:
            if how == "exception":
                raise ZeroDivisionError

    async def run():
        stream = engine.submit(draw_prompt(20), LONG)
        task = asyncio.create_task(read(stream))
        if how == "task":
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises((ZeroDivisionError, asyncio.CancelledError)):
            await task
        gc.collect()  # the generator of the loop
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return stream

    stream = asyncio.run(run())
    engine.release()
    assert isinstance(stream.error, RequestCancelledError)
    assert_nothing_held(engine)


def test_a_token_that_a_closed_loop_waited_for_goes_to_the_next_reader(held, manifest):
    stream = held.submit(draw_prompt(9), 12)

    async def give_up():
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    held.release()
    assert [next(stream), *stream] == stream.result() == expected_tokens(manifest, draw_prompt(9), 12)


def test_two_loops_read_from_one_engine(make_engine, manifest):
    engine, results = make_engine(), {}

    def run_loop(seed):
        async def read():
            results[seed] = [token async for token in engine.submit(draw_prompt(20, seed), 15)]

        asyncio.run(read())

    threads = [threading.Thread(target=run_loop, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: expected_tokens(manifest, draw_prompt(20, seed), 15) for seed in range(3)}


def test_tokens_before_a_cancel_are_still_read(held, manifest):
    held.allow(6)
    stream = held.submit(draw_prompt(9), LONG)
    taken = [next(stream) for _ in range(5)]
    stream.cancel()
    stream.cancel()
    assert taken == list(stream.tokens)[:5] == expected_tokens(manifest, draw_prompt(9), 5)


def test_a_request_that_waits_can_be_cancelled(held):
    streams = [held.submit(draw_prompt(20, i), 5) for i in range(6)]
    streams[5].cancel()
    held.release()
    assert [len(stream.result()) for stream in streams[:5]] == [5] * 5
    with pytest.raises(RequestCancelledError):
        streams[5].result()
    assert_nothing_held(held)
    assert held.stats().most_running == 4


def test_bad_requests_are_refused_alone(make_engine, manifest):
    engine = make_engine(pages=6)
    good = engine.submit(draw_prompt(20), 30)
    bad = [
        (ConfigError, "at least one", {"token_ids": []}),
        (ConfigError, "one dimension", {"token_ids": [[1, 2]]}),
        (ConfigError, "integers", {"token_ids": [[1], [2, 3]]}),
        (ConfigError, "type", {"token_ids": [0.5]}),
        (ConfigError, "must lie in", {"token_ids": [60]}),
        (ConfigError, "must lie in", {"token_ids": [-1]}),
        (ConfigError, "max_new_tokens", {"token_ids": [1], "max_new_tokens": 0}),
        (ConfigError, "max_new_tokens", {"token_ids": [1], "max_new_tokens": 2.5}),
        (ConfigError, "stop", {"token_ids": [1], "stop": [99]}),
        (ConfigError, "sampling", {"token_ids": [1], "sampling": 0.7}),
        (ConfigError, "ignore_eos", {"token_ids": [1], "ignore_eos": "no"}),
        (ConfigError, "eviction is", {"token_ids": [1], "snapkv": {"budget": 100}}),
        (ConfigError, "the same option", {"token_ids": [1], "snapkv": SNAPKV, "eviction": SNAPKV}),
        (ConfigError, "logprobs", {"token_ids": [1], "logprobs": 65}),
        (CapacityError, "max_context", {"token_ids": [1] * 257}),
        (CapacityError, "pages of 'full'", {"token_ids": [1] * 90, "max_new_tokens": 20}),
    ]
    for kind, text, arguments in bad:
        with pytest.raises(kind, match=text):
            engine.submit(**arguments)
    broken = engine.submit([BREAKING], 5)
    with pytest.raises(OrtolanError, match="decoder graph"):
        list(broken)
    assert good.result() == expected_tokens(manifest, draw_prompt(20), 30)
    assert_nothing_held(engine)


def is_closing(engine):
    try:
        engine.worker.send(lambda core: None)
    except EngineClosedError:
        return True
    return False


def test_closing_ends_all_requests(held):
    streams = [held.submit(draw_prompt(20, i), LONG) for i in range(6)]
    closing = threading.Thread(target=held.close)
    closing.start()
    while not is_closing(held):
        time.sleep(0.001)
    held.release()
    closing.join()
    held.close()
    for stream in streams:
        with pytest.raises(EngineClosedError):
            stream.result()
        stream.cancel()
    for call in (lambda: held.submit([1]), held.stats, held.memory):
        with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):  # of whatever request, nothing
            call()


def test_a_closed_engine_says_so_of_what_would_never_fit(manifest):
    engine = make_fake_engine(manifest, 2)
    for error in (CapacityError, EngineClosedError):
        with pytest.raises(error):
            engine.submit(draw_prompt(40, 0), 60)
        engine.close()


def test_an_engine_that_is_dropped_ends_its_thread(manifest):
    others = set(threading.enumerate())
    engine = make_fake_engine(manifest, 32)
    (thread,) = set(threading.enumerate()) - others
    stream = engine.submit([1, 2], 5)
    stream.result()
    del engine
    gc.collect()
    assert thread.is_alive()
    del stream
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.parametrize("failure", [ValueError("a bug"), SystemExit("a bug"), KeyboardInterrupt("a bug")], ids=repr)
@pytest.mark.parametrize("where", ["stepper", "pools", "call"])
def test_what_ends_the_thread_reaches_every_reader(held, where, failure):
    """Those that run, those that wait, and who sent what it did not come to."""
    core = core_of(held)

    def fail(*_):
        raise failure

    def submit_all(_):  # before the next step
        streams = [held.submit(draw_prompt(9, i), LONG) for i in range(6)]
        if where == "call":
            held.worker.send(fail)
            held.worker.send(fail)  # a second one keeps nobody from learning of the first
        return streams

    if where == "stepper":
        core.stepper.failure = failure
    if where == "pools":
        core.pools.begin = fail
    streams = held.worker.ask(submit_all)
    held.release()
    for stream in streams:
        with pytest.raises(EngineClosedError, match="a bug") as caught:
            stream.result()
        assert caught.value.__cause__ is failure
        assert stream.finish_reason is None
    for call in (lambda: held.submit([1]), held.stats, held.memory):
        with pytest.raises(EngineClosedError, match=r"^the engine is closed, .*a bug"):
            call()
    held.close()
    assert core.stepper.is_closed
    assert core.scheduler.held_bytes == 0


def test_who_waits_for_an_answer_learns_that_the_thread_ended(make_engine):
    engine = make_engine()
    with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
        engine.worker.ask(lambda core: 1 // 0)


def test_prefixes_serve_later_requests(make_engine, manifest):
    engine = make_engine()
    prompt = draw_prompt(50)
    for tail in ([], [3], [4, 5]):
        assert engine.submit([*prompt, *tail], 10).result() == expected_tokens(manifest, [*prompt, *tail], 10)
    assert engine.stats().reused_tokens == 2 * 48
    assert engine.memory().kept_bytes > 0
    assert engine.submit(prompt, 10, snapkv=SNAPKV).result() == expected_tokens(manifest, prompt, 10, SNAPKV)
    assert engine.stats().reused_tokens == 2 * 48
    assert_nothing_held(engine)


def test_pages_grow_with_the_sequence_and_are_given_back(held):
    core = core_of(held)
    held.allow(1)
    stream = held.submit(draw_prompt(17), 40)
    page = held.plan.kinds[0].page_bytes
    next(stream)
    assert core.scheduler.held_bytes == 2 * page
    held.allow(16)
    for _ in range(16):
        next(stream)
    assert core.scheduler.held_bytes == 3 * page
    held.release()
    stream.result()
    assert_nothing_held(held)
