"""Times the copying operators and SnapKvScore on a GPU against device copies, large and of equal size, in one run.

    python benchmarks/copies_cuda.py --json copies_cuda.json

Bytes are those that a case must move: each row read once and written once; for scores each key read once. Results are
compared with PyTorch on fresh random inputs before they are timed; rotated buffers do not fit into the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from cuda_timing import L2_BYTES, DeviceSession, begin, copy_ms, median_ms

from ortolan.custom_ops import emitters

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """One call of an operator: its inputs, how its node is made, and what it must do."""

    title: str
    inputs: Tensors
    aliases: dict[str, str]  # output: the input whose buffer it continues
    outputs: Tensors  # outputs with buffers of their own
    emit: Callable[..., onnx.NodeProto]
    moved_bytes: int
    check: Callable[[Tensors, Tensors], bool]  # inputs and outputs after a run


def main() -> None:
    """Measure all cases, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    where, copy = begin("bfloat16")
    cases = [
        *(lambda n=n: append(n) for n in (1, 2048, 8192, 32768)),
        *(lambda n=n: capture(n) for n in (1, 2048)),
        *(lambda n=n, k=k: compact(n, k) for n, k in ((16384, 2048), (32768, 2048), (32768, 16384))),
        *(lambda n=n: score(n) for n in (16384, 32768, 131072)),
    ]
    rows = [measure(make, copy) for make in cases]
    if options.json:
        options.json.write_text(json.dumps({**where, "cases": rows}, indent=2) + "\n")


