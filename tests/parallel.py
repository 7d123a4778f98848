"""Keeps the processes of pytest-xdist from fighting for the machine's cores."""

from __future__ import annotations

import os


def share_cores() -> None:
    """Limit this process's threads to its share of the cores, where it is one of several.

    The libraries read these limits when they are imported.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    _stop_spinning()


def _stop_spinning() -> None:
    """Let the threads of ONNX Runtime's sessions sleep while they have nothing to do."""
    import onnxruntime

    class SessionOptions(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.intra_op.allow_spinning", "0")

    onnxruntime.SessionOptions = SessionOptions
