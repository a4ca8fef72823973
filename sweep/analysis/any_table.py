"""Read tables of batch-size results: CSV, Markdown, our own trials.csv, and DataFrames.

`sweep audit` and `sweep answer` both read with this module. What is not understood, or could mean
two things, is not read, and a note names it. Every row has a result, or failed, or is left out with
a reason.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pandas as pd

from sweep.analysis.cells import (
    FACTORS,
    FLAGS,
    HEADERS,
    LOSSES,
    OWN_NAMES,
    PARTS,
    PATTERNS,
    SETTINGS,
    STATES,
    STEPS,
    Columns,
    Header,
    is_in_tokens,
    is_own_table,
    is_setting,
    is_text,
    match_header,
    may_be_decimal_comma,
    may_be_setting,
    plain_number,
    read_headers,
    read_number,
    read_state,
    says_several_devices,
    sequences_of,
    short_text,
    with_decimal_point,
    word_of_flag,
    word_of_loss,
    worst_outcome,
)
from sweep.analysis.tables import NUMBERS, TRIAL_COLUMNS
from sweep.analysis.text_tables import TextTable, cells_of, find_file, read_text_tables
from sweep.errors import SweepError, list_some
from sweep.trial.status import Cause, State

# Columns that a table cannot be answered by.
RESULTS = ("batch_size", "learning_rate", "seed", *LOSSES, STEPS, "hours")
WITHOUT_SIZE = "without a batch size"  # why a row is left out
OTHERS = "of one batch size each"  # the label of rows that a value names


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
    differing: tuple[str, ...]  # ignored headers in which rows differ, but for names and results
    # those of them whose cells are the same at one batch size, and differ between these
    confounded: tuple[str, ...]
    repeating: frozenset[str] = frozenset()  # those with at most half as many values as rows
    skipped: int = 0  # rows with neither a batch size nor a result
    remarks: tuple[str, ...] = ()
    metric: str = "final_valid_loss"
    unit: str = "line"  # the unit of the index
    has_sizes: bool = True  # whether a header names the batch size or that of a microbatch

    def trials(self) -> pd.DataFrame:
        """Return the rows with the columns of trials.csv and the metric; empty cells are None."""
        trials = self.rows.drop(columns="status").rename(columns=OWN_NAMES)
        if "device" not in trials:
            trials["device"] = trials["hardware"]
        if "seconds_training" not in trials:
            trials["seconds_training"] = 3600 * trials["hours"]
        columns = dict.fromkeys([*TRIAL_COLUMNS, self.metric])
        trials = trials.reindex(columns=list(columns))
        for name, kind in TRIAL_COLUMNS.items():
            if kind not in NUMBERS or name == "seed":
                texts = trials[name].astype(object)
                trials[name] = texts.where(texts.notna() & (texts != ""), None)
        return trials

    def parts(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield the rows that are compared with each other, and what tells them from other rows.

        Rows that differ in a factor, such as the model, are compared apart. A value of a single
        batch size may be the name of a row: all rows with such values are compared together.
        """
        labels = self._shared_values
        if labels.empty:
            yield "", self.rows
            return
        names = list(map(str, labels))
        for values, rows in self.rows.groupby([labels[name] for name in names], sort=False):
            pairs = zip(names, values, strict=True)
            texts = [short_text(f"{self.titles[name]} {value}") for name, value in pairs]
            yield ", ".join(texts), rows

    @property
    def _shared_values(self) -> pd.DataFrame:
        """The factors of which some value has several batch sizes; OTHERS in place of the rest."""
        labels = pd.DataFrame(index=self.rows.index)
        for name in FACTORS:
            values = self.rows[name]
            sizes = self.rows.groupby(name)["batch_size"].nunique()
            is_shared = values.map(sizes) > 1
            if values.nunique() > 1 and is_shared.any():
                labels[name] = values.where(is_shared, OTHERS)
        return labels

    @property
    def _confounders(self) -> list[str]:
        """The headers, apart from the batch size, in which rows differ that are compared."""
        parts = [rows for _, rows in self.parts()]
        titles = []
        for name in (*FACTORS, "context_length", "epochs"):
            if name not in self.titles:
                continue
            if any(rows[name].nunique(dropna=False) > 1 for rows in parts):
                titles.append(self.titles[name])
        return [*titles, *self.other_settings]

    @property
    def other_settings(self) -> list[str]:
        """The ignored headers of settings in which rows differ."""
        return [*filter(is_setting, self.differing)]

    @property
    def repeated(self) -> list[str]:
        """The differing headers whose values repeat, as those of settings do and results do not."""
        return [title for title in self.differing if title in self.repeating]

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
        if self.skipped:
            notes.append(f"Rows without a batch size and a result do not count: {self.skipped}.")
        notes += [f"{text}." for text in self.remarks]
        confounders = [] if self.is_own else self._confounders
        if confounders:
            notes.append(f"Rows that are compared differ in {list_some(confounders)} too.")
        if self.left_out:
            notes.append(f"Rows left out: {list_some(self.left_out, separator='; ')}.")
        if self.ambiguous:
            notes.append(f"Columns not read: {list_some(self.not_read, separator='; ')}.")
        if self.unread:
            notes.append(f"Cells not read ({len(self.unread)}): {list_some(self.unread)}.")
        if self.ignored:
            names = map(short_text, self.ignored)
            described = [name if name else "one without a name" for name in names]
            notes.append(f"Columns ignored: {', '.join(described)}.")
        return notes


