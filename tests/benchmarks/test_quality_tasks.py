"""The quality benchmark's prompts: exact lengths, facts at their depths, distractors that cannot be mistaken."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quality_tasks import DEPTHS, KEYS, TrialTask, make_trial, make_trials

from ortolan.errors import ConfigError
from ortolan.retrieval import ATTRIBUTES, KINDS, load_corpus

FACT = re.compile(r"^# The (\w+) of ([A-Z]{4}) is (\d{5})\.$", re.MULTILINE)

tasks = st.builds(
    TrialTask,
    length=st.integers(1024, 5000),
    depth=st.sampled_from(DEPTHS) | st.floats(0, 1),
    kind=st.sampled_from(KINDS),
    values=st.integers(2, len(ATTRIBUTES)),
    seed=st.integers(0, 10**6),
)


@settings(max_examples=60, deadline=None)
@given(task=tasks)
def test_prompts(task):
    trial = make_trial(load_corpus("eval"), task)
    assert len((trial.text + trial.question).encode("ascii")) == task.length
    assert len(trial.asked) == len(trial.starts) == (task.values if task.kind == "multi_value" else 1)
    for fact, start in zip(trial.asked, trial.starts, strict=True):
        assert trial.text[start:].startswith(fact.line)
        assert start == 0 or trial.text[start - 1] == "\n"
        assert trial.text.count(fact.line) == 1
        assert fact.value not in trial.question
        assert trial.question.count(fact.question) == 1
    assert make_trial(load_corpus("eval"), task) == trial


@settings(max_examples=60, deadline=None)
@given(task=tasks)
def test_distractors(task):
    """Every line of a fact differs from the others in key or attribute, and in its value."""
    trial = make_trial(load_corpus("eval"), task)
    found = FACT.findall(trial.text)
    hidden = {"single": 1, "multi_key": KEYS, "multi_value": 2 * len(ATTRIBUTES)}[task.kind]
    assert len(found) == hidden
    assert len({(attribute, key) for attribute, key, _ in found}) == hidden
    assert len({value for _, _, value in found}) == hidden
    keys = {key for _, key, _ in found}
    assert len(keys) == {"single": 1, "multi_key": KEYS, "multi_value": 2}[task.kind]
    assert len({attribute for attribute, _, _ in found}) == (len(ATTRIBUTES) if task.kind == "multi_value" else 1)
    assert len({fact.key for fact in trial.asked}) == 1  # the values of one key
    assert len({fact.attribute for fact in trial.asked}) == len(trial.asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_one_fact_stands_at_the_depth(kind, depth):
    """To within the text's longest line, and what the other facts' lines shift."""
    trial = make_trial(load_corpus("eval"), TrialTask(length=8192, depth=depth, kind=kind, seed=5))
    slack = max(map(len, trial.text.splitlines())) + 8 * 40
    assert min(abs(d - depth) for d in trial.depths) <= slack / len(trial.text)


@pytest.mark.parametrize("kind", KINDS)
def test_questions_fit_the_window(kind):
    """An eviction that scores by the last 64 tokens sees all of the default question."""
    trials = make_trials(load_corpus("eval"), 2048, 33, [kind], 2)
    assert all(len(trial.question) <= 64 for trial in trials)


def test_the_grid_is_covered_once():
    trials = make_trials(load_corpus("eval"), 2048, 33, KINDS, 2)
    assert {(t.task.kind, t.task.depth) for t in trials} == {(kind, depth) for kind in KINDS for depth in DEPTHS}
    assert len({t.task.seed for t in trials}) == 33


def test_coverage():
    """Sinks and latest tokens, `budget` in all, hold a line that starts at or after length - (budget - sink)."""
    trial = make_trial(load_corpus("eval"), TrialTask(length=2048, depth=0.5, kind="single", seed=1))
    needed = 2048 - trial.starts[0]
    assert trial.covered(needed + 4, sink=4) == (True,)
    assert trial.covered(needed + 3, sink=4) == (False,)


@pytest.mark.parametrize("change", [{"kind": "riddle"}, {"depth": -0.1}, {"values": 5}, {"values": 1}, {"length": 512}])
def test_tasks_are_checked(change):
    with pytest.raises(ConfigError):
        TrialTask(**{"length": 2048, "depth": 0.5, "kind": "single"} | change)
