"""Times LowBitLinear on a GPU: few rows against a device copy of the same bytes, many beside FusedLinear, in one run.

    python benchmarks/low_bit_cuda.py --json low_bit_cuda.json

Few rows read every code and scale once: their figures are packed bytes over time, and the share of a copy's bandwidth.
Each case rotates among weights that do not fit into the L2 cache, in a CUDA graph whose calls follow one another as in
a model. Many rows take turns with FusedLinear over a bfloat16 weight of the same shape. The first result of each case
is compared with float64 of the dequantised values.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from cuda_timing import L2_BYTES, DeviceSession, begin, median_ms, medians_by_turns

from ortolan.custom_ops import emitters
from ortolan.custom_ops.low_bit_reference import dequantize, round_inputs

FEW_ROWS = (1, 4, 16)
MANY_ROWS = 2048
MOST_ERROR = 2.0**-7  # of the largest value: weights and results rounded to bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A weight [outputs, inputs]."""

    format: str
    group_size: int
    inputs: int
    outputs: int
    scale_rows: int = 1
    input_format: str = "none"

    @property
    def weight_attributes(self) -> dict[str, object]:
        """What codes mean."""
        return {"format": self.format, "group_size": self.group_size, "scale_rows": self.scale_rows}

    @property
    def attributes(self) -> dict[str, object]:
        """The node's."""
        return {**self.weight_attributes, "input_format": self.input_format}

    @property
    def title(self) -> str:
        """The line's first columns."""
        inputs = "x" if self.input_format == "none" else f"{self.input_format} x"
        group = self.group_size or self.inputs
        return f"{inputs:>5} {self.format:>5}, groups of {group:>5} {self.inputs:>6} x {self.outputs:<7}"


CASES = (
    Case(format="int4", group_size=128, inputs=4096, outputs=4096),
    Case(format="int4", group_size=128, inputs=4096, outputs=8192),
    Case(format="int4", group_size=128, inputs=4096, outputs=16384),
    Case(format="int4", group_size=128, inputs=4096, outputs=24576),
    Case(format="int4", group_size=32, inputs=4096, outputs=16384),
    Case(format="int8", group_size=128, inputs=4096, outputs=8192),
    Case(format="int8", group_size=0, inputs=2048, outputs=128256),
    Case(format="fp8", group_size=0, inputs=4096, outputs=8192),
    Case(format="fp8", group_size=0, inputs=4096, outputs=6144, input_format="fp8"),
    Case(format="fp8", group_size=0, inputs=12288, outputs=4096, input_format="fp8"),
    Case(format="fp8", group_size=0, inputs=8192, outputs=2048, input_format="fp8"),
    Case(format="fp8", group_size=128, scale_rows=128, inputs=4096, outputs=6144, input_format="fp8"),
    Case(format="fp8", group_size=128, scale_rows=128, inputs=12288, outputs=4096, input_format="fp8"),
    Case(format="mxfp4", group_size=32, inputs=4096, outputs=16384),
    Case(format="nvfp4", group_size=16, inputs=4096, outputs=16384),
)


