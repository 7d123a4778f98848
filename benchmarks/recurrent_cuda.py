"""Times GatedDeltaRule and CausalConv on a GPU beside the memory bus and flash-linear-attention, in one run.

    python benchmarks/recurrent_cuda.py --json recurrent_cuda.json

Decode reads and writes the states of all sequences: its limit is a device-to-device copy of as many bytes. Prefill
runs beside `chunk_gated_delta_rule` of the package flash-linear-attention, where it is installed, on the same inputs;
the line says how far the two outputs differ. All of it runs in CUDA graphs, by turns with its peer; decode over
rotating states that do not fit into the L2 cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from cuda_timing import L2_BYTES, DeviceSession, begin, captured, copy_ms, medians_by_turns

from ortolan.custom_ops import emitters

KEY_HEADS, VALUE_HEADS, SIZE, FEATURES, TAPS = 16, 32, 128, 8192, 4
CONV_CALLS = 16  # of convolutions in a graph, which share its launch
STATES = ("state", "recent_keys", "recent_updates", "recent_decays", "state_len")
Tensors = dict[str, torch.Tensor]


def draw_tokens(tokens: int) -> Tensors:
    """Draw the inputs of so many tokens, of a published model's sizes."""

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, SIZE, device="cuda", dtype=torch.bfloat16)

    return {
        "query": draw(KEY_HEADS),
        "key": draw(KEY_HEADS),
        "value": draw(VALUE_HEADS),
        "decay": -torch.empty(tokens, VALUE_HEADS, device="cuda").exponential_(10),
        "beta": torch.rand(tokens, VALUE_HEADS, device="cuda"),
    }


def make_states(sequences: int, past: int, recent: int) -> Tensors:
    """Return zero states, so far behind `past` that a step makes room for its token."""
    shapes = {
        "state": (VALUE_HEADS, SIZE, SIZE),
        "recent_keys": (recent, KEY_HEADS, SIZE),
        "recent_updates": (recent, VALUE_HEADS, SIZE),
        "recent_decays": (recent, VALUE_HEADS),
    }
    states = {name: torch.zeros(sequences, *shape, device="cuda") for name, shape in shapes.items()}
    return states | {"state_len": torch.full((sequences,), max(0, past - recent), device="cuda", dtype=torch.int32)}


def packing(tokens: int, sequences: int, past: int) -> Tensors:
    """Return row boundaries and past lengths of equal sequences."""
    return {
        "query_start": torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * tokens,
        "past_len": torch.full((sequences,), past, device="cuda", dtype=torch.int32),
    }


def delta_session(inputs: Tensors, output: torch.Tensor) -> DeviceSession:
    """Open a session of one GatedDeltaRule, states in place."""
    names = ("output", *(f"{name}_out" for name in STATES))
    node = emitters.gated_delta_rule(**{name: name for name in inputs}, outputs=names, name="delta")
    outputs = {"output": output} | {f"{name}_out": inputs[name] for name in STATES}
    return DeviceSession([node], inputs, outputs)


def time_decode(sequences: int, recent: int) -> dict[str, float]:
    """Time a token of each sequence, whose oldest kept update goes to the state each time."""
    state_bytes = sequences * VALUE_HEADS * SIZE * SIZE * 4
    copies = 2 + L2_BYTES // state_bytes
    steps: list[tuple[torch.Tensor, DeviceSession]] = []
    for _ in range(copies):
        tokens, states = draw_tokens(sequences), make_states(sequences, 100, recent)
        inputs = tokens | states | packing(1, sequences, 100)
        steps.append((states["state_len"], delta_session(inputs, torch.empty_like(tokens["value"]))))

    def reset() -> None:
        for state_len, _ in steps:
            state_len.fill_(100 - recent)

    def run() -> None:
        for state_len, step in steps:
            state_len.fill_(100 - recent)
            step()

    found = medians_by_turns({"run": (captured(run), copies), "reset": (captured(reset), copies)})
    took, limit = found["run"] - found["reset"], copy_ms(2 * state_bytes)
    print(
        f"decode {sequences:3} sequences, R {recent:2}: {1e3 * took:7.1f} us, copy {1e3 * limit:6.1f} us, "
        f"{limit / took:.2f} of it"
    )
    return {"sequences": sequences, "recent": recent, "us": 1e3 * took, "copy_us": 1e3 * limit}


