"""Times prefill and decode of whole models on the CPU beside onnxruntime-genai, in one run.

    python benchmarks/model_cpu.py qwen3-0.6b --peer-python PEER/bin/python --json model_cpu.json

PEER is a virtual environment with onnxruntime-genai, and with onnx_ir, torch and transformers for its model
builder. Both engines export one checkpoint to float32 or, with --int4, to int4 (each as it does by default, the
peer with `int4_accuracy_level` 4). They read equal prompts and feed equal tokens, with as many threads; their turns
alternate, so that a slow minute of the machine hits both. `qwen3-0.6b` is that model's shape with random weights;
`retriever` is the model that comes with Ortolan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime
from random_checkpoints import make_checkpoint, save_float32

import ortolan
from ortolan.retrieval import shipped_model

WORKER = Path(__file__).with_name("genai_worker.py")
CHUNK_SIZE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One prompt and the tokens after it: seconds, and the logits' first values as a check."""

    prefill_seconds: float
    token_seconds: float  # median of the decode steps
    best_token: int  # most likely after the prompt
    best_logit: float


class Engine(Protocol):
    """Runs one prompt from an empty cache."""

    def run(self, prompt: list[int], fed: list[int]) -> Timing:
        """Read a prompt, then feed tokens one by one."""


class PeerRefusalError(Exception):
    """The peer's builder cannot export the model; holds the last line that it wrote."""


