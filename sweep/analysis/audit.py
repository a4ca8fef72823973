"""`sweep audit`: evaluate the table of checks on CSV, markdown tables or a trials.csv.

Synonyms of headers, and units, are in headers.toml.
"""

import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.checks import FAIL, check_rows
from sweep.analysis.frames import NUMBERS, TRIAL_COLUMNS, refuse_large, to_numbers
from sweep.analysis.results import judge_trials
from sweep.analysis.rules import LOSSES, prepare
from sweep.config import read_toml
from sweep.config.numbers import SUFFIXES
from sweep.errors import SweepError
from sweep.trial.files import refuse_links

_TABLE = read_toml(__file__, "headers.toml")
PATTERNS: dict[str, str] = _TABLE["patterns"]
HEADERS = {column: text.format(**_TABLE["words"]) for column, text in _TABLE["headers"].items()}
COUNTS = ("batch_size", "steps", "context_length", "token_budget", "warmup_steps", "seeds")
OWN_COLUMNS = {"id", "stage", "policy", "batch_size", "state", "cause", "seconds_training"}
TEXTS = ("status", "seed", "stage", "optimizer")
UNIT_HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}  # by first letter


def audit(path: Path, rate: float | None = None) -> dict[str, Any]:
    """Return the findings in every table of a file or folder, as `sweep audit --json` has them.

    `rate` is the learning rate of tables that do not give one.
    """
    findings, notes, missing = [], list[str](), dict[str, list[str]]()
    checked, tables = set[str](), read_tables(path)
    for name, rows, own_notes in tables:
        prefix = f"{name}: " if len(tables) > 1 else ""
        notes += [prefix + note for note in own_notes]
        if rate is not None and rows["learning_rate"].isna().all():
            rows = rows.assign(learning_rate=rate)
        checks_by_policy = (
            {"": check_rows(prepare(rows))}
            if "policy" not in rows
            else {policy.label: policy.checks for policy in judge_trials(rows)}
        )
        for label, checks in checks_by_policy.items():
            start = f"{prefix}{label}: " if len(checks_by_policy) > 1 else prefix
            for check in checks:
                if check.missing_columns:
                    missing.setdefault(check.code, list(check.missing_columns))
                    continue
                checked.add(check.code)
                if check.status == FAIL:
                    finding = {"code": check.code, "rows": list(check.batch_sizes)}
                    finding |= {"message": start + check.evidence, "remedy": check.remedy}
                    findings.append(finding)
    absent = {code: names for code, names in missing.items() if code not in checked}
    not_checked = [{"code": code, "missing_columns": names} for code, names in absent.items()]
    return {"findings": findings, "not_checked": not_checked, "notes": notes}


def read_tables(path: Path) -> list[tuple[str, pd.DataFrame, list[str]]]:
    """Return name, rows and notes of every table with batch sizes in a file or a folder's first."""
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
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() in (".md", ".markdown"):
            tables = dict(_markdown_tables(text.splitlines()))
        else:
            options: Any = {"header": None, "dtype": str, "keep_default_na": False}
            header = text.lstrip().partition("\n")[0]
            lines = pd.read_csv(io.StringIO(text), sep=max(",;\t", key=header.count), **options)
            tables = {"the table": lines[1:].set_axis(lines.iloc[0].str.strip(), axis=1)}
    except (ValueError, pd.errors.ParserError):
        raise SweepError(f"{path} must be CSV or markdown in UTF-8. Export it again.") from None
    read = [(name, *read_table(table)) for name, table in tables.items()]
    if read := [table for table in read if len(table[1])]:
        return read
    raise SweepError(
        f"{path} must hold a table with rows and a column batch_size with whole numbers, and has "
        "none. Name one of its columns batch_size."
    )


