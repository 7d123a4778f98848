"""Captured steps of one token are told a limit of their length; the CPU's operators refuse one that does not hold."""

import dataclasses
import json
import shutil
import threading

import numpy as np
import onnx
import pytest
from fake_cuda import on_fake_cuda
from sessions import open_with_room

import ortolan
from ortolan import SnapKv, contract
from ortolan.manifest import CPU_FILE, FUSED_FILE, MANIFEST_FILE
from ortolan.runtime.caches.plan import plan_caches
from ortolan.runtime.steps import bucket, kv_limits
from ortolan.runtime.steps.kv_limits import NO_LIMIT, KvLimits, most_held
from ortolan.runtime.steps.layout import StepShape
from ortolan.runtime.steps.row import Row

SNAPKV = SnapKv(budget=40, window=8, sink=2)
ONE = StepShape(tokens=1, sequences=1, logit_rows=1)
EAGER = "-1"  # graph id of a run kernel by kernel


class Recording:
    """A session of ONNX Runtime that notes the graph id of each run, which graphs are let go, and their limits."""

    def __init__(self, ort_session, device, monkeypatch) -> None:
        self._session, self._bind = ort_session, device.bind_host_input
        self.told: dict[tuple[int, str], int] = {}  # by binding and input
        self.runs: list[tuple[str, int]] = []  # graph ids and limits
        self.released: list[int] = []
        monkeypatch.setattr(device, "bind_host_input", self.bind)

    def __getattr__(self, name):
        return getattr(self._session, name)

    def bind(self, binding, name, array) -> None:
        assert (array.shape, array.dtype) == ((1,), np.int32)
        self.told[id(binding), name] = int(array[0])
        self._bind(binding, name, array)

    def run_with_iobinding(self, binding, options) -> None:
        graph = options.get_run_config_entry("gpu_graph_id")
        self.runs.append((graph, self.told.get((id(binding), contract.MAX_KV_LEN), NO_LIMIT)))
        self._session.run_with_iobinding(binding, options)

    def release_captured_graph(self, graph_id) -> None:
        self.released.append(graph_id)

    @property
    def decoded(self) -> list[tuple[str, int]]:
        """The runs that were captured or replayed."""
        return [run for run in self.runs if run[0] != EAGER]


def place(model, monkeypatch):
    """Put a model on a device of NumPy arrays, where limits begin at 64 tokens, and record its runs."""
    monkeypatch.setattr(kv_limits, "SHORTEST", 64)
    placed = on_fake_cuda(model, monkeypatch)
    recording = Recording(placed.decoder.session, placed.device.cuda, monkeypatch)
    placed.decoder = dataclasses.replace(placed.decoder, session=recording)
    return placed, recording


@pytest.fixture
def placed(endless, monkeypatch):
    return place(endless, monkeypatch)


def limits_of(plan_model, capacity):
    plan = plan_caches(plan_model.manifest, 64)
    layers = tuple(dataclasses.replace(layer, kind="full", capacity=capacity) for layer in plan.layers)
    return KvLimits(dataclasses.replace(plan, layers=layers))


def test_the_ladder_bounds_every_length_in_few_steps(full_model):
    ladder = limits_of(full_model, 33_000)
    wanted = {1: 2048, 2047: 2048, 2048: 2048, 2049: 4096, 4096: 4096, 4097: 8192, 32_768: 32_768, 32_769: NO_LIMIT}
    assert {length: ladder.of_length(length) for length in wanted} == wanted
    lengths = range(1, 33_001)
    found = [ladder.of_length(length) for length in lengths]
    assert all(limit == NO_LIMIT or length <= limit < 33_000 for length, limit in zip(lengths, found, strict=True))
    assert len(set(found)) == 6


@pytest.mark.parametrize("capacity", [1, 2047, 2048])
def test_short_caches_have_no_limit(full_model, capacity):
    assert limits_of(full_model, capacity).of_step(Row(tokens=[1], logical=0), ONE) == NO_LIMIT


