"""A second reading leaves the sequence as it was, also where it fails, and has room wherever a prompt ends."""

import dataclasses

import numpy as np
import pytest
from fake_cuda import make_session
from families import HYBRIDS, shared_checkpoint, shared_model
from parity import relative_difference
from sessions import failing_step, numberless_step
from tolerances import LOGITS_RELATIVE, SAME_LOGITS

import ortolan
from ortolan import Eviction, PromptLookup, Sampling, runtime
from ortolan.errors import CapacityError, ConfigError, NumericError, OrtolanError, SessionInterruptedError
from ortolan.policies.eviction import SecondReading
from ortolan.runtime.eviction.second_reader import plan_pieces

KVZIP = Eviction(policy="kvzip", budget=40, window=8, sink=2, piece=12, lead=4)
CHUNK, PROMPT = 16, 100
CHUNKS = 7  # of the prompt; the steps after them are the second reading's


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request):
    folder = shared_model(shared_checkpoint(request.param, seed=5), max_context=512, chunk_size=32)
    return ortolan.load(folder, device="cpu", num_threads=1)


@pytest.mark.parametrize("room", [1, 2, 5, 16, 100])
@pytest.mark.parametrize("lead", [0, 1, 8])
@pytest.mark.parametrize("count", [1, 12, 13, 100])
def test_pieces_cover_all_tokens_once_within_the_room(count, lead, room):
    pieces = list(plan_pieces(count, SecondReading(piece_tokens=12, lead_tokens=lead), room))
    assert [position for piece in pieces for position in range(piece.begin, piece.end)] == list(range(count))
    for piece in pieces:
        assert 0 <= piece.lead <= piece.begin
        assert piece.begin - piece.lead <= lead
        assert piece.end - piece.lead <= room
        assert piece.end - piece.begin <= 12


@pytest.mark.parametrize("count", [PROMPT, 96, 108])  # the last chunk: a short one, a whole one, as long as a piece
def test_logits_are_those_before_the_eviction(model, open_session, draw_tokens, count):
    session, plain = open_session(model, snapkv=KVZIP), open_session(model)
    np.testing.assert_array_equal(session.prefill(draw_tokens(count)), plain.prefill(draw_tokens(count)))
    assert session.logical_length == count
    assert session.state.history == draw_tokens(count)


def test_what_is_read_again_is_counted_apart(model, open_session, draw_tokens):
    session = open_session(model, snapkv=KVZIP)
    session.prefill(draw_tokens(PROMPT))
    pieces = -(-PROMPT // KVZIP.piece)
    assert session.stats.reread_tokens == PROMPT + KVZIP.lead * (pieces - 1)
    assert (session.stats.prefill_tokens, session.stats.decode_tokens, session.stats.evictions) == (PROMPT, 0, 1)


def test_a_text_within_the_budget_is_read_once(model, open_session, draw_tokens):
    session = open_session(model, snapkv=KVZIP)
    session.prefill(draw_tokens(40))
    assert (session.stats.evictions, session.stats.reread_tokens) == (0, 0)
    session.prefill([5])
    assert (session.stats.evictions, session.stats.reread_tokens > 0) == (1, True)


@pytest.mark.parametrize(("turns", "evictions"), [([11], 1), ([12], 2), ([6, 5], 1), ([6, 6], 2), ([30, 11], 2)])
def test_later_turns_evict_once_a_piece_is_new(model, open_session, draw_tokens, turns, evictions):
    session = open_session(model, snapkv=KVZIP)
    for count in (PROMPT, *turns):
        session.prefill(draw_tokens(count))
    assert session.stats.evictions == evictions


def test_drawn_tokens_and_their_logprobs_are_those_before_the_eviction(endless, open_session, draw_tokens):
    """The second reading takes no random numbers, and its logits take the place of nothing."""
    drawn = []
    for eviction in (KVZIP, None):
        session = open_session(endless, snapkv=eviction)
        stream = session.generate(
            draw_tokens(96), 4, sampling=Sampling(temperature=1.0, seed=7, repetition_penalty=1.3), logprobs=3
        )
        drawn.append((next(stream), stream.logprobs[0]))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("back", [PROMPT, PROMPT + 3])
def test_a_rewind_behind_the_eviction_serves_another_question(model, open_session, draw_tokens, back):
    session, fresh = (open_session(model, snapkv=KVZIP) for _ in range(2))
    for each in (session, fresh):
        each.prefill(draw_tokens(PROMPT))
        each.prefill(draw_tokens(5, seed=1))
    session.step(9)
    session.rewind(back)
    fresh.rewind(back)
    assert relative_difference(*(each.prefill([7, 8]) for each in (session, fresh))) <= SAME_LOGITS
    assert session.stats.evictions == 1
    with pytest.raises(CapacityError, match="were evicted"):
        session.rewind(PROMPT - 1)


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64])
@pytest.mark.parametrize("piece", [1, 5, 600])
def test_pieces_of_any_size_fit_any_chunk(model, draw_tokens, piece, chunk_size):
    eviction = dataclasses.replace(KVZIP, piece=piece, lead=2)
    session, plain = model.session(chunk_size=chunk_size, snapkv=eviction), model.session(chunk_size=chunk_size)
    np.testing.assert_array_equal(session.prefill(draw_tokens(60)), plain.prefill(draw_tokens(60)))
    assert session.stats.evictions == 1
    assert np.isfinite(session.step(5)).all()


