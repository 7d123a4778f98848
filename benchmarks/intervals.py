"""Confidence intervals of measured shares; shared by the benchmarks."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution


def wilson_interval(right: int, samples: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, 0.0 .. 1.0.

    Args:
        right: successes, 0 .. samples.
        samples: independent trials, at least one.

    Raises:
        ValueError: the counts are none.

    Source: Wilson score interval, without continuity correction; Brown, Cai and DasGupta, "Interval Estimation for a
    Binomial Proportion", 2001, equation (4).
    """
    if samples < 1 or not 0 <= right <= samples:
        raise ValueError(f"{right} of {samples} is no share; at least one sample, and right within 0 .. samples")
    n, p, z = samples, right / samples, Z_95
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))  # the share lies within, despite rounding
