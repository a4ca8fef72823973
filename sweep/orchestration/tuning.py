"""Tune the rates of a sweep in rounds, then report on fresh seeds.

Each round is decided from the plan and the trial folders while no trial runs, so that an
interrupted sweep continues as if it had not been interrupted."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sweep.orchestration.schedule import Schedule
from sweep.plan.plan import TUNING_SEED, Plan, PlannedTrial
from sweep.plan.policy import Policy
from sweep.plan.tuning import (
    CONFIRMATION,
    FINEST,
    GRID,
    Search,
    TuningResult,
    best_index,
    is_in,
    neighbours,
    rung_steps,
    survivors,
)
from sweep.trial.files import read_metrics, sha256_of
from sweep.trial.folder import Cause, State, TrialFolder, TrialStatus

if TYPE_CHECKING:
    from sweep.orchestration.studies import RateStudy


def read_tuning_result(
    trial: TrialFolder, values: dict[str, float], rungs: tuple[int, ...], target: float | None
) -> TuningResult:
    """Read one tuning trial.

    Args:
        trial: its folder.
        values: its rate and other dimensions, as its study knows them.
        rungs: steps at which trials are compared.
        target: loss to train to, if there is one.
    """
    is_pruned = trial.read_status().state is State.PRUNED and target is None
    return TuningResult(values, _loss(trial, target), is_pruned, tuple(_losses_at(trial, rungs)))


def is_complete(trial: TrialFolder, target: float | None) -> bool:
    """Return True if a trial is complete, and reached the target if there is one."""
    result = trial.read_result() or {}
    return result.get("state") == State.COMPLETE and (
        target is None or bool(result["tokens_to_target"])
    )


def _loss(trial: TrialFolder, target: float | None) -> float | None:
    """Return what tuning minimizes: the final loss, or the tokens to the target."""
    status = trial.read_status()
    if status.state is State.FAILED and status.cause is not Cause.DIVERGED:
        return None  # it will be tried again
    if target is not None and status.state in (State.COMPLETE, State.PRUNED):
        return _tokens_to_target(trial, target)
    if status.state is State.COMPLETE:
        return float((trial.read_result() or {})["final_valid_loss"])
    return math.inf if status.state.is_finished else None


def _tokens_to_target(trial: TrialFolder, target: float) -> float:
    """Return the tokens to the target, or more than were trained if it was not reached.

    They grow with the distance to the target, which tells the search where to continue.
    """
    if tokens := (trial.read_result() or {}).get("tokens_to_target"):
        return float(tokens)
    lines = [line for line in read_metrics(trial.metrics_path) if "valid/loss" in line]
    if not lines or lines[-1]["valid/loss"] is None:
        return math.inf
    return float(lines[-1]["tokens"] * (1 + max(0.0, lines[-1]["valid/loss"] - target)))


def _losses_at(trial: TrialFolder, rungs: tuple[int, ...]) -> list[tuple[int, float]]:
    lines = {line["step"]: line for line in read_metrics(trial.metrics_path)}
    losses = []
    for step in rungs:
        if step not in lines or "valid/loss" not in lines[step]:
            break
        loss = lines[step]["valid/loss"]
        losses.append((step, math.inf if loss is None else float(loss)))
    return losses


Results = Mapping[str, TuningResult]


@dataclass
class Round:
    """The next round: trials to add to the plan, and how far trials are to run.

    Attributes:
        rows: to add.
        pauses: by trial id, the step to pause after; None: the last one.
    """

    rows: list[PlannedTrial] = field(default_factory=list)
    pauses: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """The tuning trials of one batch size at one token count.

    Attributes:
        template: a tuning trial of any rate.
        grid: the first rates.
        finest: ratio of neighbouring rates at which refinement ends.
        rows: the trials in the plan.
        extra: dimensions other than the rate.
    """

    template: PlannedTrial
    grid: tuple[float, ...]
    finest: float
    rows: list[PlannedTrial]
    extra: tuple[str, ...] = ()

    @property
    def is_search(self) -> bool:
        """Whether it looks for the rate; otherwise it confirms a winner."""
        return self.finest == FINEST

    @property
    def batch_size(self) -> int:
        return self.template.batch_size


class Tuning:
    """Decides the rounds of a tuned sweep.

    Args:
        plan: with rows without an id for every report that needs its rate.
        schedule: runs the trials, and prunes.
        storage: URL of Optuna's; None: optuna.db in the sweep's folder.
        uid: of the sweep in shared stores.
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
        self._started: set[str] = set()  # by this command
        self._studies: dict[str, RateStudy] = {}
        self._cache: dict[tuple[str, bool], tuple[TrialStatus, TuningResult]] = {}

    def next_round(self, plan: Plan) -> Round | None:
        """Return what to do next; None if nothing is left, or nothing can be decided.

        The rates are searched, then winners of an early or multi-dimensional search are confirmed
        at the reports' tokens, and then the reports run.
        """
        searches = self._unbroken(self._search(plan, batch) for batch in self.open_reports)
        following = self._advance(plan, searches, self._most_trials(plan))
        winners = {study.batch_size: self._winner(study) for study in searches if not following}
        if not following:
            provisional = [study for study in searches if self._is_provisional(study)]
            confirmations = self._unbroken(
                self._confirmation(plan, study, winner)
                for study in provisional
                if (winner := winners[study.batch_size]) is not None
            )
            following = self._advance(plan, confirmations)
            winners |= dict.fromkeys(study.batch_size for study in provisional)
            if not following:
                winners |= {study.batch_size: self._winner(study) for study in confirmations}
        following = following or self._reports(plan, winners)
        if following:
            self._started |= set(following.pauses)
        return following

    def _reports(self, plan: Plan, winners: Mapping[int, PlannedTrial | None]) -> Round | None:
        """Give the reports the rates of the winners."""
        reports = Round()
        for batch, rows in list(self.open_reports.items()):
            if (winner := winners.get(batch)) is not None:
                rate, other = winner.learning_rate, (winner.beta2, winner.weight_decay)
                assert rate is not None
                reports.rows += [plan.with_rate(row, rate, *other) for row in rows]
                del self.open_reports[batch]
        reports.pauses = {str(row.id): None for row in reports.rows}
        return reports if reports.rows else None

    def _is_provisional(self, study: Study) -> bool:
        """Return True if a winner must be confirmed at the reports' tokens."""
        is_early = study.template.tokens < self.open_reports[study.batch_size][0].tokens
        return is_early or len(self.settings.dimensions) > 1

    def _unbroken(self, studies: Iterable[Study]) -> list[Study]:
        """Leave out studies with a trial that failed here for a reason other than its rate.

        Nothing is decided about them; the next command tries the trial again.
        """
        return [study for study in studies if not any(map(self._is_broken, study.rows))]

    def _is_broken(self, row: PlannedTrial) -> bool:
        if row.id not in self._started:
            return False
        status = self.folder.trial(row.id).read_status()
        return status.state is State.FAILED and status.cause is not Cause.DIVERGED

    def _search(self, plan: Plan, batch: int) -> Study:
        tuned = [row for row in plan.known_trials if _is_tuning(row, batch)]
        least = min(row.tokens for row in tuned)
        rows = [row for row in tuned if row.tokens == least]
        grid = tuple(plan.tuning_centre(batch) * factor for factor in GRID)
        extra = tuple(name for name in self.settings.dimensions if name != "lr")
        return Study(rows[0], grid, FINEST, rows, extra)

    def _confirmation(self, plan: Plan, search: Study, winner: PlannedTrial) -> Study:
        """Bracket a winner's rate at the reports' tokens, with its β2 and weight decay."""
        template = self.open_reports[search.batch_size][0].model_copy(
            update={
                "stage": "tune",
                "seed": TUNING_SEED,
                "beta2": winner.beta2,
                "weight_decay": winner.weight_decay,
            }
        )
        same = (template.tokens, template.beta2, template.weight_decay)
        tuned = (row for row in plan.known_trials if _is_tuning(row, search.batch_size))
        rows = [row for row in tuned if (row.tokens, row.beta2, row.weight_decay) == same]
        assert winner.learning_rate is not None
        grid = tuple(winner.learning_rate * factor for factor in CONFIRMATION)
        return Study(template, grid, 2.0, rows)

    def _most_trials(self, plan: Plan) -> int:
        """Return the most tuning trials of a batch size whose rate is already decided."""
        decided = {row.batch_size for row in plan.known_trials if row.stage == "tune"}
        decided -= set(self.open_reports)
        return max((len(self._search(plan, batch).rows) for batch in decided), default=0)

    def _advance(self, plan: Plan, studies: list[Study], least: int = 0) -> Round | None:
        """Bring studies one step further; None once all have settled with equally many trials.

        Args:
            plan: as it stands.
            studies: of the batch sizes whose rates are open.
            least: trials of each.
        """
        following = Round()
        for study in studies:
            if not self._continue(study, following):
                self._propose(plan, study, following, 0)
        if not following.pauses:
            most = max((least, *(len(study.rows) for study in studies)))
            for study in studies:
                self._propose(plan, study, following, most)
        return following if following.pauses else None

    def _continue(self, study: Study, following: Round) -> bool:
        """Let open trials run on: those of the grid to their next rung, others to their end."""
        results = self._results(study)
        open_trials = [trial for trial, result in results.items() if result.loss is None]
        bounds = self._bounds(study, results) if open_trials else []
        raced = [
            trial
            for trial in open_trials
            if trial not in bounds and is_in(results[trial].rate, study.grid)
        ]
        following.pauses |= dict.fromkeys(set(open_trials) - set(raced))
        if raced:
            self._race(raced, results, self._rungs(study), following)
        return bool(open_trials)

    def _race(
        self, raced: list[str], results: Results, rungs: tuple[int, ...], following: Round
    ) -> None:
        """Let trials run to their next rung; prune at a rung that all have reached."""
        level = {trial: len(results[trial].at_rungs) for trial in raced}
        lowest = min(level.values())
        running = [trial for trial in raced if level[trial] == lowest]
        if lowest and len(running) == len(raced):
            at_rung = {
                trial: (result.rate, result.at_rungs[lowest - 1][1])
                for trial, result in results.items()
                if len(result.at_rungs) >= lowest
            }
            kept = survivors(at_rung)
            for trial in set(running) - kept:
                reason = f"pruned at step {rungs[lowest - 1]}: in the worse half there"
                self.schedule.prune(self.folder.trial(trial), reason, keep_checkpoint=True)
            running = [trial for trial in running if trial in kept]
        step = rungs[lowest] if lowest < len(rungs) else None
        following.pauses |= dict.fromkeys(running, step)

    def _bounds(self, study: Study, results: Results) -> list[str]:
        """Return the trials next to the best finished one, which must run to the end."""
        if study.extra:
            return []
        ordered = sorted(results, key=lambda trial: results[trial].rate)
        return [ordered[index] for index in neighbours([results[trial] for trial in ordered])]

    def _propose(self, plan: Plan, study: Study, following: Round, wanted: int) -> None:
        """Add the trials that the study suggests next."""
        search, results = self._as_search(study), self._results(study)
        optuna_study = self._optuna(search)
        optuna_study.update(results)
        rows: dict[str, PlannedTrial] = {}

        def name(values: dict[str, float]) -> str:
            row = _with_values(plan, study.template, values)
            rows[str(row.id)] = row
            return str(row.id)

        optuna_study.suggest(results, wanted, name)
        if not rows:
            self._revive(study, results, following)
        following.rows += rows.values()
        rungs = self._rungs(study)
        for trial, row in rows.items():
            is_raced = rungs and is_in(float(row.learning_rate or 0), study.grid)
            following.pauses[trial] = rungs[0] if is_raced else None

    def _revive(self, study: Study, results: Results, following: Round) -> None:
        """Run pruned trials to the end if they turn out to bound the best rate."""
        for trial in self._bounds(study, results) if self._rungs(study) else ():
            if results[trial].is_pruned:
                self.schedule.revive(self.folder.trial(trial))
                following.pauses[trial] = None

    def _optuna(self, search: Search) -> "RateStudy":
        from sweep.orchestration.studies import RateStudy, default_storage, open_storage

        if search.name not in self._studies:
            url = self.storage or default_storage(self.folder.path)
            self._studies[search.name] = RateStudy(search, open_storage(url))
        return self._studies[search.name]

    def _as_search(self, study: Study) -> Search:
        template = study.template
        science = self.schedule.plan.science(template, 1.0).model_dump(mode="json")
        # The uid tells sweeps on two machines apart, the path a folder and its copy.
        sweep = {"uid": self.uid, "folder": str(self.folder.path.resolve())}
        digest = sha256_of({**sweep, "science": science})[:8]
        stage = "search" if study.is_search else "confirmation"
        name = (
            f"{self.folder.name}: batch size {study.batch_size}, {template.tokens} tokens, {stage} "
            f"{digest}"
        )
        return Search(name, study.grid, study.finest, study.extra, self.settings.trials)

    def _rungs(self, study: Study) -> tuple[int, ...]:
        if self.target is not None or not self.settings.prune or not study.is_search:
            return ()  # with a target, the schedule ends late trials
        return rung_steps(study.template.steps, self.evaluation)

    def _winner(self, study: Study) -> PlannedTrial | None:
        """Return the row with the least loss, and bring Optuna up to date a last time."""
        results = self._results(study)
        for trial, result in results.items():
            if result.is_pruned:
                self.folder.trial(trial).remove_checkpoints()
        self._optuna(self._as_search(study)).update(results)
        best = study.rows[best_index([results[str(row.id)] for row in study.rows])]
        return best if is_complete(self.folder.trial(str(best.id)), self.target) else None

    def _results(self, study: Study) -> dict[str, TuningResult]:
        return {str(row.id): self._result(study, row) for row in study.rows}

    def _result(self, study: Study, row: PlannedTrial) -> TuningResult:
        """Read a trial's result, unless its status is the same as when it was last read."""
        trial = self.folder.trial(str(row.id))
        key, status = (trial.id, study.is_search), trial.read_status()
        if key not in self._cache or self._cache[key][0] != status:
            values = _values_of(study.template, row, study.extra)
            result = read_tuning_result(trial, values, self._rungs(study), self.target)
            self._cache[key] = status, result
        return self._cache[key][1]


