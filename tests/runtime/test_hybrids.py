"""Models with a recurrent state in most layers: how far they go back, drafts, evictions, files and engines."""

import numpy as np
import pytest
from fake_cuda import on_fake_cuda
from families import HYBRIDS, shared_checkpoint, shared_model
from oracle_drafter import Oracle
from parity import relative_difference
from sessions import failing_step
from tolerances import SAME_LOGITS

import ortolan
from ortolan import Engine, Eviction, Sampling, SnapKv
from ortolan.contract import RECENT_TOKENS
from ortolan.errors import CapacityError, OrtolanError

SNAPKV = SnapKv(budget=40, window=8, sink=2)


def open_model(family, **options):
    folder = shared_model(shared_checkpoint(family, seed=5), max_context=512, chunk_size=32, **options)
    model = ortolan.load(folder, device="cpu", num_threads=1)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request):
    return open_model(request.param)


@pytest.fixture(scope="module", params=HYBRIDS)
def paged_hybrid(request):
    return open_model(request.param, paged=True, page_size=16)


def states(session):
    """The arrays that recurrent layers keep."""
    caches = session.feeder.caches
    return {
        (index, role): caches.view(index, session.state.lengths).block(role).copy()
        for index, layer in enumerate(session.feeder.manifest.layers)
        if layer.state == "gated_delta"
        for role in caches.store.tensors[index]
    }


def test_states_are_planned_and_reported(hybrid):
    plan, layers = hybrid.plan(), hybrid.manifest.layers
    kinds = {"gated_delta": "gated_delta", "attention": "full"}
    assert [each.kind for each in plan.layers] == [kinds[layer.state] for layer in layers]
    for layer, planned in zip(layers, plan.layers, strict=True):
        if layer.state == "gated_delta":
            heads, key, value = layer.num_heads, layer.head_size, layer.value_size
            features = 2 * layer.num_kv_heads * key + heads * value
            recent = RECENT_TOKENS * (layer.num_kv_heads * key + heads * value + heads)
            inputs = (RECENT_TOKENS + layer.conv_taps - 1) * features
            assert planned.bytes == 4 * (heads * key * value + recent + inputs + 1)
            assert planned.full_length_bytes == planned.bytes  # whatever the context
    assert hybrid.session().memory_report().cache_bytes == plan.bytes


@pytest.mark.parametrize("count", range(RECENT_TOKENS + 2))
def test_single_tokens_can_be_taken_back(hybrid, draw_tokens, count):
    prompt, later = draw_tokens(50), draw_tokens(20, 1)
    session, straight = hybrid.session(), hybrid.session()
    for each in (session, straight):
        each.prefill(prompt)
    for token in later[: RECENT_TOKENS + 4 - count]:
        for each in (session, straight):
            each.step(token)
    length = session.logical_length
    for token in draw_tokens(count, 2):
        session.step(token)
    if count > RECENT_TOKENS:
        with pytest.raises(
            CapacityError, match=rf"recurrent state of layer 0 goes back 16 .* rewind to {length + 1} or"
        ):
            session.rewind(length)
        return
    session.rewind(length)
    for token in draw_tokens(5, 3):
        np.testing.assert_array_equal(session.step(token), straight.step(token))


def test_a_chunk_cannot_be_taken_back(hybrid, draw_tokens):
    session = hybrid.session()
    session.prefill(draw_tokens(96))
    with pytest.raises(CapacityError, match=r"not into a chunk of more; rewind to 96 or later, or to 0"):
        session.rewind(95)
    session.rewind(0)
    fresh = hybrid.session()
    np.testing.assert_array_equal(session.prefill(draw_tokens(30, 1)), fresh.prefill(draw_tokens(30, 1)))


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OrtolanError("the step failed")])
def test_a_chunk_that_ends_early_leaves_the_states_before_it(hybrid, draw_tokens, tmp_path, number, error):
    prompt, session = draw_tokens(90), hybrid.session()
    with failing_step(session, number, error), pytest.raises((KeyboardInterrupt, OrtolanError)):
        session.prefill(prompt)
    read = session.logical_length
    assert read == 32 * (number - 1)
    session.save(tmp_path / "a.session")
    expected = hybrid.session().prefill(prompt)
    for each in (session.fork(), hybrid.restore(tmp_path / "a.session"), session):
        np.testing.assert_array_equal(each.prefill(prompt[read:]), expected)