def measure(make: Callable[[], Work], copy: float) -> dict[str, float | str]:
    """Check one case, time it over rotating inputs, and print its line."""
    works = [make()]
    works += [make() for _ in range(min(40, 3 * L2_BYTES // max(works[0].moved_bytes, 1)))]
    first = works[0]
    clean = {name: tensor.clone() for name, tensor in first.inputs.items()}
    once = session([first])
    once()
    torch.cuda.synchronize()
    results = first.outputs | {out: first.inputs[name] for out, name in first.aliases.items()}
    if not first.check(clean, results):
        raise SystemExit(f"{first.title}: the result is wrong")
    ms = median_ms(session(works, graph=True), len(works))
    part = first.moved_bytes / (1e-3 * ms) / copy
    equal_ms = copy_ms(first.moved_bytes)
    print(
        f"{first.title:<44} {1e3 * ms:>8.1f} us  {first.moved_bytes / ms / 1e9:>6.2f} TB/s  {part:>5.0%} of a big copy"
        f"  {equal_ms / ms:>5.0%} of one of the same size"
    )
    result = {"title": first.title, "us": 1e3 * ms, "bytes": first.moved_bytes}
    return result | {"part_of_copy": part, "part_of_equal_copy": equal_ms / ms}


def session(works: list[Work], graph: bool = False) -> DeviceSession:
    """Run several calls in turn in one session."""
    nodes: list[onnx.NodeProto] = []
    inputs: Tensors = {}
    outputs: Tensors = {}
    for index, work in enumerate(works):
        names = {port: f"{port}.{index}" for port in work.inputs}
        results = {port: f"{port}.{index}" for port in (*work.aliases, *work.outputs)}
        nodes.append(work.emit(**names, outputs=tuple(results.values()), name=f"call.{index}"))
        inputs |= {names[port]: tensor for port, tensor in work.inputs.items()}
        outputs |= {results[port]: work.inputs[source] for port, source in work.aliases.items()}
        outputs |= {results[port]: tensor for port, tensor in work.outputs.items()}
    return DeviceSession(nodes, inputs, outputs, graph=graph)


def draw(*shape: int) -> torch.Tensor:
    """Draw bfloat16 values on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def ints(*values: int) -> torch.Tensor:
    """Make an int32 vector on the GPU."""
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def append(tokens: int) -> Work:
    """RingKvAppend of one chunk after 100 tokens."""
    inputs = {
        "key": draw(tokens, KV_HEADS, HEAD_SIZE),
        "value": draw(tokens, KV_HEADS, HEAD_SIZE),
        "key_cache": draw(1, KV_HEADS, tokens + 100, HEAD_SIZE),
        "value_cache": draw(1, KV_HEADS, tokens + 100, HEAD_SIZE),
        "query_start": ints(0, tokens),
        "past_len": ints(100),
    }

    def check(before: Tensors, after: Tensors) -> bool:
        return all(
            torch.equal(after[f"{name}_cache_out"][0, :, 100:], before[name].transpose(0, 1))
            and torch.equal(after[f"{name}_cache_out"][0, :, :100], before[f"{name}_cache"][0, :, :100])
            for name in ("key", "value")
        )

    aliases = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    moved = 2 * 2 * inputs["key"].nbytes
    return Work(f"RingKvAppend, {tokens} tokens", inputs, aliases, {}, emitters.ring_kv_append, moved, check)


def capture(tokens: int) -> Work:
    """SnapKvCapture of the last 64 queries."""
    inputs = {
        "query": draw(tokens, HEADS, HEAD_SIZE),
        "capture": draw(1, 64, HEADS, HEAD_SIZE),
        "query_start": ints(0, tokens),
        "past_len": ints(64),
    }

    def check(before: Tensors, after: Tensors) -> bool:
        expected = before["capture"].clone()
        for token in range(max(0, tokens - 64), tokens):
            expected[0, (64 + token) % 64] = before["query"][token]
        return torch.equal(after["capture_out"], expected)

    moved = 2 * 2 * min(tokens, 64) * HEADS * HEAD_SIZE
    emit = emitters.snap_kv_capture
    return Work(f"SnapKvCapture, {tokens} tokens", inputs, {"capture_out": "capture"}, {}, emit, moved, check)


def compact(length: int, kept: int) -> Work:
    """KvCompact to a random choice of positions per kv head."""
    rows = torch.stack([torch.randperm(length, device="cuda")[:kept].sort().values for _ in range(KV_HEADS)])
    inputs = {
        "key_cache": draw(1, KV_HEADS, length, HEAD_SIZE),
        "value_cache": draw(1, KV_HEADS, length, HEAD_SIZE),
        "keep": rows[None].to(torch.int32),
    }

    def check(before: Tensors, after: Tensors) -> bool:
        index = rows[None, :, :, None].expand(-1, -1, -1, HEAD_SIZE)
        return all(
            torch.equal(after[f"{name}_out"][:, :, :kept], before[name].gather(2, index))
            and torch.equal(after[f"{name}_out"][:, :, kept:], before[name][:, :, kept:])
            for name in ("key_cache", "value_cache")
        )

    aliases = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    moved = 2 * 2 * 2 * KV_HEADS * HEAD_SIZE * kept
    return Work(f"KvCompact, {length} to {kept}", inputs, aliases, {}, emitters.kv_compact, moved, check)


def score(length: int) -> Work:
    """SnapKvScore of 64 captured queries."""
    rows = 64
    inputs = {
        "capture": draw(1, rows, HEADS, HEAD_SIZE),
        "key_cache": draw(1, KV_HEADS, length, HEAD_SIZE),
        "kv_len": ints(length),
    }
    outputs = {"score": torch.full((1, KV_HEADS, length), math.nan, device="cuda")}

    def check(before: Tensors, after: Tensors) -> bool:
        positions = torch.arange(length - rows, length, device="cuda")
        queries = before["capture"][0, positions % rows].float().view(rows, KV_HEADS, -1, HEAD_SIZE)
        hidden = torch.arange(length, device="cuda")[None] > positions[:, None]
        scores = torch.zeros(KV_HEADS, length, device="cuda")
        for head in range(KV_HEADS):
            logits = torch.einsum("ngd,kd->gnk", queries[:, head], before["key_cache"][0, head].float())
            logits = (logits / math.sqrt(HEAD_SIZE)).masked_fill(hidden, -math.inf)
            scores[head] = logits.softmax(-1).mean(1).mean(0)
        scores[:, length - rows :] = 0
        return bool(torch.allclose(after["score"][0], scores, rtol=1e-2, atol=1e-7))

    moved = 2 * KV_HEADS * HEAD_SIZE * length
    return Work(f"SnapKvScore, {length} keys", inputs, {}, outputs, emitters.snap_kv_score, moved, check)


if __name__ == "__main__":
    main()
