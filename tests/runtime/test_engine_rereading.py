"""Prompts that an engine reads twice: what it keeps is what a session keeps, and other requests go on meanwhile."""

import threading
import weakref

import numpy as np
import pytest
from families import shared_checkpoint, shared_model
from scheduler_driver import make_plan, make_sequence

import ortolan
from ortolan import Engine, Eviction
from ortolan.errors import CapacityError, ConfigError, NumericError
from ortolan.runtime.device.buffers import HostBuffers
from ortolan.runtime.engine.pool_caches import PoolCaches
from ortolan.runtime.engine.rereading import Rereading
from ortolan.runtime.engine.scheduler import Scheduler

KVZIP = Eviction(policy="kvzip", budget=40, window=8, sink=2, piece=10, lead=4)
STEP = 14  # tokens of a piece and its lead
CONTEXT, CHUNK = 512, 24


@pytest.fixture(params=["paged", "paged_mixed", "paged_sharing"])
def model(request):
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture
def spy(monkeypatch):
    """Call a function with core, sequence and the number of the piece, from 0 on, before each piece is read."""

    def watch(engine, visit):
        core, read, counts = engine.worker.ask(lambda core: core), PoolCaches.read_again, {}

        def read_again(self, sequence, stepper):
            visit(core, sequence, counts.setdefault(sequence, 0))
            counts[sequence] += 1
            return read(self, sequence, stepper)

        monkeypatch.setattr(PoolCaches, "read_again", read_again)

    return watch


def go_on(session, prompt, count):
    """Return the greedy tokens of a session behind what it has read and a prompt."""
    logits, tokens = session.prefill(prompt), []
    for _ in range(count):
        tokens.append(int(np.argmax(logits)))
        logits = session.step(tokens[-1])
    return tokens


def alone(model, prompt, count, eviction=KVZIP):
    """Return the greedy tokens of a new session."""
    return go_on(model.session(eviction=eviction), prompt, count)


def submit(engine, prompt, count, eviction=KVZIP, **options):
    return engine.submit(prompt, count, ignore_eos=True, eviction=eviction, **options)


