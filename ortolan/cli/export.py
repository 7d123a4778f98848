"""`ortolan export`: a Hugging Face checkpoint folder becomes a model folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ortolan.cli.idle_options import warn_of_idle_making
from ortolan.cli.making import DEFAULT_PAGE_SIZE, add_cache_options, shown_progress

EPILOG = """examples:
  ortolan export ./Llama-3.2-1B ./llama --dtype float32 --max-context 32768
  ortolan export meta-llama/Llama-3.2-1B ./llama        # from the Hugging Face hub, or its cache
  ortolan export ./Llama-3.2-1B ./llama-int4 --weight-format int4 --group-size 128
  ortolan export ./folder-with-config-json ./random --weights random
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "export",
        help="export a checkpoint",
        description="Export a Hugging Face checkpoint (config.json, *.safetensors) to a model folder.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("hf_dir", help="folder of the checkpoint, or its id on the Hugging Face hub (owner/name)")
    parser.add_argument("out_dir", type=Path, help="model folder to make")
    parser.add_argument("--dtype", default="float32", help="float32 (default), float16 or bfloat16")
    parser.add_argument(
        "--max-context", type=int, help="longest sequence, tokens (default: the model's own, at most 32768)"
    )
    add_cache_options(parser)
    parser.add_argument(
        "--cache-dtype", help="fp8 or int8: caches of 8-bit codes with a scale for each row (default: the dtype)"
    )
    parser.add_argument("--weights", default="checkpoint", help="checkpoint (default) or random")
    parser.add_argument(
        "--weight-format",
        help="store linear weights, and experts of mixtures, as int4, int8, fp8, mxfp4 or dense (default: as the "
        "checkpoint has them)",
    )
    parser.add_argument(
        "--group-size",
        type=_group_size,
        help="input features that share a scale: 32, 64, 128 or channel (default: channel for fp8, else the largest "
        "that divides all layers)",
    )
    parser.add_argument("--asymmetric", action="store_true", help="give groups of int4 or int8 zero points")
    parser.add_argument("--quantizer", default="search", help="search (default, least squared error), nearest or gptq")
    parser.add_argument("--calibration", metavar="FILE", help="text that gptq rounds by (default: none)")
    parser.add_argument(
        "--activation-format", help="fp8: layers of fp8 round their inputs, too, W8A8 (default: the dtype)"
    )
    parser.add_argument(
        "--head-format", help="int8, int4 or dense (default: int8 with --weight-format, else as the checkpoint has it)"
    )
    parser.add_argument("--no-fuse", action="store_true", help="leave out the graphs of larger operators")
    parser.add_argument("--overwrite", action="store_true", help="replace an exported model in OUT_DIR")
    parser.set_defaults(run=run)


def _group_size(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def run(options: argparse.Namespace) -> int:
    """Export, with a progress bar on a terminal."""
    import ortolan

    with shown_progress() as progress:
        ortolan.export(
            options.hf_dir,
            options.out_dir,
            dtype=options.dtype,
            max_context=options.max_context,
            chunk_size=options.chunk_size,
            sink=options.sink,
            snapkv_window=options.snapkv_window,
            paged=options.paged,
            cache_dtype=options.cache_dtype,
            page_size=DEFAULT_PAGE_SIZE if options.page_size is None else options.page_size,
            weights=options.weights,
            fuse=not options.no_fuse,
            overwrite=options.overwrite,
            weight_format=options.weight_format,
            group_size=options.group_size,
            asymmetric=options.asymmetric,
            quantizer=options.quantizer,
            calibration=options.calibration,
            head_format=options.head_format,
            activation_format=options.activation_format,
            progress=progress,
        )
    warn_of_idle_making(options)
    print(options.out_dir)
    return 0
