"""The tables of a sweep: its trials, their curves, and its cells.

A cell is one batch size under one policy and rate. Sweeps need not be finished.
"""

import contextlib
import json
import math
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from sweep.config.execution import was_alone
from sweep.config.metrics import SECONDS, final_column
from sweep.config.objective import LOSS, Objective
from sweep.config.workloads import FINAL_PROMPTS
from sweep.decision.decision import ALPHA
from sweep.decision.equal_amounts import steepest_slope
from sweep.decision.trials import End, end_of, parse_end
from sweep.errors import CorruptFile, SweepError, cut, printable, reason_of
from sweep.plan.plan import Plan, PlannedTrial, parse_plan
from sweep.plan.policies import label_policy
from sweep.trial.files import POSITION, canonical_json, find_json, refuse_links, replacing
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.result import COLUMNS, Result, is_metric
from sweep.trial.status import MESSAGE_CHARACTERS, State
from sweep.trial.timing import Timing, read_timing

TRIAL_COLUMNS = {name: column.kind for name, column in COLUMNS.items()}
MAX_TABLE_BYTES = 1 << 25
MAX_HEADER_BYTES = 1 << 16
MOST_DIGITS = 40  # characters of a number in a table
NUMBERS = ("float64", "int64")
MISSING_CURVES = (
    "curves.csv is missing. Without it, this report has no curves, no gradient noise scale if it "
    "was measured, and of a sweep to a target no other targets and no losses at equal tokens, "
    "steps and seconds."
)
TIME_COLUMNS = [name for name in COLUMNS if name.startswith("seconds_")]
TIME_COLUMNS += ["tokens_per_second", "mfu"]
MEANS = [name for name, column in COLUMNS.items() if column.is_mean]
CELL_KEYS = ["label", "batch_size", "learning_rate"]
# Of a trial that ended early or ran out of memory, these differ from the plan.
MEASURED = {"tokens", "steps", "microbatch_size", "gradient_accumulation_steps"}
CURVES = "curves.csv"  # file of a published folder
# Metrics of the curves that reports read, in addition to the objective's.
REPORTED_METRICS = (
    "train/loss",
    "valid/loss",
    "valid/reward",
    "reward/mean",
    "noise/trace",
    "noise/square",
)
COUNTS = ["planned", *map(str, End)]


class Estimate(NamedTuple):
    """A value and its 95 % interval, whose ends are NaN if the data allow none."""

    value: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """Write `1.5 [1.4, 1.6]`, or the value alone."""
        ends = f" [{self.low:{form}}, {self.high:{form}}]" if math.isfinite(self.low) else ""
        return f"{self.value:{form}}{ends}"


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its t interval; there is none for one value."""
    mean = float(np.mean(values))
    count = len(values)
    if count < 2:
        return Estimate(mean, math.nan, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    half = float(stdtrit(count - 1, 1 - ALPHA / 2)) * error
    return Estimate(mean, mean - half, mean + half)


@dataclass(frozen=True, eq=False, repr=False)
class SweepTables:
    path: Path  # the folder
    name: str
    plan: Plan
    trials: pd.DataFrame  # one row per planned trial that has an id; TRIAL_COLUMNS
    curves: pd.DataFrame  # one row per logged point: id, time, step, tokens, one column a metric
    warnings: tuple[str, ...]  # sentences about files that are missing or were left out
    checked: dict[str, Any]  # check.json, if it is of the plan's code
    lacks_curves: bool  # a published folder without curves.csv
    timing: Timing | None  # timing.json, if it has rounds
    smaller: "tuple[SweepTables, ...]" = ()  # those of smaller budgets, ascending

    @property
    def by_budget(self) -> "tuple[SweepTables, ...]":
        """The tables of each budget, ascending; the last are these."""
        return (*self.smaller, self)

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes of the plan."""
        return sorted({row.batch_size for row in self.plan.trials})

    @property
    def all_batch_sizes(self) -> list[int]:
        """The batch sizes of all budgets, which choose the colors."""
        return sorted({size for budget in self.by_budget for size in budget.batch_sizes})