def _markdown_tables(lines: list[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    rows = [line.strip().removeprefix("|").removesuffix("|").split("|") for line in lines]
    end = 0
    for k, line in enumerate(lines[1:], start=1):
        if k > end and {"|", "-"} <= set(line) <= set("|-: \t") and "|" in lines[k - 1]:
            end = next((n for n in range(k, len(lines)) if "|" not in lines[n]), len(lines))
            header = [title.strip() for title in rows[k - 1]]
            cells = [[*row, *[""] * len(header)][: len(header)] for row in rows[k + 1 : end]]
            yield f"the table at line {k}", pd.DataFrame(cells, columns=header, dtype=str)


def read_table(cells: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Read the text cells of a table with any documented headers; return rows and notes."""
    cells = cells.loc[:, ~cells.columns.duplicated()].fillna("")
    if {*cells} >= OWN_COLUMNS:  # a trials.csv; older ones lack columns
        trials = cells.reindex(columns=list(TRIAL_COLUMNS)).replace("", np.nan)
        numbers = [n for n, kind in TRIAL_COLUMNS.items() if kind in NUMBERS and n != "seed"]
        trials[numbers] = trials[numbers].apply(to_numbers)
        return trials[trials["batch_size"] >= 1], []
    cells = cells.apply(lambda texts: texts.str.strip())
    header, titles = [str(title) for title in cells], dict[str, str]()
    for title in sorted(header, key=len, reverse=True):  # the longest that matches is read
        words, unit = _split_title(title)
        if re.search(r"[0-9]", unit):
            continue  # LR (×1e-4)
        for column, pattern in HEADERS.items():
            if re.fullmatch(pattern, words):
                titles.setdefault(column, title)
    table, unread = pd.DataFrame(index=cells.index), list[str]()
    for column in HEADERS:
        title = titles.get(column, "")
        texts = cells.get(title, pd.Series("", cells.index))
        table[column] = texts
        if column not in TEXTS:
            table[column] = [_number(column, title, text) for text in texts]
            is_unread = table[column].isna() & texts.str.contains("[1-9]")
            unread += [f"{text} ({title})" for text in texts[is_unread]]
    if re.search(r"\btok", titles.get("batch_size", "").lower().replace("_", " ")):
        title = titles["batch_size"]
        table["batch_size"] = _sequences(cells[title], title, table)
    status, failed = table["status"], PATTERNS["failed"]
    for loss in (cells[titles[name]] for name in LOSSES if name in titles):
        status = status + " " + loss.where(loss.str.contains(failed), "")  # a loss of NaN or OOM
    table["status"] = status = status.str.strip()
    has_ended = status.str.match(PATTERNS["succeeded"])
    table["is_out_of_memory"] = status.str.contains(PATTERNS["out_of_memory"]) & ~has_ended
    table["has_diverged"] = status.str.contains(PATTERNS["diverged"])
    table["is_failed"] = (status.str.contains(failed) & ~has_ended) | table["has_diverged"]
    has_batch = table["batch_size"] % 1 == 0
    notes = {
        "Columns ignored": ", ".join(title for title in header if title not in titles.values()),
        f"Cells not read ({len(unread)})": ", ".join(unread[:5]),
        "Rows left out, without a batch size": sum(~has_batch),
    }
    listed = [f"{name}: {text}." for name, text in notes.items() if text]
    return table[has_batch].reset_index(drop=True), listed


def _sequences(texts: pd.Series, title: str, table: pd.DataFrame) -> pd.Series:
    """Return batch sizes in sequences from those in tokens; in tokens where the context is missing.

    A k is 1,000 or 1,024: that which gives more powers of two and then more whole numbers. The
    rest is rounded, because tokens are written with few digits.
    """
    in_cells = texts.str.extract(r"\d\s*([kKMGB])(?![A-Za-z])", expand=False)
    suffix = in_cells.fillna(_split_title(title)[1][:1]).str.upper()
    powers = suffix.map({"K": 1, "M": 2, "G": 3, "B": 3}).fillna(0)
    sequences = table["batch_size"] / table["context_length"].fillna(1)

    def plausibility(sizes: pd.Series) -> tuple[int, int]:
        return (np.log2(sizes.round(6)) % 1 == 0).sum(), (sizes.round(6) % 1 == 0).sum()

    return max(sequences, sequences * 1.024**powers, key=plausibility).round()


def _split_title(title: str) -> tuple[str, str]:
    """Return a header in plain lower-case words, and the text in its parentheses."""
    plain = title.replace("β", "beta").replace("η", "eta").replace("λ", "lambda")
    words, _, unit = plain.replace("[", "(").partition("(")
    return re.sub(r"[^a-z0-9]+", " ", words.lower()).strip(), unit.rstrip(")] ↓").strip()


def _number(column: str, title: str, text: str) -> float:
    """Read `25,701`, `**3e-4**`, `~327.68M tokens` or `7.22 hrs`; NaN if it is anything else."""
    plain = re.sub(r"[*`_~≈]", "", text).replace("−", "-").strip()
    if column == "hours" and re.fullmatch(PATTERNS["duration"], plain):
        parts = re.findall(rf"(\d+(?:\.\d+)?)\s*{PATTERNS['unit']}", plain)
        return sum(float(number) * UNIT_HOURS[unit[0]] for number, unit in parts)
    has_scale = re.match(r"[kKMGB](?![A-Za-z])", _split_title(title)[1])
    if column in COUNTS and not has_scale and re.fullmatch(r"[1-9]\d{0,2}(\.\d{3})+", plain):
        return math.nan  # 640.000 may be 640,000
    if column == "clipped_step_fraction":
        match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]-?\d+)?)\s*(%?)(?:\s*(?:±|\+/-).*)?", plain)
        is_percent = match is not None and ("%" in title or bool(match[2]))
        return float(match[1]) / (100 if is_percent else 1) if match else math.nan
    match = re.fullmatch(PATTERNS["number"], plain)
    if match is None or ("," in match[1] and column not in (*COUNTS, "hours")):
        return math.nan  # a loss of 1,389 could be 1.389
    (digits, suffix, unit), (words, in_title) = match.groups(), _split_title(title)
    scale: float = SUFFIXES.get(suffix or "", 1)
    if column == "hours":
        words_of_unit = (word.lower() for word in (unit, in_title, *words.split()))
        units = [word for word in words_of_unit if re.fullmatch(PATTERNS["unit"], word)]
        scale = UNIT_HOURS[units[0][0]] if units else math.nan
    elif (
        not suffix
        and column in ("steps", "token_budget", "batch_size")
        and in_title[1:2] in ("", " ")
    ):
        scale = SUFFIXES.get(in_title[:1], 1)
    value = float(digits.replace(",", "")) * scale
    if value == 0:
        return value if column == "weight_decay" or column.endswith("loss") else math.nan
    is_possible = value > 0 or column.endswith("loss")
    return value if is_possible and 1e-18 <= abs(value) <= 1e18 else math.nan
