"""The engine on exported models, against sessions that read each prompt alone."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

import ortolan
from ortolan import Engine, Eviction, Sampling, SnapKv, runtime
from ortolan.errors import CapacityError, ConfigError
from ortolan.policies import POLICIES

SNAPKV = SnapKv(budget=40, window=8, sink=2)
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["paged", "paged_mixed", "paged_sharing"])
def model(request):
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture
def soak(monkeypatch):
    spec = importlib.util.spec_from_file_location("engine_soak", ROOT / "benchmarks" / "engine_soak.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine_soak", module)  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def assert_same(soak, monkeypatch):
    """Assert that greedy tokens are those of a session, except after a tie."""
    monkeypatch.setattr(soak, "MAX_CONTEXT", 512)
    monkeypatch.setattr(soak, "CHUNK_SIZE", 16)

    def check(model, prompt, tokens, snapkv=None):
        job = soak.Job(list(prompt), len(tokens), snapkv, None, list(tokens))
        assert soak.find_difference(model, job, {}) is None

    return check


def test_tokens_are_those_of_sessions(model, draw_tokens, assert_same):
    prompts = [draw_tokens(count, seed=count) for count in (1, 15, 16, 17, 90, 200, 33)]
    with Engine(model, 4, chunk_tokens=24) as engine:
        streams = [engine.submit(prompt, 30, ignore_eos=True) for prompt in prompts]
        results = [stream.result() for stream in streams]
        memory = engine.memory()
        assert memory.held_bytes == 0
        assert memory.pool_bytes == engine.plan.bytes == memory.kept_bytes + memory.free_bytes
    for prompt, tokens in zip(prompts, results, strict=True):
        assert len(tokens) == 30
        assert_same(model, prompt, tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_of_a_batch_evicts(model, draw_tokens, assert_same, policy):
    """Windows of captured queries that lie across chunks, heads that keep different numbers, pages that come back."""
    again = {"piece": 10, "lead": 4} if policy == "kvzip" else {}  # no more than a session reads at once
    options = [None, Eviction(budget=40, window=8, sink=2, policy=policy, **again), None, SnapKv(budget=60, window=32)]
    prompts = [draw_tokens(count, seed=count) for count in (70, 100, 130, 111)]
    with Engine(model, 4, chunk_tokens=29) as engine:
        streams = [
            engine.submit(prompt, 40, ignore_eos=True, snapkv=snapkv)
            for prompt, snapkv in zip(prompts, options, strict=True)
        ]
        results = [stream.result() for stream in streams]
        assert engine.stats().evictions == 2
        assert engine.memory().held_bytes == 0
    for prompt, tokens, snapkv in zip(prompts, results, options, strict=True):
        assert_same(model, prompt, tokens, snapkv)


def test_evicted_sequences_give_way_and_come_back(model, draw_tokens, assert_same):
    plan = model.plan_engine(6, None, 32, 512)
    budget = sum((33 if kind.grows else 6 * kind.pages_for(512)) * kind.page_bytes for kind in plan.kinds)
    prompts = [draw_tokens(80, seed=seed) for seed in range(6)]
    options = [SNAPKV if seed % 2 else None for seed in range(6)]
    with Engine(model, 6, budget, 32, overcommit=5.0) as engine:
        streams = engine.worker.ask(  # all of them between two steps
            lambda _: [
                engine.submit(prompt, 120, ignore_eos=True, snapkv=snapkv)
                for prompt, snapkv in zip(prompts, options, strict=True)
            ]
        )
        results = [stream.result() for stream in streams]
        assert engine.stats().preemptions > 0
    for prompt, tokens, snapkv in zip(prompts, results, options, strict=True):
        assert_same(model, prompt, tokens, snapkv)


def test_a_shared_prefix_changes_no_token(paged_model, draw_tokens, assert_same):
    prefix = draw_tokens(100)
    prompts = [[*prefix, *draw_tokens(count, seed=count)] for count in (0, 5, 40)]
    with Engine(paged_model, 4, chunk_tokens=64) as engine:
        results = [engine.submit(prompt, 20, ignore_eos=True).result() for prompt in prompts]
        assert engine.stats().reused_tokens == 2 * 96
    for prompt, tokens in zip(prompts, results, strict=True):
        assert_same(paged_model, prompt, tokens)


def test_a_prefix_of_rings_is_copied_and_changes_no_token(paged_mixed_model, draw_tokens, assert_same):
    """The rings have gone round when the snapshot is made, and go on behind it."""
    prefix = draw_tokens(450)
    prompts = [[*prefix, *draw_tokens(count, seed=count)] for count in (0, 5, 20, 40)]
    with Engine(paged_mixed_model, 4, chunk_tokens=64) as engine:
        spacing = engine.plan.snapshot_spacing
        results = [engine.submit(prompt, 12, ignore_eos=True).result() for prompt in prompts]
        assert spacing < 448
        assert engine.stats().snapshots > 0
        assert engine.stats().reused_tokens >= 2 * 448
        assert engine.memory().held_bytes == 0
    for prompt, tokens in zip(prompts, results, strict=True):
        assert_same(paged_mixed_model, prompt, tokens)


def test_sampling_draws_as_a_session_does(endless, draw_tokens):
    options = Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=3)
    expected = list(endless.session().generate(draw_tokens(50), 20, options))
    with Engine(endless, 4) as engine:
        others = [engine.submit(draw_tokens(40, seed=seed), 20) for seed in (1, 2)]
        assert engine.submit(draw_tokens(50), 20, options).result() == expected
        for other in others:
            other.result()


@pytest.mark.slow
def test_a_soak_of_mixed_requests_is_sound(soak, tmp_path):
    """Sixty requests with random ends, cancels and evictions on the shipped model; the script runs thousands."""
    from ortolan.retrieval import shipped_model

    folder = ortolan.export(
        shipped_model(), tmp_path / "model", max_context=768, chunk_size=128, paged=True, page_size=16
    )
    report = soak.run(ortolan.load(folder, device="cpu", num_threads=1), 60, seed=1)
    assert soak.is_sound(report), report
    assert report["stats"]["evictions"] > 0


def test_a_model_that_cannot_evict_says_so(tmp_path, draw_tokens):
    from families import tiny_checkpoint

    checkpoint = tiny_checkpoint("llama", tmp_path / "hf")
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=128, snapkv_window=0, paged=True)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    with Engine(model, 2) as engine:
        with pytest.raises(ConfigError, match="evict"):
            engine.submit([1, 2], snapkv=SNAPKV)
        assert engine.submit(draw_tokens(20), 5, ignore_eos=True).result()


def test_evictions_that_the_model_has_no_graph_for_are_refused_at_once(model, monkeypatch):
    """Opened without a builder, a model has its folder's graph alone; one of an old export no RoPE frequencies."""
    streaming = Eviction(policy="streaming", budget=40, window=8, sink=2)
    bare = runtime.load(model.folder, device="cpu", num_threads=1)
    with Engine(bare, 2) as engine:
        with pytest.raises(ConfigError, match=r"built for .*snapkv.*streaming"):
            engine.submit([1, 2], snapkv=streaming)
        with pytest.raises(ConfigError, match="streaming"):
            bare.session(snapkv=streaming)
        assert len(engine.submit([1] * 60, 5, ignore_eos=True, snapkv=SNAPKV).result()) == 5
    monkeypatch.setattr(model, "manifest", dataclasses.replace(model.manifest, ropes=None))
    expected = Eviction(policy="expected", budget=40, window=8, sink=2)
    with pytest.raises(ConfigError, match="RoPE frequencies"):
        model.session(snapkv=expected)
    with Engine(model, 2) as engine, pytest.raises(ConfigError, match="RoPE frequencies"):
        engine.submit([1, 2], snapkv=expected)


