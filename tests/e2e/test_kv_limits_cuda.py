"""Sessions of a large context on a GPU are told limits of their length, which change no bit of what they compute."""

import copy
import dataclasses
import functools

import numpy as np
import pytest
from cuda_models import draw_tokens
from families import shared_checkpoint, shared_model

import ortolan
from ortolan import SnapKv, contract

pytestmark = pytest.mark.cuda

BUDGET = 2030


@functools.lru_cache(maxsize=2)
def open_model(family: str, dtype: str) -> ortolan.Model:
    """Open a model with heads that the kernel of one token takes, in caches that it does not take without a limit."""
    checkpoint = shared_checkpoint(family, seed=5, num_key_value_heads=2, head_dim=64)
    folder = shared_model(checkpoint, dtype=dtype, max_context=16384, chunk_size=512)
    model = ortolan.load(folder, device="cuda")
    object.__setattr__(model.manifest, "eos_token_ids", ())
    return model


def without_limits(model: ortolan.Model) -> ortolan.Model:
    """The same model, whose graph is told nothing."""
    untold = copy.copy(model)
    inputs = model.decoder.inputs - {contract.MAX_KV_LEN}
    untold.decoder = dataclasses.replace(model.decoder, inputs=inputs)
    return untold


def run_turns(model: ortolan.Model, prompt: list[int], snapkv: SnapKv | None):
    """Decode across 2048 tokens in a cache by steps, further by a chain of steps, and once more from a short prompt."""
    session = model.session(snapkv=snapkv)
    logits = [session.prefill(prompt)] + [session.step(token) for token in draw_tokens(30, seed=1)]
    tokens = list(session.generate([9], 30))
    session.rewind(0)
    tokens += session.generate(draw_tokens(100), 30)
    session.rewind(0)
    tokens += session.generate(prompt[: BUDGET + 10], 30)
    return np.array(logits), tokens, session.stats


@pytest.mark.parametrize("snapkv", [None, SnapKv(budget=BUDGET, window=16, sink=2)], ids=["all", "evicted"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_limits_change_no_bit(family, dtype, snapkv):
    model = open_model(family, dtype)
    prompt = draw_tokens(3000 if snapkv else 2030)
    logits, tokens, stats = run_turns(model, prompt, snapkv)
    expected, expected_tokens, expected_stats = run_turns(without_limits(model), prompt, snapkv)
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits, expected)
    assert tokens == expected_tokens
    assert stats.graph_captures > expected_stats.graph_captures >= 1


def test_each_limit_is_captured_once():
    session = open_model("llama", "bfloat16").session()
    for length in (2030, 100, 2030, 4090):
        session.rewind(0)
        list(session.generate(draw_tokens(length), 40))
    assert session.stats.graph_captures == 3  # up to 2048, 4096 and 8192
