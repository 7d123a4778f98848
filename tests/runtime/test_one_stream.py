"""One random stream: a seed gives the same tokens wherever a sequence is read, alone or not, and across files."""

import copy
import dataclasses
import itertools

import pytest
from fake_cuda import on_fake_cuda
from saved_requests import save_midway

import ortolan
from ortolan import Engine, Sampling, SnapKv
from ortolan.runtime.steps import cuda

SAMPLING = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.001, repetition_penalty=1.1, seed=11)
SNAPKV = SnapKv(budget=40, window=8, sink=2)
PROMPT, NEW, CHUNK = 70, 40, 30
SHORT = 160  # a context of which few pages are a sequence's share
PROMPT_STEPS = 3  # -(-PROMPT // CHUNK)
PLACES = ["host", "device", pytest.param("cuda", marks=pytest.mark.cuda)]
FAMILIES = {"full": ("full_model", "paged_model"), "mixed": ("mixed_model", "paged_mixed_model")}


@pytest.fixture(params=FAMILIES)
def models(request):
    """A contiguous and a paged model of the same weights, on the host."""
    return [endless(request.getfixturevalue(name)) for name in FAMILIES[request.param]]


@pytest.fixture
def paged(models):
    return models[1]


@pytest.fixture
def move(monkeypatch):
    """Put a model on a device; the CPU's operators refuse rows of nobody, so that the stand-in's batches are whole."""

    def move_model(model, place):
        if place == "cuda":
            return endless(ortolan.load(model.folder, device="cuda"))
        if place == "host":
            return model
        monkeypatch.setattr(cuda, "batch_sizes", lambda most: tuple(range(1, most + 1)))
        return on_fake_cuda(model, monkeypatch)

    return move_model


@pytest.fixture
def prompt(draw_tokens):
    return draw_tokens(PROMPT)


def endless(model):
    """Copy a model, without end-of-sequence tokens, which random weights may choose at any time."""
    copied = copy.copy(model)
    copied.manifest = dataclasses.replace(model.manifest, eos_token_ids=())
    copied.decoder = dataclasses.replace(model.decoder, manifest=copied.manifest)
    return copied


def read_alone(model, prompt, eviction=None):
    """Return what a session of the host gives, whose tokens all others must have."""
    tokens = list(model.session(eviction=eviction).generate(prompt, NEW, SAMPLING))
    assert len(tokens) == NEW
    assert len(set(tokens)) > NEW // 3
    return tokens