def load_tables(path: str | Path) -> SweepTables:
    """Read a sweep folder without starting or changing anything.

    A published folder has plan.json, trials.csv and curves.csv, and no trial folders. Without
    curves.csv its curves are empty, and a warning says so. With several budgets the tables are
    those of the largest, and lead to the others.

    Raises:
        SweepError: if the folder holds no readable plan.json.
    """
    folder = SweepFolder(Path(path))
    refuse_links(folder.path)
    whole = parse_plan(folder.require_plan(), str(folder.plan_path))
    records: dict[str, dict[str, Any]] = {}
    curves: dict[str, pd.DataFrame] = {}
    warnings: list[str] = []
    lacks_curves = folder.is_published and not (folder.path / CURVES).exists()

    if not folder.is_published:
        for plan in whole.by_budget:
            for row in plan.known_trials:
                trial = folder.trial(str(row.id))
                curve = _read_curve(trial, warnings)
                record = _read_record(trial, row, plan, curve, warnings)
                if plan.has_unequal_amounts and row.stage == "final":
                    record["valid_slope"] = _slope_of(curve, plan.settings.evaluated)
                records[trial.id] = record
                curves[trial.id] = curve
    else:
        records = _read_published(folder.path / "trials.csv", whole)
        if lacks_curves:
            warnings.append(MISSING_CURVES)
        else:
            curves = _read_published_curves(folder.path / CURVES, whole)
            warnings += _missing_points([*records.values()], curves)

    timing = _read_timing(folder, whole, warnings)
    of_budgets = []
    for plan in whole.by_budget:
        ids = [str(row.id) for row in plan.known_trials]
        of_budget = SweepTables(
            path=folder.path,
            name=folder.name,
            plan=plan,
            trials=_trials_table([records[i] for i in ids], plan.settings.objective.name),
            curves=_curves_table({i: curves[i] for i in ids if i in curves}),
            warnings=tuple(warnings),
            checked=_read_check(folder, plan),
            lacks_curves=lacks_curves,
            timing=timing,
        )
        of_budgets.append(of_budget)
    *smaller, largest = of_budgets
    return replace(largest, smaller=tuple(smaller))


def _read_timing(folder: SweepFolder, plan: Plan, warnings: list[str]) -> Timing | None:
    """Return measured times; None without rounds. A damaged file is a warning."""
    try:
        timing = read_timing(folder, plan.sweep_uid)
    except CorruptFile as error:
        warnings.append(str(error))
        return None
    return timing if timing is not None and timing.rounds else None


def _missing_points(
    records: Sequence[dict[str, Any]], curves: dict[str, pd.DataFrame]
) -> list[str]:
    """Return a warning for each published final trial that has ended and has no points."""
    ended = (State.COMPLETE, State.PRUNED)
    return [
        f"trial {record['id']}: {CURVES} has no points of it."
        for record in records
        if record["stage"] == "final"
        and record.get("state") in ended
        and record["id"] not in curves
    ]


def _trials_table(records: Sequence[dict[str, Any]], objective: str) -> pd.DataFrame:
    """Build the table of trials from records by column; a column that is not declared is a metric.

    The metric that batch sizes are compared by has a column, even if no trial has it yet.

    Missing numbers are NaN, and missing texts are None.
    """
    names = {objective}.union(*records)
    metrics = sorted(names - TRIAL_COLUMNS.keys())
    columns = TRIAL_COLUMNS | dict.fromkeys(metrics, "float64")
    trials = pd.DataFrame(records, columns=list(columns))
    is_given = trials.notna()

    kinds = dict(columns)
    for name, kind in columns.items():
        if kind == "int64" and not is_given[name].all():
            kinds[name] = "float64"
    trials = trials.astype(kinds)

    texts = trials.select_dtypes(object).columns
    trials[texts] = trials[texts].where(is_given[texts], None)
    return trials


