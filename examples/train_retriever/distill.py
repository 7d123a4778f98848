"""Train what drafts for a retriever: a head for multi-token prediction, or a model of half its size.

    PYTHONPATH=../.. python distill.py head --out /tmp/retriever_mtp
    PYTHONPATH=../.. python distill.py model --out /tmp/draft

Both learn to say what the retriever says: the loss is the cross-entropy to its probabilities, on texts half of which
repeat themselves. The head also learns to read its own output, as when it drafts several tokens. `head` writes the
retriever with the head in it, `model` a model of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from checkpoint import read_retriever, write_folder
from course import Course, Losses, add_course_arguments, follow
from data import Batch, Stage
from model import DRAFT, DraftHead, Retriever
from torch import Tensor, nn
from torch.nn import functional

from ortolan.retrieval import shipped_model

DEFAULT_STAGES = ("512:64:1500", "2048:16:1000", "4096:8:500")
ROUNDS = 2  # of the head, the second over what the first made


def agreement(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy to a teacher's probabilities, and the share of tokens that both like best.

    Args:
        logits: [B, T, V].
        wanted: [B, T, V], the teacher's.
    """
    logits, wanted = logits.float().flatten(0, 1), wanted.float().flatten(0, 1)
    same = (logits.argmax(-1) == wanted.argmax(-1)).float().mean()
    return functional.cross_entropy(logits, wanted.softmax(-1)), same


def model_losses(draft: Retriever, teacher: Retriever, tokens: Tensor) -> Losses:
    """Run the smaller model on tokens [B, T]."""
    with torch.no_grad():
        wanted, _ = teacher(tokens)
    loss, same = agreement(draft(tokens)[0], wanted)
    return Losses(loss, {"loss": loss, "same": same})


def head_losses(head: DraftHead, teacher: Retriever, tokens: Tensor) -> Losses:
    """Run the head on tokens [B, T]: at each token it reads what was made of the one before."""
    with torch.no_grad():
        hidden, _ = teacher.read(tokens)
        wanted, embedded = teacher.logits(hidden), teacher.embed(tokens)
    losses, figures = [], {}
    for round_ in range(1, ROUNDS + 1):
        embedded, wanted = embedded[:, 1:], wanted[:, 1:]
        hidden = head(embedded, hidden[:, :-1])
        loss, same = agreement(teacher.logits(hidden), wanted)
        losses.append(loss)
        figures |= {f"loss {round_}": loss, f"same {round_}": same}
    return Losses(torch.stack(losses).mean(), figures)


def on_texts(compute: Callable[[Tensor], Losses], batch: Batch) -> Losses:
    """Compute on the batch's tokens, where every second sequence repeats its first half."""
    tokens = batch.tokens[:, :-1].clone()
    half = tokens.shape[1] // 2
    tokens[::2, half : 2 * half] = tokens[::2, :half]
    with torch.autocast(tokens.device.type, torch.bfloat16):
        return compute(tokens)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("head", "model"))
    parser.add_argument("--out", type=Path, required=True, help="folder for the Hugging Face files")
    parser.add_argument("--teacher", type=Path, default=shipped_model(), help="default: the shipped retriever")
    add_course_arguments(parser, DEFAULT_STAGES, learning_rate=2e-3)
    return parser.parse_args()


def main() -> None:
    """Train and write."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    teacher = read_retriever(args.teacher).to(args.device).eval().requires_grad_(False)
    student: nn.Module
    if args.kind == "head":
        student = head = DraftHead(teacher.config).to(args.device)
        compute = partial(head_losses, head, teacher)
    else:
        student = draft = Retriever(DRAFT).to(args.device)
        compute = partial(model_losses, draft, teacher)
    count = sum(parameter.numel() for parameter in student.parameters())
    print(f"{args.device}, torch {torch.__version__}, {count} parameters, seed {args.seed}")
    course = Course(stages=tuple(map(Stage.parse, args.stages)), seconds=60 * args.minutes)
    step = follow(course, student, partial(on_texts, compute), args)
    if args.kind == "head":
        write_folder(teacher, args.out, head=head)
    else:
        write_folder(draft, args.out)
    print(f"wrote {args.out} at step {step}")


if __name__ == "__main__":
    main()
