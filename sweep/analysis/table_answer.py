"""Answer from a table of trials, ours or that of another program."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sweep.analysis import tables
from sweep.analysis.answer import Answer
from sweep.analysis.answer_data import join
from sweep.analysis.any_table import Table, read_cells, read_table, split_cells
from sweep.analysis.budgets import BudgetAnswer, answer_document
from sweep.analysis.cells import (
    LOSSES,
    PARTS,
    STATES,
    STEPS,
    direction_of_header,
    short_text,
)
from sweep.analysis.judge import judge_trials, leading, objective_of
from sweep.analysis.results import load_sweep
from sweep.analysis.searches import (
    SearchSeed,
    is_search,
    seeds_of_search,
    split_seeds,
    with_best_as_final,
)
from sweep.analysis.sentences import describe, nothing_compared
from sweep.analysis.steps_answer import METRICS, StepsAnswer, answer_steps
from sweep.analysis.tables import read_execution
from sweep.analysis.text_tables import TextTable
from sweep.config.experiment import AnswerSettings
from sweep.config.numbers import MOST_BATCHES, format_count
from sweep.config.objective import LOSS, REWARD, TOKENS_TO_TARGET, Objective
from sweep.config.settings import parse_settings
from sweep.errors import SweepError, list_some

REQUIRED = ("batch_size", "seed", "learning_rate")
# Columns in which rows that are compared must agree.
PARTITIONS = (
    *("model", "model_size", "dataset", "schedule", "policy"),
    *("budget", "token_budget", "epochs", "target"),
)
OWN_DIFFER = ("token_budget", "epochs")  # in which rows of our own tables may differ
# Other settings, in which rows that are compared should agree.
OTHERS = ("weight_decay", "adam_beta2", "context_length")
EQUAL_LENGTH = 1.05  # ratio of epochs up to which trainings have the same length
EQUAL_WARMUP = 1.1  # ratio up to which warmups are the same share of equal tokens
STATISTIC = re.compile(r"(?i)\W*(mean|avg|average|median|std|sd|se|all|total|sum|min|max)\W*$")
LOSS_WORD = re.compile(r"(?<![a-z])loss(es)?(?![a-z])", re.IGNORECASE)
BEST = re.compile(r"(?<![a-z])best(?![a-z])", re.IGNORECASE)
OTHER_BUDGET = 1.5  # ratio of tokens above which one batch size was trained with several budgets
EQUAL_RATES = (
    "learning_rate must be equal in the seeds of a batch size, or some seed must have several "
    "rates at each batch size, or stage tune must mark a search"
)
# What a table without such a column is taken to say, with the words of the answer's scope.
DEFAULTS = {
    "stage": ("final", "all rows are final trials"),
    "policy": ("given", "their rates are as given"),
    "state": (None, "each row with a value is complete"),
}


def answer(
    trials: pd.DataFrame | str | Path,
    metric: str | None = None,
    direction: str | None = None,
    tolerance: float | None = None,
    pursues: str = "auto",
    price: float | None = None,
    question: str = "which",
) -> Answer | None:
    """Answer from a table of trials; None if fewer than two batch sizes have results.

    Args:
        trials: a table, or a CSV, TSV or Markdown file: batch_size, seed, learning_rate and the
            metric, by the headers of docs/audit.md; also stage, policy, state, seconds_training,
            and the other columns of trials.csv if they are known. With a column target, the final
            loss is replaced by the tokens to the target.
        metric: the column of the results, by default final_valid_loss or, without a loss, the only
            other metric that a header names.
        direction: minimize or maximize, by default that of the metric.
        tolerance: how far from the best is good enough, in the unit of the metric, by default 0.01;
            for the tokens to a target a share of them, by default 0.05.
        pursues: what counts: tokens, time or steps; auto: time with a target or a
            budget of time, else tokens.
        price: the price of a device for an hour, in any currency.
        question: `decided` is about one batch size to use (which), or about all of them (order).
    """
    source = trials if isinstance(trials, pd.DataFrame) else Path(trials)
    settings = parse_answer_settings(tolerance, pursues, price, question)
    table, better = _read_objective(_cells_of(source), metric, direction)
    if table.metric in METRICS:
        raise SweepError(
            f"the metric must be that of a loss or a score, got {table.metric}. `sweep answer` and "
            "fit_steps tell the critical batch size of such a table."
        )
    return _answer_table(table, better, settings)


def parse_answer_settings(
    tolerance: float | None, pursues: str, price: float | None, question: str | None
) -> AnswerSettings:
    """Return what is asked of a table, with the arguments of `answer`."""
    fields = {"tolerance": tolerance, "pursues": pursues, "price": price}
    if question is not None:
        fields["question"] = question
    return parse_settings(AnswerSettings, fields, "the answer")


def _answer_table(table: Table, direction: str, settings: AnswerSettings) -> Answer | None:
    tolerance = settings.tolerance
    trials = _trials_of(table)
    has_grids = is_search(trials)
    metric = table.metric
    units = trials["loss_unit"].dropna().to_list()
    unit = str(units[0]) if units and metric == LOSS.name else ""
    is_loss = table.titles[metric] in {table.titles.get(name) for name in LOSSES}
    if metric == LOSS.name and objective_of(trials).is_ratio:
        compared = TOKENS_TO_TARGET
    else:
        compared = Objective(metric, direction, unit, LOSS.tolerance)
        trials = trials.assign(target=math.nan)
    if tolerance is not None:
        compared = replace(compared, tolerance=tolerance)
    if compared.name != LOSS.name or unit == REWARD.unit:
        trials = trials.assign(valid_slope=math.nan)  # it may be that of another metric

    search_seed = None
    if has_grids:
        trials = with_best_as_final(trials, compared)
    elif seeds_of_search(trials):
        trials, search_seed = split_seeds(trials, compared)
        has_grids = not search_seed.has_finals
    columns = dict.fromkeys([*tables.TRIAL_COLUMNS, metric])
    rows = trials.reindex(columns=list(columns))
    result = leading(judge_trials(rows, compared, settings=settings, has_grids=has_grids))
    if result is None or result.answer is None:
        return None
    answered = result.answer

    assumed = _assumptions(table, has_grids, search_seed)
    if assumed:
        answered = replace(answered, scope=f"{answered.scope} {assumed}")
    size = f"The tolerance of {compared.tolerance:g}"
    if not is_loss:
        better = "Higher" if compared.direction == "maximize" else "Lower"
        name = short_text(metric)
        scope = f"{answered.scope} {better} {name} is better. {size} is in the unit of {name}."
        answered = replace(answered, scope=scope)
    reasons = _reasons_of(table, has_grids)
    unsuitable = ""
    if not is_loss and tolerance is None:
        unsuitable = f"{size} is in the unit of {short_text(metric)}, and not known to suit it."
    elif unit not in ("", "nats") and tolerance is None and not table.is_own:
        unsuitable = f"{size} is not known to suit the unit {unit}."
    if unsuitable:
        reasons.append(f"{unsuitable} Choose it with --tolerance.")
    if reasons:
        answered = replace(answered, provisional=True, reasons=[*answered.reasons, *reasons])
    return answered


def _reasons_of(table: Table, has_grids: bool) -> list[str]:
    """Return why an answer is provisional that is no matter of the trials alone."""
    reasons = []
    others = [*table.differing]
    if not has_grids:
        others = [*dict.fromkeys([*table.other_settings, *table.confounded, *table.repeated])]
    others += _other_columns(table)
    if others:
        names = join(map(short_text, others))
        text = f"Rows that are compared differ in {names} too"
        reasons.append(f"{text}, which is taken for noise." if has_grids else f"{text}.")
    reasons += _reasons_of_lengths(table)
    metric = table.titles[table.metric]
    if BEST.search(metric):
        reasons.append(
            f"{short_text(metric)} is the best of several evaluations, which favours noisy trials."
        )
    return reasons


def _reasons_of_lengths(table: Table) -> list[str]:
    """Return that trainings ended at different epochs or iterations, if they did."""
    if table.is_own or "progress" not in table.titles:
        return []
    lengths = table.rows.loc[~table.rows["is_failed"], "progress"]
    if not lengths.max() > EQUAL_LENGTH * lengths.min():
        return []
    return [
        f"{short_text(table.titles['progress'])} ranges from {lengths.min():g} to "
        f"{lengths.max():g}: trainings that ended early are compared with longer ones."
    ]


def _other_columns(table: Table) -> list[str]:
    """Return the headers of settings that are read, and in which rows of others' tables differ."""
    if table.is_own:
        return []
    names = [name for name in OTHERS if table.rows[name].nunique() > 1]
    warmup = table.rows["warmup_steps"] * table.rows["batch_size"]  # in sequences
    if warmup.max() > EQUAL_WARMUP * warmup.min():
        names.append("warmup_steps")
    return [table.titles[name] for name in names]


