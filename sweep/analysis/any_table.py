"""Read tables of batch-size results: CSV, Markdown, our own trials.csv, and DataFrames.

`sweep audit` and `sweep answer` both read with this module. Headers, units and words are in
headers.toml. What is not understood, or could mean two things, is not read, and a note names it.
Every row has a result, or failed, or is left out with a reason.
"""

import csv
import io
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from sweep.analysis.frames import MOST_DIGITS, NUMBERS, TRIAL_COLUMNS, refuse_large
from sweep.config import read_toml
from sweep.config.numbers import SUFFIXES
from sweep.errors import SweepError, cut, printable
from sweep.trial.files import refuse_links
from sweep.trial.folder import Cause, State

_TOML = read_toml(__file__, "headers.toml")
PATTERNS: dict[str, str] = _TOML["patterns"]
UNITS = {column: text.format(**_TOML["words"]) for column, text in _TOML["units"].items()}
CELL_UNITS: dict[str, str] = _TOML["cells"]
SUCCEEDED = PATTERNS["succeeded"].format(done=PATTERNS["done"])
HEADERS: dict[str, list[str]] = {
    column: [pattern.format(**_TOML["words"]) for pattern in patterns]
    for column, patterns in _TOML["headers"].items()
}
# Columns of trials.csv whose names differ here.
OWN_NAMES = {
    "adam_beta2": "beta2",
    "token_budget": "tokens",
    "context_length": "tokens_per_sequence",
    "status": "state",
}
# A table with all of these was written by `sweep report`; its counts are exact.
OWN_COLUMNS = {"id", "stage", "policy", "batch_size", "state", "cause", "seconds_training"}
PARTS = ("microbatch_size", "gradient_accumulation_steps", "devices")  # of a batch size
LOSSES = ("final_valid_loss", "best_valid_loss", "final_train_loss")  # the first that has values
COUNTS = (
    *("batch_size", "microbatch_size", "gradient_accumulation_steps", "devices", "nodes"),
    *("steps", "context_length", "token_budget", "warmup_steps", "seeds"),
)
# Rows that differ in one of these are not compared.
FACTORS = ("model", "model_size", "dataset", "schedule", "policy", "optimizer")
FLAGS = ("failure", "success")  # columns whose cells are true or false
STATES = ("status", *FLAGS)  # all columns that match one of these are read
TEXTS = (*FLAGS, *FACTORS, "status", "seed", "stage", "hardware")
# Rows that agree in all of these are repetitions of one training.
SETTINGS = (
    *("stage", *FACTORS, "batch_size", "learning_rate", "context_length"),
    *("token_budget", "steps", "epochs", "weight_decay", "adam_beta2"),
)
UNIT_HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}  # by first letter
MOST_LISTED = 5  # cells or rows that a note lists
MOST_CELL_CHARACTERS = 60  # of a cell or header, in a note


class TextTable(NamedTuple):
    """The cells of one table, as text."""

    name: str
    header: list[str]
    rows: list[list[str]]
    numbers: list[int]  # of each row, in its file
    unit: str = "line"  # that the numbers count
    left_out: tuple[str, ...] = ()  # rows that are no rows of this table, with reasons


class Header(NamedTuple):
    """One header that was understood."""

    title: str
    unit: str  # in its parentheses; "" if there is none, or if it is a part of the words
    rank: int  # of the expression that it matches; -1 for the name of a column of trials.csv
    words: str = ""  # that match it


