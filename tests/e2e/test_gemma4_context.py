"""A long context at the shape of Gemma 4's attention: rings that wrap many times beside full layers of wider heads."""

import numpy as np
import pytest
from families import shared_checkpoint, shared_model
from parity import oracle_logits, relative_difference
from tolerances import LOGITS_RELATIVE, LONG_LOGITS_RELATIVE

import ortolan

CONTEXT, SINGLE, CHUNK = 9216, 1600, 1024
SHAPE = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": CONTEXT,
}
TOKENS = np.random.default_rng(9).integers(3, 131, CONTEXT).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("window", [512, 1024])
def test_single_tokens_past_a_wrap_agree_with_chunks_and_with_transformers(window):
    checkpoint = shared_checkpoint("gemma4_unified", seed=5, sliding_window=window, **SHAPE)
    model = ortolan.load(shared_model(checkpoint, max_context=CONTEXT, chunk_size=CHUNK), device="cpu")
    session = model.session()
    read, capacity = CONTEXT - SINGLE, session.cache_capacity(0)
    assert read // capacity < (CONTEXT - 1) // capacity, "the ring wraps where tokens come one by one"
    rows = [session.prefill(TOKENS[:read]), *(session.step(token) for token in TOKENS[read:])]
    assert relative_difference(np.stack(rows), oracle_logits(checkpoint, TOKENS)[read - 1 :]) <= LONG_LOGITS_RELATIVE
    for chunk_size in (CHUNK, 700):
        last = model.session(chunk_size=chunk_size).prefill(TOKENS)
        assert relative_difference(last, rows[-1]) <= LOGITS_RELATIVE, chunk_size
