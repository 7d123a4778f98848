"""Checks that a wheel and an sdist hold each of the package's files once, under the right name, and no links."""

from __future__ import annotations

import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

PACKAGES: dict[str, str] = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"][
    "wheel"
]["packages"]
KINDS = {".py", ".json", ".safetensors", ".typed"}  # of the files that a wheel takes from the sources


def expected_names() -> dict[str, str]:
    """Map each file's name in a wheel to its name in an sdist."""
    names = {}
    for package, folder in PACKAGES.items():
        for path in Path(folder).rglob("*"):
            inside = path.relative_to(folder)
            if path.suffix in KINDS and inside.parts[0] not in ("build_tools", "csrc"):
                names[f"{package}/{inside}"] = str(path)
    return names


def check(found: list[str], expected: set[str], source: Path) -> None:
    """Exit where the found names are not the expected ones, each once."""
    wrong = [name for name, count in (Counter(expected) - Counter(found)).items() for _ in range(count)]
    wrong += (Counter(found) - Counter(expected)).elements()
    if wrong:
        sys.exit(f"{source}: missing, doubled or not expected: {', '.join(sorted(wrong))}")


def check_wheel(path: Path, expected: set[str]) -> None:
    """Check a wheel; metadata and what CMake installs are left out."""
    with zipfile.ZipFile(path) as wheel:
        check([name for name in wheel.namelist() if Path(name).suffix in KINDS], expected, path)


def check_sdist(path: Path, expected: set[str]) -> None:
    """Check an sdist; what lies outside the packages' folders is left out."""
    with tarfile.open(path) as sdist:
        members = sdist.getmembers()
    links = [member.name for member in members if member.issym() or member.islnk()]
    if links:
        sys.exit(f"{path}: links: {', '.join(links)}")
    names = [member.name.partition("/")[2] for member in members]
    folders = set(PACKAGES.values())
    inside = [name for name in names if name.partition("/")[0] in folders and Path(name).suffix in KINDS]
    check([name for name in inside if not name.startswith("custom_ops/build_tools/")], expected, path)


def main() -> None:
    """Check the files that the command line names."""
    names = expected_names()
    for path in map(Path, sys.argv[1:]):
        if path.suffix == ".whl":
            check_wheel(path, set(names))
        else:
            check_sdist(path, set(names.values()))


if __name__ == "__main__":
    main()
