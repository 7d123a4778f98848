"""Times mixtures of experts on a GPU: few tokens beside a device copy, many beside dense products, in one run.

    python benchmarks/experts_cuda.py --json experts_cuda.json

Few tokens read every chosen expert once: figures are microseconds of `LowBitExperts` or `MoeExperts`, and the share of
a copy's bandwidth in the bytes of the experts that the tokens touch. Experts are drawn at random for each layer of a
CUDA graph, whose layers follow one another as in a model and do not fit into the L2 cache together. Many tokens in
bfloat16 take turns with `torch.matmul` of as many rows over two dense weights. One row of the first layer is compared
with float64 of the dequantised values.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from cuda_timing import L2_BYTES, DeviceSession, begin, captured, median_ms, medians_by_turns

from ortolan.custom_ops import emitters
from ortolan.custom_ops.low_bit_reference import dequantize_experts

FEW_TOKENS = (1, 2, 4, 8, 16)
MANY_TOKENS = 4096
MOST_ERROR = 2.0**-6  # of the row's largest value: inner rows, shares and results rounded to bfloat16
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The experts of a layer, as a published model has them."""

    model: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    format: str = "bfloat16"
    group_size: int = 0

    @property
    def weight_attributes(self) -> dict[str, object]:
        """What codes mean."""
        return {"format": self.format, "group_size": self.group_size}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of an expert's weights."""
        return {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}


CASES = (
    Case(model="gpt-oss-20b", experts=32, top_k=4, hidden=2880, inner=2880, format="mxfp4", group_size=32),
    Case(model="gpt-oss-20b", experts=32, top_k=4, hidden=2880, inner=2880, format="int4", group_size=32),
    Case(model="qwen3-30b-a3b", experts=128, top_k=8, hidden=2048, inner=768, format="int4", group_size=128),
    Case(model="qwen3.5-35b-a3b", experts=256, top_k=8, hidden=2048, inner=512, format="int4", group_size=128),
    Case(model="deepseek-v2-lite", experts=64, top_k=6, hidden=2048, inner=1408, format="int4", group_size=128),
    Case(model="qwen3-30b-a3b", experts=128, top_k=8, hidden=2048, inner=768, format="int8", group_size=128),
    Case(model="qwen3-30b-a3b", experts=128, top_k=8, hidden=2048, inner=768),
    Case(model="gpt-oss-20b", experts=32, top_k=4, hidden=2880, inner=2880),
)


def main() -> None:
    """Measure all cases, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=sorted({case.format for case in CASES}), help="measure one alone")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    where, copy = begin("bfloat16 inputs")
    rows = [measure(case, copy) for case in CASES if options.format in (None, case.format)]
    if options.json:
        options.json.write_text(json.dumps({**where, "cases": rows}, indent=2) + "\n")


def measure(case: Case, copy: float) -> dict[str, object]:
    """Check and time one case; prints one line."""
    layers = [draw_weights(case)]
    expert_bytes = sum(tensor[0].nbytes for tensor in layers[0].values())
    layers += [draw_weights(case) for _ in range(max(2, -(-3 * L2_BYTES // (case.top_k * expert_bytes)) - 1))]
    few = [measure_few(case, layers, tokens, expert_bytes, copy) for tokens in FEW_TOKENS]
    found: dict[str, object] = {**asdict(case), "expert_bytes": expert_bytes, "few": few}
    line = ", ".join(f"{each['tokens']:.0f} {1e3 * each['ms']:.1f} us ({each['part_of_copy']:.0%})" for each in few)
    print(f"{case.model:>16} {case.format:>8}, tokens: {line}", flush=True)
    if case.format == "bfloat16":
        many = measure_many(case, layers[0])
        print(
            f"{'':25}, {MANY_TOKENS} tokens {many['experts']:.3f} ms, dense {many['dense']:.3f} ms, "
            f"{many['dense'] / many['experts']:.2f} of its rate",
            flush=True,
        )
        found["many_ms"] = many
    return found


def draw_weights(case: Case) -> dict[str, torch.Tensor]:
    """Draw the weights of a layer's experts by the names of the operators' inputs."""
    drawn = {}
    for name, (rows, columns) in case.shapes.items():
        if case.format == "bfloat16":
            drawn[name] = torch.randn(case.experts, rows, columns, device="cuda", dtype=torch.bfloat16)
            drawn[name] *= columns**-0.5
            continue
        bits = 8 if case.format == "int8" else 4
        codes = torch.empty(case.experts, rows, columns * bits // 8, device="cuda", dtype=torch.uint8)
        drawn[f"{name}_codes"] = codes.random_(0, 256)
        groups = (case.experts, rows, columns // case.group_size)
        if case.format == "mxfp4":
            exponents = torch.randint(-2, 1, groups, device="cuda") + 127 - round(math.log2(columns) / 2) - 1
            drawn[f"{name}_scale_codes"] = exponents.to(torch.uint8)
        else:
            scales = torch.rand(groups, device="cuda").add_(0.5).mul_(2.0 ** (1 - bits) * columns**-0.5)
            drawn[f"{name}_scales"] = scales.bfloat16()
    return drawn


def draw_choices(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw different experts for each token, and equal weights: two tensors [T, K]."""
    experts = torch.rand(tokens, case.experts, device="cuda").argsort(1)[:, : case.top_k].int().contiguous()
    return experts, torch.full((tokens, case.top_k), 1 / case.top_k, device="cuda")


