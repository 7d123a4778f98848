"""Drafts of many requests are made together, within bounds, and change no text."""

import contextlib
import threading

import numpy as np
import pytest
from draft_heads import checkpoint_with_head
from families import shared_model
from saved_requests import save_midway

import ortolan
from ortolan import DraftModel, Engine, MtpHead, PromptLookup, Sampling
from ortolan.errors import ConfigError, OrtolanError, RequestCancelledError
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.together import Ask, Packing, run_together

SIZES = {"max_context": 400, "chunk_size": 40}
PAGES = {"paged": True, "page_size": 16}
CHUNK = 24  # tokens of an engine's step
SAMPLINGS = (None, Sampling(temperature=0.9, seed=3), Sampling(temperature=0.7, seed=5, repetition_penalty=1.2))


def load(family, **options):
    folder = shared_model(checkpoint_with_head(family, quiet=True), **SIZES, **options)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "gemma3"])
def model(request):
    """A model that can draft for itself; of one with a recurrent state and of one with rings, too."""
    return load(request.param, **PAGES)


@pytest.fixture(scope="module")
def headed():
    return load("llama", **PAGES)


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "gemma3"])
def contiguous(request):
    return load(request.param)


@pytest.fixture
def own_draft(model):
    """The model itself drafts: all of its tokens are right."""
    return DraftModel(model.folder, tokens=3)


@pytest.fixture
def steps(monkeypatch):
    """The sizes of all steps of drafters: of each, the tokens of its rows."""
    made, run = [], Packing.run

    def record(packing, asks):
        made.append([len(ask.row.tokens) for ask in asks])
        return run(packing, asks)

    monkeypatch.setattr(Packing, "run", record)
    return made


@contextlib.contextmanager
def together(engine):
    """Requests submitted in here wait for each other: the engine's next step finds all of them."""
    submitted = threading.Event()
    engine.worker.send(lambda core: submitted.wait())
    try:
        yield
    finally:
        submitted.set()


def texts(model, prompts, count=30):
    return [list(model.session().generate(p, count, SAMPLINGS[i % 3])) for i, p in enumerate(prompts)]


def test_drafts_of_requests_share_steps(model, own_draft, draw_tokens, steps):
    prompts = [draw_tokens(count, seed=count) for count in (20, 9, 33, 5)]
    expected = texts(model, prompts)
    with Engine(model, 4, chunk_tokens=100, max_context=200) as engine:
        with together(engine):
            streams = [engine.submit(p, 30, SAMPLINGS[i % 3], speculation=own_draft) for i, p in enumerate(prompts)]
        assert [stream.result() for stream in streams] == expected
        stats = engine.stats()
    greedy = streams[0].speculation
    assert greedy.accepted_tokens == greedy.drafted_tokens > 10
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens  # a penalty counts no drafted tokens
    assert max(map(len, steps)) == 4
    assert len(steps) < sum(map(len, steps)) / 2


def test_a_head_drafts_for_requests_together(headed, draw_tokens, steps):
    prompts = [draw_tokens(count, seed=count) for count in (20, 9, 33, 5)]
    expected = texts(headed, prompts)
    with Engine(headed, 4, chunk_tokens=100, max_context=200) as engine:
        with together(engine):
            streams = [engine.submit(p, 30, SAMPLINGS[i % 3], speculation=MtpHead()) for i, p in enumerate(prompts)]
        assert [stream.result() for stream in streams] == expected
        assert engine.stats().accepted_tokens > 10
    assert max(map(len, steps)) == 4
    assert [20 - 1, 33 - 1] in steps  # of prompts that the model has read in one step


def test_a_long_prompt_is_drafted_for_in_pieces(model, own_draft, draw_tokens, steps):
    long, short = draw_tokens(150, seed=1), draw_tokens(6, seed=2)
    expected = [list(model.session().generate(p, 40)) for p in (short, long)]
    with Engine(model, 2, chunk_tokens=CHUNK, max_context=200) as engine:
        streams = [engine.submit(p, 40, speculation=own_draft) for p in (short, long)]
        assert [stream.result() for stream in streams] == expected
    assert max(map(max, steps)) <= CHUNK
    assert streams[1].speculation.accepted_tokens == streams[1].speculation.drafted_tokens > 5


