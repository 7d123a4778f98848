"""Times first token, decode and memory of whole models on a GPU beside onnxruntime-genai, in one run.

    python benchmarks/model_cuda.py llama-1b --prompts 1024 8192 32768 --json llama.json

The models are public shapes with random bfloat16 weights; both engines export the same checkpoint. Each runs alone, in
a process of its own, continues equal random prompts greedily, and its memory is what the driver reports. genai's
model is built with its CUDA graph on. With `--weight-format int4` both export int4, each in blocks of its own default.
Without the peer no checkpoint is written, so that a large shape needs no more disk than its export.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from model_shapes import SHAPES, shape_config, text_config
from random_checkpoints import make_checkpoint, save_bfloat16, write_config

import ortolan

RINGS_CHUNK = 8192  # prompt tokens per step that rings are planned for, where the command names no number
WORKER = Path(__file__).with_name("cuda_worker.py")


class Worker:
    """One engine in a process of its own that answers a line of JSON with a line of JSON."""

    def __init__(self, engine: str, folder: Path, max_context: int) -> None:
        command = [sys.executable, str(WORKER), engine, str(folder), str(max_context)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self._answer()

    def run(self, **request: int) -> dict[str, Any]:
        """Time one prompt length."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return dict(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with code {self._process.wait()}; its messages are above")
        return json.loads(line)


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 8192, 32768], help="prompt lengths, tokens")
    parser.add_argument("--decode", type=int, default=96, help="tokens decoded after each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--chunk-size",
        type=int,
        help=f"prompt tokens per step, ours (default: {RINGS_CHUNK} for models with windows, else a session's choice)",
    )
    parser.add_argument("--weight-format", help="of both engines, as `ortolan export` takes it (default: bfloat16)")
    parser.add_argument(
        "--peer-precision", help="of the peer's weights, as its builder takes it (default: --weight-format, or bf16)"
    )
    parser.add_argument(
        "--activation-format", help="of ours, with fp8 weights: fp8 rounds what layers read (default: bfloat16)"
    )
    parser.add_argument("--head-format", help="of our head (default: the export's)")
    parser.add_argument("--group-size", type=int, help="of our weight format (default: the export's)")
    parser.add_argument("--cache-dtype", help="of our caches (default: bfloat16)")
    parser.add_argument("--batch-invariant", action="store_true", help="measure ours loaded with batch_invariant, too")
    parser.add_argument("--layers", type=int, help="take only so many of a shape's layers")
    parser.add_argument("--work-dir", type=Path, help="keep checkpoints and exports here, and reuse them")
    parser.add_argument("--no-peer", action="store_true", help="measure Ortolan alone")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        name = options.shape if options.layers is None else f"{options.shape}-{options.layers}"
        work = (options.work_dir or Path(scratch)) / name
        checkpoint, weights = source_of(
            options.shape, work / "checkpoint", is_random=options.no_peer, layers=options.layers
        )
        limit = max(options.prompts) + options.decode + 2
        folders = {"ortolan": export_ours(checkpoint, work / f"ortolan-{kind_of(options)}", limit, options, weights)}
        if options.batch_invariant:
            folders["invariant"] = folders["ortolan"]
        if not options.no_peer:
            precision = options.peer_precision or options.weight_format or "bf16"
            folders["genai"] = export_peer(checkpoint, work / f"genai-{precision}", precision)
        results = {name: measure(name, folder, limit, options) for name, folder in folders.items() if folder}
    report = {"gpu": query("name"), "model": options.shape, "layers": options.layers, **results}
    print_table(options.prompts, results)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def kind_of(options: argparse.Namespace) -> str:
    """Name what the export of one set of options is."""
    head = options.head_format and f"{options.head_format}-head"
    kinds = ("bfloat16", options.weight_format, head, options.activation_format, options.cache_dtype)
    return "-".join(filter(None, kinds))


def source_of(shape: str, checkpoint: Path, *, is_random: bool, layers: int | None = None) -> tuple[Path, str]:
    """Make what an export reads, and say where its weights come from: of a config alone it draws them itself."""
    if is_random:
        write_config(shape_config(shape, layers), checkpoint, "bfloat16")
        return checkpoint, "random"
    return make_checkpoint(shape, checkpoint, "bfloat16", save_bfloat16, layers=layers), "checkpoint"


def export_ours(checkpoint: Path, folder: Path, max_context: int, options: argparse.Namespace, weights: str) -> Path:
    """Export by Ortolan."""
    if not folder.exists():
        windows = text_config(options.shape).get("sliding_window")
        ortolan.export(
            checkpoint,
            folder,
            dtype="bfloat16",
            max_context=max_context,
            chunk_size=options.chunk_size or (RINGS_CHUNK if windows else None),
            weight_format=options.weight_format,
            head_format=options.head_format,
            group_size=options.group_size,
            activation_format=options.activation_format,
            cache_dtype=options.cache_dtype,
            quantizer="nearest" if options.weight_format else "search",  # the search is slower; steps take as long
            weights=weights,
        )
    return folder


def export_peer(checkpoint: Path, folder: Path, precision: str) -> Path | None:
    """Export by the peer's builder; None where it refuses the model."""
    if not (folder / "genai_config.json").is_file():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", folder]
        command += ["-p", precision, "-e", "cuda", "-c", folder / "cache"]
        command += ["--extra_options", "enable_cuda_graph=true", "prune_lm_head=true"]
        built = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if built.returncode:
            print(f"genai's builder refuses the model: {built.stdout.strip().splitlines()[-1]}")
            return None
    return folder


def measure(name: str, folder: Path, max_context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one engine over all prompt lengths, shortest first, and read the memory after each."""
    before = int(query("memory.used"))
    rows = []
    worker = None
    vocab_size = text_config(options.shape)["vocab_size"]
    try:
        worker = Worker(name, folder, max_context)
        for prompt in sorted(options.prompts):
            row = worker.run(
                prompt_tokens=prompt, decode=options.decode, repeats=options.repeats, vocab_size=vocab_size
            )
            rows.append({"prompt_tokens": prompt, **row, "used_mib": int(query("memory.used")) - before})
            print(f"{name}: {json.dumps(rows[-1])}", flush=True)
    except RuntimeError as error:
        print(f"{name}: {error}")
    finally:
        if worker is not None:
            worker.close()
    return rows


def print_table(prompts: list[int], results: dict[str, list[dict[str, Any]]]) -> None:
    """Print one line per prompt length and engine, with the peer's figure over ours."""
    print(f"{'prompt':>7} {'engine':>9} {'first token ms':>15} {'decode ms':>10} {'GPU MiB':>8}")
    by_prompt = {name: {row["prompt_tokens"]: row for row in rows} for name, rows in results.items()}
    for prompt in sorted(prompts):
        for name, rows in by_prompt.items():
            if row := rows.get(prompt):
                first, token = 1e3 * row["first_token_seconds"], 1e3 * (row["token_seconds"] or float("nan"))
                print(f"{prompt:>7} {name:>9} {first:>15.1f} {token:>10.3f} {row['used_mib']:>8}")
        ours, peer = (by_prompt.get(name, {}).get(prompt) for name in ("ortolan", "genai"))
        if ours and peer:
            keys = ("first_token_seconds", "token_seconds", "used_mib")
            ratios = " ".join(f"{peer[key] / ours[key]:.2f}" for key in keys if peer[key] and ours[key])
            print(f"{prompt:>7} genai / ortolan: {ratios}")


def query(field: str) -> str:
    """Ask the driver about the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
