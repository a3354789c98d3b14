"""
What a step costs that computes m rows, learned from the steps that were.

    time = level * (shape(m) + per_key * keys)        level in ns; shape(1) is 1; keys in thousands

`level` follows the machine, which is faster now and slower then; the shape, which decides whether a row more is worth
it, only changes slowly and only by comparison.  The shape is linear between knots.  One that was never seen lies on the
line between those that were; beyond them it is guessed: rows are nearly free where a step waits for the weights, and
cost in proportion where it computes.  The guess errs to the dear side for many rows, where little is to be gained.

Slow steps (somebody else has the processor, code is generated on first use) count less than fast ones, and those that
are much too slow hardly: nothing is faster than it can be.
"""

from itertools import pairwise

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512, 1024)
FREE_ROWS = 8  # of the first guess: up to here a row costs FREE_ROW of the first one
FREE_ROW = 0.05
RATE_MIN = 0.03  # how fast the shape follows, at least
LEVEL_RATE = 0.1  # the level is the faster one: what happens to all steps is no matter of their rows
SLOW_MAX = 2.0  # a step that took more than so many times what was expected is taken for one of so many times
FAST_MIN = 0.4
SLOWLY = 0.5  # how much a slow step counts, beside a fast one
KNOWN = 4.0  # so many observations make a knot one to rely on
DOUBT = 0.3  # how much cheaper a knot may be that was never seen
FADE_STEPS = 64
FADE = 0.97  # of an observation, after FADE_STEPS more
FILL_STEPS = 16  # what was never seen is guessed again


def _guess(rows: int) -> float:
    if rows <= FREE_ROWS:
        return 1 + FREE_ROW * (rows - 1)
    return (1 + FREE_ROW * (FREE_ROWS - 1)) * rows / FREE_ROWS


def _places() -> list[tuple[int, float]]:
    """For each number of rows the knot below, and how far it is to the next, 0..1."""
    places, knot = [(0, 0.0)], 0
    for rows in range(1, KNOTS[-1] + 1):
        while knot + 2 < len(KNOTS) and rows >= KNOTS[knot + 1]:
            knot += 1
        places.append((knot, (rows - KNOTS[knot]) / (KNOTS[knot + 1] - KNOTS[knot])))
    return places


_PLACES = _places()


class _Keys:
    """What a thousand keys cost: how steps of about as many rows differ where they attend to more or fewer keys."""

    FADE = 0.998
    RIDGE = 2.0  # as if nothing had been found in so much variation: what drifts together is no cause yet
    COST_MAX = 0.3  # of a step of one row: more than the smallest models pay

    def __init__(self) -> None:
        self.cost = 0.0
        self._means = [(0.0, 0.0, 0.0)] * len(KNOTS)  # of keys, of costs, and from how many
        self._both = self._square = 0.0

    def observe(self, knot: int, keys: float, cost: float) -> None:
        """A regression within each knot, weighted as noise is: by the size."""
        mean_keys, mean_cost, count = self._means[knot]
        more_keys, more_cost, rate = keys - mean_keys, cost - mean_cost, max(0.05, 1 / (1 + count))
        self._means[knot] = (mean_keys + rate * more_keys, mean_cost + rate * more_cost, count + 1)
        if count:
            self._both = self._both * self.FADE + more_keys * more_cost / (cost * cost)
            self._square = self._square * self.FADE + more_keys * more_keys / (cost * cost)
            self.cost = min(self.COST_MAX, max(0.0, self._both / (self._square + self.RIDGE)))

    def rescale(self, factor: float) -> None:
        """Costs are counted in units that are `factor` times as large."""
        self.cost /= factor
        self._means = [(keys, cost / factor, count) for keys, cost, count in self._means]
        self._both, self._square = self._both * factor, self._square * factor * factor


