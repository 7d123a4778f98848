"""`ortolan convert`: a model that another exporter made becomes a model folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ortolan.cli.idle_options import warn_of_idle_making
from ortolan.cli.making import DEFAULT_PAGE_SIZE, add_cache_options, shown_progress

EPILOG = """examples:
  ortolan convert ./phi-3-int4 ./phi                    # what onnxruntime-genai's model builder wrote
  ortolan convert ./export/decoder.onnx ./model --max-context 16384
  ortolan convert ./mistral ./mistral-rings --sliding-window 4096
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "convert",
        help="convert a model that another exporter made",
        description="Convert a decoder with GroupQueryAttention nodes (a folder with genai_config.json, or an .onnx "
        "file) to a model folder. Weights and arithmetic stay; attention and caches become Ortolan's.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="folder of the model, or its .onnx file")
    parser.add_argument("target", type=Path, help="model folder to make")
    parser.add_argument(
        "--max-context",
        type=int,
        help="longest sequence, tokens (default: what its RoPE tables hold, up to its context_length and 32768)",
    )
    parser.add_argument(
        "--sliding-window",
        type=int,
        help="window of layers that have none in the graph, where the exporter left it out (default: none)",
    )
    add_cache_options(parser)
    parser.add_argument("--no-fuse", action="store_true", help="leave out the graphs of larger operators")
    parser.add_argument("--overwrite", action="store_true", help="replace an exported model in TARGET")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert, with a progress bar on a terminal."""
    import ortolan

    with shown_progress() as progress:
        ortolan.convert(
            options.source,
            options.target,
            max_context=options.max_context,
            chunk_size=options.chunk_size,
            sink=options.sink,
            snapkv_window=options.snapkv_window,
            sliding_window=options.sliding_window or 0,
            paged=options.paged,
            page_size=DEFAULT_PAGE_SIZE if options.page_size is None else options.page_size,
            overwrite=options.overwrite,
            progress=progress,
            fuse=not options.no_fuse,
        )
    warn_of_idle_making(options)
    print(options.target)
    return 0
