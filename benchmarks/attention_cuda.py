"""Times SwaAttention on a GPU beside cuDNN, FlashAttention-2 and FlexAttention, in one run.

    python benchmarks/attention_cuda.py --json attention_cuda.json

Every case is checked on fresh random inputs against float64 before it is timed, by turns with its peers. Prefill is
counted in visible pairs of a query and a key, whatever a kernel really computes; decode runs in a CUDA graph over
rotating caches that do not fit into the L2 cache. Where several sequences decode, SwaAttention is told how many
tokens one has at most, as the runtime tells it. The peers come with PyTorch; one that cannot run a case is left
out of its line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own habit)
from cuda_timing import L2_BYTES, DeviceSession, begin, captured, medians_by_turns
from torch.nn.attention import SDPBackend, sdpa_kernel

from ortolan.custom_ops import emitters

FEW_TOKENS = 16  # a sequence with at most so many belongs to the decode kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention step of equal sequences: `tokens` queries each, after `past` cached positions."""

    tokens: int
    past: int = 0
    sequences: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    window: int = -1
    capacity: int = 0  # 0: every position has a slot
    target: float = 0  # TFLOP/s for prefill, microseconds for decode

    @property
    def decode(self) -> bool:
        """Whether this is a step of one token, or of a few that are verified."""
        return self.tokens <= FEW_TOKENS

    @property
    def length(self) -> int:
        """Positions after the step."""
        return self.past + self.tokens

    @property
    def slots(self) -> int:
        """C."""
        return self.capacity or self.length

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, per head, of all sequences."""
        positions = torch.arange(self.past + 1, self.length + 1)
        seen = positions.clamp(max=self.window) if self.window > 0 else positions
        return self.sequences * int(seen.sum())

    @property
    def flops(self) -> float:
        """Operations of the two products over visible pairs."""
        return 4.0 * self.heads * self.head_size * self.visible_pairs

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that a decode step must read."""
        seen = min(self.length, self.window) if self.window > 0 else self.length
        return 4 * self.kv_heads * self.head_size * self.sequences * seen

    @property
    def title(self) -> str:
        """The line's first columns."""
        heads = f"{self.heads}/{self.kv_heads}"
        ring = f"ring {self.capacity}" if self.capacity else ""
        return f"{self.sequences:>3} x {self.tokens:>6} +{self.past:>7} {heads:>6} D{self.head_size:<4}" + (
            f"W{self.window:<6}{ring:<10}" if self.window > 0 else f"{'causal':<7}{ring:<10}"
        )


PREFILL = (
    *(Case(tokens=t) for t in (2048, 4096, 8192)),
    Case(tokens=16384, target=520),
    Case(tokens=32768),
    Case(tokens=16384, head_size=64, target=380),
    Case(tokens=16384, heads=8, kv_heads=4, head_size=256, target=500),
    Case(tokens=16384, head_size=80, target=360),
    Case(tokens=16384, heads=32, kv_heads=32, head_size=96, target=437),
    Case(tokens=16384, head_size=112),
    Case(tokens=8192, heads=16, kv_heads=16, head_size=192, target=519),
    *(Case(tokens=t, heads=8, kv_heads=1, head_size=512, target=400) for t in (8192, 16384, 32768)),
    Case(tokens=12000),
    Case(tokens=16384, heads=28, kv_heads=4),
    Case(tokens=16384, heads=40, kv_heads=40),
    Case(tokens=512, sequences=32),
    Case(tokens=512, past=32768, target=480),
    Case(tokens=64, past=32768, target=250),
    Case(tokens=4096, past=28672, head_size=64),
    Case(tokens=32768, window=512, target=300),
    Case(tokens=32768, window=1024, target=380),
    Case(tokens=32768, window=4096, target=450),
    Case(tokens=32768, heads=8, kv_heads=4, head_size=256, window=512),
    Case(tokens=32768, heads=64, kv_heads=8, head_size=64, window=128),
    Case(tokens=4096, past=28672, window=1024, capacity=5120),
)
DECODE = (
    Case(tokens=1, past=1023, target=8),
    Case(tokens=1, past=8191),
    Case(tokens=1, past=32767, target=40),
    Case(tokens=1, past=131071),
    Case(tokens=1, past=4095, sequences=32, target=130),
    Case(tokens=1, past=1023, head_size=64),
    Case(tokens=1, past=32767, head_size=64),
    Case(tokens=1, past=131071, window=1024, capacity=3072),
    Case(tokens=1, past=2047),
    Case(tokens=1, past=32767, head_size=96, target=34),
    Case(tokens=1, past=16383, heads=8, kv_heads=1, head_size=512, target=14),
    Case(tokens=1, past=4095, sequences=8, target=37.9),
    Case(tokens=1, past=8191, sequences=64, target=481),
    Case(tokens=1, past=1023, sequences=128, target=141),
    Case(tokens=1, past=4095, sequences=32, head_size=64, target=64),
    *(Case(tokens=tokens, past=8192) for tokens in (2, 4, 8, 16)),
    *(Case(tokens=tokens, past=4096, sequences=16) for tokens in (1, 2, 4, 8, 16)),
)


