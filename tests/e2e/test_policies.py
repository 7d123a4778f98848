"""Each eviction policy, through several turns: logits are those of transformers with the evicted keys hidden."""

import numpy as np
import pytest
from families import shared_checkpoint, shared_model
from masked_oracle import Visibility
from parity import relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan import Eviction
from ortolan.errors import ConfigError
from ortolan.policies import POLICIES
from ortolan.policies.base import GRANULARITIES

BUDGET, WINDOW, SINK = 40, 8, 2
TURNS = [(150, 6), (21, 5), (1, 5)]  # tokens of the prompt, and tokens decoded after it
LENGTH = sum(sum(turn) for turn in TURNS)


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4"])
def exported(request):
    """A model with full attention alone, one whose other layers are rings, and one whose layers share caches."""
    checkpoint = shared_checkpoint(request.param, seed=5, num_key_value_heads=2)
    folder = shared_model(checkpoint, max_context=512, chunk_size=16)
    return checkpoint, ortolan.load(folder, device="cpu", num_threads=1)


def tokens_of(count: int) -> list[int]:
    return np.random.default_rng(0).integers(3, 131, count).tolist()


def options_for(policy: str) -> Eviction:
    pieces = {"piece": 6, "lead": 3} if policy == "kvzip" else {}
    return Eviction(policy=policy, budget=BUDGET, window=WINDOW, sink=SINK, **pieces)


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_after_evictions_agree_with_transformers(exported, policy):
    checkpoint, model = exported
    session = model.session(snapkv=options_for(policy))
    visibility, tokens, rows = Visibility(session, LENGTH), tokens_of(LENGTH), {}
    for prompt, decoded in TURNS:
        begin = session.logical_length
        rows[begin + prompt - 1] = session.prefill(tokens[begin : begin + prompt])
        visibility.note_eviction(session)
        for position in range(begin + prompt, begin + prompt + decoded):
            rows[position] = session.step(tokens[position])
    assert session.stats.evictions == len(TURNS)
    expected = visibility.logits(checkpoint, tokens)
    differences = [relative_difference(row, expected[position]) for position, row in rows.items()]
    assert max(differences) <= LOGITS_RELATIVE, differences


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_keeps_fits_its_budget(exported, policy):
    _, model = exported
    session = model.session(snapkv=options_for(policy))
    session.prefill(tokens_of(150))
    layers = [i for i, layer in enumerate(model.manifest.layers) if layer.evictable]
    kept = {i: session.kept_positions(i) for i in layers}
    counts = {i: (positions >= 0).sum(axis=1) for i, positions in kept.items()}
    for i, positions in kept.items():
        assert session.physical_length(i) == counts[i].max() == positions.shape[1]
        np.testing.assert_array_equal(session.state.lengths.physical_of(i, len(positions)), counts[i])
        for row, count in zip(positions, counts[i], strict=True):
            assert (np.diff(row[:count]) > 0).all()
            assert {*range(SINK), *range(150 - WINDOW, 150)} <= set(row[:count].tolist())
    if policy in ("adakv", "kvzip"):
        assert all(count.sum() == 2 * BUDGET for count in counts.values())
        assert any(count[0] != count[1] for count in counts.values())
    elif policy == "pyramidkv" and len(layers) > 1:
        assert counts[layers[0]][0] > BUDGET > counts[layers[-1]][0]
    else:
        assert all((count == BUDGET).all() for count in counts.values())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_granularity_evicts_or_is_refused(exported, policy, granularity):
    _, model = exported
    options = {"budget": BUDGET, "window": WINDOW, "sink": SINK, "policy": policy, "granularity": granularity}
    if policy in ("adakv", "kvzip") or (policy, granularity) == ("pyramidkv", "model"):
        with pytest.raises(ConfigError, match="granularity"):
            Eviction(**options)
        return
    session = model.session(snapkv=Eviction(**options))
    session.prefill(tokens_of(150))
    assert session.stats.evictions == 1
    assert np.isfinite(session.step(5)).all()


@pytest.mark.parametrize(("decoded", "back"), [(20, 150), (20, 153), (3, 152)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rewind_behind_an_eviction_forgets_the_answer(exported, policy, decoded, back):
    _, model = exported
    tokens = tokens_of(200)
    session, straight = (model.session(snapkv=options_for(policy)) for _ in range(2))
    for each in (session, straight):
        each.prefill(tokens[:150])
    for token in tokens[150 : 150 + decoded]:
        session.step(token)
    session.rewind(back)
    for token in tokens[150:back]:
        straight.step(token)
    question = tokens[180:190]
    assert relative_difference(session.prefill(question), straight.prefill(question)) <= LOGITS_RELATIVE
    for layer, info in enumerate(model.manifest.layers):
        if info.evictable:
            np.testing.assert_array_equal(session.kept_positions(layer), straight.kept_positions(layer))


@pytest.mark.parametrize("policy", POLICIES)
def test_lists_end_where_the_longest_ends(exported, policy):
    """PyramidKV's first layers may have more budget than there are tokens."""
    _, model = exported
    session = model.session(snapkv=options_for(policy))
    session.prefill(tokens_of(BUDGET + 3))
    for layer, info in enumerate(model.manifest.layers):
        if info.evictable:
            assert session.kept_positions(layer).shape[1] == session.physical_length(layer)
