"""Train the retriever that ships with Ortolan, on one GPU and from nothing, in about four minutes.

    PYTHONPATH=../.. python train.py --out /tmp/retriever

Batches grow in length stage by stage. The loss is the cross-entropy of the answers, a share of the cross-entropy of all
text, and a share of `model.attention_loss`, which says where in the text the answer stands.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoint import write_folder
from data import Batch, RetrievalStream, Stage
from model import Retriever, RetrieverConfig, attention_loss
from torch.nn import functional
from torch.utils.data import DataLoader

DEFAULT_STAGES = ("512:256:600", "2048:64:600", "8448:16:1200", "16640:16:400", "33024:8:400")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """Shares of the loss beside the answers' own."""

    text: float
    attention: float


@dataclass(frozen=True, slots=True)
class Losses:
    """Parts of the loss, and the share of the answers' bytes that are right."""

    total: torch.Tensor
    answer: torch.Tensor
    text: torch.Tensor
    attention: torch.Tensor
    accuracy: torch.Tensor


def compute_losses(model: Retriever, batch: Batch, weights: LossWeights) -> Losses:
    """Run the model on a batch."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16):
        logits, looks = model(batch.tokens[:, :-1])
    expected = batch.tokens[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), expected.flatten(), reduction="none")
    losses = losses.view_as(expected)
    answer = (losses * batch.answer_weight).sum() / batch.answer_weight.sum()
    text = losses.mean()
    attention = attention_loss(looks, batch.rows, batch.targets)
    with torch.no_grad():
        wrong = (logits.argmax(-1) != expected) & (batch.answer_weight > 0)
        accuracy = 1 - wrong.sum() / batch.answer_weight.sum()
    total = answer + weights.text * text + weights.attention * attention
    return Losses(total, answer.detach(), text.detach(), attention.detach(), accuracy)


def learning_rate(step: int, total: int, start: int, peak: float) -> float:
    """Warm up over 100 steps from wherever training started, then follow a cosine to 2 % of the peak."""
    warmup = min(1.0, (step - start + 1) / 100)
    cosine = 0.5 * (1 + math.cos(math.pi * step / total))
    return peak * warmup * (0.02 + 0.98 * cosine)


def make_optimizer(model: Retriever, peak: float, fused: bool) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=fused)


def schedule(stages: list[Stage], start: int, seed: int, workers: int) -> Iterator[tuple[int, Batch]]:
    """Yield (step, batch) from step `start` on, through all stages."""
    first = 0
    for stage in stages:
        remaining = first + stage.steps - max(first, start)
        if remaining > 0:
            stream = RetrievalStream(stage, seed + max(first, start))
            loader = DataLoader(stream, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None)
            batches = iter(loader)
            for step in range(first + stage.steps - remaining, first + stage.steps):
                yield step, next(batches)
        first += stage.steps


def train(model: Retriever, args: argparse.Namespace, start: int) -> int:
    """Train from step `start`; returns the step reached when the work or the time ends."""
    device = torch.device(args.device)
    stages = [Stage.parse(text) for text in args.stages]
    total = sum(stage.steps for stage in stages)
    weights = LossWeights(text=args.text_weight, attention=args.attention_weight)
    optimizer = make_optimizer(model, args.learning_rate, device.type == "cuda")
    began = last_log = time.monotonic()
    step = start
    for step, batch in schedule(stages, start, args.seed, args.workers):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total, start, args.learning_rate)
        losses = compute_losses(model, batch.to(device), weights)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0:
            _log(step, losses, batch, time.monotonic() - last_log)
            last_log = time.monotonic()
            if last_log - began > args.minutes * 60:
                break
    return step + 1


def _log(step: int, losses: Losses, batch: Batch, seconds: float) -> None:
    print(
        f"step {step:5d}  tokens {batch.tokens.shape[1] - 1:5d}  answer {losses.answer:.4f}"
        f"  text {losses.text:.4f}  attention {losses.attention:.4f}  accuracy {losses.accuracy:.4f}"
        f"  {seconds:.1f} s",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the Hugging Face files")
    parser.add_argument("--checkpoint", type=Path, help="float32 weights and step, written at the end")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--stages", nargs="+", default=DEFAULT_STAGES, metavar="TOKENS:BATCH:STEPS")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--text-weight", type=float, default=0.3)
    parser.add_argument("--attention-weight", type=float, default=0.1)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long, wherever training is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train and write the model."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model, start = Retriever(RetrieverConfig()).to(args.device), 0
    if args.resume:
        saved = torch.load(args.resume, map_location=args.device, weights_only=True)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}, torch {torch.__version__}, {count} parameters, seed {args.seed}, from step {start}")
    if args.device.startswith("cuda"):
        torch._dynamo.config.recompile_limit = 64  # one graph per layer kind and stage
        for layer in model.layers:
            layer.compile(dynamic=False)
    step = train(model, args, start)
    if args.checkpoint:
        torch.save({"model": model.state_dict(), "step": step}, args.checkpoint)
    write_folder(model, args.out)
    print(f"wrote {args.out} at step {step}")


if __name__ == "__main__":
    main()
