"""Opens engines as the command line's options say, with the service that answers requests by them."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortolan.cli.choosing import add_speculation_options, open_drafter, read_speculation
from ortolan.cli.models import add_device_options, open_model
from ortolan.errors import ConfigError, whole_number

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine, its model, and what all requests share."""
    parser.add_argument(
        "model_dir", help="folder that `ortolan export --paged` made, or the Hub id of one (owner/name)"
    )
    add_device_options(parser)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-sequences", type=int, default=16, help="requests that run at once; others wait (default: %(default)s)"
    )
    group.add_argument(
        "--max-cache-bytes",
        type=read_bytes,
        metavar="N[KiB|MiB|GiB]",
        help="of all caches together (default: what the longest sequences need; CUDA: four fifths of the free memory)",
    )
    group.add_argument("--max-context", type=int, help="longest sequence, tokens (default: the export's)")
    group.add_argument("--chunk-tokens", type=int, help="most tokens of a step (default: the export's)")
    group.add_argument(
        "--overcommit", type=float, default=1.0, help="how many times over caches are promised (default: %(default)s)"
    )
    group.add_argument(
        "--host-cache-bytes",
        type=read_bytes,
        default=0,
        metavar="N[KiB|MiB|GiB]",
        help="of copies of prompts' beginnings in host memory, for later prompts that begin so (default: %(default)s)",
    )
    group.add_argument(
        "--disk-cache", metavar="FOLDER", help="keep such copies in files, which outlive the command (default: none)"
    )
    group.add_argument(
        "--disk-cache-bytes",
        type=read_bytes,
        metavar="N[KiB|MiB|GiB]",
        help="of these files (default: 16GiB)",
    )
    group = parser.add_argument_group("requests")
    group.add_argument("--model-name", metavar="NAME", help="of the model in requests (default: the folder's)")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=1024,
        help="most tokens of an answer in a chat that names no number (default: %(default)s)",
    )
    group.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="template in Jinja's language (default: the model's)"
    )
    add_speculation_options(parser)


def read_bytes(text: str) -> int:
    """Read a number of bytes, with a binary unit or without."""
    unit = next(unit for unit in reversed(UNITS) if text.endswith(unit))
    try:
        return int(float(text.removesuffix(unit)) * UNITS[unit])
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write 2147483648 or 2GiB") from error


@contextlib.contextmanager
def open_service(options: argparse.Namespace) -> Iterator[Any]:
    """Open the model, its engine and the service; the engine is closed at the end. Raises OrtolanError."""
    import ortolan
    from ortolan.serving import Service

    whole_number("--max-new-tokens", options.max_new_tokens)
    files = {} if options.disk_cache_bytes is None else {"disk_cache_bytes": options.disk_cache_bytes}
    _check_template(options.chat_template)
    speculation = read_speculation(options)
    model = open_model(options)
    open_drafter(model, options)
    engine = ortolan.Engine(
        model,
        options.max_sequences,
        options.max_cache_bytes,
        options.chunk_tokens,
        max_context=options.max_context,
        overcommit=options.overcommit,
        host_cache_bytes=options.host_cache_bytes,
        disk_cache=options.disk_cache,
        **files,
    )
    with engine:
        yield Service(
            model=model,
            engine=engine,
            name=options.model_name or Path(options.model_dir).resolve().name,
            max_new_tokens=options.max_new_tokens,
            chat_template=options.chat_template,
            speculation=speculation,
        )


def _check_template(path: Path | None) -> None:
    """Refuse a template that no request could use. Raises ConfigError."""
    try:
        _ = path is not None and path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error
