"""Chooses the package under test, skips what needs a GPU where there is none, and sums up the matrix of attention."""

import contextlib
import sys

import checkout
import parallel
import pytest

if problem := checkout.choose():  # before anything imports ortolan
    sys.exit(f"error: {problem}")  # pytest's own exits come with a traceback here
parallel.share_cores()

import devices  # noqa: E402
import shared_folders  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--fuzz-seconds", type=float, default=12.0, help="how long each attack of tests/fuzz runs")
    parser.addoption("--fuzz-first", type=int, default=0, help="the first case of each attack")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist use the folder of the one that starts them
        folder = contextlib.ExitStack()
        folder.enter_context(shared_folders.shared_folders())
        config.add_cleanup(folder.close)


def pytest_collection_modifyitems(items):
    problem = devices.cuda_problem()
    for item in items:
        if problem and item.get_closest_marker("cuda"):  # a keyword may be a parameter's name, too
            item.add_marker(pytest.mark.skip(reason=f"no CUDA here: {problem}"))


def pytest_terminal_summary(terminalreporter):
    """Count the cases of the matrix, in whatever process they ran."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    found = [value for report in reports for name, value in report.user_properties if name == "matrix"]
    if found:
        cases, worst = sum(count for count, _ in found), max(share for _, share in found)
        terminalreporter.write_line(f"attention matrix: {cases} cases, largest error {worst:.2f} of that allowed")