def read_tables(path: Path) -> list[Table]:
    """Read every table with batch sizes in a file, or in the first file of a folder.

    Raises:
        SweepError: if no row can be read, or if the file is not CSV or Markdown.
    """
    path = find_file(path)
    text_tables = list(read_text_tables(path))
    tables = [read_table(cells) for cells in text_tables]
    with_sizes = [table for table in tables if table.has_sizes]
    if any(len(table.rows) for table in with_sizes):
        return with_sizes

    problem = f"{path} must hold a table with rows and a column batch_size with whole numbers"
    reasons: list[str] = []
    for table in tables:
        reasons += table.not_read
    for table in with_sizes:
        reasons += table.left_out
    if reasons:
        known = list_some(reasons, separator="; ")
        raise SweepError(f"{problem}, and none is known: {known}. Correct them.")
    raise SweepError(f"{problem}, and has none. Name one of its columns batch_size.")


def read_cells(source: pd.DataFrame | Path) -> TextTable:
    """Return the cells of a DataFrame, or of the only table of a file that has batch sizes."""
    if isinstance(source, pd.DataFrame):
        return cells_of(source)
    tables = [*read_text_tables(find_file(source))]
    with_sizes = [cells for cells in tables if _has_sizes(read_headers(cells))]
    if with_sizes:
        tables = with_sizes
    if len(tables) != 1:
        names = ", ".join(table.name for table in tables) if tables else "none"
        raise SweepError(f"{source} must hold one table, got {names}. Give each a file of its own.")
    return tables[0]


def split_cells(cells: TextTable, by: Sequence[str]) -> dict[str, TextTable]:
    """Return the parts of a table that have equal cells in some columns, by these cells.

    Args:
        cells: the table.
        by: the columns, by header or by another name that is read as it is.

    Raises:
        SweepError: if there is no such column of settings, or one of its cells is empty.
    """
    columns = read_headers(cells).chosen
    places = []
    for name in by:
        match = match_header(name)
        column = "" if match is None else match[0]
        title = columns[column].title if name not in cells.header and column in columns else name
        results = [columns[known].title for known in (*RESULTS, *STATES) if known in columns]
        if title not in cells.header or title in results:
            known = list_some([name for name in cells.header if name not in results])
            raise SweepError(f"--by must be a column of settings, got {name!r}; there are {known}.")
        places.append(cells.header.index(title))

    rows: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(cells.rows):
        values = [row[place].strip() for place in places]
        if "" in values:
            name = by[values.index("")]
            where = f"{cells.unit} {cells.numbers[index]}"
            raise SweepError(f"{name} must be given in each row, got an empty cell in {where}.")
        rows.setdefault(tuple(values), []).append(index)
    labels = [", ".join(values) for values in rows]
    if len({*labels}) < len(labels):  # cells with commas
        labels = [", ".join(map(repr, values)) for values in rows]
    parts = {}
    for label, indices in zip(labels, rows.values(), strict=True):
        parts[label] = cells._replace(
            rows=[cells.rows[index] for index in indices],
            numbers=[cells.numbers[index] for index in indices],
        )
    return parts