def _curves_table(curves: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the curves of all trials, each row with its trial's id."""
    empty = pd.DataFrame(columns=[*POSITION], dtype=float)
    points = pd.concat([empty, *curves.values()], ignore_index=True)
    metrics = sorted(map(str, set(points) - set(POSITION)))
    points = points[[*POSITION, *metrics]].astype({"step": int, "tokens": int})

    ids: list[str] = []
    for trial, rows in curves.items():
        ids += [trial] * len(rows)
    points.insert(0, "id", pd.Series(pd.Categorical(ids, list(curves))))
    return points


def _read_check(folder: SweepFolder, plan: Plan) -> dict[str, Any]:
    """Return check.json if it is of the plan's command and code, otherwise an empty document."""
    workload = plan.settings.workload
    if not workload.is_program:
        return {}
    checked = None
    with contextlib.suppress(SweepError):  # a damaged file counts as none
        checked = find_json(folder.check_path)
    if checked is None:
        return {}
    words = checked.get("command")
    is_current = words == workload.code[0] and checked.get("code") == plan.code
    return checked if is_current else {}


def other_metrics(trials: pd.DataFrame, objective: Objective) -> list[str]:
    """Return the columns of metrics that batch sizes are not compared by, the loss among them.

    A column that is not declared holds a metric, as in `_trials_table`.
    """
    names = [name for name in map(str, trials) if name == LOSS.name or name not in TRIAL_COLUMNS]
    return [name for name in names if name != objective.name and trials[name].notna().any()]


def refuse_large(path: Path) -> None:
    """Refuse a table with too many bytes, or with a first line that is too long."""
    with path.open("rb") as file:
        is_wide = len(file.readline(MAX_HEADER_BYTES)) == MAX_HEADER_BYTES
    if is_wide or path.stat().st_size > MAX_TABLE_BYTES:
        most = f"{MAX_TABLE_BYTES >> 20} MiB, and {MAX_HEADER_BYTES >> 10} KiB in its first line"
        raise SweepError(f"{path} must have at most {most}. Leave out rows or columns.")


def read_csv(path: Path) -> pd.DataFrame:
    """Read a table written by `sweep`; every cell is a text, or NaN if it is empty."""
    texts: dict[str, Any] = {"dtype": str, "keep_default_na": False, "na_values": [""]}
    try:
        refuse_large(path)
        table: pd.DataFrame = pd.read_csv(path, compression=None, **texts)
        return table
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None)
        if not reason:
            reason = reason_of(_of_whole_file(error, path))
    raise SweepError(f"{path} must be a CSV file, but {reason}. Correct it, or give another path.")


def _of_whole_file(error: Exception, path: Path) -> Exception:
    """Return an error of decoding that counts from the start of the file, as pandas' does not."""
    if isinstance(error, UnicodeDecodeError):
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError as whole:
            return whole
    return error


def to_numbers(values: pd.Series) -> pd.Series:
    """Convert a column to floats; NaN if a cell is no number, or infinite and no loss."""
    texts = values.astype(str)
    texts = texts.where(texts.str.len() <= MOST_DIGITS, "")  # to_numeric raises on long integers
    numbers = pd.to_numeric(texts, errors="coerce").astype(float)
    is_loss = values.name not in TRIAL_COLUMNS or str(values.name).endswith("_loss")
    return numbers if is_loss else numbers.where(np.isfinite(numbers))


def write_trials_csv(sweep: SweepTables, path: Path) -> None:
    """Write every trial of all budgets, with the declared columns and those of metrics."""
    whole = {name: "Int64" for name, kind in TRIAL_COLUMNS.items() if kind == "int64"}
    parts = [of_budget.trials.astype(whole) for of_budget in sweep.by_budget]
    table = pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0]
    texts = [name for name, kind in TRIAL_COLUMNS.items() if kind not in NUMBERS]
    table[texts] = table[texts].map(_without_formula)
    with replacing(path) as part:
        table.to_csv(part, index=False, lineterminator="\n")


def write_curves_csv(sweep: SweepTables, path: Path) -> None:
    """Write the points of the curves that a report of the published sweep reads."""
    objective = sweep.plan.settings.evaluated.curve
    reported = dict.fromkeys([*REPORTED_METRICS, objective])
    parts = []
    for of_budget in sweep.by_budget:
        curves = of_budget.curves
        metrics = [name for name in reported if name in curves]
        finals = of_budget.trials["id"][of_budget.trials["stage"] == "final"]
        is_read = curves["id"].isin(finals) & curves[metrics].notna().any(axis=1)
        parts.append(curves.loc[is_read, ["id", "step", "tokens", *metrics]])
    table = pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0]
    with replacing(path) as part:
        table.to_csv(part, index=False, lineterminator="\n")


