import json
import sys

import pytest

from ortolan.cli import main
from ortolan.runtime.session import Session

SMALL = ["--prompts", "100", "300", "--decode", "4", "--repeats", "1", "--device", "cpu"]


def test_table_has_a_line_for_each_length(model_dir, capsys):
    assert main(["bench", str(model_dir), *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["prompt", "prefill", "tokens/s", "eviction", "decode", "caches"]
    assert [line.split()[0] for line in lines[2:]] == ["100", "300"]


def test_json_replaces_the_table_or_goes_to_a_file(model_dir, tmp_path, capsys):
    assert main(["bench", str(model_dir), *SMALL, "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main(["bench", str(model_dir), *SMALL, "--json", str(tmp_path / "bench.json")]) == 0
    assert capsys.readouterr().out.startswith("prompt")
    written = json.loads((tmp_path / "bench.json").read_text())
    for report in (printed, written):
        for row, length in zip(report["prompts"], (100, 300), strict=True):
            assert row["prompt_tokens"] == length
            assert row["prefill_seconds"] > 0
            assert row["eviction_seconds"] == 0
            assert 0 <= row["decode_tokens"] <= 4


def test_a_terminal_sees_how_far_it_is(model_dir, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["bench", str(model_dir), *SMALL]) == 0
    shown = capsys.readouterr().err
    for part in ("100 tokens, warming up", "300 tokens, run 1", "4/4"):
        assert part in shown


def test_evictions_are_timed_and_shrink_the_caches(model_dir, capsys):
    rows = []
    for more in ([], ["--evict", "snapkv", "--budget", "128"]):
        assert main(["bench", str(model_dir), "--prompts", "1500", *SMALL[3:], *more, "--json", "-"]) == 0
        rows += json.loads(capsys.readouterr().out)["prompts"]
    full, evicted = rows
    assert evicted["eviction_seconds"] > 0
    assert evicted["memory"]["cache_bytes"] < full["memory"]["cache_bytes"]


@pytest.mark.parametrize(
    "given",
    [["--prompts", "0"], ["--decode", "0"], ["--repeats", "0"], ["--prompts", "100000"], ["--snapkv-budget", "3"]],
    ids=lambda given: " ".join(given),
)
def test_bad_numbers_are_one_line(model_dir, refused, given):
    refused("bench", str(model_dir), "--device", "cpu", *given)


def test_a_length_beyond_the_model_is_refused_before_others_are_measured(model_dir, refused, monkeypatch):
    monkeypatch.setattr(Session, "generate", lambda *_: pytest.fail("measured"))
    line = refused("bench", str(model_dir), "--device", "cpu", "--prompts", "100", "4090", "--decode", "7")
    assert "--prompts 4090 and --decode 7 make 4097 tokens, more than the 4096" in line


def test_a_file_that_cannot_be_written_is_said_at_once(model_dir, tmp_path, refused):
    target = tmp_path / "missing" / "bench.json"
    assert str(target) in refused("bench", str(model_dir), *SMALL, "--json", str(target))


def test_a_full_disk_is_said(model_dir, capsys):
    assert main(["bench", str(model_dir), *SMALL, "--json", "/dev/full"]) == 1
    assert capsys.readouterr().err.startswith("ortolan: error: /dev/full cannot be written")
