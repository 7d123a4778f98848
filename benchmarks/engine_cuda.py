"""Measures many sequences at once on a GPU, beside onnxruntime-genai in the same run.

    python benchmarks/engine_cuda.py llama-1b --batches 1 8 32 64 --context 4096 --mixed --json engine.json
    python benchmarks/engine_cuda.py gemma3-1b --batches --capacity 32768 --no-peer

Decode: a batch of random prompts of one length, then tokens per second of the whole batch. Mixed: a number of requests
under way at all times, with prompts of 512 to 8192 tokens; rates, and how long a token was waited for. Capacity: how
many sequences of one length run at once in the bytes that two full-length caches of it take. Each engine runs alone in
a process of its own, on the same random bfloat16 weights: genai's batch generator, whose prompts share one length, and
its engine, where its builder can make a paged model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from model_cuda import export_peer, query, source_of
from model_shapes import SHAPES, text_config

import ortolan

WORKER = Path(__file__).with_name("engine_worker.py")
MIXED = {"running": 32, "requests": 160, "prompts": [512, 1024, 2048, 4096, 8192], "new": 128}
DECODE_SLACK = 2048  # tokens that the first sequence of a batch generates while the last prompt is read, at most


def main() -> None:
    """Measure, print a line for each figure, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt of a batch")
    parser.add_argument("--decode", type=int, default=128, help="tokens timed after the prompts")
    parser.add_argument("--mixed", action="store_true", help="measure mixed traffic too")
    parser.add_argument("--capacity", type=int, help="count concurrent sequences of that many tokens")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="tokens of a step, ours")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--weight-format", help="of ours and of genai's batches (default: bfloat16)")
    parser.add_argument("--work-dir", type=Path, help="keep checkpoints and exports here, and reuse them")
    parser.add_argument("--no-peer", action="store_true", help="measure Ortolan alone")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.work_dir or Path(scratch)) / options.shape
        results = {name: measure(name, folder, options) for name, folder in export_all(work, options).items()}
    report = {"gpu": query("name"), "model": options.shape, "context": options.context, **results}
    print_ratios(results, options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def longest(options: argparse.Namespace) -> int:
    """Return the longest sequence of the run."""
    mixed = max(MIXED["prompts"]) + MIXED["new"] if options.mixed else 0
    return max(options.context + options.decode + DECODE_SLACK, mixed, options.capacity or 0)


def export_all(work: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Export the checkpoint for every engine that takes it."""
    checkpoint, weights = source_of(options.shape, work / "checkpoint", is_random=options.no_peer)
    ours = work / f"ortolan-paged-{options.page_size}-{longest(options)}-{options.weight_format or 'bfloat16'}"
    if not ours.exists():
        ortolan.export(
            checkpoint, ours, dtype="bfloat16", max_context=longest(options), chunk_size=options.chunk_tokens,
            paged=True, page_size=options.page_size, weight_format=options.weight_format,
            quantizer="nearest" if options.weight_format else "search", weights=weights,
        )  # fmt: skip
    folders = {"ortolan": ours}
    if not options.no_peer:
        peers = {"genai": export_peer(checkpoint, work / "genai", options.weight_format or "bf16")}
        peers["genai-engine"] = export_paged_peer(checkpoint, work / "genai-paged")
        folders |= {name: folder for name, folder in peers.items() if folder}
    return folders


def export_paged_peer(checkpoint: Path, folder: Path) -> Path | None:
    """Export a paged model by the peer's builder; None where it cannot."""
    if not (folder / "genai_config.json").is_file():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", folder]
        command += ["-p", "bf16", "-e", "cuda", "-c", folder / "cache", "--extra_options", "use_paged_attention=true"]
        built = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        config = folder / "genai_config.json"
        if built.returncode or "dynamic_batching" not in config.read_text(encoding="utf-8"):
            print(f"genai's builder makes no paged model: {built.stdout.strip().splitlines()[-1]}")
            return None
    return folder


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine through all that is asked for."""
    settings = {
        "max_context": longest(options),
        "chunk_tokens": options.chunk_tokens,
        "max_sequences": max([*options.batches, MIXED["running"]]),
    }
    command = [sys.executable, str(WORKER), name, str(folder), json.dumps(settings)]
    vocab = {"vocab_size": text_config(options.shape)["vocab_size"]}
    requests: dict[str, dict[str, Any]] = {
        f"decode {batch}": {"kind": "decode", "batch": batch, "context": options.context, "decode": options.decode}
        for batch in options.batches
    }
    if options.mixed and name != "genai":
        requests["mixed"] = {"kind": "mixed", **MIXED}
    if options.capacity and name == "ortolan":
        requests["capacity"] = {"kind": "capacity", "budget_sequences": 2, "context": options.capacity}
    answers: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        answers["versions"] = answer(process, None)
        for title, request in requests.items():
            answers[title] = answer(process, request | vocab)
            print(f"{name} {title}: {json.dumps(answers[title])}", flush=True)
            if process.poll() is not None:
                break
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close() if process.stdin else None
    return answers


def answer(process: subprocess.Popen[str], request: dict[str, Any] | None) -> Any:
    """Send a request, if there is one, and return the answer; an error where the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if request is not None:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return json.loads(process.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
        return {"error": f"the worker ended with code {process.wait()}; its messages are above"}


def print_ratios(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print our tokens per second over each peer's."""
    ours = results["ortolan"]
    for title in [*(f"decode {batch}" for batch in options.batches), "mixed"]:
        for peer in ("genai", "genai-engine"):
            pair = [side.get(title, {}).get("generated_per_second") for side in (ours, results.get(peer, {}))]
            if all(pair):
                print(f"{title}: ortolan / {peer} = {pair[0] / pair[1]:.2f}")


if __name__ == "__main__":
    main()
