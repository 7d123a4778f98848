"""Which ortolan the tests of a checkout import, and what a checkout does that was not built."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import checkout
import pytest

import ortolan


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


@pytest.fixture
def unbuilt(tmp_path):
    """A fresh clone, without a built library; returns what runs Python in it, with a package installed or without."""
    folder = tmp_path / "clone"
    folder.mkdir()
    without = shutil.ignore_patterns("lib", "csrc", "__pycache__")
    for name in ("ortolan", "custom_ops"):
        shutil.copytree(checkout.ROOT / name, folder / name, symlinks=True, ignore=without)
    for name in ("export", "graphs", "runtime"):
        (folder / name).symlink_to(checkout.ROOT / name)
    for name in ("pyproject.toml", "custom_ops/CMakeLists.txt"):
        shutil.copy(checkout.ROOT / name, folder / name)

    def run(*arguments, installed=ortolan.__version__, site=True):
        packages = tmp_path / "packages"
        information = packages / f"ortolan-{installed}.dist-info" / "METADATA"
        information.parent.mkdir(parents=True)
        information.write_text(f"Metadata-Version: 2.1\nName: ortolan\nVersion: {installed}\n")
        library = packages / "ortolan" / "custom_ops" / "lib"
        library.mkdir(parents=True)
        shutil.copy(ortolan.custom_ops.library_path(), library)
        command = [sys.executable, *([] if site else ["-S"]), *arguments]
        environment = os.environ | {"PYTHONPATH": str(packages) if site else ""}
        return folder, subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_an_unbuilt_checkout_uses_the_library_of_the_installed_package(unbuilt):
    code = (
        "import ortolan; from ortolan.cli.demo import shipped_model\n"
        "model = ortolan.load(ortolan.export(shipped_model(), 'model', max_context=64), device='cpu')\n"
        "print(ortolan.__file__, model.session().prefill([1, 2]).shape)"
    )
    folder, result = unbuilt("-c", code)
    assert result.stdout == f"{folder}/ortolan/__init__.py (264,)\n", result.stderr


def test_an_unbuilt_checkout_of_another_version_says_what_to_run(unbuilt):
    folder, result = unbuilt("-m", "ortolan", "demo", "--length", "600", installed="0.0.1")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"ortolan: error: Python runs Ortolan from its source folder {folder}, where no libortolan_ops.so is built; "
        f"build it with `pip install -e {folder}`, or install Ortolan and start Python in another folder\n"
    )


@pytest.mark.parametrize("name", ["export('a', 'b')", "load('a')", "SnapKv()"])
def test_a_checkout_for_which_nothing_is_installed_says_what_to_run(unbuilt, name):
    folder, result = unbuilt("-c", f"import ortolan; ortolan.{name}", site=False)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: No module named '")
    assert f"from its source folder {folder}, and Ortolan is not installed for this Python; run `pip install -e" in last