def test_a_model_without_full_attention_has_no_limit(full_model):
    plan = plan_caches(full_model.manifest, 64)
    rings = tuple(dataclasses.replace(layer, kind="ring", capacity=9000) for layer in plan.layers)
    assert KvLimits(dataclasses.replace(plan, layers=rings)).of_step(Row(tokens=[1], logical=0), ONE) == NO_LIMIT


def test_the_longest_head_of_any_layer_counts(full_model):
    row = Row(tokens=[1], logical=9000, physical={0: np.array([40, 2047], np.int32), 2: np.array([7, 2], np.int32)})
    assert most_held(row) == 2047
    assert limits_of(full_model, 33_000).of_step(row, ONE) == 2048
    longer = dataclasses.replace(row, physical=row.physical | {2: np.array([2048, 2], np.int32)})
    assert limits_of(full_model, 33_000).of_step(longer, ONE) == 4096
    assert most_held(dataclasses.replace(row, physical={})) == 9000


@pytest.mark.parametrize(
    "shape",
    [
        StepShape(tokens=2, sequences=1, logit_rows=2),
        StepShape(tokens=4, sequences=4, logit_rows=4),
    ],
    ids=["several-tokens", "several-sequences"],
)
def test_steps_that_the_kernels_do_not_take_have_no_limit(full_model, shape):
    assert limits_of(full_model, 33_000).of_step(Row(tokens=[1, 2], logical=5), shape) == NO_LIMIT


def test_a_sequence_takes_the_graph_of_each_limit_that_it_passes(placed, endless, draw_tokens):
    model, recording = placed
    session, expected = model.session(), list(endless.session().generate(draw_tokens(30), 300))
    assert list(session.generate(draw_tokens(30), 300)) == expected
    assert session.stats.graph_captures == len({graph for graph, _ in recording.decoded}) == 4
    assert session.stats.graph_capture_seconds > 0
    assert list(dict.fromkeys(limit for _, limit in recording.decoded)) == [64, 128, 256, NO_LIMIT]
    assert len(set(recording.decoded)) == 4
    assert recording.released == []
    assert all(limit == NO_LIMIT for graph, limit in recording.runs if graph == EAGER)


@pytest.mark.parametrize("length", [63, 64, 65, 128, 129])
def test_the_limit_counts_the_token_of_the_step(placed, draw_tokens, length):
    model, recording = placed
    session = model.session()
    session.prefill(draw_tokens(length - 1))
    session.step(5)
    assert {limit for _, limit in recording.decoded} == {64 if length <= 64 else 128 if length <= 128 else 256}


def test_tokens_stay_on_the_device_where_the_limit_changes(placed, draw_tokens, monkeypatch):
    """Once the graphs are there, steps are enqueued across limits, each feeding what the one before it chose."""
    model, recording = placed
    session, goes_on = model.session(), []
    expected = list(session.generate(draw_tokens(30), 150))
    session.rewind(0)
    recording.runs.clear()
    choose = bucket.Bucket.choose

    def note(target, rows, **options):
        goes_on.append(options["goes_on"])
        return choose(target, rows, **options)

    monkeypatch.setattr(bucket.Bucket, "choose", note)
    assert list(session.generate(draw_tokens(30), 150)) == expected
    assert session.stats.graph_captures == 3
    decoded = len(recording.decoded)
    assert [limit for _, limit in recording.decoded] == sorted(limit for _, limit in recording.decoded)
    assert goes_on[-decoded:] == [False] + [True] * (decoded - 1)


def test_steps_ahead_wait_for_a_graph_that_is_not_captured(placed, draw_tokens):
    model, recording = placed
    session = model.session()
    tokens = session.generate(draw_tokens(60), 20)
    for _ in range(4):  # reads 60 .. 62; the steps ahead end at the limit
        next(tokens)
    assert {limit for _, limit in recording.decoded} == {64}
    assert session.stats.graph_captures == 1
    list(tokens)
    assert session.stats.graph_captures == 2


