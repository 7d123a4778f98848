"""The retrieval task: prompts of the length asked for, with the fact where it was asked for."""

import pytest

from ortolan.errors import ConfigError
from ortolan.retrieval import KINDS, Task, is_correct, load_corpus, make_sample


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [600, 4096])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_samples(kind, length, depth):
    sample = make_sample(load_corpus("eval"), Task(length=length, depth=depth, kind=kind, seed=3))
    assert len(sample.prompt.encode()) == length
    assert sample.prompt[sample.needle_start :].startswith(sample.fact.line)
    assert sample.prompt.endswith(sample.fact.question)
    assert sample.prompt.count(sample.fact.line) == 1
    assert abs(sample.needle_start / length - depth) < 0.35
    assert is_correct(sample, sample.answer)
    assert not is_correct(sample, sample.answer[:-2] + "x\n")


def test_seeds_repeat_and_differ():
    corpus = load_corpus("eval")
    first, again, other = (make_sample(corpus, Task(seed=s)).prompt for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("options", [{"kind": "riddle"}, {"depth": 1.5}, {"length": 10}])
def test_options_are_checked(options):
    with pytest.raises(ConfigError):
        Task(**options)