def test_eviction_during_prefill_is_for_sessions(model, draw_tokens):
    with Engine(model, 2) as engine, pytest.raises(ConfigError, match="during_prefill"):
        engine.submit(draw_tokens(20), snapkv=SnapKv(budget=40, window=8, sink=2, during_prefill=True))


def test_a_sequence_that_grows_past_a_rope_limit_is_read_again(tmp_path, draw_tokens):
    from families import FAMILIES, tiny_checkpoint

    rope = FAMILIES["phi3"]["rope_parameters"] | {"original_max_position_embeddings": 64}
    checkpoint = tiny_checkpoint(
        "phi3", tmp_path / "hf", sliding_window=None, rope_parameters=rope, original_max_position_embeddings=64
    )
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=256, chunk_size=16, paged=True, page_size=16)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    prompts = [draw_tokens(50), draw_tokens(70, seed=1), draw_tokens(58, seed=2)]
    with Engine(model, 4) as engine:
        results = [stream.result() for stream in [engine.submit(prompt, 30) for prompt in prompts]]
    assert results == [list(model.session().generate(prompt, 30)) for prompt in prompts]


def test_a_soak_reports_what_is_wrong(soak, paged_model, draw_tokens, assert_same):
    tokens = list(paged_model.session().generate(draw_tokens(20), 5))
    assert_same(paged_model, draw_tokens(20), tokens)
    wrong = [*tokens[:3], (tokens[3] + 1) % 131, *tokens[4:]]
    job = soak.Job(draw_tokens(20), 5, None, None, wrong)
    assert "token 3" in soak.find_difference(paged_model, job, {})
    clean = {"pool_bytes": 9, "held_bytes": 0, "kept_bytes": 0, "free_bytes": 9}
    report = {"outcomes": {"length": 1}, "memory_before": clean, "memory_after": clean, "unfinished": []}
    assert soak.is_sound(report | {"differences": {}})
    assert not soak.is_sound(report | {"differences": {0: "token 3"}})
    assert not soak.is_sound(report | {"differences": {}, "memory_after": clean | {"held_bytes": 8}})
    assert not soak.is_sound(report | {"differences": {}, "memory_after": clean | {"free_bytes": 8}})
    assert soak.is_sound(report | {"differences": {}, "memory_after": clean | {"kept_bytes": 1, "free_bytes": 8}})


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ({"max_sequences": 0}, ConfigError),
        ({"chunk_tokens": -3}, ConfigError),
        ({"max_context": 100000}, ConfigError),
        ({"max_cache_bytes": 10}, CapacityError),
        ({"max_cache_bytes": 1.5}, ConfigError),
        ({"overcommit": 0.5}, ConfigError),
        ({"overcommit": float("nan")}, ConfigError),
        ({"overcommit": float("inf")}, ConfigError),
        ({"overcommit": "2"}, ConfigError),
        ({"overcommit": 10**400}, ConfigError),
    ],
)
def test_plans_that_make_no_sense_are_refused(paged_model, numbers, error):
    with pytest.raises(error):
        Engine(paged_model, **numbers)


def test_what_is_no_model_is_refused():
    with pytest.raises(ConfigError, match=r"ortolan\.load"):
        Engine("model_dir")


def test_a_model_without_pages_is_refused(full_model):
    with pytest.raises(ConfigError, match="paged=True"):
        Engine(full_model)