def _trials_of(table: Table, required: Sequence[str] = REQUIRED) -> pd.DataFrame:
    """Return the rows as trials; refuse a table of which a row or a cell would not count.

    A row that failed, or whose state is not known, counts as a missing result.

    Args:
        table: the table.
        required: its columns apart from the metric.
    """
    _refuse_unclear(table, required)
    trials = table.trials()
    for name in _defaults_of(table):
        value, _ = DEFAULTS[name]
        if value is not None:
            trials[name] = value
    if not _has_policies(table):
        trials["policy"] = trials["policy"].where(trials["policy"].isna(), DEFAULTS["policy"][0])
    if "seed" not in table.titles:
        trials["seed"] = "0"
    trials = trials.assign(label=tables.policy_labels)
    is_tuning = trials["stage"] == "tune"
    keys = ["stage", "label", "batch_size"]
    rate_counts = trials.groupby(keys)["learning_rate"].transform("nunique")
    needs_rates = "learning_rate" in required
    has_grids = needs_rates and is_search(trials)
    has_seeds = needs_rates and not has_grids and len(seeds_of_search(trials)) > 0
    rules = {
        "stage must be final or tune": trials["stage"].notna(),
        "policy must be a name": trials["policy"].notna(),
        "state must be given": ("status" not in table.titles) | (table.rows["status"] != ""),
        "seed must be given": is_tuning | trials["seed"].notna(),
        "seed must be that of one training": ~trials["seed"].astype(str).str.match(STATISTIC),
        "has_looks must be True, False or empty": trials["has_looks"].isin(["True", "False", None]),
        "learning_rate must be a positive number": (not needs_rates or trials["learning_rate"] > 0),
        "tokens_to_target must be positive or empty": ~(trials["tokens_to_target"] <= 0),
        "execution must be a JSON object or empty": trials["execution"].map(read_execution).notna(),
        EQUAL_RATES: has_grids | has_seeds | is_tuning | (rate_counts <= 1),
        "seed must differ between final trials of one policy and batch size": (
            has_grids | has_seeds | is_tuning | ~trials.duplicated([*keys, "seed"])
        ),
        "loss_unit must be the same in all rows": trials["loss_unit"].nunique() <= 1,
        "tokens_per_sequence must be the same in all rows": (
            trials["tokens_per_sequence"].nunique() <= 1
        ),
    }
    for rule, is_met in rules.items():
        is_broken = pd.Series(~np.asarray(is_met, dtype=bool), trials.index)
        if is_broken.any():
            name = rule.partition(" ")[0]
            cells = table.rows["status"] if name == "state" else trials[name]
            cell = cells[is_broken].iloc[0]
            got = "an empty cell" if cell in (None, "") else short_text(str(cell))
            where = f"{table.unit} {is_broken.idxmax()}"
            raise SweepError(f"{rule}, got {got} in {where}. {_remedy_of(trials, table)}")
    if trials["batch_size"].nunique() > MOST_BATCHES:
        raise SweepError(f"trials must have at most {MOST_BATCHES} batch sizes. Leave out some.")
    return trials.drop(columns="label").astype({"batch_size": "int64"}).reset_index(drop=True)


