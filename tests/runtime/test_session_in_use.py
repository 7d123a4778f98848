"""A session that is used from two places at once refuses one of them, and goes on as if nobody had asked."""

import random
import signal
import threading
import time

import pytest

from ortolan.errors import ConfigError
from ortolan.runtime.ownership import Use, exclusive

CALLS = {
    "prefill": lambda session, path: session.prefill([5, 6]),
    "step": lambda session, path: session.step(5),
    "score": lambda session, path: session.score([5, 6]),
    "generate": lambda session, path: session.generate([5, 6], 3),
    "resume": lambda session, path: session.resume(),
    "rewind": lambda session, path: session.rewind(0),
    "save": lambda session, path: session.save(path),
    "fork": lambda session, path: session.fork(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_while_another_thread_reads_is_refused(endless_full, draw_tokens, tmp_path, name):
    session, reads, go_on = endless_full.session(), threading.Event(), threading.Event()

    def wait(_):
        reads.set()
        go_on.wait(60)

    reader = threading.Thread(target=lambda: session.prefill(draw_tokens(40), progress=wait))
    reader.start()
    assert reads.wait(60)
    with pytest.raises(ConfigError, match="the session is in use: another call"):
        CALLS[name](session, tmp_path / "session")
    go_on.set()
    reader.join()
    assert session.state.history == draw_tokens(40)
    assert (session.step(5) == endless_full.session().prefill([*draw_tokens(40), 5])).all()


def test_a_token_is_taken_by_one_thread_at_a_time(endless_full, draw_tokens):
    """Whoever is refused asks again; all together get every token once, and in their order."""
    expected = list(endless_full.session().generate(draw_tokens(20), 60))
    stream, taken, refused = endless_full.session().generate(draw_tokens(20), 60), [], []

    def take():
        while True:
            try:
                taken.append(next(stream))
            except ConfigError as error:
                refused.append(str(error))
            except StopIteration:
                return

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.tokens == expected
    assert sorted(taken) == sorted(expected)
    assert all("the session is in use" in text for text in refused)


def test_threads_that_call_at_random_meet_errors_alone(endless_full, tmp_path):
    session, strange, deadline = endless_full.session(), [], time.monotonic() + 1.5

    def call(seed):
        rng = random.Random(seed)
        while time.monotonic() < deadline:
            try:
                CALLS[rng.choice(list(CALLS))](session, tmp_path / str(seed))
            except ConfigError:
                pass
            except BaseException as error:
                strange.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not strange
    session.rewind(0)
    assert (session.prefill([5, 6, 7]) == endless_full.session().prefill([5, 6, 7])).all()


def test_a_call_between_two_tokens_ends_the_generation(endless_full, draw_tokens):
    """The session is free then."""
    session = endless_full.session()
    stream = session.generate(draw_tokens(20), 8)
    next(stream)
    session.step(5)
    with pytest.raises(ConfigError, match="used otherwise"):
        next(stream)


class Counter:
    """Something that one call at a time may use."""

    def __init__(self):
        self.use = Use()

    @exclusive
    def count(self):
        return 1


def test_no_interrupt_leaves_a_session_in_use():
    counter, rng = Counter(), random.Random(0)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(10_000):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 3e-5))
                for _ in range(200):
                    counter.count()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            counter.count()
    finally:
        signal.signal(signal.SIGALRM, before)
