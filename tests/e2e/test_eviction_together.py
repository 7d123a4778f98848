"""Eviction with what else a session does: rings with sinks, chat, narrow caches, long prompts, and being off."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from families import shared_checkpoint, shared_model, tiny_checkpoint
from kvpress_oracle import differ_by_ties
from masked_oracle import Visibility
from parity import relative_difference
from snapkv_reference import pooled_scores, select
from tolerances import LOGITS_RELATIVE, SCORE_TIES

import ortolan
from ortolan import Eviction, SnapKv
from ortolan.custom_ops import register
from ortolan.policies import POLICIES

SINK = 3


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


def evictable(model) -> list[int]:
    return [i for i, layer in enumerate(model.manifest.layers) if layer.evictable]


@pytest.fixture(scope="module")
def ringed():
    """One layer that attends to everything, three rings of a window of 20; all keep the first positions."""
    checkpoint = shared_checkpoint("gemma3", seed=5, num_key_value_heads=2)
    folder = shared_model(checkpoint, max_context=512, chunk_size=16, sink=SINK)
    return checkpoint, ortolan.load(folder, device="cpu", num_threads=1)


@pytest.mark.parametrize("policy", POLICIES)
def test_rings_keep_their_sinks_and_window_through_evictions(ringed, policy):
    """The rings wrap many times; only the layer that attends to everything forgets by score."""
    checkpoint, model = ringed
    turns = [(200, 30), (37, 9), (5, 5)]
    length = sum(map(sum, turns))
    again = {"piece": 10, "lead": 4} if policy == "kvzip" else {}  # so that every turn evicts
    session = model.session(snapkv=Eviction(budget=40, window=8, sink=SINK, policy=policy, **again))
    visibility, tokens, rows = Visibility(session, length), tokens_of(length), {}
    for prompt, decoded in turns:
        begin = session.logical_length
        rows[begin + prompt - 1] = session.prefill(tokens[begin : begin + prompt])
        visibility.note_eviction(session)
        for position in range(begin + prompt, begin + prompt + decoded):
            rows[position] = session.step(tokens[position])
    rings = [i for i, layer in enumerate(model.manifest.layers) if layer.window > 0]
    assert [session.physical_length(i) for i in rings] == [session.cache_capacity(i) for i in rings]
    assert all(session.kept_positions(i) is None for i in rings)
    expected = visibility.logits(checkpoint, tokens)
    differences = [relative_difference(row, expected[position]) for position, row in rows.items()]
    assert max(differences) <= LOGITS_RELATIVE, differences


@pytest.mark.parametrize("during_prefill", [False, True])
def test_a_chat_of_turns_answers_as_if_fed_token_by_token(ringed, during_prefill):
    """`generate` leaves its last token to the next turn, which evicts after it."""
    _, model = ringed
    options = SnapKv(budget=40, window=8, sink=SINK, during_prefill=during_prefill)
    chat, fed = model.session(snapkv=options), model.session(snapkv=options)
    waiting: list[int] = []
    for turn, count in enumerate((100, 12, 1, 60)):
        question = tokens_of(count, seed=turn)
        answer = list(chat.generate(question, 7))
        logits = fed.prefill([*waiting, *question])
        wanted = []
        for _ in range(7):
            wanted.append(int(np.argmax(logits)))
            if wanted[-1] in model.manifest.eos_token_ids or len(wanted) == 7:
                break
            logits = fed.step(wanted[-1])
        ended = wanted[-1] in model.manifest.eos_token_ids
        assert answer == (wanted[:-1] if ended else wanted)
        waiting = [] if ended else wanted[-1:]
        for layer in evictable(model):
            np.testing.assert_array_equal(chat.kept_positions(layer), fed.kept_positions(layer))
    assert chat.stats.evictions == fed.stats.evictions >= 4


def test_float16_caches_keep_what_their_values_say(tmp_path):
    """Scores are computed in float32 from the rounded queries and keys; the kept rows are moved bit for bit."""
    checkpoint = tiny_checkpoint("llama", tmp_path / "hf", seed=5)
    folder = ortolan.export(checkpoint, tmp_path / "model", dtype="float16", max_context=512, chunk_size=64)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    observer, session = (model.session(snapkv=SnapKv(budget=b, window=32, sink=2)) for b in (300, 80))
    tokens = tokens_of(300)
    np.testing.assert_array_equal(observer.prefill(tokens), session.prefill(tokens))
    assert observer.stats.evictions == 0
    structure = {"kernel": 5, "pool": "avg", "granularity": "kv_head", "group_reduce": "mean"}
    for i in evictable(model):
        full, kept = observer.feeder.caches.store.tensors[i], session.kept_positions(i)
        assert full["key"].dtype == np.float16
        (scores,) = pooled_scores([(observer.state.captures[i], full["key"], np.array([300]))], **structure)
        for head, row in enumerate(kept):
            want = select(scores[0, head], 300, budget=80, window=32, sink=2)
            assert differ_by_ties([row], [want], scores[0, head : head + 1], SCORE_TIES)
            moved = session.feeder.caches.store.tensors[i]
            for role in ("key", "value"):
                np.testing.assert_array_equal(moved[role][0, head, :80], full[role][0, head, row])
    assert np.isfinite(session.step(5)).all()


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    checkpoint = tiny_checkpoint("llama", root / "hf", seed=5, num_hidden_layers=2, max_position_embeddings=32768)
    return ortolan.load(ortolan.export(checkpoint, root / "model", max_context=16_448), device="cpu")


@pytest.mark.parametrize("during_prefill", [False, True])
def test_a_prompt_of_16k_tokens_is_held_in_an_eighth(long_model, during_prefill):
    """The buffers themselves are counted; with eviction during prefill there never were larger ones."""
    session = long_model.session(snapkv=SnapKv(budget=2048, during_prefill=during_prefill))
    slot_bytes = sum(layer.slot_bytes for layer in session.plan.layers)
    logits = session.prefill(tokens_of(16_384))
    assert np.isfinite(logits).all()
    assert [session.physical_length(layer) for layer in range(2)] == [2048, 2048]
    held = sum(a.nbytes for tensors in session.feeder.caches.store.tensors.values() for a in tensors.values())
    assert held == session.cache_bytes
    if during_prefill:
        assert held == session.memory_report().planned_cache_bytes == (2048 + 2048) * slot_bytes
    else:
        assert 8 * held <= 16_384 * slot_bytes
        assert session.memory_report().planned_cache_bytes == 16_448 * slot_bytes
    answers = [session.step(token) for token in tokens_of(20, seed=1)]
    assert all(np.isfinite(row).all() and np.std(row) > 0 for row in answers)
    assert session.logical_length == 16_404


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_never_evicts_is_the_same_bit_for_bit(family, tmp_path):
    """A model that cannot capture, one that does not, and one whose budget nothing passes."""
    checkpoint = tiny_checkpoint(family, tmp_path / "hf", seed=5, num_key_value_heads=2)
    sizes = {"max_context": 256, "chunk_size": 16}
    unable = ortolan.load(ortolan.export(checkpoint, tmp_path / "a", snapkv_window=0, **sizes), device="cpu")
    able = ortolan.load(ortolan.export(checkpoint, tmp_path / "b", **sizes), device="cpu")
    sessions = [unable.session(), able.session(), able.session(snapkv=SnapKv(budget=256, window=8))]
    sessions += [able.session(snapkv=SnapKv(budget=256, window=8, during_prefill=True))]
    for feed in (lambda s: s.prefill(tokens_of(100)), lambda s: s.step(9), lambda s: s.prefill(tokens_of(17, 1))):
        first, *others = [feed(session) for session in sessions]
        for logits in others:
            np.testing.assert_array_equal(logits, first)
    sessions[1].rewind(110)
    sessions[0].rewind(110)
    np.testing.assert_array_equal(sessions[0].step(4), sessions[1].step(4))


def executed_operators(folder: Path, tmp_path: Path, feeds) -> set[str]:
    """Run model.onnx under ONNX Runtime's profiler, and return the operators that it executed."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    register(options)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    session.run(["logits"], {i.name: feeds(i) for i in session.get_inputs()})
    events = json.loads(Path(session.end_profiling()).read_text())
    return {event["args"]["op_name"] for event in events if "op_name" in event.get("args", {})}


