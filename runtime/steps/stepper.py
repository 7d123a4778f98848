"""What runs steps: one protocol, for one sequence or many, on the host or on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortolan.manifest import Manifest
from ortolan.runtime.generate.logprobs import TokenLogprobs
from ortolan.runtime.steps.row import Row

Logits = npt.NDArray[np.float32]
BAD = -1  # in place of a token: the logits hold NaN or infinity


@dataclass(frozen=True, slots=True)
class Decoder:
    """The decoder graph of a model.

    Attributes:
        session: of ONNX Runtime.
        manifest: of the model.
        inputs: names that the graph takes.
        graph_ids: numbers of CUDA graphs that no other of the session's has.
        weights: OrtValues that the session reads, and does not own.
    """

    session: Any
    manifest: Manifest
    inputs: frozenset[str]
    graph_ids: Iterator[int]
    weights: Mapping[str, Any] = field(default_factory=dict)


class StepResult(Protocol):
    """What a step gave; one entry for each row of logits, in the order of the step's rows."""

    @property
    def device_seconds(self) -> float | None:
        """Time that the step took on a device, once it is known; None on the host."""

    def tokens(self) -> list[int]:
        """Wait, and return the token that each logit row chose; `BAD` where a logit is NaN or infinite.

        Any number where no choice was wanted.
        """

    def logits(self) -> Logits:
        """Wait, and return the logits [R, V]; only until the next step is run."""

    def logprobs(self) -> list[TokenLogprobs | None]:
        """Wait, and return the log-probabilities that each row wanted."""

    def score(self, tokens: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of one token and of the k best for each of the first logit rows.

        Only until the next step is run.
        """


class Stepper(Protocol):
    """Runs steps; used by one thread at a time.

    Attributes:
        depth: steps that may be under way when another is run, each of which may feed what the one before it chose.
    """

    depth: int

    @property
    def bytes(self) -> int:
        """Bytes of the inputs and outputs of steps."""

    def run(self, rows: Sequence[Row]) -> StepResult:
        """Feed tokens of several sequences, at least one; one sequence's failure may be that of all.

        At most `depth` steps may be under way that were not waited for.

        Raises:
            CapacityError: there is no memory for intermediate results.
            OrtolanError: the step failed; to feed its tokens again is safe, unless more than RECENT_TOKENS of a
                sequence have moved a recurrent state.
        """

    def capture(self, row: Row) -> float | None:
        """Make ready what later steps like this one replay; the row may be fed again by `run`.

        Returns:
            The seconds that it took; None where nothing was to be done.
        """

    def is_ready(self, row: Row) -> bool:
        """Say whether a step like this one would replay what was captured before, or captures nothing at all."""

    def close(self) -> None:
        """Give back what others could use; no step follows."""
