"""`sweep audit`: run the table of checks on any table of batch-size results.

It reads CSV, the pipe tables of a markdown page, or the trials.csv of a sweep folder. Documented
headers, their synonyms, units and thousands separators are understood; a cell in any other form
stays empty and is named in a note. See docs/audit.md.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sweep.analysis.checks import FAIL, check_rows
from sweep.analysis.frames import TRIAL_COLUMNS
from sweep.analysis.rules import LOSSES, prepare, rows_of_trials
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
OUR_HEADERS = {"id", "stage", "policy", "state", "cause", "seconds_training"}  # of trials.csv
COUNTS = {"batch_size", "steps", "context_length", "token_budget", "warmup_steps", "seeds"}
PER_ROW = {"batch_size", "steps", "hours", *LOSSES}  # never stated once for the whole page
UNIT = re.compile(r"d|days?|h|hrs?|hours?|m|mins?|minutes?|s|secs?|seconds?")
UNIT_HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}  # by first letter
SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
NUMBER = re.compile(  # digits, suffix, unit, spread
    r"([+-]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*"
    r"([kKMGB](?![A-Za-z]))?\s*([A-Za-z]*)\s*((±|\+/-|\().*)?"
)
OUT_OF_MEMORY = re.compile(r"(?<![a-z])oom(?![a-z])|out.?of.?memory")
ONLY_OUT_OF_MEMORY = re.compile(r"\W*(cuda.)?(oom|out.?of.?memory)\W*", re.IGNORECASE)
DIVERGED = re.compile(r"diverg|\bnan\b|\binf\b")
FAILED = re.compile(
    r"fail|error|crash|✗|✘|❌|waiting|running|pending|queued|prune|abort|kill|timed?.?out|lost|"
    r"unfinished|incomplete|not finished"
)
SUCCEEDED = re.compile(r"[\s*_`(]*(ok|done|complete|success|finished|passed|✓|✔|✅)")
LARGEST = 1e18  # of a number; its inverse is the smallest
LONGEST = 80  # characters of a header or a number
MOST_LISTED = 5  # cells in a note


@dataclass(frozen=True, eq=False)
class AuditTable:
    """One table with all documented columns; absent values are NaN, or empty text."""

    name: str
    rows: pd.DataFrame  # those that have a batch size
    notes: tuple[str, ...]  # what was ignored, not read, left out, or taken from the text


def audit(path: Path) -> dict[str, Any]:
    """Return the findings in every table of a file or folder, as `sweep audit --json` prints them.

    Raises:
        SweepError: if no table has batch sizes.
    """
    findings, notes, missing = [], [], list[dict[str, list[str]]]()
    tables = read_tables(path)
    for table in tables:
        where = f"{table.name}: " if len(tables) > 1 else ""
        notes += [where + note for note in table.notes]
        # A trials.csv may hold several learning-rate policies, which are checked apart.
        policies = table.rows.get("label", pd.Series("", table.rows.index))
        groups = list(table.rows.groupby(policies, sort=False))
        for label, rows in groups:
            policy = f"{label}: " if len(groups) > 1 else ""
            found, absent = audit_rows(rows)
            findings += [f | {"message": where + policy + f["message"]} for f in found]
            missing.append(absent)
    unchecked = [code for code in missing[0] if all(code in absent for absent in missing)]
    least = {code: min((absent[code] for absent in missing), key=len) for code in unchecked}
    listed = [{"code": code, "missing_columns": names} for code, names in least.items()]
    return {"findings": findings, "not_checked": listed, "notes": notes}


def audit_rows(rows: pd.DataFrame) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """Return the failed checks of one table and, by code, the columns that a check lacks."""
    checks = check_rows(prepare(rows)).values()
    findings = [
        dict(code=c.code, rows=list(c.batch_sizes), message=c.evidence, remedy=c.remedy)
        for c in checks
        if c.status == FAIL
    ]
    return findings, {c.code: list(c.missing_columns) for c in checks if c.missing_columns}


def read_tables(path: Path) -> list[AuditTable]:
    """Read every table that has batch sizes from a file, or from the first table of a folder."""
    if path.is_dir():
        files = [path / "trials.csv", *sorted(path.glob("*.csv")), *sorted(path.glob("*.md"))]
        path = next((file for file in files if file.is_file()), path)
    if not path.is_file():
        raise SweepError(
            f"{path} must be a .csv or .md file, or a folder that holds one. "
            "`sweep report DIR` writes the trials.csv of a sweep."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise ValueError
        is_markdown = path.suffix.lower() in (".md", ".markdown")
        tables = list(_markdown_tables(text) if is_markdown else _csv_tables(text))
    except (ValueError, pd.errors.ParserError):
        raise SweepError(f"{path} must be CSV or markdown in UTF-8. Export it again.") from None
    if not tables:
        raise SweepError(f"{path} must hold a table with a header and rows, and holds none.")
    if not any(len(table.rows) for table in tables):
        raise SweepError(
            f"{path} must have a column batch_size with whole numbers, and has none. "
            "Name its columns as docs/audit.md does."
        )
    return [table for table in tables if len(table.rows)]


def _csv_tables(text: str) -> Iterator[AuditTable]:
    header = text.lstrip().partition("\n")[0].strip()
    if set(header.split(",")) >= OUR_HEADERS:
        trials = pd.read_csv(io.StringIO(text), dtype={"seed": str})
        # An older table may lack columns.
        rows = rows_of_trials(trials.reindex(columns=list(TRIAL_COLUMNS)))
        note = "Trained to a target: tokens to it are compared, not losses."
        yield AuditTable("trials.csv", rows, (note,) * int(rows["has_target"].any()))
    elif header:
        delimiter = max(",;\t", key=header.count)
        options: Any = {"sep": delimiter, "header": None, "dtype": str, "keep_default_na": False}
        lines = pd.read_csv(io.StringIO(text), **options).to_numpy().tolist()
        if len(lines) > 1:
            yield build_table("the table", lines[0], lines[1:])


def _markdown_tables(text: str) -> Iterator[AuditTable]:
    lines = text.splitlines()
    for k, line in enumerate(lines[1:], start=1):
        if {"|", "-"} <= set(line) <= set("|-: \t") and "|" in lines[k - 1]:
            end = next((n for n in range(k, len(lines)) if "|" not in lines[n]), len(lines))
            if end > k + 1:
                body = [_pipe_cells(row) for row in lines[k + 1 : end]]
                name, header = f"the table at line {k}", _pipe_cells(lines[k - 1])
                yield build_table(name, header, body, _settings(text))


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
            number = _value(column, name, cell)
            if column in HEADERS.keys() - PER_ROW and not math.isnan(number):
                stated.setdefault(column, set()).add(number)
    return {column: numbers.pop() for column, numbers in stated.items() if len(numbers) == 1}


def build_table(
    name: str,
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    settings: dict[str, float] | None = None,
) -> AuditTable:
    """Read the cells of a table; `settings` hold for every row if there is no such column."""
    titles = _match(header)
    cells = [[*map(str.strip, row), *[""] * (len(header) - len(row))] for row in body]
    columns = {title: [row[k] for row in cells] for k, title in reversed([*enumerate(header)])}
    empty, unread = [""] * len(cells), list[str]()
    table = pd.DataFrame({column: columns.get(titles.get(column, ""), empty) for column in TEXTS})
    for column in HEADERS:
        title = titles.get(column, "")
        texts = columns.get(title, empty) if title else empty
        table[column] = [_value(column, title, text) for text in texts]
        pairs = zip(texts, table[column], strict=True)
        unread += [f"{t[:LONGEST]} ({title})" for t, v in pairs if v != v and re.search("[1-9]", t)]
    taken = {key: value for key, value in (settings or {}).items() if table[key].isna().all()}
    table = table.assign(**taken)
    _mark_failed(table, cells, columns, titles)
    has_batch = table["batch_size"] % 1 == 0
    ignored = [title for title in dict.fromkeys(header) if title not in titles.values()]
    parts = {
        "Columns ignored": ", ".join(title[:LONGEST] or "(no name)" for title in ignored),
        "Cells not read": ", ".join(unread[:MOST_LISTED]) + ", …" * (len(unread) > MOST_LISTED),
        "Taken from the text": ", ".join(f"{key} {value:g}" for key, value in taken.items()),
        "Rows left out, without a batch size": str((~has_batch).sum() or ""),
    }
    notes = tuple(f"{title}: {text}." for title, text in parts.items() if text)
    return AuditTable(name, table[has_batch].reset_index(drop=True), notes)


def _mark_failed(
    table: pd.DataFrame,
    cells: list[list[str]],
    columns: dict[str, list[str]],
    titles: dict[str, str],
) -> None:
    """Set the flags of failure from the status, a cell that is just OOM, or a loss of NaN."""
    is_full = [any(ONLY_OUT_OF_MEMORY.fullmatch(cell[:LONGEST]) for cell in row) for row in cells]
    table.loc[is_full, "status"] = "OUT_OF_MEMORY"
    losses = [column for column in LOSSES if column in titles]
    column = next((name for name in losses if table[name].notna().any()), (*losses, "")[0])
    texts = pd.Series(columns.get(titles.get(column, ""), [""] * len(cells)), dtype=str)
    status = table["status"].str[:LONGEST].str.lower()
    is_nan = texts.str[:LONGEST].str.lower().str.contains(DIVERGED) & ~status.str.contains(FAILED)
    table["status"] = table["status"].mask(is_nan & ~pd.Series(is_full), "loss NaN")
    status = table["status"].str[:LONGEST].str.lower()
    is_bad = ~status.str.match(SUCCEEDED)
    table["is_out_of_memory"] = status.str.contains(OUT_OF_MEMORY) & is_bad
    table["has_diverged"] = status.str.contains(DIVERGED)
    is_failed = status.str.contains(FAILED) & is_bad
    table["is_failed"] = is_failed | table["is_out_of_memory"] | table["has_diverged"]


def _split_title(title: str) -> tuple[str, str]:
    """Return a header in plain lower-case words, and the text in its parentheses."""
    plain = title[:LONGEST].replace("β", "beta").replace("η", "eta").replace("λ", "lambda")
    unit = re.search(r"[(\[](.*)[)\]]", plain)
    words = re.sub(r"[^a-z0-9]+", " ", re.sub(r"[(\[].*", "", plain).lower())
    return words.strip(), unit[1].strip() if unit else ""


def _match(header: Sequence[str]) -> dict[str, str]:
    """Return the header of each column; the longest if several fit."""
    titles: dict[str, str] = {}
    for title in header:
        words, unit = _split_title(title)
        if re.search(r"[0-9]", unit) or (words.startswith("batch") and "token" in unit):
            continue  # LR (×1e-4), Batch size (tokens)
        for column, pattern in (HEADERS | TEXTS).items():
            is_longer = len(words) > len(_split_title(titles.get(column, ""))[0])
            if is_longer and re.fullmatch(pattern, words):
                titles[column] = title
    return titles


def _value(column: str, title: str, text: str) -> float:
    """Read `25,701`, `**3e-4**`, `~327.68M tokens` or `7.22 hrs`; NaN if it is anything else."""
    plain = re.sub(r"[*`_~≈]", "", text).replace("−", "-").strip()
    match = NUMBER.fullmatch(plain) if len(plain) <= LONGEST else None
    digits, suffix, unit = match.group(1, 2, 3) if match else ("", None, "")
    try:
        value = float(digits.replace(",", ""))
    except ValueError:
        return math.nan
    words, in_title = _split_title(title)
    scale, is_count = SCALES.get(suffix or "", 1.0), column in COUNTS
    if column == "hours":
        units = (word.lower() for word in (unit, in_title, *words.split()))
        letter = next((unit[0] for unit in units if UNIT.fullmatch(unit)), "")
        scale, is_count = UNIT_HOURS.get(letter, math.nan), letter == "s"
    elif not suffix and column in ("steps", "token_budget") and in_title[1:2] in ("", " "):
        scale = SCALES.get(in_title[:1], 1.0)
    if digits.count(",") == 1 and not (is_count and scale in (1.0, UNIT_HOURS["s"])):
        return math.nan  # 1,389 could be 1.389
    value *= scale
    is_possible = value > 0 or column.endswith("loss") or (column == "weight_decay" and value == 0)
    is_sane = value == 0 or 1 / LARGEST <= abs(value) <= LARGEST
    return value if is_possible and is_sane else math.nan