def make_session(
    case: Case, layers: list[dict[str, torch.Tensor]], x: torch.Tensor, choices: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[DeviceSession, torch.Tensor]:
    """Build a session of layers that all read x [T, H]; also returns the first one's result [T, H]."""
    emit, attributes = emitters.moe_experts, {}
    if case.format != "bfloat16":
        emit, attributes = emitters.low_bit_experts, case.weight_attributes
    nodes, inputs, outputs = [], {"x": x}, {}
    for i, (weights, (experts, shares)) in enumerate(zip(layers, choices, strict=True)):
        named = {"experts": experts, "weights": shares, **weights}
        inputs |= {f"{port}.{i}": tensor for port, tensor in named.items()}
        outputs[f"y.{i}"] = torch.full_like(x, math.nan)
        ports = {port: f"{port}.{i}" for port in named}
        nodes.append(emit("x", outputs=(f"y.{i}",), name=f"experts.{i}", **ports, **attributes))
    return DeviceSession(nodes, inputs, outputs, graph=True), outputs["y.0"]


def measure_few(
    case: Case, layers: list[dict[str, torch.Tensor]], tokens: int, expert_bytes: int, copy: float
) -> dict[str, float]:
    """Time a layer of a few tokens, over cold weights."""
    x = torch.randn(tokens, case.hidden, device="cuda", dtype=torch.bfloat16)
    choices = [draw_choices(case, tokens) for _ in layers]
    step, y = make_session(case, layers, x, choices)
    step()
    if tokens == FEW_TOKENS[1]:
        check(case, layers[0], choices[0], x, y)
    ms = median_ms(step, len(layers))
    touched = sum(len(experts.unique()) for experts, _ in choices) / len(layers)
    return {"tokens": tokens, "ms": ms, "part_of_copy": touched * expert_bytes / (1e-3 * ms) / copy}


def measure_many(case: Case, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return milliseconds of many tokens, and of two dense products of as many rows as their choices."""
    x = torch.randn(MANY_TOKENS, case.hidden, device="cuda", dtype=torch.bfloat16)
    step, _ = make_session(case, [weights], x, [draw_choices(case, MANY_TOKENS)])
    gate_up, down = weights["gate_up"][0], weights["down"][0]
    rows = x.repeat(case.top_k, 1)
    inner = rows.new_empty(len(rows), case.inner).normal_()
    dense = captured(lambda: (rows @ gate_up.T, inner @ down.T))
    return medians_by_turns({"experts": (step, 1), "dense": (dense, 1)})


def check(
    case: Case, weights: Tensors, choices: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> None:
    """Compare the last row with float64 of the dequantised values.

    Raises:
        SystemExit: the row is further off than bfloat16 explains.
    """
    torch.cuda.synchronize()
    experts, shares = (each[-1].tolist() for each in choices)
    row = x[-1].double().cpu().numpy()
    expected = np.zeros(case.hidden)
    for expert, share in zip(experts, shares, strict=True):
        gate, factor = np.split(values(case, weights, "gate_up", expert) @ row, 2)
        expected += share * (values(case, weights, "down", expert) @ (gate / (1 + np.exp(-gate)) * factor))
    error = np.abs(y[-1].double().cpu().numpy() - expected).max() / np.abs(expected).max()
    if not error <= MOST_ERROR:
        raise SystemExit(f"{case.model} {case.format}: error {error:.3g} against float64, allowed {MOST_ERROR:.3g}")


def values(case: Case, weights: Tensors, name: str, expert: int) -> npt.NDArray[np.float64]:
    """Return an expert's weight [rows, columns] as float64."""
    if case.format == "bfloat16":
        return weights[name][expert].double().cpu().numpy()
    own = {port: tensor[expert : expert + 1] for port, tensor in weights.items() if port.startswith(name)}
    feeds = {port: (t.float() if t.is_floating_point() else t).cpu().numpy() for port, t in own.items()}
    return dequantize_experts(feeds, name, **case.weight_attributes)[0]


if __name__ == "__main__":
    main()
