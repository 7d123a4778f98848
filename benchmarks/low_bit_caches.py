"""Measures what 8-bit caches cost: perplexity and retrieval of the shipped model, with and without SnapKV.

Run it with the package installed: `python benchmarks/low_bit_caches.py`. Text and facts are Python sources that
training did not see.
"""

from __future__ import annotations

import argparse
import platform
import random
import tempfile
from pathlib import Path

import onnxruntime
from retrieval import ANSWER_TOKENS, REDUCTION, count_right, draw_samples

import ortolan
from ortolan.cli.table import format_table
from ortolan.retrieval import load_corpus, shipped_model
from ortolan.runtime.perplexity import measure_perplexity

CACHES = (None, "int8", "fp8")


def measure(folder: Path, cache_dtype: str | None, options: argparse.Namespace) -> list[str]:
    """Export with one type of caches; returns a row of the table."""
    context = max(options.length + ANSWER_TOKENS, options.window)
    path = ortolan.export(shipped_model(), folder, max_context=context, chunk_size=512, cache_dtype=cache_dtype)
    model = ortolan.load(path, device="cpu")
    text = "".join(load_corpus("eval").lines(random.Random(0), options.text_bytes))
    result = measure_perplexity(model, model.tokenizer.encode(text), options.window, options.window // 2)
    samples = draw_samples(options.length, options.samples)
    snapkv = ortolan.SnapKv(budget=options.length // REDUCTION)
    right = [100 * count_right(model, samples, each) / len(samples) for each in (None, snapkv)]
    size = model.plan(options.length).bytes
    return [cache_dtype or "float32", f"{size / 2**20:.2f}", f"{result.perplexity:.5f}", *(f"{r:.1f}" for r in right)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="bytes of a prompt (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=66, help="prompts (default: %(default)s)")
    parser.add_argument("--text-bytes", type=int, default=65536, help="of perplexity's text (default: %(default)s)")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window of it (default: %(default)s)")
    options = parser.parse_args()
    rows = []
    for cache_dtype in CACHES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder) / "model", cache_dtype, options))
    print(f"{platform.machine()}, onnxruntime {onnxruntime.__version__}, ortolan {ortolan.__version__}\n")
    kept = options.length // REDUCTION
    titles = ["caches", f"MiB at {options.length}", "perplexity", "right, %", f"right with SnapKV, {kept} kept, %"]
    print(format_table(titles, rows))


if __name__ == "__main__":
    main()
