"""Whole models on a GPU: tokens, evictions and memory are what the host's are."""

import dataclasses
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from cuda_models import ELEMENTS, FAMILIES, GRAPHS, allowed_logit_error, draw_tokens, open_pair
from families import FAMILIES as ALL_FAMILIES
from parity import oracle_logits, relative_difference
from sessions import open_with_room
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan import Eviction, Sampling, SnapKv
from ortolan.cli import main
from ortolan.errors import CapacityError, NumericError
from ortolan.policies import POLICIES
from ortolan.retrieval import KINDS, Task, is_correct, load_corpus, make_sample

pytestmark = pytest.mark.cuda

SHIPPED = Path(ortolan.__file__).parent / "models" / "retriever"
SNAPKV = SnapKv(budget=40, window=8, sink=2)
PROMPT = 150  # past the ring of 128 slots that a window of 20 and chunks of 16 get


@pytest.fixture(params=GRAPHS)
def graph(request):
    return request.param


@pytest.fixture(params=FAMILIES)
def float32(request, graph):
    return open_pair(request.param, "float32", graph)


@pytest.fixture(params=ELEMENTS)
def llama(request, graph):
    return open_pair("llama", request.param, graph)


@pytest.fixture
def pair():
    return open_pair("gemma3", "bfloat16", "plain")


def test_float32_logits_and_tokens_equal_the_hosts(float32):
    """350 decoded tokens take the rings around several times."""
    session, host = float32.device.session(), float32.host.session()
    prompt = draw_tokens(PROMPT)
    assert relative_difference(session.prefill(prompt), host.prefill(prompt)) <= LOGITS_RELATIVE
    for token in draw_tokens(5, seed=1):
        assert relative_difference(session.step(token), host.step(token)) <= LOGITS_RELATIVE
    for each in (session, host):
        each.rewind(0)
    expected = list(host.generate(prompt, 350))
    assert list(session.generate(prompt, 350)) == expected
    assert (session.finish_reason, session.logical_length) == (host.finish_reason, host.logical_length)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_low_precision_agrees_wherever_the_margin_exceeds_the_rounding(family, dtype, graph):
    pair = open_pair(family, dtype, graph)
    tokens = draw_tokens(PROMPT)
    tokens += list(pair.host.session().generate(tokens, 80))
    session = pair.device.session()
    rows = np.array([session.prefill(tokens[:PROMPT]), *(session.step(token) for token in tokens[PROMPT:-1])])
    expected = oracle_logits(pair.checkpoint, tokens[:-1])[PROMPT - 1 :]
    limit = allowed_logit_error(pair.checkpoint, tokens[:-1], dtype)
    assert np.abs(rows - expected).max() <= limit
    best = np.sort(expected, axis=1)
    clear = best[:, -1] - best[:, -2] > limit
    assert clear.any()
    np.testing.assert_array_equal(rows.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(ALL_FAMILIES))
def test_every_family_runs(family, dtype, graph):
    pair = open_pair(family, dtype, graph)
    tokens, session = draw_tokens(PROMPT), pair.device.session()
    rows = np.array([session.prefill(tokens[:140]), *(session.step(token) for token in tokens[140:])])
    expected = oracle_logits(pair.checkpoint, tokens)[139:]
    if dtype == "float32":
        assert relative_difference(rows, expected) <= LOGITS_RELATIVE
    else:
        assert np.abs(rows - expected).max() <= allowed_logit_error(pair.checkpoint, tokens, dtype)


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 17, 64, 400])
def test_prompts_are_read_in_chunks_of_any_size(float32, chunk_size):
    prompt = draw_tokens(201)
    expected = float32.host.session(chunk_size=16).prefill(prompt)
    logits = float32.device.session(chunk_size=chunk_size).prefill(prompt)
    assert relative_difference(logits, expected) <= LOGITS_RELATIVE


@pytest.mark.parametrize(("family", "expected"), [("llama", 6000), ("gemma3", 2048)])
def test_an_unchosen_chunk_grows_where_no_ring_grows_with_it(tmp_path, family, expected):
    checkpoint = open_pair(family, "float32", "fused").checkpoint
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=6000)
    session = ortolan.load(folder, device="cuda").session()
    assert session.plan.chunk_size == expected
    prompt = draw_tokens(5000)
    logits = ortolan.load(folder, device="cpu").session(chunk_size=512).prefill(prompt)
    assert relative_difference(session.prefill(prompt), logits) <= LOGITS_RELATIVE


