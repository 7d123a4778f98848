"""Measures what low-bit weights and caches keep: the shipped model in each format, against its own float32.

Run it with the package installed: `python benchmarks/weight_formats.py`. Text: Python sources that training did not
see, and retrieval prompts, read with full caches and with SnapKV. Prints a table; with --json, writes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

import ortolan
from ortolan.cli.table import format_table
from ortolan.retrieval import KINDS, Task, is_correct, load_corpus, make_sample, shipped_model

FORMATS = {
    "float32": {},
    "int8, 128": {"weight_format": "int8", "group_size": 128},
    "int8, channel": {"weight_format": "int8", "group_size": "channel"},
    "fp8, channel": {"weight_format": "fp8"},
    "fp8, channel, W8A8": {"weight_format": "fp8", "activation_format": "fp8"},
    "fp8, 128 x 128": {"weight_format": "fp8", "group_size": 128},
    "fp8, 128 x 128, W8A8": {"weight_format": "fp8", "group_size": 128, "activation_format": "fp8"},
    "mxfp4": {"weight_format": "mxfp4"},
    "int4, 32": {"weight_format": "int4", "group_size": 32},
    "int4, 32, asymmetric": {"weight_format": "int4", "group_size": 32, "asymmetric": True},
    "int4, 32, gptq": {"weight_format": "int4", "group_size": 32, "quantizer": "gptq"},
    "int4, 32, nearest": {"weight_format": "int4", "group_size": 32, "quantizer": "nearest"},
    "int4, 128": {"weight_format": "int4", "group_size": 128},
    "int4, 128, asymmetric": {"weight_format": "int4", "group_size": 128, "asymmetric": True},
    "int4, 128, gptq": {"weight_format": "int4", "group_size": 128, "quantizer": "gptq"},
    "int4, 128, nearest": {"weight_format": "int4", "group_size": 128, "quantizer": "nearest"},
    "int4, 128, int4 head": {"weight_format": "int4", "group_size": 128, "head_format": "int4"},
    "int4, 128, dense head": {"weight_format": "int4", "group_size": 128, "head_format": "dense"},
}

CACHES = ("float32", "int8", "fp8")
LENGTH = 1024  # bytes of a prompt
CALIBRATION_SAMPLES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What one format of weights, with one type of caches, keeps.

    Attributes:
        caches: their element type.
        bytes: of the weights file.
        perplexity: per byte of text, which is a token of the shipped model.
        agreement: share of positions whose likeliest token is that of float32.
        divergence: mean Kullback-Leibler divergence from float32, nats.
        retrieved: prompts that are answered right, of those whose fact lies in the first, second and last third.
        retrieved_evicted: the same with SnapKV, which keeps an eighth of the prompt.
        prompts: in each third.
    """

    name: str
    caches: str
    bytes: int
    perplexity: float
    agreement: float
    divergence: float
    retrieved: tuple[int, int, int]
    retrieved_evicted: tuple[int, int, int]
    prompts: int


def read_log_probabilities(model: ortolan.Model, token_ids: list[int]) -> np.ndarray:
    """Return log-probabilities of what follows each token but the last, [T - 1, V] float64, read one by one."""
    session = model.session()
    rows = [session.prefill(token_ids[:1]), *(session.step(token) for token in token_ids[1:-1])]
    logits = np.stack(rows).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def count_retrieved(model: ortolan.Model, prompts: int, snapkv: ortolan.SnapKv | None) -> tuple[int, int, int]:
    """Count the retrieval prompts that are answered right, by the third in which their fact lies."""
    corpus, right, samples = load_corpus("eval"), [0, 0, 0], 3 * prompts
    for seed in range(samples):
        task = Task(length=LENGTH, depth=seed / (samples - 1), kind=KINDS[seed % len(KINDS)], seed=seed)
        sample = make_sample(corpus, task)
        ids = model.session(snapkv=snapkv).generate(
            model.tokenizer.encode(sample.prompt), max_new_tokens=8, sampling=ortolan.Sampling(temperature=0.0)
        )
        right[seed // prompts] += is_correct(sample, model.tokenizer.decode(list(ids)))
    return right[0], right[1], right[2]


def export(name: str, folder: Path) -> Path:
    """Export the shipped model in a format, calibrated on text that it was trained on where that is asked for."""
    wanted = dict(FORMATS[name])
    if wanted.get("quantizer") == "gptq":
        corpus = load_corpus("train")
        samples = [make_sample(corpus, Task(length=LENGTH, seed=seed)) for seed in range(CALIBRATION_SAMPLES)]
        wanted["calibration"] = folder / "calibration.txt"
        wanted["calibration"].write_text("".join(sample.prompt for sample in samples))
    return ortolan.export(shipped_model(), folder / name.replace(" ", ""), **wanted)


def measure(folder: Path, options: argparse.Namespace) -> list[Quality]:
    """Export, load and measure each format of weights with each type of caches."""
    text = "".join(sample.prompt for sample in _texts(options.tokens))
    found, reference = [], np.zeros(0)
    for name in options.weights:
        target = export(name, folder)
        for caches in options.caches:
            model = ortolan.load(target, device="cpu", cache_dtype=caches)
            token_ids = model.tokenizer.encode(text)[: options.tokens]
            own = read_log_probabilities(model, token_ids)
            reference = reference if len(reference) else own
            snapkv = ortolan.SnapKv(budget=LENGTH // 8)
            found.append(
                Quality(
                    name=name,
                    caches=caches,
                    bytes=(target / "model.onnx.data").stat().st_size,
                    perplexity=float(np.exp(-own[np.arange(len(own)), token_ids[1:]].mean())),
                    agreement=float((own.argmax(1) == reference.argmax(1)).mean()),
                    divergence=float((np.exp(reference) * (reference - own)).sum(1).mean()),
                    retrieved=count_retrieved(model, options.prompts, None),
                    retrieved_evicted=count_retrieved(model, options.prompts, snapkv),
                    prompts=options.prompts,
                )
            )
            print(*_row(found[-1]), sep="  ", flush=True)
    return found


def _texts(tokens: int) -> list:
    corpus = load_corpus("eval")
    return [make_sample(corpus, Task(length=LENGTH, seed=seed)) for seed in range(-(-tokens // LENGTH))]


def _row(quality: Quality) -> list[str]:
    counts = [" ".join(map(str, right)) for right in (quality.retrieved, quality.retrieved_evicted)]
    shares = [f"{quality.agreement:.2%}", f"{quality.divergence:.5f}", *counts]
    return [quality.name, quality.caches, f"{quality.bytes / 1e6:.2f}", f"{quality.perplexity:.4f}", *shares]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of text (default: 4096)")
    parser.add_argument("--prompts", type=int, default=11, help="of retrieval, for each third (default: 11)")
    parser.add_argument(
        "--weights", nargs="+", choices=FORMATS, default=[*FORMATS], help="formats, the first to compare with"
    )
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=["float32"], help="types of caches")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options)
    rows = [_row(quality) for quality in found]
    print(f"onnxruntime {onnxruntime.__version__}, CPU; {options.tokens} tokens of text")
    titles = ["weights", "caches", "MB", "perplexity", "same top token", "KL", "retrieved", "with SnapKV"]
    print(f"retrieved: by the third of the prompt that holds the fact, of {options.prompts} each")
    print(format_table(titles, rows))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(quality) for quality in found], indent=2))


if __name__ == "__main__":
    main()