def submit_others(engine, draw_tokens, count, **options):
    """Let a batch have other requests, with prompts, lengths, seeds and log-probabilities of their own."""
    return [
        engine.submit(
            draw_tokens(20 + 13 * i, seed=100 + i),
            30 + 9 * i,
            Sampling(temperature=i % 3, seed=i),
            logprobs=2 if i % 2 else None,
            **options,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("place", PLACES)
def test_sessions_draw_alike(models, move, prompt, place):
    wanted = read_alone(models[0], prompt)
    for model in models:
        moved = move(model, place)
        for chunk_size in (None, 7, 64):
            session = moved.session(chunk_size=chunk_size)
            assert list(session.generate(prompt, NEW, SAMPLING)) == wanted


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("eviction", [None, SNAPKV], ids=["whole", "evicted"])
def test_engines_draw_as_a_session_does(models, move, prompt, draw_tokens, place, batch, eviction):
    wanted = read_alone(models[0], prompt, eviction)
    with Engine(move(models[1], place), batch, chunk_tokens=CHUNK) as engine:

        def submit_all(_):  # before the next step
            others = submit_others(engine, draw_tokens, batch - 1)
            return [*others, engine.submit(prompt, NEW, SAMPLING, eviction=eviction)]

        *others, stream = engine.worker.ask(submit_all)
        assert stream.result() == wanted
        assert all(other.result() for other in others)
        assert engine.stats().most_running == batch


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("eviction", [None, SNAPKV], ids=["whole", "evicted"])
def test_who_gives_its_pages_back_draws_the_same_tokens_again(models, move, prompt, draw_tokens, place, eviction):
    wanted = read_alone(models[0], prompt, eviction)
    model = move(models[1], place)
    with Engine(model, 4, tight_bytes(model, 4, 13), CHUNK, max_context=SHORT, overcommit=8.0) as engine:

        def submit_all(_):
            others = [engine.submit(draw_tokens(40, seed=seed), 90) for seed in range(3)]
            return [*others, engine.submit(prompt, NEW, SAMPLING, eviction=eviction)]  # the youngest, which gives way

        stream = engine.worker.ask(submit_all)[-1]
        assert stream.result() == wanted
        assert engine.stats().preemptions > 0


def tight_bytes(model, sequences, pages):
    """Return the bytes of some full-attention pages, and of all the rings that sequences need."""
    plan = model.plan_engine(sequences, None, CHUNK, SHORT)
    return sum((pages if kind.grows else kind.num_pages) * kind.page_bytes for kind in plan.kinds)


@pytest.mark.parametrize(("place", "other"), [*zip(PLACES[:2], PLACES[:2], strict=True), ("host", "device"),
    ("device", "host"), *(pytest.param(*pair, marks=pytest.mark.cuda) for pair in (("cuda", "cuda"), ("cuda", "host"),
    ("host", "cuda")))])  # fmt: skip
@pytest.mark.parametrize("taken", [0, 1, 13])
@pytest.mark.parametrize("eviction", [None, SNAPKV], ids=["whole", "evicted"])
def test_a_saved_session_goes_on_in_sessions_and_engines(
    models, move, prompt, draw_tokens, tmp_path, place, other, taken, eviction
):
    wanted = read_alone(models[0], prompt, eviction)
    for model in models:
        path = tmp_path / "saved"
        session = move(model, place).session(eviction=eviction)
        generation = session.generate(prompt, NEW, SAMPLING)
        assert list(itertools.islice(generation, taken)) == wanted[:taken]
        session.save(path)
        moved = move(model, other)
        assert list(moved.restore(path).resume()) == wanted[taken:]
        if model.manifest.paged:
            with Engine(moved, 3, chunk_tokens=CHUNK) as engine:
                others = submit_others(engine, draw_tokens, 2)
                assert engine.restore(path).result() == wanted[taken:]
                assert all(each.result() for each in others)
        assert list(generation) == wanted[taken:]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("steps", [1, PROMPT_STEPS, PROMPT_STEPS + 1, PROMPT_STEPS + 12])
def test_a_saved_request_goes_on_in_engines_and_sessions(paged, move, prompt, draw_tokens, tmp_path, place, steps):
    """Also one that was saved before all of its prompt was read."""
    wanted, path = read_alone(paged, prompt), tmp_path / "saved"
    taken, model = max(0, steps - PROMPT_STEPS + 1), move(paged, place)
    with Engine(model, 3, chunk_tokens=CHUNK) as engine:
        stream = save_midway(engine, lambda: engine.submit(prompt, NEW, SAMPLING), path, steps)
        others = submit_others(engine, draw_tokens, 2)
        assert engine.restore(path).result() == wanted[taken:]
        assert stream.result() == wanted
        assert all(other.result() for other in others)
    with Engine(model, 1, chunk_tokens=16) as engine:
        assert engine.restore(path).result() == wanted[taken:]
    assert list(model.restore(path).resume()) == wanted[taken:]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("steps", [PROMPT_STEPS, PROMPT_STEPS + 12])
def test_a_saved_request_that_was_evicted_goes_on(paged, move, prompt, tmp_path, place, steps):
    wanted, path = read_alone(paged, prompt, SNAPKV), tmp_path / "saved"
    taken, model = steps - PROMPT_STEPS + 1, move(paged, place)
    with Engine(model, 3, chunk_tokens=CHUNK) as engine:
        stream = save_midway(engine, lambda: engine.submit(prompt, NEW, SAMPLING, eviction=SNAPKV), path, steps)
        assert engine.restore(path).result() == wanted[taken:]
        assert stream.result() == wanted
    assert list(model.restore(path).resume()) == wanted[taken:]


@pytest.mark.parametrize("place", PLACES)
def test_restored_requests_give_way_where_they_can_be_read_again(paged, move, prompt, draw_tokens, tmp_path, place):
    """What was evicted before it was saved keeps its pages; all draw what they would have drawn alone."""
    wanted, model = [], move(paged, place)
    for name, eviction in (("whole", None), ("evicted", SNAPKV)):
        session = paged.session(eviction=eviction)
        wanted.append(list(itertools.islice(session.generate(prompt, NEW, SAMPLING), 3)))
        session.save(tmp_path / name)
        wanted[-1] = list(session.resume())
    with Engine(model, 5, tight_bytes(model, 5, 14), CHUNK, max_context=SHORT, overcommit=8.0) as engine:

        def start_all(_):
            others = [engine.submit(draw_tokens(40, seed=seed), 90) for seed in range(2)]
            return [*others, *(engine.restore(tmp_path / name) for name in ("evicted", "whole", "whole"))]

        streams = engine.worker.ask(start_all)
        assert [stream.result() for stream in streams[2:]] == [wanted[1], wanted[0], wanted[0]]
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("place", PLACES)
def test_a_session_goes_on_with_another_limit_as_one_that_had_it_from_the_start(paged, move, prompt, tmp_path, place):
    wanted, path, model = read_alone(paged, prompt), tmp_path / "saved", move(paged, place)
    session = model.session()
    assert list(session.generate(prompt, 10, SAMPLING)) == wanted[:10]
    session.save(path)
    assert list(model.restore(path).resume(15)) == wanted[10:25]
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        assert engine.restore(path, 30).result() == wanted[10:]