def read_table(cells: TextTable, metric: str = "final_valid_loss") -> Table:
    """Read the text cells of one table; `metric` is a column that must be read by its own name."""
    columns = read_headers(cells, metric)
    headers = columns.chosen
    _drop_batch_of_device(columns, cells)
    ambiguous = columns.ambiguous
    no_stage = _why_no_stage(cells, headers)
    if no_stage:
        ambiguous[headers.pop("stage").title] = no_stage
    if "tokens_to_target" not in headers:
        headers.pop("target", None)  # the objective of our own tables only

    texts = {}
    for column, header in headers.items():
        place = cells.header.index(header.title)
        texts[column] = [row[place].strip() for row in cells.rows]
    rows, unread = _type_cells(cells, headers, texts, metric)
    is_own = is_own_table(cells)

    measured = _measured_column(texts, metric)
    remarks = _remarks(headers, measured)
    if "hours" in headers and not is_own:
        remarks.append(f"Times are those of the column {short_text(headers['hours'].title)}")
    if cells.has_semicolons:
        remarks += _remark_on_commas(texts, measured)
    if measured and not _has_readable_loss(rows[measured], texts[measured]):
        title = short_text(headers[measured].title)
        remarks.append(f"No loss is compared, because no cell of {title} is read")
        rows[list(LOSSES)] = math.nan
        measured = None

    rows["stage"] = rows["stage"].replace("report", "final")  # as versions before 0.2 wrote
    _read_states(rows, _words_of_states(cells, columns), texts, measured)

    sizes, reasons = _read_batch_sizes(rows, cells, columns, texts, is_own)
    rows["batch_size"] = sizes
    if measured:
        _find_unread_losses(rows, reasons, texts[measured], measured)
    for place, stage in enumerate(rows["stage"]):
        if stage not in ("", "final", "tune") and not reasons[place]:
            reasons[place] = "its stage is neither final nor tune"
    if not is_own:  # there each row has an id
        _find_repetitions(rows, reasons, cells)

    is_skipped = [
        reason == WITHOUT_SIZE and bool(is_failed)
        for reason, is_failed in zip(reasons, rows["is_failed"], strict=True)
    ]
    ignored = _ignored_headers(cells, columns)
    known = [row for row, reason in zip(cells.rows, reasons, strict=True) if not reason]
    known_sizes = [size for size, reason in zip(sizes, reasons, strict=True) if not reason]
    differing = _find_differing(cells.header, known, ignored)
    left_out = [
        f"{cells.unit} {number} ({reason})"
        for number, reason, skipped in zip(cells.numbers, reasons, is_skipped, strict=True)
        if reason and not skipped
    ]
    rows.index = pd.Index(cells.numbers, dtype=int)
    is_known = pd.Series([not reason for reason in reasons], rows.index, dtype=bool)
    return Table(
        name=cells.name,
        rows=rows[is_known],
        titles={column: header.title for column, header in headers.items()},
        is_own=is_own,
        unread=tuple(unread),
        left_out=(*cells.left_out, *left_out),
        ignored=tuple(ignored),
        ambiguous=ambiguous,
        differing=tuple(differing),
        confounded=tuple(_find_confounded(cells.header, known, known_sizes, differing)),
        repeating=_find_repeating(cells.header, known, differing),
        skipped=sum(is_skipped),
        remarks=tuple(remarks),
        metric=metric,
        unit=cells.unit,
        has_sizes=_has_sizes(columns),
    )


def _has_sizes(columns: Columns) -> bool:
    known = {*columns.chosen, *columns.unclear}
    return not known.isdisjoint(("batch_size", "microbatch_size"))


def _ignored_headers(cells: TextTable, columns: Columns) -> list[str]:
    """Return the headers that were neither read nor refused; empty columns do not count."""
    known = {header.title for header in columns.chosen.values()} | {*columns.ambiguous}
    for places in columns.places.values():
        known |= {cells.header[place] for place in places}

    ignored = []
    for place, title in enumerate(cells.header):
        is_empty = not title and not any(row[place] for row in cells.rows)
        if title not in known and not is_empty:
            ignored.append(title)
    return ignored


def _drop_batch_of_device(columns: Columns, cells: TextTable) -> None:
    """Leave out `train_batch_size` next to `per_device_train_batch_size` and the devices.

    That of transformers is the batch size of a device times the devices, without accumulation.
    """
    size = columns.chosen.get("batch_size")
    is_by_parts = all(name in columns.chosen for name in PARTS)
    if size is not None and size.rank > 0 and size.words.startswith("train") and is_by_parts:
        del columns.chosen["batch_size"]
        columns.places["batch_size"] = [cells.header.index(size.title)]  # it is no other setting


