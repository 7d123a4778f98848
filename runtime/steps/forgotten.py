"""Reads tokens behind a sequence, which is the same afterwards."""

from __future__ import annotations

from ortolan.errors import NumericError
from ortolan.runtime.caches.store import SequenceCaches
from ortolan.runtime.state.lengths import Lengths
from ortolan.runtime.steps.row import Row
from ortolan.runtime.steps.stepper import BAD, Stepper


def read_and_forget(stepper: Stepper, row: Row, caches: SequenceCaches, lengths: Lengths, capture_rows: int) -> None:
    """Run a step of one row, and forget its tokens again, also where that ends early.

    Args:
        stepper: runs the step.
        row: tokens behind those read; caches have room for them, and rings can take back as many.
        caches: of the sequence.
        lengths: of the sequence.
        capture_rows: queries that the sequence's own captures hold, which the tokens count as having written over.

    Raises:
        NumericError: the model produced NaN or infinity.
        OrtolanError: the step failed, or was interrupted.
    """
    snapshot, states_from = caches.snapshot(lengths), lengths.states_from
    try:
        if BAD in stepper.run([row]).tokens():
            raise NumericError(
                "the logits of a second reading contain NaN or infinity, so nothing was evicted; export the model "
                "with a wider dtype"
            )
    finally:
        lengths.discard(len(row.tokens), capture_rows)
        caches.restore(snapshot, lengths)
        lengths.states_from = states_from
