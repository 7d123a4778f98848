"""Which GPU architectures a build of the CUDA kernels chooses, and which it refuses."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "custom_ops"
SCRIPT = FOLDER / "cuda_architectures.cmake"
KNOWN_TO_NVCC = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on the path")


def run(**variables: str) -> tuple[int, str, str]:
    """Run the build's choice; returns its exit status, what it printed and its message."""
    command = ["cmake", *(f"-D{name}={value}" for name, value in variables.items()), "-P", str(SCRIPT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, " ".join(result.stderr.split())


def chosen(**variables: str) -> str:
    """Return the architectures that the build chooses, as it prints them."""
    status, output, message = run(**variables)
    assert (status, message) == (0, "")
    return re.fullmatch(r"-- ortolan: CPU kernels, and CUDA kernels for (\S+)\n", output)[1]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Put an nvidia-smi on the path that prints the given text, and an nvcc; machine(text, status=0)."""

    def make(text: str, status: int = 0) -> dict[str, str]:
        programs = {
            "nvidia-smi": f'[ "$*" = "--query-gpu=compute_cap --format=csv,noheader" ]; printf "{text}"; exit {status}',
            "nvcc": f'[ "$*" = --list-gpu-code ]; printf "%s\\n" {" ".join(KNOWN_TO_NVCC)}',
        }
        for name, body in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh -e\n{body}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return {"ORTOLAN_CUDA": "AUTO", "CMAKE_CUDA_COMPILER": str(tmp_path / "nvcc")}

    return make


@pytest.mark.parametrize(
    ("capabilities", "architectures"),
    [
        ("9.0", "90a-real"),
        ("9.0\n9.0", "90a-real"),
        ("8.6\n12.0\n10.0", "86-real;120-real;100-real"),
        ("7.5\n8.0", "80-real"),
        ("8.9", "80-virtual"),  # this and the next are not in KNOWN_TO_NVCC
        ("12.1", "120-virtual"),
    ],
)
def test_the_machines_own_gpus_are_compiled_for(machine, capabilities, architectures):
    assert chosen(**machine(capabilities)) == architectures


@pytest.mark.parametrize(("text", "status"), [("", 0), ("7.5", 0), ("No devices were found", 6), ("[N/A]", 0)])
def test_without_a_gpu_one_line_says_how_to_get_cuda(machine, text, status):
    code, output, message = run(**machine(text, status))
    assert (code, output) == (0, "")
    assert "CPU kernels only" in message
    assert message.endswith("pip install . -C cmake.define.ORTOLAN_CUDA=ON")


def test_on_compiles_for_the_release_whatever_is_there(machine):
    assert chosen(**machine("8.6") | {"ORTOLAN_CUDA": "ON"}) == "80-real;90a-real;100-real;120"


@pytest.mark.parametrize("switch", ["AUTO", "ON"])
def test_named_architectures_stay(machine, switch):
    assert chosen(**machine("8.6") | {"ORTOLAN_CUDA": switch, "ORTOLAN_CUDA_ARCHS": "90a;80"}) == "90a;80"


@pytest.mark.parametrize("architecture", ["90", "90-real", "90-virtual"])
@pytest.mark.parametrize("others", ["", "80-real;", "100-real;120;"])
def test_compute_capability_9_without_its_instructions_is_refused(others, architecture):
    status, _, message = run(ORTOLAN_CUDA_ARCHS=others + architecture)
    assert status != 0
    assert f"names {architecture};" in message
    assert "write 90a-real" in message


@pytest.mark.parametrize("architecture", ["native", "all", "all-major"])
def test_names_that_may_stand_for_it_are_refused(architecture):
    status, _, message = run(ORTOLAN_CUDA_ARCHS=architecture)
    assert status != 0
    assert "list architectures, as in 80-real;90a-real;100-real;120" in message


@pytest.mark.parametrize("architectures", ["90a", "90a-real;80", "80-virtual", "103", "120f"])
def test_others_are_taken(architectures):
    assert chosen(ORTOLAN_CUDA_ARCHS=architectures) == architectures


def test_the_build_runs_the_choice():
    assert "include(cuda_architectures.cmake)" in (FOLDER / "CMakeLists.txt").read_text()
