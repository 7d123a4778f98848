"""SwaAttention in both directions, and with prefixes whose positions see each other."""

import dataclasses

import numpy as np
import pytest
from attention_cases import Shape, attention_feeds, expected_attention, plain_attention, run_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_as_good_as_plain

pytestmark = pytest.mark.usefixtures("target")

WINDOW = 20


def check(shape: Shape, seed: int = 0) -> None:
    feeds = attention_feeds(shape, seed)
    results = (run_attention(shape, feeds), plain_attention(shape, feeds), expected_attention(shape, feeds))
    for actual, plain, expected in zip(*results, strict=True):
        assert_as_good_as_plain(actual, plain, expected)


@pytest.mark.parametrize("sink", [0, 3, 30])
@pytest.mark.parametrize("window", [-1, 1, WINDOW, 70])
@pytest.mark.parametrize(("tokens", "past"), [((1, 5), (0, 66)), ((70, 2), (0, 150)), ((130, 0, 65), (3, 0, 0))])
def test_both_directions(tokens, past, window, sink):
    check(Shape(tokens=tokens, past=past, window=window, sink=sink, causal=False))


@pytest.mark.parametrize("head_size", [24, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("tokens", [12, 90])
def test_head_sizes_in_both_directions(head_size, tokens, isa):
    check(Shape(tokens=[tokens], past=[70], head_size=head_size, causal=False))
    check(Shape(tokens=[tokens], past=[70], head_size=head_size, window=WINDOW, sink=2, causal=False))


@pytest.mark.parametrize("capacity", [160, 191, 200])
def test_both_directions_across_a_wrap(capacity):
    check(Shape(tokens=[90], past=[300], window=WINDOW, sink=3, capacity=capacity, causal=False))


@pytest.mark.parametrize("window", [-1, WINDOW])
@pytest.mark.parametrize("sink", [0, 3])
@pytest.mark.parametrize(
    ("tokens", "past", "prefix_end"),
    [
        ((70, 5), (0, 0), (33, 5)),
        ((70, 130), (30, 0), (64, 1)),  # a prefix's end in this step
        ((9, 90), (130, 130), (130, 131)),  # one before it
        ((6, 90), (0, 60), (1000, 1000)),  # and after it
        ((1, 1), (3, 99), (0, 200)),
    ],
)
def test_prefixes(tokens, past, prefix_end, window, sink):
    check(Shape(tokens=tokens, past=past, prefix_end=prefix_end, window=window, sink=sink))


@pytest.mark.parametrize("head_size", [64, 96, 128, 256, 512])
def test_head_sizes_with_a_prefix(head_size, isa):
    check(Shape(tokens=[100], past=[70], head_size=head_size, prefix_end=[120]))
    check(Shape(tokens=[100], past=[70], head_size=head_size, prefix_end=[120], window=WINDOW, sink=2))


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"scale": 1.5}])
@pytest.mark.parametrize("mask", [{"causal": False}, {"prefix_end": (20, 7)}])
def test_options(options, mask):
    check(Shape(tokens=[40, 4], past=[0, 6], sink_logits=True, options=options, **mask))


@pytest.mark.parametrize("mask", [{"causal": False}, {"prefix_end": (100, 40)}])
def test_pages_and_lengths_of_each_head(mask):
    shape = Shape(tokens=[40, 3], per_head_past=[[70, 12], [60, 61]], page_slots=16, **mask)
    check(shape)
    check(dataclasses.replace(shape, tokens=[2, 3]))


def test_a_prefix_that_ends_at_zero_changes_no_bit():
    shape = Shape(tokens=[70, 3], past=[5, 90], window=WINDOW, sink=2)
    feeds = attention_feeds(shape)
    with_prefix = {**feeds, "prefix_end": np.zeros(2, np.int32)}
    for actual, expected in zip(run_attention(shape, with_prefix), run_attention(shape, feeds), strict=True):
        assert np.array_equal(actual.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("cut", [20, 64, 100])
def test_queries_after_a_prefix_do_not_depend_on_chunks(cut):
    """The prefix is read in one step, since its queries see its last key; what follows is cut anywhere."""
    prefix, length = 20, 140
    whole = Shape(tokens=[length], past=[0], prefix_end=[prefix], capacity=length, head_size=64)
    feeds = attention_feeds(whole)
    expected, _ = run_attention(whole, feeds)
    for begin, end in ((0, cut), (cut, length)):
        shape = dataclasses.replace(whole, tokens=[end - begin], past=[begin])
        step = {
            **feeds,
            "query": feeds["query"][begin:end],
            "query_start": np.array([0, end - begin], np.int32),
            "past_len": np.array([begin], np.int32),
        }
        actual, _ = run_attention(shape, step)
        assert np.array_equal(actual.view(np.uint8), expected[begin:end].view(np.uint8))


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    past=st.integers(0, 90),
    window=st.sampled_from([-1, 1, 7, WINDOW]),
    sink=st.integers(0, 25),
    mask=st.one_of(st.none(), st.integers(0, 140)),
    seed=st.integers(0, 1000),
)
def test_any_mask(tokens, past, window, sink, mask, seed):
    """`mask`: a prefix's end, or None for both directions."""
    if not sum(tokens):
        tokens[0] = 1
    kind = {"causal": False} if mask is None else {"prefix_end": [mask] * len(tokens)}
    check(Shape(tokens=tokens, past=[past] * len(tokens), window=window, sink=sink, **kind), seed)
