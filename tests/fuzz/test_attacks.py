"""Whatever a file, a graph or a binding holds, using it ends well or in an error of Ortolan's.

Each attack runs in a process of its own, with little memory, for `--fuzz-seconds`. A failure names its case;
`--fuzz-first` begins there.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from families import shared_checkpoint, shared_model

TESTS = Path(__file__).parents[1]
ATTACKS = ("bindings", "graphs", "manifests", "sessions", "tokenizers")
HANGING_SECONDS = 60.0  # of one case
OF_MODELS = {"graphs", "manifests", "sessions"}


def tiny_models() -> list[Path]:
    """Make models with full attention, with windows, and with pages."""
    options = {"max_context": 256, "chunk_size": 16, "sink": 2, "snapkv_window": 8}
    pages = {"paged": True, "page_size": 16}
    plain = shared_checkpoint("llama", seed=5, num_hidden_layers=2)
    mixed = shared_checkpoint(
        "gemma3", seed=5, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    return [shared_model(plain, **options), shared_model(mixed, **options), shared_model(mixed, **options, **pages)]


def attack(name: str, folders: list[Path], seconds: float, first: int) -> tuple[int, str, str]:
    """Run an attack; returns its exit status, its last case, and what it wrote to standard error."""
    sanitized = "asan" in os.environ.get("LD_PRELOAD", "")  # its shadow memory is larger than any limit
    command = [sys.executable, "-m", "fuzz.run", name, "--seconds", str(seconds), "--first", str(first)]
    command += [*([] if sanitized else ["--limited"]), *(f"--folder={folder}" for folder in folders)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile("w+", errors="replace") as errors:  # names may be of any bytes
        process = subprocess.Popen(
            command,
            cwd=TESTS,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        )
        last, moved, done = "none", time.monotonic(), threading.Event()

        def watch():
            while not done.wait(1.0):
                if time.monotonic() - moved > HANGING_SECONDS:
                    process.kill()

        watcher = threading.Thread(target=watch)
        watcher.start()
        for line in process.stdout:
            last, moved = line.strip(), time.monotonic()
        done.set()
        watcher.join()
        status = process.wait()
        errors.seek(0)
        return status, last, errors.read()


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_withstood(name, request):
    folders = tiny_models() if name in OF_MODELS else []
    seconds, first = request.config.getoption("--fuzz-seconds"), request.config.getoption("--fuzz-first")
    status, last, errors = attack(name, folders, seconds, first)
    assert status == 0, f"case {last} of {name} ended with status {status}:\n{errors[:8000]}"
