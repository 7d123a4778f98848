"""Which ortolan the tests of a checkout import."""

import shutil
import subprocess
import sys
from pathlib import Path

import checkout
import pytest


@pytest.fixture
def choose(tmp_path):
    """Choose in a checkout of its own, in a process without installed packages; returns what is missing and where."""
    (tmp_path / "tests").mkdir()
    shutil.copy(checkout.__file__, tmp_path / "tests")
    (tmp_path / "ortolan").mkdir()
    (tmp_path / "ortolan" / "__init__.py").touch()

    def run(*paths: Path) -> list[str]:
        code = (
            f"import sys; sys.path[:0] = {[str(path) for path in paths]}\n"
            f"sys.path.append({str(tmp_path / 'tests')!r}); import checkout\n"
            "print(checkout.choose())\n"
            "import ortolan; print(ortolan.__file__)\n"
        )
        command = [sys.executable, "-S", "-c", code]
        result = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
        return result.stdout.splitlines()

    return run


def make_library(folder: Path) -> None:
    library = folder / checkout.LIBRARY.relative_to(checkout.ROOT)
    library.parent.mkdir(parents=True)
    library.touch()


def make_installed(folder: Path) -> Path:
    (folder / "ortolan").mkdir(parents=True)
    (folder / "ortolan" / "__init__.py").touch()
    return folder


def test_a_checkout_with_its_library_is_tested(choose, tmp_path):
    make_library(tmp_path)
    installed = make_installed(tmp_path / "installed")
    assert choose(installed) == ["None", str(tmp_path / "ortolan" / "__init__.py")]


def test_the_installed_package_is_tested_where_there_is_no_library(choose, tmp_path):
    installed = make_installed(tmp_path / "installed")
    assert choose(tmp_path, installed) == ["None", str(installed / "ortolan" / "__init__.py")]


def test_one_line_says_what_to_run_where_there_is_neither(choose, tmp_path):
    (line,) = choose(tmp_path)
    assert "run `pip install -e '.[test]'`" in line
