"""What a signal's handler raises in the main thread keeps no lock of an engine, whose thread needs it."""

import signal
import threading
import time

import pytest

from ortolan.runtime.engine.stream import Outbox
from ortolan.runtime.engine.worker import Worker


class EndedBySignal(BaseException):
    pass


class IdleCore:
    is_busy = False

    def cancel_all(self, error):
        pass

    def close(self):
        pass


@pytest.fixture
def raising():
    def leave(*_):
        raise EndedBySignal

    before = signal.signal(signal.SIGUSR1, leave)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt_entering(condition, call):
    """Call what enters a condition that another thread has, so that a signal is heeded just when it may enter."""
    held = threading.Event()

    def hold():
        with condition:
            held.set()
            time.sleep(0.2)  # the call below waits by then
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # the main thread goes on waiting

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with pytest.raises(EndedBySignal):
        call()
    holder.join()


def is_free(condition):
    """Say whether another thread can enter a condition."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(condition.acquire(timeout=5) and not condition.release()))
    thread.start()
    thread.join()
    return answers == [True]


@pytest.mark.parametrize("name", ["take", "wait"])
def test_an_outbox(raising, name):
    outbox = Outbox()
    outbox.finish("length")
    interrupt_entering(outbox._condition, getattr(outbox, name))
    assert is_free(outbox._condition)


def test_a_worker(raising):
    worker = Worker(IdleCore())
    interrupt_entering(worker._condition, lambda: worker.send(lambda core: None))
    assert is_free(worker._condition)
    worker.stop()
