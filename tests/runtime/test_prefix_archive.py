"""Prefixes that left their pages come back from host memory and from files, and change no token."""

import random
import shutil

import numpy as np
import pytest
from fake_cuda import on_fake_cuda
from families import shared_checkpoint, shared_model

import ortolan
from ortolan.errors import ConfigError, OrtolanError
from ortolan.runtime.caches.page_files import SUFFIX
from ortolan.runtime.caches.store import CacheStore

OPTIONS = {"paged": True, "page_size": 16, "max_context": 512, "chunk_size": 64}
LAYERS = {
    "llama": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    "qwen3_next": {},
    "gemma4": {},
}
HOST = {"host_cache_bytes": 64 * 2**20}


@pytest.fixture(params=LAYERS)
def paged(request):
    return load(request.param)


def load(family, **options):
    return ortolan.load(shared_model(shared_checkpoint(family, **LAYERS[family]), **OPTIONS | options), device="cpu")


def small_engine(model, **options):
    """Make an engine whose pools hold two long sequences, so that later ones take their pages."""
    plan = model.plan_engine(2, None, 64, 512)
    return ortolan.Engine(model, 2, 2 * plan.sequence_bytes(512), 64, **options)


def draw(seed, count):
    return np.random.default_rng(seed).integers(4, 120, count).tolist()


def push_out(engine):
    """Read enough for all pages."""
    for seed in (2, 3, 4):
        answer(engine, draw(seed, 480))


def answer(engine, prompt, count=6):
    return engine.submit(prompt, count, ignore_eos=True).result()


def test_what_others_have_pushed_out_comes_back_from_memory(paged):
    first = draw(1, 300)
    with small_engine(paged, **HOST) as engine, small_engine(paged) as plain:
        for each in (engine, plain):
            answer(each, first)
            push_out(each)
        before = [each.stats() for each in (engine, plain)]
        prompt = [*first, 7, 8, 9]
        assert answer(engine, prompt) == answer(plain, prompt)
        after = [each.stats() for each in (engine, plain)]
        assert after[0].reused_tokens - before[0].reused_tokens >= 250
        assert after[1].reused_tokens - before[1].reused_tokens < 250
        assert after[0].restored_pages > before[0].restored_pages
        assert after[0].fed_tokens - before[0].fed_tokens < after[1].fed_tokens - before[1].fed_tokens
        memory = engine.memory()
        assert memory.held_bytes == 0
        assert 0 < memory.host_cache_bytes <= HOST["host_cache_bytes"]
        assert memory.held_bytes + memory.kept_bytes + memory.free_bytes == memory.pool_bytes


def test_another_engine_begins_with_what_files_hold(paged, tmp_path):
    prompt = draw(1, 300)
    with small_engine(paged, disk_cache=tmp_path) as engine:
        expected = answer(engine, prompt)
    with small_engine(paged, disk_cache=str(tmp_path)) as engine:
        assert answer(engine, prompt) == expected
        assert engine.stats().reused_tokens >= 250
        assert engine.memory().disk_cache_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*" + SUFFIX))