def run_turns(model, *, captures, snapkv=None):
    """Prefill, decode past a ring's wrap and, after an eviction, past a growth; return all logits."""
    session = open_with_room(model, 20, snapkv=snapkv)
    session.feeder.stepper.captures_graphs = captures
    rows = [session.prefill(draw_tokens(100))]
    rows += [session.step(token) for token in draw_tokens(140, seed=1)]
    rows += [session.prefill(draw_tokens(20, seed=2))]
    rows += [session.step(token) for token in draw_tokens(5, seed=3)]
    tokens = list(session.generate([9], 40))
    return np.array(rows), tokens, session.stats


@pytest.mark.parametrize("policy", [None, "snapkv", "adakv"])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "olmoe"])
def test_a_captured_graph_equals_eager_steps_bit_for_bit(family, dtype, policy, graph):
    model = open_pair(family, dtype, graph).device
    snapkv = Eviction(policy=policy, budget=40, window=8, sink=2) if policy else None
    eager, eager_tokens, eager_stats = run_turns(model, captures=False, snapkv=snapkv)
    rows, tokens, stats = run_turns(model, captures=True, snapkv=snapkv)
    assert np.isfinite(rows).all()
    np.testing.assert_array_equal(rows, eager)
    assert tokens == eager_tokens
    assert eager_stats.graph_captures == 0
    assert stats.graph_captures > (1 if policy else 0)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_per_layer_embeddings_are_read_from_host_memory(dtype, graph):
    """In chunks and in captured steps, whose tokens are chosen on the device."""
    device = open_pair("gemma4", dtype, graph).device
    hosted = ortolan.load(device.folder, device="cuda", fused=GRAPHS[graph], host_embeddings=True)
    object.__setattr__(hosted.manifest, "eos_token_ids", ())
    rows, tokens, stats = run_turns(hosted, captures=True)
    expected, expected_tokens, _ = run_turns(device, captures=True)
    np.testing.assert_array_equal(rows, expected)
    assert tokens == expected_tokens
    assert stats.graph_captures > 0
    assert hosted.session().memory_report().host_embedding_bytes > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_after_evictions_equal_the_hosts(float32, policy):
    again = {"piece": 20, "lead": 4} if policy == "kvzip" else {}  # so that every turn evicts
    options = Eviction(policy=policy, budget=40, window=8, sink=2, **again)
    session, host = open_with_room(float32.device, 10, snapkv=options), float32.host.session(snapkv=options)
    for turn, count in enumerate((PROMPT, 21, 1)):
        prompt = draw_tokens(count, seed=turn)
        assert list(session.generate(prompt, 30)) == list(host.generate(prompt, 30))
        assert session.feeder.held() == host.feeder.held()
        for layer in range(len(host.plan.layers)):
            np.testing.assert_array_equal(*(each.state.lengths.counts.get(layer, ()) for each in (session, host)))
            np.testing.assert_array_equal(session.kept_positions(layer), host.kept_positions(layer))
    assert session.stats.evictions == 3
    assert session.cache_bytes < session.plan.bytes


def test_the_next_turn_follows_what_was_taken(float32):
    session, host = float32.device.session(), float32.host.session()
    tokens = session.generate(draw_tokens(PROMPT), 50)
    taken = [next(tokens) for _ in range(7)]
    tokens.close()
    host.prefill([*draw_tokens(PROMPT), *taken])
    question = draw_tokens(9, seed=2)
    assert relative_difference(session.prefill(question), host.prefill(question)) <= LOGITS_RELATIVE
    session.rewind(PROMPT + 8)
    host.rewind(PROMPT + 8)
    assert relative_difference(session.step(5), host.step(5)) <= LOGITS_RELATIVE


def test_sampling_repeats_with_its_seed(llama):
    options = Sampling(temperature=1.2, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=3)

    def sample(**changes):
        changed = dataclasses.replace(options, **changes)
        return list(llama.device.session().generate(draw_tokens(30), 60, changed))

    assert sample() == sample()
    assert sample() != sample(seed=4)
    assert sample(seed=None) != sample(seed=None)


def test_a_repetition_penalty_chooses_as_on_the_host(float32):
    options = Sampling(repetition_penalty=1.7)
    expected = list(float32.host.session().generate(draw_tokens(40), 100, options))
    assert list(float32.device.session().generate(draw_tokens(40), 100, options)) == expected
    assert expected != list(float32.host.session().generate(draw_tokens(40), 100))


def test_sessions_of_one_model_do_not_disturb_each_other(pair):
    prompts = [draw_tokens(40, seed=seed) for seed in range(3)]
    alone = [list(pair.device.session().generate(prompt, 30)) for prompt in prompts]
    streams = [pair.device.session().generate(prompt, 30) for prompt in prompts]
    assert [list(column) for column in zip(*zip(*streams, strict=True), strict=True)] == alone