def main() -> None:
    """Measure all cases, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    where, copy = begin("bfloat16, K x N")
    rows = [measure(case, copy) for case in CASES]
    if options.json:
        options.json.write_text(json.dumps({**where, "cases": rows}, indent=2) + "\n")


def draw_weight(case: Case) -> dict[str, torch.Tensor]:
    """Draw the tensors of a weight by the names of LowBitLinear's inputs."""
    bits = 8 if case.format in ("int8", "fp8") else 4
    groups = case.inputs // (case.group_size or case.inputs)

    def codes(*shape: int, below: int = 256) -> torch.Tensor:
        return torch.randint(0, below, shape, device="cuda", dtype=torch.uint8)

    def scales(columns: int) -> torch.Tensor:
        rows = -(-case.outputs // case.scale_rows)
        return torch.rand(rows, columns, device="cuda").add_(0.5).div_(2.0 ** (bits - 1) * case.inputs**0.5)

    if case.format == "fp8":
        return {"codes": codes(case.outputs, case.inputs, below=0x7F), "float_scales": scales(groups)}
    weight = {"codes": codes(case.outputs, case.inputs * bits // 8)}
    if case.format in ("int4", "int8"):
        return {**weight, "scales": scales(groups).bfloat16()}
    if case.format == "mxfp4":
        return {**weight, "scale_codes": codes(case.outputs, groups, below=6) + 117}
    return {**weight, "scale_codes": codes(case.outputs, groups, below=0x70), "float_scales": scales(1)}


def measure(case: Case, copy: float) -> dict[str, object]:
    """Check and time one case; prints one line."""
    weights = [draw_weight(case)]
    weight_bytes = sum(tensor.nbytes for tensor in weights[0].values())
    weights += [draw_weight(case) for _ in range(max(3, -(-3 * L2_BYTES // weight_bytes)))]
    times = {tokens: time_few(case, weights, tokens) for tokens in FEW_ROWS}
    many = time_many(case, weights[0])
    share = {tokens: weight_bytes / (1e-3 * ms) / copy for tokens, ms in times.items()}
    few = ", ".join(
        f"{tokens} {1e3 * ms:.1f} us ({share[tokens]:.0%}, x{ms / times[1]:.2f})" for tokens, ms in times.items()
    )
    print(
        f"{case.title} {weight_bytes / 1e6:>6.1f} MB  rows: {few}; {MANY_ROWS} rows: {many['low']:.3f} ms, "
        f"bfloat16 {many['bfloat16']:.3f} ms, {many['bfloat16'] / many['low']:.2f} of its rate",
        flush=True,
    )
    return {**asdict(case), "weight_bytes": weight_bytes, "few_ms": times, "part_of_copy": share, "many_ms": many}


def session(case: Case, weights: list[dict[str, torch.Tensor]], x: torch.Tensor) -> tuple[DeviceSession, torch.Tensor]:
    """Build a session that multiplies x [T, K] by every weight in turn; also returns the first result [T, N]."""
    y = [torch.full((len(x), case.outputs), math.nan, device="cuda", dtype=torch.bfloat16) for _ in weights]
    nodes = [
        emitters.low_bit_linear(
            "x", outputs=(f"y.{i}",), name=f"linear.{i}", **{port: f"{port}.{i}" for port in weight}, **case.attributes
        )
        for i, weight in enumerate(weights)
    ]
    inputs = {f"{port}.{i}": tensor for i, weight in enumerate(weights) for port, tensor in weight.items()}
    return DeviceSession(nodes, {"x": x, **inputs}, {f"y.{i}": t for i, t in enumerate(y)}, graph=True), y[0]


def time_few(case: Case, weights: list[dict[str, torch.Tensor]], tokens: int) -> float:
    """Return milliseconds of a call of a few rows, over cold weights."""
    x = torch.randn(tokens, case.inputs, device="cuda", dtype=torch.bfloat16)
    step, y = session(case, weights, x)
    step()
    check(case, weights[0], x, y)
    return median_ms(step, len(weights))


def time_many(case: Case, weight: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return milliseconds of a call of many rows, and of FusedLinear over a bfloat16 weight."""
    x = torch.randn(MANY_ROWS, case.inputs, device="cuda", dtype=torch.bfloat16)
    low, _ = session(case, [weight], x)
    dense = torch.randn(case.outputs, case.inputs, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(MANY_ROWS, case.outputs, device="cuda", dtype=torch.bfloat16)
    node = emitters.fused_linear("x", "weight", outputs=("y",), name="linear")
    full = DeviceSession([node], {"x": x, "weight": dense}, {"y": y}, graph=True)
    return medians_by_turns({"low": (low, 1), "bfloat16": (full, 1)})


def check(case: Case, weight: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> None:
    """Compare some outputs with float64 of the dequantised values.

    Raises:
        SystemExit: a result is further off than bfloat16 explains.
    """
    torch.cuda.synchronize()
    rows = {name: 256 // case.scale_rows if name == "float_scales" else 256 for name in weight}
    some = {name: tensor[: rows[name]].float().cpu().numpy() for name, tensor in weight.items()}
    some = {name: a.astype(np.uint8) if "codes" in name else a for name, a in some.items()}
    read = x.float().cpu().numpy()
    if case.input_format == "fp8":
        read = round_inputs(read, case.group_size)
    expected = read.astype(np.float64) @ dequantize(**some, **case.weight_attributes).T
    error = np.abs(y[:, :256].double().cpu().numpy() - expected).max() / np.abs(expected).max()
    if not error <= MOST_ERROR:
        raise SystemExit(f"{case.title}: error {error:.3g} against float64, allowed {MOST_ERROR:.3g}")


if __name__ == "__main__":
    main()
