"""Tune the rates of a sweep in rounds, then report on fresh seeds.

Each round is decided from the plan and the trial folders while no trial runs, so that an
interrupted sweep continues as if it had not been interrupted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sweep.orchestration.schedule import Schedule
from sweep.orchestration.status import is_complete
from sweep.orchestration.studies import Study, open_storage, read_tuning_trial
from sweep.plan.plan import TUNING_SEED, Plan, PlannedTrial
from sweep.plan.rates import (
    CONFIRMATION,
    FINEST,
    GRID,
    best_of,
    is_in,
    next_rates,
    rung_steps,
    survivors,
)
from sweep.trial.files import sha256_of
from sweep.trial.folder import State


@dataclass
class Round:
    """The next round: trials to add to the plan, and how far trials are to run."""

    rows: list[PlannedTrial] = field(default_factory=list)
    pauses: dict[str, int | None] = field(default_factory=dict)  # step by trial id; None: the last


class Tuning:
    """Decides the rounds of a tuned sweep.

    The plan has rows without an id for reports that need their rate. `storage` is a URL, by default
    of optuna.db in the folder, and `uid` names the sweep in shared stores.
    """

    def __init__(self, plan: Plan, schedule: Schedule, storage: str | None, uid: str) -> None:
        self.schedule, self.folder, self.uid = schedule, schedule.folder, uid
        self.settings, self.target = plan.settings.tuning, plan.settings.target
        self.storage_url = storage or f"sqlite:///{(self.folder.path / 'optuna.db').absolute()}"
        self.open_reports: dict[int, list[PlannedTrial]] = {}
        for row in plan.trials:
            if row.id is None:
                self.open_reports.setdefault(row.batch_size, []).append(row)
        self._started: set[str] = set()  # by this command

    def next_round(self, plan: Plan) -> Round | None:
        """Search rates, confirm winners of an early or joint search, then run the reports.

        Returns None if nothing is left, or nothing can be decided.
        """
        tuned = {row.batch_size for row in plan.known_trials if row.stage == "tune"}
        decided = [self._study(plan, batch) for batch in tuned - set(self.open_reports)]
        most = max((len(study.trials) for study in decided), default=0)
        searches = self._unbroken(self._study(plan, batch) for batch in self.open_reports)
        if following := self._advance(plan, searches, most):
            return following
        best = list(filter(None, map(self._winner, searches)))
        are_joint, reports = len(self.settings.dimensions) > 1, self.open_reports
        early = [row for row in best if are_joint or row.tokens < reports[row.batch_size][0].tokens]
        confirmations = self._unbroken(self._study(plan, row.batch_size, row) for row in early)
        if following := self._advance(plan, confirmations):
            return following
        confirmed = filter(None, map(self._winner, confirmations))
        return self._reports(plan, [*(row for row in best if row not in early), *confirmed])

    def _unbroken(self, studies: Iterable[Study]) -> list[Study]:
        """Leave out studies in which a trial failed, so that the next command tries it again."""
        states = {i: self.folder.trial(i).read_status().state for i in self._started}
        failed = {i for i, state in states.items() if state is State.FAILED}
        return [
            study
            for study in studies
            if not any(trial.loss is None and trial.id in failed for trial in study.trials)
        ]

    def _study(self, plan: Plan, batch: int, winner: PlannedTrial | None = None) -> Study:
        """Return the search of a batch size, or what brackets its winner at the reports' tokens."""
        rows = [row for row in plan.known_trials if (row.stage, row.batch_size) == ("tune", batch)]
        extra: tuple[str, ...] = ()
        rungs: tuple[int, ...] = ()
        if winner is None:
            least = min(row.tokens for row in rows)
            rows = [row for row in rows if row.tokens == least]
            template, stage, finest = rows[0], "search", FINEST
            grid = tuple(plan.tuning_centre(batch) * factor for factor in GRID)
            extra = tuple(name for name in self.settings.dimensions if name != "lr")
            if self.settings.prune and self.target is None:  # else the schedule ends late trials
                rungs = rung_steps(template.steps, plan.settings.evaluation)
        else:
            own = {"beta2": winner.beta2, "weight_decay": winner.weight_decay}
            report = self.open_reports[batch][0]
            template = report.model_copy(update={"stage": "tune", "seed": TUNING_SEED, **own})
            key = (template.tokens, *own.values())
            rows = [row for row in rows if (row.tokens, row.beta2, row.weight_decay) == key]
            stage, finest = "confirmation", CONFIRMATION[-1]
            grid = tuple((winner.learning_rate or 0.0) * factor for factor in CONFIRMATION)
        # The uid tells sweeps on two machines apart, the path a folder and its copy.
        sweep = [self.uid, str(self.folder.path.resolve())]
        digest = sha256_of([*sweep, plan.with_rate(template, 1.0).id])[:8]
        title = f"batch size {batch}, {template.tokens} tokens, {stage} {digest}"
        name = f"{self.folder.name}: {title}"
        trials = [read_tuning_trial(self.folder, row, rungs, self.target) for row in rows]
        return Study(name, template, grid, finest, extra, rungs, trials)

    def _advance(self, plan: Plan, studies: list[Study], least: int = 0) -> Round | None:
        """Bring studies one step further; None once all settled with the same number of trials."""
        storage, following = open_storage(self.storage_url), Round()
        for study in studies:
            study.record(storage)
            if any(trial.loss is None for trial in study.trials):
                self._continue(study, following)
            else:
                self._extend(plan, study, following, 0)
        if not following.pauses:
            most = max((least, *(len(study.trials) for study in studies)))
            for study in studies:
                self._extend(plan, study, following, most)
        self._started |= following.pauses.keys()
        return following if following.pauses else None

    def _continue(self, study: Study, following: Round) -> None:
        """Run open trials on: those of the grid to their next rung, others to their end.

        At a rung that all of the grid have reached, the worse ones are pruned.
        """
        bounds = study.bounds()
        open_trials = [trial for trial in study.trials if trial.loss is None]
        raced = [t for t in open_trials if t not in bounds and is_in(t.rate, study.grid)]
        following.pauses |= {trial.id: None for trial in open_trials if trial not in raced}
        level = min((len(trial.at_rungs) for trial in raced), default=0)
        running = [trial for trial in raced if len(trial.at_rungs) == level]
        if level and running == raced:
            reached = [trial for trial in study.trials if len(trial.at_rungs) >= level]
            kept = survivors({t.id: (t.rate, t.at_rungs[level - 1][1]) for t in reached})
            reason = f"pruned at step {study.rungs[level - 1]}: in the worse half there"
            for index, trial in enumerate(study.trials):
                if trial in raced and trial.id not in kept:
                    self.schedule.prune(self.folder.trial(trial.id), reason, keep_checkpoint=True)
                    study.trials[index] = replace(trial, loss=math.inf, is_pruned=True)
            running = [trial for trial in running if trial.id in kept]
        step = study.rungs[level] if level < len(study.rungs) else None
        following.pauses |= {trial.id: step for trial in running}

    def _extend(self, plan: Plan, study: Study, following: Round, wanted: int) -> None:
        """Add the study's next trials; if it has settled, run its pruned bounds to the end."""
        rows: list[PlannedTrial] = []
        if study.extra and len(study.trials) >= len(study.grid):
            if len(study.trials) < max(self.settings.trials, wanted):
                rows = study.propose(plan, ())
        elif rates := next_rates(study.trials, study.grid, study.finest, wanted):
            rows = study.propose(plan, rates)
        for row in rows:
            is_raced = study.rungs and is_in(row.learning_rate or 0.0, study.grid)
            following.pauses[str(row.id)] = study.rungs[0] if is_raced else None
        following.rows += rows
        for trial in study.bounds() if study.rungs and not rows else ():
            if trial.is_pruned:
                self.schedule.revive(self.folder.trial(trial.id))
                following.pauses[trial.id] = None

    def _winner(self, study: Study) -> PlannedTrial | None:
        """Return the row with the least loss, and remove the checkpoints of pruned trials."""
        for trial in study.trials:
            if trial.is_pruned:
                self.folder.trial(trial.id).remove_checkpoints()
        best = best_of(study.trials)
        return best.row if is_complete(self.folder.trial(best.id), self.target) else None

    def _reports(self, plan: Plan, winners: list[PlannedTrial]) -> Round | None:
        """Give the reports the rates of the winners."""
        rows = [
            plan.with_rate_of(winner, row)
            for winner in winners
            for row in self.open_reports.pop(winner.batch_size)
        ]
        return Round(rows, {str(row.id): None for row in rows}) if rows else None
