"""Mixtures of experts where routing is special, and layers with parts of their own in sessions and engines."""

import numpy as np
import pytest
from families import shared_checkpoint, shared_model, tiny_checkpoint
from parity import decode_differences, relative_difference
from safetensors.numpy import load_file, save_file
from tolerances import LOGITS_RELATIVE, SAME_LOGITS

import ortolan
from ortolan import Engine, SnapKv

MIXTURES = (
    "gemma4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "laguna",
    "mellum",
    "mimo_v2_flash",
    "mixtral",
    "olmoe",
    "qwen3_moe",
)
LAYERS_OF_THEIR_OWN = ("cohere2", "granite_swa", "ministral3")
MAX_CONTEXT, DECODED_TOKENS = 512, 20
ROUTERS = {"granitemoe": "block_sparse_moe.router.layer.weight", "mixtral": "block_sparse_moe.gate.weight"}
ROUTER = "mlp.gate.weight"


def draw_prompt(count, seed=0):
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


def edited_checkpoint(family, folder, edit, **overrides):
    """Copy a family's checkpoint whose mixtures are edited; `edit` takes its tensors and a layer's prefix."""
    checkpoint = tiny_checkpoint(family, folder, seed=5, **overrides)
    tensors = load_file(checkpoint / "model.safetensors")
    routers = [name for name in tensors if name.endswith(ROUTERS.get(family, ROUTER))]
    assert routers
    for name in routers:
        edit(tensors, name)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def check_against_transformers(checkpoint, tmp_path, chunk_size):
    folder = ortolan.export(checkpoint, tmp_path / "model", max_context=MAX_CONTEXT, chunk_size=16)
    session = ortolan.load(folder, device="cpu").session(chunk_size=chunk_size)
    differences = decode_differences(session, checkpoint, draw_prompt(65), DECODED_TOKENS)
    assert max(differences) <= LOGITS_RELATIVE, differences


def tie_two_experts(tensors, router):
    """Let experts 1 and 2 be equal, so that it does not matter which of them a tie prefers."""
    tensors[router][2] = tensors[router][1]
    stem = router.removesuffix("gate.weight")
    for name in [name for name in tensors if name.startswith(f"{stem}experts.1.")]:
        tensors[name.replace("experts.1.", "experts.2.")] = tensors[name].copy()


def leave_one_expert_out(tensors, router):
    """Let the last expert, whose weights are NaN, lose: two pairs of logits of opposite sign, and its own is 0."""
    rows = tensors[router]
    rows[1], rows[3], rows[-1] = -rows[0], -rows[2], 0
    stem, last = router.removesuffix("gate.weight"), len(rows) - 1
    for name in [name for name in tensors if name.startswith(f"{stem}experts.{last}.")]:
        tensors[name][:] = np.nan


@pytest.mark.parametrize("chunk_size", [7, 65])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_that_tie(family, chunk_size, tmp_path):
    # A token takes one expert: where the equals are best, the tie decides.
    checkpoint = edited_checkpoint(family, tmp_path / "hf", tie_two_experts, num_experts_per_tok=1)
    check_against_transformers(checkpoint, tmp_path, chunk_size)


@pytest.mark.parametrize("chunk_size", [1, 65])
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_an_expert_that_no_token_takes(family, chunk_size, tmp_path):
    experts = {"num_local_experts" if family == "qwen3_moe" else "num_experts": 5, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        experts["num_experts"] = 5
    checkpoint = edited_checkpoint(family, tmp_path / "hf", leave_one_expert_out, **experts)
    check_against_transformers(checkpoint, tmp_path, chunk_size)


@pytest.fixture(scope="module", params=(*MIXTURES, *LAYERS_OF_THEIR_OWN))
def folders(request):
    """A family's model, and the same one with paged caches."""
    checkpoint = shared_checkpoint(request.param, seed=5, eos_token_id=None)
    options = {"max_context": MAX_CONTEXT, "chunk_size": 16, "sink": 2}
    return [shared_model(checkpoint, **options), shared_model(checkpoint, paged=True, page_size=16, **options)]


def has_full_layer(model):
    return any(layer.evictable for layer in model.manifest.layers)


def test_sessions_evict_and_are_saved_and_restored(folders, tmp_path):
    for folder in folders:
        model = ortolan.load(folder, device="cpu", num_threads=1)
        snapkv = SnapKv(budget=40, window=8, sink=2) if has_full_layer(model) else None
        session = model.session(snapkv=snapkv)
        session.prefill(draw_prompt(130))
        assert snapkv is None or max(session.physical_length(i) for i in range(4)) <= 130
        session.save(tmp_path / "session", 10**6)
        restored, fork = model.restore(tmp_path / "session"), session.fork()
        rows = [[s.prefill(draw_prompt(9, seed=1)), *(s.step(t) for t in (5, 9, 7))] for s in (session, restored, fork)]
        np.testing.assert_array_equal(rows[1], rows[0])
        np.testing.assert_array_equal(rows[2], rows[0])


def test_a_token_of_a_batch_is_that_of_a_session(folders):
    model = ortolan.load(folders[1], device="cpu", num_threads=1)
    prompts = [draw_prompt(count, seed=count) for count in (1, 15, 40, 90)]
    alone = [list(model.session().generate(prompt, 12)) for prompt in prompts]
    with Engine(model, 4, chunk_tokens=24) as engine:
        streams = [engine.submit(prompt, 12) for prompt in prompts]
        assert [stream.result() for stream in streams] == alone


def test_any_chunking_gives_the_same_logits(folders):
    model, prompt = ortolan.load(folders[0], device="cpu", num_threads=1), draw_prompt(70)
    whole = model.session(chunk_size=70).prefill(prompt)
    for chunk_size in (1, 3, 16, 33):
        assert relative_difference(model.session(chunk_size=chunk_size).prefill(prompt), whole) <= 10 * SAME_LOGITS
