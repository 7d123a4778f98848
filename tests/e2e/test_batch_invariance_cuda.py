"""batch_invariant=True on a GPU: requests of an engine get the bits that they get one by one, however they are read."""

import functools

import numpy as np
import pytest
from cuda_models import FAMILIES, GRAPHS
from families import shared_checkpoint, shared_model

import ortolan
from ortolan import Engine, PromptLookup, Sampling, SnapKv
from ortolan.retrieval import shipped_model

pytestmark = pytest.mark.cuda

REQUESTS, SOME, NEW = 300, 60, 40
CONTEXT = 1024
DRAFTS = PromptLookup(tokens=15, shortest=1)
SNAPKV = SnapKv(budget=96, window=16, sink=2)


def open_endless(folder, **options):
    """Open a model without end-of-sequence tokens, which may be chosen at any time."""
    model = ortolan.load(folder, device="cuda", batch_invariant=True, **options)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request):
    return open_shipped(request.param)


@functools.lru_cache(maxsize=2)
def open_shipped(dtype):
    options = {"max_context": CONTEXT, "chunk_size": 512, "paged": True, "page_size": 16}
    return open_endless(shared_model(shipped_model(), dtype=dtype, **options))


def draw_prompts(count, vocabulary, longest=700):
    """Prompts of any length, short ones too, of which every third begins as another does."""
    source = np.random.default_rng(count)
    shared = source.integers(3, vocabulary, longest).tolist()
    prompts = []
    for i in range(count):
        size = int(source.integers(1, longest if i % 2 else 140))
        same = int(source.integers(0, size)) if i % 3 == 0 else 0
        prompts.append(shared[:same] + source.integers(3, vocabulary, size - same).tolist())
    return prompts


def answer(session, prompt, **options):
    """Return the tokens and log-probabilities of one request, which tell of every bit of its logits."""
    session.rewind(0)
    generation = session.generate(prompt, NEW, logprobs=3, **options)
    return list(generation), list(generation.logprobs)


def one_by_one(model, prompts, snapkv=None, **options):
    session = model.session(snapkv=snapkv)
    return [answer(session, prompt, **options) for prompt in prompts]


def together(engine, prompts, **options):
    def submit_all(_):
        return [engine.submit(prompt, NEW, ignore_eos=True, logprobs=3, **options) for prompt in prompts]

    streams = engine.worker.ask(submit_all)  # between two steps
    return [(stream.result(), list(stream.logprobs)) for stream in streams]


def tight_bytes(model, sequences, pages, chunk_tokens):
    """Return the bytes of some full-attention pages, and of all the rings that sequences need."""
    plan = model.plan_engine(sequences, None, chunk_tokens, CONTEXT)
    return sum((pages if kind.grows else kind.num_pages) * kind.page_bytes for kind in plan.kinds)


def has_windows(model):
    """Say whether layers have rings, which other sequences find only where snapshots of them were made."""
    return any(layer.window > 0 for layer in model.manifest.layers)


def count_differing(found, expected):
    return sum(a != b for a, b in zip(found, expected, strict=True))


def test_many_requests_get_what_they_get_one_by_one(model):
    prompts = draw_prompts(REQUESTS, model.manifest.vocab_size)
    expected = one_by_one(model, prompts)
    with Engine(model, 32, chunk_tokens=512) as engine:
        found = together(engine, prompts)
        assert engine.stats().most_running == 32
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert count_differing(found, expected) == 0


@pytest.mark.parametrize(("sequences", "chunk_tokens"), [(1, 131), (7, 140), (20, 160)])
def test_other_cuts_preemption_and_shared_beginnings_change_no_bit(model, sequences, chunk_tokens):
    prompts = draw_prompts(SOME, model.manifest.vocab_size)
    expected = one_by_one(model, prompts)
    pages = tight_bytes(model, sequences, 60, chunk_tokens)
    with Engine(model, sequences, pages, chunk_tokens, max_context=CONTEXT, overcommit=16.0) as engine:
        for _ in range(2):
            assert count_differing(together(engine, prompts), expected) == 0
        stats = engine.stats()
    assert stats.preemptions or sequences < 20


@pytest.mark.parametrize("chunk_size", [130, 200, 1024])
def test_sessions_with_other_chunks_have_the_same_logits(model, chunk_size):
    wanted, found = model.session(chunk_size=512), model.session(chunk_size=chunk_size)
    for prompt in draw_prompts(SOME // 3, model.manifest.vocab_size):
        for session in (wanted, found):
            session.rewind(0)
        assert found.prefill(prompt).tobytes() == wanted.prefill(prompt).tobytes()
        assert found.step(9).tobytes() == wanted.step(9).tobytes()


def test_drafts_change_no_bit(model):
    prompts = [prompt * 2 for prompt in draw_prompts(SOME, model.manifest.vocab_size, 300)]
    expected = one_by_one(model, prompts)
    assert count_differing(one_by_one(model, prompts, speculation=DRAFTS), expected) == 0
    with Engine(model, 8, chunk_tokens=300) as engine:
        assert count_differing(together(engine, prompts, speculation=DRAFTS), expected) == 0
        assert engine.stats().drafted_tokens


def test_evicted_and_sampled_requests_get_what_they_get_one_by_one(model):
    prompts = draw_prompts(SOME // 2, model.manifest.vocab_size)
    options = {"sampling": Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=5)}
    expected = one_by_one(model, prompts, SNAPKV, **options)
    with Engine(model, 8, chunk_tokens=300) as engine:
        assert count_differing(together(engine, prompts, snapkv=SNAPKV, **options), expected) == 0


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_keep_their_bits(family, dtype, graph):
    checkpoint = shared_checkpoint(family, seed=5, num_key_value_heads=2)
    options = {"max_context": CONTEXT, "chunk_size": 512, "paged": True, "page_size": 16}
    model = open_endless(shared_model(checkpoint, dtype=dtype, **options), fused=GRAPHS[graph])
    prompts = draw_prompts(SOME // 2, model.manifest.vocab_size)
    expected = one_by_one(model, prompts)
    with Engine(model, 8, chunk_tokens=260) as engine:
        for _ in range(2):
            assert count_differing(together(engine, prompts), expected) == 0
        assert engine.stats().reused_tokens or has_windows(model)