def _remedy_of(trials: pd.DataFrame, table: Table) -> str:
    """Return how to correct rows, or the column in which rows with equal settings differ."""
    keys = ["stage", "policy", "optimizer", "batch_size", "learning_rate", "seed"]
    for name in OTHERS:
        if name not in table.titles or name not in trials:
            continue
        if (trials.groupby(keys, dropna=False)[name].nunique() > 1).any():
            title = short_text(table.titles[name])
            return f"Rows differ in {title}: answer each by itself (--by {quote(title)})."
    return "Correct it."


def _has_policies(table: Table) -> bool:
    """Return True if a column policy names policies of learning rates, as it does next to a stage.

    In other tables it may name anything, such as the class of an agent.
    """
    return "stage" in table.titles


def _refuse_unclear(table: Table, required: Sequence[str]) -> None:
    """Refuse a table that mixes settings, lacks a column, or has rows or cells that do not count.

    Args:
        table: the table.
        required: its columns apart from the metric.
    """
    differing = [name for name in PARTITIONS if _differs(table, name)]
    if differing:
        titles = [short_text(table.titles[name]) for name in differing]
        values = short_text(", ".join(map(_write_cell, table.rows[differing[0]].unique())))
        problem = f"{join(titles)} must be the same in all rows, got {values}"
        flags = " ".join(f"--by {quote(title)}" for title in titles)
        raise SweepError(f"{problem}. Answer each by itself: {flags}, or a table of its own.")
    missing = [name for name in (*required, table.metric) if name not in table.titles]
    if "batch_size" in missing and not table.is_own and not {*PARTS}.isdisjoint(table.titles):
        missing.remove("batch_size")  # it is a product of parts, or rows say which part they lack
    if "seed" in missing and not _has_repetitions(table):
        missing.remove("seed")  # there is one training of each
    if missing:
        what = "column" if len(missing) == 1 else "columns"
        not_read = f" Not read: {'; '.join(table.not_read)}." if table.ambiguous else ""
        problem = f"trials must have the {what} {join(missing)}"
        remedy = f"Add the {what}, or correct the headers"
        if table.metric in missing:
            remedy += _other_metrics(table)
        raise SweepError(f"{problem}.{not_read} {remedy}.")
    if table.ambiguous:
        problem = f"each header must have one meaning, got {'; '.join(table.not_read)}"
        raise SweepError(f"{problem}. Rename or remove it.")
    if table.unread:
        raise SweepError(f"each cell must be empty or readable, got {table.unread[0]}. Correct it.")
    if table.left_out:
        remedy = _remedy_of_left_out(table)
        raise SweepError(f"each row must be a trial, got {table.left_out[0]}. {remedy}.")


