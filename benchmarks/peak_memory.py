"""Measures what a long document costs: caches and the process's peak, without eviction, with it, and during prefill.

Run it with the package installed: `python benchmarks/peak_memory.py --tokens 100000`. The shipped model reads that many
bytes of Python sources on the CPU, each way in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import onnxruntime

import ortolan
from ortolan.cli.table import format_bytes, format_table
from ortolan.retrieval import Task, load_corpus, make_sample, shipped_model

BUDGET, ANSWER_TOKENS = 2048, 8
WAYS: dict[str, ortolan.SnapKv | None] = {
    "no eviction": None,
    f"SnapKV, budget {BUDGET}": ortolan.SnapKv(budget=BUDGET),
    "the same, during_prefill": ortolan.SnapKv(budget=BUDGET, during_prefill=True),
}


def peak_bytes() -> int:
    """Return the most memory that this process has held; getrusage would count its parent's, too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024


def measure(folder: str, tokens: int, way: str) -> dict[str, float]:
    """Read a document in this process; returns bytes and seconds."""
    model = ortolan.load(folder, device="cpu")
    prompt = model.tokenizer.encode(make_sample(load_corpus(), Task(length=tokens)).prompt)
    session = model.session(tokens + ANSWER_TOKENS, eviction=WAYS[way])
    list(session.generate(prompt, ANSWER_TOKENS))
    return {
        "planned": session.plan.bytes,
        "left": session.cache_bytes,
        "peak": peak_bytes(),
        "seconds": session.stats.prefill_seconds,
        "decode_ms": 1000 * session.stats.decode_seconds / max(1, session.stats.decode_tokens),
    }


def measure_apart(folder: str, tokens: int, way: str) -> list[str]:
    """Measure one way in another process; returns a row of the table."""
    command = [sys.executable, __file__, "--tokens", str(tokens), "--measure", folder, way]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    sizes = [format_bytes(int(done[name])) for name in ("planned", "left", "peak")]
    return [way, *sizes, f"{done['seconds']:.1f}", f"{done['decode_ms']:.1f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the document (default: %(default)s)")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], options.tokens, options.measure[1])))
        return
    warnings.simplefilter("ignore")  # the document is longer than what the model was trained on
    with tempfile.TemporaryDirectory() as folder:
        path = ortolan.export(shipped_model(), Path(folder) / "model", max_context=options.tokens + ANSWER_TOKENS)
        rows = [measure_apart(str(path), options.tokens, way) for way in WAYS]
    print(
        f"{platform.processor() or platform.machine()}, onnxruntime {onnxruntime.__version__}, {options.tokens} tokens"
    )
    header = ["", "caches while reading", "caches after", "peak of the process", "reading, s", "decode, ms a token"]
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
