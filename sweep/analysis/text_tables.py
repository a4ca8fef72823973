"""The text cells of tables: CSV and TSV files, pipe tables of Markdown, and DataFrames."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sweep.analysis.tables import refuse_large
from sweep.errors import SweepError, reason_of
from sweep.trial.files import refuse_links

SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")
SPREADSHEET_STARTS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # zip files (xlsx) and old Excel files


class TextTable(NamedTuple):
    """The cells of one table, as text."""

    name: str
    header: list[str]
    rows: list[list[str]]
    numbers: list[int]  # place of each row in its file
    unit: str = "line"  # the unit of the numbers
    left_out: tuple[str, ...] = ()  # rows with another number of cells than the header
    has_semicolons: bool = False  # between its cells, as where a comma separates decimals


def find_file(path: Path) -> Path:
    if path.is_dir():
        refuse_links(path)
        files = [path / "trials.csv"]
        for pattern in ("*.csv", "*.tsv", "*.md"):
            files += sorted(path.glob(pattern))
        path = next((file for file in files if file.is_file()), path)
    if not path.exists():
        raise SweepError(f"{path} must exist. Name a .csv, .tsv or .md file, or a folder with one.")
    if not path.is_file():
        raise SweepError(
            f"{path} must be a .csv, .tsv or .md file, or a folder that holds one. "
            "`sweep report DIR` writes the trials.csv of a sweep."
        )
    refuse_large(path)
    return path


def read_text_tables(path: Path) -> Iterator[TextTable]:
    text = _decode(path)
    tables = [*_markdown_tables(text.splitlines())]
    if tables or path.suffix.lower() in (".md", ".markdown"):
        yield from tables
    else:
        yield _csv_table(path, text)


def _decode(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SweepError(
            f"{path} must be readable ({error.strerror}). Give another path."
        ) from None
    if path.suffix.lower() in SPREADSHEETS or data.startswith(SPREADSHEET_STARTS):
        problem = "must be CSV or Markdown in UTF-8, and is a spreadsheet"
        raise SweepError(f"{path} {problem}. Export its sheet as CSV.")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:200]:
        remedy = "Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW."
        raise SweepError(
            f"{path} must be CSV or Markdown in UTF-8, and looks like UTF-16. {remedy}"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"must be CSV or Markdown in UTF-8, but {reason_of(error)}"
        raise SweepError(f"{path} {problem}. Export it again as UTF-8.") from None


def _csv_table(path: Path, text: str) -> TextTable:
    first = text.lstrip("\r\n").partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    header_line = 0
    rows: list[list[str]] = []
    numbers: list[int] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = cells
                header_line = reader.line_num
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
    return TextTable(
        name="the table",
        header=[title.strip() for title in header],
        rows=rows,
        numbers=numbers,
        has_semicolons=delimiter == ";",
    )


def _markdown_tables(lines: list[str]) -> Iterator[TextTable]:
    end = 0
    for k, line in enumerate(lines[1:], start=1):
        is_rule = {"|", "-"} <= set(line) <= set("|-: \t")
        if k < end or not is_rule or "|" not in lines[k - 1]:
            continue

        end = k
        while end < len(lines) and "|" in lines[end]:
            end += 1
        header = _split_row(lines[k - 1])
        rows: list[list[str]] = []
        numbers: list[int] = []
        left_out: list[str] = []
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


def cells_of(trials: pd.DataFrame) -> TextTable:
    """Return a DataFrame as text, from which every number is read back exactly."""
    is_given = trials.notna().to_numpy()
    tuples = trials.astype(object).itertuples(index=False, name=None)
    rows = []
    for values, flags in zip(tuples, is_given, strict=True):
        pairs = zip(values, flags, strict=True)
        rows.append([str(value) if given else "" for value, given in pairs])
    return TextTable(
        name="the table",
        header=list(map(str, trials)),
        rows=rows,
        numbers=list(range(len(rows))),
        unit="row",
    )
