"""Drafts on a GPU: sessions and engines give the tokens that they give without."""

import pytest
from cuda_models import CHUNK_SIZE, FAMILIES, GRAPHS, VOCABULARY, draw_tokens, open_device, open_pair
from draft_heads import checkpoint_with_head
from families import shared_model
from oracle_drafter import Oracle
from tolerances import OTHER_STEPS_LOGPROBS

import ortolan
from ortolan import DraftModel, Engine, MtpHead, PromptLookup, Sampling, SnapKv

pytestmark = pytest.mark.cuda

SAMPLINGS = {"greedy": None, "random": Sampling(temperature=1.0, seed=3)}
SNAPKV = SnapKv(budget=60, window=16, sink=2)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("snapkv", [None, SNAPKV], ids=["whole", "evicts"])
def test_tokens_are_those_without_drafts(family, graph, sampling, snapkv):
    model, prompt = open_pair(family, "float32", graph).device, draw_tokens(100)
    plain = model.session(snapkv=snapkv)
    generation = plain.generate(prompt, 40, SAMPLINGS[sampling], logprobs=2)
    tokens = list(generation)
    right = ((*prompt, *tokens),)
    drafters = [Oracle(tokens=n, right=right, share=s) for n, s in ((4, 1.0), (15, 0.8), (3, 0.0))]
    for drafter in (*drafters, PromptLookup(shortest=1), DraftModel(model.folder, tokens=6)):
        session = model.session(snapkv=snapkv)
        drafted = session.generate(prompt, 40, SAMPLINGS[sampling], logprobs=2, speculation=drafter)
        assert list(drafted) == tokens
        for mine, other in zip(drafted.logprobs, generation.logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=OTHER_STEPS_LOGPROBS)
        assert session.state.history == plain.state.history


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_with_and_without_drafts_share_steps(family, sampling):
    model = open_device(family, "float32", "fused", page_size=16, sink=2)
    prompts = [draw_tokens(count, seed=count) for count in (33, 15, 90, 200, 17)]
    expected = [list(model.session().generate(prompt, 40, SAMPLINGS[sampling])) for prompt in prompts]
    right = tuple((*prompt, *tokens) for prompt, tokens in zip(prompts, expected, strict=True))
    drafters = [None, *(Oracle(tokens=n, right=right, share=s) for n, s in ((15, 0.9), (4, 0.0), (8, 1.0)))]
    with Engine(model, 4, chunk_tokens=3 * CHUNK_SIZE) as engine:
        streams = [
            engine.submit(prompt, 40, SAMPLINGS[sampling], speculation=drafter)
            for prompt, drafter in zip(prompts, (*drafters, PromptLookup(shortest=1)), strict=True)
        ]
        assert [stream.result() for stream in streams] == expected
        assert streams[3].speculation.tokens_per_check > 3
    assert max(max(tokens) for tokens in expected) < VOCABULARY


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_next"])
def test_heads_draft_as_on_the_host(family, fused):
    checkpoint, sizes = checkpoint_with_head(family, quiet=True), {"max_context": 400, "chunk_size": 40}
    host = ortolan.load(shared_model(checkpoint, **sizes), device="cpu")
    model = ortolan.load(host.folder, device="cuda", fused=fused)
    prompts = [draw_tokens(count, seed=count) for count in (95, 20)]
    plain, drafted, on_host = model.session(), model.session(), host.session()
    for prompt in prompts:
        expected = list(plain.generate(prompt, 60))
        generation = drafted.generate(prompt, 60, speculation=MtpHead(tokens=4))
        assert list(generation) == expected
        reference = on_host.generate(prompt, 60, speculation=MtpHead(tokens=4))
        assert list(reference) == expected
        assert generation.speculation.tokens_per_check > 1.5
    paged = ortolan.load(shared_model(checkpoint, **sizes, paged=True, page_size=64), device="cuda", fused=fused)
    expected = [list(paged.session().generate(prompt, 40)) for prompt in prompts]
    with Engine(paged, 2, chunk_tokens=48) as engine:
        streams = [engine.submit(prompt, 40, speculation=MtpHead(tokens=4)) for prompt in prompts]
        assert [stream.result() for stream in streams] == expected
        assert streams[0].speculation.accepted_tokens > 0
