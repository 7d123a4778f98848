"""`ortolan bench`: times a model folder on this machine, on prompts of random tokens."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ortolan.cli.eviction import add_eviction_options, read_eviction
from ortolan.cli.models import add_device_options, open_model
from ortolan.cli.progress import run_bar
from ortolan.cli.report import check_report_target, write_report
from ortolan.cli.table import format_bytes, format_table
from ortolan.errors import ConfigError

EPILOG = """examples:
  ortolan bench ./llama
  ortolan bench ./llama --prompts 1024 8192 32000 --decode 128 --device cuda --json bench.json
  ortolan bench ./llama --prompts 16384 --evict snapkv --budget 2048
"""
SEED = 0
COUNTERS = ("prefill_seconds", "eviction_seconds", "decode_seconds", "decode_tokens")


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "bench",
        help="time prefill and decode",
        description="Time prefill and decode of an exported model on prompts of random tokens, one sequence at a time. "
        "Figures are medians of the repeats after one to warm up.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", help="folder that `ortolan export` made, or the Hub id of one (owner/name)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048], help="lengths (default: 512 2048)")
    parser.add_argument("--decode", type=int, default=32, help="tokens decoded after each (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each length (default: %(default)s)")
    add_device_options(parser)
    parser.add_argument(
        "--chunk-size",
        type=int,
        help="prompt tokens per step (default: the export's; where it chose none, CUDA may take more)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures; - for standard output, in place of the table (default: none)"
    )
    add_eviction_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure each length, and print a table or JSON."""
    import ortolan

    for name in ("prompts", "decode", "repeats"):
        given = getattr(options, name)
        smallest = min(given if isinstance(given, list) else [given])
        if smallest < 1:
            raise ConfigError(f"--{name} is {smallest}; it must be at least 1")
    check_report_target(options.json)
    eviction = read_eviction(options)
    model = open_model(options)
    _check_lengths(options, model.manifest.max_context)
    with run_bar(len(options.prompts) * (options.repeats + 1)) as bar:
        rows = [_measure(model, length, eviction, options, bar) for length in options.prompts]
    if options.json != "-":
        print(_table(rows))
    if options.json:
        report = {"model": str(options.model_dir), "ortolan": ortolan.__version__, "prompts": rows}
        write_report(options.json, report, sys.stdout)
    return 0


def _check_lengths(options: argparse.Namespace, max_context: int) -> None:
    """Refuse what the model does not hold before the first length is measured. Raises ConfigError."""
    longest = max(options.prompts)
    if longest + options.decode > max_context:
        raise ConfigError(
            f"--prompts {longest} and --decode {options.decode} make {longest + options.decode} tokens, more than the "
            f"{max_context} that the model was made for; give fewer, or make its folder again with a larger "
            "max_context (--max-context of `ortolan export` or `convert`)"
        )


def _measure(model: Any, length: int, eviction: Any, options: argparse.Namespace, bar: Any) -> dict[str, Any]:
    """Return the figures of one prompt length; each run moves the bar."""
    import statistics

    import numpy as np

    session = model.session(length + options.decode, options.chunk_size, eviction)
    prefill, evict, decode, decoded = [], [], [], 0
    for turn in range(options.repeats + 1):
        prompt = np.random.default_rng(SEED + turn).integers(0, model.manifest.vocab_size, length).tolist()
        bar.set_description(f"{length} tokens, {'run ' + str(turn) if turn else 'warming up'}")
        session.rewind(0)
        before = session.stats.as_dict()
        decoded = sum(1 for _ in session.generate(prompt, options.decode))
        spent = {name: value - before[name] for name, value in session.stats.as_dict().items() if name in COUNTERS}
        bar.update()
        if not turn:
            continue
        prefill.append(spent["prefill_seconds"])
        evict.append(spent["eviction_seconds"])
        if spent["decode_tokens"]:
            decode.append(spent["decode_seconds"] / spent["decode_tokens"])
    return {
        "prompt_tokens": length,
        "prefill_seconds": statistics.median(prefill),
        "prefill_tokens_per_second": length / statistics.median(prefill),
        "eviction_seconds": statistics.median(evict),
        "decode_tokens": decoded,
        "decode_ms_per_token": 1e3 * statistics.median(decode) if decode else None,
        "memory": session.memory_report().as_dict(),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    header = ("prompt", "prefill", "tokens/s", "eviction", "decode", "caches")
    return format_table(header, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    decode = row["decode_ms_per_token"]
    return [
        str(row["prompt_tokens"]),
        f"{1e3 * row['prefill_seconds']:.1f} ms",
        f"{row['prefill_tokens_per_second']:.0f}",
        f"{1e3 * row['eviction_seconds']:.1f} ms",
        "-" if decode is None else f"{decode:.3f} ms",
        format_bytes(row["memory"]["cache_bytes"]),
    ]