class OrtolanEngine:
    """Ortolan, in this process."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._model = ortolan.load(folder, device="cpu", num_threads=threads)
        self.vocab_size = self._model.manifest.vocab_size

    def run(self, prompt: list[int], fed: list[int]) -> Timing:
        """Read a prompt, then feed tokens one by one."""
        session = self._model.session(len(prompt) + len(fed))
        start = time.perf_counter()
        logits = session.prefill(prompt)
        prefill = time.perf_counter() - start
        best = int(np.argmax(logits))
        steps = []
        for token in fed:
            start = time.perf_counter()
            int(np.argmax(session.step(token)))
            steps.append(time.perf_counter() - start)
        return Timing(
            prefill_seconds=prefill,
            token_seconds=statistics.median(steps),
            best_token=best,
            best_logit=float(logits[best]),
        )


class PeerEngine:
    """onnxruntime-genai, in a process of its own that answers a line of JSON with a line of JSON."""

    def __init__(self, python: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [python, str(WORKER), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions: dict[str, str] = self._answer()

    def run(self, prompt: list[int], fed: list[int]) -> Timing:
        """Read a prompt, then feed tokens one by one."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "fed": fed}) + "\n")
        self._process.stdin.flush()
        return Timing(**self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with code {self._process.wait()}; its messages are above")
        return json.loads(line)


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=("qwen3-0.6b", "retriever"))
    parser.add_argument("--peer-python", required=True, help="interpreter that has onnxruntime-genai")
    parser.add_argument("--work-dir", type=Path, help="keep checkpoints and exports here, and reuse them")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="prompt lengths, tokens")
    parser.add_argument("--decode", type=int, default=32, help="tokens fed after each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="intra-op threads of both")
    parser.add_argument("--int4", action="store_true", help="weights of 4 bits in both")
    parser.add_argument("--head-format", default="int8", help="of ours with --int4; genai's is int4 (default: int8)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    with _work_dir(options.work_dir) as work:
        checkpoint = shipped_model()
        if options.shape != "retriever":
            checkpoint = make_checkpoint(options.shape, work / "checkpoint", "float32", save_float32)
        weights = "int4" if options.int4 else "dense"
        name = f"ortolan-{weights}-{options.head_format}" if options.int4 else f"ortolan-{weights}"
        ours = OrtolanEngine(export_ours(checkpoint, work / name, weights, options.head_format), options.threads)
        peer = start_peer(checkpoint, work / f"genai-{weights}", options)
        machine = {
            "cpu": cpu_name(),
            "threads": options.threads,
            "model": options.shape,
            "weights": weights,
            "onnxruntime": onnxruntime.__version__,
            "peer": peer.versions if isinstance(peer, PeerEngine) else {"refused": peer},
        }
        print(json.dumps(machine))
        engines: dict[str, Engine] = {"ortolan": ours}
        if isinstance(peer, PeerEngine):
            engines["genai"] = peer
        rows = [measure(engines, length, ours.vocab_size, options) for length in options.prompts]
        if isinstance(peer, PeerEngine):
            peer.close()
    if options.json:
        options.json.write_text(json.dumps({**machine, "rows": rows}, indent=2) + "\n")


@contextmanager
def _work_dir(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def export_ours(checkpoint: Path, folder: Path, weights: str, head: str) -> Path:
    """Export by Ortolan."""
    if not folder.exists():
        ortolan.export(
            checkpoint, folder, max_context=8192, chunk_size=CHUNK_SIZE, weight_format=weights, head_format=head
        )
    return folder


def start_peer(checkpoint: Path, folder: Path, options: argparse.Namespace) -> PeerEngine | str:
    """Start the peer on its own export; where its builder refuses the model, return its last line."""
    try:
        export_peer(options, checkpoint, folder)
    except PeerRefusalError as refusal:
        return str(refusal)
    settings = folder / "genai_config.json"
    config = json.loads(settings.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = options.threads
    settings.write_text(json.dumps(config, indent=4))
    return PeerEngine(options.peer_python, folder)


def export_peer(options: argparse.Namespace, checkpoint: Path, folder: Path) -> None:
    """Export by the peer's builder, told to compute logits of the last token only, as Ortolan does."""
    if (folder / "genai_config.json").is_file():
        return
    command = [options.peer_python, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", folder]
    command += ["-p", "int4" if options.int4 else "fp32", "-e", "cpu", "-c", folder / "cache"]
    command += ["--extra_options", "prune_lm_head=true", *["int4_accuracy_level=4"] * options.int4]
    built = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if built.returncode:
        raise PeerRefusalError(built.stdout.strip().splitlines()[-1])


def measure(engines: dict[str, Engine], length: int, vocab_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let the engines take turns and print one line."""
    generator = np.random.default_rng(length)
    prompt = generator.integers(3, vocab_size, length).tolist()
    fed = generator.integers(3, vocab_size, options.decode).tolist()
    timings: dict[str, list[Timing]] = {name: [] for name in engines}
    for turn in range(options.repeats + 1):  # the first one warms up
        for name, engine in engines.items():
            timing = engine.run(prompt, fed)
            if turn:
                timings[name].append(timing)
    row: dict[str, Any] = {"prompt_tokens": length, "decoded_tokens": options.decode}
    for name, taken in timings.items():
        prefill = statistics.median(t.prefill_seconds for t in taken)
        token = statistics.median(t.token_seconds for t in taken)
        row[name] = asdict(taken[0]) | {"prefill_seconds": prefill, "token_seconds": token}
        print(f"{length:>6} tokens, {name:>8}: prefill {prefill:8.3f} s, decode {1e3 * token:8.2f} ms a token")
    if "genai" in row:
        ours, peer = row["ortolan"], row["genai"]
        row["prefill_speed_ratio"] = peer["prefill_seconds"] / ours["prefill_seconds"]
        row["decode_speed_ratio"] = peer["token_seconds"] / ours["token_seconds"]
        row["best_logit_difference"] = abs(ours["best_logit"] - peer["best_logit"])
        ratios = f"prefill {row['prefill_speed_ratio']:.2f}, decode {row['decode_speed_ratio']:.2f}"
        print(f"{length:>6} tokens, peer's time / ours: {ratios}", flush=True)
        if ours["best_token"] != peer["best_token"]:
            print(f"  the engines disagree: {ours['best_token']} and {peer['best_token']}")
    return row


def cpu_name() -> str:
    """Return the processor's name."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
