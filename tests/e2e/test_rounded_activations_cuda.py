"""W8A8 on a GPU: the model that rounds inputs to fp8 answers there as it does on the host."""

import pytest
from families import shared_checkpoint, shared_model
from parity import relative_difference

import ortolan

pytestmark = pytest.mark.cuda

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 32}
PROMPTS = [list(range(first, first + 1 + 2 * first)) for first in range(3, 43, 5)]
# Largest and median relative differences of logits. Last bits of activations decide codes, which are an eighth of a
# value apart; that grows from layer to layer, so elements of 16 bits end about as far away as rounding takes them.
# Logits of another model would differ by four times their spread.
LIMITS = {"float32": (0.3, 1e-3), "float16": (1.0, 0.6), "bfloat16": (2.0, 1.0)}


def export(dtype, group_size):
    source = shared_checkpoint("llama", **SIZES)
    options = {"weight_format": "fp8", "activation_format": "fp8", "group_size": group_size, "max_context": 256}
    options["head_format"] = "dense"  # int8 rounds its inputs on the host
    return shared_model(source, dtype=dtype, **options)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("group_size", ["channel", 128])
@pytest.mark.parametrize("dtype", LIMITS)
def test_logits_are_those_of_the_host(dtype, group_size, fused):
    host = ortolan.load(export("float32", group_size), device="cpu")
    device = ortolan.load(export(dtype, group_size), device="cuda", fused=fused)
    found = []
    for prompt in PROMPTS:
        sessions = host.session(), device.session()
        found.append(relative_difference(*(session.prefill(prompt) for session in reversed(sessions))))
        found.append(relative_difference(*(session.step(7) for session in reversed(sessions))))
    largest, median = LIMITS[dtype]
    assert sorted(found)[len(found) // 2] <= median
    assert max(found) <= largest


def test_an_engine_gives_what_a_session_gives():
    source = shared_checkpoint("llama", **SIZES)
    options = {"weight_format": "fp8", "activation_format": "fp8", "max_context": 256, "paged": True}
    model = ortolan.load(shared_model(source, dtype="float16", **options), device="cuda")
    prompts = [prompt[:20] for prompt in PROMPTS]
    alone = [list(model.session().generate(prompt, max_new_tokens=8)) for prompt in prompts]
    with ortolan.Engine(model, 4) as engine:
        streams = [engine.submit(prompt, 8) for prompt in prompts]
        together = [list(stream.result()) for stream in streams]
    # In a larger step, sums have other bits, which may decide a code.
    assert sum(one == other for one, other in zip(alone, together, strict=True)) >= len(prompts) - 1
