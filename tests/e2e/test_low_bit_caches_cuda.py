"""Models whose caches hold codes, on a GPU: sessions, evictions, files, pages and the engine."""

import functools

import numpy as np
import pytest
from cuda_models import GRAPHS, HELD_MODELS, draw_tokens
from families import shared_checkpoint, shared_model

import ortolan
from ortolan import Engine, SnapKv

pytestmark = pytest.mark.cuda

SIZES = {"max_context": 512, "chunk_size": 48}
CODES = ("int8", "fp8")
SNAPKV = SnapKv(budget=40, window=8, sink=2)
# Of logits, relative to their deviation, to those of elements on the host: random weights amplify what codes lose.
LARGEST_DIFFERENCE = {"int8": 0.15, "fp8": 0.5}


@functools.lru_cache(maxsize=HELD_MODELS)
def open_model(family, dtype, graph="fused", *, cache_dtype=None, page_size=0):
    pages = {"paged": True, "page_size": page_size} if page_size else {}
    folder = shared_model(shared_checkpoint(family, seed=5, num_key_value_heads=2), dtype=dtype, **pages, **SIZES)
    on_host = dtype == "float32"
    fused = None if on_host else GRAPHS[graph]
    model = ortolan.load(folder, device="cpu" if on_host else "cuda", fused=fused, cache_dtype=cache_dtype)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


@pytest.fixture(params=CODES)
def code(request):
    return request.param


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_are_close_to_those_of_elements(family, graph, dtype, code):
    """Prompts by the chunk, tokens one by one and few at a time; within windows and beyond a ring's wrap."""
    tokens, exact = draw_tokens(150), open_model(family, "float32").session()
    session = open_model(family, dtype, graph, cache_dtype=code).session()
    for begin, end in ((0, 130), (130, 131), (131, 138), (138, 150)):
        wanted, got = exact.prefill(tokens[begin:end]), session.prefill(tokens[begin:end])
        allowed = LARGEST_DIFFERENCE[code] + (0.1 if dtype == "bfloat16" else 0)
        assert np.abs(got - wanted).max() <= allowed * wanted.std(), (begin, end)


@pytest.mark.parametrize("page_size", [0, 16])
def test_saved_forked_rewound_and_evicted_sessions_go_on_alike(page_size, code, tmp_path):
    model = open_model("llama", "bfloat16", cache_dtype=code, page_size=page_size)
    for options in (None, SNAPKV):
        session = model.session(snapkv=options)
        session.prefill(draw_tokens(150))
        assert session.stats.evictions == (options is not None)
        session.save(tmp_path / "session")
        restored, fork = model.restore(tmp_path / "session"), session.fork()
        expected = [session.step(token) for token in (5, 9, 11)]
        assert np.isfinite(expected).all()
        for other in (restored, fork):
            np.testing.assert_array_equal([other.step(token) for token in (5, 9, 11)], expected)
        session.rewind(session.logical_length - 3)
        np.testing.assert_array_equal([session.step(token) for token in (5, 9, 11)], expected)


def test_pages_do_not_change_a_token(code):
    tokens = {}
    for page_size in (0, 16):
        session = open_model("gemma3", "bfloat16", cache_dtype=code, page_size=page_size).session()
        tokens[page_size] = list(session.generate(draw_tokens(150), max_new_tokens=40))
    assert tokens[0] == tokens[16]


def test_an_engine_gives_tokens_that_sessions_rate_best(code):
    """Prompts and single tokens share its steps, also with prompts that are evicted."""
    model = open_model("llama", "bfloat16", cache_dtype=code, page_size=16)
    prompts = [draw_tokens(count, seed=count) for count in (1, 17, 90, 200, 33)]
    with Engine(model, max_sequences=4, chunk_tokens=40) as engine:
        streams = [engine.submit(prompt, max_new_tokens=24) for prompt in prompts]
        evicted = [engine.submit(prompt, max_new_tokens=24, snapkv=SNAPKV) for prompt in prompts]
        results = [list(stream) for stream in streams]
        assert [len(list(stream)) for stream in evicted] == [24] * len(prompts)
        assert engine.stats().evictions == sum(len(prompt) > SNAPKV.budget for prompt in prompts)
    for prompt, tokens in zip(prompts, results, strict=True):
        session = model.session()
        logits = session.prefill(prompt)
        for token in tokens:
            assert logits.max() - logits[token] <= 0.3 * logits.std()
            logits = session.step(token)