def _remedy_of_left_out(table: Table) -> str:
    """Return what to do about rows that are no trials, without a full stop."""
    parts = [name for name in PARTS if name in table.titles]
    if parts and "batch_size" not in table.titles and len(parts) < len(PARTS):
        lacking = [name for name in PARTS if name not in table.titles]
        return f"Add the column {join(lacking)}"
    remedy = "Correct it"
    if parts and "batch_size" in table.titles:
        remedy += ", or name its header global_batch_size or per_device_batch_size"
    if table.ignored:
        remedy += ", or answer apart what an ignored column tells apart (--by)"
    return remedy


def _other_metrics(table: Table) -> str:
    """Return the end of a sentence that proposes other columns of a table as its metric."""
    columns = [table.titles[name] for name in (*LOSSES, "steps") if name in table.titles]
    columns += table.ignored
    if not columns:
        return ""
    return f"; or name the result by --metric, one of {list_some([*map(short_text, columns)])}"


def _differs(table: Table, name: str) -> bool:
    """Return True if rows differ in a column; in tokens, if the rows of a batch size do.

    Trainings to a target, or of a time, differ in tokens by themselves.
    """
    if name not in table.titles or (table.is_own and name in OWN_DIFFER):
        return False
    if name == "policy" and _has_policies(table):
        return False
    cells = table.rows[name]
    if name != "token_budget":
        return cells.nunique(dropna=False) > 1
    if {"target", "time_budget_seconds"} & {*table.titles}:
        return False
    of_size = cells.groupby(table.rows["batch_size"])
    return bool((of_size.max() > OTHER_BUDGET * of_size.min()).any())


