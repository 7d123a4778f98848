"""What bounds the peak of a session that reads a long document, as the benchmark reports it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from checkout import ROOT


@pytest.mark.slow
def test_only_eviction_during_prefill_lowers_what_caches_take_while_reading():
    command = [sys.executable, str(ROOT / "benchmarks" / "peak_memory.py"), "--tokens", "5000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if "MiB" in line]
    reading, after, peak = ([float(row[row.index("MiB") + i]) for row in rows] for i in (-1, 1, 3))
    assert reading[0] == reading[1] > reading[2]
    assert after[0] > after[1] < after[2]
    assert all(each > 50 for each in peak)
