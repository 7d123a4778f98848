"""Refuses to use a sequence from two places at once, or in a process that was forked after it was made."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ortolan.errors import ConfigError, ForkedProcessError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Process:
    """The process that something was made in."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is that one, and not one forked from it."""
        return os.getpid() == self._number

    def check(self, what: str) -> None:
        """Raise ForkedProcessError in a process that was forked from that one."""
        if not self.is_here:
            raise ForkedProcessError(
                f"{what} of process {self._number} is used in process {os.getpid()}, which was forked from it; threads "
                "do not survive a fork, so load the model in the process that uses it, or start that one with 'spawn'"
            )


class Use:
    """Who uses a sequence: one call at a time, in the process that made it.

    Attributes:
        lock: held while a call uses the sequence.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process = Process()

    def check(self) -> None:
        """Raise ConfigError while a call uses the sequence, and ForkedProcessError in a process forked later."""
        self._process.check("a session")
        if self.lock.locked():
            raise ConfigError(
                "the session is in use: another call, in this thread or in another, has not returned; wait for it, or "
                "give each thread a session of its own"
            )


class Used(Protocol):
    """What belongs to a sequence."""

    @property
    def use(self) -> Use:
        """Who uses the sequence."""


User = TypeVar("User", bound=Used)


def exclusive(
    method: Callable[Concatenate[User, Parameters], Result],
) -> Callable[Concatenate[User, Parameters], Result]:
    """Let a method be the only one that uses its sequence; of two threads that call at once, one may wait.

    No interrupt leaves the lock held: the interpreter handles none between taking it and entering the block, nor
    between leaving the block and giving it back. A lock that is only tried would leave such a gap.
    """

    @functools.wraps(method)
    def alone(self: User, /, *args: Parameters.args, **options: Parameters.kwargs) -> Result:
        use = self.use
        use.check()
        with use.lock:
            return method(self, *args, **options)

    return alone
