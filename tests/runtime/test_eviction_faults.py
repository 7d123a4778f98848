"""What goes wrong around an eviction leaves a session that knows what it holds."""

import dataclasses

import numpy as np
import pytest
from fake_cuda import make_session
from parity import relative_difference
from saved_sessions import with_end_tokens
from tolerances import SAME_LOGITS

import ortolan.runtime.eviction.evicting as evicting_module
import ortolan.runtime.eviction.evictor as evictor_module
from ortolan import Eviction, SnapKv
from ortolan.errors import CapacityError, ConfigError
from ortolan.policies import POLICIES
from ortolan.runtime.caches import plan

SNAPKV = SnapKv(budget=40, window=8, sink=2)
CHUNK = 16
OPTIONS = {
    "off": None,
    "after": SNAPKV,
    "during": dataclasses.replace(SNAPKV, during_prefill=True),
}


class Stop(Exception):  # noqa: N818 - a caller's own way to say enough
    """Raised between chunks."""


def stop_after(chunks: int, error: type[BaseException]):
    """Return a progress callback that raises after so many chunks."""
    read = []

    def progress(count):
        read.append(count)
        if len(read) == chunks:
            raise error

    return progress


@pytest.mark.parametrize("snapkv", OPTIONS)
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("chunks", [1, 3, 7])
def test_a_prompt_stopped_between_chunks_goes_on(model, open_session, draw_tokens, snapkv, error, chunks):
    """Chunks under way behind the last one read count as written, as rings hold them."""
    session, straight = (open_session(model, snapkv=OPTIONS[snapkv]) for _ in range(2))
    tokens, done = draw_tokens(7 * CHUNK + 5), chunks * CHUNK
    with pytest.raises(error):
        session.prefill(tokens, stop_after(chunks, error))
    assert session.logical_length == done
    assert session.state.history == tokens[:done]
    assert relative_difference(session.prefill(tokens[done:]), straight.prefill(tokens)) <= SAME_LOGITS
    for layer in range(4):
        assert session.physical_length(layer) == straight.physical_length(layer)
        kept, expected = session.kept_positions(layer), straight.kept_positions(layer)
        assert (kept is None) == (expected is None)
        if kept is not None:
            np.testing.assert_array_equal(kept, expected)
    assert relative_difference(session.step(5), straight.step(5)) <= SAME_LOGITS


@pytest.mark.parametrize("chunks", [1, 3, 7])
def test_chunks_under_way_on_a_device_count_as_written(full_model, monkeypatch, draw_tokens, chunks):
    session = make_session(full_model, monkeypatch)
    with pytest.raises(Stop):
        session.prefill(draw_tokens(7 * CHUNK + 5), stop_after(chunks, Stop))
    ahead = session.feeder.stepper.depth * CHUNK
    assert session.state.lengths.highest == min(chunks * CHUNK + ahead, 7 * CHUNK + 5)


@pytest.mark.parametrize("snapkv", OPTIONS)
def test_a_stopped_prompt_can_be_decoded_from_rewound_and_left(model, open_session, draw_tokens, snapkv):
    session, straight = (open_session(model, snapkv=OPTIONS[snapkv]) for _ in range(2))
    tokens = draw_tokens(100)
    with pytest.raises(Stop):
        session.generate(tokens, 10, progress=stop_after(2, Stop))
    straight.prefill(tokens[: 2 * CHUNK])
    assert relative_difference(session.step(7), straight.step(7)) <= SAME_LOGITS
    session.rewind(2 * CHUNK - 3)
    straight.rewind(2 * CHUNK - 3)
    assert relative_difference(session.prefill(tokens[:50]), straight.prefill(tokens[:50])) <= SAME_LOGITS
    session.rewind(0)
    expected = open_session(model, snapkv=OPTIONS[snapkv]).prefill(tokens)
    assert relative_difference(session.prefill(tokens), expected) <= SAME_LOGITS


def test_the_answer_that_waits_is_read_once_where_its_turn_is_stopped(model, open_session, draw_tokens):
    session, straight = (open_session(model, snapkv=SNAPKV) for _ in range(2))
    answers = [next(iter(each.generate(draw_tokens(60), 5))) for each in (session, straight)]
    question = draw_tokens(40, seed=3)
    with pytest.raises(Stop):
        session.prefill(question, stop_after(1, Stop))
    assert session.state.history[60:] == [answers[0], *question[: CHUNK - 1]]
    logits = session.prefill(question[CHUNK - 1 :])
    assert relative_difference(logits, straight.prefill(question)) <= SAME_LOGITS


def test_an_eviction_without_memory_for_its_queries_changes_nothing(full_model, open_session, draw_tokens, monkeypatch):
    """They are copied for later turns, which would score by others if the eviction counted without them."""

    def refuse():
        raise CapacityError("no memory")

    session, straight = (open_session(full_model, snapkv=SNAPKV) for _ in range(2))
    tokens = draw_tokens(120)
    with monkeypatch.context() as patch:
        patch.setattr(session.state.captures, "copy", refuse)
        with pytest.raises(CapacityError, match="no memory"):
            session.prefill(tokens[:100])
    assert session.physical_length(0) == session.logical_length == 100
    assert session.kept_positions(0) is None
    assert relative_difference(session.prefill(tokens[100:]), straight.prefill(tokens)) <= SAME_LOGITS
    np.testing.assert_array_equal(session.kept_positions(0), straight.kept_positions(0))