def test_what_a_device_cannot_take_back_is_not_saved(hybrid, draw_tokens, tmp_path, monkeypatch):
    session = on_fake_cuda(hybrid, monkeypatch).session(chunk_size=32)
    session.prefill(draw_tokens(40))
    with failing_step(session, 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        session.prefill(draw_tokens(30))
    for use in (lambda: session.save(tmp_path / "a.session"), lambda: session.step(5)):
        with pytest.raises(CapacityError, match="failed step overwrote what the next one needs"):
            use()
    assert not list(tmp_path.iterdir())
    session.rewind(0)
    fresh = hybrid.session()
    assert relative_difference(session.prefill(draw_tokens(40)), fresh.prefill(draw_tokens(40))) <= SAME_LOGITS


@pytest.mark.parametrize("number", [None, 1])
def test_a_short_text_is_read_again_for_its_queries(hybrid, draw_tokens, tmp_path, number):
    """All of it is: states begin anew there, wherever else they cannot go back."""
    eviction, text = Eviction(policy="expected", budget=30, window=8, queries=64), draw_tokens(44)
    session, fresh = hybrid.session(), hybrid.session(eviction=eviction)
    session.prefill(text[:40])
    session.save(tmp_path / "a.session")
    restored = hybrid.restore(tmp_path / "a.session", eviction=eviction)
    if number is not None:
        with failing_step(restored, number, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            restored.prefill(text[40:])
    rest = text[restored.logical_length :]
    np.testing.assert_array_equal(restored.prefill(rest), fresh.prefill(text))
    for index in range(len(hybrid.manifest.layers)):
        np.testing.assert_array_equal(restored.kept_positions(index), fresh.kept_positions(index))


@pytest.mark.parametrize("share", [0.0, 0.4, 0.8, 1.0])
def test_drafts_leave_the_states_of_what_was_accepted(hybrid, draw_tokens, share):
    """Every step checks a draft, so that both sessions multiply as many rows: then even the bits are the same."""
    prompt = draw_tokens(30)
    plain = hybrid.session()
    tokens = list(plain.generate(prompt, 100, Sampling(temperature=0.8, seed=3)))
    session = hybrid.session()
    oracle = Oracle(tokens=8, right=((*prompt, *tokens),), share=share)
    assert list(session.generate(prompt, 100, Sampling(temperature=0.8, seed=3), speculation=oracle)) == tokens
    probe = draw_tokens(40, 2)
    assert relative_difference(session.prefill(probe), plain.prefill(probe)) <= SAME_LOGITS
    for key, array in states(plain).items():
        if key[1] == "state":
            np.testing.assert_allclose(states(session)[key], array, rtol=2e-3, atol=2e-4)


def test_rejected_tokens_leave_no_trace(hybrid, draw_tokens):
    """Random drafts, all wrong from some place on, against a session that reads the accepted tokens alone."""
    rng, prompt = np.random.default_rng(0), draw_tokens(40)
    session, straight = hybrid.session(), hybrid.session()
    for each in (session, straight):
        each.prefill(prompt)
    for _ in range(12):
        right, wrong = rng.integers(2, 7, 2).tolist()
        accepted = draw_tokens(right, int(rng.integers(1000)))
        for each in (session, straight):
            each.prefill(accepted)
        session.prefill(draw_tokens(wrong, 77))
        session.rewind(straight.logical_length)
    for token in draw_tokens(20, 5):
        np.testing.assert_array_equal(session.step(token), straight.step(token))


def test_attention_layers_are_evicted_and_states_stay(hybrid, draw_tokens):
    prompt = draw_tokens(300)
    plain, session = hybrid.session(), hybrid.session(snapkv=SNAPKV)
    logits = session.prefill(prompt)
    np.testing.assert_array_equal(logits, plain.prefill(prompt))
    for key, array in states(plain).items():
        np.testing.assert_array_equal(states(session)[key], array)
    for index, layer in enumerate(hybrid.manifest.layers):
        assert layer.evictable == (layer.state == "attention")
        if layer.evictable:
            assert session.physical_length(index) == SNAPKV.budget
    assert session.logical_length == 300
    for token in draw_tokens(30, 1):
        assert np.isfinite(session.step(token)).all()
    assert session.logical_length == 330


@pytest.mark.parametrize("length", [2048, pytest.param(16384, marks=pytest.mark.slow)])
def test_a_cache_is_an_eighth_behind_an_eviction(draw_tokens, length):
    """Keys and values shrink to the budget, states keep their bytes, and an engine decodes the same tokens."""
    checkpoint, options = shared_checkpoint("qwen3_5", seed=5), SnapKv(budget=length // 8, window=32, sink=4)
    sizes = {"max_context": length + 64, "chunk_size": 1024}
    model = ortolan.load(shared_model(checkpoint, **sizes), device="cpu")
    object.__setattr__(model.manifest, "eos_token_ids", ())
    prompt, session = draw_tokens(length), model.session(snapkv=options)
    logits = session.prefill(prompt)
    slot = sum(plan.slot_bytes for plan in model.plan().layers if plan.kind == "full")
    fixed = sum(plan.bytes for plan in model.plan().layers if plan.kind == "gated_delta")
    assert session.memory_report().cache_bytes - fixed == slot * length // 8
    attention = [i for i, layer in enumerate(model.manifest.layers) if layer.evictable]
    assert [session.physical_length(i) for i in attention] == [length // 8] * len(attention)
    tokens = []
    for _ in range(20):
        assert np.isfinite(logits).all()
        tokens.append(int(logits.argmax()))
        logits = session.step(tokens[-1])
    paged = ortolan.load(shared_model(checkpoint, paged=True, page_size=16, **sizes), device="cpu")
    with Engine(paged, 2, chunk_tokens=1024) as engine:
        stream = engine.submit(prompt, 20, eviction=options, ignore_eos=True)
        assert stream.result() == tokens
        assert engine.stats().evictions == 1


def test_what_is_captured_does_not_depend_on_chunks(hybrid, draw_tokens):
    """Products of one row may round otherwise than those of many; nothing else differs between chunks."""
    prompt = draw_tokens(100)

    def read(chunk):
        session = hybrid.session(chunk_size=chunk, snapkv=SNAPKV)
        logits = session.prefill(prompt)
        captured = session.state.captured_at_eviction
        return session, [logits, *(captured[index] for index in sorted(captured))]

    session, whole = read(100)
    for chunk in (50, 25):
        for found, expected in zip(read(chunk)[1], whole, strict=True):
            np.testing.assert_array_equal(found, expected)
    single, alone = read(1)
    for found, expected in zip(alone, whole, strict=True):
        assert relative_difference(found, expected) <= SAME_LOGITS
    for index, layer in enumerate(hybrid.manifest.layers):
        if layer.evictable:
            np.testing.assert_array_equal(single.kept_positions(index), session.kept_positions(index))


@pytest.mark.parametrize("snapkv", [None, SNAPKV], ids=["whole", "evicts"])
def test_saved_sessions_and_forks_go_on(hybrid, draw_tokens, tmp_path, snapkv):
    prompt = draw_tokens(60)
    session = hybrid.session(snapkv=snapkv)
    answer = session.generate(prompt, 30, Sampling(temperature=0.9, seed=1))
    first = [next(answer) for _ in range(7)]
    session.save(tmp_path / "a.session")
    restored, fork = hybrid.restore(tmp_path / "a.session"), session.fork()
    rest = list(answer)
    assert list(fork.resume()) == list(restored.resume()) == rest
    for token in draw_tokens(5, 2):
        np.testing.assert_array_equal(session.step(token), restored.step(token))
    again = hybrid.restore(tmp_path / "a.session")
    with pytest.raises(CapacityError, match="recurrent state"):
        again.rewind(len(prompt) + len(first) - 3)


@pytest.mark.parametrize("overcommit", [1.0, 4.0])
def test_requests_get_the_tokens_of_sessions(paged_hybrid, draw_tokens, overcommit):
    prompts = [draw_tokens(count, seed=count) for count in (33, 15, 90, 200, 17)]
    samplings = [None, Sampling(temperature=1.0, seed=3)] * 3
    expected = [list(paged_hybrid.session().generate(p, 40, s)) for p, s in zip(prompts, samplings, strict=False)]
    right = tuple((*prompt, *tokens) for prompt, tokens in zip(prompts, expected, strict=True))
    drafters = [None, Oracle(tokens=8, right=right, share=0.8), Oracle(tokens=4, right=right, share=0.0), None, None]
    kinds = {kind.name: kind for kind in paged_hybrid.plan_engine(3).kinds}
    assert kinds["gated_delta"].num_pages == 3 + kinds["gated_delta"].snapshot_pages
    tight = 3 * kinds["gated_delta"].page_bytes + 17 * kinds["full"].page_bytes
    options = {"chunk_tokens": 24, "max_context": 260, "overcommit": overcommit}
    with Engine(paged_hybrid, 3, tight if overcommit > 1 else None, **options) as engine:
        streams = [
            engine.submit(p, 40, s, speculation=d) for p, s, d in zip(prompts, samplings, drafters, strict=False)
        ]
        assert [stream.result() for stream in streams] == expected
        assert engine.memory().held_bytes == 0
        assert (engine.stats().preemptions > 0) == (overcommit > 1)


def test_a_request_is_saved_and_restored(paged_hybrid, draw_tokens, tmp_path):
    prompt = draw_tokens(60)
    tokens = list(paged_hybrid.session().generate(prompt, 30))
    half = paged_hybrid.session()
    generation = half.generate(prompt, 30)
    first = [next(generation) for _ in range(5)]
    half.save(tmp_path / "a.session")
    with Engine(paged_hybrid, 2) as engine:
        assert first + engine.restore(tmp_path / "a.session").result() == tokens


def ask(engine, prompt):
    """Return a prompt's tokens with their log-probabilities, which tell any two logits apart."""
    stream = engine.submit(prompt, 8, logprobs=3)
    return stream.result(), stream.logprobs


def test_prompts_begin_at_snapshots_of_states(paged_hybrid, draw_tokens):
    """Turns of a conversation, then questions to one document, against an engine for each: the same bits."""
    document, size = draw_tokens(390), paged_hybrid.manifest.page_size
    turns = [document[:195], document]
    questions = [[*document, *draw_tokens(9 + 20 * i, seed=i)] for i in (1, 2, 3)]
    with Engine(paged_hybrid, 3, chunk_tokens=64) as engine:
        assert 16 < engine.plan.snapshot_spacing <= 192  # tokens
        reused = []
        for prompt in (*turns, *questions):
            before = engine.stats().reused_tokens
            answer = ask(engine, prompt)
            reused.append(engine.stats().reused_tokens - before)
            with Engine(paged_hybrid, 3, chunk_tokens=64) as fresh:
                assert answer == ask(fresh, prompt)
                assert fresh.stats().reused_tokens == 0
        stats, memory = engine.stats(), engine.memory()
    ends = [(len(prompt) - 1) // size * size for prompt in turns]
    assert reused == [0, ends[0], *[ends[1]] * 3]
    assert stats.snapshots >= 2
    assert memory.held_bytes == 0
    assert memory.kept_bytes > 0


def test_snapshots_give_way_to_requests(paged_hybrid, draw_tokens):
    """As many requests as there are states, whose snapshots of before nobody can keep."""
    prompts = [draw_tokens(200, seed=seed) for seed in range(6)]
    with Engine(paged_hybrid, 3, chunk_tokens=64) as engine:
        expected = [ask(engine, prompt)[0] for prompt in prompts]
        assert [stream.result() for stream in [engine.submit(prompt, 8) for prompt in prompts]] == expected
        assert engine.stats().preemptions == 0
        assert engine.memory().held_bytes == 0


def test_spoiled_states_are_kept_for_nobody(paged_hybrid, draw_tokens):
    """A request that ends between a snapshot's chunk and its offer leaves no page behind."""
    with Engine(paged_hybrid, 2, chunk_tokens=64) as engine:
        streams = [engine.submit(draw_tokens(300, seed=seed), 20) for seed in range(4)]
        for stream in streams[::2]:
            stream.cancel()
        for stream in streams[1::2]:
            stream.result()
        memory = engine.memory()
        assert memory.held_bytes == 0
        assert memory.kept_bytes + memory.free_bytes == memory.pool_bytes
