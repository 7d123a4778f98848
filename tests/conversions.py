"""Foreign models to convert, and what their conversions must compute."""

from __future__ import annotations

from pathlib import Path

import foreign
import numpy as np
from foreign import Foreign

import ortolan

WINDOW, LIMIT = 12, 40
SPECS = {
    "llama": Foreign(),
    "qwen3": Foreign(head_norm=True, packed=False),
    "qwen3_split": Foreign(head_norm=True, split=True),
    "computed_shapes": Foreign(head_norm=True, packed=False, computed_shapes=True),
    "mistral": Foreign(windows=(WINDOW, WINDOW)),
    "gemma2": Foreign(windows=(WINDOW, -1), scale=0.2, softcap=20.0, head="softcap"),
    "phi3_long": Foreign(rope_limit=LIMIT),
    "phi_partial": Foreign(head_size=32, bias=True),
    "gptj": Foreign(interleaved=1, packed=False),
    "gpt_oss": Foreign(windows=(WINDOW, -1), sinks="learned", bias=True, experts=4),
    "sinks": Foreign(windows=(WINDOW, -1), sinks="learned", bias=True),
    "smooth": Foreign(sinks="smooth"),
    "rope_nodes": Foreign(rope="nodes", rotary_size=8),
    "rope_standard": Foreign(rope="standard", rotary_size=8),
    "rope_lookups": Foreign(rope="lookups"),
    "rope_lookups_long": Foreign(rope="lookups", rope_limit=LIMIT),
    "rope_nodes_long": Foreign(rope="nodes", rope_limit=LIMIT),
    "no_rope": Foreign(rope="none", num_heads=8, num_kv_heads=1),
    "tied": Foreign(head="tied"),
    "last_gather": Foreign(head="gather"),
    "last_slice": Foreign(head="slice", windows=(WINDOW, -1)),
    "int4": Foreign(int4=True),
    "int4_embedding": Foreign(int4=True, block_embedding=True),
    "int4_mistral": Foreign(int4=True, windows=(WINDOW, WINDOW), bias=True),
    "int4_qwen3": Foreign(int4=True, head_norm=True),
    "int4_split": Foreign(int4=True, head_norm=True, split=True, rope="nodes"),
    "int4_initializers": Foreign(qdq=True, bias=True),
    "int4_phi3": Foreign(int4=True, rope_limit=LIMIT),
}
PROMPT_TOKENS, DECODED_TOKENS, CHUNK = 150, 12, 7


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, foreign.VOCABULARY, count).tolist()


def rows_of(session: ortolan.Session, prompt: list[int], steps: int) -> tuple[np.ndarray, list[int]]:
    """Return the logits after the prompt and after each of `steps` greedy tokens, and all tokens read."""
    rows, tokens = [session.prefill(prompt)], list(prompt)
    for _ in range(steps):
        tokens.append(int(np.argmax(rows[-1])))
        rows.append(session.step(tokens[-1]))
    return np.array(rows), tokens


def expected_rows(source: Path, spec: Foreign, tokens: list[int], first: int) -> np.ndarray:
    """Return the source's logits after each token from `first` on, of a run each where rows depend on the length."""
    if not spec.rope_limit and spec.head not in ("gather", "slice"):
        return foreign.source_logits(source, tokens)[first - 1 :]
    return np.array([foreign.source_logits(source, tokens[:n])[-1] for n in range(first, len(tokens) + 1)])
