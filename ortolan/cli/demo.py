"""`ortolan demo`: the shipped model reads a long document, forgets most of it, and answers a question."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortolan.cli.progress import token_bar
from ortolan.cli.table import format_bytes, format_table
from ortolan.errors import ConfigError, OrtolanError

SHIPPED_MODEL = "models/retriever"
CHUNK_SIZE = 512
ANSWER_TOKENS = 12

EPILOG = """examples:
  ortolan demo
  ortolan demo --length 12000 --budget 1500 --depth 0.9 --seed 7
  ortolan demo --keep-dir ./retriever && ortolan inspect ./retriever
"""


def add_parser(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "demo",
        help="ask the shipped model about a long document",
        description="Export the small model that comes with Ortolan, let it read a long text with a fact "
        "hidden in it, evict most of the cache, and ask for the fact. Shows what the caches cost, layer by layer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=8192, help="bytes of the document (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=1024, help="SnapKV's budget, tokens (default: %(default)s)")
    parser.add_argument("--depth", type=float, default=0.35, help="where the fact is, 0 to 1 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="picks text and fact (default: %(default)s)")
    parser.add_argument(
        "--keep-dir",
        type=Path,
        help="keep the exported model in this folder, or reuse it from there (default: remove it)",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where it is usable)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read the document, answer, and print the caches' cost."""
    import ortolan
    from ortolan.retrieval import Task, load_corpus, make_sample

    snapkv = ortolan.SnapKv(budget=options.budget)
    task = Task(length=options.length, depth=options.depth, seed=options.seed)
    source = shipped_model()
    _check_length(source, options.length)
    sample = make_sample(load_corpus("eval"), task)
    with _model_folder(options.keep_dir) as folder:
        if not _is_kept(folder):
            ortolan.export(source, folder, max_context=_longest(source), chunk_size=CHUNK_SIZE)
        model = ortolan.load(folder, device=options.device)
        session = model.session(options.length + ANSWER_TOKENS, CHUNK_SIZE, snapkv)
        _read_and_answer(model, session, sample)
        print(cost_table(session))
    return 0


def shipped_model() -> Path:
    """Return the folder of the model that comes with the package.

    Raises:
        OrtolanError: the installation lacks it.
    """
    folder = Path(__file__).resolve().parents[1] / SHIPPED_MODEL
    if not (folder / "config.json").is_file():
        raise OrtolanError(f"{folder} does not contain a model; install ortolan again")
    return folder


def _longest(source: Path) -> int:
    from ortolan.export.hf_config import read_hf_config

    return read_hf_config(source).integer("max_position_embeddings")


def _check_length(source: Path, length: int) -> None:
    longest = _longest(source) - ANSWER_TOKENS
    if length > longest:
        raise ConfigError(f"--length {length} is more than the model reads; at most {longest}")


@contextlib.contextmanager
def _model_folder(keep: Path | None) -> Iterator[Path]:
    """Give the folder to export to: the caller's, or a temporary one that is removed."""
    if keep is not None:
        if os.path.exists(keep) and not os.path.isdir(keep):
            raise ConfigError(f"--keep-dir {keep} exists and is not a folder; choose another one")
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="ortolan-demo-") as folder:
        yield Path(folder) / "model"


def _is_kept(folder: Path) -> bool:
    """Say whether an earlier demo has left its model in the folder. Raises ConfigError where it cannot be read."""
    try:
        return os.path.exists(folder) and any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--keep-dir {folder} cannot be read: {error.strerror or error}; choose another") from error


def _read_and_answer(model: Any, session: Any, sample: Any) -> None:
    """Print the fact, the question, and what the model answers after the eviction."""
    from ortolan.retrieval import is_correct
    from ortolan.runtime import stream_text

    token_ids = model.tokenizer.encode(sample.prompt)
    print(f"document  {len(sample.prompt)} bytes of Python sources, {len(token_ids)} tokens")
    print(f"hidden    {sample.fact.line.strip()!r} at byte {sample.needle_start}")
    print(f"question  {sample.fact.question.strip()!r}")
    start = time.perf_counter()
    with token_bar(len(token_ids)) as bar:
        tokens = session.generate(token_ids, ANSWER_TOKENS, progress=bar.update, stop=["\n"])
    seconds = time.perf_counter() - start
    text = "".join(stream_text(model.tokenizer, tokens))
    verdict = "right" if is_correct(sample, text) else f"wrong, it is {sample.answer}"
    print(f"answer    {text.strip()!r} ({verdict})")
    evicted = "evicted once" if session.stats.evictions else "nothing to evict: the document is within the budget"
    print(f"read in chunks of {session.plan.chunk_size} tokens in {seconds:.1f} s, {evicted}\n")


def cost_table(session: Any) -> str:
    """Format the bytes of each layer's cache: of full length, as planned for the prompt, and now."""
    rows = []
    total = 0
    for index, layer in enumerate(session.plan.layers):
        now = session.cache_capacity(index) * layer.slot_bytes
        total += now
        rows.append(
            [
                str(index),
                layer.kind,
                str(layer.window) if layer.window > 0 else "-",
                format_bytes(layer.full_length_bytes),
                format_bytes(layer.bytes),
                format_bytes(now),
                str(session.physical_length(index)),
            ]
        )
    plan = session.plan
    full = format_bytes(plan.full_length_bytes)
    rows.append(["all", "", "", full, format_bytes(plan.bytes), format_bytes(total), ""])
    header = ["layer", "kind", "window", "full length", "while reading", "after eviction", "tokens held"]
    return format_table(header, rows)