@pytest.mark.parametrize("context", [41, 60, 100, 512])
@pytest.mark.parametrize("policy_piece", [12, 600])
def test_a_prompt_may_fill_the_whole_context(model, open_session, draw_tokens, context, policy_piece):
    """Caches have room behind it for the second reading, rings as well."""
    eviction = dataclasses.replace(KVZIP, piece=policy_piece)
    session, plain = (open_session(model, max_context=context, snapkv=each) for each in (eviction, None))
    tokens = draw_tokens(context)
    np.testing.assert_array_equal(session.prefill(tokens[:-1]), plain.prefill(tokens[:-1]))
    assert session.stats.evictions == (context > 41)
    session.step(tokens[-1])
    with pytest.raises(CapacityError, match="max_context"):
        session.step(5)


def test_the_plan_counts_the_room_of_a_piece(model):
    for chunk, room in ((16, 16), (64, 16), (8, 8)):
        with_room, without = (model.plan(100, chunk, snapkv=each) for each in (KVZIP, None))
        assert (with_room.spare, without.spare) == (room, 0)
        for layer, plain in zip(with_room.layers, without.layers, strict=True):
            assert layer.full_length_bytes == plain.full_length_bytes
            assert layer.capacity == 100 + room if layer.kind == "full" else layer.capacity >= plain.capacity


@pytest.mark.parametrize("error", [KeyboardInterrupt, OrtolanError("no"), SessionInterruptedError("stop")])
@pytest.mark.parametrize("number", [CHUNKS + 1, CHUNKS + 4])
def test_a_second_reading_that_fails_evicts_nothing(model, open_session, draw_tokens, number, error):
    session, plain, fresh = (
        open_session(model, snapkv=KVZIP),
        open_session(model),
        open_session(model, snapkv=KVZIP),
    )
    kind = error if isinstance(error, type) else type(error)
    with failing_step(session, number, error), pytest.raises(kind):
        session.prefill(draw_tokens(PROMPT))
    assert (session.logical_length, session.stats.evictions) == (PROMPT, 0)
    assert session.kept_positions(1) is None
    plain.prefill(draw_tokens(PROMPT))
    assert relative_difference(session.step(5), plain.step(5)) <= SAME_LOGITS
    session.rewind(PROMPT)
    fresh.prefill(draw_tokens(PROMPT))
    fresh.rewind(0)
    for each in (session, fresh):
        each.prefill([6] if each is session else [*draw_tokens(PROMPT), 6])
    for layer in range(len(model.manifest.layers)):
        np.testing.assert_array_equal(session.kept_positions(layer), fresh.kept_positions(layer))
    assert relative_difference(session.step(5), fresh.step(5)) <= LOGITS_RELATIVE


def test_nan_in_a_second_reading_is_an_error_and_evicts_nothing(model, draw_tokens):
    session = model.session(snapkv=KVZIP)
    with numberless_step(session, CHUNKS + 2), pytest.raises(NumericError, match="second reading contain NaN"):
        session.prefill(draw_tokens(PROMPT))
    assert (session.logical_length, session.stats.evictions) == (PROMPT, 0)
    assert np.isfinite(session.prefill([5])).all()
    assert session.stats.evictions == 1


def test_an_interrupt_ends_a_second_reading(model, draw_tokens):
    session, run = model.session(snapkv=KVZIP), []
    step = session.feeder.stepper.run

    def ask_once(rows):
        run.append(rows)
        if len(run) == CHUNKS + 2:
            session.interrupt()
        return step(rows)

    session.feeder.stepper.run = ask_once
    with pytest.raises(SessionInterruptedError):
        session.prefill(draw_tokens(PROMPT))
    assert (session.logical_length, session.stats.evictions) == (PROMPT, 0)
    session.prefill([5])
    assert session.stats.evictions == 1


def test_without_memory_for_its_queries_nothing_changes(model, draw_tokens, monkeypatch):
    session = model.session(snapkv=KVZIP)
    with monkeypatch.context() as patch:

        def refuse(rows, sequences=1):
            raise CapacityError("no memory")

        patch.setattr(session.feeder.caches.store, "make_captures", refuse)
        with pytest.raises(CapacityError, match="no memory"):
            session.prefill(draw_tokens(PROMPT))
    assert (session.logical_length, session.stats.evictions) == (PROMPT, 0)
    session.prefill([5])
    assert session.stats.evictions == 1


