"""Read tables of batch-size results: CSV, Markdown, our own trials.csv, and DataFrames.

`sweep audit` and `sweep answer` both read with this module. What is not understood, or could mean
two things, is not read, and a note names it. Every row has a result, or failed, or is left out with
a reason.
"""

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sweep.analysis.cells import (
    FACTORS,
    FLAGS,
    HEADERS,
    LOSSES,
    OWN_COLUMNS,
    OWN_NAMES,
    PARTS,
    PATTERNS,
    SETTINGS,
    STATES,
    Header,
    find_metric,
    is_in_tokens,
    is_text,
    match_header,
    read_headers,
    read_number,
    read_state,
    sequences_of,
    short_text,
    word_of_flag,
    worst_outcome,
)
from sweep.analysis.frames import NUMBERS, TRIAL_COLUMNS
from sweep.analysis.text_tables import TextTable, cells_of, find_file, read_text_tables
from sweep.errors import SweepError, list_some
from sweep.trial.status import Cause, State


@dataclass(frozen=True, eq=False)
class Table:
    """The typed rows of one table, and what was not read."""

    name: str
    # Rows that have a result or failed, by their number in the file. Columns are the entries of
    # headers.toml, and those of trials.csv that the table has.
    rows: pd.DataFrame
    titles: dict[str, str]  # header by column
    is_own: bool  # whether `sweep report` wrote it
    unread: tuple[str, ...]  # cells of columns that are read
    left_out: tuple[str, ...]  # rows, with reasons
    ignored: tuple[str, ...]  # headers
    ambiguous: dict[str, str]  # why headers are not read, by header
    remarks: tuple[str, ...] = ()
    metric: str = "final_valid_loss"
    unit: str = "line"  # what the index counts

    def trials(self) -> pd.DataFrame:
        """Return the rows with the columns of trials.csv and the metric; empty cells are None."""
        trials = self.rows.drop(columns="status").rename(columns=OWN_NAMES)
        if "seconds_training" not in trials:
            trials["seconds_training"] = 3600 * trials["hours"]
        columns = dict.fromkeys([*TRIAL_COLUMNS, self.metric])
        trials = trials.reindex(columns=list(columns))
        for name, kind in TRIAL_COLUMNS.items():
            if kind not in NUMBERS or name == "seed":
                texts = trials[name].astype(object)
                trials[name] = texts.where(texts.notna() & (texts != ""), None)
        return trials

    @property
    def factors(self) -> list[str]:
        """The columns, such as the model, by whose values the rows are compared apart.

        If each value occurs at one batch size, the column is the name of a row.
        """
        varying = [name for name in FACTORS if self.rows[name].nunique() > 1]
        sizes = {name: self.rows.groupby(name)["batch_size"].nunique() for name in varying}
        return [name for name in varying if sizes[name].max() > 1]

    @property
    def not_read(self) -> list[str]:
        """The headers that are ambiguous, each with its reason."""
        return [f"{short_text(title)} ({reason})" for title, reason in self.ambiguous.items()]

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows that have a result, failed, and were left out."""
        failed = int(self.rows["is_failed"].sum())
        return {
            "with_result": len(self.rows) - failed,
            "failed": failed,
            "left_out": len(self.left_out),
        }

    @property
    def notes(self) -> list[str]:
        """Sentences about what was read and what was not."""
        counts = self.counts
        notes = [
            f"Rows: {counts['with_result']} with a result, {counts['failed']} failed, "
            f"{counts['left_out']} left out."
        ]
        notes += [f"{text}." for text in self.remarks]
        names = [name for name in FACTORS if self.rows[name].nunique() > 1]
        if names := [self.titles[name] for name in names if name not in self.factors]:
            notes.append(f"Batch sizes differ in {list_some(names)} too.")
        if self.left_out:
            notes.append(f"Rows left out: {list_some(self.left_out, separator='; ')}.")
        if self.ambiguous:
            notes.append(f"Columns not read: {list_some(self.not_read, separator='; ')}.")
        if self.unread:
            notes.append(f"Cells not read ({len(self.unread)}): {list_some(self.unread)}.")
        if self.ignored:
            names = [short_text(title) or "one without a name" for title in self.ignored]
            notes.append(f"Columns ignored: {', '.join(names)}.")
        return notes


def read_tables(path: Path) -> list[Table]:
    """Read every table with batch sizes in a file, or in the first file of a folder.

    Raises:
        SweepError: if there is none, or if the file is not CSV or Markdown.
    """
    path = find_file(path)
    text_tables = list(read_text_tables(path))
    tables = [read_table(cells) for cells in text_tables]
    if with_rows := [table for table in tables if len(table.rows)]:
        return with_rows
    problem = f"{path} must hold a table with rows and a column batch_size with whole numbers"
    with_sizes = [table for table in tables if {"batch_size", *PARTS} & {*table.titles}]
    reasons = [text for table in tables for text in table.not_read]
    reasons += [text for table in with_sizes for text in table.left_out]
    if reasons:
        known = list_some(reasons, separator="; ")
        raise SweepError(f"{problem}, and none is known: {known}. Correct them.")
    raise SweepError(f"{problem}, and has none. Name one of its columns batch_size.")


def read_one_table(source: pd.DataFrame | Path, metric: str) -> Table:
    """Read the only table of a file, or a DataFrame, with the column of a metric."""
    if isinstance(source, pd.DataFrame):
        return read_table(cells_of(source), metric)
    tables = [read_table(cells, metric) for cells in read_text_tables(find_file(source))]
    tables = [table for table in tables if "batch_size" in table.titles] or tables
    if len(tables) != 1:
        names = ", ".join(table.name for table in tables) or "none"
        raise SweepError(f"{source} must hold one table, got {names}. Give each a file of its own.")
    return tables[0]


def read_table(cells: TextTable, metric: str = "final_valid_loss") -> Table:
    """Read the text cells of one table; `metric` is a column that must be read by its own name."""
    headers, ambiguous = read_headers(cells)
    if metric not in headers:
        headers |= find_metric(cells, metric)
    if reason := _why_no_stage(cells, headers):
        ambiguous[headers.pop("stage").title] = reason
    texts = {
        column: [row[cells.header.index(header.title)].strip() for row in cells.rows]
        for column, header in headers.items()
    }
    rows, unread = _type_cells(cells, headers, texts, metric)
    is_own = {*cells.header} >= OWN_COLUMNS
    measured = _measured_column(rows, headers, metric)
    words, state_titles = _words_of_states(cells)
    _read_states(rows, words, texts, measured)
    sizes, reasons = _read_batch_sizes(rows, headers, texts)
    rows["batch_size"] = sizes
    if measured:
        _find_unread_losses(rows, reasons, texts[measured], measured)
    for place, stage in enumerate(rows["stage"]):
        if stage not in ("", "report", "tune"):
            reasons[place] = reasons[place] or "its stage is neither report nor tune"
    if not is_own:  # there each row has an id
        _find_repetitions(rows, reasons, cells)
    left_out = [
        f"{cells.unit} {number} ({reason})"
        for number, reason in zip(cells.numbers, reasons, strict=True)
        if reason
    ]
    rows.index = pd.Index(cells.numbers, dtype=int)
    known = {header.title for header in headers.values()} | {*ambiguous, *state_titles}
    ignored = [
        title
        for place, title in enumerate(cells.header)
        if title not in known and (title or any(row[place] for row in cells.rows))
    ]
    return Table(
        name=cells.name,
        rows=rows[pd.Series([not reason for reason in reasons], rows.index, dtype=bool)],
        titles={column: header.title for column, header in headers.items()},
        is_own=is_own,
        unread=tuple(unread),
        left_out=(*cells.left_out, *left_out),
        ignored=tuple(ignored),
        ambiguous=ambiguous,
        remarks=tuple(_remarks(rows, headers)),
        metric=metric,
        unit=cells.unit,
    )


def _why_no_stage(cells: TextTable, headers: Mapping[str, Header]) -> str:
    """Return why a column stage is not read: it may count the stages of a training."""
    if "stage" not in headers:
        return ""
    place = cells.header.index(headers["stage"].title)
    stages = [row[place].strip() for row in cells.rows]
    if not stages or {"report", "tune"} & {*stages}:
        return ""
    return f"its cells are neither report nor tune, such as {short_text(stages[0])}"


def _type_cells(
    cells: TextTable, headers: Mapping[str, Header], texts: Mapping[str, list[str]], metric: str
) -> tuple[pd.DataFrame, list[str]]:
    """Return numbers and texts of every column, and the cells that are not read."""
    columns: dict[str, list[float] | list[str]] = {}
    unread: list[str] = []
    nothing = [""] * len(cells.rows)
    for column in dict.fromkeys([*HEADERS, *headers]):
        text = texts.get(column, nothing)
        if is_text(column):
            columns[column] = text
            continue
        header = headers.get(column, Header(column, "", -1))
        numbers = [read_number(column, header, cell) for cell in text]
        columns[column] = numbers
        is_loss = column in LOSSES or column == metric
        for cell, number, place in zip(text, numbers, cells.numbers, strict=True):
            is_word = re.fullmatch(PATTERNS["missing"], cell) is not None
            if is_loss:  # a loss of NaN or OOM
                is_word |= re.search(PATTERNS["failed"], cell) is not None
            if math.isnan(number) and not is_word:
                unread.append(
                    f"{short_text(cell)} ({short_text(header.title)}, {cells.unit} {place})"
                )
    kinds = {column: "object" if is_text(column) else "float64" for column in columns}
    return pd.DataFrame(columns).astype(kinds), unread


def _remarks(rows: pd.DataFrame, headers: Mapping[str, Header]) -> list[str]:
    remarks = []
    valid = headers.get("final_valid_loss")
    if valid and "test" in valid.words.split():
        remarks.append(f"The validation loss is that of the column {short_text(valid.title)}")
    if not any(name in headers for name in LOSSES):
        remarks.append("No column of losses is read")
    size = headers.get("batch_size")
    if size and is_in_tokens(size) and rows["context_length"].isna().any():
        remarks.append("Batch sizes are in tokens, because the context length is missing")
    return remarks


def _measured_column(rows: pd.DataFrame, headers: Mapping[str, Header], metric: str) -> str | None:
    """Return the column that must have a value in a row with a result; None without losses."""
    if metric in headers and metric not in LOSSES:
        return metric
    return next((name for name in LOSSES if rows[name].notna().any()), None)


def _words_of_states(cells: TextTable) -> tuple[list[list[str]], list[str]]:
    """Return what each row says about how it ended, and the headers of these columns."""
    words: list[list[str]] = [[] for _ in cells.rows]
    titles: list[str] = []
    for index, title in enumerate(cells.header):
        match = match_header(title)
        if match is None or match[0] not in STATES:
            continue
        titles.append(title)
        for row, row_words in zip(cells.rows, words, strict=True):
            text = row[index].strip()
            if match[0] in FLAGS:
                text = word_of_flag(match[0], title, text)
            if text:
                row_words.append(text)
    return words, titles


def _read_states(
    rows: pd.DataFrame,
    words: Sequence[list[str]],
    texts: Mapping[str, list[str]],
    measured: str | None,
) -> None:
    """Add status, state, cause, is_failed, has_diverged and is_out_of_memory.

    A row has a result if all words about it are words of success, or if there are none. `status`
    has its words.
    """
    losses = [name for name in dict.fromkeys([*LOSSES, measured or LOSSES[0]]) if name in texts]
    outcomes: list[tuple[str, str]] = []
    statuses: list[str] = []
    for place, row_words in enumerate(words):
        every = list(row_words)
        if "cause" in rows and rows["cause"][place]:
            every.append(str(rows["cause"][place]))
        ended = [read_state(word) for word in every]
        has_final_loss = all(state in (State.COMPLETE, State.FAILED) for state, _ in ended)
        if has_final_loss:
            spoilt = [texts[name][place] for name in losses]
            every += [text for text in spoilt if re.search(PATTERNS["failed"], text)]
        outcomes.append(worst_outcome([read_state(word) for word in every]))
        statuses.append(" ".join(dict.fromkeys(every)))
    rows["status"] = statuses
    rows["state"] = [state for state, _ in outcomes]
    rows["cause"] = [cause for _, cause in outcomes]
    rows["has_diverged"] = rows["cause"] == str(Cause.DIVERGED)
    rows["is_out_of_memory"] = rows["cause"] == str(Cause.OUT_OF_MEMORY)
    is_complete = rows["state"] == str(State.COMPLETE)
    rows["is_failed"] = ~is_complete | (rows[measured].isna() if measured else False)
    for name in losses:  # a loss on the way is no result
        rows[name] = rows[name].where(is_complete)


def _read_batch_sizes(
    rows: pd.DataFrame, headers: Mapping[str, Header], texts: Mapping[str, list[str]]
) -> tuple[list[float], list[str]]:
    """Return batch sizes, in sequences of a step, and why one is not known, or ""."""
    header = headers.get("batch_size")
    cells = texts.get("batch_size", [""] * len(rows))
    sizes = rows["batch_size"].to_list()
    contexts = rows["context_length"].to_list()
    if header and is_in_tokens(header):
        triples = zip(cells, sizes, contexts, strict=True)
        sizes = [sequences_of(cell, header.unit, size, length) for cell, size, length in triples]
    is_total = header is not None and header.rank == 0
    given = {name: headers[name].title for name in PARTS if name in headers}
    parts = rows[list(given)].to_dict("records")
    several = [_why_several(row, headers) for row in rows[["nodes", "hardware"]].to_dict("records")]
    known, reasons = list[float](), list[str]()
    for cell, size, factors, other in zip(cells, sizes, parts, several, strict=True):
        if not cell and len(given) == len(PARTS):
            size = math.prod(factors.values())
        reason = _why_unknown(size, cell, factors, given, is_total)
        if other and not is_total and "microbatch_size" not in given:
            reason = reason or f"batch size {size:g} may be that of one device, next to {other}"
        known.append(math.nan if reason else size)
        reasons.append(reason)
    return known, reasons


def _why_several(row: Mapping[Hashable, Any], headers: Mapping[str, Header]) -> str:
    """Return the cell that says that several devices or machines took part; "" if none does."""
    if "nodes" in headers and row["nodes"] != 1:
        return f"{short_text(headers['nodes'].title)} {row['nodes']:g}"
    count = re.search(PATTERNS["several"], str(row["hardware"]))
    if count and int(count[1] or count[2]) > 1:
        return f"{short_text(headers['hardware'].title)} {short_text(str(row['hardware']))}"
    return ""


def _why_unknown(
    size: float,
    cell: str,
    factors: Mapping[Hashable, float],
    given: Mapping[str, str],
    is_total: bool,
) -> str:
    """Return why the batch size of a step is not known; "" if it is.

    `given` has the headers of PARTS, `factors` their numbers. A batch size next to a column of
    accumulation or devices, and none of microbatches, may be either: no product is guessed.
    """
    is_whole = len(given) == len(PARTS)
    product = math.prod(factors.values())
    if not cell and given and not is_whole:
        lacking = [name for name in PARTS if name not in given]
        return f"{list_some([*given.values()])} without {list_some(lacking)}"
    if not cell and not is_whole:
        return "without a batch size"
    if math.isnan(size):
        return f"its batch size {short_text(cell)} is not read"
    if size < 1 or size % 1:
        return f"batch size {short_text(cell)} is no positive whole number"
    if given and "microbatch_size" not in given and not is_total and product != 1:
        listed = list_some([f"{title} {factors[name]:g}" for name, title in given.items()])
        return f"batch size {size:g} may be that of a microbatch or of a step, next to {listed}"
    if is_whole and not math.isnan(product) and size != product:
        return f"batch size {size:g} is not {' × '.join(f'{n:g}' for n in factors.values())}"
    return ""


def _find_unread_losses(
    rows: pd.DataFrame, reasons: list[str], cells: Sequence[str], measured: str
) -> None:
    """Leave out rows whose loss is not read: that is no failure of the training."""
    for place, cell in enumerate(cells):
        is_missing = re.fullmatch(PATTERNS["missing"], cell)
        is_complete = rows["state"][place] == State.COMPLETE
        if is_complete and math.isnan(rows[measured][place]) and not is_missing:
            reasons[place] = reasons[place] or f"its loss {short_text(cell)} is not read"


def _find_repetitions(rows: pd.DataFrame, reasons: list[str], cells: TextTable) -> None:
    """Leave out rows that nothing tells apart: they may be seeds, other settings or a mistake."""
    is_known = pd.Series([not reason for reason in reasons], rows.index, dtype=bool)
    with_result = rows[is_known & ~rows["is_failed"]]
    is_copy = with_result.duplicated()
    for place in with_result.index[is_copy]:
        reasons[int(place)] = "it repeats another row"
    has_seed = bool((with_result["seed"] != "").any())
    what = "the settings and the seed" if has_seed else "the settings, without a column seed,"
    keys = [*SETTINGS, "seed"]
    for _, group in with_result[~is_copy].groupby(keys, dropna=False):
        places = [int(place) for place in group.index]
        for place in places:
            others = [other for other in places if other != place]
            if others:
                other = f"{cells.unit} {cells.numbers[others[0]]}"
                reasons[place] = f"it has {what} of {other}"
