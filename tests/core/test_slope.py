"""
The interval of a slope holds what it promises, also where neighbouring samples are alike.
"""

import random

import numpy as np
import pytest

from diagnosis.slope import SAMPLES_MIN, slope


def noise(pick: random.Random, count: int, alike: float) -> list[float]:
    """Autoregressive: each sample remembers so much of the one before."""
    values, last = [], 0.0
    for _ in range(count):
        last = alike * last + pick.gauss(0, 1)
        values.append(last)
    return values


@pytest.mark.parametrize("alike", [0.0, 0.5])
@pytest.mark.parametrize("true_slope", [0.0, 0.3])
def test_the_truth_is_inside_most_of_the_time(alike: float, true_slope: float) -> None:
    pick = random.Random(f"{alike} {true_slope}")
    inside = 0
    for _ in range(400):
        samples = [(float(x), true_slope * x + y) for x, y in enumerate(noise(pick, 60, alike))]
        interval = slope(samples)
        assert interval is not None
        inside += interval[0] <= true_slope <= interval[1]
    assert inside >= 0.9 * 400


def test_without_noise_it_is_the_line_itself() -> None:
    samples = [(float(x), 3.0 * x + 1) for x in range(20)]
    interval = slope(samples)
    assert interval == pytest.approx((3.0, 3.0))
    fitted = np.polyfit([x for x, _ in samples], [y for _, y in samples], 1)[0]
    assert interval is not None and interval[0] == pytest.approx(fitted)


def test_too_few_samples_say_nothing() -> None:
    assert slope([(float(x), float(x)) for x in range(SAMPLES_MIN - 1)]) is None
    assert slope([(1.0, float(x)) for x in range(SAMPLES_MIN)]) is None