@pytest.mark.parametrize("snapkv", ["after", "during"])
def test_an_interrupted_eviction_leaves_an_empty_session(full_model, open_session, draw_tokens, monkeypatch, snapkv):
    """Rows may have moved, so none are trusted."""
    evict = evicting_module.evict

    def interrupted(*arguments, **scores):
        evict(*arguments, **scores)
        raise KeyboardInterrupt

    session = open_session(full_model, snapkv=OPTIONS[snapkv])
    with monkeypatch.context() as patch:
        patch.setattr(evicting_module, "evict", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.prefill(draw_tokens(100))
    assert session.logical_length == session.physical_length(0) == 0
    expected = open_session(full_model, snapkv=OPTIONS[snapkv]).prefill(draw_tokens(100))
    assert relative_difference(session.prefill(draw_tokens(100)), expected) <= SAME_LOGITS


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 7, 8, 40])
def test_a_prompt_shorter_than_the_window_or_the_budget_is_kept(full_model, draw_tokens, policy, count):
    options = Eviction(policy=policy, budget=40, window=8, sink=2)
    session, plain = full_model.session(snapkv=options), full_model.session()
    np.testing.assert_array_equal(session.prefill(draw_tokens(count)), plain.prefill(draw_tokens(count)))
    np.testing.assert_array_equal(session.step(5), plain.step(5))
    assert session.stats.evictions == 0
    assert session.kept_positions(0) is None


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "pyramidkv"])
def test_a_budget_of_window_and_sinks_keeps_just_these(full_model, draw_tokens, policy):
    session = full_model.session(snapkv=Eviction(policy=policy, budget=10, window=8, sink=2))
    session.prefill(draw_tokens(100))
    for layer in range(4):
        for row in session.kept_positions(layer):
            np.testing.assert_array_equal(row, [0, 1, *range(92, 100)])
    with pytest.raises(ConfigError, match="budget is 9; it must be at least 10, because window 8 and sink 2"):
        Eviction(policy=policy, budget=9, window=8, sink=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_lists_come_to_the_host_at_once_where_their_lengths_are_known(full_model, monkeypatch, draw_tokens, policy):
    """An eviction waits for the device once; only policies whose lists differ in length bring them one by one."""
    session = make_session(full_model, monkeypatch, snapkv=Eviction(policy=policy, budget=40, window=8, sink=2))
    device = session.feeder.caches.buffers
    downloads, download = [], device.download
    monkeypatch.setattr(device, "download", lambda array, *out: downloads.append(array.size) or download(array, *out))
    session.prefill(draw_tokens(100))
    kv_heads, layers = full_model.manifest.layers[0].num_kv_heads, len(full_model.manifest.layers)
    lists = [] if POLICIES[policy].keeps_uneven else [layers * kv_heads * SNAPKV.budget]
    assert sorted(downloads) == sorted([*lists, full_model.manifest.vocab_size])


@pytest.mark.parametrize(
    ("policy", "share", "gives_back"), [("snapkv", 1, 0), ("snapkv", 0.99, 1), ("expected", 1, 1), ("expected", 9, 0)]
)
def test_only_evictions_that_take_much_memory_give_it_back(
    full_model, monkeypatch, draw_tokens, policy, share, gives_back
):
    """Giving scratch memory back takes longer than choosing positions does."""
    session = make_session(full_model, monkeypatch, snapkv=Eviction(policy=policy, budget=40, window=8, sink=2))
    asked = []
    layer, slots = full_model.manifest.layers[0], session.cache_capacity(0)
    scores = 32 * slots * layer.num_kv_heads * 4  # [Hkv, C] float32, as often as they are held
    monkeypatch.setattr(evictor_module, "LARGE_BYTES", share * scores)
    monkeypatch.setattr(session.feeder.caches.buffers, "rare_run_options", lambda: asked.append(1))
    session.prefill(draw_tokens(100))
    assert (session.stats.evictions, len(asked)) == (1, gives_back)


def test_decode_keeps_its_graph_where_an_eviction_needs_no_other_cache(full_model, monkeypatch, draw_tokens):
    """The first turn's caches are given back; those of later turns stay, and with them the captured steps."""
    monkeypatch.setattr(plan, "CUDA_GROWTH_ROOM", 100)
    session = make_session(with_end_tokens(full_model), monkeypatch, snapkv=SNAPKV)
    for turn, count in enumerate((300, 30, 50)):
        assert len(list(session.generate(draw_tokens(count, seed=turn), 10))) == 10
    assert session.stats.evictions == 3
    assert session.stats.graph_captures == 1
