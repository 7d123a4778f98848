"""Skips what needs a GPU where there is none."""

import devices
import pytest


def pytest_collection_modifyitems(items):
    problem = devices.cuda_problem()
    for item in items:
        if problem and item.get_closest_marker("cuda"):  # a keyword may be a parameter's name, too
            item.add_marker(pytest.mark.skip(reason=f"no CUDA here: {problem}"))
