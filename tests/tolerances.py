"""Every tolerance of the tests, and where it comes from."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# End to end, float32: largest difference of logits relative to their standard deviation.
LOGITS_RELATIVE = 2e-4
# The same at some ten thousand positions: the angles of two libraries differ by a position times the last bit of a
# frequency, 5e-4 at 9,216.
LONG_LOGITS_RELATIVE = 5e-4
# The same for products that round their activations to 8 bits: steps of 1/127 (int4) or of an eighth of a value (fp8)
# that last bits decide, per layer.
ROUNDED_ACTIVATIONS_RELATIVE = 0.1
# The same for integer codes on the CPU, whose inputs are off by up to 2^-15 of the largest of 128, per product.
ROUNDED_INPUTS_RELATIVE = 2e-3
# The same where all products of a mixture round their inputs: it weighs experts by what the others gave.
ROUNDED_MIXTURE_RELATIVE = 5e-3
# A run with evicted caches against one whose caches were built of the kept rows: only GEMM rounding differs.
SAME_LOGITS = 1e-5
# An operator's result for one token, alone and among others, relative: another order of float32 sums.
SAME_TOKENS = 1e-5
# GatedDeltaRule by chunks of 64 tokens, whose products have factors of 16 bits, relative to the largest value: a few
# units of the factors' rounding (the recurrent form multiplies in float32).
CHUNKED_DELTA_RELATIVE = {"float16": 0.003, "bfloat16": 0.02}
# One rounding or two of float32, relative to values of about 1; the same for float64.
FLOAT32 = 1e-6
FLOAT64 = 1e-12
# Sums of float32 in another order, relative to values of about 1.
FLOAT32_SUMS = 1e-5
# Log-probabilities of float32 logits, against sums in float64 or other chunks.
LOGPROBS = 1e-4
# The same of steps of another size, as those that check drafts, or of another library.
OTHER_STEPS_LOGPROBS = 1e-3
# Probabilities of tokens as the sampler weighs them in fixed point, relative.
FIXED_POINT = 1e-9
# GatedDeltaRule token by token, by bytes of an element: float32 sums, rounded to the element's type.
DELTA_STEPS = {4: FLOAT32_SUMS, 2: 0.01}
# Scores of positions that two float32 implementations may rank either way, relative.
SCORE_TIES = 1e-4
# Factors of a calibration, relative to the largest: float32 sums of two graphs, after an inversion.
FEEDBACK_RELATIVE = 1e-4
# Frequencies of RoPE, relative: float32 powers of two libraries.
FREQUENCIES_RELATIVE = 1e-6

# A kernel may be as wrong as plain arithmetic of its own precision is: its error against the float64 reference
# is at most ERROR_FACTOR times that of plain float32 NumPy, rounded to the stored type, plus ROUNDING_UNITS
# units of the stored type at the size of the largest expected value.
ERROR_FACTOR = 2.0
ROUNDING_UNITS = 4.0
# Of what the rule allows, where a result is the largest of many: their errors do not cancel as those of a mean do, and
# neither implementation's worst bounds the other's.
LARGEST_FACTOR = 2.0


def largest_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest absolute difference; equal infinities count as equal, NaN as infinite."""
    same = actual == expected
    difference = np.where(same, 0.0, np.abs(actual.astype(np.float64) - np.where(same, 0.0, expected)))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))


def allowed_error(plain: np.ndarray, expected: np.ndarray, stored: np.dtype) -> float:
    """Return the error that the rule allows for values that are kept as `stored`."""
    size = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    rounding = ROUNDING_UNITS * float(ml_dtypes.finfo(stored).eps) * float(size)
    return ERROR_FACTOR * largest_error(plain.astype(stored), expected) + rounding


def assert_as_good_as_plain(
    actual: np.ndarray, plain: np.ndarray, expected: np.ndarray, *, factor: float = 1.0
) -> None:
    """Apply the rule to one output of a kernel, which may be `factor` times as wrong as it says."""
    assert actual.shape == expected.shape
    error, limit = largest_error(actual, expected), factor * allowed_error(plain, expected, actual.dtype)
    assert error <= limit, f"error {error:.3g} is more than {limit:.3g}"
