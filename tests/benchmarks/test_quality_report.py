"""The quality benchmark's counts, intervals, files and plots."""

import itertools
import json
from dataclasses import replace

import pytest
import quality
from hypothesis import given
from hypothesis import strategies as st
from intervals import wilson_interval
from quality_plots import draw_plots, heat_cells
from quality_report import answered, covered, mode_table, read_runs, shares_removed, write_json
from quality_trials import FULL, MODES, Outcome
from tolerances import FLOAT64

from ortolan.errors import ConfigError

ABOUT = {"values": 2, "window": 64, "lengths": [2048]}


@pytest.mark.parametrize(
    ("right", "samples", "low", "high"),
    [
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (5, 10, 0.236593, 0.763407),
        (81, 263, 0.255289, 0.366240),  # 0.2553 .. 0.3662 in Newcombe, 1998, table I
        (1, 29, 0.006113, 0.171755),  # 0.0061 .. 0.1718 there
    ],
)
def test_wilson_interval(right, samples, low, high):
    assert wilson_interval(right, samples) == pytest.approx((low, high), abs=1e-4)


@given(counts=st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_hold_their_share(counts):
    right, samples = counts
    low, high = wilson_interval(right, samples)
    assert 0 <= low <= right / samples <= high <= 1
    assert low < high
    mirrored = wilson_interval(samples - right, samples)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=FLOAT64)


@pytest.mark.parametrize("counts", [(0, 0), (3, 2), (-1, 4)])
def test_no_interval_of_impossible_counts(counts):
    with pytest.raises(ValueError, match="no share"):
        wilson_interval(*counts)


def outcome(**changes):
    given = {
        "mode": "known",
        "policy": "streaming",
        "removed": 0.5,
        "length": 2048,
        "kind": "multi_value",
        "seed": 1,
        "depths": (0.12, 0.96),
        "right": (False, True),
        "covered": (False, True),
        "held": 1024.0,
    }
    return Outcome(**given | changes)


def some_outcomes(lengths=(2048, 4096), removed=(0.5, 0.875)):
    """Two prompts of each kind and length under three policies."""
    return [
        outcome(mode=mode, policy=policy, removed=share, length=length, kind=kind, seed=seed)
        for mode in MODES
        for length in lengths
        for kind, seed in itertools.product(("single", "multi_value"), (1, 2))
        for policy, share in [(FULL, 0.0), *itertools.product(("snapkv avg", "streaming"), removed)]
    ]


def test_a_prompt_is_answered_when_every_value_came_back():
    outcomes = [outcome(), outcome(right=(True, True)), outcome(covered=(True, True))]
    assert (answered(outcomes).right, covered(outcomes).right, answered(outcomes).samples) == (1, 1, 3)


def test_tables_show_each_policy_and_what_streaming_covers():
    lines = mode_table(some_outcomes(), "known", "all").splitlines()
    assert [line.split("  ")[0].strip() for line in lines if not line.startswith("-")] == [
        "policy", "snapkv avg", "streaming", "",
    ]  # fmt: skip
    assert "its coverage" in lines[-1]
    assert "50 % removed" in lines[0]
    assert "87.5 % removed" in lines[0]
    assert "0.0 (0.0 .. 32.4)" in lines[-2]  # none of eight


def test_heat_cells_count_values_where_they_stand():
    cells = heat_cells([outcome(), outcome(seed=2, right=(True, True))], [2048, 4096])
    assert (cells[1][0], cells[10][0]) == (50.0, 100.0)
    missing = [cell for row in cells for cell in row if cell != cell]
    assert len(missing) == 22 - 2


def test_files_bring_the_outcomes_back(tmp_path):
    outcomes = some_outcomes()
    write_json(tmp_path / "all.json", outcomes, ABOUT)
    assert read_runs([tmp_path / "all.json"])[0] == outcomes
    counts = json.loads((tmp_path / "all.json").read_text())["counts"]
    assert len(counts) == 2 * 2 * 2 * 5  # modes, lengths, kinds, policies and shares
    assert counts[0]["samples"] == 2
    assert (counts[0]["values_right"], counts[0]["values"]) == (2, 4)


