"""SnapKV on real models: what is kept is what the reference keeps, and the shipped model still answers."""

from pathlib import Path

import numpy as np
import pytest
from families import shared_checkpoint, shared_model
from snapkv_reference import pooled_scores, select
from tolerances import SCORE_TIES

import ortolan
from ortolan import SnapKv
from ortolan.retrieval import KINDS, Task, is_correct, load_corpus, make_sample

SHIPPED = Path(ortolan.__file__).parent / "models" / "retriever"


@pytest.fixture(scope="module", params=["llama", "gemma2", "retriever"])
def prompted(request):
    """A model and a prompt: tiny ones with random weights, and the shipped one with a real document."""
    if request.param == "retriever":
        model = ortolan.load(shared_model(SHIPPED, max_context=2048, chunk_size=256), device="cpu")
        return model, model.tokenizer.encode(make_sample(load_corpus("eval"), Task(length=900, seed=1)).prompt)
    checkpoint = shared_checkpoint(request.param, seed=5)
    model = ortolan.load(shared_model(checkpoint, max_context=512, chunk_size=64), device="cpu")
    return model, np.random.default_rng(0).integers(3, 131, 300).tolist()


@pytest.mark.parametrize("granularity", ["kv_head", "layer", "model"])
@pytest.mark.parametrize(("pool", "kernel", "group_reduce"), [("avg", 5, "mean"), ("max", 7, "max")])
def test_kept_positions_equal_the_reference_on_real_queries(prompted, granularity, pool, kernel, group_reduce):
    model, prompt = prompted
    structure = {"kernel": kernel, "pool": pool, "granularity": granularity, "group_reduce": group_reduce}
    observer = model.session(snapkv=SnapKv(budget=len(prompt), window=32))
    observer.prefill(prompt)
    layers = [i for i, layer in enumerate(model.manifest.layers) if layer.evictable]
    length = np.array([len(prompt)], np.int32)
    captures, tensors = observer.state.captures, observer.feeder.caches.store.tensors
    pooled = pooled_scores(
        [(captures[i], tensors[i]["key"], length) for i in layers],
        **structure,
        scale=model.manifest.layers[layers[0]].scale,
        softcap=model.manifest.layers[layers[0]].softcap,
    )
    session = model.session(snapkv=SnapKv(budget=80, window=32, sink=2, **structure))
    session.prefill(prompt)
    for i, scores in zip(layers, pooled, strict=True):
        kept = session.kept_positions(i)
        for head in range(kept.shape[0]):
            want = select(scores[0, min(head, scores.shape[1] - 1)], len(prompt), budget=80, window=32, sink=2)
            assert _differences_are_ties(kept[head], want, scores[0, min(head, scores.shape[1] - 1)])


def _differences_are_ties(got, want, scores):
    """Positions may differ only where float32 cannot tell their scores apart."""
    only_got, only_want = sorted(set(got) - set(want)), sorted(set(want) - set(got))
    close = np.allclose(np.sort(scores[only_got]), np.sort(scores[only_want]), rtol=SCORE_TIES, atol=0)
    return len(got) == len(want) and close


def answers(model, samples, snapkv):
    """Count right answers with a fresh session for each prompt."""
    right = 0
    for sample in samples:
        session = model.session(snapkv=snapkv)
        tokens = list(session.generate(model.tokenizer.encode(sample.prompt), 8))
        right += is_correct(sample, model.tokenizer.decode(tokens))
    return right


@pytest.mark.slow
def test_the_shipped_model_retrieves_with_an_eighth_of_its_cache(tmp_path):
    """Scoring keeps the answer; keeping the last tokens alone answers only what they hold."""
    length, budget = 4096, 512
    model = ortolan.load(ortolan.export(SHIPPED, tmp_path / "model", max_context=4200, chunk_size=512), device="cpu")
    corpus = load_corpus("eval")
    samples = [
        make_sample(corpus, Task(length=length, depth=(seed % 6) / 5, kind=KINDS[seed % len(KINDS)], seed=900 + seed))
        for seed in range(12)
    ]
    full = answers(model, samples, None)
    scored = answers(model, samples, SnapKv(budget=budget))
    recent = answers(model, samples, SnapKv(budget=budget, window=budget, sink=0))
    held = sum(sample.needle_start >= length - budget for sample in samples)
    assert full == scored == len(samples)
    assert recent <= held + 1, "what was not kept cannot be known, guesses aside"
    assert recent >= held - 1
