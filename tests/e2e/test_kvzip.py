"""KVzip on real models: scores are transformers' attention of a second reading, and later questions are answered."""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import shared_checkpoint, shared_model
from kvzip_reference import keep_shared, largest_weights
from parity import oracle, relative_difference
from tolerances import LOGITS_RELATIVE, SCORE_TIES

import ortolan
from ortolan import Eviction
from ortolan.retrieval import Task, is_correct, load_corpus, make_sample
from ortolan.runtime.eviction.second_reader import plan_pieces

SHIPPED = Path(ortolan.__file__).parent / "models" / "retriever"
OPTIONS = {"budget": 40, "window": 8, "sink": 2}
LENGTH = 120
PIECES = [{"piece": 7, "lead": 4}, {"piece": 16, "lead": 0}, {"piece": 200, "lead": 8}]  # the last: cut by the chunk


@pytest.fixture(scope="module", params=["llama", "gemma2", "gemma3", "gemma4"])
def exported(request):
    """A model with full attention alone; with softcap and rings; with rings; with layers that share caches."""
    checkpoint = shared_checkpoint(request.param, seed=5, num_key_value_heads=2)
    folder = shared_model(checkpoint, max_context=512, chunk_size=16)
    return checkpoint, ortolan.load(folder, device="cpu", num_threads=1)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


def second_reading_scores(checkpoint, manifest, tokens, eviction, room) -> dict[int, np.ndarray]:
    """Score by transformers: each piece is a sequence of all tokens, the lead and the piece."""
    scores: dict[int, np.ndarray] = {}
    for piece in plan_pieces(len(tokens), eviction.second_reading, room):
        sequence = torch.tensor([[*tokens, *tokens[piece.lead : piece.end]]])
        with torch.no_grad():
            attentions = oracle(checkpoint)(sequence, use_cache=False, output_attentions=True).attentions
        for i, layer in enumerate(manifest.layers):
            if layer.evictable:
                weights = attentions[i][0].double().numpy()
                largest = largest_weights(weights, layer.num_kv_heads, len(tokens), piece.end - piece.begin)
                scores[i] = np.maximum(scores.get(i, 0), largest)
    return scores


def assert_kept(session, scores):
    """Assert what is kept, except for scores that float32 cannot tell apart."""
    for i, score in scores.items():
        expected = keep_shared(score, **OPTIONS)
        missing, extra = [], []
        for head, row in enumerate(session.kept_positions(i)):
            got, want = set(row[row >= 0].tolist()), set(expected[head].tolist())
            missing += [score[head, j] for j in want - got]
            extra += [score[head, j] for j in got - want]
        np.testing.assert_allclose(sorted(extra), sorted(missing), rtol=SCORE_TIES)
        assert len(missing) <= 2


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_kept_positions_are_those_of_transformers_attention(exported, pieces):
    checkpoint, model = exported
    tokens, eviction = tokens_of(LENGTH), Eviction(policy="kvzip", **OPTIONS, **pieces)
    session = model.session(eviction=eviction)
    session.prefill(tokens)
    room = min(pieces["piece"] + pieces["lead"], 16)
    assert_kept(session, second_reading_scores(checkpoint, model.manifest, tokens, eviction, room))


def test_a_paged_model_keeps_the_same(exported):
    checkpoint, model = exported
    folder = shared_model(checkpoint, max_context=512, chunk_size=16, paged=True, page_size=16)
    paged = ortolan.load(folder, device="cpu", num_threads=1)
    eviction = Eviction(policy="kvzip", **OPTIONS, piece=7, lead=4)
    sessions = [each.session(eviction=eviction) for each in (model, paged)]
    for count in (LENGTH, 30):
        logits = [session.prefill(tokens_of(count, seed=count)) for session in sessions]
        np.testing.assert_array_equal(*logits)
        for layer in range(len(model.manifest.layers)):
            np.testing.assert_array_equal(*(session.kept_positions(layer) for session in sessions))
    assert [session.stats.evictions for session in sessions] == [2, 2]


def test_chunks_of_the_prompt_do_not_matter(exported):
    """Pieces are the same as long as chunks are no shorter than a piece with its lead."""
    _, model = exported
    eviction, kept = Eviction(policy="kvzip", **OPTIONS, piece=7, lead=4), []
    for chunk in (11, 16, 64, 200):
        session = model.session(chunk_size=chunk, eviction=eviction)
        logits = session.prefill(tokens_of(LENGTH))
        kept.append((logits, [session.kept_positions(i) for i in range(len(model.manifest.layers))]))
    for logits, positions in kept[1:]:
        assert relative_difference(logits, kept[0][0]) <= LOGITS_RELATIVE
        for got, want in zip(positions, kept[0][1], strict=True):
            np.testing.assert_array_equal(got, want)


def test_an_evicted_text_answers_questions_that_nobody_had_asked():
    """The same caches serve every question: each is asked after a rewind to the end of the text."""
    model = ortolan.load(shared_model(SHIPPED, max_context=2048, chunk_size=512), device="cpu")
    sample = make_sample(load_corpus("eval"), Task(length=1500, depth=0.3, kind="single", seed=3))
    text, encode = sample.prompt.removesuffix(sample.fact.question), model.tokenizer.encode
    right = {}
    for policy in ("kvzip", "snapkv"):
        session = model.session(eviction=Eviction(policy=policy, budget=190))
        session.prefill(encode(text))
        said = list(session.generate(encode(sample.fact.question), 8))
        right[policy] = is_correct(sample, model.tokenizer.decode(said))
        if policy == "kvzip":
            session.rewind(len(encode(text)))
            assert list(session.generate(encode(sample.fact.question), 8)) == said
            assert session.stats.evictions == 1
    assert right == {"kvzip": True, "snapkv": False}