def test_runs_of_other_lengths_join_and_shared_prompts_count_once(tmp_path):
    for name, lengths in (("a", (2048,)), ("b", (2048, 4096))):
        write_json(tmp_path / name, some_outcomes(lengths), ABOUT)
    outcomes, about = read_runs([tmp_path / "a", tmp_path / "b"])
    assert len(outcomes) == len(some_outcomes())
    assert about["lengths"] == [2048, 4096]


def test_runs_that_asked_differently_do_not_join(tmp_path):
    write_json(tmp_path / "a", some_outcomes(), ABOUT)
    write_json(tmp_path / "b", some_outcomes(), ABOUT | {"window": 96})
    with pytest.raises(ConfigError, match="window"):
        read_runs([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"columns": ["a"], "outcomes": [], "about": {}}', None])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"other\.json"):
        read_runs([path])


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need ortolan[bench]")
    paths = draw_plots(some_outcomes(), tmp_path / "images")
    assert sorted(path.name for path in paths) == [
        "quality_depth_known.png", "quality_depth_later.png", "quality_removed.png",
    ]  # fmt: skip
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 100 * 1024


def test_plots_of_certain_and_lopsided_runs(tmp_path):
    """Every answer right, one length, one mode, no streaming, a share other than 87.5 %."""
    pytest.importorskip("matplotlib", reason="plots need ortolan[bench]")
    outcomes = [replace(o, right=(True, True)) for o in some_outcomes((2048,), (0.6,)) if o.mode == "later"]
    outcomes = [o for o in outcomes if o.policy != "streaming"]
    assert shares_removed(outcomes) == [0.6]
    assert len(draw_plots(outcomes, tmp_path)) == 2


@pytest.mark.slow
def test_the_command_end_to_end(tmp_path, capsys):
    """Two prompts, every policy: measured, printed, stored, and shown again from the file."""
    pytest.importorskip("matplotlib", reason="plots need ortolan[bench]")
    path = tmp_path / "quality.json"
    small = ["--lengths", "1536", "--samples", "2", "--removed", "0.5", "--kinds", "multi_key"]
    assert quality.main([*small, "--json", str(path), "--plots", str(tmp_path / "images")]) == 0
    printed = capsys.readouterr().out
    assert "question known, multi_key" in printed
    assert "question later, multi_key" in printed
    assert printed.count("full caches: 100.0") == 2
    assert len(list((tmp_path / "images").glob("*.png"))) == 3
    assert quality.main(["--read", str(path)]) == 0
    tables = printed[printed.index("\n") : printed.index("wrote")]
    assert tables in capsys.readouterr().out + "\n"


@pytest.mark.slow
def test_jobs_do_not_change_what_is_measured(tmp_path):
    """Twelve prompts make two batches, of which each of two processes takes one."""
    small = ["--lengths", "1024", "--samples", "12", "--removed", "0.5", "--modes", "known", "--policies", "snapkv avg"]
    for jobs in ("1", "2"):
        assert quality.main([*small, "--jobs", jobs, "--json", str(tmp_path / jobs)]) == 0
    assert read_runs([tmp_path / "1"])[0] == read_runs([tmp_path / "2"])[0]


@pytest.mark.parametrize("wrong", [["--removed", "0.99"], ["--lengths", "600"], ["--values", "9"], ["--jobs", "0"],
                                   ["--samples", "0"], ["--read", "/no/such/file.json"]])  # fmt: skip
def test_bad_options_are_one_line_and_exit_code_2(wrong, capsys):
    assert quality.main(wrong) == 2
    error = capsys.readouterr().err
    assert error.startswith("quality: ")
    assert error.count("\n") == 1