@dataclass(frozen=True, eq=False)
class Table:
    """The typed rows of one table, and what was not read."""

    name: str
    rows: pd.DataFrame  # that have a result or failed: a column for each header of headers.toml,
    # and each column of trials.csv that the table has; the index counts rows in the file
    titles: dict[str, str]  # header by column
    is_own: bool  # whether `sweep report` wrote it
    unread: tuple[str, ...]  # cells of columns that are read
    left_out: tuple[str, ...]  # rows, with reasons
    ignored: tuple[str, ...]  # headers
    ambiguous: tuple[str, ...]  # headers that could be the same column, with the reason
    remarks: tuple[str, ...] = ()
    metric: str = "final_valid_loss"
    unit: str = field(default="line")  # that the index counts

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
            notes.append(f"Batch sizes differ in {_list(names)} too.")
        if self.left_out:
            notes.append(f"Rows left out: {_list(self.left_out, '; ')}.")
        if self.ambiguous:
            notes.append(f"Columns not read: {_list(self.ambiguous, '; ')}.")
        if self.unread:
            notes.append(f"Cells not read ({len(self.unread)}): {_list(self.unread)}.")
        if self.ignored:
            names = [short_text(title) or "one without a name" for title in self.ignored]
            notes.append(f"Columns ignored: {', '.join(names)}.")
        return notes


def read_tables(path: Path) -> list[Table]:
    """Read every table with batch sizes in a file, or in the first file of a folder.

    Raises:
        SweepError: if there is none, or if the file is not CSV or Markdown.
    """
    path = _find_file(path)
    text_tables = list(_read_text_tables(path))
    tables = [read_table(cells) for cells in text_tables]
    if with_rows := [table for table in tables if len(table.rows)]:
        return with_rows
    problem = f"{path} must hold a table with rows and a column batch_size with whole numbers"
    with_sizes = [table for table in tables if {"batch_size", *PARTS} & {*table.titles}]
    reasons = [text for table in tables for text in table.ambiguous]
    reasons += [text for table in with_sizes for text in table.left_out]
    if reasons:
        raise SweepError(f"{problem}, and none is known: {_list(reasons, '; ')}. Correct them.")
    raise SweepError(f"{problem}, and has none. Name one of its columns batch_size.")


def read_one_table(source: pd.DataFrame | Path, metric: str) -> Table:
    """Read the only table of a file, or a DataFrame, with the column of a metric."""
    if isinstance(source, pd.DataFrame):
        return read_table(_cells_of(source), metric)
    tables = [read_table(cells, metric) for cells in _read_text_tables(_find_file(source))]
    tables = [table for table in tables if "batch_size" in table.titles] or tables
    if len(tables) != 1:
        names = ", ".join(table.name for table in tables) or "none"
        raise SweepError(f"{source} must hold one table, got {names}. Give each a file of its own.")
    return tables[0]


def short_text(text: str) -> str:
    """Return a header or a cell as a message shows it: in one line, and not too long."""
    return cut(printable(" ".join(text.split())), MOST_CELL_CHARACTERS)


# ---- files and cells --------------------------------------------------------------------------


def _find_file(path: Path) -> Path:
    if path.is_dir():
        refuse_links(path)
        files = [path / "trials.csv", *sorted(path.glob("*.csv")), *sorted(path.glob("*.md"))]
        path = next((file for file in files if file.is_file()), path)
    if not path.is_file():
        raise SweepError(
            f"{path} must be a .csv or .md file, or a folder that holds one. "
            "`sweep report DIR` writes the trials.csv of a sweep."
        )
    refuse_large(path)
    return path


def _read_text_tables(path: Path) -> Iterator[TextTable]:
    text = _decode(path)
    if path.suffix.lower() in (".md", ".markdown"):
        yield from _markdown_tables(text.splitlines())
    else:
        yield _csv_table(path, text)


