"""Times RingKvAppend + SwaAttention on the CPU beside ONNX Runtime's own GroupQueryAttention, in one run.

    python benchmarks/attention_cpu.py --json attention_cpu.json

Both append the step's keys and values to a float32 cache in place and attend to it. Prefill is also given as
a part of the speed of a large matrix product, decode as a part of the speed of reading memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import ortolan.custom_ops
from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters

FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
MINIMUM_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured step of one sequence: `tokens` rows after `past` cached ones."""

    tokens: int
    past: int
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    window: int = -1

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, per head."""
        counts = np.arange(self.past + 1, self.past + self.tokens + 1)
        return int((np.minimum(counts, self.window) if self.window > 0 else counts).sum())

    @property
    def flops(self) -> float:
        """Operations of the two products."""
        return 4.0 * self.heads * self.head_size * self.visible_pairs

    @property
    def cache_bytes(self) -> float:
        """Bytes of keys and values that the step must read at least once."""
        seen = self.past + self.tokens
        seen = min(seen, self.window + self.tokens - 1) if self.window > 0 else seen
        return 8.0 * self.kv_heads * self.head_size * seen


CASES = (
    *(Case(tokens=t, past=0, head_size=d) for d in (64, 128) for t in (512, 2048)),
    Case(tokens=2048, past=0, window=512),
    *(Case(tokens=1, past=p, head_size=d) for d in (64, 128) for p in (1023, 8191, 32767)),
    Case(tokens=1, past=32767, window=1024),
    Case(tokens=1, past=8191, heads=8),
)


def main() -> None:
    """Measure all cases, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="intra-op threads of both")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    limits = {
        "matmul_flops": matmul_flops(options.threads),
        "read_bytes_per_second": read_speed(options.threads),
    }
    machine = {"cpu": cpu_name(), "threads": options.threads, "onnxruntime": ort.__version__}
    print(f"{machine['cpu']}, {options.threads} threads, onnxruntime {ort.__version__}")
    matmul, read = limits["matmul_flops"] / 1e9, limits["read_bytes_per_second"] / 1e9
    print(f"matmul {matmul:.0f} GFLOP/s, read {read:.1f} GB/s")
    titles = f"{'tokens':>7} {'past':>6} {'heads':>6} {'D':>4} {'W':>5}"
    print(f"{titles} {'ours ms':>9} {'GQA ms':>9} {'speed-up':>9} of limit")
    rows = [measure(case, options.threads, limits) for case in CASES]
    if options.json:
        options.json.write_text(json.dumps({**machine, **limits, "cases": rows}, indent=2) + "\n")


def measure(case: Case, threads: int, limits: dict[str, float]) -> dict[str, float]:
    """Time both in turns and print one line of the table."""
    ours, theirs = ortolan_step(case, threads), group_query_attention_step(case, threads)
    ours_s, theirs_s = alternate(ours, theirs)
    if case.tokens > 1:
        part = case.flops / ours_s / limits["matmul_flops"]
    else:
        part = case.cache_bytes / ours_s / limits["read_bytes_per_second"]
    heads = f"{case.heads}/{case.kv_heads}"
    sizes = f"{case.tokens:>7} {case.past:>6} {heads:>6} {case.head_size:>4} {case.window:>5}"
    print(f"{sizes} {1e3 * ours_s:>9.3f} {1e3 * theirs_s:>9.3f} {theirs_s / ours_s:>9.2f} {part:>7.0%}")
    timed = {"ortolan_s": ours_s, "group_query_attention_s": theirs_s, "speed_up": theirs_s / ours_s}
    return {**asdict(case), **timed, "part_of_limit": part}


def alternate(*steps: Callable[[], None]) -> list[float]:
    """Run the steps in turns and return the median seconds of each."""
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()
    while sum(map(sum, times)) < MINIMUM_SECONDS * len(steps) or len(times[0]) < 3:
        for step, record in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            record.append(time.perf_counter() - start)
    return [statistics.median(record) for record in times]


def draw(*shape: int) -> np.ndarray:
    """Draw standard normal float32 values."""
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def caches(case: Case) -> dict[str, np.ndarray]:
    """Draw a key and a value cache [1, Hkv, C, D] with room for the step."""
    shape = (1, case.kv_heads, case.past + case.tokens, case.head_size)
    return {"key_cache": draw(*shape), "value_cache": draw(*shape)}


