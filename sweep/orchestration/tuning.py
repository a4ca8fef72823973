"""Tuning, round by round: pauses, prunes and adds tuning trials, then reports on fresh seeds.

Everything is decided from the plan and the trial folders, when no trial runs: an interrupted
sweep goes on as if it had not been. Rates come from an Optuna study per batch size.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sweep.orchestration.schedule import Schedule
from sweep.orchestration.tuning_trials import has_ended_well, show
from sweep.plan.plan import TUNING_SEED, Plan, PlannedTrial
from sweep.plan.policy import Policy
from sweep.plan.tuning import (
    CONFIRMATION,
    FINEST,
    GRID,
    Search,
    Shown,
    best_place,
    is_in,
    neighbours,
    rung_steps,
    survivors,
    winning_rate,
)
from sweep.trial.files import sha256_of
from sweep.trial.folder import Cause, State, TrialStatus

if TYPE_CHECKING:
    from sweep.orchestration.studies import RateStudy, Studies


@dataclass
class Round:
    """What is to happen next: trials to add to the plan, and how far trials are to go."""

    rows: list[PlannedTrial] = field(default_factory=list)
    pauses: dict[str, int | None] = field(default_factory=dict)  # step by trial id; None: the last


@dataclass
class Study:
    """The tuning trials of one batch size at one token count."""

    template: PlannedTrial  # a tuning trial, whatever its rate
    grid: tuple[float, ...]
    finest: float
    rows: list[PlannedTrial]  # in the plan
    extra: tuple[str, ...] = ()  # dimensions beside the rate

    @property
    def is_search(self) -> bool:
        """Whether it looks for the rate; otherwise it brackets a winner."""
        return self.finest == FINEST

    @property
    def batch_size(self) -> int:
        return self.template.batch_size


class Tuning:
    """Decides what a tuned sweep does next.

    Args:
        plan: with rows without an id for every report that awaits its rate.
        schedule: runs the trials, and prunes.
        storage: URL of Optuna's; None: optuna.db in the sweep's folder.
        uid: the sweep's in shared stores.
    """

    def __init__(self, plan: Plan, schedule: Schedule, storage: str | None, uid: str) -> None:
        self.settings, self.evaluation = plan.settings.tuning, plan.settings.evaluation
        self.target = plan.settings.target
        self.schedule, self.folder = schedule, schedule.folder
        self.storage, self.uid = storage, uid
        self.open_reports: dict[int, list[PlannedTrial]] = {}
        for row in plan.trials:
            if row.id is None:
                self.open_reports.setdefault(row.batch_size, []).append(row)
        self._began: set[str] = set()  # by this command
        self._studies: Studies | None = None
        # By trial and whether it was searched for: what it showed, as its status then was.
        self._seen: dict[tuple[str, bool], tuple[TrialStatus, Shown]] = {}

    def next_round(self, plan: Plan) -> Round | None:
        """Return what to do next; None when nothing is left, or nothing can be."""
        searches = [self._search(plan, batch) for batch in self.open_reports]
        searches = [study for study in searches if not self._is_broken(study)]
        found = self._stage(plan, searches, self._most_tried(plan))
        if found is not None:
            return self._noted(found)
        winners = {study.batch_size: self._winner(study) for study in searches}
        confirmed = [
            self._confirmation(plan, study, winner)
            for study in searches
            if (winner := winners[study.batch_size]) is not None and self._is_provisional(study)
        ]
        confirmed = [study for study in confirmed if not self._is_broken(study)]
        found = self._stage(plan, confirmed)
        if found is not None:
            return self._noted(found)
        provisional = {one.batch_size for one in searches if self._is_provisional(one)}
        winners |= dict.fromkeys(provisional)  # of a confirmation that failed none
        winners |= {study.batch_size: self._winner(study) for study in confirmed}
        reports = Round()
        for batch, rows in list(self.open_reports.items()):
            if (winner := winners.get(batch)) is not None:
                rate, other = winner.learning_rate, (winner.beta2, winner.weight_decay)
                assert rate is not None
                reports.rows += [plan.with_rate(row, rate, *other) for row in rows]
                del self.open_reports[batch]
        reports.pauses = {str(row.id): None for row in reports.rows}
        return self._noted(reports) if reports.rows else None

    def _noted(self, found: Round) -> Round:
        self._began |= set(found.pauses)
        return found

    # ---------------------------------------------------------------- studies

    def _is_provisional(self, study: Study) -> bool:
        """Tell whether a winner is still to be bracketed as it will be reported."""
        is_early = study.template.tokens < self.open_reports[study.batch_size][0].tokens
        return is_early or len(self.settings.dimensions) > 1

    def _is_broken(self, study: Study) -> bool:
        """Tell whether a trial failed here for a reason that says nothing of its rate.

        Nothing is decided then; the next command tries it again.
        """
        statuses = {str(row.id): self.folder.trial(str(row.id)).read_status() for row in study.rows}
        return any(
            one in self._began
            and status.state is State.FAILED
            and status.cause is not Cause.DIVERGED
            for one, status in statuses.items()
        )

    def _search(self, plan: Plan, batch: int) -> Study:
        tuned = [row for row in plan.known_trials if _is_tuning(row, batch)]
        least = min(row.tokens for row in tuned)
        rows = [row for row in tuned if row.tokens == least]
        centre = plan.tuning_centre(batch)
        extra = tuple(name for name in self.settings.dimensions if name != "lr")
        return Study(rows[0], tuple(centre * factor for factor in GRID), FINEST, rows, extra)

    def _confirmation(self, plan: Plan, search: Study, winner: PlannedTrial) -> Study:
        """Bracket a winner's rate at the reports' tokens, with its own β2 and weight decay."""
        template = self.open_reports[search.batch_size][0].model_copy(
            update={
                "stage": "tune",
                "seed": TUNING_SEED,
                "beta2": winner.beta2,
                "weight_decay": winner.weight_decay,
            }
        )
        rows = [
            row
            for row in plan.known_trials
            if _is_tuning(row, search.batch_size)
            and (row.tokens, row.beta2, row.weight_decay)
            == (template.tokens, template.beta2, template.weight_decay)
        ]
        assert winner.learning_rate is not None
        grid = tuple(winner.learning_rate * factor for factor in CONFIRMATION)
        return Study(template, grid, 2.0, rows)

    def _most_tried(self, plan: Plan) -> int:
        """Return the most trials that a batch size was tuned by whose rate is known already."""
        decided = {row.batch_size for row in plan.known_trials if row.stage == "tune"}
        decided -= set(self.open_reports)
        return max((len(self._search(plan, batch).rows) for batch in decided), default=0)

    def _stage(self, plan: Plan, studies: list[Study], least: int = 0) -> Round | None:
        """Bring studies a step on; None when all have settled with equally many trials.

        Args:
            plan: as it stands.
            studies: of the batch sizes whose rates are not known.
            least: trials of each.
        """
        found = Round()
        for study in studies:
            if not self._advance(study, found):
                self._propose(plan, study, found, 0)
        if not found.rows and not found.pauses:
            most = max((least, *(len(study.rows) for study in studies)))
            for study in studies:
                self._propose(plan, study, found, most)
        return found if found.rows or found.pauses else None

    def _advance(self, study: Study, found: Round) -> bool:
        """Let open trials go on: of the grid to their next rung, all others to their end."""
        shown, rungs = self._shown(study), self._rungs(study)
        rates = {str(row.id): float(row.learning_rate or 0) for row in study.rows}
        going = [one for one in shown if shown[one].loss is None]
        if not going:
            return False
        bounds = self._bounds(study, shown)
        raced = [one for one in going if one not in bounds and is_in(rates[one], study.grid)]
        found.pauses |= dict.fromkeys(set(going) - set(raced))
        if raced:
            self._race(raced, shown, rates, rungs, found)
        return True

    def _race(
        self,
        raced: list[str],
        shown: dict[str, Shown],
        rates: dict[str, float],
        rungs: tuple[int, ...],
        found: Round,
    ) -> None:
        """Let trials go on to their next rung, pruning at the one that all have reached."""
        level = {one: len(shown[one].at_rungs) for one in raced}
        lowest = min(level.values())
        going = [one for one in raced if level[one] == lowest]
        if lowest and len(going) == len(raced):
            at_rung = {
                one: (rates[one], shown[one].at_rungs[lowest - 1][1])
                for one in shown
                if len(shown[one].at_rungs) >= lowest
            }
            kept = survivors(at_rung)
            for one in set(going) - kept:
                why = f"pruned at step {rungs[lowest - 1]}: among the worse half there"
                self.schedule.prune(self.folder.trial(one), why, keep_checkpoint=True)
            going = [one for one in going if one in kept]
        step = rungs[lowest] if lowest < len(rungs) else None
        found.pauses |= dict.fromkeys(going, step)

    def _bounds(self, study: Study, shown: dict[str, Shown]) -> list[str]:
        """Return the trials beside the best that has ended, which must be trained to the end."""
        ordered = sorted(shown, key=lambda one: shown[one].tried.rate)
        tried = [shown[one].tried for one in ordered]
        if study.extra or winning_rate(tried) is None:
            return []
        return [ordered[place] for place in neighbours(tried)]

    def _propose(self, plan: Plan, study: Study, found: Round, wanted: int) -> None:
        """Add the trials that the study asks for next."""
        search, shown = self._as_search(study), self._shown(study)
        if search.is_done(shown.values(), wanted):
            self._revive(study, shown, found)
            return
        optuna_study = self._optuna(search)
        optuna_study.bring_up_to_date(shown)
        rows: dict[str, PlannedTrial] = {}

        def name(values: dict[str, float]) -> str:
            row = _row(plan, study.template, values)
            rows[str(row.id)] = row
            return str(row.id)

        optuna_study.ask(wanted, name)
        found.rows += rows.values()
        found.pauses |= dict.fromkeys(rows)  # what is beside the best is trained to the end
        if rungs := self._rungs(study):
            grid = [one for one in rows if is_in(float(rows[one].learning_rate or 0), study.grid)]
            found.pauses |= dict.fromkeys(grid, rungs[0])

    def _revive(self, study: Study, shown: dict[str, Shown], found: Round) -> None:
        """Train what bounds the best to the end where it was pruned on the way."""
        for one in self._bounds(study, shown) if self._rungs(study) else ():
            if shown[one].is_pruned:
                self.schedule.revive(self.folder.trial(one))
                found.pauses[one] = None

    def _optuna(self, search: Search) -> "RateStudy":
        from sweep.orchestration.studies import Studies, default_storage

        self._studies = self._studies or Studies(self.storage or default_storage(self.folder.path))
        return self._studies.of(search)

    def _as_search(self, study: Study) -> Search:
        template = study.template
        science = self.schedule.plan.science(template, 1.0).model_dump(mode="json")
        # Equal paths on two machines differ in their uid, a folder and its copy in their path.
        sweep = {"uid": self.uid, "folder": str(self.folder.path.resolve())}
        own = sha256_of({**sweep, "science": science})[:8]
        stage = "search" if study.is_search else "confirmation"
        name = (
            f"{self.folder.name}: batch size {study.batch_size}, {template.tokens} tokens, {stage} "
            f"{own}"
        )
        return Search(name, study.grid, study.finest, study.extra, self.settings.trials)

    def _rungs(self, study: Study) -> tuple[int, ...]:
        if self.target is not None or not self.settings.prune or not study.is_search:
            return ()  # with a target the schedule ends what is late
        return rung_steps(study.template.steps, self.evaluation)

    # ---------------------------------------------------------------- what trials show

    def _winner(self, study: Study) -> PlannedTrial | None:
        """Return the row of the least final loss, and give Optuna the last word of the study."""
        shown = self._shown(study)
        for one in shown:
            if shown[one].is_pruned:
                self.folder.trial(one).remove_checkpoints()
        self._optuna(self._as_search(study)).bring_up_to_date(shown)
        best = study.rows[best_place([shown[str(row.id)].tried for row in study.rows])]
        return best if has_ended_well(self.folder.trial(str(best.id)), self.target) else None

    def _shown(self, study: Study) -> dict[str, Shown]:
        return {str(row.id): self._shown_of(study, row) for row in study.rows}

    def _shown_of(self, study: Study, row: PlannedTrial) -> Shown:
        trial = self.folder.trial(str(row.id))
        key = trial.id, study.is_search
        status, seen = trial.read_status(), self._seen.get(key)
        if seen is None or seen[0] != status:
            values = _values(study.template, row, study.extra)
            seen = status, show(trial, values, self._rungs(study), self.target)
            self._seen[key] = seen
        return seen[1]


def _is_tuning(row: PlannedTrial, batch: int) -> bool:
    return (row.stage, row.policy, row.batch_size) == ("tune", "tuned", batch)


def _row(plan: Plan, template: PlannedTrial, values: dict[str, float]) -> PlannedTrial:
    """Plan the trial with these values; β2 and weight decay are factors on what policy holds."""
    held = Policy("tuned").optimizer_at(
        template.batch_size, plan.tokens_per_sequence, plan.settings.optimizer
    )
    beta2 = held.beta2 ** (1 / values["beta2"]) if "beta2" in values else template.beta2
    decay = template.weight_decay
    if "weight_decay" in values:
        decay = held.weight_decay * values["weight_decay"]
    return plan.with_rate(template, values["learning_rate"], beta2, decay)


def _values(held: PlannedTrial, row: PlannedTrial, extra: tuple[str, ...]) -> dict[str, float]:
    """Return a trial's values as its study knows them; the first grid trial holds the policy's."""
    values = {"learning_rate": float(row.learning_rate or 0.0)}
    if "beta2" in extra:
        values["beta2"] = math.log(held.beta2) / math.log(row.beta2)
    if "weight_decay" in extra:
        values["weight_decay"] = row.weight_decay / held.weight_decay if held.weight_decay else 1.0
    return values
