"""Opens models and sessions as the command line's options say."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from ortolan.cli.table import format_bytes
from ortolan.errors import CapacityError, ContextLengthError

MEMORY_FILE = "/proc/meminfo"


def add_device_options(parser: argparse.ArgumentParser, *, plain: bool = True) -> None:
    """Add the options of where a model runs; `plain`: also whether it runs its fused graph."""
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where it is usable)")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: one per core (default: %(default)s)")
    if plain:
        parser.add_argument("--plain", action="store_true", help="run the plain graph on CUDA, not the fused one")


def open_model(options: argparse.Namespace) -> Any:
    """Open the model that the options name. Raises as `ortolan.load`."""
    import ortolan

    fused = False if options.plain else None
    return ortolan.load(options.model_dir, device=options.device, num_threads=options.threads, fused=fused)


def open_session(model: Any, options: argparse.Namespace, eviction: Any) -> Any:
    """Make the session that the options ask for, or restore it; where memory is short, say what takes less.

    Raises as `Model.session` and `Model.restore`.
    """
    try:
        if options.load_session:
            return model.restore(options.load_session, options.max_context, options.chunk_size, eviction=eviction)
        plan = model.plan(options.max_context, options.chunk_size, eviction=eviction)
        free = free_host_bytes() if model.device.name == "cpu" else None
        if free is not None and plan.bytes > free:
            print(
                f"ortolan: warning: the caches may take {format_bytes(plan.bytes)}, and {format_bytes(free)} of memory "
                f"are free; lower --max-context{_advice(model, options, eviction)}",
                file=sys.stderr,
            )
        return model.session(options.max_context, options.chunk_size, eviction)
    except ContextLengthError:
        raise
    except CapacityError as error:
        raise CapacityError(f"{error}{_advice(model, options, eviction)}") from error


def free_host_bytes() -> int | None:
    """Return the memory that the system could give without swapping; None where it does not say."""
    try:
        with open(MEMORY_FILE, encoding="ascii") as lines:
            kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(kibibytes) * 1024


def _advice(model: Any, options: argparse.Namespace, eviction: Any) -> str:
    """Say what evicting during prefill would save; nothing where it would not, or is not possible."""
    import ortolan

    if eviction is not None and (eviction.during_prefill or eviction.keeps_uneven):
        return ""
    try:
        bounded = dataclasses.replace(eviction or ortolan.SnapKv(), during_prefill=True)
        plans = [model.plan(options.max_context, options.chunk_size, eviction=each) for each in (eviction, bounded)]
    except ortolan.OrtolanError:  # the model cannot evict, or the numbers are refused for themselves
        return ""
    if plans[1].bytes >= plans[0].bytes:
        return ""
    policy = "" if eviction else f"--evict {bounded.policy} "
    return (
        f"; or evict while the prompt is read, by {policy}--evict-option during_prefill=true: then caches take "
        f"{format_bytes(plans[1].bytes)} instead of {format_bytes(plans[0].bytes)}"
    )
