"""A session over pages answers bit for bit as one over contiguous caches, and accounts for every page."""

import dataclasses
import random

import numpy as np
import pytest
from fake_cuda import make_session, on_fake_cuda
from families import FAMILIES, tiny_checkpoint
from paged_sessions import check_pages, pages_in_use, poison_free_pages, shuffle_free_pages, talk_in_step
from sessions import DEVICES, open_with_room

import ortolan
from ortolan import Eviction, SnapKv
from ortolan.errors import CapacityError, ConfigError, ContractMismatchError
from ortolan.policies import POLICIES

PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_CONTEXT, SINK = 512, 2


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a function that exports a family with a page size (0: contiguous) and opens it, once for each."""
    root, models = tmp_path_factory.mktemp("paged"), {}

    def open_model(family: str, page_size: int, sink: int = SINK, **options) -> ortolan.Model:
        key = (family, page_size, sink, *sorted(options.items()))
        if key not in models:
            name = "-".join(map(str, key)).replace(" ", "")
            checkpoint = tiny_checkpoint(family, root / name / "hf", seed=5)
            pages = {"paged": True, "page_size": page_size} if page_size else {}
            folder = ortolan.export(
                checkpoint, root / name / "model", max_context=MAX_CONTEXT, chunk_size=16, sink=sink, **pages, **options
            )
            models[key] = ortolan.load(folder, device="cpu", num_threads=1)
            object.__setattr__(models[key].manifest, "eos_token_ids", ())
        return models[key]

    return open_model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(30))
def test_paged_equals_contiguous_bit_for_bit(exported, monkeypatch, seed, device):
    rng = random.Random(seed)
    family, chunk_size = (
        rng.choice(["llama", "gemma3", "qwen2", "gemma4", "gemma4_unified"]),
        rng.choice([1, 5, 16, 40]),
    )
    page_size, sink = rng.choice(PAGE_SIZES), rng.choice([0, 2, 9])
    models = [exported(family, size, sink) for size in (0, page_size)]
    evicts = any(layer.evictable for layer in models[0].manifest.layers)
    policy = rng.choice(list(POLICIES))
    bounded = not POLICIES[policy].keeps_uneven and rng.random() < 0.5
    snapkv = Eviction(budget=rng.choice([24, 40]), window=8, sink=2, policy=policy, during_prefill=bounded)
    options = {"chunk_size": chunk_size, "snapkv": rng.choice([None, snapkv]) if evicts else None}
    if device == "device":
        models, room = [on_fake_cuda(model, monkeypatch) for model in models], rng.choice([0, 7, 60])
        sessions = [open_with_room(model, room, **options) for model in models]
    else:
        sessions = [model.session(**options) for model in models]
    talk_in_step(sessions, seed)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_device_captures_its_graph_once_though_pages_are_added(exported, monkeypatch, draw_tokens, page_size):
    sessions = [make_session(exported("gemma3", size), monkeypatch) for size in (0, page_size)]
    expected, got = (list(session.generate(draw_tokens(20), 400)) for session in sessions)
    assert got == expected
    assert sessions[1].stats.graph_captures == 1
    assert sessions[1].cache_capacity(1) == -(-419 // page_size) * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("evictable", [True, False])
def test_full_layers_grow_page_by_page_and_rings_never(exported, draw_tokens, page_size, evictable):
    options = {} if evictable else {"snapkv_window": 0}
    session = exported("gemma3", page_size, **options).session()
    rings = [session.cache_capacity(i) for i in (0, 2, 3)]
    for length in range(1, 300):
        session.step(draw_tokens(1, length)[0])
        assert session.cache_capacity(1) == -(-length // page_size) * page_size
        assert [session.cache_capacity(i) for i in (0, 2, 3)] == rings
        assert session.cache_bytes == sum(
            session.cache_capacity(i) * layer.slot_bytes for i, layer in enumerate(session.plan.layers)
        )
    report = session.memory_report()
    assert report.cache_bytes + report.free_page_bytes == session.plan.bytes == report.planned_cache_bytes


def test_a_rewind_frees_pages(exported, draw_tokens):
    session = exported("llama", 16).session()
    session.prefill(draw_tokens(100))
    assert pages_in_use(session) == [7]
    for length, pages in ((97, 7), (96, 6), (33, 3), (32, 2), (1, 1), (0, 0)):
        session.rewind(length)
        assert pages_in_use(session) == [pages]
    assert session.cache_bytes == 0


def test_an_eviction_frees_pages(exported, draw_tokens):
    session = exported("llama", 16).session(snapkv=SnapKv(budget=40, window=8))
    logits = session.prefill(draw_tokens(200))
    assert session.physical_length(0) == 40
    assert pages_in_use(session) == [3]
    poison_free_pages(session)
    for token in draw_tokens(30, 1):
        logits = session.step(token)
    assert np.isfinite(logits).all()
    assert pages_in_use(session) == [5]


def test_heads_of_different_lengths_keep_the_pages_of_the_longest(exported, draw_tokens):
    session = exported("llama", 16).session(snapkv=Eviction(budget=40, window=8, policy="adakv"))
    session.prefill(draw_tokens(200))
    longest = max(session.physical_length(layer) for layer in range(4))
    assert longest > 40
    assert pages_in_use(session) == [-(-longest // 16)]


def test_the_context_limit_is_the_end(exported, draw_tokens):
    session = exported("llama", 64).session(max_context=100)
    stream = session.generate(draw_tokens(90), 64)
    assert len(list(stream)) == 11
    assert session.finish_reason == "context"
    with pytest.raises(CapacityError, match="max_context = 100"):
        session.prefill([3])
    assert pages_in_use(session) == [2]


def test_longrope_reads_a_paged_sequence_again(tmp_path, draw_tokens):
    rope = FAMILIES["phi3"]["rope_parameters"] | {"original_max_position_embeddings": 64}
    checkpoint = tiny_checkpoint(
        "phi3", tmp_path / "hf", rope_parameters=rope, original_max_position_embeddings=64, sliding_window=20
    )
    sessions = []
    for name, pages in (("contiguous", {}), ("paged", {"paged": True, "page_size": 32})):
        folder = ortolan.export(checkpoint, tmp_path / name, max_context=256, chunk_size=16, **pages)
        assert len(ortolan.load(folder, device="cpu").manifest.rope_limits) == 2
        sessions.append(ortolan.load(folder, device="cpu").session())
    for turn in (draw_tokens(50), draw_tokens(40, 1)):
        np.testing.assert_array_equal(*(session.prefill(turn) for session in sessions))


def test_a_pool_that_is_too_small_is_refused(exported):
    session = exported("llama", 16).session(max_context=48)
    room, pool = session.feeder.room, session.feeder.room.pools["full"]
    room.fit(dict.fromkeys(range(4), 32), dict.fromkeys(range(4), 0))
    with pytest.raises(CapacityError, match="4 pages are needed, the pool has 3"):
        room.fit(dict.fromkeys(range(4), 64), dict.fromkeys(range(4), 0))
    assert (pages_in_use(session), pool.free) == ([2], 1)


def test_a_graph_of_other_pages_than_the_manifest_is_refused(exported, monkeypatch):
    model = exported("llama", 16)
    folder = model.folder
    manifest = dataclasses.replace(model.manifest, page_size=32)
    monkeypatch.setattr("ortolan.runtime.loading.read_manifest", lambda _: manifest)
    with pytest.raises(ContractMismatchError, match="in pages of 32"):
        ortolan.load(folder, device="cpu")
    contiguous = dataclasses.replace(model.manifest, paged=False, page_size=0, cache_kinds=())
    monkeypatch.setattr("ortolan.runtime.loading.read_manifest", lambda _: contiguous)
    with pytest.raises(ContractMismatchError, match=r"block_table\.full"):
        ortolan.load(folder, device="cpu")


@pytest.mark.parametrize("page_size", [0, 8, 17, 512, True, "64"])
def test_other_page_sizes_are_refused(tmp_path, page_size):
    checkpoint = tiny_checkpoint("llama", tmp_path / "hf")
    with pytest.raises(ConfigError, match="16, 32, 64, 128, 256"):
        ortolan.export(checkpoint, tmp_path / "model", paged=True, page_size=page_size)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_a_layer_that_needs_few_pages_takes_none_from_another(exported, order):
    """The layers of a kind share pages, so the one that holds most decides, in whatever order they are named."""
    session = exported("llama", 16).session()
    room, pages = session.feeder.room, session.state.pages["full"]
    held = {0: 100, 1: 20, 2: 5, 3: 5}
    room.fit(dict.fromkeys(order, 112), held)
    shuffle_free_pages(session, random.Random(0))
    before = list(pages)
    room.fit({i: max(held[i], 17) for i in order}, held)
    assert pages == before
    room.release({i: min(held[i], 40) for i in order}, dict.fromkeys(order, 5))
    assert pages == before[:3]


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("device", DEVICES)
def test_a_saved_paged_session_goes_on_bit_for_bit(
    exported, tmp_path, draw_tokens, monkeypatch, page_size, evicted, device
):
    model = exported("gemma3", page_size)
    if device == "device":
        model = on_fake_cuda(model, monkeypatch)
    session = model.session(snapkv=SnapKv(budget=40, window=8) if evicted else None)
    session.prefill(draw_tokens(150))
    session.step(5)
    session.save(tmp_path / "chat.session")
    restored = model.restore(tmp_path / "chat.session")
    check_pages(restored)
    assert restored.cache_capacity(1) == session.cache_capacity(1)
    poison_free_pages(restored)
    for turn in (draw_tokens(1, 1), draw_tokens(70, 2), draw_tokens(1, 3)):
        np.testing.assert_array_equal(restored.prefill(turn), session.prefill(turn))
    assert list(restored.generate([7], 30)) == list(session.generate([7], 30))