def _without_formula(value: Any) -> Any:
    """Quote a text that a spreadsheet would execute."""
    if not isinstance(value, str):
        return value
    text = printable(value)  # a lone carriage return would begin a row
    return f"'{text}" if _is_formula(text) else text


def _is_formula(text: str) -> bool:
    return unicodedata.normalize("NFKC", text).lstrip().startswith(("=", "+", "-", "@"))


def _with_formula(value: Any) -> Any:
    """Return a text without the quote that `_without_formula` put before it."""
    if isinstance(value, str) and value.startswith("'") and _is_formula(value[1:]):
        return value[1:]
    return value


def _read_published(path: Path, plan: Plan) -> dict[str, dict[str, Any]]:
    """Read a trials.csv, by id; a cell that is no number in a column of numbers counts as empty."""
    table = read_csv(path)
    known = [name for name in map(str, table) if name in TRIAL_COLUMNS or is_metric(name)]
    for name in known:
        if TRIAL_COLUMNS.get(name, "float64") in NUMBERS:
            table[name] = to_numbers(table[name])

    cells = table.astype(object).where(table.notna(), None).map(_with_formula)
    rows = cells.to_dict("records")
    records = {}
    for row in rows:
        records[str(row.get("id"))] = {name: row[name] for name in known}
    planned = {str(row.id): row for row in plan.known_trials}
    if records.keys() != planned.keys() or len(rows) != len(planned):
        raise SweepError(f"{path} must have each trial of plan.json once. Restore it.")

    for trial, planned_row in planned.items():
        records[trial] |= _planned_values(planned_row, plan, exclude=MEASURED)
    return {trial: records[trial] for trial in planned}


def _planned_values(row: PlannedTrial, plan: Plan, exclude: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a planned trial by column."""
    names = TRIAL_COLUMNS.keys() - set(exclude)
    optimizer = row.optimizer if row.optimizer else plan.settings.optimizer.name
    budget = plan.token_budget if row.budget is None else row.budget
    of_plan = {"optimizer": optimizer, "planned_tokens": row.tokens, "budget": budget}
    return row.model_dump(include=names) | of_plan


def _read_published_curves(path: Path, plan: Plan) -> dict[str, pd.DataFrame]:
    """Read a curves.csv: the points of each trial, in the plan's order."""

    def refuse(requirement: str) -> NoReturn:
        raise SweepError(f"{path} must {requirement}. Restore it.")

    table = read_csv(path)
    for name in ("id", "step", "tokens"):
        if name not in table:
            refuse(f"have the column {name}")

    numbers = table.drop(columns="id")
    for name in map(str, numbers):
        converted = to_numbers(numbers[name])
        is_wrong = ~np.isfinite(converted) & (numbers[name].notna() | (name in POSITION))
        if is_wrong.any():
            line = int(is_wrong.to_numpy().argmax()) + 2  # the header is the first line
            refuse(f"have a number in each cell, or nothing, unlike {name!r} in line {line}")
        numbers[name] = converted

    is_late = numbers.groupby(table["id"])["tokens"].diff() < 0
    if is_late.any():
        refuse("have the points of each trial in the order of their tokens")

    by_trial = dict(iter(numbers.groupby(table["id"].astype(str))))
    planned = [str(row.id) for row in plan.known_trials]
    if not by_trial.keys() <= set(planned):
        refuse("have trials of plan.json only")
    return {trial: by_trial[trial] for trial in planned if trial in by_trial}


def _read_record(
    trial: TrialFolder, row: PlannedTrial, plan: Plan, curve: pd.DataFrame, warnings: list[str]
) -> dict[str, Any]:
    """Return the values of a planned trial by column, from its result or else what it left."""
    result = _find_result(trial, warnings)
    if result is not None:
        record = result.as_row()
        record["execution"] = canonical_json(result.execution)
    else:
        record = _unfinished_values(trial, row, plan) | _last_values(curve)

    of_plan = {
        "budget": plan.token_budget,
        "planned_tokens": row.tokens,
        "tokens_per_sequence": plan.tokens_per_sequence,
        "target": plan.settings.target,
        "time_budget_seconds": plan.settings.time_budget_seconds,
        "expected_initial_loss": plan.settings.expected_initial_loss,
        "loss_unit": plan.settings.evaluated.unit,
        "has_looks": plan.has_looks,
    }
    return record | of_plan | dict.fromkeys(plan.settings.workload.unused)


def _find_result(trial: TrialFolder, warnings: list[str]) -> Result | None:
    try:
        return trial.read_result()
    except CorruptFile:
        problem = "result.json is damaged or was changed; its numbers are left out"
        warnings.append(f"trial {trial.id}: {problem}.")
        return None


def _unfinished_values(trial: TrialFolder, row: PlannedTrial, plan: Plan) -> dict[str, Any]:
    """Return what the plan and state.json tell about a trial without a result, by column."""
    status = trial.read_status()
    values = _planned_values(row, plan, exclude=("tokens", "steps")) | {
        "parameters": plan.model.parameters,
        "state": str(status.state),
        "attempts": status.attempts,
    }
    if status.cause is not None:
        values["cause"] = str(status.cause)
        message = cut(status.message, MESSAGE_CHARACTERS)
        values["message"] = message if message else None
    if status.microbatch_size:  # it may have shrunk after out_of_memory
        values["microbatch_size"] = status.microbatch_size
        sequences = row.devices * status.microbatch_size
        values["gradient_accumulation_steps"] = row.batch_size // sequences
    return values


def _last_values(curve: pd.DataFrame) -> dict[str, float]:
    """Return the steps, tokens and seconds of the last line of a curve; empty without a line.

    An earlier version wrote no seconds.
    """
    if curve.empty:
        return {}
    last = curve.iloc[-1]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds_total": last.get(SECONDS, math.nan),
    }


