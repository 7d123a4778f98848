"""SnapKV in sessions: what is kept, what it frees, and several turns of it."""

import dataclasses
import itertools

import numpy as np
import pytest
from parity import relative_difference
from tolerances import SAME_LOGITS

import ortolan.runtime.eviction.evicting as evicting_module
from ortolan import SnapKv
from ortolan.errors import ConfigError, OrtolanError
from ortolan.runtime.device.opening import Device
from ortolan.runtime.device.providers import CPU_PROVIDER
from ortolan.runtime.eviction.graphs import GraphBuilders
from ortolan.runtime.model import Model

SNAPKV = SnapKv(budget=40, window=8, sink=2, kernel=5)
STRUCTURES = [
    {"granularity": g, "pool": p, "kernel": k, "group_reduce": r}
    for (g, p), (k, r) in itertools.product(
        itertools.product(("kv_head", "layer", "model"), ("avg", "max")), ((5, "mean"), (3, "max"))
    )
]


def pooled_scores(queries: np.ndarray, keys: np.ndarray, options: SnapKv, scale: float) -> np.ndarray:
    """Score by the definition: queries [Wq, Hq, D] oldest first, keys [Hkv, L, D]; returns [Hkv, L]."""
    rows, heads, _ = queries.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    per_head = np.empty((heads, length))
    for head in range(heads):
        logits = scale * queries[:, head].astype(np.float64) @ keys[head // group].astype(np.float64).T
        seen = np.arange(length)[None] <= np.arange(length - rows, length)[:, None]
        weights = np.where(seen, np.exp(logits - logits.max(axis=1, keepdims=True)), 0.0)
        per_head[head] = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    reduce = {"mean": np.mean, "max": np.max, "sum": np.sum}[options.group_reduce]
    score = reduce(per_head.reshape(kv_heads, group, length), axis=1)
    score[:, length - rows :] = 0.0
    return np.stack([pool(row, options) for row in score])


def pool(row: np.ndarray, options: SnapKv) -> np.ndarray:
    padded = np.pad(row, options.kernel // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, options.kernel)
    return windows.mean(axis=1) if options.pool == "avg" else windows.max(axis=1)


def chosen(score: np.ndarray, options: SnapKv) -> np.ndarray:
    """Return the positions kept for one score [L], ascending."""
    length = len(score)
    fixed = [*range(options.sink), *range(length - options.window, length)]
    middle = np.arange(options.sink, length - options.window)
    best = middle[np.argsort(-score[middle], kind="stable")][: options.budget - len(fixed)]
    return np.sort(np.concatenate([fixed, best]).astype(np.int64))


class Recorder:
    """Records each eviction's inputs, with the captured queries in the order of their positions."""

    def __init__(self, evict) -> None:
        self._evict = evict
        self.calls: list[dict[int, tuple[np.ndarray, np.ndarray]]] = []
        self.keeps: list[dict[int, np.ndarray]] = []

    def __call__(self, ort_session, caches, options, physical, logical, variant, scores):
        rows = [position % options.window for position in range(logical - options.window, logical)]
        self.calls.append(
            {
                index: (
                    caches.captures[index][0, rows].copy(),
                    caches.store.tensors[index]["key"][0, :, : int(length[0])].copy(),
                )
                for index, length in physical.items()
            }
        )
        self.keeps.append(self._evict(ort_session, caches, options, physical, logical, variant, scores=scores))
        return self.keeps[-1]

    def expected(self, call: int, options: SnapKv, scale: float) -> dict[int, np.ndarray]:
        scores = {i: pooled_scores(q, k, options, scale) for i, (q, k) in self.calls[call].items()}
        if options.granularity != "kv_head":
            scores = {i: s.sum(axis=0, keepdims=True) for i, s in scores.items()}
        if options.granularity == "model":
            scores = dict.fromkeys(scores, sum(scores.values()))
        return {i: np.stack([chosen(row, options) for row in s]) for i, s in scores.items()}


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_two_evictions_keep_what_the_definition_keeps(full_model, draw_tokens, monkeypatch, structure):
    """The second turn's length is no multiple of the window, so rows of queries must be turned."""
    recorder = Recorder(evicting_module.evict)
    monkeypatch.setattr(evicting_module, "evict", recorder)
    options = dataclasses.replace(SNAPKV, **structure)
    session = full_model.session(snapkv=options)
    logical = None
    for turn, count in enumerate((101, 21)):
        before = session.logical_length
        session.prefill(draw_tokens(count, seed=turn))
        expected = recorder.expected(turn, options, full_model.manifest.layers[0].scale or 0.25)
        read = np.arange(before, before + count)
        for layer, keep in expected.items():
            np.testing.assert_array_equal(recorder.keeps[turn][layer], keep)
        held = {
            layer: np.broadcast_to(read, (2, count))
            if logical is None
            else np.concatenate([logical[layer], np.broadcast_to(read, (2, count))], axis=1)
            for layer in expected
        }
        logical = {
            layer: np.take_along_axis(held[layer], np.broadcast_to(keep, (2, options.budget)), axis=1)
            for layer, keep in expected.items()
        }
        for layer in expected:
            np.testing.assert_array_equal(session.kept_positions(layer), logical[layer])
    assert session.stats.evictions == 2
    assert session.logical_length == 122


def test_kept_positions_have_sinks_and_window_and_ascend(full_model, draw_tokens):
    session = full_model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(150))
    kept = session.kept_positions(3)
    assert kept.shape == (2, 40)
    assert (np.diff(kept, axis=1) > 0).all()
    np.testing.assert_array_equal(kept[:, :2], [[0, 1]] * 2)
    np.testing.assert_array_equal(kept[:, -8:], [list(range(142, 150))] * 2)


def test_prefill_logits_are_those_before_the_eviction(mixed_model, draw_tokens):
    expected = mixed_model.session().prefill(draw_tokens(150))
    logits = mixed_model.session(snapkv=SNAPKV).prefill(draw_tokens(150))
    assert relative_difference(logits, expected) <= SAME_LOGITS


def test_only_full_attention_layers_shrink(mixed_model, draw_tokens):
    session = mixed_model.session(snapkv=SNAPKV)
    before = session.cache_bytes
    session.prefill(draw_tokens(300))
    assert [session.physical_length(layer) for layer in range(4)] == [64, 40, 64, 64]
    assert session.kept_positions(0) is None
    assert session.cache_capacity(1) == 64  # budget and a chunk, rounded up
    slot_bytes = session.plan.layers[1].slot_bytes
    assert before - session.cache_bytes == (512 - 64) * slot_bytes


@pytest.mark.parametrize("budget", [60, 61])
def test_a_budget_that_holds_the_prompt_changes_nothing(full_model, draw_tokens, budget):
    options = dataclasses.replace(SNAPKV, budget=budget)
    session, plain = full_model.session(snapkv=options), full_model.session()
    session.prefill(draw_tokens(60))
    plain.prefill(draw_tokens(60))
    assert session.stats.evictions == 0
    np.testing.assert_array_equal(session.step(5), plain.step(5))


@pytest.mark.parametrize(("decoded", "left"), [(40, 128), (110, 64)])
def test_decode_after_an_eviction_grows_the_caches_and_only_a_prompt_evicts_again(
    full_model, draw_tokens, decoded, left
):
    """Caches that a short answer grew stay for the next one; those of a long answer are given back."""
    session = full_model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(100))
    before = session.cache_bytes
    assert session.cache_capacity(0) == 64
    for token in draw_tokens(decoded, seed=1):
        session.step(token)
    assert session.physical_length(0) == 40 + decoded
    assert session.cache_bytes > before
    assert session.stats.evictions == 1
    session.prefill([7])
    assert session.physical_length(0) == 40
    assert session.cache_bytes == before * left // 64


