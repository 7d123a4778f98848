"""What `import ortolan` offers, before anything else of the package is imported."""

import inspect
import subprocess
import sys

import pytest

import ortolan
from ortolan import errors


def test_every_error_is_named_by_the_package():
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert kinds == {name for name in ortolan.__all__ if name.endswith("Error")}
    assert all(getattr(ortolan, name) is getattr(errors, name) for name in kinds)


@pytest.mark.parametrize("name", ["errors", "CapacityError", "Stream", "export", "runtime", "__version__"])
def test_names_are_there_from_the_start(name, tmp_path):
    code = f"import ortolan; assert {name!r} in dir(ortolan); ortolan.{name}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_export_says_what_it_takes():
    parameters = inspect.signature(ortolan.export).parameters
    assert list(parameters)[:4] == ["hf_dir", "out_dir", "dtype", "max_context"]
    assert parameters["dtype"].default == "float32"