@pytest.mark.parametrize("number", [None, 2])
def test_recurrent_states_are_what_they_were(hybrid, draw_tokens, number):
    """A piece moves them for good, and they are put back, also where it ends early."""
    session, plain = hybrid.session(eviction=dataclasses.replace(KVZIP, piece=20)), hybrid.session()
    plain.prefill(draw_tokens(PROMPT))
    if number is None:
        session.prefill(draw_tokens(PROMPT))
    else:
        chunks = -(-PROMPT // 32)
        with failing_step(session, chunks + number, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            session.prefill(draw_tokens(PROMPT))
    assert session.stats.evictions == (number is None)
    assert session.state.lengths.states_from == plain.state.lengths.states_from
    for index, tensors in plain.feeder.caches.store.tensors.items():
        if plain.plan.layers[index].kind == "gated_delta":
            for role, array in tensors.items():
                np.testing.assert_array_equal(session.feeder.caches.store.tensors[index][role], array)


def test_saved_and_forked_sessions_go_on(model, open_session, draw_tokens, tmp_path):
    session = open_session(model, snapkv=KVZIP)
    session.prefill(draw_tokens(PROMPT))
    session.save(tmp_path / "saved")
    others = [session.fork(), model.restore(tmp_path / "saved")]
    for tokens in ([7, 8, 9], draw_tokens(20, seed=2)):  # without an eviction, and with one
        expected = session.prefill(tokens)
        for other in others:
            assert relative_difference(other.prefill(tokens), expected) <= SAME_LOGITS
            for layer in range(len(model.manifest.layers)):
                np.testing.assert_array_equal(other.kept_positions(layer), session.kept_positions(layer))
    assert session.stats.evictions == 2


def test_a_full_session_that_was_saved_is_evicted_when_it_is_restored(model, draw_tokens, tmp_path):
    """A file of full caches, planned without room for a second reading."""
    tokens = draw_tokens(100)
    plain, fresh = model.session(100), model.session(100, snapkv=KVZIP)
    plain.prefill(tokens[:-1])
    plain.save(tmp_path / "saved")
    restored = model.restore(tmp_path / "saved", snapkv=KVZIP)
    restored.prefill(tokens[-1:])
    fresh.prefill(tokens)
    for layer in range(len(model.manifest.layers)):
        np.testing.assert_array_equal(restored.kept_positions(layer), fresh.kept_positions(layer))


def test_drafts_and_plain_steps_give_the_same_tokens(endless, open_session, draw_tokens):
    prompt = draw_tokens(25) * 4
    plain, drafting = (open_session(endless, snapkv=KVZIP) for _ in range(2))
    expected = list(plain.generate(prompt, 30))
    assert list(drafting.generate(prompt, 30, speculation=PromptLookup(tokens=4))) == expected


def test_a_prompt_near_the_end_of_rope_tables_is_refused_before_it_is_read(full_model, draw_tokens, monkeypatch):
    """Folders without frequencies, as those of converted models, may have tables that end at max_context."""
    monkeypatch.setattr(full_model, "manifest", dataclasses.replace(full_model.manifest, ropes=None))
    model, most = full_model, 512 - 16
    session = model.session(snapkv=KVZIP)
    monkeypatch.setattr(session.feeder, "manifest", model.manifest)
    with pytest.raises(CapacityError, match=rf"at 16 positions or more, and after 500 .* read at most {most},"):
        session.prefill(draw_tokens(500))
    assert session.logical_length == 0
    session.prefill(draw_tokens(most))
    assert session.stats.evictions == 1


def test_what_cannot_be_is_refused(full_model, full_folder):
    with pytest.raises(ConfigError, match=r"'kvzip' does not allow it.*snapkv"):
        dataclasses.replace(KVZIP, during_prefill=True)
    with pytest.raises(ConfigError, match="does not have option 'kernel'"):
        Eviction(policy="kvzip", kernel=5)
    with pytest.raises(ConfigError, match=r"open the model with ortolan\.load"):
        runtime.load(full_folder, device="cpu", num_threads=1).session(snapkv=KVZIP)
    blind = dataclasses.replace(
        full_model.manifest, layers=tuple(dataclasses.replace(x, evictable=False) for x in full_model.manifest.layers)
    )
    with pytest.raises(ConfigError, match="snapkv_window above 0"):
        KVZIP.check(blind)


def test_a_device_keeps_what_the_host_keeps(model, monkeypatch, draw_tokens):
    """Over two evictions, after the first of which the heads hold different numbers of positions."""
    host, device = model.session(snapkv=KVZIP), make_session(model, monkeypatch, snapkv=KVZIP)
    for count in (PROMPT, 40):
        for each in (host, device):
            each.prefill(draw_tokens(count))
        for layer in range(len(model.manifest.layers)):
            np.testing.assert_array_equal(host.kept_positions(layer), device.kept_positions(layer))
    assert host.stats.evictions == device.stats.evictions == 2
