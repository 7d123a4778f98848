"""What an engine takes from files and writes to them: next turns, generations to go on with, and what it refuses."""

import hashlib
import json
import struct

import numpy as np
import pytest
from fake_cuda import on_fake_cuda
from saved_requests import save_midway
from tolerances import LOGPROBS

from ortolan import Engine, Sampling, SnapKv
from ortolan.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    ContractMismatchError,
    EngineClosedError,
    SessionFileError,
)
from ortolan.runtime.engine import beginnings
from ortolan.runtime.saved.file import CHECKSUM_BYTES
from ortolan.runtime.saved.reader import SavedSequence
from ortolan.runtime.steps import cuda

SNAPKV = SnapKv(budget=40, window=8, sink=2)
SAMPLING = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=5)
PLACES = ("host", "device")


@pytest.fixture(params=["paged", "paged_mixed", "paged_sharing"])
def model(request):
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture(params=PLACES)
def placed(request, endless, monkeypatch):
    """The model, on the host and on the stand-in for a CUDA device."""
    if request.param == "host":
        return endless
    monkeypatch.setattr(cuda, "batch_sizes", lambda most: tuple(range(1, most + 1)))
    return on_fake_cuda(endless, monkeypatch)


@pytest.fixture
def opened(monkeypatch):
    """All files that engines open, and whether they are closed."""
    files = {}

    class Noted(SavedSequence):
        def __init__(self, path):
            super().__init__(path)
            files[self] = False

        def close(self):
            files[self] = True
            super().close()

    monkeypatch.setattr(beginnings, "SavedSequence", Noted)
    return files


def save_turn(model, path, tokens, *, eviction=None, new=12):
    """Save a session that was left after five of its tokens, the last of which waits to be fed."""
    session = model.session(eviction=eviction)
    generation = session.generate(tokens, new, SAMPLING)
    for _ in range(5):
        next(generation)
    session.save(path)
    return session


def assert_nothing_held(engine, opened):
    assert all(opened.values())
    assert opened
    memory = engine.memory()
    assert memory.held_bytes == 0
    assert memory.kept_bytes + memory.free_bytes == memory.pool_bytes


@pytest.mark.parametrize("logprobs", [0, 3])
def test_log_probabilities_are_those_of_a_session(placed, draw_tokens, logprobs):
    prompts = [draw_tokens(count, seed=count) for count in (50, 31, 17)]
    with Engine(placed, 3, chunk_tokens=24) as engine:
        streams = [
            engine.submit(prompt, 20, SAMPLING, logprobs=None if i == 1 else logprobs)
            for i, prompt in enumerate(prompts)
        ]
        for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            generation = placed.session().generate(prompt, 20, SAMPLING, logprobs=logprobs)
            assert stream.result() == list(generation)
            if i == 1:
                assert stream.logprobs == ()
                continue
            assert [each.token for each in stream.logprobs] == generation.tokens
            for ours, alone in zip(stream.logprobs, generation.logprobs, strict=True):
                assert [token for token, _ in ours.top] == [token for token, _ in alone.top]
                values = [ours.logprob, *(value for _, value in ours.top)]
                np.testing.assert_allclose(values, [alone.logprob, *(value for _, value in alone.top)], atol=LOGPROBS)


@pytest.mark.parametrize("saved_eviction", [None, SNAPKV], ids=["whole", "evicted"])
@pytest.mark.parametrize("eviction", [None, SNAPKV], ids=["keeps", "evicts"])
def test_a_prompt_may_follow_a_saved_session(placed, draw_tokens, tmp_path, opened, saved_eviction, eviction):
    """As a session's next turn; the same file serves several requests."""
    path, turns = tmp_path / "chat", [draw_tokens(count, seed=count) for count in (70, 33, 9)]
    save_turn(placed, path, turns[0], eviction=saved_eviction)
    wanted = []
    for turn in turns[1:]:
        session = placed.restore(path, eviction=eviction or saved_eviction)
        if saved_eviction and not eviction:  # in a session the options stay; in an engine each request has its own
            session = placed.restore(path, eviction=SnapKv(budget=400, window=8, sink=2))
        wanted.append(list(session.generate(turn, 25, SAMPLING)))
    with Engine(placed, 4, chunk_tokens=24) as engine:
        other = engine.submit(turns[0], 40, ignore_eos=True)
        streams = [engine.submit(turn, 25, SAMPLING, eviction=eviction, session=path) for turn in turns[1:]]
        assert [stream.result() for stream in streams] == wanted
        assert [stream.prompt_tokens for stream in streams] == [33, 9]
        assert len(other.result()) == 40
        assert engine.stats().evictions == (2 if eviction else 0)
        assert_nothing_held(engine, opened)


