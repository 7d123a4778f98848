"""Lets a forked process end, which has ONNX Runtime's objects and none of the threads that they wait for at their end.

In the child, sessions are never freed, and after Python has ended the process ends at once: what ONNX Runtime does at
the exit of a process (it joins threads of its own, of every session and others) would wait for ever, or abort.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from typing import Any

_sessions: weakref.WeakSet[Any] = weakref.WeakSet()  # of the process, as a fork is one of all of it


def outlive_forks(session: Any) -> None:
    """Keep a session of ONNX Runtime from being freed in processes that are forked from this one."""
    _sessions.add(session)
    _watch()


@functools.cache
def _watch() -> None:
    os.register_at_fork(after_in_child=_enter_child)


def _enter_child() -> None:
    for session in _sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        libc.on_exit(libc._exit, None)  # called first, with the exit status
