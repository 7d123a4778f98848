"""A kind of state that this version does not have: one class and one line in the registry make it work."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import contract
from ortolan.errors import CapacityError, ContractMismatchError
from ortolan.manifest import LayerInfo, Manifest, cache_kinds
from ortolan.runtime.caches import kinds
from ortolan.runtime.caches.layer_state import SavedTensor, TensorSpec

VOCABULARY, SIZE, CHUNK = 24, 4, 8
STATE = "layer.0.sum"


class RunningSum:
    """A fixed block per sequence: the sum of the embeddings of all tokens so far."""

    name = "running_sum"
    grows = False
    needs_clear = True

    def tensors(self, index, layer, manifest):
        return (TensorSpec(role="sum", name=f"layer.{index}.sum", page_shape=(SIZE,), dtype="float32"),)

    def slots(self, layer, sizes):
        return 1

    def clear(self, view):
        view.block("sum")[...] = 0

    def rewind_problem(self, view, length):
        if length == view.lengths.highest:
            return None
        return f"layer {view.index} keeps a running sum, which only a snapshot can bring back"

    def snapshot(self, view):
        return {"sum": view.block("sum").copy()}

    def restore(self, view, snapshot):
        view.block("sum")[...] = snapshot["sum"]

    def save(self, view, first):
        yield SavedTensor(
            name=f"layer.{view.index}.sum",
            dtype="float32",
            shape=(SIZE,),
            parts=iter([view.buffers.download(view.block("sum"))]),
        )

    def load(self, view, saved, first):
        view.buffers.write(view.block("sum"), saved.read(f"layer.{view.index}.sum", np.float32))


def weights() -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(3)
    return (
        rng.integers(-4, 5, (VOCABULARY, SIZE)).astype(np.float32),
        rng.integers(-4, 5, (SIZE, VOCABULARY)).astype(np.float32),
    )


def expected_logits(tokens: list[int]) -> np.ndarray:
    embedding, head = weights()
    return embedding[tokens].sum(axis=0) @ head


def build_graph() -> onnx.ModelProto:
    embedding, head = weights()
    nodes = [
        helper.make_node("Gather", ["embedding", contract.TOKEN_IDS], ["embedded"]),
        helper.make_node("CumSum", ["embedded", "first_axis"], ["summed"]),
        helper.make_node("Add", ["summed", STATE], ["states"]),
        helper.make_node("Gather", ["states", "last"], [contract.output(STATE)]),
        helper.make_node("Gather", ["states", contract.LOGIT_ROWS], ["rows"]),
        helper.make_node("MatMul", ["rows", "head"], [contract.LOGITS]),
    ]
    integers = {contract.TOKEN_IDS: "T", contract.LOGIT_ROWS: "R"}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [axis]) for name, axis in integers.items()]
    lengths = {contract.QUERY_START: "B1", contract.PAST_LEN: "B"}
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT32, [axis]) for name, axis in lengths.items()]
    inputs.append(helper.make_tensor_value_info(STATE, TensorProto.FLOAT, ["N", SIZE]))
    outputs = [
        helper.make_tensor_value_info(contract.LOGITS, TensorProto.FLOAT, ["R", VOCABULARY]),
        helper.make_tensor_value_info(contract.output(STATE), TensorProto.FLOAT, [1, SIZE]),
    ]
    constants = [
        numpy_helper.from_array(embedding, "embedding"),
        numpy_helper.from_array(head, "head"),
        numpy_helper.from_array(np.array(0, np.int64), "first_axis"),
        numpy_helper.from_array(np.array([-1], np.int64), "last"),
    ]
    graph = helper.make_graph(nodes, "running_sum", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def folder(tmp_path):
    layers = (LayerInfo(window=-1, num_heads=1, num_kv_heads=1, head_size=8, evictable=False, state="running_sum"),)
    onnx.save(build_graph(), tmp_path / "model.onnx")
    manifest = Manifest(
        architecture="toy",
        dtype="float32",
        vocab_size=VOCABULARY,
        max_context=64,
        chunk_size=CHUNK,
        sink=0,
        snapkv_window=0,
        paged=False,
        layers=layers,
        rope_limits=(64,),
    )
    (tmp_path / "ortolan.json").write_text(manifest.to_json())
    return tmp_path


@pytest.fixture
def model(folder, monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "running_sum", RunningSum())
    return ortolan.load(folder, device="cpu")


def test_kind_without_its_line_is_refused_by_name(folder):
    with pytest.raises(ContractMismatchError, match=r"running_sum.*full, ring"):
        ortolan.load(folder, device="cpu")


def test_state_is_planned_and_reported(model):
    plan = model.plan()
    assert [(layer.kind, layer.capacity, layer.bytes) for layer in plan.layers] == [("running_sum", 1, 16)]
    assert model.session().memory_report().cache_bytes == 16


@pytest.mark.parametrize("chunk", [1, 3, CHUNK])
def test_prompt_and_steps_follow_the_definition(model, chunk):
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 21).tolist()
    session = model.session(chunk_size=chunk)
    np.testing.assert_array_equal(session.prefill(tokens[:17]), expected_logits(tokens[:17]))
    for end in range(18, 22):
        np.testing.assert_array_equal(session.step(tokens[end - 1]), expected_logits(tokens[:end]))
    session.rewind(0)
    np.testing.assert_array_equal(session.prefill([5]), expected_logits([5]))


def test_rewind_is_refused_and_a_snapshot_undoes_steps(model):
    session = model.session()
    session.prefill([1, 2, 3, 4])
    caches, lengths = session.feeder.caches, session.state.lengths
    snapshot = caches.snapshot(lengths)
    session.step(9)
    with pytest.raises(CapacityError, match="running sum, which only a snapshot"):
        session.rewind(4)
    caches.restore(snapshot, lengths)
    lengths.logical = lengths.highest = 4
    session.state.forget_pending()
    del session.state.tokens[4:]
    np.testing.assert_array_equal(session.step(7), expected_logits([1, 2, 3, 4, 7]))


def test_saved_session_and_fork_go_on(model, tmp_path):
    session = model.session()
    answer = session.generate([1, 2, 3], 6)
    first = [next(answer) for _ in range(3)]
    session.save(tmp_path / "saved")
    fork, restored = session.fork(), model.restore(tmp_path / "saved")
    rest = list(answer)
    assert list(fork.resume()) == rest == list(restored.resume())
    tokens = [1, 2, 3, *first, *rest]
    np.testing.assert_array_equal(session.step(2), expected_logits([*tokens, 2]))


def test_pages_of_such_a_state_are_one_per_sequence_and_never_shared():
    layer = LayerInfo(window=-1, num_heads=1, num_kv_heads=1, head_size=8, evictable=False)
    toy = dataclasses.replace(layer, state="running_sum")
    assert [(kind.name, kind.layers) for kind in cache_kinds([layer, toy, layer, toy])] == [
        ("full", (0, 2)),
        ("running_sum", (1, 3)),
    ]
