"""`ortolan perplexity`: measures how well a model predicts a text file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ortolan.cli.progress import token_bar
from ortolan.cli.report import check_report_target, write_report
from ortolan.errors import ConfigError

EPILOG = """examples:
  ortolan perplexity ./llama wiki.txt
  ortolan perplexity ./llama wiki.txt --window 4096 --stride 1024 --json -
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "perplexity",
        help="measure how well a model predicts a text",
        description="Measure the perplexity of a text, over windows that move by a stride. Every token but the first "
        "is predicted once.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", help="folder that `ortolan export` made, or the Hub id of one (owner/name)")
    parser.add_argument("file", type=Path, help="text, UTF-8")
    parser.add_argument("--window", type=int, help="tokens that a prediction looks back on (default: max_context)")
    parser.add_argument("--stride", type=int, help="tokens between the beginnings of windows (default: window / 2)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where it is usable)")
    parser.add_argument("--plain", action="store_true", help="run the plain graph on CUDA, not the fused one")
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures; - for standard output, in place of the text (default: none)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print one line or JSON."""
    import ortolan
    from ortolan.runtime.perplexity import measure_perplexity

    check_report_target(options.json)
    try:
        text = options.file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{options.file} cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"{options.file} is empty")
    model = ortolan.load(options.model_dir, device=options.device, fused=False if options.plain else None)
    token_ids = model.tokenizer.encode(text)
    with token_bar(max(0, len(token_ids) - 1)) as bar:
        measured = measure_perplexity(model, token_ids, options.window, options.stride, bar.update)
    report = {
        "perplexity": measured.perplexity,
        "tokens": measured.tokens,
        "negative_log_likelihood": measured.negative_log_likelihood,
        "bits_per_byte": measured.bits / len(text.encode()),
        "model": str(options.model_dir),
        "file": str(options.file),
    }
    if options.json != "-":
        print(f"perplexity {measured.perplexity:.4f} over {measured.tokens} tokens")
    if options.json:
        write_report(options.json, report, sys.stdout)
    return 0