def draw_feed(info) -> np.ndarray:
    """Make one graph input of a step of four tokens without history, with caches of 64 slots."""
    sizes = {"T": 4, "B": 1, "B + 1": 2, "snapkv_window": 8}
    shape = [size if isinstance(size, int) else sizes.get(size, 64 if "slots" in size else 1) for size in info.shape]
    dtype = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}.get(info.type, np.float32)
    if info.name == "query_start":
        return np.array([0, 4], np.int32)
    return np.arange(4) if shape == [4] else np.zeros(shape, dtype)


def test_nothing_captures_in_a_model_that_was_exported_without(tmp_path):
    checkpoint = tiny_checkpoint("llama", tmp_path / "hf", seed=5)
    for window, captures in ((0, False), (64, True)):
        folder = ortolan.export(checkpoint, tmp_path / f"model{window}", snapkv_window=window, max_context=64)
        for name, capturing in (("model.onnx", "SnapKvCapture"), ("model.fused.onnx", "QkvAttention")):
            graph = onnx.load(folder / name, load_external_data=False).graph
            found = {node.op_type for node in graph.node if any("capture" in value for value in node.output)}
            assert found == ({capturing} if captures else set())
            assert any("capture" in info.name for info in graph.input) is captures
        executed = executed_operators(folder, tmp_path, draw_feed)
        assert "SwaAttention" in executed
        assert ("SnapKvCapture" in executed) is captures


def test_a_session_that_does_not_evict_captures_no_rows(ringed):
    """The operator returns before any work where its buffer has no rows, whatever the chunk."""
    _, model = ringed
    session = model.session()
    session.prefill(tokens_of(100))
    assert session.memory_report().capture_bytes == 0
    assert {capture.shape[1] for capture in session.state.captures.values()} == {0}
