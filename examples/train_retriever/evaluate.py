"""Measure a retriever folder: exact match by length, depth and kind, with full caches and after SnapKV.

    PYTHONPATH=../.. python evaluate.py FOLDER --samples 8 --snapkv 8

The full-cache numbers come from transformers' own forward. An answer counts if greedy decoding would say all
its digits and the newline. SnapKV runs on `model.py` in float32; every batch is checked against transformers'
logits where those are float32 too.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import transformers
from checkpoint import read_folder
from hybrid import Hybrid
from model import Attention, Retriever
from snapkv import SnapKvAttention
from torch import Tensor
from transformers import AutoModelForCausalLM

from ortolan.retrieval import KINDS, VALUE_DIGITS, Sample, Task, load_corpus, make_sample

DEPTHS = tuple(step / 10 for step in range(11))
ANSWER_BYTES = VALUE_DIGITS + 1  # the newline that ends it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One entry of the tables."""

    length: int
    depth: float
    kind: str


def batches(length: int, samples: int, batch: int, seed: int) -> Iterator[tuple[list[Cell], Tensor]]:
    """Yield cells and tokens [B, length + ANSWER_BYTES] of prompts with their answers."""
    corpus = load_corpus("eval")
    work = [Cell(length=length, depth=depth, kind=kind) for depth, kind in product(DEPTHS, KINDS)] * samples
    for start in range(0, len(work), batch):
        cells = work[start : start + batch]
        made = [
            make_sample(corpus, Task(length=length, depth=cell.depth, kind=cell.kind, seed=seed + start + index))
            for index, cell in enumerate(cells)
        ]
        yield cells, torch.stack([_tokens(sample) for sample in made])


def _tokens(sample: Sample) -> Tensor:
    return torch.tensor(list(f"{sample.prompt}{sample.answer}\n".encode("ascii")))


def exact(logits: Tensor, tokens: Tensor) -> Tensor:
    """Tell for each row whether greedy decoding says the answer.

    Args:
        logits: [B, ANSWER_BYTES + 1, V], of the prompt's last token on.
        tokens: [B, T].
    """
    return (logits[:, :-1].argmax(-1) == tokens[:, -ANSWER_BYTES:]).all(-1)


class Evictable:
    """The small model with SnapKV in its full layers."""

    def __init__(self, model: Retriever | Hybrid, ratio: int) -> None:
        self.model = model
        self.ratio = ratio

    def logits(self, tokens: Tensor, evict: bool) -> Tensor:
        """Return logits [B, ANSWER_BYTES + 1, V]; evicting keeps length / ratio keys."""
        length = tokens.shape[1] - ANSWER_BYTES
        for attention in self.model.full_attention:
            snapkv = SnapKvAttention(prompt_tokens=length, budget=length // self.ratio)
            plain = partial(Attention.attend, attention)
            attention.attend = snapkv if evict else plain  # type: ignore[method-assign]
        padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % self.model.multiple))
        return self.model(padded)[0][:, length - 1 : length + ANSWER_BYTES]


@torch.inference_mode()
def evaluate(args: argparse.Namespace) -> dict[str, dict[Cell, list[bool]]]:
    """Return the outcomes of every sample, by method and cell."""
    reference = AutoModelForCausalLM.from_pretrained(args.folder, dtype=args.dtype).to(args.device).eval()
    evictable = Evictable(read_folder(args.folder).to(args.device).eval(), args.snapkv) if args.snapkv else None
    outcomes: dict[str, dict[Cell, list[bool]]] = {"full": defaultdict(list), "snapkv": defaultdict(list)}
    for length in args.lengths:
        size = max(1, args.batch_tokens // length)
        for cells, host_tokens in batches(length, args.samples, size, args.seed):
            tokens = host_tokens.to(args.device)
            logits = reference(tokens, logits_to_keep=ANSWER_BYTES + 1).logits
            _record(outcomes["full"], cells, exact(logits, tokens))
            if evictable:
                if args.dtype == "float32":
                    torch.testing.assert_close(evictable.logits(tokens, evict=False), logits, rtol=0, atol=2e-2)
                _record(outcomes["snapkv"], cells, exact(evictable.logits(tokens, evict=True), tokens))
        print(f"{length}: {_rate(outcomes['full'], length=length)} full", flush=True)
    return outcomes


def _record(outcomes: dict[Cell, list[bool]], cells: list[Cell], right: Tensor) -> None:
    for cell, outcome in zip(cells, right.tolist(), strict=True):
        outcomes[cell].append(outcome)


def _rate(outcomes: dict[Cell, list[bool]], **wanted: object) -> str:
    """Return the percentage of right answers among the cells with these fields."""
    chosen = [
        right
        for cell, rights in outcomes.items()
        if all(getattr(cell, name) == value for name, value in wanted.items())
        for right in rights
    ]
    return f"{100 * sum(chosen) / len(chosen):.1f}"


def tables(outcomes: dict[Cell, list[bool]], lengths: list[int]) -> str:
    """Return two Markdown tables: length by depth, and length by kind."""
    rows = ["| bytes | " + " | ".join(f"{depth:.1f}" for depth in DEPTHS) + " | all |", "|---" * 13 + "|"]
    for length in lengths:
        cells = [_rate(outcomes, length=length, depth=depth) for depth in DEPTHS]
        rows.append(f"| {length} | " + " | ".join(cells) + f" | {_rate(outcomes, length=length)} |")
    rows += ["", "| bytes | " + " | ".join(KINDS) + " | samples |", "|---" * 5 + "|"]
    for length in lengths:
        cells = [_rate(outcomes, length=length, kind=kind) for kind in KINDS]
        count = sum(len(rights) for cell, rights in outcomes.items() if cell.length == length)
        rows.append(f"| {length} | " + " | ".join(cells) + f" | {count} |")
    return "\n".join(rows)


def main() -> None:
    """Evaluate and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 6144, 8192])
    parser.add_argument("--samples", type=int, default=8, help="for each of 11 depths and 3 kinds")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--snapkv", type=int, default=0, help="also keep only 1 key in this many; 0: do not")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="file for every cell's share")
    args = parser.parse_args()
    print(f"{args.device}, torch {torch.__version__}, transformers {transformers.__version__}, seed {args.seed}")
    outcomes = evaluate(args)
    report = []
    for method, cells in outcomes.items():
        if cells:
            print(f"\n{method}\n\n{tables(cells, args.lengths)}")
        report += [
            {
                "method": method,
                "length": cell.length,
                "depth": cell.depth,
                "kind": cell.kind,
                "right": sum(rights),
            }
            | {"samples": len(rights)}
            for cell, rights in cells.items()
        ]
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
