"""Times MoeGate + LowBitExperts on the CPU beside ONNX Runtime's own QMoE, in one run.

    python benchmarks/experts_cpu.py --json experts_cpu.json

Both take float32 rows and the same int4 or int8 codes. QMoE has no mxfp4 on the CPU; there the table gives
Ortolan's alone. Few tokens are also given as a part of the speed of reading memory.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from attention_cpu import alternate, cpu_name, draw, read_speed

import ortolan.custom_ops
from ortolan.contract import OPERATOR_DOMAIN, OPERATOR_VERSION
from ortolan.custom_ops import emitters

FLOAT = onnx.TensorProto.FLOAT
GROUP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured step over the experts of one layer."""

    model: str
    tokens: int
    format: str
    hidden: int
    inner: int
    experts: int
    top_k: int

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.format == "int8" else 4

    @property
    def chosen_bytes(self) -> float:
        """Bytes of codes and scales of the experts that the step reads, if its tokens choose different ones."""
        scale = 1 / GROUP_SIZE if self.format == "mxfp4" else 4 / GROUP_SIZE
        count = min(self.tokens * self.top_k, self.experts)
        return count * 3.0 * self.hidden * self.inner * (self.bits / 8 + scale)


SIZES = {
    "gpt-oss-20b": {"hidden": 2880, "inner": 2880, "experts": 32, "top_k": 4},
    "qwen3-30b-a3b": {"hidden": 2048, "inner": 768, "experts": 128, "top_k": 8},
}
TOKENS = (1, 4, 32, 256)
CASES = tuple(
    Case(model=model, tokens=tokens, format=kind, **sizes)
    for model, sizes in SIZES.items()
    for kind in ("int4", "int8", "mxfp4")
    for tokens in TOKENS
)


def main() -> None:
    """Measure all cases, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="intra-op threads of both")
    parser.add_argument("--model", choices=sorted(SIZES), help="measure one alone")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    read = read_speed(options.threads)
    machine = {"cpu": cpu_name(), "threads": options.threads, "onnxruntime": ort.__version__}
    print(f"{machine['cpu']}, {options.threads} threads, onnxruntime {ort.__version__}, read {read / 1e9:.1f} GB/s")
    print(f"{'model':>14} {'format':>6} {'tokens':>6} {'ours ms':>9} {'QMoE ms':>9} {'speed-up':>8} of bus")
    rows = [measure(case, options.threads, read) for case in CASES if options.model in (None, case.model)]
    if options.json:
        options.json.write_text(json.dumps({**machine, "read_bytes_per_second": read, "cases": rows}, indent=2) + "\n")


def measure(case: Case, threads: int, read: float) -> dict[str, object]:
    """Time both in turns and print one line of the table."""
    weights = draw_weights(case)
    steps = [ortolan_step(case, weights, threads)]
    if case.format != "mxfp4":
        steps.append(qmoe_step(case, weights, threads))
    ours, *others = alternate(*steps)
    theirs = others[0] if others else None
    part = case.chosen_bytes / ours / read
    peer = f"{1e3 * theirs:>9.2f} {theirs / ours:>8.2f}" if theirs else f"{'-':>9} {'-':>8}"
    print(f"{case.model:>14} {case.format:>6} {case.tokens:>6} {1e3 * ours:>9.2f} {peer} {part:>6.0%}", flush=True)
    return {**asdict(case), "ortolan_s": ours, "qmoe_s": theirs, "part_of_reading": part}


def draw_weights(case: Case) -> dict[str, np.ndarray]:
    """Draw codes and scales of both weights, by the names of LowBitExperts's ports."""
    rng = np.random.default_rng(0)
    found = {}
    for name, rows, columns in (("gate_up", 2 * case.inner, case.hidden), ("down", case.hidden, case.inner)):
        some = rng.integers(0, 256, 2**20 + 7, np.uint8)
        found[f"{name}_codes"] = np.resize(some, (case.experts, rows, columns * case.bits // 8))
        groups = (case.experts, rows, columns // GROUP_SIZE)
        if case.format == "mxfp4":
            found[f"{name}_scale_codes"] = np.resize(rng.integers(116, 122, 4099, np.uint8), groups)
        else:
            scales = rng.random(4099, dtype=np.float32) * np.float32(columns**-0.5 / 2 ** (case.bits - 2))
            found[f"{name}_scales"] = np.resize(scales, groups)
    return found


def ortolan_step(case: Case, weights: dict[str, np.ndarray], threads: int) -> Callable[[], None]:
    """Prepare MoeGate and LowBitExperts."""
    inputs = {"x": "rows", "experts": "experts", "weights": "shares", **{name: name for name in weights}}
    nodes = [
        emitters.moe_gate("router_logits", name="gate", outputs=("experts", "shares"), top_k=case.top_k, normalise=1),
        emitters.low_bit_experts(**inputs, name="experts", outputs=("y",), format=case.format, group_size=GROUP_SIZE),
    ]
    return prepare(case, nodes, weights, threads)


def qmoe_step(case: Case, weights: dict[str, np.ndarray], threads: int) -> Callable[[], None]:
    """Prepare QMoE; it takes gate and factor in alternate rows, which changes nothing of what it has to do."""
    names = ["gate_up_codes", "gate_up_scales", "", "down_codes", "down_scales", ""]
    node = onnx.helper.make_node(
        "QMoE",
        ["rows", "router_logits", *names],
        ["y"],
        domain="com.microsoft",
        k=case.top_k,
        activation_type="swiglu",
        swiglu_fusion=1,
        normalize_routing_weights=1,
        expert_weight_bits=case.bits,
        block_size=GROUP_SIZE,
    )
    return prepare(case, [node], weights, threads)


def prepare(
    case: Case, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], threads: int
) -> Callable[[], None]:
    """Make a session of the nodes, over weights in a file as models have them; returns one step."""
    feeds = {"rows": draw(case.tokens, case.hidden), "router_logits": draw(case.tokens, case.experts)}
    inputs = [onnx.helper.make_tensor_value_info(name, FLOAT, values.shape) for name, values in feeds.items()]
    output = onnx.helper.make_tensor_value_info("y", FLOAT, feeds["rows"].shape)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    ortolan.custom_ops.register(options)
    with tempfile.TemporaryDirectory() as folder:
        tensors = write_weights(Path(folder), weights)
        graph = onnx.helper.make_graph(nodes, "experts", inputs, [output], tensors)
        opsets = [("", 21), ("com.microsoft", 1), (OPERATOR_DOMAIN, OPERATOR_VERSION)]
        imports = [onnx.helper.make_opsetid(*opset) for opset in opsets]
        path = Path(folder) / "model.onnx"
        path.write_bytes(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString())
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def write_weights(folder: Path, weights: dict[str, np.ndarray]) -> list[onnx.TensorProto]:
    """Write each tensor to a file; returns initializers that name the files."""
    types = {np.dtype(np.uint8): onnx.TensorProto.UINT8, np.dtype(np.float32): FLOAT}
    tensors = []
    for name, values in weights.items():
        values.tofile(folder / name)
        tensor = onnx.TensorProto(name=name, data_type=types[values.dtype], dims=values.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=name)
        tensors.append(tensor)
    return tensors


if __name__ == "__main__":
    main()
