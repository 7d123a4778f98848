"""Checks token ids that a caller gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortolan.errors import ConfigError

NO_TOKENS: npt.NDArray[np.int64] = np.empty(0, np.int64)


def check_token_ids(token_ids: Sequence[int] | npt.NDArray[Any], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return token ids as [T] int64, T >= 1.

    Raises:
        ConfigError: they are no integers in one dimension, none, or outside the vocabulary.
    """
    try:
        given = np.asarray(token_ids)
    except ValueError as error:
        raise ConfigError(f"token_ids are no list of integers: {error}") from error
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise ConfigError(
            f"token_ids has shape {list(given.shape)} and type {given.dtype}; "
            "expected at least one integer in one dimension"
        )
    if given.min() < 0 or given.max() >= vocab_size:
        raise ConfigError(f"token ids {int(given.min())} .. {int(given.max())} must lie in 0 .. {vocab_size - 1}")
    return given.astype(np.int64)