def _decode(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SweepError(
            f"{path} must be readable ({error.strerror}). Give another path."
        ) from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:200]:
        remedy = "Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW."
        raise SweepError(
            f"{path} must be CSV or Markdown in UTF-8, and looks like UTF-16. {remedy}"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"must be CSV or Markdown in UTF-8, got another byte in line {line}"
        raise SweepError(f"{path} {problem}. Export it again as UTF-8.") from None


def _csv_table(path: Path, text: str) -> TextTable:
    first = text.lstrip("\r\n").partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    header_line = 0
    rows, numbers = list[list[str]](), list[int]()
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header, header_line = cells, reader.line_num
            elif len(cells) != len(header):
                expected = f"{len(header)} cells, as its header in line {header_line}"
                raise SweepError(
                    f"{path} must have in each row {expected}, got {len(cells)} in line "
                    f"{reader.line_num}. Correct that line, or the header."
                )
            else:
                rows.append(cells)
                numbers.append(reader.line_num)
    except csv.Error as error:
        problem = f"must be CSV, got an error in line {reader.line_num}: {error}"
        raise SweepError(f"{path} {problem}. Correct that line.") from None
    if not header:
        raise SweepError(f"{path} must be CSV with a header and rows, and is empty.")
    return TextTable("the table", [title.strip() for title in header], rows, numbers)


def _markdown_tables(lines: list[str]) -> Iterator[TextTable]:
    end = 0
    for k, line in enumerate(lines[1:], start=1):
        is_rule = {"|", "-"} <= set(line) <= set("|-: \t")
        if k < end or not is_rule or "|" not in lines[k - 1]:
            continue
        end = next((n for n in range(k, len(lines)) if "|" not in lines[n]), len(lines))
        header = _split_row(lines[k - 1])
        rows, numbers, left_out = list[list[str]](), list[int](), list[str]()
        for number in range(k + 1, end):
            cells = _split_row(lines[number])
            if len(cells) == len(header):
                rows.append(cells)
                numbers.append(number + 1)
            else:
                counts = f"{len(cells)} cells, the header {len(header)}"
                left_out.append(f"line {number + 1} (it has {counts})")
        yield TextTable(f"the table at line {k}", header, rows, numbers, left_out=tuple(left_out))


def _split_row(line: str) -> list[str]:
    text = line.strip().removeprefix("|").removesuffix("|")
    return [cell.replace(r"\|", "|").strip() for cell in re.split(r"(?<!\\)\|", text)]


def _cells_of(trials: pd.DataFrame) -> TextTable:
    """Return a DataFrame as text, from which every number is read back exactly."""
    is_given = trials.notna().to_numpy()
    rows = [
        [str(value) if given else "" for value, given in zip(values, flags, strict=True)]
        for values, flags in zip(
            trials.astype(object).itertuples(index=False, name=None), is_given, strict=True
        )
    ]
    return TextTable("the table", list(map(str, trials)), rows, list(range(len(rows))), "row")


# ---- headers ----------------------------------------------------------------------------------


def read_headers(cells: TextTable) -> tuple[dict[str, Header], dict[str, str]]:
    """Return the header of each column that is read, and why other headers are ambiguous."""
    matches: dict[str, list[tuple[int, Header]]] = {}
    for index, title in enumerate(cells.header):
        if match := _match(title):
            column, header = match
            matches.setdefault(column, []).append((index, header))
    chosen: dict[str, Header] = {}
    ambiguous: dict[str, str] = {}
    for column, candidates in matches.items():
        if column in STATES:  # the first one; `_words_of_states` reads all
            chosen[column] = candidates[0][1]
            continue
        best = min(header.rank for _, header in candidates)
        equal = [(index, header) for index, header in candidates if header.rank == best]
        texts = {tuple(row[index] for row in cells.rows) for index, _ in equal}
        if len(texts) == 1:
            chosen[column] = equal[0][1]
        else:
            reason = f"one of {len(equal)} that could be {column}"
            ambiguous |= {header.title: reason for _, header in equal}
    valid = chosen.get("final_valid_loss")
    if valid and valid.words == "loss" and "final_train_loss" in chosen:
        ambiguous[valid.title] = "a loss of training or validation"
        del chosen["final_valid_loss"]
    return chosen, ambiguous


def _match(title: str) -> tuple[str, Header] | None:
    """Return the column that a header names; None if it is none, or has a part that is unknown."""
    if title.startswith("_"):  # W&B's counters: _step counts log calls
        return None
    own = {name: column for column, name in OWN_NAMES.items()}
    if title in own:
        return own[title], Header(title, "", -1)
    if title in TRIAL_COLUMNS and title not in HEADERS:
        return title, Header(title, "", -1)
    words, inside = _words(re.sub(r"\.\d+$", "", title))  # pandas numbers equal headers
    for column, patterns in HEADERS.items():
        texts = [words] if not inside else []
        unit = ""
        if inside and re.fullmatch(UNITS.get(column, ""), inside, re.IGNORECASE):
            texts, unit = [words], inside
        elif inside:
            extra = _words(inside)[0]
            texts = [f"{extra} {words}", f"{words} {extra}"]
        for rank, pattern in enumerate(patterns):
            matched = [text for text in texts if re.fullmatch(pattern, text)]
            if matched:
                return column, Header(title, unit, rank, matched[0])
    return None


def _words(title: str) -> tuple[str, str]:
    """Return a header in plain lower-case words, and the text in its parentheses."""
    plain = title.replace("β", "beta").replace("η", "eta").replace("λ", "lambda")
    inside = " ".join(re.findall(r"[(\[{]([^)\]}]*)[)\]}]?", plain))
    outside = re.sub(r"[(\[{][^)\]}]*[)\]}]?", " ", plain)
    words = re.sub(r"[^a-z0-9]+", " ", outside.lower()).strip()
    return words, inside.strip(" *_`↓↑")


# ---- cells ------------------------------------------------------------------------------------


def read_number(column: str, header: Header, text: str) -> float:
    """Read `25,701`, `**3e-4**`, `~327.68M tokens` or `7.22 hrs`; NaN if it is anything else."""
    if header.rank < 0 and column not in HEADERS:
        return _plain_number(text)
    plain = _without_emphasis(text)
    is_loss = column in LOSSES or column not in HEADERS  # a metric may have any sign
    if header.title == column and is_loss:  # as written by a program, and as small as it may be
        number = _plain_number(plain)
        return number if math.isfinite(number) else math.nan
    if column == "batch_size" and (match := re.search(PATTERNS["total"], plain)):
        return float(match[1].replace(",", ""))
    if column == "hours" and re.fullmatch(PATTERNS["duration"], plain):
        parts = re.findall(rf"(\d+(?:\.\d+)?)\s*{PATTERNS['unit']}", plain)
        return sum(float(number) * UNIT_HOURS[unit[0]] for number, unit in parts)
    has_scale = re.match(r"[kKMGB](?![A-Za-z])", header.unit)
    if column in COUNTS and not has_scale and re.fullmatch(r"[1-9]\d{0,2}(\.\d{3})+", plain):
        return math.nan  # 640.000 may be 640,000
    if column == "clipped_step_fraction":
        return _share(header, plain)
    match = re.fullmatch(PATTERNS["number"], plain)
    if match is None or ("," in match[1] and column not in (*COUNTS, "hours")):
        return math.nan  # a loss of 1,389 could be 1.389
    digits, suffix, unit, remark = match.groups()
    if not _is_harmless(column, remark or "") or not _is_unit(column, unit):
        return math.nan
    if suffix and column == "batch_size" and not _is_in_tokens(header):
        return math.nan  # 1.3B may be parameters, 32k tokens
    scale: float = SUFFIXES.get(suffix or "", 1)
    if column == "hours":
        words = [unit, header.unit, *_words(header.title)[0].split()]
        words_of_unit = (word.lower() for word in words)
        units = [word for word in words_of_unit if re.fullmatch(PATTERNS["unit"], word)]
        scale = UNIT_HOURS[units[0][0]] if units else math.nan
    elif not suffix and has_scale:
        scale = SUFFIXES.get(header.unit[:1], 1)
    value = float(digits.replace(",", "")) * scale
    if column in COUNTS and not _is_in_tokens(header) and round(value, 6) % 1:
        return math.nan
    if value == 0:
        return value if column == "weight_decay" or is_loss else math.nan
    is_possible = value > 0 or is_loss
    return value if is_possible and 1e-18 <= abs(value) <= 1e18 else math.nan


def _without_emphasis(text: str) -> str:
    """Return a cell without Markdown's emphasis around its words, `~`, and `_` between digits."""
    plain = re.sub(r"(?<!\w)(\*\*|\*|__|_|`)(?=\S)(.+?)(?<=\S)\1(?!\w)", r"\2", text.strip())
    plain = re.sub(r"(?<=\d)_(?=\d{3}(?!\d))", "", plain)
    return re.sub(r"^[~≈]\s*(?!~)", "", plain).replace("−", "-").strip()


def _is_harmless(column: str, remark: str) -> bool:
    """Return True if a remark after a number is the error of a mean, or changes no number."""
    is_mean = column in LOSSES or column == "hours" or column not in HEADERS
    if is_mean and re.fullmatch(PATTERNS["spread"], remark):
        return True
    return not remark or re.fullmatch(PATTERNS["remark"], remark) is not None


def _is_unit(column: str, unit: str) -> bool:
    """Return True if the word after a number in a cell is a unit of the column."""
    if not unit:
        return True
    known = PATTERNS["unit"] if column == "hours" else CELL_UNITS.get(column, "(?!)")
    return re.fullmatch(known, unit, re.IGNORECASE) is not None


def _share(header: Header, plain: str) -> float:
    """Read a share, which `%` in the cell or the header divides by 100."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]-?\d+)?)\s*(%?)(?:\s*(?:±|\+/-).*)?", plain)
    if match is None:
        return math.nan
    is_percent = "%" in header.title or bool(match[2])
    return float(match[1]) / (100 if is_percent else 1)


def _plain_number(text: str) -> float:
    try:
        return float(text) if len(text) <= MOST_DIGITS else math.nan
    except ValueError:
        return math.nan


# ---- rows -------------------------------------------------------------------------------------


def read_table(cells: TextTable, metric: str = "final_valid_loss") -> Table:
    """Read the text cells of one table; `metric` is a column that must be read by its own name."""
    headers, ambiguous = read_headers(cells)
    if metric not in headers:
        headers |= _find_metric(cells, metric)
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
        ambiguous=tuple(f"{short_text(title)} ({reason})" for title, reason in ambiguous.items()),
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
        if _is_text(column):
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
    kinds = {column: "object" if _is_text(column) else "float64" for column in columns}
    return pd.DataFrame(columns).astype(kinds), unread


def _remarks(rows: pd.DataFrame, headers: Mapping[str, Header]) -> list[str]:
    remarks = []
    valid = headers.get("final_valid_loss")
    if valid and "test" in valid.words.split():
        remarks.append(f"The validation loss is that of the column {short_text(valid.title)}")
    if not any(name in headers for name in LOSSES):
        remarks.append("No column of losses is read")
    size = headers.get("batch_size")
    if size and _is_in_tokens(size) and rows["context_length"].isna().any():
        remarks.append("Batch sizes are in tokens, because the context length is missing")
    return remarks


def _find_metric(cells: TextTable, metric: str) -> dict[str, Header]:
    """Return the header of a metric, which is its name, apart from case and punctuation."""
    titles = [title for title in cells.header if title == metric]
    titles = titles or [title for title in cells.header if _words(title) == _words(metric)]
    return {metric: Header(titles[0], "", -1)} if len(titles) == 1 else {}


def _is_text(column: str) -> bool:
    if column in HEADERS:
        return column in TEXTS
    return TRIAL_COLUMNS.get(column, "float64") not in NUMBERS


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
        match = _match(title)
        if match is None or match[0] not in STATES:
            continue
        titles.append(title)
        for row, row_words in zip(cells.rows, words, strict=True):
            text = row[index].strip()
            if match[0] in FLAGS:
                text = _word_of_flag(match[0], title, text)
            if text:
                row_words.append(text)
    return words, titles


def _word_of_flag(column: str, title: str, text: str) -> str:
    """Return the word of success or failure that a cell of true or false means."""
    if re.fullmatch(PATTERNS["true"], text):
        return "finished" if column == "success" else f"failed ({title})"
    if re.fullmatch(PATTERNS["false"], text):
        return "" if column == "failure" or not text else f"not {title}"
    return text


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
        if all(state in (State.COMPLETE, State.FAILED) for state, _ in ended):  # a final loss
            spoilt = [texts[name][place] for name in losses]
            every += [text for text in spoilt if re.search(PATTERNS["failed"], text)]
        outcomes.append(_worst([read_state(word) for word in every]))
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


def _worst(outcomes: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the state and cause of a row: that of a success only if all of its words are."""
    bad = [outcome for outcome in outcomes if outcome[0] != State.COMPLETE]
    for cause in (Cause.DIVERGED, Cause.OUT_OF_MEMORY):
        if (str(State.FAILED), str(cause)) in bad:
            return str(State.FAILED), str(cause)
    return bad[0] if bad else (str(State.COMPLETE), "")


def read_state(text: str) -> tuple[str, str]:
    """Return state and cause for the words of a status; `unknown` for words that are not known."""
    if re.fullmatch(SUCCEEDED, text):
        return str(State.COMPLETE), ""
    if re.search(PATTERNS["diverged"], text):
        return str(State.FAILED), str(Cause.DIVERGED)
    if re.search(PATTERNS["out_of_memory"], text):
        return str(State.FAILED), str(Cause.OUT_OF_MEMORY)
    if re.search(PATTERNS["pruned"], text):
        return str(State.PRUNED), ""
    if text.upper() in (State.WAITING, State.RUNNING):
        return text.upper(), ""
    if re.search(PATTERNS["failed"], text):
        return str(State.FAILED), str(Cause.ERROR)
    return "unknown", ""


def _read_batch_sizes(
    rows: pd.DataFrame, headers: Mapping[str, Header], texts: Mapping[str, list[str]]
) -> tuple[list[float], list[str]]:
    """Return batch sizes, in sequences of a step, and why one is not known, or ""."""
    header = headers.get("batch_size")
    cells = texts.get("batch_size", [""] * len(rows))
    sizes = rows["batch_size"].to_list()
    contexts = rows["context_length"].to_list()
    if header and _is_in_tokens(header):
        triples = zip(cells, sizes, contexts, strict=True)
        sizes = [_sequences(cell, header.unit, size, length) for cell, size, length in triples]
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
        return f"{_list([*given.values()])} without {_list(lacking)}"
    if not cell and not is_whole:
        return "without a batch size"
    if math.isnan(size):
        return f"its batch size {short_text(cell)} is not read"
    if size < 1 or size % 1:
        return f"batch size {short_text(cell)} is no positive whole number"
    if given and "microbatch_size" not in given and not is_total and product != 1:
        listed = _list([f"{title} {factors[name]:g}" for name, title in given.items()])
        return f"batch size {size:g} may be that of a microbatch or of a step, next to {listed}"
    if is_whole and not math.isnan(product) and size != product:
        return f"batch size {size:g} is not {' × '.join(f'{n:g}' for n in factors.values())}"
    return ""


def _sequences(text: str, unit: str, tokens: float, context: float) -> float:
    """Return a batch size in tokens in sequences; NaN if it is not a whole number of them.

    A k is 1,000 or 1,024: whichever gives a whole number, or a power of two if both do. Without a
    context length the number stays one of tokens.
    """
    if math.isnan(context):
        return tokens
    match = re.search(r"\d\s*([kKMGB])(?![A-Za-z])", text)
    suffix = match[1] if match else unit[:1]
    power = {"K": 1, "M": 2, "G": 3, "B": 3}.get(suffix.upper(), 0)
    sizes = {round(tokens / context, 6), round(tokens * 1.024**power / context, 6)}
    whole = [size for size in sizes if size >= 1 and size % 1 == 0]
    powers = [size for size in whole if math.log2(size) % 1 == 0]
    chosen = whole if len(whole) == 1 else powers
    return chosen[0] if len(chosen) == 1 else math.nan


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


def _is_in_tokens(header: Header) -> bool:
    return re.search(r"\btok", header.title.lower().replace("_", " ")) is not None


def _list(texts: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(texts[:MOST_LISTED])
    more = len(texts) - MOST_LISTED
    return f"{shown}{separator}and {more} more" if more > 0 else shown