def main() -> None:
    """Measure all cases, print tables, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out: it is compiled for a minute")
    options = parser.parse_args()
    where, _ = begin("bfloat16, speed-up is over the fastest peer")
    rows = [measure(case, not options.no_flex) for case in (*PREFILL, *DECODE)]
    if options.json:
        options.json.write_text(json.dumps({**where, "cases": rows}, indent=2) + "\n")


def measure(case: Case, flex: bool) -> dict[str, object]:
    """Check and time one case beside its peers; prints one line."""
    inputs = [Inputs(case) for _ in range(copies(case))]
    error = check(case, inputs[0])
    steps = {"ortolan": ortolan_step(case, inputs)}
    for name, make in peers_of(case, flex).items():
        if step := peer_step(make, inputs, case.decode):
            steps[name] = step
    times = medians_by_turns(steps)
    ours = times["ortolan"]
    best = min((ms for name, ms in times.items() if name != "ortolan"), default=math.nan)

    def speed(ms: float) -> float:
        return 1e3 * ms if case.decode else case.flops / ms / 1e9

    unit = "us" if case.decode else "TFLOP/s"
    figures = "  ".join(f"{name} {speed(ms):.{1 if case.decode else 0}f}" for name, ms in times.items())
    target = f" (target {case.target:g})" if case.target else ""
    print(f"{case.title} {figures} {unit}{target}, speed-up {best / ours:.2f}, error {error:.1e}", flush=True)
    return {**asdict(case), "ms": times, "speed_up": best / ours, "error": error}


def copies(case: Case) -> int:
    """How many sets of inputs a decode case rotates among, and calls a graph makes: they share its launch."""
    return max(8, -(-3 * L2_BYTES // case.cache_bytes)) if case.decode else 1


class Inputs:
    """Random tensors of one case; a ring holds the last C positions of a longer history."""

    def __init__(self, case: Case) -> None:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        pool = (case.sequences, case.kv_heads, case.slots, case.head_size)
        starts = torch.arange(case.sequences + 1, device="cuda", dtype=torch.int32) * case.tokens
        self.tensors = {
            "query": draw(case.sequences * case.tokens, case.heads, case.head_size),
            "key_cache": draw(*pool),
            "value_cache": draw(*pool),
            "query_start": starts,
            "past_len": torch.full((case.sequences,), case.past, device="cuda", dtype=torch.int32),
        }
        if case.decode and case.sequences > 1:
            self.tensors["max_query_len"] = torch.tensor([case.tokens], dtype=torch.int32)  # on the host

    def ordered(self, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [B, Hq, T, D], and keys and values [B, Hkv, L, D] in order of position, for the peers."""
        query = self.tensors["query"].view(case.sequences, case.tokens, case.heads, case.head_size)
        first = max(0, case.length - case.slots)
        slots = torch.arange(first, case.length, device="cuda") % case.slots
        caches = (self.tensors[name] for name in ("key_cache", "value_cache"))
        if not case.capacity:
            return (query.transpose(1, 2), *caches)
        return (query.transpose(1, 2), *(cache[:, :, slots].contiguous() for cache in caches))


def ortolan_step(case: Case, inputs: list[Inputs]) -> tuple[Callable[[], None], int]:
    """Build a session of one SwaAttention per set of inputs (prefill: three on the same)."""
    calls = len(inputs) if case.decode else 3
    nodes, feeds, outputs = [], {}, {}
    for call in range(calls):
        tensors = inputs[call % len(inputs)].tensors
        names = {port: f"{port}.{call % len(inputs)}" for port in tensors}
        feeds |= {names[port]: tensor for port, tensor in tensors.items()}
        outputs[f"output.{call}"] = torch.full_like(tensors["query"], math.nan)
        attributes = {"window": case.window, "capacity": case.slots}
        node = emitters.swa_attention(**names, outputs=(f"output.{call}",), name=f"attend.{call}", **attributes)
        nodes.append(node)
    return DeviceSession(nodes, feeds, outputs, graph=case.decode), calls


