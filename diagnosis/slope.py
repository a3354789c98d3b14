"""
Whether something grows: the slope of a line through samples, with its confidence interval.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

SAMPLES_MIN = 6
_T95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 15: 2.131, 20: 2.086, 30: 2.042}
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom."""


def slope(samples: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """
    The 95 % interval of the least squares slope; None for fewer than SAMPLES_MIN samples, or all at one time.

    Neighbouring samples of a process's memory are alike, so there are fewer of them than it seems: the interval is that
    of n (1 - r) / (1 + r) samples, with their lag-1 autocorrelation r (Zwiers and von Storch 1995).
    """
    n = len(samples)
    if n < SAMPLES_MIN:
        return None
    mean_x = sum(x for x, _ in samples) / n
    mean_y = sum(y for _, y in samples) / n
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    if spread <= 0:
        return None
    line = sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread
    residuals = [y - mean_y - line * (x - mean_x) for x, y in samples]
    squares = sum(one * one for one in residuals)
    alike = sum(a * b for a, b in pairwise(residuals)) / squares if squares else 0.0
    alike = min(0.9, max(0.0, alike))
    independent = max(SAMPLES_MIN, n * (1 - alike) / (1 + alike))
    error = sqrt(squares / max(1.0, independent - 2) / spread * n / independent)
    half = _quantile(int(independent) - 2) * error
    return line - half, line + half


def _quantile(freedom: int) -> float:
    """Of the next smaller number of degrees of freedom that is in the table: never too narrow."""
    return _T95[max(key for key in _T95 if key <= max(4, freedom))]