def test_a_shorter_sequence_takes_the_lower_limit_again(placed, endless, draw_tokens):
    model, recording = placed
    session, host = model.session(), endless.session()
    for length in (100, 40, 90, 20):
        recording.runs.clear()
        for each in (session, host):
            each.rewind(0)
            each.prefill(draw_tokens(length))
        assert session.step(7).argmax() == host.step(7).argmax()
        assert {limit for _, limit in recording.decoded} == {64 if length < 64 else 128}
    assert session.stats.graph_captures == 2
    assert recording.released == []


def test_another_thread_captures_anew(placed, draw_tokens):
    model, recording = placed
    session = model.session()
    session.prefill(draw_tokens(60))
    for token in draw_tokens(8):
        session.step(token)
    mine = {int(graph) for graph, _ in recording.decoded}
    thread = threading.Thread(target=session.step, args=(5,))
    thread.start()
    thread.join()
    assert session.stats.graph_captures == 3
    assert sorted(recording.released) == sorted(mine)
    session.rewind(61)
    session.step(5)
    assert session.stats.graph_captures == 4


def test_graphs_of_replaced_caches_are_let_go(endless_full, monkeypatch, draw_tokens):
    model, recording = place(endless_full, monkeypatch)
    session, host = open_with_room(model, 20, snapkv=SNAPKV), endless_full.session(snapkv=SNAPKV)
    expected = list(host.generate(draw_tokens(100), 150))
    assert list(session.generate(draw_tokens(100), 150)) == expected
    decoded = list(dict.fromkeys(recording.decoded))
    assert [limit for _, limit in decoded] == [64, 128, 256]  # 40 are kept; the caches of 128 slots grow at 129
    assert session.stats.graph_captures == 3
    assert recording.released == [int(graph) for graph, _ in decoded[:2]]
    session.feeder.stepper.close()
    assert recording.released == [int(graph) for graph, _ in decoded]


BOUNDS = (contract.MAX_KV_LEN, contract.MAX_QUERY_LEN)


@pytest.fixture(params=[BOUNDS, BOUNDS[1:]], ids=["no-bounds", "no-bound-of-tokens"])
def older_folder(request, full_folder, tmp_path):
    """A folder from before there were limits, or bounds of tokens: its graphs lack the inputs."""
    folder = tmp_path / "older"
    shutil.copytree(full_folder, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for name in (FUSED_FILE, CPU_FILE):
        model = onnx.load(folder / name, load_external_data=False)
        for bound in request.param:
            for values in (model.graph.input, model.graph.initializer):
                values.remove(next(value for value in values if value.name == bound))
        for node in model.graph.node:
            while node.input and node.input[-1] in request.param:
                node.input.pop()
        onnx.save(model, folder / name)
        manifest["files"][name] = (folder / name).stat().st_size
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return folder


def test_an_older_graph_is_told_what_it_can_be(older_folder, full_model, monkeypatch, draw_tokens):
    model = ortolan.load(older_folder, device="cpu", num_threads=1)
    known = model.decoder.inputs & set(BOUNDS)
    assert contract.MAX_QUERY_LEN not in known
    model, recording = place(model, monkeypatch)
    session = model.session()
    expected = list(full_model.session().generate(draw_tokens(30), 150))
    assert list(session.generate(draw_tokens(30), 150)) == expected
    assert {name for _, name in recording.told} == known
    assert (session.stats.graph_captures <= 1) == (not known)
    assert ({limit for _, limit in recording.runs} == {NO_LIMIT}) == (not known)


def test_pages_have_limits(paged_model, monkeypatch, draw_tokens):
    model, recording = place(paged_model, monkeypatch)
    assert contract.MAX_KV_LEN in model.decoder.inputs
    session, expected = model.session(), list(paged_model.session().generate(draw_tokens(30), 60))
    assert list(session.generate(draw_tokens(30), 60)) == expected
    assert len({limit for _, limit in recording.runs}) > 1