def check(case: Case, inputs: Inputs) -> float:
    """Compare sampled rows with float64; returns |out - ref| / |ref| over them.

    Raises:
        SystemExit: the result is not right to bfloat16's rounding.
    """
    output = torch.full_like(inputs.tensors["query"], math.nan)
    attributes = {"window": case.window, "capacity": case.slots}
    node = emitters.swa_attention(**{k: k for k in inputs.tensors}, outputs=("output",), name="attend", **attributes)
    session = DeviceSession([node], inputs.tensors, {"output": output})
    session()
    torch.cuda.synchronize()
    if output.isnan().any():
        raise SystemExit(f"{case.title}: the output has NaN or unwritten elements")
    query, keys, values = (t.double() for t in inputs.ordered(case)) if case.decode else inputs.ordered(case)
    got, want = [], []
    for _ in range(48):
        b, h, t = (int(torch.randint(n, ())) for n in (case.sequences, case.heads, case.tokens))
        last = case.past + t - max(0, case.length - case.slots)
        first = max(0, last - case.window + 1) if case.window > 0 else 0
        kv = h // (case.heads // case.kv_heads)
        seen = slice(first, last + 1)
        logits = keys[b, kv, seen].double() @ query[b, h, t].double() / math.sqrt(case.head_size)
        want.append(torch.softmax(logits, 0) @ values[b, kv, seen].double())
        got.append(output[b * case.tokens + t, h].double())
    expected = torch.stack(want)
    error = float((torch.stack(got) - expected).norm() / expected.norm())
    if not error < 1e-2:
        raise SystemExit(f"{case.title}: relative error {error:.3g} against float64")
    return error


Peer = Callable[[Case, Inputs], Callable[[], object]]


def peers_of(case: Case, flex: bool) -> dict[str, Callable[[Inputs], Callable[[], object]]]:
    """Return the peers that can compute a case, by name."""

    def bind(make: Peer) -> Callable[[Inputs], Callable[[], object]]:
        return lambda inputs: make(case, inputs)

    if case.decode:
        return {"cuDNN": bind(cudnn)} if case.window < 0 and case.tokens == 1 else {}
    if case.past and case.window < 0:
        return {"FA2": bind(flash_varlen)}
    windowed = {"FA2": bind(flash_varlen), **({"flex": bind(flex_attention)} if flex else {})}
    return windowed if case.window > 0 else {"cuDNN": bind(cudnn), "FA2": bind(flash)}


def peer_step(
    make: Callable[[Inputs], Callable[[], object]], inputs: list[Inputs], decode: bool
) -> tuple[Callable[[], object], int] | None:
    """Return a peer's calls and how many they are; None where it refuses the case."""
    try:
        steps = [make(i) for i in inputs]

        def run() -> None:
            for step in steps:
                step()

        run()
        return (captured(run) if decode else run), len(steps)
    except Exception as error:  # a peer's refusal has many types
        print(f"  a peer refuses: {str(error).splitlines()[0][:150]}")
        return None


def sdpa(case: Case, inputs: Inputs, backend: SDPBackend) -> Callable[[], object]:
    """Prepare PyTorch's fused attention with one backend."""
    query, keys, values = inputs.ordered(case)

    def run() -> object:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, keys, values, is_causal=not case.decode, enable_gqa=True)

    return run


def cudnn(case: Case, inputs: Inputs) -> Callable[[], object]:
    """Prepare cuDNN's attention."""
    return sdpa(case, inputs, SDPBackend.CUDNN_ATTENTION)


def flash(case: Case, inputs: Inputs) -> Callable[[], object]:
    """Prepare FlashAttention-2 as PyTorch ships it."""
    return sdpa(case, inputs, SDPBackend.FLASH_ATTENTION)


def flash_varlen(case: Case, inputs: Inputs) -> Callable[[], object]:
    """Prepare FlashAttention-2 over packed rows, which alone takes a window and a longer history."""
    from torch.nn.attention.varlen import varlen_attn

    query, keys, values = inputs.ordered(case)
    rows = [t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]).contiguous() for t in (query, keys, values)]
    lengths = [t.shape[2] for t in (query, keys)]
    starts = [torch.arange(case.sequences + 1, device="cuda", dtype=torch.int32) * n for n in lengths]
    window = (case.window - 1, 0) if case.window > 0 else (-1, 0)
    return lambda: varlen_attn(*rows, *starts, *lengths, window_size=window)


def flex_attention(case: Case, inputs: Inputs) -> Callable[[], object]:
    """Prepare compiled FlexAttention with a sliding-window block mask."""
    from torch.nn.attention import flex_attention as flex

    query, keys, values = inputs.ordered(case)
    shift = keys.shape[2] - query.shape[2]

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q + shift) & (k > q + shift - case.window)

    mask = flex.create_block_mask(visible, None, None, query.shape[2], keys.shape[2], device="cuda")
    run = torch.compile(flex.flex_attention, dynamic=False)
    return lambda: run(query, keys, values, block_mask=mask, enable_gqa=True)


if __name__ == "__main__":
    main()