def test_files_of_another_model_or_layout_are_not_read(tmp_path):
    prompt = draw(1, 300)
    with small_engine(load("llama"), disk_cache=tmp_path) as engine:
        answer(engine, prompt)
    other = shared_checkpoint("llama", seed=1, **LAYERS["llama"])
    models = [
        load("llama", dtype="float16"),
        ortolan.load(shared_model(other, **OPTIONS), device="cpu"),
        ortolan.load(
            shared_model(shared_checkpoint("llama", **LAYERS["llama"]), **OPTIONS | {"page_size": 32}), device="cpu"
        ),
    ]
    for model in models:
        with small_engine(model, disk_cache=tmp_path) as engine:
            answer(engine, prompt)
            assert engine.stats().reused_tokens == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_a_damaged_file_shortens_the_prefix(tmp_path):
    model, prompt = load("llama"), draw(1, 300)
    with small_engine(model, disk_cache=tmp_path) as engine:
        expected = answer(engine, prompt)
    files = sorted(tmp_path.rglob("*" + SUFFIX), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    files[7].write_bytes(files[7].read_bytes()[:-1])
    with small_engine(model, disk_cache=tmp_path) as engine:
        assert answer(engine, prompt) == expected
        assert engine.stats().reused_tokens == 7 * 16
    with small_engine(model, disk_cache=tmp_path) as engine:
        assert answer(engine, prompt) == expected
        assert engine.stats().reused_tokens >= 250


def test_files_may_go_while_an_engine_works(tmp_path):
    model, prompt = load("llama"), draw(1, 300)
    with small_engine(model, disk_cache=tmp_path) as engine:
        expected = answer(engine, prompt)
        push_out(engine)
        shutil.rmtree(tmp_path, ignore_errors=True)  # a file may come meanwhile
        assert answer(engine, prompt) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_requests_get_their_own_tokens(family, seed, tmp_path):
    model, rng = load(family), random.Random(seed)
    roots = [draw(number, 330) for number in range(3)]
    lengths = [(rng.randrange(20, 330), rng.randrange(1, 31)) for _ in range(24)]
    prompts = [[*rng.choice(roots)[:shared], *draw(own, own)] for shared, own in lengths]
    plan = model.plan_engine(3, None, 64, 512)
    with ortolan.Engine(
        model,
        3,
        2 * plan.sequence_bytes(512),
        64,
        overcommit=1.5,
        host_cache_bytes=rng.choice([0, 200_000, 64 * 2**20]),
        disk_cache=tmp_path,
        disk_cache_bytes=rng.choice([300_000, 2**30]),
    ) as engine:
        streams = [engine.submit(prompt, 5, ignore_eos=True) for prompt in prompts]
        results = [stream.result() for stream in streams]
        assert engine.memory().held_bytes == 0
    with ortolan.Engine(model, 1, chunk_tokens=64) as engine:
        assert results == [engine.submit(prompt, 5, ignore_eos=True).result() for prompt in prompts]


@pytest.mark.parametrize("where", ["memory", "files"])
def test_of_a_prefix_that_does_not_fit_the_beginning_stays(where, tmp_path):
    model, prompt = load("llama"), draw(1, 320)
    page = model.plan_engine(2, None, 64, 512).kinds[0].page_bytes
    most = 12 * (page + 16)
    options = {"host_cache_bytes": most} if where == "memory" else {"disk_cache": tmp_path, "disk_cache_bytes": most}
    with small_engine(model, **options) as engine:
        expected = answer(engine, prompt)
        private = {"eviction": ortolan.SnapKv(budget=480, window=8)}  # nothing of these is archived
        for stream in [engine.submit(draw(seed, 500), 8, **private) for seed in (2, 3)]:
            stream.result()
        assert answer(engine, prompt) == expected
        assert 8 * 16 <= engine.stats().reused_tokens <= 12 * 16


def test_pages_pass_by_a_device(monkeypatch, tmp_path):
    model, prompt = load("gemma3"), draw(1, 300)
    fake = on_fake_cuda(model, monkeypatch)
    with small_engine(fake, **HOST) as engine:
        expected = answer(engine, prompt)
        push_out(engine)
        assert answer(engine, prompt) == expected
        assert engine.stats().restored_pages > 0
    assert expected == answer(small_engine(model), prompt)


def test_a_failure_of_the_archive_ends_no_request(monkeypatch, caplog):
    model, prompt = load("llama"), draw(1, 300)
    with small_engine(model, **HOST) as engine:
        expected = answer(engine, prompt)

        def fail(*_):
            raise OrtolanError("the device failed")

        monkeypatch.setattr(CacheStore, "write_pages", fail)
        push_out(engine)
        assert answer(engine, prompt) == expected
        assert caplog.text.count("prefixes are not archived any more: the device failed") == 1
        assert engine.memory().held_bytes == 0


def test_evicted_requests_are_not_archived():
    model = load("llama")
    with small_engine(model, **HOST) as engine:
        engine.submit(draw(1, 300), 4, eviction=ortolan.SnapKv(budget=80, window=16)).result()
        assert engine.memory().host_cache_bytes == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"host_cache_bytes": -1}, "host_cache_bytes is -1"),
        ({"host_cache_bytes": 1.5}, "host_cache_bytes is 1.5"),
        ({"disk_cache": 5}, "disk_cache is 5; it must be a path"),
        ({"disk_cache": "/proc/none"}, "disk_cache: /proc/none/.* cannot be used"),
        ({"disk_cache": "x", "disk_cache_bytes": 0}, "disk_cache_bytes is 0"),
    ],
)
def test_arguments_are_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        small_engine(load("llama"), **options)


def test_a_model_without_full_attention_is_refused(tmp_path):
    windows = {"num_hidden_layers": 2, "sliding_window": 24}
    model = ortolan.load(shared_model(shared_checkpoint("mistral", **windows), **OPTIONS), device="cpu")
    with pytest.raises(ConfigError, match="share none; leave them out"):
        ortolan.Engine(model, 1, disk_cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
