"""Parts of a sweep that run apart: `--shard i/n`, whose folders `sweep merge` joins.

Each arm (batch size, optimizer and budget), with its tuning and its seeds, belongs to one part, so
that no part needs results of another one.
"""

import re
import shlex
from dataclasses import dataclass
from typing import Any

from sweep.config.arms import Arm
from sweep.config.experiment import Experiment
from sweep.errors import SweepError
from sweep.plan.commands import parse_command, typed_command
from sweep.plan.plan import Plan
from sweep.plan.policies import is_tuned

MOST_PARTS = 1000


@dataclass(frozen=True)
class Shard:
    """One of the parts of a sweep."""

    index: int  # from 1
    count: int

    def arms(self, plan: Plan) -> frozenset[Arm]:
        """Return the arms of this part; every n-th one, by optimizer, budget and batch size."""
        ordered = sorted({row.arm for row in plan.trials}, key=_order_of)
        return frozenset(ordered[self.index - 1 :: self.count])

    def restrict(self, plan: Plan) -> Plan:
        """Return a plan with the rows of this part."""
        arms = self.arms(plan)
        rows = tuple(row for row in plan.trials if row.arm in arms)
        if not rows:
            raise SweepError(
                f"shard must be one of the {len({row.arm for row in plan.trials})} batch sizes and "
                f"optimizers, got {self.index}/{self.count}. Take fewer parts."
            )
        return plan.model_copy(update={"trials": rows})

    def refuse_unsuited(self, experiment: Experiment, has_timing: bool) -> None:
        """Refuse an experiment whose parts would need results of others."""
        if experiment.chooses_batches:
            raise SweepError("--shard needs batch sizes that are known. Name --batches.")
        if len(experiment.by_budget) > 1 and is_tuned(experiment.lr):
            raise SweepError(
                "--shard with tuned rates needs one --budget, because the first rates of a larger "
                "one follow from the results of all parts. Merge the parts of each budget first."
            )
        if experiment.time_budget_seconds is not None and not has_timing:
            raise SweepError("--shard with a --budget of time needs --timing FILE, for all parts.")


def _order_of(arm: Arm) -> tuple[str, int, int]:
    return arm.optimizer or "", arm.budget or 0, arm.batch_size


def parse_shard(text: str | None) -> Shard | None:
    """Read `2/6`, the second of six parts.

    Raises:
        SweepError: if it is no such part.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_PARTS:
        raise SweepError(f"shard must be I/N with I from 1 to N, got {text!r}. Write it as 2/6.")
    return Shard(int(match[1]), int(match[2]))


def remaining_command(plan: Plan, out: str) -> str:
    """Return the command that runs what the parts of a merged sweep left, and reports."""
    experiment: str | None = plan.experiment
    flags: dict[str, Any] = {}
    if plan.commands:
        experiment, flags = parse_command(plan.commands[-1])
    flags.pop("shard", None)
    is_tuned = any(row.stage == "tune" for row in plan.trials)
    if plan.settings.tuning.centred_by == "rule" and is_tuned:
        flags["centre"] = "rule"
    return shlex.join(typed_command(experiment, {**flags, "out": out}))
