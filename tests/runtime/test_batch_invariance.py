"""Models loaded with batch_invariant=True: a request's bits are the same alone, in any batch and in any chunking."""

import dataclasses

import numpy as np
import pytest
from fake_cuda import FakeCuda
from families import shared_checkpoint, shared_model

import ortolan
from ortolan import Engine, PromptLookup, Sampling, SnapKv
from ortolan.errors import ConfigError
from ortolan.runtime import load as load_alone
from ortolan.runtime.device.opening import Device
from ortolan.runtime.device.providers import CPU_PROVIDER

FAMILIES = ("llama", "gemma3", "qwen3", "gpt_oss", "laguna")
CONTEXT, NEW, CHUNK = 256, 24, 30
COUNTS = (1, 5, 16, 17, 33, 64, 70, 100, 129, 33, 70, 150)
SNAPKV = SnapKv(budget=40, window=8, sink=2)


WIDE = {"hidden_size": 128, "intermediate_size": 128}  # which groups of weights divide


def export(family, dtype="float32", *, tied=False, **options):
    sizes = WIDE | {"tie_word_embeddings": tied} if "weight_format" in options else {}
    checkpoint = shared_checkpoint(family, seed=5, num_key_value_heads=2, **sizes)
    return shared_model(checkpoint, dtype=dtype, max_context=CONTEXT, chunk_size=64, **options)


@pytest.fixture(scope="module", params=[*((name, "float32") for name in FAMILIES), ("llama", "float16")], ids="-".join)
def model(request):
    opened = ortolan.load(export(*request.param, paged=True, page_size=16), device="cpu", batch_invariant=True)
    object.__setattr__(opened.manifest, "eos_token_ids", ())  # random weights may choose them at any time
    return opened


@pytest.fixture(scope="module")
def prompts():
    """Prompts of which every other one begins as the longest does."""
    source = np.random.default_rng(1)
    longest = source.integers(3, 131, max(COUNTS)).tolist()
    return [
        longest[: count - 3] + source.integers(3, 131, min(count, 3)).tolist()
        if i % 2
        else source.integers(3, 131, count).tolist()
        for i, count in enumerate(COUNTS)
    ]


def answer(session, prompt, **options):
    """Return the tokens and log-probabilities of one request, which tell of every bit of its logits."""
    generation = session.generate(prompt, NEW, logprobs=5, **options)
    return list(generation), list(generation.logprobs)


def tight_bytes(model, sequences, pages):
    """Return the bytes of some full-attention pages, and of all the rings that sequences need."""
    plan = model.plan_engine(sequences, None, CHUNK, CONTEXT)
    return sum((pages if kind.grows else kind.num_pages) * kind.page_bytes for kind in plan.kinds)


def test_logits_are_the_same_in_any_chunking(model, prompts):
    for prompt in prompts[-4:]:
        found = set()
        for chunk_size in (None, 7, 64, len(prompt) - 1, 1):
            session = model.session(chunk_size=chunk_size)
            found.add((session.prefill(prompt).tobytes(), session.step(7).tobytes()))
        assert len(found) == 1


DRAFTS = PromptLookup(tokens=15, shortest=1)


@pytest.mark.parametrize(
    ("sequences", "chunk_tokens", "speculation"),
    [(1, 7, None), (6, CHUNK, None), (4, 64, DRAFTS)],
    ids=["small-chunks", "crowd", "drafts"],
)
def test_requests_get_what_sessions_get(model, prompts, sequences, chunk_tokens, speculation):
    alone = [answer(model.session(), prompt) for prompt in prompts]
    pages = tight_bytes(model, sequences, 13)
    with Engine(model, sequences, pages, chunk_tokens, max_context=CONTEXT, overcommit=8.0) as engine:

        def submit_all(_):
            return [engine.submit(prompt, NEW, logprobs=5, speculation=speculation) for prompt in prompts]

        for _ in range(2):
            streams = engine.worker.ask(submit_all)
            assert [(stream.result(), list(stream.logprobs)) for stream in streams] == alone
        stats = engine.stats()
    assert stats.reused_tokens or any(layer.window > 0 for layer in model.manifest.layers)
    assert stats.preemptions or sequences < 6 or speculation
    assert bool(stats.drafted_tokens) == (speculation is not None)


def test_drafts_change_no_bit(model, prompts):
    for prompt in prompts[::3]:
        assert answer(model.session(), prompt, speculation=DRAFTS) == answer(model.session(), prompt)


def test_evicted_and_sampled_requests_get_what_sessions_get(model, prompts):
    options = {"sampling": Sampling(temperature=0.8, top_p=0.9, seed=5)}
    alone = [answer(model.session(snapkv=SNAPKV), prompt, **options) for prompt in prompts]
    with Engine(model, 5, chunk_tokens=CHUNK) as engine:
        streams = [engine.submit(prompt, NEW, snapkv=SNAPKV, logprobs=5, **options) for prompt in prompts]
        assert [(stream.result(), list(stream.logprobs)) for stream in streams] == alone


def test_logits_are_those_of_the_same_model_without_it(model, prompts):
    plain = ortolan.load(model.folder, device="cpu")
    wanted, found = (each.session().prefill(prompts[-1]) for each in (plain, model))
    assert np.abs(found - wanted).max() <= (2e-4 if model.manifest.dtype == "float32" else 0.1) * np.std(wanted)