def test_queries_of_a_file_count_where_the_prompt_has_too_few(endless, draw_tokens, tmp_path):
    path = tmp_path / "chat"
    save_turn(endless, path, draw_tokens(70), eviction=SNAPKV)
    wanted = list(endless.restore(path).generate([7], 25, SAMPLING))
    with Engine(endless, 2, chunk_tokens=24) as engine:
        assert engine.submit([7], 25, SAMPLING, eviction=SNAPKV, session=path).result() == wanted
        assert engine.stats().evictions == 1


@pytest.mark.parametrize("window", [4, 16])
def test_a_session_is_restored_with_another_window(endless, draw_tokens, tmp_path, window):
    """It reads the tokens again whose queries the file lacks, and takes the latest where the file has more."""
    path, other = tmp_path / "chat", SnapKv(budget=40, window=window, sink=2)
    session = endless.session(eviction=SNAPKV)
    session.prefill(draw_tokens(70))
    for token in draw_tokens(12, seed=1):
        session.step(token)
    session.save(path, rewind_tokens=20)
    restored = endless.restore(path, eviction=other)
    restored.prefill([7])
    twin = endless.restore(path, eviction=other)
    tail = twin.state.history[70:]
    twin.rewind(70)
    twin.prefill([*tail, 7])
    for layer in range(len(endless.manifest.layers)):
        np.testing.assert_array_equal(restored.kept_positions(layer), twin.kept_positions(layer))


def test_a_saved_request_may_be_followed_by_a_prompt(placed, draw_tokens, tmp_path, opened):
    path, turn = tmp_path / "chat", draw_tokens(20, seed=1)
    with Engine(placed, 2, chunk_tokens=24) as engine:
        stream = engine.submit(draw_tokens(50), 200, SAMPLING)
        next(stream)
        stream.save(path)
        stream.cancel()
        read = placed.restore(path).state.tokens
        assert read[:50] == draw_tokens(50)
        wanted = list(placed.session().generate([*read, *turn], 20, SAMPLING))
        assert engine.submit(turn, 20, SAMPLING, session=path).result() == wanted
        assert_nothing_held(engine, opened)


def test_what_a_session_had_chosen_and_not_shown_is_shown(endless_full, model, draw_tokens, tmp_path):
    """Tokens that a stop might have begun with, and generations that ended."""
    session, path = model.session(), tmp_path / "chat"
    tokens = list(session.generate(draw_tokens(30), 12))
    stop = [*tokens[4:7], (tokens[7] + 1) % 131]
    session = model.session()
    generation = session.generate(draw_tokens(30), 12, stop=[stop])
    shown = [next(generation) for _ in range(4)]
    assert shown == tokens[:4]
    session.save(path)
    with Engine(model, 2) as engine:
        assert engine.restore(path).result() == tokens[4:]
        assert list(generation) == tokens[4:]
        session.save(path)
        ended = engine.restore(path)
        assert (ended.result(), ended.finish_reason, ended.done) == ([], "length", True)
        with pytest.raises(ConfigError, match="ended"):
            ended.save(path)
        assert engine.restore(path, 3).finish_reason is None


