"""Runs operator tests on every device and element type that there are kernels for."""

import devices
import pytest
from attention_cases import ISA_NAMES, limit_isa, unlimit_isa

TARGETS = [
    pytest.param(target, id=name, marks=[pytest.mark.cuda] if target.device == "cuda" else [])
    for name, target in devices.TARGETS.items()
]


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    """Run a module's tests on a device with an element type."""
    with devices.using(request.param):
        yield request.param


@pytest.fixture(scope="module", params=[name for name, target in devices.TARGETS.items() if target.device == "cuda"])
def cuda_target(request):
    """Run a module's tests with each element type of a GPU."""
    with devices.using(devices.TARGETS[request.param]):
        yield request.param


@pytest.fixture(autouse=True)
def memory_is_given_back(request):
    """Leave a GPU's memory to the other processes that test on it."""
    yield
    if request.node.get_closest_marker("cuda"):
        devices.free_memory()


@pytest.fixture(params=ISA_NAMES)
def isa(request, target):
    """Run a test with each instruction set of the CPU kernels; on a GPU once."""
    if target.device == "cuda" and request.param != ISA_NAMES[0]:
        pytest.skip("instruction sets belong to the CPU kernels")
    if not limit_isa(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    unlimit_isa()