def _is_tuning(row: PlannedTrial, batch: int) -> bool:
    return (row.stage, row.policy, row.batch_size) == ("tune", "tuned", batch)


def _with_values(plan: Plan, template: PlannedTrial, values: dict[str, float]) -> PlannedTrial:
    """Plan the trial with these values; β2 and weight decay are factors on the policy's."""
    policy = Policy("tuned").optimizer_at(
        template.batch_size, plan.tokens_per_sequence, plan.settings.optimizer
    )
    beta2, decay = template.beta2, template.weight_decay
    if "beta2" in values:
        beta2 = policy.beta2 ** (1 / values["beta2"])
    if "weight_decay" in values:
        decay = policy.weight_decay * values["weight_decay"]
    return plan.with_rate(template, values["learning_rate"], beta2, decay)


def _values_of(first: PlannedTrial, row: PlannedTrial, extra: tuple[str, ...]) -> dict[str, float]:
    """Return a trial's values as its study knows them; the first grid trial has the policy's."""
    values = {"learning_rate": float(row.learning_rate or 0.0)}
    if "beta2" in extra:
        values["beta2"] = math.log(first.beta2) / math.log(row.beta2)
    if "weight_decay" in extra:
        decay = first.weight_decay
        values["weight_decay"] = row.weight_decay / decay if decay else 1.0
    return values
