"""Where sequences are cut into steps, so that each token meets the same kernels however it is read."""

import dataclasses

import numpy as np
import pytest
from fake_batch import expected_tokens, make_engine, make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortolan import PromptLookup
from ortolan.errors import ConfigError
from ortolan.runtime.steps.cuts import ANYWHERE, FEW_TOKENS, LEAST_STEP, STEP_TOKENS, Cuts

BY_FAMILY = Cuts(by_family=True)
COUNTS = (1, 15, 16, 17, 63, 64, 65, 66, 128, 129, 130, 131, 195, 200, 16, 129, 200)


@given(st.integers(1, 3000), st.integers(LEAST_STEP, 400))
def test_pieces_of_long_prompts_are_long_and_short_prompts_stay_whole(count, most):
    pieces = list(BY_FAMILY.pieces(count, most))
    assert [0, *(end for _, end in pieces)] == [*(begin for begin, _ in pieces), count]
    sizes = [end - begin for begin, end in pieces]
    assert max(sizes) <= most
    assert len(sizes) == 1 if count <= FEW_TOKENS else min(sizes) > FEW_TOKENS


@given(st.integers(1, 400), st.integers(0, 60), st.lists(st.integers(0, 300), min_size=1), st.data())
def test_each_token_meets_its_kernels_whatever_room_steps_have(prompt, answer, rooms, data):
    known, sizes = prompt + answer, {}
    begins = [n for n in range(known) if BY_FAMILY.may_begin(n, prompt=prompt, known=known)]
    fed = data.draw(st.sampled_from(begins))  # what another sequence has read
    for room in [*rooms, *[LEAST_STEP] * known]:
        count = BY_FAMILY.piece(fed=fed, prompt=prompt, known=known, room=room)
        assert count <= room
        sizes |= dict.fromkeys(range(fed, fed + count), count)
        fed += count
    assert fed == known
    for position, count in sizes.items():
        if position >= prompt:
            assert count <= STEP_TOKENS
        else:
            assert count == prompt if prompt <= FEW_TOKENS else count > FEW_TOKENS


@given(st.integers(1, 400), st.integers(0, 400), st.integers(1, 400))
def test_a_piece_may_end_where_the_rest_can_be_read(prompt, fed, end):
    if fed >= prompt or not BY_FAMILY.may_begin(fed, prompt=prompt, known=prompt) or not fed < end <= prompt:
        return
    allowed = end == prompt or (end - fed > FEW_TOKENS and prompt - end > FEW_TOKENS)
    assert BY_FAMILY.may_end(end, fed=fed, prompt=prompt) == allowed


@pytest.mark.parametrize(("prompt", "length", "shared"), [(64, 64, 0), (65, 64, 64), (65, 90, 65), (200, 100, 100)])
def test_only_long_prompts_serve_others(prompt, length, shared):
    assert BY_FAMILY.shared(prompt, length) == shared
    assert ANYWHERE.shared(prompt, length) == length


def test_steps_that_some_prompt_cannot_be_cut_for_are_refused():
    with pytest.raises(ConfigError, match=r"chunk_size is 129.*at least 130.*batch_invariant"):
        BY_FAMILY.check("chunk_size", LEAST_STEP - 1)
    with pytest.raises(ConfigError, match=r"chunk_tokens is 130.*at least 138.*max_sequences = 8"):
        BY_FAMILY.check("chunk_tokens", LEAST_STEP, 8)
    BY_FAMILY.check("chunk_size", LEAST_STEP)
    ANYWHERE.check("chunk_size", 1)


def draw_prompts(seed):
    """Prompts of which some begin alike."""
    source = np.random.default_rng(seed)
    shared = source.integers(0, 50, 200).tolist()
    prompts = []
    for i, count in enumerate(COUNTS):
        same = int(source.integers(0, count)) if i % 2 else 0
        prompts.append(shared[:same] + source.integers(0, 50, count - same).tolist())
    return prompts


def serve(manifest, prompts, cuts, *, pages, overcommit, chunk_tokens, speculation):
    """Return what requests get that come together, and again, and what the engine did."""
    options = {"cuts": cuts, "has_families": True, "chunk_tokens": chunk_tokens, "max_sequences": 4}
    engine = make_engine(manifest, pages, overcommit, **options)
    try:

        def submit_all(_):
            return [engine.submit(prompt, 40, speculation=speculation) for prompt in prompts]

        results = [[s.result() for s in engine.worker.ask(submit_all)] for _ in range(2)]
        return results, engine.stats()
    finally:
        engine.close()


@pytest.mark.parametrize("rings", [False, True], ids=["full", "rings"])
@pytest.mark.parametrize("chunk_tokens", [134, 256])
@pytest.mark.parametrize("speculation", [None, PromptLookup(tokens=15, shortest=1)], ids=["plain", "drafts"])
def test_requests_get_what_they_get_alone(rings, chunk_tokens, speculation):
    manifest, prompts = make_manifest(rings=rings), draw_prompts(chunk_tokens)
    expected = [expected_tokens(manifest, prompt, 40, has_families=True) for prompt in prompts]
    room = {"pages": 24, "overcommit": 8.0, "chunk_tokens": chunk_tokens, "speculation": speculation}
    results, stats = serve(manifest, prompts, BY_FAMILY, **room)
    assert results == [expected, expected]
    assert stats.preemptions
    assert rings or stats.reused_tokens
    free, _ = serve(manifest, prompts, ANYWHERE, **room)
    assert free != [expected, expected], "the test does not see how sequences are cut"


@pytest.mark.parametrize("chunk_tokens", [134, 200])
def test_snapshots_of_rings_are_made_where_prompts_may_be_cut(chunk_tokens):
    manifest = dataclasses.replace(make_manifest(rings=True), max_context=1200, rope_limits=(1200,))
    shared = np.random.default_rng(3).integers(0, 50, 1000).tolist()
    prompts = [shared[:n] + [n % 50] * (1000 - n) for n in (900, 870, 930, 990)]
    expected = [expected_tokens(manifest, prompt, 40, has_families=True) for prompt in prompts]
    room = {"pages": 400, "overcommit": 1.0, "chunk_tokens": chunk_tokens, "speculation": None}
    results, stats = serve(manifest, prompts, BY_FAMILY, **room)
    assert results == [expected, expected]
    assert stats.snapshots
    assert stats.reused_tokens


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31), st.integers(17, 40), st.integers(134, 256), st.booleans())
def test_requests_get_what_they_get_alone_in_any_engine(seed, pages, chunk_tokens, rings):
    manifest, prompts = make_manifest(rings=rings), draw_prompts(seed)
    expected = [expected_tokens(manifest, prompt, 40, has_families=True) for prompt in prompts]
    room = {"pages": pages, "overcommit": 8.0, "chunk_tokens": chunk_tokens, "speculation": None}
    assert serve(manifest, prompts, BY_FAMILY, **room)[0] == [expected, expected]
