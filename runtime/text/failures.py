"""Turns what the tokenizers library raises, its panics included, into an error of Ortolan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ortolan.errors import ContractMismatchError

PANICS = "pyo3_runtime"  # the module of what Rust's panics become: a BaseException that cannot be imported
STDERR = 2  # where Rust writes its own report


@contextlib.contextmanager
def tokenizer_failures(what: str) -> Iterator[None]:
    """Raise ContractMismatchError where the block fails, with `what` before the reason; a TypeError passes."""
    try:
        yield
    except TypeError:
        raise
    except Exception as error:  # the binding has no type of its own
        raise ContractMismatchError(f"{what}: {error}") from error
    except BaseException as error:
        if type(error).__module__ != PANICS:
            raise
        raise ContractMismatchError(f"{what}: the tokenizers library failed, {error}") from error


@contextlib.contextmanager
def without_panic_reports() -> Iterator[None]:
    """Keep what the block writes to the process's standard error until it ends; where it raises, drop it."""
    try:
        real = os.dup(STDERR)
    except OSError:  # closed, as in a daemon
        yield
        return
    memory = os.memfd_create("ortolan-reports")  # a temporary file would need a folder that takes one
    with open(memory, "w+b", buffering=0) as kept, open(real, "wb", buffering=0) as stderr:
        os.dup2(kept.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(real, STDERR)
        kept.seek(0)
        with contextlib.suppress(OSError):  # a full disk, or a pipe that nobody reads
            stderr.write(kept.read())
