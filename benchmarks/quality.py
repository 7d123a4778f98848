"""Measures what each eviction policy keeps: retrieval by the shipped model, by policy, share removed, and depth.

    python benchmarks/quality.py --samples 66 --json quality.json --plots docs/images

Prompts hide one fact, eight keys of one attribute, or two keys of four attributes in Python sources (single, multi_key
and multi_value, after RULER, arXiv 2404.06654), at depths of 0 to 100 %. The question stands at the prompt's end, where
an eviction can see it ("known"), or is asked in a second turn, after the eviction ("later"). Seeds are fixed; intervals
are 95 % Wilson scores. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnxruntime
from retrieval import ANSWER_TOKENS, draw_samples, wilson_interval

import ortolan
from ortolan.cli.demo import shipped_model
from ortolan.cli.table import format_table
from ortolan.retrieval import Sample, is_correct

REMOVED = (0.5, 0.75, 0.875, 0.95)
POLICIES: dict[str, dict[str, str]] = {
    "snapkv avg": {"policy": "snapkv", "pool": "avg"},
    "snapkv max": {"policy": "snapkv", "pool": "max"},
    "pyramidkv": {"policy": "pyramidkv"},
    "adakv": {"policy": "adakv"},
    "streaming": {"policy": "streaming"},
}
MODES = ("known", "later")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One answered prompt."""

    mode: str
    policy: str
    removed: float
    length: int
    kind: str
    depth: float
    right: bool
    covered: bool  # whether sinks and the latest tokens alone would hold the fact


def main() -> None:
    """Measure, print a table for each mode, and write JSON and plots where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--samples", type=int, default=66, help="prompts for each length (default: %(default)s)")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--plots", type=Path, help="write PNG plots to this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = max(options.lengths) + ANSWER_TOKENS
        path = ortolan.export(shipped_model(), Path(folder) / "model", max_context=context, chunk_size=512)
        model = ortolan.load(path, device=options.device)
        outcomes = [
            outcome
            for length in options.lengths
            for outcome in measure(model, draw_samples(length, options.samples), options.policies)
        ]
    print(f"{platform.machine()}, onnxruntime {onnxruntime.__version__}, ortolan {ortolan.__version__}")
    for mode in MODES:
        print_table(mode, outcomes)
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]) + "\n")
    if options.plots:
        plot(outcomes, options.plots)


def measure(model: ortolan.Model, samples: Sequence[Sample], policies: Sequence[str]) -> Iterator[Outcome]:
    """Answer every prompt with full caches and with each policy at each share."""
    for mode in MODES:
        for sample_number, sample in enumerate(samples):
            yield answer(model, sample, sample_number, mode, "full", 0.0)
            for policy in policies:
                for removed in REMOVED:
                    yield answer(model, sample, sample_number, mode, policy, removed)


def answer(model: ortolan.Model, sample: Sample, number: int, mode: str, policy: str, removed: float) -> Outcome:
    """Answer one prompt in a fresh session."""
    length = len(sample.prompt)
    budget = round(length * (1 - removed))
    snapkv = None if policy == "full" else ortolan.SnapKv(budget=budget, **POLICIES[policy])  # type: ignore[arg-type]
    session = model.session(length + ANSWER_TOKENS, snapkv=snapkv)
    question = len(sample.fact.question)
    rest = sample.prompt
    if mode == "later":
        session.prefill(model.tokenizer.encode(rest[:-question]))
        rest = rest[-question:]
    tokens = list(session.generate(model.tokenizer.encode(rest), ANSWER_TOKENS))
    task = sample.task
    return Outcome(
        mode=mode,
        policy=policy,
        removed=removed,
        length=length,
        kind=task.kind,
        depth=task.depth,
        right=is_correct(sample, model.tokenizer.decode(tokens)),
        covered=policy == "full" or sample.needle_start >= length - budget,
    )


def print_table(mode: str, outcomes: Sequence[Outcome]) -> None:
    """Print one line per length, policy and share: right answers with their interval."""
    print(f"\nquestion {mode}:")
    rows = []
    keys = dict.fromkeys((o.length, o.policy, o.removed) for o in outcomes if o.mode == mode)
    for length, policy, removed in keys:
        group = [o for o in outcomes if (o.mode, o.length, o.policy, o.removed) == (mode, length, policy, removed)]
        right = sum(o.right for o in group)
        low, high = wilson_interval(right, len(group))
        predicted = f"{100 * sum(o.covered for o in group) / len(group):.1f}" if policy == "streaming" else ""
        share = "" if policy == "full" else f"{100 * removed:.1f}"
        figures = [f"{100 * right / len(group):.1f}", f"{100 * low:.1f} .. {100 * high:.1f}", predicted]
        rows.append([str(length), policy, share, *figures])
    print(format_table(["bytes", "policy", "removed, %", "right, %", "95 % interval", "predicted, %"], rows))


def plot(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Draw right answers over the share removed, and over depth at 87.5 %, one picture per mode and length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for mode in MODES:
        for length in dict.fromkeys(o.length for o in outcomes):
            chosen = [o for o in outcomes if (o.mode, o.length) == (mode, length) and o.policy != "full"]
            figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
            for policy in dict.fromkeys(o.policy for o in chosen):
                own = [o for o in chosen if o.policy == policy]
                draw_line(axes[0], policy, [(100 * o.removed, o.right) for o in own])
                draw_line(axes[1], policy, [(100 * o.depth, o.right) for o in own if o.removed == 0.875])
            axes[0].set(
                xlabel="removed, %", ylabel="right, %", ylim=(-3, 103), title=f"question {mode}, {length} bytes"
            )
            axes[1].set(xlabel="depth of the fact, %", title="87.5 % removed")
            axes[0].legend()
            figure.tight_layout()
            figure.savefig(folder / f"quality_{mode}_{length}.png", dpi=120)
            pyplot.close(figure)


def draw_line(axis: object, label: str, points: Sequence[tuple[float, bool]]) -> None:
    """Draw the share of right answers at each x, with its interval."""
    places = sorted({x for x, _ in points})
    groups = [[right for x, right in points if x == place] for place in places]
    shares = [100 * sum(group) / len(group) for group in groups]
    bounds = [wilson_interval(sum(group), len(group)) for group in groups]
    errors = [
        [share - 100 * low for share, (low, _) in zip(shares, bounds, strict=True)],
        [100 * high - share for share, (_, high) in zip(shares, bounds, strict=True)],
    ]
    axis.errorbar(places, shares, yerr=errors, label=label, marker="o", capsize=2)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