class StepCosts:
    """Learns from steps.  Same steps, same answers."""

    def __init__(self) -> None:
        self.level_ns = 0.0
        self._shape = [_guess(rows) for rows in KNOTS]
        self._seen = [0.0] * len(KNOTS)
        self._keys = _Keys()
        self._steps = 0

    def cost(self, rows: int, keys: float) -> float:
        """Of a step with so many rows that attend to so many thousand keys, all together; in units of `level_ns`."""
        knot, share = _PLACES[rows] if rows <= KNOTS[-1] else (len(KNOTS) - 2, 1.0)
        shape = self._shape
        cost = shape[knot] + (shape[knot + 1] - shape[knot]) * share
        return (cost if rows <= KNOTS[-1] else cost * rows / KNOTS[-1]) + self._keys.cost * keys

    def seen(self, rows: int) -> float:
        """How many steps of about so many rows are remembered."""
        knot, share = _PLACES[min(rows, KNOTS[-1])]
        return self._seen[knot] + (self._seen[knot + 1] - self._seen[knot]) * share

    def doubt(self, rows: int) -> float:
        """How much cheaper than its `cost` a step may be, for all that is known: a share of it, less for each look."""
        return DOUBT / (1 + self.seen(rows))

    def expected_ns(self, rows: int, keys: float) -> float:
        """Time of such a step."""
        return self.level_ns * self.cost(rows, keys)

    def observe(self, rows: int, keys: float, spent_ns: int) -> None:
        """A step has taken `spent_ns`."""
        if spent_ns <= 0 or not 0 < rows <= KNOTS[-1]:
            return
        knot, share = _PLACES[rows]
        expected = self.cost(rows, keys)
        if self.level_ns <= 0:
            self.level_ns = spent_ns / expected
        ratio = min(SLOW_MAX, max(FAST_MIN, spent_ns / (self.level_ns * expected)))
        known = self.seen(rows) >= KNOWN
        surprise = (ratio - 1) * (SLOWLY if ratio > 1 and known else 1)
        if known:
            # Both are moved by the same surprise: where there is none on average, neither drifts.
            self.level_ns *= 1 + LEVEL_RATE * surprise
            if FAST_MIN < ratio < SLOW_MAX:
                self._keys.observe(knot + (share >= 0.5), keys, ratio * expected)
        self._move(knot, 1 - share, share, surprise * expected)
        self._steps += 1
        if self._steps % FADE_STEPS == 0:
            self._seen = [seen * FADE for seen in self._seen]

    def _move(self, knot: int, below: float, above: float, error: float) -> None:
        """The two knots beside an observation take their part of the error; those never seen go with them."""
        norm, new = below * below + above * above, False
        for index, weight in ((knot, below), (knot + 1, above)):
            if weight > 0:
                seen = self._seen[index]
                rate = max(RATE_MIN, 1 / (1 + seen))
                self._shape[index] = max(1e-3, self._shape[index] + rate * error * weight / norm)
                self._seen[index] = seen + weight
                new = new or seen < KNOWN
        if new or self._steps % FILL_STEPS == 0:
            self._fill()
            self._normalize()

    def _normalize(self) -> None:
        """A step of one row costs 1: what all knots have in common belongs to the level."""
        factor = self._shape[0]
        self._shape = [cost / factor for cost in self._shape]
        self._keys.rescale(factor)
        self.level_ns *= factor

    def _fill(self) -> None:
        """Guess the knots that were never seen."""
        shape, known = self._shape, [index for index, seen in enumerate(self._seen) if seen > 0]
        for index in range(known[0]):
            shape[index] = shape[known[0]] * _guess(KNOTS[index]) / _guess(KNOTS[known[0]])
        for index in range(known[-1] + 1, len(KNOTS)):
            shape[index] = shape[known[-1]] * _guess(KNOTS[index]) / _guess(KNOTS[known[-1]])
        for low, high in pairwise(known):
            for index in range(low + 1, high):
                share = (KNOTS[index] - KNOTS[low]) / (KNOTS[high] - KNOTS[low])
                shape[index] = shape[low] + (shape[high] - shape[low]) * share