def _find_repeating(
    header: Sequence[str], rows: Sequence[Sequence[str]], differing: Sequence[str]
) -> frozenset[str]:
    """Return the headers that have at most half as many values as there are rows."""
    counts = {title: len({row[header.index(title)].strip() for row in rows}) for title in differing}
    return frozenset(title for title, count in counts.items() if 2 * count <= len(rows))


def _find_differing(
    header: Sequence[str], rows: Sequence[Sequence[str]], ignored: Sequence[str]
) -> list[str]:
    """Return the ignored headers in which rows differ, but for names and results of the rows."""
    differing = []
    for title in ignored:
        cells = [row[header.index(title)].strip() for row in rows]
        values = {*cells} - {""}
        has_words = any(math.isnan(plain_number(value)) for value in values)
        is_name = has_words and len(values) == len(rows)
        if len({*cells}) > 1 and not is_name and (is_setting(title) or may_be_setting(title)):
            differing.append(title)
    return differing


def _find_confounded(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    sizes: Sequence[float],
    differing: Sequence[str],
) -> list[str]:
    """Return the headers whose cells are the same at one batch size, and differ between these.

    A text with the number of the batch size is its name.
    """
    confounded = []
    for title in differing:
        place = header.index(title)
        cells: dict[float, set[str]] = {}
        for row, size in zip(rows, sizes, strict=True):
            cells.setdefault(size, set()).add(row[place].strip())
        is_constant = all(len(of_size) == 1 for of_size in cells.values())
        is_name = all(
            re.search(rf"(?<!\d){size:g}(?!\d)", next(iter(of_size))) is not None
            for size, of_size in cells.items()
        )
        if is_constant and not is_name:
            confounded.append(title)
    return confounded


def _why_no_stage(cells: TextTable, headers: Mapping[str, Header]) -> str:
    """Return why a column stage is not read: it may count the stages of a training.

    The word `final` alone does not make it ours, because it may be the last stage of several.
    """
    if "stage" not in headers:
        return ""
    place = cells.header.index(headers["stage"].title)
    stages = {row[place].strip(): None for row in cells.rows}  # in their order
    others = [stage for stage in stages if stage not in ("", "final")]
    if not others or "tune" in stages or "report" in stages:
        return ""
    return f"its cells are neither final nor tune, such as {short_text(others[0])}"


def _type_cells(
    cells: TextTable, headers: Mapping[str, Header], texts: Mapping[str, list[str]], metric: str
) -> tuple[pd.DataFrame, list[str]]:
    """Return numbers and texts of every column, and the cells that are not read."""
    columns: dict[str, list[float] | list[str]] = {}
    unread: list[str] = []
    nothing = [""] * len(cells.rows)
    numeric = [cell for name, text in texts.items() if not is_text(name) for cell in text]
    has_decimals = any(map(may_be_decimal_comma, numeric))  # else 7,225 may be 7225
    has_decimal_commas = cells.has_semicolons or has_decimals
    for column in dict.fromkeys([*HEADERS, *headers]):
        text = texts.get(column, nothing)
        if is_text(column):
            columns[column] = text
            continue
        header = headers.get(column, Header(column))
        if column not in HEADERS:
            text = _without_percent(text)
        if cells.has_semicolons and has_decimals:
            text = [with_decimal_point(cell) for cell in text]
        numbers = [read_number(column, header, cell) for cell in text]
        if has_decimal_commas:  # 7,225 may be 7.225
            pairs = zip(numbers, text, strict=True)
            numbers = [math.nan if "," in cell else number for number, cell in pairs]
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


def _without_percent(texts: list[str]) -> list[str]:
    """Return the cells of a score without their percent signs, if all of those given have one."""
    given = [text for text in texts if not re.fullmatch(PATTERNS["missing"], text)]
    if not all(text.count("%") == 1 for text in given):
        return texts
    return [re.sub(r"\s*%", "", text) for text in texts]


def _has_readable_loss(losses: pd.Series, cells: Sequence[str]) -> bool:
    """Return True if a loss is read, or if all cells are empty or have words of failure."""
    if losses.notna().any():
        return True
    for cell in cells:
        if not re.fullmatch(PATTERNS["missing"], cell) and not re.search(PATTERNS["failed"], cell):
            return False
    return True


