"""Train the retriever that ships with Ortolan, on one GPU and from nothing, in about four minutes.

    PYTHONPATH=../.. python train.py --out /tmp/retriever
    PYTHONPATH=../.. python train.py --model hybrid --out /tmp/hybrid

Batches grow in length stage by stage. The loss is the cross-entropy of the answers, a share of the cross-entropy of all
text, and a share of `model.attention_loss`, which says where in the text the answer stands.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from checkpoint import write_folder
from course import Course, Losses, add_course_arguments, follow
from data import Batch, Stage
from hybrid import Hybrid, HybridConfig
from model import Retriever, RetrieverConfig, attention_loss
from torch.nn import functional

DEFAULT_STAGES = ("512:256:600", "2048:64:600", "8448:16:1200", "16640:16:400", "33024:8:400")
Decoder = Retriever | Hybrid


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """Shares of the loss beside the answers' own."""

    text: float
    attention: float


def compute_losses(model: Decoder, weights: LossWeights, batch: Batch) -> Losses:
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
    return Losses(total, {"answer": answer, "text": text, "attention": attention, "accuracy": accuracy})


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the Hugging Face files")
    parser.add_argument("--model", choices=("retriever", "hybrid"), default="retriever")
    parser.add_argument("--checkpoint", type=Path, help="float32 weights and step, written at the end")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--text-weight", type=float, default=0.3)
    parser.add_argument("--attention-weight", type=float, default=0.1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="on a GPU")
    add_course_arguments(parser, DEFAULT_STAGES, learning_rate=2e-3)
    return parser.parse_args()


def main() -> None:
    """Train and write the model."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model: Decoder = Hybrid(HybridConfig()) if args.model == "hybrid" else Retriever(RetrieverConfig())
    model, start = model.to(args.device), 0
    if args.resume:
        saved = torch.load(args.resume, map_location=args.device, weights_only=True)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}, torch {torch.__version__}, {count} parameters, seed {args.seed}, from step {start}")
    if args.compile and args.device.startswith("cuda"):
        torch._dynamo.config.recompile_limit = 64  # one graph per layer kind and stage
        for layer in model.layers:
            layer.compile(dynamic=False)
    weights = LossWeights(text=args.text_weight, attention=args.attention_weight)
    course = Course(stages=tuple(map(Stage.parse, args.stages)), seconds=60 * args.minutes, start=start)
    step = follow(course, model, partial(compute_losses, model, weights), args)
    if args.checkpoint:
        torch.save({"model": model.state_dict(), "step": step}, args.checkpoint)
    write_folder(model, args.out)
    print(f"wrote {args.out} at step {step}")


if __name__ == "__main__":
    main()
