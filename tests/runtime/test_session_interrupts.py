"""`Session.interrupt`, called by another thread: within a chunk on the host, between chunks elsewhere."""

import threading

import numpy as np
import pytest
from parity import relative_difference
from sessions import changed_steps
from tolerances import SAME_LOGITS

import ortolan
from ortolan import SessionInterruptedError, SnapKv
from ortolan.retrieval import shipped_model

CHUNK = 16
EVERYTHING = 10**6  # rewind_tokens past any ring


def interrupt_at(session, number):
    """Let another thread interrupt behind step `number`, counted from 1."""

    def interrupt(count, rows, result):
        if count == number:
            thread = threading.Thread(target=session.interrupt)
            thread.start()
            thread.join()
        return result

    return changed_steps(session, interrupt)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("snapkv", [None, SnapKv(budget=40, window=8, sink=2)], ids=["whole", "evicts"])
def test_whole_chunks_are_read_and_the_rest_can_follow(model, open_session, draw_tokens, number, snapkv):
    session, prompt = open_session(model, chunk_size=CHUNK, snapkv=snapkv), draw_tokens(100)
    with interrupt_at(session, number), pytest.raises(SessionInterruptedError, match="logical_length"):
        session.prefill(prompt)
    assert session.logical_length == number * CHUNK
    fresh = model.session(chunk_size=CHUNK, snapkv=snapkv)
    logits = session.prefill(prompt[session.logical_length :])
    assert relative_difference(logits, fresh.prefill(prompt)) <= SAME_LOGITS
    assert session.stats.evictions == fresh.stats.evictions


@pytest.mark.parametrize("number", [1, 3])
def test_what_was_read_is_saved(model, open_session, draw_tokens, number, tmp_path):
    session, prompt = open_session(model, chunk_size=CHUNK), draw_tokens(100)
    with interrupt_at(session, number), pytest.raises(SessionInterruptedError):
        session.prefill(prompt)
    session.save(tmp_path / "session", EVERYTHING)
    restored = model.restore(tmp_path / "session")
    assert restored.logical_length == number * CHUNK
    fresh = model.session(chunk_size=CHUNK)
    assert relative_difference(restored.prefill(prompt[number * CHUNK :]), fresh.prefill(prompt)) <= SAME_LOGITS


def test_a_generation_is_resumed(endless_full, open_session, draw_tokens):
    expected = list(open_session(endless_full, chunk_size=CHUNK).generate(draw_tokens(20), 12))
    session = open_session(endless_full, chunk_size=CHUNK)
    answer = session.generate(draw_tokens(20), 12)
    taken = [next(answer) for _ in range(3)]
    session.interrupt()
    with pytest.raises(SessionInterruptedError):
        taken.extend(answer)
    assert taken + list(session.resume()) == expected


def test_an_interrupt_before_a_call_ends_that_call_alone(endless_full, open_session, draw_tokens):
    session = open_session(endless_full, chunk_size=CHUNK)
    session.interrupt()
    with pytest.raises(SessionInterruptedError):
        session.generate(draw_tokens(20), 5)
    assert session.logical_length == 0
    assert len(list(session.generate(draw_tokens(20), 5))) == 5


def test_an_eviction_is_not_cut_short(full_model, open_session, draw_tokens):
    snapkv = SnapKv(budget=40, window=8, sink=2)
    session, fresh = (open_session(full_model, chunk_size=CHUNK, snapkv=snapkv) for _ in range(2))
    with interrupt_at(session, 7):  # the last chunk
        session.prefill(draw_tokens(100))
    fresh.prefill(draw_tokens(100))
    assert session.stats.evictions == 1
    for layer in range(4):
        np.testing.assert_array_equal(session.kept_positions(layer), fresh.kept_positions(layer))
    with pytest.raises(SessionInterruptedError):
        session.step(5)
    assert relative_difference(session.step(5), fresh.step(5)) <= SAME_LOGITS


@pytest.mark.slow
def test_a_chunk_ends_before_it_is_read(tmp_path, draw_tokens):
    """One chunk of thousands of tokens takes seconds; without an end within it, it would be read as a whole."""
    folder = ortolan.export(shipped_model(), tmp_path / "model", max_context=8192, chunk_size=8192)
    session = ortolan.load(folder, device="cpu", num_threads=1).session()
    prompt = draw_tokens(8000)
    session.prefill(prompt[:40])
    timer = threading.Timer(0.2, session.interrupt)
    timer.start()
    with pytest.raises(SessionInterruptedError):
        session.prefill(prompt[40:])
    timer.join()
    assert session.logical_length == 40
    fresh = ortolan.load(folder, device="cpu", num_threads=1).session()
    fresh.prefill(prompt[:40])
    np.testing.assert_array_equal(session.prefill(prompt[40:100]), fresh.prefill(prompt[40:100]))
