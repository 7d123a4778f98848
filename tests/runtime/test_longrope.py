"""Models whose RoPE frequencies depend on the sequence's length."""

import numpy as np
import pytest
import torch
from fake_cuda import on_fake_cuda
from families import FAMILIES, tiny_checkpoint
from parity import oracle_logits, relative_difference
from sessions import DEVICES
from tolerances import LOGITS_RELATIVE, OTHER_STEPS_LOGPROBS, SAME_LOGITS

import ortolan
from ortolan import SnapKv
from ortolan.errors import CapacityError
from ortolan.runtime.steps.row import Row

LIMIT = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint that changes its frequencies past 64 tokens, without windows, and its export."""
    root = tmp_path_factory.mktemp("longrope")
    rope = FAMILIES["phi3"]["rope_parameters"] | {"original_max_position_embeddings": LIMIT}
    checkpoint = tiny_checkpoint(
        "phi3",
        root / "hf",
        sliding_window=None,
        rope_parameters=rope,
        original_max_position_embeddings=LIMIT,
    )
    return checkpoint, ortolan.export(checkpoint, root / "model", max_context=256, chunk_size=16)


@pytest.fixture(scope="module")
def model(folders):
    loaded = ortolan.load(folders[1], device="cpu", num_threads=1)
    assert loaded.manifest.rope_limits == (LIMIT, 256)
    return loaded


@pytest.mark.parametrize("first", [10, 63, 64])
def test_a_sequence_that_grows_past_the_limit_is_read_again(model, folders, draw_tokens, first):
    tokens = draw_tokens(70)
    session = model.session()
    session.prefill(tokens[:first])
    for token in tokens[first:]:
        logits = session.step(token)
    assert session.logical_length == 70
    assert relative_difference(logits, model.session().prefill(tokens)) <= SAME_LOGITS
    assert relative_difference(logits, oracle_logits(folders[0], tokens)[-1]) <= LOGITS_RELATIVE


def test_the_limit_matters(model, folders, draw_tokens):
    short = model.session().prefill(draw_tokens(LIMIT))
    assert relative_difference(short, oracle_logits(folders[0], draw_tokens(LIMIT))[-1]) <= LOGITS_RELATIVE
    session = model.session()
    session.prefill(draw_tokens(LIMIT + 1))
    session.rewind(LIMIT - 1)
    stale = Row(tokens=draw_tokens(LIMIT)[-1:], logical=LIMIT - 1, variant=1, captures=session.state.captures)
    logits = session.feeder.stepper.run([stale]).logits()[0]  # with the frequencies of the longer sequence
    assert relative_difference(logits, short) > 100 * LOGITS_RELATIVE


def test_going_back_below_the_limit_reads_again_too(model, draw_tokens):
    session = model.session()
    session.prefill(draw_tokens(80))
    session.rewind(40)
    expected = model.session().prefill([*draw_tokens(40), 9])
    assert relative_difference(session.step(9), expected) <= SAME_LOGITS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("read", [0, 10])
def test_a_text_is_scored_past_the_limit(model, folders, draw_tokens, monkeypatch, read, device):
    """The chunk that passes it is scored with the frequencies of the longer sequence, however that is read again."""
    tokens = draw_tokens(70)
    session = (on_fake_cuda(model, monkeypatch) if device == "device" else model).session()
    if read:
        session.prefill(tokens[:read])
    scored = session.score(tokens[read:])
    last = read + (LIMIT - read) // 16 * 16  # where the chunk begins that passes the limit
    logits = np.concatenate(
        [oracle_logits(folders[0], tokens[:LIMIT])[:last], oracle_logits(folders[0], tokens)[last:]]
    )
    rows = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()[read:-1]
    expected = rows[np.arange(len(rows)), tokens[read + 1 :]]
    assert [each.token for each in scored] == tokens[read + 1 :]
    assert [each.logprob for each in scored] == pytest.approx(expected.tolist(), abs=OTHER_STEPS_LOGPROBS)
    assert session.state.history == tokens


def test_past_the_limit_after_an_eviction_is_refused(model, draw_tokens):
    session = model.session(snapkv=SnapKv(budget=32, window=8, sink=2))
    session.prefill(draw_tokens(60))
    for token in draw_tokens(4, seed=1):
        session.step(token)
    with pytest.raises(CapacityError, match="64 tokens"):
        session.step(5)
    assert session.logical_length == 64


def test_a_long_first_prompt_can_be_evicted(model, draw_tokens):
    session = model.session(snapkv=SnapKv(budget=32, window=8, sink=2))
    expected = model.session().prefill(draw_tokens(100))
    assert relative_difference(session.prefill(draw_tokens(100)), expected) <= SAME_LOGITS
    assert session.physical_length(0) == 32
    session.step(5)