def peer_prefill(tokens: Tensors, sequences: int) -> Callable[[], torch.Tensor] | None:
    """Return flash-linear-attention's prefill of the same tokens, if the package is here."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    query, key, value, decay, beta = (tensor.unflatten(0, (sequences, -1)) for tensor in tokens.values())
    state = torch.zeros(sequences, VALUE_HEADS, SIZE, SIZE, device="cuda")
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}

    @torch.no_grad()
    def run() -> torch.Tensor:
        output: torch.Tensor = chunk_gated_delta_rule(query, key, value, decay, beta.bfloat16(), **options)[0]
        return output.flatten(0, 1)

    return run


def time_prefill(sequences: int, length: int) -> dict[str, float]:
    """Time whole fresh prompts."""
    tokens = draw_tokens(sequences * length)
    output = torch.empty_like(tokens["value"])
    ours = delta_session(tokens | make_states(sequences, 0, 16) | packing(length, sequences, 0), output)
    ours()
    peer = peer_prefill(tokens, sequences)
    steps: dict[str, tuple[Callable[[], object], int]] = {"ours": (captured(ours), 1)}
    line = ""
    if peer:
        expected = peer()
        difference = ((output.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
        steps["peer"] = (captured(peer), 1)
        line = f", outputs differ by {difference:.1e} of the largest"
    found = medians_by_turns(steps)
    beside = ", no peer here"
    if peer:
        ratio = found["peer"] / found["ours"]
        beside = f", flash-linear-attention {1e3 * found['peer']:.0f} us, ratio {ratio:.2f}{line}"
    print(f"prefill {sequences} x {length:5}: {1e3 * found['ours']:7.0f} us{beside}")
    return {"sequences": sequences, "length": length} | {f"{name}_us": 1e3 * ms for name, ms in found.items()}


def time_conv(tokens: int, sequences: int) -> dict[str, float]:
    """Time the convolution of `tokens` of each sequence."""
    x = torch.randn(tokens * sequences, FEATURES, device="cuda", dtype=torch.bfloat16)
    sessions = []
    for _ in range(CONV_CALLS):
        inputs = {
            "x": x,
            "weight": torch.randn(FEATURES, TAPS, device="cuda", dtype=torch.bfloat16),
            "conv_state": torch.zeros(sequences, TAPS + 15, FEATURES, device="cuda", dtype=torch.bfloat16),
            **packing(tokens, sequences, 100),
        }
        node = emitters.causal_conv(**{name: name for name in inputs}, outputs=("y", "conv_state_out"), name="conv")
        outputs = {"y": torch.empty_like(x), "conv_state_out": inputs["conv_state"]}
        sessions.append(DeviceSession([node], inputs, outputs))

    def run() -> None:
        for session in sessions:
            session()

    took = medians_by_turns({"ours": (captured(run), CONV_CALLS)})["ours"]
    limit = copy_ms(2 * x.nbytes)
    print(f"convolution {sequences} x {tokens}: {1e3 * took:.1f} us, copy {1e3 * limit:.1f} us")
    return {"sequences": sequences, "tokens": tokens, "us": 1e3 * took, "copy_us": 1e3 * limit}


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    where, _ = begin("bfloat16")
    results = {
        "machine": where,
        "decode": [time_decode(sequences, recent) for recent in (16, 4) for sequences in (1, 4, 16, 64)],
        "prefill": [time_prefill(*shape) for shape in ((1, 2048), (1, 8192), (4, 2048), (1, 32768))],
        "convolution": [time_conv(tokens, sequences) for tokens, sequences in ((1, 1), (1, 16), (8192, 1))],
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