@pytest.mark.parametrize("kind", ["model", "head"])
def test_full_caches_of_drafts_cost_drafts_alone(headed, kind, draw_tokens):
    speculation = DraftModel(headed.folder, tokens=2) if kind == "model" else MtpHead(tokens=2)
    prompts = [draw_tokens(60, seed=seed) for seed in range(3)]
    expected = texts(headed, prompts, 40)
    manifest = headed.manifest if kind == "model" else headed.manifest.draft_head
    page = _page_bytes(manifest)
    with Engine(headed, 3, max_context=200, max_draft_bytes=9 * page) as engine:
        streams = [engine.submit(p, 40, SAMPLINGS[i], speculation=speculation) for i, p in enumerate(prompts)]
        assert [stream.result() for stream in streams] == expected
        stats = engine.stats()
        assert stats.drafts_without_room == sum(stream.speculation.without_room for stream in streams) > 0
        assert stats.drafted_tokens > 0
        last = engine.submit(prompts[0], 40, speculation=speculation)  # the others' pages are free
        assert last.result() == expected[0]
        assert last.speculation.without_room == 0
        assert last.speculation.drafted_tokens > 0


def _page_bytes(manifest):
    from ortolan.runtime.caches.plan import plan_pools

    return sum(kind.page_bytes for kind in plan_pools(manifest, 1).kinds if kind.grows)


def test_too_few_bytes_for_drafts_cost_drafts_alone(headed, draw_tokens, caplog):
    prompt = draw_tokens(30)
    expected = list(headed.session().generate(prompt, 20))
    with Engine(headed, 2, max_draft_bytes=1) as engine:
        stream = engine.submit(prompt, 20, speculation=MtpHead())
        assert stream.result() == expected
        assert stream.speculation.drafted_tokens == 0
    assert "request 0 goes on without drafts: max_draft_bytes is 1; drafts for 2 sequences need at least" in caplog.text
    with pytest.raises(ConfigError, match="max_draft_bytes is 0"):
        Engine(headed, 2, max_draft_bytes=0)


def test_memory_reports_name_drafts(headed, draw_tokens):
    session = headed.session()
    assert session.memory_report().draft_bytes == 0
    list(session.generate(draw_tokens(30), 10, speculation=MtpHead()))
    assert session.memory_report().draft_bytes > 0
    with Engine(headed, 2, max_context=200) as engine:
        assert engine.memory().draft_bytes == 0
        engine.submit(draw_tokens(30), 10, speculation=DraftModel(headed.folder)).result()
        assert engine.memory().draft_bytes >= engine.memory().pool_bytes / 2
        assert engine.memory().held_bytes == 0


def test_sessions_draft_with_any_kind_of_layer(contiguous, draw_tokens):
    speculation = DraftModel(contiguous.folder, tokens=2)
    prompts = [draw_tokens(count, seed=count) for count in (20, 100, 35)]
    expected = texts(contiguous, prompts, 20)
    for prompt, sampling, text in zip(prompts, SAMPLINGS, expected, strict=True):
        generation = contiguous.session().generate(prompt, 20, sampling, speculation=speculation)
        assert list(generation) == text
        assert generation.speculation.accepted_tokens > 5


def test_an_engine_drafts_with_a_folder_without_pages(headed, draw_tokens, steps):
    contiguous = load("llama")
    prompts = [draw_tokens(20, seed=seed) for seed in range(3)]
    expected = texts(headed, prompts, 20)
    with Engine(headed, 3) as engine:
        drafted = DraftModel(contiguous.folder, tokens=2)
        streams = [engine.submit(p, 20, SAMPLINGS[i], speculation=drafted) for i, p in enumerate(prompts)]
        assert [stream.result() for stream in streams] == expected
        assert engine.stats().accepted_tokens > 5
        assert engine.memory().draft_bytes == 0  # each has given its caches back
    assert {len(rows) for rows in steps} == {1}