def ortolan_step(case: Case, threads: int) -> Callable[[], None]:
    """Prepare append and attention by Ortolan, on packed rows."""
    size = case.head_size
    feeds = {
        "query": draw(case.tokens, case.heads, size),
        "key": draw(case.tokens, case.kv_heads, size),
        "value": draw(case.tokens, case.kv_heads, size),
        **caches(case),
        "query_start": np.array([0, case.tokens], np.int32),
        "past_len": np.array([case.past], np.int32),
    }
    new = ("key_cache_out", "value_cache_out")
    append = emitters.ring_kv_append(*list(feeds)[1:], outputs=new, name="append")
    attend = emitters.swa_attention(
        "query", *new, "query_start", "past_len", outputs=("output",), name="attend", window=case.window
    )
    return bound_step([append, attend], feeds, dict(zip(new, ("key_cache", "value_cache"), strict=True)), threads)


def group_query_attention_step(case: Case, threads: int) -> Callable[[], None]:
    """Prepare ONNX Runtime's contrib operator, with one buffer for past and present."""
    size = case.head_size
    feeds = {
        "query": draw(1, case.tokens, case.heads * size),
        "key": draw(1, case.tokens, case.kv_heads * size),
        "value": draw(1, case.tokens, case.kv_heads * size),
        **caches(case),
        "seqlens_k": np.array([case.past + case.tokens - 1], np.int32),
        "total_length": np.array([case.past + case.tokens], np.int32),
    }
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        list(feeds),
        ["output", "key_cache_out", "value_cache_out"],
        domain="com.microsoft",
        num_heads=case.heads,
        kv_num_heads=case.kv_heads,
        local_window_size=case.window,
    )
    shared = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    return bound_step([node], feeds, shared, threads)


def bound_step(
    nodes: list[onnx.NodeProto], feeds: dict[str, np.ndarray], shared: dict[str, str], threads: int
) -> Callable[[], None]:
    """Open a session over float32 inputs whose `shared` outputs live in the buffers of inputs."""
    kinds = {np.dtype(np.float32): FLOAT, np.dtype(np.int32): INT32}
    inputs = [onnx.helper.make_tensor_value_info(k, kinds[v.dtype], v.shape) for k, v in feeds.items()]
    outputs = [onnx.helper.make_tensor_value_info(k, FLOAT, None) for k in ("output", *shared)]
    graph = onnx.helper.make_graph(nodes, "step", inputs, outputs)
    domains = {"": 21, OPERATOR_DOMAIN: OPERATOR_VERSION, "com.microsoft": 1}
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in domains.items()]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    ortolan.custom_ops.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {k: ort.OrtValue.ortvalue_from_numpy(v) for k, v in feeds.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, source in shared.items():
        binding.bind_ortvalue_output(name, values[source])
    output = ort.OrtValue.ortvalue_from_numpy(np.empty_like(feeds["query"]))
    binding.bind_ortvalue_output("output", output)

    def step(kept: dict[str, np.ndarray] = feeds) -> None:  # an OrtValue does not keep its array alive
        session.run_with_iobinding(binding)

    return step


def matmul_flops(threads: int) -> float:
    """Measure a 1024^3 float32 product in ONNX Runtime, operations per second."""
    size = 1024
    infos = [onnx.helper.make_tensor_value_info(k, FLOAT, [size, size]) for k in "abc"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], "m", infos[:2], infos[2:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"a": draw(size, size), "b": draw(size, size)}
    return 2.0 * size**3 / alternate(lambda: session.run(None, feeds))[0]


def read_speed(threads: int) -> float:
    """Measure summing 512 MiB of float32 in ONNX Runtime, bytes per second."""
    data = np.ones((8 * threads, (512 << 20) // 4 // (8 * threads)), np.float32)
    infos = [
        onnx.helper.make_tensor_value_info("a", FLOAT, data.shape),
        onnx.helper.make_tensor_value_info("b", FLOAT, [data.shape[0], 1]),
    ]
    axis = onnx.numpy_helper.from_array(np.array([1]), "axis")
    node = onnx.helper.make_node("ReduceSum", ["a", "axis"], ["b"])
    graph = onnx.helper.make_graph([node], "r", infos[:1], infos[1:], [axis])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return data.nbytes / alternate(lambda: session.run(None, {"a": data}))[0]


def cpu_name() -> str:
    """Return the processor's name."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
