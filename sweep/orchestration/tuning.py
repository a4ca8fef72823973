"""Tune the rates of a sweep in rounds, then report on fresh seeds.

Each round is decided from the plan and the trial folders while no trial runs, so that an
interrupted sweep continues as if it had not been interrupted.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from optuna.storages import BaseStorage

from sweep.orchestration.schedule import Schedule
from sweep.orchestration.status import is_complete
from sweep.orchestration.studies import Study, TuningTrial, open_storage, read_tuning_trial
from sweep.plan.plan import TUNING_SEED, Plan, PlannedTrial
from sweep.plan.tuning import (
    CONFIRMATION,
    FINEST,
    GRID,
    best_index,
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

    Args:
        plan: with rows without an id for every report that needs its rate.
        schedule: runs the trials, and prunes.
        storage: URL of Optuna's; None: optuna.db in the sweep's folder.
        uid: of the sweep in shared stores.
    """

    def __init__(self, plan: Plan, schedule: Schedule, storage: str | None, uid: str) -> None:
        self.schedule, self.folder, self.uid = schedule, schedule.folder, uid
        self.settings, self.target = plan.settings.tuning, plan.settings.target
        self.storage_url = storage or f"sqlite:///{(self.folder.path / 'optuna.db').absolute()}"
        self.storage: BaseStorage | None = None
        self.open_reports: dict[int, list[PlannedTrial]] = {}
        for row in plan.trials:
            if row.id is None:
                self.open_reports.setdefault(row.batch_size, []).append(row)
        self._started: set[str] = set()  # by this command

    def next_round(self, plan: Plan) -> Round | None:
        """Return what to do next; None if nothing is left, or nothing can be decided.

        The rates are searched, then winners of an early or multi-dimensional search are confirmed
        at the reports' tokens, and then the reports run.
        """
        self.storage = self.storage or open_storage(self.storage_url)
        tuned = {row.batch_size for row in plan.known_trials if row.stage == "tune"}
        decided = [self._study(plan, batch) for batch in tuned - set(self.open_reports)]
        most = max((len(study.trials) for study in decided), default=0)
        searches = self._unbroken(self._study(plan, batch) for batch in self.open_reports)
        following = self._advance(plan, searches, most)
        if following is None:
            winners, provisional = {}, []
            for study in searches:
                batch, winner = study.template.batch_size, self._winner(study)
                is_early = study.template.tokens < self.open_reports[batch][0].tokens
                if winner and (is_early or study.extra):
                    provisional.append(self._study(plan, batch, winner))
                elif winner:
                    winners[batch] = winner
            confirmations = self._unbroken(provisional)
            following = self._advance(plan, confirmations)
            if following is None:
                for study in confirmations:
                    if winner := self._winner(study):
                        winners[winner.batch_size] = winner
                following = self._reports(plan, winners)
        if following is not None:
            self._started |= set(following.pauses)
        return following

    def _unbroken(self, studies: Iterable[Study]) -> list[Study]:
        """Leave out studies with a trial that failed here for a reason other than its rate.

        Nothing is decided about them; the next command tries the trial again.
        """

        def is_broken(trial: TuningTrial) -> bool:
            is_open = trial.id in self._started and trial.loss is None
            return is_open and self.folder.trial(trial.id).read_status().state is State.FAILED

        return [study for study in studies if not any(map(is_broken, study.trials))]

    def _study(self, plan: Plan, batch: int, winner: PlannedTrial | None = None) -> Study:
        """Return the search of a batch size.

        With its winner, return the confirmation, which brackets the winner's rate at the reports'
        tokens, with its β2 and weight decay.
        """
        key: tuple[object, ...] = ("tune", "tuned", batch)
        tuned = plan.known_trials
        rows = [row for row in tuned if (row.stage, row.policy, row.batch_size) == key]
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
            assert winner.learning_rate is not None
            own = {"beta2": winner.beta2, "weight_decay": winner.weight_decay}
            template = self.open_reports[batch][0].model_copy(
                update={"stage": "tune", "seed": TUNING_SEED, **own}
            )
            key = (template.tokens, winner.beta2, winner.weight_decay)
            rows = [row for row in rows if (row.tokens, row.beta2, row.weight_decay) == key]
            stage, finest = "confirmation", CONFIRMATION[-1]
            grid = tuple(winner.learning_rate * factor for factor in CONFIRMATION)
        # The uid tells sweeps on two machines apart, the path a folder and its copy.
        sweep = {"uid": self.uid, "folder": str(self.folder.path.resolve())}
        science = plan.science(template, 1.0).model_dump(mode="json")
        digest = sha256_of({**sweep, "science": science})[:8]
        title = f"batch size {batch}, {template.tokens} tokens, {stage} {digest}"
        trials = [
            read_tuning_trial(self.folder.trial(str(row.id)), row, rungs, self.target)
            for row in rows
        ]
        name = f"{self.folder.name}: {title}"
        return Study(name, template, grid, finest, extra, rungs, trials)

    def _advance(self, plan: Plan, studies: list[Study], least: int = 0) -> Round | None:
        """Bring studies one step further; None once all have settled with equally many trials.

        Args:
            least: trials of each study.
        """
        assert self.storage is not None
        following = Round()
        for study in studies:
            study.record(self.storage)
            if not self._continue(study, following):
                self._extend(plan, study, following, 0)
        if not following.pauses:
            most = max((least, *(len(study.trials) for study in studies)))
            for study in studies:
                self._extend(plan, study, following, most)
        return following if following.pauses else None

    def _continue(self, study: Study, following: Round) -> bool:
        """Run open trials on: those of the grid to their next rung, others to their end.

        At a rung that all of the grid have reached, the worse ones are pruned.
        """
        bounds = study.bounds()
        open_trials = [trial for trial in study.trials if trial.loss is None]
        raced = [t for t in open_trials if t not in bounds and is_in(t.rate, study.grid)]
        following.pauses |= {trial.id: None for trial in open_trials if trial not in raced}
        if not raced:
            return bool(open_trials)
        level = min(len(trial.at_rungs) for trial in raced)
        running = [trial for trial in raced if len(trial.at_rungs) == level]
        if level and running == raced:
            kept = survivors(
                {
                    trial.id: (trial.rate, trial.at_rungs[level - 1][1])
                    for trial in study.trials
                    if len(trial.at_rungs) >= level
                }
            )
            for index, trial in enumerate(study.trials):
                if trial in raced and trial.id not in kept:
                    reason = f"pruned at step {study.rungs[level - 1]}: in the worse half there"
                    self.schedule.prune(self.folder.trial(trial.id), reason, keep_checkpoint=True)
                    study.trials[index] = replace(trial, loss=math.inf, is_pruned=True)
            running = [trial for trial in running if trial.id in kept]
        step = study.rungs[level] if level < len(study.rungs) else None
        following.pauses |= {trial.id: step for trial in running}
        return True

    def _extend(self, plan: Plan, study: Study, following: Round, wanted: int) -> None:
        """Add the study's next trials; if it has settled, run its pruned bounds to the end."""
        rates: tuple[float, ...] = ()
        is_sampled = False
        if study.extra and len(study.trials) >= len(study.grid):
            is_sampled = len(study.trials) < max(self.settings.trials, wanted)
        else:
            rates = next_rates(study.trials, study.grid, study.finest, wanted)
        for row in study.propose(plan, rates) if rates or is_sampled else ():
            following.rows.append(row)
            is_raced = study.rungs and is_in(row.learning_rate or 0.0, study.grid)
            following.pauses[str(row.id)] = study.rungs[0] if is_raced else None
        if not rates and not is_sampled:
            for trial in study.bounds() if study.rungs else ():
                if trial.is_pruned:
                    self.schedule.revive(self.folder.trial(trial.id))
                    following.pauses[trial.id] = None

    def _winner(self, study: Study) -> PlannedTrial | None:
        """Return the row with the least loss, and remove the checkpoints of pruned trials."""
        for trial in study.trials:
            if trial.is_pruned:
                self.folder.trial(trial.id).remove_checkpoints()
        best = study.trials[best_index(study.trials)]
        return best.row if is_complete(self.folder.trial(best.id), self.target) else None

    def _reports(self, plan: Plan, winners: Mapping[int, PlannedTrial]) -> Round | None:
        """Give the reports the rates of the winners."""
        reports = Round()
        for batch, winner in winners.items():
            assert winner.learning_rate is not None
            tuned = (winner.learning_rate, winner.beta2, winner.weight_decay)
            reports.rows += [plan.with_rate(row, *tuned) for row in self.open_reports.pop(batch)]
        reports.pauses = {str(row.id): None for row in reports.rows}
        return reports if reports.rows else None