def test_growth_changes_no_logits(full_model, draw_tokens):
    """A session whose shrunk caches grow agrees with one that got their room at once."""
    grown, roomy = full_model.session(snapkv=SNAPKV), full_model.session(snapkv=SNAPKV)
    for session in (grown, roomy):
        session.prefill(draw_tokens(100))
    roomy.feeder.room.fit(dict.fromkeys(range(4), 512), dict.fromkeys(range(4), 40))
    for token in draw_tokens(60, seed=1):
        np.testing.assert_array_equal(grown.step(token), roomy.step(token))
    assert grown.cache_bytes < roomy.cache_bytes


def test_evicting_everything_to_the_same_positions_is_deterministic(full_model, draw_tokens):
    runs = []
    for _ in range(2):
        session = full_model.session(snapkv=SNAPKV)
        runs.append([*session.generate(draw_tokens(120), 10), *session.kept_positions(0).ravel()])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("decoded", "back", "asked"), [(20, 100, 5), (20, 103, 3), (5, 101, 6), (3, 102, 20), (20, 100, 10), (20, 110, 9)]
)
def test_a_question_after_a_rewind_evicts_as_if_asked_first(full_model, draw_tokens, decoded, back, asked):
    """The captured queries of the prompt were overwritten by the answer that is taken back."""
    session, straight = full_model.session(snapkv=SNAPKV), full_model.session(snapkv=SNAPKV)
    answer, question = draw_tokens(decoded, seed=1), draw_tokens(asked, seed=2)
    session.prefill(draw_tokens(100))
    for token in answer:
        session.step(token)
    session.rewind(back)
    straight.prefill(draw_tokens(100))
    for token in answer[: back - 100]:
        straight.step(token)
    logits, expected = session.prefill(question), straight.prefill(question)
    assert relative_difference(logits, expected) <= SAME_LOGITS
    assert session.stats.evictions == straight.stats.evictions == 2
    for layer in range(4):
        np.testing.assert_array_equal(session.kept_positions(layer), straight.kept_positions(layer))
    assert relative_difference(session.step(9), straight.step(9)) <= SAME_LOGITS


