"""Somebody else's sweep as a table: CSV, the pipe tables of a markdown page, or a sweep folder.

Headers and cells are read leniently; what cannot be read without guessing stays empty. Columns and
forms are listed in docs/audit.md.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sweep.analysis.audit_status import has_failed
from sweep.errors import SweepError

LOSS = r"(val|valid|validation|eval|evaluation|test) loss"
TIME = "time|wall|clock|duration|runtime|elapsed|hours?|hrs?|minutes?|mins?|seconds?|secs?"
HEADERS = {
    "batch_size": r"((global|effective|total|train|training) )?(batch( size)?|batchsize|bs)|b",
    "steps": r"((optimizer|training|train|total|gradient|num|n) )*(steps?|updates?|iterations?)",
    "hours": rf"(?=.*\b({TIME})\b)((total|training|train|in|h|s|d|{TIME})( |$))+",
    "final_train_loss": r"(final )?(train|training) loss",
    "final_valid_loss": rf"(final )?({LOSS}|loss)",
    "best_valid_loss": rf"(best|min|minimum|lowest) {LOSS}",
    "learning_rate": r"((peak|max|maximum) )?(learning rate|lr)|eta",
    "context_length": r"(max )?((context|sequence|seq)( length| len| size)?|seqlen|block size)|ctx",
    "token_budget": r"((total|training|train|num) )?(tokens|token budget)( seen| per experiment)?",
    "warmup_steps": r"(lr |learning rate )?warm ?up( steps)?",
    "seeds": r"((num|n|number of) )?seeds",
    "device_memory_gib": r"(device|gpu) memory gib|vram( gib)?",
    "weight_decay": r"weight decay|wd|lambda",
    "adam_beta2": r"(adamw? )?beta ?2",
}
TEXTS = {"status": r"status|state|outcome", "seed": r"(random )?seed", "stage": r"stage"}
COLUMNS = HEADERS | TEXTS
LOSSES = ("final_valid_loss", "best_valid_loss", "final_train_loss")  # the first that is there
COUNTS = (
    *("batch_size", "steps", "context_length", "token_budget", "warmup_steps", "seeds"),
)  # whole numbers
STATED_ONCE = (
    *("learning_rate", "context_length", "token_budget", "warmup_steps", "seeds"),
    *("device_memory_gib", "weight_decay", "adam_beta2"),
)
OURS = {"stage", "policy", "seconds_training", "best_valid_loss"}  # headers of our trials.csv
UNIT = re.compile(r"d|days?|h|hrs?|hours?|m|mins?|minutes?|s|secs?|seconds?")
UNIT_HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}  # by first letter
SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
NUMBER = re.compile(  # digits, suffix, unit; then no more digits, except behind ± or (
    r"([+-]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+(?![0-9,]))?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*"
    r"([kKMGB](?![A-Za-z]))?[\s,;]*([A-Za-z]*)[^0-9%×^*]*((±|\+/-|\+-|\().*)?"
)
ONE_COMMA = re.compile(r"[^,.]*,[0-9]{3}(?![,.]).*")  # 1,389: a thousand, or one and a bit
DECIMAL_COMMA = re.compile(r"(?<![0-9.,])([0-9]*),([0-9]+)(?![0-9]*[.,][0-9])")
NOT_POSITIVE = re.compile(r"[−-][0-9.]*|0*\.?0*")
NOT_FINITE = re.compile(r"\W*(nan|inf|infinity|diverged)\W*", re.IGNORECASE)
OUT_OF_MEMORY = re.compile(r"\W*((cuda )?oom|(cuda )?out.of.memory)\W*", re.IGNORECASE)
LARGEST = 1e18  # of a number; its inverse is the smallest
LONGEST = 80  # characters of a header or a number
MOST_SHOWN = 5  # cells that were not read

RawTable = tuple[str, list[str], list[list[str]]]  # name, header, rows


@dataclass(frozen=True, eq=False)
class AuditTable:
    """One table with all documented columns; what is not there is NaN, or empty text."""

    name: str
    rows: pd.DataFrame  # those that have a batch size
    notes: tuple[str, ...]  # what was ignored, not read, left out, or taken from the text


class Number(NamedTuple):
    """A cell that was read; NaN where it could not be."""

    value: float
    suffix: str = ""  # k, M, G
    unit: str = ""
    has_one_comma: bool = False  # which may be decimal


def read_tables(path: Path) -> list[AuditTable]:
    """Read every table that has batch sizes from a file, or from the first table of a folder.

    Raises:
        SweepError: if there is no file, no table, or no table with batch sizes.
    """
    path = _find_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_markdown = path.suffix.lower() in (".md", ".markdown")
        found = list(_markdown_tables(text) if is_markdown else _csv_table(text))
        if "\0" in text:
            raise ValueError
    except (ValueError, csv.Error):
        raise SweepError(f"{path} must be CSV or markdown in UTF-8, and is not.") from None
    if not found:
        raise SweepError(f"{path} must hold a table, a header and rows, and holds none.")
    settings = _settings(text) if is_markdown else {}
    has_decimal_comma = not is_markdown and _delimiter(text) == ";"
    tables = [_build_table(*table, settings, has_decimal_comma) for table in found]
    if not any(len(table.rows) for table in tables):
        raise SweepError(
            f"{path} must have a column batch_size with whole numbers, and has none. "
            "Name its columns as docs/audit.md does."
        )
    return [table for table in tables if len(table.rows)]


def _find_file(path: Path) -> Path:
    if path.is_dir():
        files = [path / "trials.csv", *sorted(path.glob("*.csv")), *sorted(path.glob("*.md"))]
        path = next((file for file in files if file.is_file()), path)
    if not path.is_file():
        raise SweepError(
            f"{path} must be a .csv or .md file, or a folder that holds one, and is not. "
            "`sweep report DIR` writes the trials.csv of a sweep."
        )
    return path


def _delimiter(text: str) -> str:
    return max(",;\t", key=text.lstrip().partition("\n")[0].count)


def _csv_table(text: str) -> Iterator[RawTable]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text))
    rows = [row for row in reader if any(map(str.strip, row))]
    if len(rows) > 1:
        yield "the table", rows[0], rows[1:]


def _markdown_tables(text: str) -> Iterator[RawTable]:
    lines = text.splitlines()
    for k, line in enumerate(lines[1:], start=1):
        if {"|", "-"} <= set(line) <= set("|-: \t") and "|" in lines[k - 1]:
            end = next((n for n in range(k, len(lines)) if "|" not in lines[n]), len(lines))
            if end > k + 1:
                body = [_pipe_cells(row) for row in lines[k + 1 : end]]
                yield f"the table at line {k}", _pipe_cells(lines[k - 1]), body


def _pipe_cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", inner)]


def _settings(text: str) -> dict[str, float]:
    """Return what a page states once for all rows: `- Weight Decay: 0.1`, `| LR | 3e-4 |`."""
    stated: dict[str, set[float]] = {}
    for line in text.splitlines():
        plain = re.sub(r"[*`]", "", line[: 4 * LONGEST]).strip()
        match = re.fullmatch(r"[-+]?\s*([^:|]+):([^|]+)|\|([^|]+)\|([^|]+)\|", plain)
        key, value = [part for part in match.groups() if part] if match else ("", "")
        names, values = key.split("/"), value.split("/")  # Adam β1/β2: 0.9/0.999
        for name, cell in zip(names, values, strict=False) if len(names) == len(values) else ():
            column = next(iter(_match([name])), "")
            if column in STATED_ONCE and not math.isnan(number := _value(column, name, cell)):
                stated.setdefault(column, set()).add(number)
    return {column: numbers.pop() for column, numbers in stated.items() if len(numbers) == 1}


def _build_table(
    name: str,
    header: list[str],
    body: list[list[str]],
    settings: dict[str, float],
    has_decimal_comma: bool = False,
) -> AuditTable:
    is_ours = set(header) >= OURS
    # Ours is of another set than final_valid_loss and never compared with it (docs/results.md).
    titles = _match([title for title in header if not (is_ours and title == "best_valid_loss")])
    cells = [[*row, *[""] * (len(header) - len(row))] for row in body]
    table, unread = pd.DataFrame(index=range(len(cells))), list[str]()
    for column in COLUMNS:
        title, is_text = titles.get(column), column in TEXTS
        table[column] = "" if is_text else math.nan
        if title is not None:
            texts = [row[header.index(title)].strip() for row in cells]
            table[column] = texts
            if not is_text:
                values = [_value(column, title, text, has_decimal_comma) for text in texts]
                table[column] = values
                pairs = zip(texts, values, strict=True)
                unread += [f"{text} ({title})" for text, value in pairs if _is_unread(text, value)]
    used = set(titles.values())
    if is_ours:
        tokens = table["token_budget"] / (table["steps"] * table["batch_size"])
        table["context_length"] = tokens.round().median()
    place = header.index("tokens_to_target") if "tokens_to_target" in header else None
    reached = [row[place] for row in cells] if is_ours and place is not None else []
    has_target = any(reached)
    if has_target:  # trials end where they reach it: nothing has equal budgets
        table[["steps", "token_budget", "warmup_steps"]] = math.nan
        table["final_valid_loss"] = pd.to_numeric(pd.Series(reached), errors="coerce")
    if is_ours and "cause" in header:  # of a state
        causes = [row[header.index("cause")] for row in cells]
        table["status"] = (table["status"] + " " + causes).str.strip()
        used.add("cause")
    _mark_failed(table, header, cells, titles)
    taken = {key: value for key, value in settings.items() if table[key].isna().all()}
    for key, value in taken.items():
        table[key] = value
    has_batch = table["batch_size"] % 1 == 0
    ignored = [title for title in dict.fromkeys(header) if title not in used]
    parts = {
        "Columns ignored": ", ".join(title[:LONGEST] or "(no name)" for title in ignored),
        "Cells not read": _first_few(unread),
        "Taken from the text": ", ".join(f"{key} {value:g}" for key, value in taken.items()),
        "Rows left out, without a batch size": str((~has_batch).sum() or ""),
        "Trained to a target": "tokens to it are compared, not losses" if has_target else "",
    }
    notes = tuple(f"{title}: {text}." for title, text in parts.items() if text)
    return AuditTable(name, table[has_batch].reset_index(drop=True), notes)


def _mark_failed(
    table: pd.DataFrame, header: list[str], cells: list[list[str]], titles: dict[str, str]
) -> None:
    """Put into the status what other cells say: OOM anywhere, NaN as the loss."""
    is_full = [any(OUT_OF_MEMORY.fullmatch(cell[:LONGEST]) for cell in row) for row in cells]
    table.loc[is_full, "status"] = "OUT_OF_MEMORY"
    losses = [column for column in LOSSES if column in titles]
    if losses:
        column = next((name for name in losses if table[name].notna().any()), losses[0])
        place = header.index(titles[column])
        texts = [row[place][:LONGEST] for row in cells]
        pairs = zip(texts, table["status"], strict=True)
        is_lost = [
            bool(NOT_FINITE.fullmatch(text)) and not has_failed(said) for text, said in pairs
        ]
        table.loc[is_lost, "status"] = "loss NaN"


def _is_unread(text: str, value: float) -> bool:
    """Tell whether a cell seems to hold a number, if not just an impossible one."""
    has_digits = re.search("[0-9]", text) is not None
    return math.isnan(value) and has_digits and not NOT_POSITIVE.fullmatch(text[:LONGEST])


def _first_few(cells: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(cell[:LONGEST] for cell in cells))
    more = len(distinct) - MOST_SHOWN
    return ", ".join(distinct[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _split_title(title: str) -> tuple[str, str]:
    """Return a header in plain lower-case words, and what stands in its parentheses."""
    plain = title[:LONGEST].replace("β", "beta").replace("η", "eta").replace("λ", "lambda")
    unit = re.search(r"[(\[](.*)[)\]]", plain)
    words = re.sub(r"[^a-z0-9]+", " ", re.sub(r"[(\[].*", "", plain).lower())
    return words.strip(), unit[1].strip() if unit else ""


def _match(header: Sequence[str]) -> dict[str, str]:
    """Return the header of each column that is there; the longest where several would do."""
    found: dict[str, str] = {}
    for title in header:
        words, unit = _split_title(title)
        if re.search(r"[0-9]", unit) or (words.startswith("batch") and "token" in unit):
            continue  # LR (×1e-4), Batch size (tokens)
        for column, pattern in COLUMNS.items():
            is_longer = len(words) > len(_split_title(found.get(column, ""))[0])
            if is_longer and re.fullmatch(pattern, words):
                found[column] = title
    return found


def _value(column: str, title: str, text: str, has_decimal_comma: bool = False) -> float:
    if has_decimal_comma:
        text = DECIMAL_COMMA.sub(r"\1.\2", text[: 2 * LONGEST])
    read = _number(text)
    value, is_count = read.value, column in COUNTS
    words, shown = _split_title(title)
    if column == "hours":
        units = (word.lower() for word in (read.unit, shown, *words.split()))
        unit = next((unit[0] for unit in units if UNIT.fullmatch(unit)), "")
        value *= UNIT_HOURS.get(unit, math.nan)
        is_count = unit == "s"
    scale = 1.0
    if column in ("steps", "token_budget") and not read.suffix and shown[1:2] in ("", " "):
        scale = SCALES.get(shown[:1], 1.0)
    is_count = is_count and scale == 1 and not read.suffix
    if read.has_one_comma and not is_count:
        return math.nan
    if has_decimal_comma and is_count and column in COUNTS and value % 1:
        return math.nan  # 25.701 steps: that was a thousands separator
    value *= scale
    is_possible = value > 0 or column.endswith("loss") or (column == "weight_decay" and value == 0)
    return value if is_possible else math.nan


def _number(text: str) -> Number:
    """Read `25,701`, `**3e-4**`, `~327.68M tokens`, `7.22 hrs`; else NaN."""
    plain = re.sub(r"[*`_~≈]", "", text).replace("−", "-").strip()
    match = NUMBER.fullmatch(plain) if len(plain) <= LONGEST else None
    digits, suffix, unit = match.group(1, 2, 3) if match else ("", "", "")
    try:
        value = float(digits.replace(",", "")) * SCALES.get(suffix or "", 1.0)
    except ValueError:
        return Number(math.nan)
    is_sane = value == 0 or 1 / LARGEST <= abs(value) <= LARGEST
    has_one_comma = ONE_COMMA.fullmatch(digits) is not None
    return Number(value if is_sane else math.nan, suffix or "", unit, has_one_comma)
