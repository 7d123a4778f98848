"""Training as a course of stages: batches, learning rate, optimizer, and what is printed on the way."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from data import Batch, RetrievalStream, Stage
from torch import nn
from torch.utils.data import DataLoader

WARM_UP = 100  # steps


@dataclass(frozen=True, slots=True)
class Losses:
    """What a step minimizes, and figures to print."""

    total: torch.Tensor
    figures: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Stages, each with its share of the steps. Where time runs out, every stage is cut alike.

    Attributes:
        stages: in order.
        seconds: the most that training takes.
        start: step that it goes on from.
        began: clock of its beginning.
    """

    stages: tuple[Stage, ...]
    seconds: float
    start: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def total(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def share(self, step: int) -> float:
        """Return how far training is, 0 to 1, by steps or by the clock, whichever is ahead."""
        return max(step / self.total, (time.monotonic() - self.began) / self.seconds)

    def rate(self, step: int) -> float:
        """Return the learning rate as a share of its peak: a warm-up, then a cosine down to 2 %."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.share(step))))
        return min(1.0, (step - self.start + 1) / WARM_UP) * (0.02 + 0.98 * cosine)

    def batches(self, seed: int, workers: int) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch) from step `start` on, through all stages."""
        step, end = self.start, 0
        for stage in self.stages:
            end += stage.steps
            if self.share(step) >= end / self.total:
                continue
            stream = RetrievalStream(stage, seed + step)
            loader = DataLoader(stream, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None)
            for batch in loader:
                yield step, batch
                step += 1
                if self.share(step) >= end / self.total:
                    break


def follow(course: Course, module: nn.Module, compute: Callable[[Batch], Losses], args: argparse.Namespace) -> int:
    """Train a module through a course.

    Args:
        course: batches and learning rates.
        module: whose parameters are trained.
        compute: runs a batch.
        args: of `add_course_arguments`.

    Returns:
        The step reached.
    """
    device, peak = torch.device(args.device), args.learning_rate
    optimizer = make_optimizer(module, peak, device.type == "cuda")
    last_log, step = time.monotonic(), course.start
    for step, batch in course.batches(args.seed, args.workers):
        for group in optimizer.param_groups:
            group["lr"] = peak * course.rate(step)
        losses = compute(batch.to(device))
        losses.total.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0:
            figures = "".join(f"  {name} {value.item():.4f}" for name, value in losses.figures.items())
            seconds, last_log = time.monotonic() - last_log, time.monotonic()
            print(f"step {step:5d}  tokens {batch.tokens.shape[1] - 1:5d}{figures}  {seconds:.1f} s", flush=True)
    return step + 1


def make_optimizer(module: nn.Module, peak: float, fused: bool) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=fused)


def add_course_arguments(parser: argparse.ArgumentParser, stages: tuple[str, ...], learning_rate: float) -> None:
    """Add what every training has on its command line, with defaults."""
    parser.add_argument("--stages", nargs="+", default=stages, metavar="TOKENS:BATCH:STEPS")
    parser.add_argument("--learning-rate", type=float, default=learning_rate, help="the highest")
    parser.add_argument("--minutes", type=float, default=60.0, help="the most; stages are shortened to fit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
