"""Converted models on a GPU: they compute what they do on the host, with captured decode steps."""

from __future__ import annotations

import foreign
import ml_dtypes
import numpy as np
import pytest
from foreign import Foreign
from parity import relative_difference
from tolerances import LOGITS_RELATIVE

import ortolan
from ortolan.element_types import COMPUTE_TYPES, element_type

pytestmark = pytest.mark.cuda

WINDOW, LIMIT = 12, 40
SPECS = {
    "llama": {},
    "qwen3": {"head_norm": True, "packed": False},
    "gemma2": {"windows": (WINDOW, -1), "scale": 0.2, "softcap": 20.0, "head": "softcap"},
    "phi3_long": {"rope_limit": LIMIT},
    "gpt_oss": {"windows": (WINDOW, -1), "sinks": "learned", "bias": True},
    "smooth": {"sinks": "smooth"},
    "rope_nodes": {"rope": "nodes", "rotary_size": 8},
    "tied": {"head": "tied"},
    "int4": {"int4": True, "hidden": 64},
}
ELEMENTS = {name: element_type(name).numpy for name in COMPUTE_TYPES}
PROMPT_TOKENS, DECODED_TOKENS, CHUNK = 150, 24, 32


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, foreign.VOCABULARY, count).tolist()


def open_model(tmp_path, name: str, dtype: str, device: str, **options: object) -> ortolan.Model:
    source = tmp_path / f"source-{dtype}"
    if not source.exists():
        foreign.write(Foreign(dtype=ELEMENTS[dtype], **SPECS[name]), source, eos_token_id=[])
    folder = ortolan.convert(
        source, tmp_path / f"{dtype}-{device}", max_context=256, chunk_size=CHUNK, overwrite=True, **options
    )
    return ortolan.load(folder, device=device)


def allowed(dtype: str) -> float:
    return LOGITS_RELATIVE if dtype == "float32" else 100 * float(ml_dtypes.finfo(ELEMENTS[dtype]).eps)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_host(name, dtype, fuse, tmp_path):
    host = open_model(tmp_path, name, "float32", "cpu").session()
    device = open_model(tmp_path, name, dtype, "cuda", fuse=fuse).session()
    rows = [(device.prefill(prompt_of(PROMPT_TOKENS)), host.prefill(prompt_of(PROMPT_TOKENS)))]
    for token in prompt_of(DECODED_TOKENS, seed=1):
        rows.append((device.step(token), host.step(token)))
    assert max(relative_difference(got, want) for got, want in rows) <= allowed(dtype)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_generated_tokens_are_those_of_the_host(name, fuse, tmp_path):
    prompt = prompt_of(LIMIT - 8)
    expected = list(open_model(tmp_path, name, "float32", "cpu").session().generate(prompt, DECODED_TOKENS))
    session = open_model(tmp_path, name, "float32", "cuda", fuse=fuse).session()
    assert list(session.generate(prompt, DECODED_TOKENS)) == expected
    assert session.stats.graph_captures >= 1


@pytest.mark.parametrize("name", ["gemma2", "int4"])
def test_evictions_and_engines_work(name, tmp_path):
    model = open_model(tmp_path, name, "float16", "cuda", paged=True, page_size=16)
    session = model.session(snapkv=ortolan.SnapKv(budget=48, window=8))
    session.prefill(prompt_of(PROMPT_TOKENS))
    assert session.physical_length(1) == 48
    assert np.isfinite(session.step(5)).all()
    with ortolan.Engine(model, max_sequences=3, chunk_tokens=32) as engine:
        streams = [engine.submit(prompt_of(count, seed=count), max_new_tokens=8) for count in (3, 40, 61, 90)]
        assert [len(stream.result()) for stream in streams] == [8] * 4