def _has_repetitions(table: Table) -> bool:
    """Return True if a batch size has several rows in which nothing differs but the result."""
    keys = ("stage", "policy", "optimizer", "batch_size", "learning_rate")
    return bool(table.rows.duplicated([name for name in keys if name in table.rows]).any())


def _defaults_of(table: Table) -> list[str]:
    """Return the columns that the table lacks, and that have a default."""
    present = {*table.titles}
    if not present.isdisjoint(STATES):
        present.add("state")
    return [name for name in DEFAULTS if name not in present]


def _assumptions(table: Table, has_grids: bool, search_seed: SearchSeed | None) -> str:
    """Write what a table without some columns is taken to say; "" if it has all."""
    words = {name: DEFAULTS[name][1] for name in _defaults_of(table)}
    if search_seed is not None:
        words["stage"] = search_seed.describe()
    elif has_grids:
        words["stage"] = "the rows of a batch size are a search of its rate"
    if has_grids or search_seed is not None:
        words.pop("policy", None)
    assumed = [*words.values()]
    if "seed" not in table.titles:
        is_mean = "seeds" in table.titles
        assumed.append("each row counts as one seed" if is_mean else "each batch size has one seed")
    if not assumed:
        return ""
    return f"It is taken that {join(assumed)}."


def _write_cell(cell: object) -> str:
    if isinstance(cell, float):
        return "an empty cell" if math.isnan(cell) else format_count(cell)
    return str(cell)


class TableAnswer(NamedTuple):
    """The answer of a table of trials or of a sweep folder."""

    answer: Answer | None
    sentences: list[str]
    notes: list[str]  # what was read of a table
    budgets: tuple[BudgetAnswer, ...] = ()  # those of a sweep with several
    steps: StepsAnswer | None = None  # that of a table of steps to one loss

    def document(self) -> dict[str, Any] | None:
        """Return the document that `sweep answer --json` prints."""
        if self.steps is not None:
            return self.steps.as_json()
        return answer_document(self.answer, self.budgets)


Source = Path | Sequence[Mapping[str, Any]]  # a file or a folder, or rows by header


def answer_of(
    source: Source,
    metric: str | None,
    direction: str | None,
    tolerance: float | None,
    pursues: str = "auto",
    price: float | None = None,
    question: str | None = None,
) -> TableAnswer:
    """Return the answer of a table of trials, of rows by header, or of a sweep folder."""
    settings = parse_answer_settings(tolerance, pursues, price, question)
    if not (isinstance(source, Path) and source.is_dir()):
        table, better = _read_objective(_cells_of(source), metric, direction)
    else:
        sweep = load_sweep(source, None if pursues == "auto" else pursues, price, question)
        usual = metric in (None, LOSS.name) and direction in (None, LOSS.direction)
        if usual and tolerance is None:
            budgets = sweep.budgets if sweep.smaller else ()
            return TableAnswer(sweep.answer(), sweep.sentences(), [], budgets)
        table, better = _read_objective(_cells_of(sweep.trials), metric, direction)
        own = sweep.plan.settings.answer  # with the flags; its tolerance is of its own metric
        settings = own.model_copy(update={"tolerance": settings.tolerance})
    return _describe_table(table, better, settings)


def _cells_of(source: Source | pd.DataFrame) -> TextTable:
    if isinstance(source, Path | pd.DataFrame):
        return read_cells(source)
    return read_cells(pd.DataFrame([dict(row) for row in source]))


