"""The largest size that fits, found by a line and proved by its neighbour.

Two small points give a line, the line a guess; what counts is measured: that the answer fits and
that the next legal size does not. Where the line is a little off the search walks a few steps from
it; where memory is no line it bisects, in ratios while the bounds are far apart.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from sweep.memory.line import Line, fit_line

SMALL = (4, 8)  # units; below, other things than the batch may hold the peak
GUIDED_POINTS = 5  # that a line needs; more, and memory is none
PATIENCE = 16  # points, after which nothing is predicted any more
FARTHEST = 64  # times the largest size that fits: no guess lies beyond
WALK = 2  # units of the longest step from a guess that missed, before bisecting


@dataclass(frozen=True)
class Look:
    """One size that was looked at."""

    fits: bool
    peak_bytes: int | None  # None where it is not known; of what does not fit a forecast knows it


@dataclass
class Found:
    """What a search found; sizes are multiples of the unit."""

    largest: int = 0  # 0: not even one unit fits
    looks: dict[int, Look] = field(default_factory=dict)  # in order
    is_bisected: bool = False  # memory was no line
    is_capped: bool = False  # the largest size that was allowed fits

    @property
    def line(self) -> Line | None:
        """The line through the sizes that fit."""
        return fit_line(self._peaks())

    @property
    def last_line(self) -> Line | None:
        """The line through the two largest sizes with a known peak: what holds it may change."""
        return fit_line(dict(list(self._peaks(also_above=True).items())[-2:]))

    def is_known(self, size: int) -> bool:
        """Whether the peak of a size is known, whatever it fits."""
        return size in self.looks and self.looks[size].peak_bytes is not None

    def _peaks(self, also_above: bool = False) -> dict[int, int]:
        return {
            size: look.peak_bytes
            for size, look in sorted(self.looks.items())
            if look.peak_bytes is not None and (look.fits or also_above)
        }


def find_largest(
    look: Callable[[int], Look], limit_bytes: float, unit: int = 1, cap: int | None = None
) -> Found:
    """Find the largest size that fits, assuming that nothing above one that does not fits.

    Args:
        look: measures, or forecasts, one size.
        limit_bytes: that the line is held against.
        unit: sizes are multiples of it.
        cap: the largest size of interest.

    Returns:
        A `largest` that was looked at and fits, whose next size was looked at and does not, unless
        it is the cap.
    """
    found = Found()
    top = max(1, cap // unit) if cap else 2**40  # units
    low, high = 0, top + 1  # the largest that fits, the least that does not
    for size in SMALL if top >= SMALL[1] else (1, top):
        if low < size < high:
            low, high = _see(found, look, size, unit, low, high)
    step = 1  # units from the nearest size that was looked at
    kept = 0  # looks since `high` moved: a chord of a curve that bends upwards stays below it
    while high - low > 1:
        line = found.last_line
        is_below = kept > 1 and found.is_known(high * unit)
        is_lost = len(found.looks) >= PATIENCE or is_below
        found.is_bisected |= len(found.looks) >= GUIDED_POINTS
        middle = _middle(low, high) if high <= top else max(2 * low, 1)
        predicted = middle if line is None else line.largest(limit_bytes) // unit
        if step > WALK or (is_lost and low < predicted < high):
            guess, step = middle, 1
        elif low < predicted < high:
            guess = min(predicted, FARTHEST * max(low, 1))
        else:
            guess = min(low + step, middle) if predicted <= low else max(high - step, middle)
            step *= 2
        known = high
        low, high = _see(found, look, min(guess, high - 1), unit, low, high)
        kept = kept + 1 if high == known else 0
    found.largest, found.is_capped = low * unit, low == top
    return found


def _middle(low: int, high: int) -> int:
    """Return a size between two others: of their ratio where they are far apart."""
    if high > 2 * low > 0:
        return min(max(math.isqrt(low * high), low + 1), high - 1)
    return (low + high) // 2


def _see(
    found: Found, look: Callable[[int], Look], size: int, unit: int, low: int, high: int
) -> tuple[int, int]:
    seen = found.looks[size * unit] = look(size * unit)
    return (size, high) if seen.fits else (low, size)
