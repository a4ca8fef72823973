"""What the rows of an ablation say, as numbers that claims are held against."""

import importlib.util
import math

from sweep.memory.ablation import (
    BASE,
    GROUP_ALONE,
    HALF_GROUPS,
    HALF_LAYERS,
    HALF_LENGTH,
    HALF_MICROBATCH,
    HALF_PROMPTS,
    HALF_WIDTH,
    ONE_GROUP,
    PLAIN_ATTENTION,
    SUPERVISED,
    Row,
)

BYTES_OF_LOGITS = 4  # of one, in float32
GUIDE_GROUP = 8  # completions of a prompt, in the guide that claims


class Rows:
    """Rows by name, for claims; what is missing is not a number.

    Args:
        rows: of the ablation.
        logits_bytes: of a batch's completions, in float32.
        batch_size, group_size: of the base.
        sampled_bytes: a logit of sampling has, in the base's dtype.
    """

    def __init__(
        self,
        rows: list[Row],
        logits_bytes: int,
        batch_size: int = 1,
        group_size: int = 1,
        sampled_bytes: int = BYTES_OF_LOGITS,
    ) -> None:
        self._rows, self.logits_bytes = {row.name: row for row in rows}, logits_bytes
        self._batch, self._group = batch_size, group_size
        self._narrower = BYTES_OF_LOGITS / sampled_bytes

    def peak(self, name: str) -> float:
        """Return a row's peak in bytes."""
        row = self._rows.get(name)
        return _number(row.peak_bytes if row else None)

    def rest(self, name: str) -> float:
        """Return what a row holds between steps, in bytes."""
        row = self._rows.get(name)
        return _number(row.measured.rest_bytes if row and row.measured else None)

    def more_time(self, name: str) -> tuple[float, ...]:
        """Return by how much a row's step took longer than the base's, in each turn."""
        row = self._rows.get(name)
        return tuple(ratio - 1 for ratio in row.time_ratios) if row else ()

    def saved(self, name: str, base: str = BASE) -> float:
        """Return the share of the base's peak that a row does without."""
        return 1 - self.times(name, base)

    def times(self, name: str, base: str) -> float:
        """Return a row's peak over that of the base."""
        return self.peak(name) / self.peak(base)

    def in_logits(self, name: str, base: str = BASE) -> float:
        """Return what a row's peak is above the base's, over the bytes of the logits."""
        return (self.peak(name) - self.peak(base)) / self.logits_bytes

    def in_sampled_logits(self, name: str) -> float:
        """Return the same over the bytes of the logits in the dtype that sampling has them in."""
        return self.in_logits(name) * self._narrower

    def accumulated(self) -> float:
        """Return the update's peak in several microbatches over that in one of them."""
        return self._update(ONE_GROUP) / self._update(GROUP_ALONE)

    def most_effective(self) -> float:
        """Return what half the prompts save over what half of anything else saves at most."""
        halves = (HALF_GROUPS, HALF_LENGTH, HALF_MICROBATCH, HALF_LAYERS, HALF_WIDTH)
        others = [saved for name in halves if math.isfinite(saved := self.saved(name))]
        most = max(others, default=0.0)
        return self.saved(HALF_PROMPTS) / most if most > 0 else math.nan

    def sequences_for_a_prompt(self) -> float:
        """Return supervised sequences over prompts in the same memory, by a line; groups of 8."""
        more = self.peak(BASE) - self.peak(GROUP_ALONE)
        if self._group != GUIDE_GROUP or not more > 0:
            return math.nan
        slope = more / (self._batch - self._group)
        completions = self._batch + (self.peak(SUPERVISED) - self.peak(BASE)) / slope
        return self._batch * self._group / completions

    def fused(self) -> float:
        """Return what attention's fused kernel saves; not a number where there is none."""
        return self.saved(BASE, PLAIN_ATTENTION) or math.nan

    def packages_for_it(self) -> float:
        """Return that the fused kernel ran without flash-attn: 0 packages; else not a number."""
        is_there = importlib.util.find_spec("flash_attn") is not None
        return math.nan if is_there or math.isnan(self.fused()) else 0.0

    def _update(self, name: str) -> float:
        row = self._rows.get(name)
        return _number(row.measured.phases.get("update") if row and row.measured else None)


def _number(found: int | None) -> float:
    return math.nan if found is None else float(found)