def _read_curve(trial: TrialFolder, warnings: list[str]) -> pd.DataFrame:
    """Return the lines of metrics.jsonl; null and absent values are NaN."""
    try:
        return pd.DataFrame(trial.read_metrics(), dtype=float)
    except CorruptFile as damage:
        warnings.append(f"trial {trial.id}: its curve is left out, because {damage}")
        return pd.DataFrame()


def _slope_of(curve: pd.DataFrame, objective: Objective) -> float:
    """Return the steepest slope of a trial's curve; NaN without milestones."""
    if objective.curve not in curve:
        return math.nan
    points = curve.dropna(subset=objective.curve)
    values = objective.sign * points[objective.curve]
    return steepest_slope(points["tokens"].to_list(), values.to_list())


def curves_by_trial(sweep: SweepTables, metric: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield id, tokens and values of every trial that has finite points of a metric."""
    if metric in sweep.curves:
        points = sweep.curves[sweep.curves[metric].notna()]
        for trial, rows in points.groupby("id", observed=True):
            yield str(trial), rows["tokens"].to_numpy(), rows[metric].to_numpy()


def format_range(values: Iterable[Any], form: str = ",.0f") -> str:
    """Write the least and the greatest finite number, once if they read the same."""
    numbers = sorted(value for value in values if value is not None and math.isfinite(value))
    if not numbers:
        return "–"
    least = format(numbers[0], form)
    greatest = format(numbers[-1], form)
    return least if least == greatest else f"{least} to {greatest}"


def policy_names(trials: pd.DataFrame) -> list[str]:
    """Return the name of each trial's policy, with the rate if it is fixed: `fixed 3e-4`."""
    pairs = zip(trials["policy"], trials["learning_rate"], strict=True)
    return [label_policy(str(name), rate) for name, rate in pairs]


def policy_labels(trials: pd.DataFrame) -> list[str]:
    """Return the name of each trial's policy, after its optimizer if there are several.

    Such as `muon, tuned`; nothing may parse a label, because names are the user's.
    """
    names = policy_names(trials)
    if "optimizer" not in trials or trials["optimizer"].nunique() < 2:
        return names
    return [", ".join(map(str, pair)) for pair in zip(trials["optimizer"], names, strict=True)]


def final_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the final trials with their policy's label and their `End`, in the plan's order.

    Those that shared their device have no times.
    """
    labelled = without_shared_times(trials).assign(label=policy_labels)
    finals = labelled[labelled["stage"] == "final"]
    pairs = zip(finals["state"], finals["cause"], strict=True)
    return finals.assign(trial_end=[end_of(*parse_end(*pair)) for pair in pairs])


def read_execution(text: str | None) -> dict[str, Any] | None:
    """Read the column execution; None if it is not a JSON object."""
    try:
        settings = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def ran_alone(trials: pd.DataFrame) -> pd.Series:
    """Return which trials did not share their device, so that their times are their own.

    It is not known of a trial whose execution cannot be read; one without an execution, of an older
    sweep or of another program, did not share.
    """
    if "execution" not in trials:
        return pd.Series(True, trials.index)
    executions = [read_execution(text) for text in trials["execution"]]
    alone = [settings is not None and was_alone(settings) for settings in executions]
    return pd.Series(alone, trials.index, dtype=bool)


def without_shared_times(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials without the times of those that shared their device."""
    trials = trials.copy()
    trials.loc[~ran_alone(trials), TIME_COLUMNS] = math.nan
    return trials


def compare_batch_sizes(trials: pd.DataFrame, objective: Objective = LOSS) -> pd.DataFrame:
    """Return each cell's counts of trials by state, and the means of its complete trials.

    `spread`, `least` and `largest` are of the objective. `is_comparable`: every planned seed is
    complete, or was pruned on the way to a target.
    """
    finals = final_trials(trials)
    has_end = {str(end): finals["trial_end"] == end for end in End}
    finals = finals.assign(planned=1, **has_end)

    # A trial that ended early has fewer steps than the others.
    groups = finals.groupby(CELL_KEYS, sort=False)
    planned = groups[["policy", "steps"]].max()
    counts = groups[COUNTS].sum()

    # A mean of some of the trials would look like one of all: it is NaN if one value is missing.
    complete = finals[finals["complete"]].astype(dict.fromkeys(MEANS, float))
    groups_of_complete = complete.groupby(CELL_KEYS)
    metrics = [objective.name, *other_metrics(trials, objective)]
    columns = list(dict.fromkeys([*MEANS, *metrics]))
    means = groups_of_complete[columns].agg(pd.Series.mean, skipna=False)
    means["peak_memory_bytes"] = groups_of_complete["peak_memory_bytes"].max()
    values = groups_of_complete[objective.name].agg(spread="std", least="min", largest="max")

    cells = pd.concat([planned, counts, means, values], axis=1).reset_index()
    order, _ = pd.factorize(cells["label"])
    cells["order"] = order
    cells = cells.sort_values(["order", "batch_size"], ignore_index=True)
    of_training = cells.get(objective.train_column, math.nan)
    cells["train_valid_gap"] = cells[final_column(objective.metric)] - of_training
    # A final trial is pruned only on the way to a target: it is a bound, which is data too.
    is_whole = cells["complete"] + cells["pruned"] == cells["planned"]
    cells["is_comparable"] = is_whole & np.isfinite(cells[objective.name])
    return cells


def find_gains(sweep: SweepTables) -> list[dict[str, Any]]:
    """Compare each cell's mean rewards of the milestone prompts before and after training.

    `start` and `end` are by seed, with the same prompts and random numbers; `difference` is the
    Estimate of their paired difference, or None below two seeds.
    """
    last_reward = {}
    for trial, _, rewards in curves_by_trial(sweep, "valid/reward"):
        last_reward[trial] = float(rewards[-1])
    trials = final_trials(sweep.trials)
    trials["start"] = trials["initial_valid_reward"].astype(float)
    trials["end"] = trials["id"].map(last_reward).astype(float)
    has_same_prompts = sweep.plan.settings.evaluation.sequences == FINAL_PROMPTS
    if has_same_prompts and "final_valid_reward" in trials:
        # The final evaluation has the same prompts and random numbers, and the same weights.
        trials["end"] = trials["end"].fillna(trials["final_valid_reward"].astype(float))
    complete = trials[trials["trial_end"] == End.COMPLETE]

    gains = []
    for _, rows in complete.dropna(subset=["start", "end"]).groupby(CELL_KEYS, sort=False):
        by_seed = rows.astype({"seed": int}).set_index("seed")
        differences = (rows["end"] - rows["start"]).to_list()
        gain = {
            **rows.iloc[0][CELL_KEYS],
            "start": by_seed["start"].to_dict(),
            "end": by_seed["end"].to_dict(),
            "difference": mean_of(differences) if len(differences) > 1 else None,
        }
        gains.append(gain)
    return gains
