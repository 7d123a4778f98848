"""Which GPU architectures a build of the CUDA kernels refuses."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "custom_ops"
DEFAULT = re.search(r'set\(ORTOLAN_CUDA_ARCHS "([^"]+)"', (FOLDER / "CMakeLists.txt").read_text())

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on the path")


def check(architectures: str) -> tuple[int, str]:
    """Run the build's check; returns its exit status and message."""
    script = FOLDER / "cuda_architectures.cmake"
    command = ["cmake", "-D", f"ORTOLAN_CUDA_ARCHS={architectures}", "-P", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, " ".join(result.stderr.split())


@pytest.mark.parametrize("architecture", ["90", "90-real", "90-virtual"])
@pytest.mark.parametrize("others", ["", "80-real;", "100-real;120;"])
def test_compute_capability_9_without_its_instructions_is_refused(others, architecture):
    status, message = check(others + architecture)
    assert status != 0
    assert f"names {architecture};" in message
    assert "write 90a-real" in message


@pytest.mark.parametrize("architecture", ["native", "all", "all-major"])
def test_names_that_may_stand_for_it_are_refused(architecture):
    status, message = check(architecture)
    assert status != 0
    assert "list architectures" in message


@pytest.mark.parametrize("architectures", [DEFAULT[1], "90a", "90a-real;80", "80-virtual", "103", "120f"])
def test_others_are_taken(architectures):
    assert check(architectures) == (0, "")


def test_the_build_runs_the_check():
    assert "include(cuda_architectures.cmake)" in (FOLDER / "cuda.cmake").read_text()
