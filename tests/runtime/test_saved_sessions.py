"""Saved sessions go on as if they had never been left."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors
from parity import relative_difference
from saved_sessions import DEVICES, assert_same, outcome, place, random_turn, with_end_tokens
from tolerances import LOGITS_RELATIVE, SAME_LOGITS

from ortolan import Eviction, Sampling, SnapKv
from ortolan.errors import CapacityError, ConfigError
from ortolan.policies import POLICIES

SNAPKV = SnapKv(budget=40, window=8, sink=2)
LONGEST = 350
EVERYTHING = 10**6  # rewind_tokens past any ring


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["full", "mixed", "sharing"])
def model(request, monkeypatch, device):
    """A model without end-of-sequence tokens, which random weights may choose at any time."""
    return place(with_end_tokens(request.getfixturevalue(f"{request.param}_model")), device, monkeypatch)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chat.session"


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a file's tensors with the format's own library."""
    with safetensors.safe_open(path, "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("seed", range(6))
def test_random_turns_go_on_bit_for_bit(model, path, seed, policy):
    rng = random.Random(seed)
    snapkv = policy and Eviction(budget=rng.choice([24, 40]), window=8, sink=2, policy=policy)
    session = model.session(snapkv=snapkv)
    for _ in range(rng.randint(0, 8)):
        if session.logical_length < LONGEST / 2:
            outcome(random_turn(rng, rewinds=True), session)
    session.save(path, rewind_tokens=EVERYTHING)
    restored = model.restore(path)
    assert_same(session, restored)
    for _ in range(6):
        if session.logical_length > LONGEST:
            break
        turn = random_turn(rng, rewinds=True)
        np.testing.assert_equal(outcome(turn, restored), outcome(turn, session))
        assert_same(session, restored)


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("seed", range(4))
def test_windows_are_enough_to_go_on_without_rewinding(model, path, seed, policy):
    rng = random.Random(100 + seed)
    session = model.session(snapkv=policy and Eviction(policy=policy, budget=40, window=8, sink=2))
    for _ in range(rng.randint(2, 6)):
        outcome(random_turn(rng, rewinds=True), session)
    session.save(path)
    restored = model.restore(path)
    for _ in range(4):
        turn = random_turn(rng, rewinds=False)
        np.testing.assert_equal(outcome(turn, restored), outcome(turn, session))
        assert_same(session, restored)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=np.float32(1.1), seed=2**70)])