def test_saved_requests_go_on_with_drafts(model, own_draft, draw_tokens, tmp_path):
    prompt = draw_tokens(50)
    expected = list(model.session().generate(prompt, 40))
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        steps = -(-len(prompt) // CHUNK) + 2
        stream = save_midway(
            engine, lambda: engine.submit(prompt, 40, speculation=own_draft), tmp_path / "a.session", steps
        )
        assert stream.result() == expected
        restored = engine.restore(tmp_path / "a.session", speculation=own_draft)
        rest = restored.result()
        assert 0 < len(rest) < 40
        assert rest == expected[-len(rest) :]
        assert restored.speculation.accepted_tokens == restored.speculation.drafted_tokens


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_texts_of_sessions(model, own_draft, draw_tokens, seed):
    random = np.random.default_rng(seed)
    has_head = model.manifest.draft_head is not None
    drafters = [None, own_draft, PromptLookup(shortest=1), MtpHead(tokens=2) if has_head else None, own_draft]
    jobs = []
    for index in range(9):
        prompt = draw_tokens(int(random.integers(2, 110)), seed=100 * seed + index)
        jobs.append((prompt, int(random.integers(1, 40)), SAMPLINGS[index % 3], drafters[random.integers(5)]))
    expected = [list(model.session().generate(p, n, g)) for p, n, g, _ in jobs]
    need = sum(kind.num_pages * kind.page_bytes for kind in model.plan_engine(2, max_context=180).kinds)
    limits = {"max_cache_bytes": need, "overcommit": 2.0, "max_draft_bytes": int(need * random.uniform(0.5, 1.0))}
    with Engine(model, 4, chunk_tokens=CHUNK, max_context=180, **limits) as engine:
        streams, cancelled = [], set()
        for prompt, count, sampling, drafter in jobs:
            streams.append(engine.submit(prompt, count, sampling, speculation=drafter))
            if random.random() < 0.3:  # one of those under way is taken a little, and perhaps given up
                other = int(random.integers(len(streams)))
                if other in cancelled:
                    continue
                next(streams[other], None)
                if random.random() < 0.5 and not streams[other].done:
                    streams[other].cancel()
                    cancelled.add(other)
        for index, stream in enumerate(streams):
            if index in cancelled:
                with pytest.raises(RequestCancelledError):
                    stream.result()
                assert list(stream.tokens) == expected[index][: len(stream.tokens)]
            else:
                assert stream.result() == expected[index]
        assert engine.memory().held_bytes == 0


def test_sessions_draft_right_after_rewinds(model, own_draft, draw_tokens):
    session, plain = model.session(), model.session()
    for turn, removed in ((60, 0), (20, 0), (31, 6), (5, 9)):
        for each in (session, plain):
            each.rewind(each.logical_length - removed)
        prompt = draw_tokens(turn, seed=turn)
        generation = session.generate(prompt, 25, speculation=own_draft)
        assert list(generation) == list(plain.generate(prompt, 25))
        assert generation.speculation.accepted_tokens == generation.speculation.drafted_tokens > 5


class Counted(list):
    """Tokens that count how many of them are looked at."""

    seen = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.seen += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        self.seen += len(self)
        return super().__iter__()


def test_a_draft_looks_at_new_tokens_alone(headed, draw_tokens):
    drafter = DraftModel(headed.folder).open(headed, 400)
    tokens = Counted(draw_tokens(300))
    drafter.propose(tokens, 3, Sampling(seed=1))
    tokens += draw_tokens(4, seed=2)
    tokens.seen = 0
    assert len(drafter.propose(tokens, 3, Sampling(seed=1))) == 3
    assert tokens.seen < 20


class Countdown:
    """A stepper whose rows choose their token less one; it breaks where several rows hold a 7."""

    depth = 0

    def __init__(self):
        self.batches = []

    def run(self, rows):
        self.batches.append([row.tokens[0] for row in rows])
        if 7 in self.batches[-1]:
            raise OrtolanError("a seven")
        chosen = [row.tokens[-1] - 1 for row in rows for _ in row.draws]
        return type("Result", (), {"tokens": lambda _: chosen})()


def count_down(packing, number):
    taken = yield Ask(packing, Row(tokens=[number], logical=0))
    while (number := taken.token()) > 0:
        taken = yield Ask(packing, Row(tokens=[0], logical=0), follows=taken)
    return f"from {taken.token() + 1}"


def test_works_share_rounds_until_each_has_ended():
    stepper = Countdown()
    packing = Packing(stepper)
    assert run_together([count_down(packing, number) for number in (2, 1, 3)]) == ["from 1"] * 3
    assert stepper.batches == [[2, 1, 3], [1, 2], [1]]


def test_works_of_several_steppers_are_run_side_by_side():
    first, second = Countdown(), Countdown()
    works = [count_down(Packing(stepper), 2) for stepper in (first, second)]
    assert run_together(works) == ["from 1"] * 2
    assert first.batches == second.batches == [[2], [1]]


def test_a_work_at_fault_ends_alone():
    stepper = Countdown()
    packing = Packing(stepper)
    ended = run_together([count_down(packing, number) for number in (2, 8, 3)])
    assert (ended[0], ended[2]) == ("from 1", "from 1")
    assert isinstance(ended[1], OrtolanError)
    assert stepper.batches == [[2, 8, 3], [1, 7, 2], [1], [7], [2], [1]]
