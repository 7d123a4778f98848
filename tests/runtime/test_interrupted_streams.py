"""An exception that a signal's handler raises in the middle of reading a stream leaves nothing locked."""

import random
import signal
import threading

import pytest

from ortolan.runtime.engine.stream import Outbox
from ortolan.runtime.generate.turn import Shown


class SignalError(Exception):
    pass


@pytest.fixture
def interrupts():
    """Raise SignalError in the main thread some microseconds after each call."""

    def interrupt(*_):
        raise SignalError

    before = signal.signal(signal.SIGALRM, interrupt)
    rng = random.Random(0)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 400e-6))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_reader_leaves_the_outbox_to_its_writer(interrupts):
    outbox = Outbox()

    def write():
        outbox.put([Shown(1, None)])

    for _ in range(300):
        try:
            interrupts()
            while True:
                write()
                outbox.take()
        except SignalError:
            pass
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(10)
        assert not writer.is_alive(), "the lock was left locked"
