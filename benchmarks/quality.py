"""Measures what each eviction policy keeps: retrieval by the shipped model, by kind, share removed, depth and length.

    python benchmarks/quality.py --samples 264 --jobs 2 --json quality.json --plots docs/images

Prompts hide one fact, eight keys of one attribute, or two keys of four values each in Python sources (single,
multi_key and multi_value, after RULER, arXiv 2404.06654), at depths of 0 to 100 %. The question stands at the prompt's
end, where the eviction sees it ("known"), or comes in a second turn, after an eviction ("later"). An answer counts if
every value asked for comes back. Seeds are fixed; intervals are 95 % Wilson scores. Runs on the CPU. Plots need
matplotlib (`pip install ortolan[bench]`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
from quality_plots import draw_plots
from quality_report import print_tables, read_runs, write_json
from quality_tasks import Trial, make_trials
from quality_trials import CHUNK_SIZE, MODES, SPARE_TOKENS, Outcome, Settings, measure_batch, policy_options

import ortolan
from ortolan.errors import ConfigError, OrtolanError
from ortolan.retrieval import KINDS, load_corpus, shipped_model

BATCH_PROMPTS = 11  # of one job; each loads the model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or read what was measured; print tables, and write JSON and plots where asked. Returns the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        if options.read:
            outcomes, about = read_runs(options.read)
        else:
            outcomes, about = measure(options), describe(options)
            if options.json:
                write_json(options.json, outcomes, about)
        print(", ".join(f"{name} {value}" for name, value in about.items()))
        print_tables(outcomes)
        for path in draw_plots(outcomes, options.plots) if options.plots else []:
            print(f"wrote {path}")
    except (OrtolanError, OSError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    policies = list(policy_options())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="bytes of a prompt")
    parser.add_argument("--samples", type=int, default=264, help="prompts for each length (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--values", type=int, default=2, help="asked for by multi_value (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--policies", nargs="+", default=policies, choices=policies)
    parser.add_argument("--removed", type=float, nargs="+", default=[0.5, 0.75, 0.875, 0.95], help="shares, 0 to 1")
    parser.add_argument("--window", type=int, default=64, help="queries that score (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one core each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write counts and every outcome to this file")
    parser.add_argument("--read", type=Path, nargs="+", help="show files that --json wrote, and measure nothing")
    parser.add_argument("--plots", type=Path, help="write PNG plots to this folder")
    return parser


def measure(options: argparse.Namespace) -> list[Outcome]:
    """Export the shipped model and ask it every prompt."""
    for name in ("samples", "jobs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it must be at least 1")
    settings = Settings(
        policies=tuple(options.policies),
        removed=tuple(options.removed),
        modes=tuple(options.modes),
        window=options.window,
    )
    settings.check(options.lengths)
    trials = draw_trials(options)
    with tempfile.TemporaryDirectory() as folder:
        context = max(options.lengths) + SPARE_TOKENS
        window = max(options.window, 64)
        path = ortolan.export(
            shipped_model(), Path(folder) / "model", max_context=context, chunk_size=CHUNK_SIZE, snapkv_window=window
        )
        batches = [trials[start : start + BATCH_PROMPTS] for start in range(0, len(trials), BATCH_PROMPTS)]
        return list(run_batches(partial(measure_batch, path, settings), batches, options.jobs))


def draw_trials(options: argparse.Namespace) -> list[Trial]:
    """Make the prompts of all lengths."""
    corpus = load_corpus("eval")
    drawn = (make_trials(corpus, length, options.samples, options.kinds, options.values) for length in options.lengths)
    return [trial for trials in drawn for trial in trials]


def run_batches(ask: Any, batches: Sequence[Sequence[Trial]], jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes of all batches in order, from `jobs` processes, under a progress bar."""
    from tqdm import tqdm

    total = sum(len(batch) for batch in batches)
    with tqdm(total=total, unit="prompt", desc="quality", disable=not sys.stderr.isatty()) as bar:
        if jobs == 1:
            for batch in batches:
                yield from ask(batch)
                bar.update(len(batch))
            return
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            for batch, outcomes in zip(batches, pool.map(ask, batches), strict=True):
                yield from outcomes
                bar.update(len(batch))


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Say what was measured on what."""
    names = ("lengths", "samples", "kinds", "values", "window")
    return {
        "machine": platform.machine(),
        "onnxruntime": onnxruntime.__version__,
        "ortolan": ortolan.__version__,
        **{name: getattr(options, name) for name in names},
    }


if __name__ == "__main__":
    sys.exit(main())