@pytest.mark.parametrize("model_name", ["full_model", "mixed_model"])
def test_the_first_eviction_after_a_rewind_reads_its_window_again(request, draw_tokens, model_name):
    model = request.getfixturevalue(model_name)
    session, straight = model.session(snapkv=SNAPKV), model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(38))
    for token in draw_tokens(20, seed=1):
        session.step(token)
    session.rewind(38)
    straight.prefill(draw_tokens(38))
    question = draw_tokens(4, seed=2)
    logits, expected = session.prefill(question), straight.prefill(question)
    assert relative_difference(logits, expected) <= SAME_LOGITS
    np.testing.assert_array_equal(session.kept_positions(1), straight.kept_positions(1))


def test_a_failed_eviction_leaves_an_empty_session(full_model, draw_tokens, monkeypatch):
    def failing(*_, **scores):
        raise OrtolanError("the eviction graph failed")

    session = full_model.session(snapkv=SNAPKV)
    with monkeypatch.context() as patch:
        patch.setattr(evicting_module, "evict", failing)
        with pytest.raises(OrtolanError, match="empty again"):
            session.prefill(draw_tokens(100))
    assert session.logical_length == 0
    expected = full_model.session().prefill(draw_tokens(30))
    assert relative_difference(session.prefill(draw_tokens(30)), expected) <= SAME_LOGITS


def test_other_options_need_a_builder(full_model):
    device = Device(provider=CPU_PROVIDER, num_threads=1)
    bare = Model(full_model.folder, full_model.manifest, device, GraphBuilders(), None)
    bare.session(snapkv=SNAPKV)
    with pytest.raises(ConfigError, match=r"ortolan\.load"):
        bare.session(snapkv=dataclasses.replace(SNAPKV, pool="max"))
