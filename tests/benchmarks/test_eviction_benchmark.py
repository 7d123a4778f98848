"""The eviction benchmark runs on the CPU with a tiny shape, and reports what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "eviction_cuda.py"
SMALL = ["--device", "cpu", "--prompt", "300", "--context", "400", "--budget", "80", "--chunk-size", "64"]
QUICK = ["--decode", "6", "--repeats", "1"]

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="a source distribution has no benchmarks")


def run(*arguments, shape="tiny"):
    command = [sys.executable, str(SCRIPT), shape, *SMALL, *QUICK, *arguments]
    return subprocess.run(command, text=True, capture_output=True)


@pytest.mark.parametrize("policy", ["snapkv", "expected"])
def test_it_reports_cost_and_decoding(tmp_path, policy):
    result = run("--json", str(tmp_path / "report.json"), "--policy", policy)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads((tmp_path / "report.json").read_text())["shapes"].values()
    assert row["cost"]["prefill_seconds"] > 0
    assert 0 < row["cost"]["graph_seconds"] <= row["cost"]["eviction_seconds"]
    assert row["decode"]["ratio"] > 0
    assert row["decode"]["evicted_cache_bytes"] > 0
    assert "of prefill (limit 2%)" in result.stdout


def test_it_takes_only_so_many_layers(tmp_path):
    held = {}
    for layers in ("1", "3"):
        result = run("--json", str(tmp_path / layers), "--layers", layers)
        assert result.returncode == 0, result.stderr
        (row,) = json.loads((tmp_path / layers).read_text())["shapes"].values()
        held[layers] = row["decode"]["evicted_cache_bytes"]
    assert held["3"] == 3 * held["1"]


def test_it_takes_no_part_of_a_pattern_of_layers():
    result = run("--layers", "3", shape="qwen3.5-4b")
    assert result.returncode == 1
    assert result.stderr == "--layers: 3 was given; qwen3.5-4b repeats after 4, so give 4, 8 or another multiple\n"


def test_it_refuses_a_prompt_within_the_budget():
    result = run("--prompt", "70")
    assert result.returncode == 1
    assert "nothing is evicted" in result.stderr
