"""What the build says about registers and spills of CUDA kernels."""

import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "custom_ops" / "build_tools" / "kernel_report.py"
PTXAS_OUTPUT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    48 bytes stack frame, 100 bytes spill stores, 144 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 48 bytes cumulative stack size, 208 bytes smem
ptxas info    : Function properties for a_function_that_it_calls
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""


@pytest.fixture(scope="module")
def kernel_report():
    """Load the build's script, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("kernel_report", SOURCE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def test_spills_of_called_functions_add_to_the_kernels(kernel_report):
    first, second = kernel_report.read_kernels(PTXAS_OUTPUT)
    assert (first.name, first.target, first.registers, first.shared_bytes) == ("first", "sm_80", 168, 208)
    assert (first.stack_bytes, first.spill_bytes) == (64, 256)
    assert (second.name, second.target, second.registers, second.shared_bytes) == ("second", "sm_90a", 32, 0)
    assert (second.stack_bytes, second.spill_bytes) == (0, 0)