def _remarks(headers: Mapping[str, Header], measured: str | None) -> list[str]:
    remarks = []
    valid = headers.get("final_valid_loss")
    if valid and "test" in valid.words.split():
        remarks.append(f"The validation loss is that of the column {short_text(valid.title)}")
    if valid and "smooth" in valid.words:
        remarks.append(f"The loss is that of the column {short_text(valid.title)}")
    if not any(name in headers for name in LOSSES):
        remarks.append("No column of losses is read")
    elif measured == "final_train_loss":
        remarks.append("The training loss is compared, because no validation loss is read")
    size = headers.get("batch_size")
    if size and is_in_tokens(size) and "context_length" not in headers:
        remarks.append("Batch sizes are in tokens, because no context length is read")
    return remarks


def _remark_on_commas(texts: Mapping[str, Sequence[str]], measured: str | None) -> list[str]:
    """Return the remark that commas are read as decimal commas, with a cell, if any has one."""
    names = sorted((name for name in texts if not is_text(name)), key=lambda name: name != measured)
    for cell in chain.from_iterable(texts[name] for name in names):
        if may_be_decimal_comma(cell):
            number = with_decimal_point(cell)
            return [f"Commas separate decimals, as in files with semicolons: {cell} is {number}"]
    return []


def _measured_column(texts: Mapping[str, Sequence[str]], metric: str) -> str | None:
    """Return the column that must have a value in a row with a result; None without losses.

    It is the first column of losses that is not empty, whether or not its cells can be read.
    """
    if metric in texts and metric not in LOSSES:
        return metric
    for name in LOSSES:
        if not all(_is_empty(text) for text in texts.get(name, ())):
            return name
    return None


def _is_empty(text: str) -> bool:
    """Return True for an empty cell, `-` or `n/a`; NaN may be the loss of a training too."""
    is_missing = re.fullmatch(PATTERNS["missing"], text) is not None
    return is_missing and "nan" not in text.lower()


def _words_of_states(cells: TextTable, columns: Columns) -> list[list[str]]:
    """Return what each row says about how it ended."""
    words: list[list[str]] = [[] for _ in cells.rows]
    for column in STATES:
        for index in columns.places.get(column, ()):
            for row, row_words in zip(cells.rows, words, strict=True):
                text = row[index].strip()
                if text.lower() == "nan":  # pandas writes an empty cell so
                    text = ""
                if column in FLAGS:
                    text = word_of_flag(column, cells.header[index], text)
                if text:
                    row_words.append(text)
    return words


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
    names = [*LOSSES]
    if measured is not None and measured not in LOSSES:
        names.append(measured)
    losses = [name for name in names if name in texts]
    outcomes: list[tuple[str, str]] = []
    statuses: list[str] = []
    for place, row_words in enumerate(words):
        every = list(row_words)
        if "cause" in rows and rows["cause"][place]:
            every.append(str(rows["cause"][place]))
        ended = [read_state(word) for word in every]
        has_final_loss = all(state in (State.COMPLETE, State.FAILED) for state, _ in ended)
        if has_final_loss:
            spoilt = [word_of_loss(name, texts[name][place]) for name in losses]
            every += [word for word in spoilt if word]
        outcomes.append(worst_outcome([read_state(word) for word in every]))
        statuses.append(" ".join(dict.fromkeys(every)))

    rows["status"] = statuses
    rows["state"] = [state for state, _ in outcomes]
    rows["cause"] = [cause for _, cause in outcomes]
    rows["has_diverged"] = rows["cause"] == str(Cause.DIVERGED)
    rows["is_out_of_memory"] = rows["cause"] == str(Cause.OUT_OF_MEMORY)
    is_complete = rows["state"] == str(State.COMPLETE)
    rows["is_failed"] = ~is_complete
    if measured:
        rows["is_failed"] |= rows[measured].isna()
    for name in losses:  # a loss on the way is no result
        rows[name] = rows[name].where(is_complete)


