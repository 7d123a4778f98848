"""What drafters propose, and how many tokens are drafted."""

import pytest
from families import shared_checkpoint, shared_model

import ortolan
from ortolan import DraftModel, PromptLookup, Sampling, Speculation
from ortolan.errors import ConfigError
from ortolan.runtime.speculation.drafter import DraftLength, Speculator, count_accepted
from ortolan.runtime.speculation.lookup import LookupDrafter

GREEDY = Sampling(seed=0)


@pytest.mark.parametrize(
    ("tokens", "count", "draft"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, [4, 9]),
        ([1, 2, 3, 4, 9, 1, 2, 3], 9, [4, 9, 1, 2, 3, 4, 9, 1, 2]),  # past the end it repeats itself
        ([7, 2, 3, 5, 1, 2, 3, 4, 2, 3], 1, [4]),  # the last place counts
        ([1, 2, 3, 8, 9, 2, 3, 6, 1, 2, 3], 1, [8]),  # and before it the longest run
        ([5, 5], 3, []),
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
    ],
)
def test_lookup_finds_what_followed_the_last_tokens(tokens, count, draft):
    assert LookupDrafter(longest=3, shortest=2).propose(tokens, count, GREEDY) == draft


def test_lookup_sees_what_was_added_and_what_was_changed():
    drafter = LookupDrafter(longest=2, shortest=1)
    assert drafter.propose([1, 2, 3, 1], 1, GREEDY) == [2]
    assert drafter.propose([1, 2, 3, 1, 7, 1], 2, GREEDY) == [7, 1]
    assert drafter.propose([4, 5, 4], 1, GREEDY) == [5]
    assert drafter.propose([4, 5, 4, 6, 8, 9, 2], 1, GREEDY) == []


def test_more_is_drafted_where_drafts_are_right():
    length = DraftLength(15)
    counts = []
    for _ in range(12):
        counts.append(length.count)
        length.note(length.count, length.count)
    assert counts == sorted(counts)
    assert counts[-1] == 15


def test_wrong_drafts_become_short_and_then_rare():
    length, drafted = DraftLength(15, 0.06), []
    for _ in range(1000):
        drafted.append(length.count)
        if drafted[-1]:
            length.note(drafted[-1], 0)
        else:
            length.skip()
    tries = [step for step, count in enumerate(drafted) if count]
    assert len(tries) < 40
    assert drafted[tries[-1]] == 1
    while not length.count:
        length.skip()
    length.note(1, 1)
    assert length.count == 1


def test_lookup_says_whether_to_wait():
    drafter, tokens = LookupDrafter(longest=2, shortest=2), [1, 2, 3, 1, 2, -1]
    assert [drafter.is_likely(tokens, known) for known in (1, 2, 4, 5)] == [False, False, False, True]
    assert drafter.propose([1, 2, 3, 1, 2, 3, 1], 3, GREEDY) == [2, 3, 1]


@pytest.mark.parametrize(
    ("cost", "share", "least", "most"), [(0.2, 0.95, 8, 15), (0.2, 0.7, 2, 4), (0.2, 0.4, 1, 2), (0.06, 0.7, 4, 8)]
)
def test_the_length_follows_the_share_of_right_tokens(cost, share, least, most):
    length, error = DraftLength(15, cost), 0.0
    for _ in range(200):
        count, accepted = length.count, 0
        while accepted < count:
            error += 1 - share  # spread evenly
            if error >= 1:
                error -= 1
                break
            accepted += 1
        length.note(count, accepted)
    assert least <= length.count <= most


def test_a_draft_ends_before_what_is_not_a_token():
    class Strange:
        def propose(self, tokens, count, sampling):
            return [4, 5, 131, 6][:count]

    speculator = Speculator(Strange, Speculation(tokens=4), 131)
    assert speculator.draft([1], 4, GREEDY) == [4, 5]
    assert speculator.draft([1], 3, GREEDY) == [4, 5]
    assert speculator.draft([1], 1, GREEDY) == [4]


@pytest.mark.parametrize(("draft", "chosen", "count"), [([], [3], 0), ([3, 4], [3, 4, 9], 2), ([3, 4], [3, 5, 9], 1)])
def test_the_right_beginning_is_accepted(draft, chosen, count):
    assert count_accepted(draft, chosen) == count


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptLookup(tokens=0), "PromptLookup tokens is 0"),
        (lambda: PromptLookup(tokens=16), "PromptLookup tokens is 16"),
        (lambda: PromptLookup(longest=2, shortest=3), "PromptLookup shortest is 3"),
        (lambda: PromptLookup(longest=0), "PromptLookup longest is 0"),
        (lambda: DraftModel("x", tokens=True), "DraftModel tokens is True"),
        (lambda: DraftModel(7), "DraftModel folder"),
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_draft_model_has_the_same_vocabulary(full_model, paged_model):
    other = shared_model(shared_checkpoint("llama", seed=5, vocab_size=140), max_context=64)
    with pytest.raises(ConfigError, match=r"has another vocabulary \(140 tokens\) than .* \(131\); choose"):
        full_model.session().generate([1, 2], speculation=DraftModel(other))
    with ortolan.Engine(paged_model) as engine, pytest.raises(ConfigError, match="another vocabulary"):
        engine.submit([1, 2], speculation=DraftModel(other))


def test_something_else_is_not_a_drafter(full_model):
    with pytest.raises(
        ConfigError, match=r"speculation is 'lookup'; it must be None, or an ortolan.PromptLookup, a DraftModel or"
    ):
        full_model.session().generate([1, 2], speculation="lookup")
    assert issubclass(PromptLookup, Speculation)