def change_file(path, change) -> None:
    """Change what a file says, and make its checksum right again."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    description = json.loads(header["__metadata__"]["session"])
    change(description)
    header["__metadata__"]["session"] = json.dumps(description)
    text = json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text + content[8 + length : -CHECKSUM_BYTES]
    path.write_bytes(body + hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest())


def forget_generation(description):
    description["generation"] = None


def spoil_turn(description):
    del description["generation"]["turn"]["sampling"]


def spoil_ready(description):
    description["generation"]["ready"] = [["x"]]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (forget_generation, ConfigError, "does not contain a generation.*session="),
        (spoil_turn, ContractMismatchError, "generation cannot be read"),
        (spoil_ready, ContractMismatchError, "generation cannot be read"),
    ],
)
def test_files_without_a_generation_that_can_go_on(endless, draw_tokens, tmp_path, opened, change, error, text):
    path = tmp_path / "chat"
    save_turn(endless, path, draw_tokens(50))
    change_file(path, change)
    with Engine(endless, 2) as engine:
        with pytest.raises(error, match=text):
            engine.restore(path)
        assert len(engine.submit([5], 3, session=path).result()) == 3  # its sequence is sound
        assert_nothing_held(engine, opened)


def test_damaged_and_missing_files(endless, draw_tokens, tmp_path, opened):
    path = tmp_path / "chat"
    save_turn(endless, path, draw_tokens(50))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with Engine(endless, 2) as engine:
        for name, text in (("chat", "altered"), ("missing", "cannot be read")):
            for take in (engine.restore, lambda path: engine.submit([5], 3, session=path)):
                with pytest.raises(SessionFileError, match=text):
                    take(tmp_path / name)
        with pytest.raises(ConfigError, match="path"):
            engine.restore(None)
        assert engine.submit([5], 3).result()
        assert engine.memory().held_bytes == 0


def test_a_file_of_another_model(paged_model, paged_mixed_model, draw_tokens, tmp_path, opened):
    path = tmp_path / "chat"
    save_turn(paged_model, path, draw_tokens(50))
    with Engine(paged_mixed_model, 2) as engine:
        with pytest.raises(ContractMismatchError, match="another model"):
            engine.restore(path)
        with pytest.raises(ContractMismatchError, match="another model"):
            engine.submit([5], session=path)
        assert engine.submit([5], 3).result()
        assert_nothing_held(engine, opened)


def test_what_does_not_fit_is_refused_at_once(endless, draw_tokens, tmp_path, opened):
    path = tmp_path / "chat"
    save_turn(endless, path, draw_tokens(200), new=60)
    plan = endless.plan_engine(2, None, 24, 512)
    few = sum((5 if kind.grows else kind.num_pages) * kind.page_bytes for kind in plan.kinds)
    with Engine(endless, 2, few, 24, max_context=64) as engine:
        with pytest.raises(ContextLengthError, match=r"205 tokens.*max_context = 64"):
            engine.restore(path)
        with pytest.raises(ContextLengthError):
            engine.submit([5], session=path)
        with pytest.raises(ConfigError, match="max_new_tokens"):
            engine.restore(path, 0)
        assert_nothing_held(engine, opened)


def test_an_engine_whose_pool_is_too_small(endless, draw_tokens, tmp_path, opened):
    path = tmp_path / "chat"
    save_turn(endless, path, draw_tokens(200), new=60)
    plan = endless.plan_engine(1, None, 24)
    few = sum((14 if kind.grows else kind.num_pages) * kind.page_bytes for kind in plan.kinds)
    with Engine(endless, 1, few, 24) as engine:
        with pytest.raises(CapacityError, match="may need 17 pages"):
            engine.restore(path)
        assert len(engine.restore(path, 10).result()) == 10
        assert_nothing_held(engine, opened)


def test_a_full_engine_lets_restored_requests_wait(endless, draw_tokens, tmp_path, opened):
    path = tmp_path / "chat"
    session = save_turn(endless, path, draw_tokens(50))
    wanted = list(session.resume())
    with Engine(endless, 1) as engine:
        first = engine.submit(draw_tokens(20), 60)
        streams = [engine.restore(path) for _ in range(3)]
        streams[1].cancel()
        assert [streams[i].result() for i in (0, 2)] == [wanted, wanted]
        assert len(first.result()) == 60
        assert engine.stats().most_running == 1
        assert_nothing_held(engine, opened)


def test_a_closed_engine_restores_nothing_and_keeps_no_file_open(endless, draw_tokens, tmp_path, opened):
    path = tmp_path / "chat"
    save_turn(endless, path, draw_tokens(50))
    engine = Engine(endless, 1)
    engine.submit(draw_tokens(20), 400)
    waiting = engine.restore(path)
    engine.close()
    with pytest.raises(EngineClosedError):
        waiting.result()
    with pytest.raises(EngineClosedError):
        engine.restore(path)
    assert all(opened.values())
    assert len(opened) == 2


def test_requests_that_cannot_be_saved(endless, draw_tokens, tmp_path):
    """Those that wait, those whose eviction is still to come, those that ended; no file is made."""
    path, long = tmp_path / "chat", draw_tokens(100)
    with Engine(endless, 1, chunk_tokens=24) as engine:
        streams = []

        def submit(count):
            streams.extend(engine.submit(long, 5, eviction=SNAPKV) for _ in range(count))
            return streams[-1]

        with pytest.raises(ConfigError, match="still waits"):
            save_midway(engine, lambda: submit(2), path, 1)
        for stream in streams:
            stream.result()
        with pytest.raises(ConfigError, match="once its prompt is read"):
            save_midway(engine, lambda: submit(1), path, 2)
        ended = streams[-1]
        ended.result()
        with pytest.raises(ConfigError, match="has ended"):
            ended.save(path)
        with pytest.raises(ConfigError, match="path"):
            ended.save(3)
    assert not path.exists()