def _read_batch_sizes(
    rows: pd.DataFrame,
    cells: TextTable,
    columns: Columns,
    texts: Mapping[str, list[str]],
    is_own: bool,
) -> tuple[list[float], list[str]]:
    """Return batch sizes, in sequences of a step, and why one is not known, or ""."""
    header = columns.chosen.get("batch_size")
    is_total = is_own or (header is not None and header.rank == 0)
    titles = {name: columns.chosen[name].title for name in PARTS if name in columns.chosen}
    for name in PARTS:
        if name in columns.unclear:
            titles[name] = " and ".join(columns.unclear[name])
    in_tokens = header is not None and is_in_tokens(header)
    has_contexts = "context_length" in columns.chosen or "context_length" in columns.unclear
    sizes: list[float] = []
    reasons: list[str] = []
    for place, row in enumerate(cells.rows):
        size = float(rows["batch_size"][place])
        cell = texts["batch_size"][place] if header else ""
        context = float(rows["context_length"][place])
        several = "" if is_own else _find_several(row, cells, columns)
        numbers = {name: float(rows[name][place]) for name in titles}
        if not cell and len(numbers) == len(PARTS):
            size = math.prod(numbers.values())
        elif header and in_tokens and has_contexts:
            size = sequences_of(cell, header.scale, size, context)

        if "batch_size" in columns.unclear:
            reason = f"{' and '.join(columns.unclear['batch_size'])} may be its batch size"
        elif cell and in_tokens and has_contexts and math.isnan(context):
            reason = f"its batch size {short_text(cell)} is in tokens, without a context length"
        else:
            reason = _why_unknown(size, cell, numbers, titles, several, is_total)
        sizes.append(math.nan if reason else size)
        reasons.append(reason)
    return sizes, reasons


def _find_several(row: Sequence[str], cells: TextTable, columns: Columns) -> str:
    """Return the cell that says that several devices or machines took part; "" if none does."""
    for index in columns.places.get("nodes", ()):
        if row[index].strip() not in ("1", "1.0"):
            return f"{short_text(cells.header[index])} {short_text(row[index])}".strip()
    for index in columns.places.get("hardware", ()):
        if says_several_devices(row[index]):
            return f"{short_text(cells.header[index])} {short_text(row[index])}"
    return ""


def _why_unknown(
    size: float,
    cell: str,
    numbers: Mapping[str, float],
    titles: Mapping[str, str],
    several: str,
    is_total: bool,
) -> str:
    """Return why the batch size of a step is not known; "" if it is.

    `numbers` and `titles` are those of PARTS that the table has, NaN for a number that is not
    known; `several` says that there are other parts. Unless the header says that a batch size is
    the whole one, it must agree with its parts, and there must be no doubt about any of them.
    """
    is_whole = len(numbers) == len(PARTS)
    unread = [titles[name] for name, number in numbers.items() if math.isnan(number)]
    factors = [number for number in numbers.values() if not math.isnan(number)]
    product = math.prod(factors)
    parts = list_some([f"{titles[name]} {number:g}" for name, number in numbers.items()])

    for name, number in numbers.items():
        if number < 1 or number % 1 > 0:
            return f"its {titles[name]} {number:g} is no positive whole number"
    if not cell and not numbers:
        return WITHOUT_SIZE
    if not cell and not is_whole:
        lacking = [name for name in PARTS if name not in numbers]
        return f"{list_some([*titles.values()])} without {list_some(lacking)}"
    if not cell and several:
        return f"the product of {parts} may be that of a part, next to {several}"
    if not cell and unread:
        return f"its {list_some(unread)} is not known"

    if math.isnan(size):
        return f"its batch size {short_text(cell)} is not read"
    if size < 1 or size % 1:
        return f"batch size {short_text(cell)} is no positive whole number"
    factor_text = " × ".join(f"{number:g}" for number in factors)
    if not several and size % product:
        return f"batch size {size:g} is no multiple of {factor_text}"
    if not several and is_whole and not unread and size != product:
        return f"batch size {size:g} is not {factor_text}"

    if is_total:
        return ""
    if several:
        return f"batch size {size:g} may be that of one device, next to {several}"
    if unread:
        return f"batch size {size:g} may be that of a part, and {list_some(unread)} is not known"
    if "microbatch_size" not in numbers and product != 1:
        return f"batch size {size:g} may be that of a microbatch or of a step, next to {parts}"
    return ""


def _find_unread_losses(
    rows: pd.DataFrame, reasons: list[str], cells: Sequence[str], measured: str
) -> None:
    """Leave out rows whose loss is not read: that is no failure of the training."""
    for place, cell in enumerate(cells):
        if reasons[place] or rows["state"][place] != State.COMPLETE:
            continue
        is_missing = re.fullmatch(PATTERNS["missing"], cell) is not None
        if math.isnan(rows[measured][place]) and not is_missing:
            reasons[place] = f"its loss {short_text(cell)} is not read"


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
