"""The errors that Ortolan raises, from one base class."""


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
    """A file is no saved session, or is truncated or altered."""


class StorageError(OrtolanError, OSError):
    """A file cannot be written: the disk is full, or something else of the file system is in the way."""


class OpLibraryError(OrtolanError, RuntimeError):
    """The operator library or ONNX Runtime is missing, unusable or of the wrong kind."""


class CapacityError(OrtolanError, RuntimeError):
    """A cache cannot hold what was asked for, or no longer holds it."""


class NumericError(OrtolanError, ArithmeticError):
    """A model produced logits that are not numbers."""


class RequestCancelledError(OrtolanError, RuntimeError):
    """A request was cancelled before its tokens were all read."""


class EngineClosedError(OrtolanError, RuntimeError):
    """An engine was closed, or failed as a whole, before a request ended."""