def test_a_session_moves_between_threads(pair):
    session = pair.device.session()
    expected = list(session.generate(draw_tokens(40), 30))
    results = []

    def work():
        session.rewind(0)
        results.extend(session.generate(draw_tokens(40), 30))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == expected
    assert session.stats.graph_captures == 2
    session.rewind(0)
    assert list(session.generate(draw_tokens(40), 30)) == expected


def test_logits_that_are_no_numbers_are_an_error(pair):
    session = pair.device.session()
    session.prefill(draw_tokens(40))
    buffers = pair.device.device.cuda
    with buffers.scope():
        session.feeder.caches.store.tensors[1]["value"].view("uint8").fill(0xFF)
    buffers.synchronize()
    with pytest.raises(NumericError):
        session.step(5)
    assert session.logical_length == 40
    session.rewind(0)
    expected = pair.device.session().prefill(draw_tokens(300))
    np.testing.assert_array_equal(session.prefill(draw_tokens(300)), expected)


def test_the_memory_report_adds_up(pair):
    """To what the driver says, but for the granularity of its allocations."""
    session = open_with_room(pair.device, 20, snapkv=SNAPKV)
    session.prefill(draw_tokens(300))
    report = session.memory_report()
    named = (report.weights_bytes, report.cache_bytes, report.capture_bytes, report.step_bytes)
    assert report.used_bytes == sum(named) + report.other_session_bytes + report.arena_bytes
    assert all(size > 0 for size in named)
    assert report.cache_bytes < report.planned_cache_bytes == session.plan.bytes
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the driver counts what other processes hold, too
        assert abs(report.used_bytes - pair.device.memory.used_bytes()) < 64 * 2**20
    assert 0 < report.free_bytes < report.total_bytes


def test_a_plan_that_does_not_fit_is_refused_at_once(pair):
    model = pair.device
    kept = model.manifest
    try:
        model.manifest = dataclasses.replace(kept, max_context=2**31)
        with pytest.raises(CapacityError, match=r"max_context 2147483648 .* needs \d+ bytes .* too few"):
            model.session(max_context=2**31)
    finally:
        model.manifest = kept
    assert len(list(model.session().generate(draw_tokens(20), 5))) == 5


def test_memory_that_runs_out_is_a_capacity_error(pair):
    with pytest.raises(CapacityError, match="cannot allocate an array of 1099511627776 bytes"):
        pair.device.device.cuda.allocate((2**40,), np.uint8)


def test_memory_comes_back_after_an_eviction_and_with_the_session(pair):
    model = pair.device
    pool = model.device.cuda
    before = pool.pool_bytes
    session = model.session(snapkv=SNAPKV)
    session.prefill(draw_tokens(300))
    held = pool.pool_bytes - before
    assert held < session.plan.bytes + session.feeder.stepper.bytes + 2**20
    del session
    pool.trim()
    assert pool.pool_bytes <= before + 2**20


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def shipped(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped") / request.param
    return ortolan.export(SHIPPED, folder, dtype=request.param, max_context=4200, chunk_size=512)


@pytest.mark.parametrize("snapkv", [None, SnapKv(budget=512)], ids=["full", "snapkv"])
def test_the_shipped_model_answers(shipped, snapkv, graph):
    model = ortolan.load(shipped, device="cuda", fused=GRAPHS[graph])
    corpus = load_corpus("eval")
    for seed in range(8):
        sample = make_sample(
            corpus, Task(length=4096, depth=(seed % 6) / 5, kind=KINDS[seed % len(KINDS)], seed=900 + seed)
        )
        session = model.session(snapkv=snapkv)
        tokens = list(session.generate(model.tokenizer.encode(sample.prompt), 8))
        assert is_correct(sample, model.tokenizer.decode(tokens)), seed


def test_the_command_line_runs_on_cuda(shipped, tmp_path, capsys):
    sample = make_sample(load_corpus("eval"), Task(length=2048, depth=0.4, seed=11))
    prompt, stats = tmp_path / "prompt.txt", tmp_path / "stats.json"
    prompt.write_text(sample.prompt, encoding="utf-8")
    options = ["--max-new-tokens", "8", "--stop", "\n", "--snapkv-budget", "256", "--stats-json", str(stats)]
    assert main(["generate", str(shipped), "--prompt-file", str(prompt), "--device", "cuda", *options]) == 0
    assert capsys.readouterr().out == sample.answer + "\n"
    assert json.loads(stats.read_text())["memory"]["device"] == "cuda:0"
