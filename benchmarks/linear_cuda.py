"""Times matrix products of FusedLinear on a GPU beside cuBLAS, those of one token against a device copy, in one run.

    python benchmarks/linear_cuda.py --json linear_cuda.json

A decoded token reads every weight once, so its figures are bytes of weights over time; many tokens' are operations over
time. Each case rotates among weights that do not fit into the L2 cache, in a CUDA graph whose calls follow one another
as in a model. Every result is compared with float64 on fresh random inputs before and after the timed runs. Gated
layers multiply silu of the first half of the product by the second; cuBLAS gets the product alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cuda_timing import L2_BYTES, DeviceSession, begin, captured, median_ms

from ortolan.custom_ops import emitters

ROUNDING = 2.0**-8  # most that one rounding to bfloat16 changes, relative; sums in float32 err far less


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One linear layer, from K inputs to N rows of weights; a gated one has N / 2 outputs."""

    inputs: int
    rows: int
    gated: bool = False
    tokens: int = 1

    @property
    def outputs(self) -> int:
        """O."""
        return self.rows // 2 if self.gated else self.rows

    @property
    def weight_bytes(self) -> int:
        """Bytes that a call must read."""
        return 2 * self.inputs * self.rows

    @property
    def work(self) -> float:
        """What a call must do at least: for one token bytes of weights, for many operations."""
        return self.weight_bytes if self.tokens == 1 else 2.0 * self.tokens * self.inputs * self.rows

    @property
    def unit(self) -> str:
        """Of 1e12 of it in a second."""
        return "TB/s" if self.tokens == 1 else "TFLOP/s"

    @property
    def activation(self) -> str:
        """The node's attribute."""
        return "silu_mul" if self.gated else "none"

    @property
    def title(self) -> str:
        """The line's first columns."""
        layer = f"{self.inputs:>6} x {self.rows:<7}{'gated' if self.gated else '':<6}"
        return f"{self.tokens:>5} x {layer}{self.weight_bytes / 1e6:>6.0f} MB"


CASES = (
    Case(inputs=2048, rows=2048),
    Case(inputs=2048, rows=3072),
    Case(inputs=8192, rows=2048),
    Case(inputs=2048, rows=16384, gated=True),
    Case(inputs=12288, rows=4096),
    Case(inputs=4096, rows=24576, gated=True),
    Case(inputs=2048, rows=128256),
    Case(inputs=2048, rows=16384, gated=True, tokens=512),
    Case(inputs=2048, rows=16384, gated=True, tokens=2048),
    Case(inputs=2048, rows=16384, gated=True, tokens=16384),
    Case(inputs=4096, rows=24576, gated=True, tokens=16384),
)


class Call:
    """Random tensors of one call: x [T, K], weight [N, K], y [T, O], and a product [T, N] for the peer."""

    def __init__(self, case: Case) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.x = draw(case.tokens, case.inputs)
        self.weight = draw(case.rows, case.inputs).mul_(case.inputs**-0.5)  # products are about 1
        self.y = torch.full((case.tokens, case.outputs), math.nan, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty(case.tokens, case.rows, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    """Measure all cases, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    where, copy = begin("bfloat16, T x K x N; speed-up is over cuBLAS (torch.matmul)")
    rows = [measure(case, copy) for case in CASES]
    if options.json:
        options.json.write_text(json.dumps({**where, "cases": rows}, indent=2) + "\n")


def measure(case: Case, copy: float) -> dict[str, object]:
    """Check and time one case beside cuBLAS; prints one line."""
    calls = [Call(case) for _ in range(max(4, -(-3 * L2_BYTES // case.weight_bytes)))]
    step = ortolan_step(case, calls)
    step()
    error = check(case, calls)
    ours = median_ms(step, len(calls))
    error = max(error, check(case, calls))
    peer = median_ms(cublas_step(calls), len(calls))

    def speed(ms: float) -> float:
        return case.work / (1e-3 * ms)

    part = speed(ours) / copy if case.tokens == 1 else None
    print(
        f"{case.title}  ortolan {1e3 * ours:>7.1f} us {speed(ours) / 1e12:>6.2f} {case.unit}"
        f"{'' if part is None else f' ({part:>4.0%} of a copy)'}  "
        f"cuBLAS {1e3 * peer:>7.1f} us {speed(peer) / 1e12:>6.2f} {case.unit}  "
        f"speed-up {peer / ours:.2f}, error {error:.1e}",
        flush=True,
    )
    times = {"ortolan": ours, "cuBLAS": peer}
    speeds = {name: speed(ms) for name, ms in times.items()}
    return {
        **asdict(case),
        "ms": times,
        "unit": case.unit,
        "per_second": speeds,
        "part_of_copy": part,
        "speed_up": peer / ours,
        "error": error,
    }


def ortolan_step(case: Case, calls: list[Call]) -> Callable[[], None]:
    """Build a session that runs FusedLinear on every set of tensors in turn, captured at its first run."""
    nodes = [
        emitters.fused_linear(
            f"x.{i}", f"weight.{i}", outputs=(f"y.{i}",), name=f"linear.{i}", activation=case.activation
        )
        for i in range(len(calls))
    ]
    inputs = {f"{port}.{i}": getattr(call, port) for i, call in enumerate(calls) for port in ("x", "weight")}
    outputs = {f"y.{i}": call.y for i, call in enumerate(calls)}
    return DeviceSession(nodes, inputs, outputs, graph=True)


def cublas_step(calls: list[Call]) -> Callable[[], None]:
    """Capture the same products by PyTorch, which calls cuBLAS."""

    def run() -> None:
        for call in calls:
            torch.matmul(call.x, call.weight.T, out=call.product)

    return captured(run)


def check(case: Case, calls: list[Call]) -> float:
    """Compare every result with float64 and make it NaN again; returns the largest error over the largest value.

    Raises:
        SystemExit: a result is further off than its rounding.
    """
    torch.cuda.synchronize()
    largest = 0.0
    for call in calls:
        expected = call.x.double() @ call.weight.double().T
        if case.gated:
            gate, factor = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * factor
        error = float((call.y.double() - expected).abs().max() / expected.abs().max())
        if not error <= ROUNDING:
            raise SystemExit(f"{case.title}: error {error:.3g} against float64, allowed {ROUNDING:.3g}")
        largest = max(largest, error)
        call.y.fill_(math.nan)
    return largest


if __name__ == "__main__":
    main()
