"""Runs small cases of every operator on a GPU once, without tests around them, for compute-sanitizer.

compute-sanitizer --tool memcheck python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py cuda-float16

Names of targets, after the script's, choose element types. Of cuBLAS's kernels (nvjet_*) racecheck reports places that
are not ours; `--racecheck-report analysis` tells the kernels apart. It also reports what two barriers of a whole block
keep apart, if some of the block's warps meet at one of their own in between, as in decode.cuh; a kernel of nothing but
such barriers shows the same. synccheck stops where clusters send sums to each other's shared memory, as it tracks too
few barriers.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import devices
import numpy as np
from attention_cases import Shape, attention_feeds, run_attention
from fused_cases import (
    LinearCase,
    QkvCase,
    linear_feeds,
    linear_outputs,
    narrow_outputs,
    norm_rope_feeds,
    qkv_feeds,
    qkv_outputs,
    run_fused,
)
from harness import empty_caches, random_batch, run_in_place, run_op
from joint_cases import JointCase, joint_feeds, run_joint


def attention() -> None:
    """Decode and prefill, with every feature of a mask, over contiguous, ring and paged caches."""
    for head_size in (64, 80, 128, 256):
        for tokens in ([1, 3], [40, 1], [130], [1]):
            past = [70, 5][: len(tokens)] if tokens != [1] else [600]
            sizes = {"tokens": tokens, "past": past, "head_size": head_size}
            for shape in (
                Shape(**sizes),
                Shape(**sizes, window=20, sink=3, sink_logits=True, options={"softcap": 5.0}),
                Shape(**sizes, window=50, capacity=256, page_slots=16),
            ):
                run_attention(shape, attention_feeds(shape))


def copies() -> None:
    """Appends past a wrap, captures of long chunks, and compaction over itself."""
    rng = np.random.default_rng(0)
    batch = random_batch(rng, [100, 7], [3, 61])
    caches = dict(zip(("key_cache", "value_cache"), empty_caches(2, 2, 32, 16), strict=True))
    lengths = {"query_start": batch.query_start, "past_len": batch.past_len}
    run_in_place("RingKvAppend", {"key": batch.key, "value": batch.value, **caches, **lengths}, sink=5)
    capture = np.zeros((2, 8, 4, 16), devices.element())
    run_in_place("SnapKvCapture", {"query": batch.query, "capture": capture, **lengths})
    full = {name: rng.standard_normal((2, 2, 300, 64)).astype(devices.element()) for name in caches}
    keep = np.sort(rng.permuted(np.tile(np.arange(300, dtype=np.int32), (2, 2, 1)), axis=2)[..., :150], axis=2)
    run_in_place("KvCompact", {**full, "keep": keep})
    for kv_heads, slots in ((1, 20_000), (7, 2_000)):
        full = {name: rng.standard_normal((1, kv_heads, slots, 64)).astype(devices.element()) for name in caches}
        run_in_place("KvCompact", {**full, "keep": np.arange(1, slots, dtype=np.int32)[None, None]})


def products() -> None:
    """One, two and more tokens times gated and plain weights, with rows of several lengths, and a given factor."""
    plain, opened = LinearCase(norm=True, residual=True), LinearCase(activation="gelu_tanh_mul", factor=True)
    for size, outputs in ((64, 300), (2048, 300), (2056, 40)):
        for case in (plain, LinearCase(norm=True, bias=True, activation="silu_mul"), opened):
            for tokens in (1, 2, 5):
                feeds = linear_feeds(case, tokens, size, outputs)
                run_fused("FusedLinear", feeds, linear_outputs(case, feeds), **case.attributes)


def heads() -> None:
    """Norms, RoPE, appends and captures from a joint projection, in chunks and past a wrap."""
    for size in (16, 64, 128, 256):
        options = {"size": size, "pairs": size // 2, "norms": ("query", "key"), "slots": 32, "capture_rows": 8}
        case = QkvCase(tokens=(40, 0, 3), past=(0, 5, 30), sink=2, **options)
        feeds = qkv_feeds(case)
        run_fused("QkvRopeAppend", feeds, qkv_outputs(case, feeds), **case.attributes)
        heads = norm_rope_feeds(case, feeds)
        run_fused("NormRope", heads, {"rotated": (heads["heads"].shape, devices.element())}, epsilon=1e-6)


def joint_attention() -> None:
    """Attention from a joint projection: one token, chunks and batches, past a wrap, captured, coded and paged."""
    for size in (64, 80, 128, 256):
        options = {"size": size, "pairs": size // 2, "norms": ("query", "key"), "capture_rows": 8}
        ring = JointCase(past=(700,), window=50, sink=3, slots=200, sink_logits=True, softcap=5.0, **options)
        for case in (
            JointCase(past=(600,), slots=640, heads=16, **options),
            JointCase(past=(600,), slots=640, heads=16, page_slots=16, **options),
            ring,
            dataclasses.replace(ring, code=np.dtype(np.int8)),
            dataclasses.replace(ring, tokens=(40, 0, 3), past=(0, 5, 300), page_slots=16),
        ):
            run_joint(case, joint_feeds(case))


def gathered_rows() -> None:
    """Rows in pieces of 16 bytes and of 2, and indices outside them."""
    for size in (64, 7):
        rows = np.ones((9, size), devices.element())
        feeds = {"rows": rows, "row_indices": np.array([8, 0, -1, 9, 2**40], np.int64)}
        run_fused("GatherRows", feeds, {"output": ((5, size), devices.element())})


def narrowed_steps() -> None:
    """More wanted rows than a block has threads, and one."""
    for starts, indices in (([0, 150, 300], np.arange(100, 300)), ([0, 1], np.zeros(1, np.int64))):
        feeds = {
            "query_start": np.array(starts, np.int32),
            "past_len": np.zeros((len(starts) - 1, 3), np.int32),
            "row_indices": indices,
            "positions": np.arange(starts[-1]),
        }
        run_fused("NarrowStep", feeds, narrow_outputs(feeds))


def scores() -> None:
    """Scores of lengths around the window."""
    rng = np.random.default_rng(0)
    for size in (64, 128):
        feeds = {
            "capture": rng.standard_normal((2, 32, 4, size)).astype(devices.element()),
            "key_cache": rng.standard_normal((2, 2, 300, size)).astype(devices.element()),
            "kv_len": np.array([300, 20], np.int32),
        }
        run_op("SnapKvScore", feeds)


def selections() -> None:
    """Selections of lists that registers hold, and of one that they do not."""
    rng = np.random.default_rng(0)
    for slots in (300, 9000, 40000):
        numbers = {"budget": slots // 3, "window": 8, "sink": 2}
        feeds = {
            "score": np.round(rng.random((1, 2, slots)), 3).astype(np.float32),
            "kv_len": np.array([[slots, slots // 2]], np.int32),
        }
        run_op("KvSelect", feeds | {name: np.array([value], np.int64) for name, value in numbers.items()})


def main() -> None:
    """Run everything for every element type, or for those that are named."""
    if problem := devices.cuda_problem():
        raise SystemExit(f"no CUDA here: {problem}")
    known = [name for name, target in devices.TARGETS.items() if target.device == "cuda"]
    if unknown := set(sys.argv[1:]) - set(known):
        raise SystemExit(f"no targets: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name, target in devices.TARGETS.items():
        if name in (sys.argv[1:] or known):
            with devices.using(target):
                attention()
                copies()
                products()
                heads()
                joint_attention()
                gathered_rows()
                narrowed_steps()
                scores()
                selections()
            print(name, flush=True)


if __name__ == "__main__":
    main()