CODES = {
    "fp8": {"weight_format": "fp8"},
    "mxfp4": {"weight_format": "mxfp4", "head_format": "dense"},
    "int8-channel": {"weight_format": "int8", "group_size": "channel"},
    "int8": {"weight_format": "int8", "group_size": 32},
    "int4": {"weight_format": "int4", "group_size": 32},
    "int4-head": {"weight_format": "int4", "group_size": 64, "head_format": "int4"},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", CODES.values(), ids=CODES)
def test_codes_keep_the_bits(prompts, options, tied):
    folder = export("llama", tied=tied, **options)
    model = ortolan.load(folder, device="cpu", batch_invariant=True)
    found = {model.session(chunk_size=size).prefill(prompts[-1]).tobytes() for size in (None, 7, 64, 1)}
    assert len(found) == 1


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_caches_of_codes_keep_the_bits(prompts, cache_dtype):
    options = {"device": "cpu", "batch_invariant": True, "cache_dtype": cache_dtype}
    model = ortolan.load(export("gemma3", paged=True, page_size=16), **options)
    object.__setattr__(model.manifest, "eos_token_ids", ())
    alone = [answer(model.session(chunk_size=7), prompt) for prompt in prompts]
    with Engine(model, 4, chunk_tokens=CHUNK) as engine:
        streams = [engine.submit(prompt, NEW, logprobs=5) for prompt in prompts]
        assert [(stream.result(), list(stream.logprobs)) for stream in streams] == alone


REFUSED = {
    "gated-delta": (lambda: export("qwen3_next"), "gated delta layers.*CausalConv|gated delta layers.*GatedDeltaRule"),
    "scaled-queries": (lambda: export("ministral3"), "operator Log"),
}
REFUSED_PLAIN = {  # the first two have angles that do not fill the vectors by which ONNX Runtime computes them
    "phi3": (lambda: export("phi3"), "operator Cos"),
    "laguna": (lambda: export("laguna"), "operator Cos"),
    "int4": (lambda: export("llama", weight_format="int4", group_size=32), "few bits.*MatMulNBits.*weight_format"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_models_whose_rows_may_depend_on_each_other_are_refused(make, message):
    folder = make()
    ortolan.load(folder, device="cpu")
    with pytest.raises(ConfigError, match=rf"batch_invariant=True cannot be kept on the CPU: .*({message})"):
        ortolan.load(folder, device="cpu", batch_invariant=True)


@pytest.mark.parametrize(("make", "message"), REFUSED_PLAIN.values(), ids=REFUSED_PLAIN)
def test_plain_graphs_whose_rows_may_depend_on_each_other_are_refused(make, message):
    with pytest.raises(ConfigError, match=rf"cannot be kept on the CPU: .*{message}"):
        ortolan.load(make(), device="cpu", fused=False, batch_invariant=True)


def test_eviction_between_chunks_is_refused(model):
    with pytest.raises(ConfigError, match=r"during_prefill=True.*batch_invariant=True"):
        model.session(snapkv=dataclasses.replace(SNAPKV, during_prefill=True))


def test_pieces_that_a_chunk_would_cut_are_refused(model):
    kvzip = ortolan.Eviction(policy="kvzip", budget=40, window=8, sink=2, piece=12, lead=4)
    with pytest.raises(ConfigError, match=r"chunk_size is 15; .* pieces of 16 tokens again.*batch_invariant=True"):
        model.session(chunk_size=15, eviction=kvzip)
    assert model.plan(chunk_size=16, eviction=kvzip).spare == 16


def test_a_value_that_is_not_a_truth_is_refused():
    with pytest.raises(ConfigError, match="batch_invariant is 1"):
        ortolan.load(export("llama"), device="cpu", batch_invariant=1)


def test_the_runtime_alone_cannot_change_graphs():
    with pytest.raises(ConfigError, match=r"batch_invariant is True.*open it with ortolan\.load"):
        load_alone(export("llama"), device="cpu", batch_invariant=True)


@pytest.fixture
def on_fake_gpu(monkeypatch):
    """Let models be opened for a GPU that is not there, whose graph the CPU runs."""
    device = Device(provider=CPU_PROVIDER, cuda=FakeCuda())
    monkeypatch.setattr("ortolan.runtime.loading.find_device", lambda name, threads: device)


@pytest.mark.usefixtures("on_fake_gpu")
def test_on_a_gpu_chunks_that_some_prompt_cannot_be_cut_for_are_refused():
    folder = export("llama", paged=True, page_size=16)
    model = ortolan.load(folder, device="cuda", fused=False, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"chunk_size is 64.*at least 130"):
        model.plan(chunk_size=64)
    with pytest.raises(ConfigError, match=r"chunk_tokens is 130.*at least 134"):
        model.plan_engine(4, chunk_tokens=130)
    assert model.plan(chunk_size=130).cuts.by_family
    assert model.plan(max_context=60, chunk_size=60).chunk_size == 60
    assert not ortolan.load(folder, device="cuda", fused=False).plan(chunk_size=64).cuts.by_family


@pytest.mark.usefixtures("on_fake_gpu")
@pytest.mark.parametrize(("family", "message"), [("gpt_oss", "experts"), ("qwen3_5", "gated delta layers")])
def test_on_a_gpu_experts_and_gated_delta_layers_are_refused(family, message):
    with pytest.raises(ConfigError, match=rf"cannot be kept on CUDA: this model has {message}"):
        ortolan.load(export(family), device="cuda", batch_invariant=True)


@pytest.mark.usefixtures("on_fake_gpu")
def test_on_a_gpu_models_that_rotate_keys_anew_are_refused():
    checkpoint = shared_checkpoint("phi3", seed=5, original_max_position_embeddings=64)
    with pytest.raises(ConfigError, match=r"past 64 tokens this model rotates all keys anew"):
        ortolan.load(shared_model(checkpoint, max_context=128), device="cuda", batch_invariant=True)