def test_tokens_are_those_of_sessions(model, draw_tokens):
    """Prompts that end with a page and a piece, in the middle of both, and within the budget."""
    prompts = [draw_tokens(count, seed=count) for count in (160, 47, 41, 40, 131)]
    with Engine(model, 3, chunk_tokens=CHUNK) as engine:
        results = [stream.result() for stream in [submit(engine, prompt, 30) for prompt in prompts]]
        stats = engine.stats()
        assert engine.memory().held_bytes == 0
    assert results == [alone(model, prompt, 30) for prompt in prompts]
    assert stats.evictions == 4
    again = [len(prompt) for prompt in prompts if len(prompt) > KVZIP.budget]
    assert stats.reread_tokens == sum(n + KVZIP.lead * ((n - 1) // KVZIP.piece) for n in again)


def test_recurrent_states_are_put_back(draw_tokens):
    folder = shared_model(
        shared_checkpoint("qwen3_5", seed=5), max_context=CONTEXT, chunk_size=64, paged=True, page_size=16
    )
    model = ortolan.load(folder, device="cpu", num_threads=1)
    prompts = [draw_tokens(count, seed=count) for count in (100, 47)]
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        results = [stream.result() for stream in [submit(engine, prompt, 20) for prompt in prompts]]
        assert engine.stats().evictions == 2
    assert results == [alone(model, prompt, 20) for prompt in prompts]


def test_sequences_that_read_again_give_way_and_come_back(model, draw_tokens):
    plan = model.plan_engine(6, None, 32, CONTEXT)
    budget = sum((33 if kind.grows else 6 * kind.pages_for(CONTEXT)) * kind.page_bytes for kind in plan.kinds)
    prompts, evictions = [draw_tokens(80, seed=seed) for seed in range(6)], [KVZIP, None] * 3
    with Engine(model, 6, budget, 32, overcommit=5.0) as engine:
        pairs = zip(prompts, evictions, strict=True)
        streams = engine.worker.ask(lambda _: [submit(engine, prompt, 120, each) for prompt, each in pairs])
        results = [stream.result() for stream in streams]
        assert engine.stats().preemptions > 0
    assert results == [alone(model, *each) for each in zip(prompts, [120] * 6, evictions, strict=True)]


@pytest.mark.parametrize(("count", "reread"), [(30, 178), (5, 0), (12, 156)])
def test_a_saved_text_is_read_again_only_for_a_piece_of_new_tokens(model, draw_tokens, tmp_path, count, reread):
    """As in a session: what follows an evicted text brings a second reading of all of it, or none."""
    session, path, question = model.session(eviction=KVZIP), tmp_path / "text", draw_tokens(count, seed=2)
    session.prefill(draw_tokens(100))
    session.save(path)
    expected = go_on(session, question, 15)
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        assert submit(engine, question, 15, session=path).result() == expected
        assert engine.stats().reread_tokens == reread


def test_the_first_token_comes_before_the_second_reading(model, draw_tokens, spy):
    seen = []
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        spy(engine, lambda core, sequence, piece: seen.append((piece, len(sequence.tokens))))
        submit(engine, draw_tokens(100), 5).result()
    assert seen == [(piece, 101) for piece in range(10)]


def test_block_tables_live_as_long_as_the_scores_that_are_bound_to_them(model, draw_tokens, spy, monkeypatch):
    """Arrays are bound by their address, as on a GPU: a binding does not keep them."""
    tables, bound, alive = {kind.block_table for kind in model.manifest.cache_kinds}, {}, []

    def bind_input(buffers, binding, name, array):
        bound[binding, name] = weakref.ref(array)
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def look(core, sequence, piece):
        if piece:
            of_scores = sequence.rereading.scores._io
            alive.extend(bound[key]() is not None for key in bound if key[0] is of_scores and key[1] in tables)

    monkeypatch.setattr(HostBuffers, "bind_input", bind_input)
    with Engine(model, 1, chunk_tokens=CHUNK) as engine:
        spy(engine, look)
        submit(engine, draw_tokens(100), 5).result()
    assert alive
    assert all(alive)


def test_a_request_of_one_token_reads_nothing_again(model, draw_tokens):
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        assert submit(engine, draw_tokens(100), 1).result() == alone(model, draw_tokens(100), 1)
        assert engine.stats().reread_tokens == 0


def test_a_cancel_between_pieces_frees_the_pages(model, draw_tokens, spy):
    streams, submitted = [], threading.Event()

    def cancel(core, sequence, piece):
        if piece == 3:
            assert submitted.wait(60)
            streams[0].cancel()

    other = draw_tokens(30, seed=1)
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        spy(engine, cancel)  # before there is anything to read
        streams += [submit(engine, draw_tokens(100), 9), submit(engine, other, 50)]
        submitted.set()
        with pytest.raises(ortolan.OrtolanError):
            streams[0].result()
        assert streams[1].result() == alone(model, other, 50)
        assert engine.memory().held_bytes == 0


def test_what_goes_wrong_ends_its_own_request(model, draw_tokens, spy):
    def fail(core, sequence, piece):
        if piece == 2 and sequence.prompt_length == 100:
            raise NumericError("the logits of a second reading contain NaN")

    other = draw_tokens(60, seed=1)
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        spy(engine, fail)
        streams = [submit(engine, draw_tokens(100), 9), submit(engine, other, 20)]
        with pytest.raises(NumericError, match="second reading"):
            streams[0].result()
        assert streams[1].result() == alone(model, other, 20)
        assert engine.stats().failed == 1
        assert engine.memory().held_bytes == 0


def test_a_request_is_not_saved_while_it_reads_again(model, draw_tokens, spy, tmp_path):
    def save(core, sequence, piece):
        with pytest.raises(ConfigError, match="wait for its first token"):
            core.save(core._requests[sequence], tmp_path / "saved")

    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        spy(engine, save)
        assert len(submit(engine, draw_tokens(60), 9).result()) == 9
    assert not list(tmp_path.iterdir())


def test_a_prompt_needs_room_behind_it(model, draw_tokens):
    with Engine(model, 2, chunk_tokens=CHUNK) as engine:
        with pytest.raises(CapacityError, match=rf"at {STEP} positions or more, .* read at most {CONTEXT - STEP},"):
            submit(engine, draw_tokens(CONTEXT - STEP + 1), 5)
        assert submit(engine, draw_tokens(CONTEXT - STEP), 5).result() == alone(model, draw_tokens(CONTEXT - STEP), 5)


def test_pages_for_the_second_reading_are_promised(paged_model, draw_tokens):
    (kind,) = paged_model.plan_engine(1, None, CHUNK, CONTEXT).kinds
    pages = -(-(96 + STEP) // kind.page_size) - 1
    with Engine(paged_model, 1, pages * kind.page_bytes, CHUNK) as engine:
        with pytest.raises(CapacityError, match="may need 7 pages of 'full'"):
            submit(engine, draw_tokens(96), 1)
        assert len(submit(engine, draw_tokens(96), 1, None).result()) == 1


def test_batch_invariance_needs_whole_pieces(paged_model, draw_tokens):
    model = ortolan.load(paged_model.folder, device="cpu", num_threads=1, batch_invariant=True)
    with Engine(model, 2, chunk_tokens=STEP - 1) as engine, pytest.raises(ConfigError, match="raise chunk_tokens"):
        submit(engine, draw_tokens(100), 5)
    with Engine(model, 2, chunk_tokens=STEP) as engine:
        assert len(submit(engine, draw_tokens(100), 5).result()) == 5


def test_others_generate_between_pieces():
    """Each step feeds their token, and one piece; the sequence itself waits."""
    scheduler = Scheduler(make_plan(60, chunk_tokens=STEP))
    other, reads = make_sequence(0, 5, new=40), make_sequence(1, 48, new=3, eviction=KVZIP)
    reads.reread_room = STEP
    scheduler.add(other)
    scheduler.add(reads)
    pieces = []
    while not pieces or reads.rereading:
        chunks = {chunk.sequence: chunk for chunk in scheduler.next_step()}
        scheduler.advance(tuple(chunks.values()))
        assert chunks[other].samples
        other.tokens.append(7)
        chunk = chunks.get(reads)
        if chunk and chunk.rereads:
            pieces.append((reads.rereading.next.lead, reads.rereading.next.end))
            assert (chunk.begin, chunk.end, chunk.samples, chunk.evicts) == (48, 48, False, len(pieces) == 5)
            assert len(reads.pages["full"]) * scheduler.plan.page_size >= 48 + STEP
            reads.rereading.advance()
            if chunk.evicts:
                reads.rereading = None
        elif chunk and chunk.evicts:
            reads.rereading = Rereading(48, KVZIP.second_reading, STEP)
            reads.tokens.append(7)
    assert pieces == [(0, 10), (6, 20), (16, 30), (26, 40), (36, 48)]
