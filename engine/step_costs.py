"""
What a step costs that computes m rows, learned from the steps that were.

    time = level * (shape(m) + per_key * keys)        level in ns; shape(1) is about 1; keys in thousands

`level` follows the machine, which is faster now and slower then; the shape, which decides whether a row more is worth
it, only changes slowly and only by comparison.  The shape is linear between knots.  One that was never seen is guessed
from its neighbour below: rows are nearly free where a step waits for the weights, and cost in proportion where it
computes; the guess errs to the dear side for many rows, where little is to be gained and much to be lost.

Steps that are much too slow (a pause of the machine, code that is generated on first use) hardly count; steps that are
much too fast always do: nothing is faster than it can be.
"""

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512, 1024)
FREE_ROWS = 8  # of the first guess: up to here a row costs FREE_ROW of the first one
FREE_ROW = 0.05
RATE_MIN = 0.04  # how fast the shape follows, at least
LEVEL_RATE = 0.05
KEY_RATE = 0.01
SLOW_MAX = 1.5  # a step that took more than so many times what was expected is taken for one of so many times
FAST_MIN = 0.7
KNOWN = 4.0  # so many observations make a knot one to rely on
DOUBT = 0.3  # how much cheaper a knot may be that was never seen
FADE_STEPS = 64
FADE = 0.97  # of an observation, after FADE_STEPS more


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


class StepCosts:
    """Learns from steps.  Same steps, same answers."""

    def __init__(self) -> None:
        self.level_ns = 0.0
        self._shape = [_guess(rows) for rows in KNOTS]
        self._seen = [0.0] * len(KNOTS)
        self._per_key = 0.0
        self._steps = 0

    def cost(self, rows: int, keys: float) -> float:
        """Of a step with so many rows that attend to so many thousand keys, all together; in units of `level_ns`."""
        knot, share = _PLACES[rows] if rows <= KNOTS[-1] else (len(KNOTS) - 2, 1.0)
        shape = self._shape
        cost = shape[knot] + (shape[knot + 1] - shape[knot]) * share + self._per_key * keys
        return cost if rows <= KNOTS[-1] else cost * rows / KNOTS[-1]

    def doubt(self, rows: int) -> float:
        """How much cheaper than its `cost` a step may be, for all that is known: a share of it, less for each look."""
        return DOUBT / (1 + self.seen(rows))

    def seen(self, rows: int) -> float:
        """How many steps of about so many rows are remembered."""
        knot, share = _PLACES[min(rows, KNOTS[-1])]
        return self._seen[knot] + (self._seen[knot + 1] - self._seen[knot]) * share

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
        ratio = spent_ns / (self.level_ns * expected)
        seen = self.seen(rows)
        ratio = min(ratio, SLOW_MAX) if seen >= KNOWN else min(ratio, 2 * SLOW_MAX)
        self._move(knot, 1 - share, share, (ratio - 1) * expected, hurry=ratio < FAST_MIN)
        if seen >= KNOWN:
            self.level_ns *= 1 + LEVEL_RATE * (max(ratio, FAST_MIN) - 1)
            scaled = keys / (1 + keys * keys)
            self._per_key = max(0.0, self._per_key + KEY_RATE * (ratio - 1) * expected * scaled)
        self._fade()

    def _move(self, knot: int, below: float, above: float, error: float, *, hurry: bool) -> None:
        """The two knots beside an observation take their part of the error; those never seen go with them."""
        norm = below * below + above * above
        for index, weight in ((knot, below), (knot + 1, above)):
            if weight > 0:
                rate = max(RATE_MIN, 1 / (1 + self._seen[index]), 0.5 if hurry else 0.0)
                self._shape[index] = max(1e-3, self._shape[index] + rate * error * weight / norm)
                self._seen[index] += weight
        for index in range(knot + (above > 0) + 1, len(KNOTS)):
            if self._seen[index] > 0:
                break
            self._shape[index] = self._shape[index - 1] * _guess(KNOTS[index]) / _guess(KNOTS[index - 1])
        for index in range(knot - 1, -1, -1):
            if self._seen[index] > 0:
                break
            self._shape[index] = self._shape[index + 1] * _guess(KNOTS[index]) / _guess(KNOTS[index + 1])

    def _fade(self) -> None:
        self._steps += 1
        if self._steps % FADE_STEPS == 0:
            self._seen = [seen * FADE for seen in self._seen]
