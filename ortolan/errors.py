"""The errors that Ortolan raises, from one base class, and the checks of arguments that many of them share."""

from __future__ import annotations

import math
import operator
import pathlib
import typing
from collections import abc

MAX_LENGTH = 2**31 - 1  # tokens; the operators take lengths as int32


class OrtolanError(Exception):
    """Base of every error raised on purpose by Ortolan."""


class ConfigError(OrtolanError, ValueError):
    """An argument or an option has a value that is not allowed."""


class UnsupportedModelError(OrtolanError, ValueError):
    """The checkpoint asks for something that Ortolan does not implement."""


class CheckpointError(OrtolanError, ValueError):
    """A checkpoint is truncated, incomplete or contradicts its own config."""


class ContractMismatchError(OrtolanError, ValueError):
    """A graph, a manifest or a tensor does not match what its reader expects."""


class SessionFileError(OrtolanError, ValueError):
    """A file is not a saved session, or is truncated or altered."""


class StorageError(OrtolanError, OSError):
    """A file cannot be written, because the disk is full or the file system refuses it."""


class OpLibraryError(OrtolanError, RuntimeError):
    """The operator library or ONNX Runtime is missing, unusable or of the wrong kind."""


class DeviceError(OpLibraryError, ValueError):
    """A device was named that cannot be used here."""


class CapacityError(OrtolanError, RuntimeError):
    """A cache cannot hold what was asked for, or no longer holds it."""


class ContextLengthError(CapacityError, ValueError):
    """A sequence would be longer than the context it was planned for."""


class SessionInterruptedError(OrtolanError, RuntimeError):
    """`Session.interrupt` ended a call; what was read before stays, and the session can go on."""


class NumericError(OrtolanError, ArithmeticError):
    """A model produced logits that contain NaN or infinity."""


class RequestCancelledError(OrtolanError, RuntimeError):
    """A request was cancelled before its tokens were all read."""


class EngineClosedError(OrtolanError, RuntimeError):
    """An engine was closed, or failed as a whole, before a request ended."""


class ForkedProcessError(OrtolanError, RuntimeError):
    """A model, a session or an engine was used in a process that was forked after it was made."""


def whole_number(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return an argument as an int; NumPy's integers pass, booleans do not.

    Args:
        name: of the argument, for the message.
        value: what was given.
        least: smallest value that is allowed.
        most: largest one; None: there is none.

    Raises:
        ConfigError: it is not a whole number, or outside its range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        allowed = f", at least {least}" if most is None else f" in {least} .. {most}"
        raise ConfigError(f"{name} is {value!r}; it must be a whole number{allowed}")
    return number


def finite_number(value: object) -> float | None:
    """Return a number as a float; None where it is none, as booleans are, or beyond what a float holds."""
    is_plain = isinstance(value, float | int)  # asked first, as asking a protocol takes long
    if isinstance(value, bool) or not (is_plain or isinstance(value, typing.SupportsFloat)):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):  # arrays, signalling NaNs, huge integers
        return None
    return number if math.isfinite(number) else None


def one_of(name: str, value: object, allowed: abc.Collection[str]) -> str:
    """Return an argument that is one of some words.

    Raises:
        ConfigError: it is not one of them.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    return str(value)


def truth(name: str, value: object) -> bool:
    """Return an argument that is True or False.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False")
    return value


def file_path(name: str, value: object) -> pathlib.Path:
    """Return an argument that names a file or a folder.

    Raises:
        ConfigError: it is neither a text nor a path, or no file can have that name.
    """
    try:
        path = pathlib.Path(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}; it must be a path") from error
    if "\0" in str(path):
        raise ConfigError(f"{name} is {str(path)!r}, which has a null character; no file can have that name")
    return path


def check_progress(given: object) -> None:
    """Check that a `progress` is a function, or None. Raises ConfigError."""
    if given is not None and not callable(given):
        raise ConfigError(f"progress is {given!r}; it must be a function that takes numbers, or None")
