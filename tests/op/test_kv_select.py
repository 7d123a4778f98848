"""KvSelect chooses what sorting would, whatever the scores look like."""

import numpy as np
import pytest
from harness import run_op
from hypothesis import given, settings
from hypothesis import strategies as st

from ortolan.custom_ops import reference

pytestmark = pytest.mark.usefixtures("target")


def select_feeds(score, kv_len, *, budget, window=4, sink=2):
    numbers = {"budget": budget, "window": window, "sink": sink}
    return {"score": score.astype(np.float32), "kv_len": np.array(kv_len, np.int32)} | {
        name: np.array([value], np.int64) for name, value in numbers.items()
    }


def assert_selects_as_reference(feeds):
    keep, kept_len = run_op("KvSelect", feeds)
    expected_keep, expected_len = reference.kv_select(**feeds)
    np.testing.assert_array_equal(keep, expected_keep)
    np.testing.assert_array_equal(kept_len, expected_len)


def draw_scores(kind, shape):
    rng = np.random.default_rng(len(kind))
    uniform = rng.random(shape)
    return {
        "uniform": uniform,
        "near": 1 + uniform * 1e-6,  # only the last bits differ
        "tied": np.round(uniform * 5) / 5,
        "equal": np.full(shape, 0.25),
        "zero": np.where(uniform < 0.5, 0.0, -0.0),
        "tiny": uniform * 1e-42,
        "spread": 10.0 ** (uniform * 70 - 35),
        "infinite": np.where(uniform < 0.5, uniform, np.inf),
        "never": np.where(uniform < 0.9, -uniform, np.nan),
    }[kind]


KINDS = ["uniform", "near", "tied", "equal", "zero", "tiny", "spread", "infinite", "never"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [6, 100, 1000])
def test_any_scores(kind, budget):
    score = draw_scores(kind, (2, 3, 1200))
    assert_selects_as_reference(select_feeds(score, [[1200, 1199, 7], [0, 1, 700]], budget=budget))


@pytest.mark.parametrize("slots", [1, 4, 4095, 4096, 4097, 9001, 32768, 32769, 50000])
def test_any_capacity(slots):
    feeds = select_feeds(draw_scores("tied", (1, 1, slots)), [[slots]], budget=slots // 2 + 1)
    assert_selects_as_reference(feeds)


@pytest.mark.parametrize("budget", [0, 1, 3, 5, 64, 99])
def test_a_budget_below_sinks_and_window_or_above_all(budget):
    feeds = select_feeds(draw_scores("uniform", (1, 2, 64)), [[64, 3]], budget=budget, window=4, sink=3)
    assert_selects_as_reference(feeds)


def test_one_list_serves_all_heads_within_the_shortest():
    feeds = select_feeds(draw_scores("uniform", (2, 1, 200)), [[200, 180], [30, 31]], budget=50)
    assert_selects_as_reference(feeds)


def test_a_window_longer_than_the_cache_keeps_the_first_positions():
    feeds = select_feeds(draw_scores("uniform", (1, 1, 50)), [[40]], budget=10, window=1 << 40)
    keep, kept_len = run_op("KvSelect", feeds)
    np.testing.assert_array_equal(keep[0, 0], np.arange(10))
    assert kept_len.tolist() == [[10]]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_sizes(data):
    slots = data.draw(st.integers(1, 300))
    lengths = data.draw(st.lists(st.integers(0, slots), min_size=2, max_size=2))
    numbers = {name: data.draw(st.integers(0, 320)) for name in ("budget", "window", "sink")}
    score = draw_scores(data.draw(st.sampled_from(KINDS)), (1, 2, slots))
    assert_selects_as_reference(select_feeds(score, [lengths], **numbers))


def test_equal_runs_are_equal():
    feeds = select_feeds(draw_scores("tied", (1, 4, 5000)), [[5000, 4000, 3000, 2000]], budget=700)
    first, second = run_op("KvSelect", feeds), run_op("KvSelect", feeds)
    np.testing.assert_array_equal(first[0], second[0])


@pytest.mark.parametrize("name", ["budget", "window", "sink"])
def test_negative_numbers_are_refused(name):
    feeds = select_feeds(draw_scores("uniform", (1, 1, 20)), [[20]], budget=8) | {name: np.array([-1])}
    with pytest.raises(Exception, match=f"'{name}' is -1; it must be at least 0"):
        run_op("KvSelect", feeds)


def test_lists_that_are_no_heads_are_refused():
    with pytest.raises(Exception, match="with Hkv = 3"):
        run_op("KvSelect", select_feeds(draw_scores("uniform", (1, 2, 20)), [[20, 20, 20]], budget=8))