def test_a_file_is_restored_again_and_saved_alike(model, path, draw_tokens, sampling):
    session = model.session(snapkv=SNAPKV)
    next(session.generate(draw_tokens(120), 8, sampling))
    session.save(path)
    first, second = model.restore(path), model.restore(path)
    assert list(first.resume()) == list(second.resume())
    model.restore(path).save(path.with_name("again"))
    assert path.with_name("again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("snapkv", [None, SNAPKV])
def test_sessions_that_hold_nothing(model, path, draw_tokens, snapkv):
    expected = model.session(snapkv=snapkv).prefill(draw_tokens(60))
    session = model.session(snapkv=snapkv)
    session.save(path)
    np.testing.assert_array_equal(model.restore(path).prefill(draw_tokens(60)), expected)
    session.prefill(draw_tokens(100, seed=1))
    session.rewind(0)
    session.save(path)
    restored = model.restore(path)
    assert_same(session, restored)
    assert restored.cache_bytes == session.cache_bytes
    np.testing.assert_array_equal(restored.prefill(draw_tokens(60)), expected)


def test_full_caches(model, path, draw_tokens):
    session = model.session(max_context=64)
    session.prefill(draw_tokens(64))
    session.save(path)
    with pytest.raises(CapacityError, match="max_context"):
        model.restore(path).step(5)
    longer = model.restore(path, max_context=100)
    expected = model.session(max_context=100).prefill([*draw_tokens(64), 5, 6])
    assert relative_difference(longer.prefill([5, 6]), expected) <= SAME_LOGITS


@pytest.mark.parametrize("chunk_size", [1, 40, 200])
@pytest.mark.parametrize("max_context", [180, 512])
@pytest.mark.parametrize("rewind_tokens", [0, EVERYTHING])
def test_rings_of_another_size(
    mixed_model, monkeypatch, device, path, draw_tokens, chunk_size, max_context, rewind_tokens
):
    model = place(mixed_model, device, monkeypatch)
    session = model.session(max_context=170, chunk_size=100)
    session.prefill(draw_tokens(150))
    session.save(path, rewind_tokens)
    restored = model.restore(path, max_context, chunk_size)
    session = model.session()
    session.prefill(draw_tokens(150))
    for tokens in (draw_tokens(25, seed=1), [7], [8]):
        assert relative_difference(restored.prefill(tokens), session.prefill(tokens)) <= SAME_LOGITS


def test_a_file_holds_what_is_in_use(mixed_model, monkeypatch, device, path, draw_tokens):
    """Layer 1 attends to everything, the others to a window of 20 with 2 sinks; 2 kv heads of size 16."""
    session = place(mixed_model, device, monkeypatch).session(snapkv=SNAPKV)
    session.prefill(draw_tokens(200))
    session.save(path)
    found = shapes(path)
    assert found["layer.1.key"] == (2 * 40, 16)
    assert found["layer.0.value"] == (2 * (2 + 19), 16)
    assert found["layer.1.capture"] == found["layer.1.captured_at_eviction"] == (8, 4, 16)
    assert found["layer.1.kept"] == (2, 40)
    assert found["history"] == (200,)
    session.save(path, rewind_tokens=10)
    assert shapes(path)["layer.0.value"] == (2 * (2 + 29), 16)


def test_heads_that_keep_different_numbers(full_model, path, draw_tokens):
    session = full_model.session(snapkv=Eviction(policy="adakv", budget=40, window=8, sink=2))
    session.prefill(draw_tokens(200))
    held = session.state.lengths.physical_of(0, 2)
    assert len(set(held.tolist())) > 1
    session.save(path)
    assert shapes(path)["layer.0.key"] == (int(held.sum()), 16)


@pytest.mark.parametrize("rewind_tokens", [0, 12])
def test_rewinding_a_restored_session(mixed_model, monkeypatch, device, path, draw_tokens, rewind_tokens):
    model = place(mixed_model, device, monkeypatch)
    session = model.session()
    session.prefill(draw_tokens(150))
    session.save(path, rewind_tokens)
    restored = model.restore(path)
    with pytest.raises(CapacityError, match=f"rewind to {150 - rewind_tokens} or later.*rewind_tokens"):
        restored.rewind(149 - rewind_tokens)
    restored.rewind(150 - rewind_tokens)
    session.rewind(150 - rewind_tokens)
    np.testing.assert_array_equal(restored.prefill(draw_tokens(9)), session.prefill(draw_tokens(9)))
    restored.rewind(0)
    expected = model.session().prefill(draw_tokens(30))
    np.testing.assert_array_equal(restored.prefill(draw_tokens(30)), expected)


def shortest_rewind(session) -> int:
    """Return the shortest length past the sinks that the session can rewind to."""
    session.rewind(session.logical_length)
    session.feeder.check_rewind(2)
    for length in range(3, session.logical_length + 1):
        try:
            session.feeder.check_rewind(length)
        except CapacityError:
            continue
        return length
    raise AssertionError("a session can rewind to its own length")


@pytest.mark.parametrize("before", [0, 9, 40])
@pytest.mark.parametrize("taken", [1, 5])
def test_rings_that_were_overwritten_are_known_to_be(
    mixed_model, monkeypatch, device, path, draw_tokens, before, taken
):
    """By tokens that were taken back, and by steps under way past the last token."""
    model = place(with_end_tokens(mixed_model), device, monkeypatch)
    session = model.session()
    session.prefill(draw_tokens(240))
    session.rewind(240 - before)
    stream = session.generate([5], 20)
    assert len(list(itertools.islice(stream, taken))) == taken
    session.save(path, EVERYTHING)
    restored = model.restore(path)
    restored.save(path.with_name("again"), EVERYTHING)
    lengths = {shortest_rewind(each) for each in (session, restored, model.restore(path.with_name("again")))}
    assert len(lengths) == 1
    assert lengths.pop() > 100
    held = shapes(path)["layer.0.key"][0] // 2
    assert held <= session.cache_capacity(0)


def test_saving_again_keeps_no_more_than_there_is(mixed_model, path, draw_tokens):
    session = mixed_model.session()
    session.prefill(draw_tokens(150))
    session.save(path, rewind_tokens=5)
    mixed_model.restore(path).save(path, rewind_tokens=20)
    assert shortest_rewind(mixed_model.restore(path)) == 145


@pytest.mark.parametrize("policy", POLICIES)
def test_queries_from_before_an_eviction_score_again(full_model, monkeypatch, device, path, draw_tokens, policy):
    """They come from a copy that was made then, because later steps took their rows."""
    model = place(full_model, device, monkeypatch)
    again = {"piece": 3, "lead": 2} if policy == "kvzip" else {}  # which reads all of them anew
    session = model.session(snapkv=Eviction(policy=policy, budget=40, window=8, sink=2, **again))
    session.prefill(draw_tokens(100))
    for token in draw_tokens(11, seed=1):
        session.step(token)
    session.save(path)
    restored = model.restore(path)
    for each in (session, restored):
        each.rewind(100)
        each.prefill([9, 8, 7])
    assert session.stats.evictions == 2
    assert_same(session, restored)
    np.testing.assert_array_equal(session.step(5), restored.step(5))


@pytest.mark.parametrize("rewind_tokens", [-1, 1.5, None])
def test_rewind_tokens_are_checked(full_model, path, rewind_tokens):
    with pytest.raises(ConfigError, match="rewind_tokens"):
        full_model.session().save(path, rewind_tokens)
    assert not path.exists()


@pytest.mark.parametrize("target", DEVICES)
def test_a_session_moves_between_devices(model, monkeypatch, device, path, draw_tokens, target):
    session = model.session(snapkv=SNAPKV)
    first = list(itertools.islice(session.generate(draw_tokens(120), 30), 5))
    session.save(path)
    expected = first + list(session.resume())
    restored = place(model, target, monkeypatch).restore(path)
    assert first + list(restored.resume()) == expected
    rows = restored.prefill(draw_tokens(50, seed=1)), session.prefill(draw_tokens(50, seed=1))
    assert relative_difference(*rows) <= LOGITS_RELATIVE
    assert restored.logical_length == session.logical_length
    np.testing.assert_array_equal(restored.kept_positions(1), session.kept_positions(1))


def test_an_evicted_session_takes_as_much_memory_as_before(model, path, draw_tokens):
    session = model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(300))
    assert session.cache_bytes < session.plan.bytes
    session.save(path)
    restored = model.restore(path)
    assert restored.cache_bytes == session.cache_bytes
    assert [restored.cache_capacity(i) for i in range(4)] == [session.cache_capacity(i) for i in range(4)]


def test_a_session_is_not_saved_while_it_reads(model, path, draw_tokens):
    session, refused = model.session(), []

    def progress(_: int) -> None:
        with pytest.raises(ConfigError, match="the session is in use"):
            session.save(path)
        refused.append(True)

    session.prefill(draw_tokens(40), progress=progress)
    assert refused
    assert not path.exists()
    session.save(path)
