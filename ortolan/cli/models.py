"""Opens models and sessions as the command line's options say."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ortolan.cli.report import print_warning
from ortolan.cli.table import format_bytes
from ortolan.errors import CapacityError, ContextLengthError


def add_device_options(parser: argparse.ArgumentParser, *, plain: bool = True) -> None:
    """Add the options of where a model runs; `plain`: also whether it runs its fused graph."""
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where it is usable)")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: one per core (default: %(default)s)")
    if plain:
        parser.add_argument("--plain", action="store_true", help="run the plain graph, not the fused one")
        parser.add_argument(
            "--host-embeddings",
            action="store_true",
            help="keep per-layer embeddings (Gemma 4 E2B, E4B) in host memory, which takes them from the GPU's",
        )
        parser.add_argument(
            "--batch-invariant",
            action="store_true",
            help="give each request the same bits alone, in any batch and in any chunking of its prompt",
        )


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Add how long a session's sequence may be, and how it is read."""
    parser.add_argument("--max-context", type=int, help="longest sequence, tokens (default: the export's)")
    parser.add_argument(
        "--chunk-size",
        type=int,
        help="prompt tokens per step (default: the export's; where it chose none, CUDA may take more)",
    )


def open_model(options: argparse.Namespace) -> Any:
    """Open the model that the options name. Raises as `ortolan.load`."""
    import ortolan

    fused = False if options.plain else None
    return ortolan.load(
        options.model_dir,
        device=options.device,
        num_threads=options.threads,
        fused=fused,
        host_embeddings=options.host_embeddings,
        batch_invariant=options.batch_invariant,
    )


def open_session(model: Any, options: argparse.Namespace, eviction: Any) -> Any:
    """Make the session that the options ask for, or restore it; where memory is short, say what takes less.

    Raises as `Model.session` and `Model.restore`.
    """
    from ortolan.runtime.device.host_memory import free_memory_bytes

    try:
        if options.load_session:
            return model.restore(options.load_session, options.max_context, options.chunk_size, eviction=eviction)
        free = free_memory_bytes() if model.device.name == "cpu" else None
        session = model.session(options.max_context, options.chunk_size, eviction)
        if free is not None and session.plan.bytes > free:  # the host hands out more than it has
            print_warning(
                f"the caches may take {format_bytes(session.plan.bytes)}, and {format_bytes(free)} of memory are free; "
                f"lower --max-context{_advice(model, options, eviction)}"
            )
        return session
    except ContextLengthError:
        raise
    except CapacityError as error:
        raise CapacityError(f"{error}{_advice(model, options, eviction)}") from error


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
