"""Shows how much of a prompt was read."""

from __future__ import annotations

import sys
from typing import Any


def token_bar(total: int) -> Any:
    """Make a progress bar of `total` prompt tokens on standard error, shown on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, unit="token", desc="prefill", leave=False, disable=not sys.stderr.isatty())
