"""Finds the operator library, asks what it holds, and registers it with ONNX Runtime."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ortolan.errors import OpLibraryError
from ortolan.version import __version__

LIBRARY_FILE = "libortolan_ops.so"
StructureType = TypeVar("StructureType", bound=ctypes.Structure)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryInfo:
    """What the operator library was built with."""

    version: str
    providers: tuple[str, ...]


def library_path() -> Path:
    """Return the path of the operator library.

    Raises:
        OpLibraryError: the package was installed without it, or is a checkout where it was not built.
    """
    import ortolan.custom_ops

    folders = [Path(folder).resolve() for folder in ortolan.custom_ops.__path__]
    for folder in folders:
        path = folder / "lib" / LIBRARY_FILE
        if path.is_file():
            return path
    for folder in folders:
        if (folder / "CMakeLists.txt").is_file():
            installed = _installed_library()
            if installed is not None:
                return installed
            raise OpLibraryError(
                f"Python runs Ortolan from its source folder {folder.parent}, where no {LIBRARY_FILE} is built; build "
                f"it with `pip install -e {folder.parent}`, or install Ortolan and start Python in another folder"
            )
    raise OpLibraryError(
        f"{LIBRARY_FILE} is not in {', '.join(map(str, folders))}; "
        "reinstall with `pip install --force-reinstall --no-deps ortolan` (a C++ compiler is needed to build it)"
    )


def _installed_library() -> Path | None:
    """Return the library of the installed package, if Python found a source folder of the same version first."""
    from importlib import metadata  # takes longer to import than all of this module

    try:
        distribution = metadata.distribution("ortolan")
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"ortolan/custom_ops/lib/{LIBRARY_FILE}")))
    return path if distribution.version == __version__ and path.is_file() else None


def open_library() -> ctypes.CDLL:
    """Load the library for calls of its plain C functions.

    Raises:
        OpLibraryError: the library is missing or cannot be loaded on this machine.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        library.ortolan_library_info.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise OpLibraryError(f"{path} cannot be loaded: {error}; reinstall ortolan on this machine") from error
    return library


def checked_structure(library: ctypes.CDLL, size_function: str, structure: type[StructureType]) -> type[StructureType]:
    """Return a structure that is passed to the library, whose size the two agree on.

    Args:
        library: the operator library, as `open_library` gives it.
        size_function: name of the library's function that returns the size of its own structure, int64.
        structure: the Python side.

    Raises:
        OpLibraryError: the library lacks the function, or its structure has another size.
    """
    check_size(library, size_function, structure.__name__, ctypes.sizeof(structure))
    return structure


def check_size(library: ctypes.CDLL, size_function: str, name: str, given: int) -> None:
    """Compare the bytes of a structure with those that the library expects; see `checked_structure`."""
    function = getattr(library, size_function, None)
    if function is None:
        raise OpLibraryError(f"the operator library has no function {size_function}; reinstall ortolan")
    function.restype, function.argtypes = ctypes.c_int64, []
    expected = function()
    if expected != given:
        raise OpLibraryError(
            f"{name} has {given} bytes in Python and {expected} in the operator library: "
            "they are of different versions; reinstall ortolan"
        )


def library_info() -> LibraryInfo:
    """Ask the library which execution providers it has kernels for.

    Raises:
        OpLibraryError: the library is missing or cannot be loaded on this machine.
    """
    function = open_library().ortolan_library_info
    version, *providers = function().decode().split(";")
    return LibraryInfo(version=version, providers=tuple(providers))


def register(session_options: Any) -> None:
    """Make Ortolan's operators known to the sessions that are made with these options.

    Options that know them already, by this function or by `register_custom_ops_library`, stay as they are.

    Args:
        session_options: an `onnxruntime.SessionOptions`; changed in place.

    Raises:
        OpLibraryError: the library is missing, or ONNX Runtime refuses it.
    """
    path = library_path()
    if not hasattr(session_options, "register_custom_ops_library"):
        raise OpLibraryError(
            f"register() was given a {type(session_options).__name__}; it must be an onnxruntime.SessionOptions"
        )
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # the binding raises its own exception types, one per status code
        raise OpLibraryError(f"ONNX Runtime refused {path}: {error}") from error


def onnxruntime_problem() -> str | None:
    """Say what is wrong with the installed ONNX Runtime wheels, or None.

    The wheels onnxruntime and onnxruntime-gpu both hold the module `onnxruntime`; installed together, the
    files of the one overwrite those of the other.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed; run `pip install onnxruntime` (CPU) or `pip install onnxruntime-gpu`"
    installed = {name: _version(name) for name in ("onnxruntime", "onnxruntime-gpu")}
    if all(installed.values()):
        return (
            f"onnxruntime {installed['onnxruntime']} and onnxruntime-gpu {installed['onnxruntime-gpu']} are both "
            "installed and overwrite each other; run `pip uninstall -y onnxruntime onnxruntime-gpu`, then "
            "`pip install onnxruntime-gpu`"
        )
    return None


def _version(distribution: str) -> str | None:
    from importlib import metadata  # takes long to import, and is needed where something is wrong

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