def _read_objective(
    cells: TextTable, metric: str | None, direction: str | None
) -> tuple[Table, str]:
    """Read a table with its metric, and return the better direction of that.

    By default it is the validation loss or, without a loss, the only other metric that a header
    names, such as the accuracy of validation, or the steps to one loss.

    Raises:
        SweepError: if several headers name one, or the direction is unknown.
    """
    table = read_table(cells, LOSS.name if metric is None else metric)
    if metric is None and not any(name in table.titles for name in LOSSES):
        named = {title: direction_of_header(title) for title in table.ignored}
        ranks = {title: found[0] for title, found in named.items() if found is not None}
        best = [title for title, rank in ranks.items() if rank == min(ranks.values())]
        if len(best) > 1:
            raise SweepError(f"a table must have one result, got {join(best)}. Choose by --metric.")
        if best:
            table = read_table(cells, best[0])
        elif STEPS in table.titles:
            table = read_table(cells, STEPS)
    if direction is None:
        direction = _direction_of(table)
    if direction not in ("minimize", "maximize"):
        raise SweepError(f"direction must be minimize or maximize, got {direction!r}.")
    return table, direction


def _direction_of(table: Table) -> str:
    """Return the better direction of a metric; refuse one whose name does not tell it."""
    title = table.titles.get(table.metric, table.metric)
    found = direction_of_header(title)
    if found is not None:
        return found[1]
    losses = {table.titles[name] for name in LOSSES if name in table.titles}
    is_loss = table.metric in (*LOSSES, *METRICS) or title in losses
    if title not in table.titles.values() or is_loss or LOSS_WORD.search(title):
        return LOSS.direction
    raise SweepError(
        f"the direction of {short_text(title)} must be known. Add --direction minimize or maximize."
    )


def answers_by(
    source: Source,
    by: Sequence[str],
    metric: str | None,
    direction: str | None,
    settings: AnswerSettings,
) -> dict[str, TableAnswer]:
    """Return the answer of each part of a table, by the cells that its rows have in common.

    Args:
        source: the table.
        by: columns such as model, whose values tell the parts apart.
        metric: as in `answer`.
        direction: as in `answer`.
        settings: what is asked.

    Raises:
        SweepError: if the table has no such column, or empty cells in it.
    """
    answers = {}
    for label, cells in split_cells(_cells_of(source), by).items():
        answers[label] = _describe_table(*_read_objective(cells, metric, direction), settings)
    return answers


def notes_of_parts(answers: Mapping[str, TableAnswer]) -> list[str]:
    """Return what was read of the parts of a table; what holds for all of them once."""
    notes: dict[str, list[str]] = {}
    for label, part in answers.items():
        for note in part.notes:
            notes.setdefault(note, []).append(label)
    lines = []
    for note, labels in notes.items():
        if len(answers) == 1:
            lines.append(note)
        elif len(labels) == len(answers):
            lines.append(f"Each part: {note}")
        else:
            lines += [f"{label}: {note}" for label in labels]
    return lines


def _describe_table(table: Table, direction: str, settings: AnswerSettings) -> TableAnswer:
    metric = table.metric
    if metric in METRICS:
        trials = _trials_of(table, ("batch_size",))
        if trials["optimizer"].nunique() > 1:
            raise SweepError("optimizer must be the same in all rows. Answer each: --by optimizer.")
        steps = answer_steps(table, trials, _reasons_of(table, has_grids=False))
        return TableAnswer(None, steps.describe(), table.notes, steps=steps)
    answered = _answer_table(table, direction, settings)
    if answered is not None:
        return TableAnswer(answered, describe(answered), table.notes)
    if table.trials()[metric].isna().all():
        lacking = f"{short_text(metric)} has no value in any row. --metric names another column"
        if "status" in table.titles and table.rows["is_failed"].all():
            states = join(map(short_text, dict.fromkeys(table.rows["status"])))
            lacking = f"no row is complete: {short_text(table.titles['status'])} has {states}"
        return TableAnswer(None, [nothing_compared(lacking)], table.notes)
    return TableAnswer(None, [nothing_compared()], table.notes)
