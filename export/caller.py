"""Warns whoever called Ortolan."""

from __future__ import annotations

import sys
import warnings

_PACKAGE = "ortolan"


def warn_caller(message: str) -> None:
    """Warn at the line that called into the package, however many of its functions lie between."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
