"""The meaning of headers and cells of a table of results, by the expressions of headers.toml.

A header, a number or a word of state that is not understood as a whole is not read.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from sweep.analysis.frames import MOST_DIGITS, NUMBERS, TRIAL_COLUMNS
from sweep.analysis.text_tables import TextTable
from sweep.config.numbers import SUFFIXES
from sweep.errors import cut, printable
from sweep.resources import read_toml
from sweep.trial.status import Cause, State

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
# The batch size is the product of these.
PARTS = ("microbatch_size", "gradient_accumulation_steps", "devices")
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
UNIT_HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}  # keys: first letters of units
MOST_CELL_CHARACTERS = 60  # shown of a cell or a header


class Header(NamedTuple):
    """One header that was understood."""

    title: str
    unit: str  # text in parentheses; "" if there is none, or if it is a part of the words
    rank: int  # index of the expression that matches; -1: it is the name of a column of trials.csv
    words: str = ""  # plain words that match the expression


def short_text(text: str) -> str:
    """Return a header or a cell as a message shows it: in one line, and not too long."""
    return cut(printable(" ".join(text.split())), MOST_CELL_CHARACTERS)


def read_headers(cells: TextTable) -> tuple[dict[str, Header], dict[str, str]]:
    """Return the header of each column that is read, and why other headers are ambiguous."""
    matches: dict[str, list[tuple[int, Header]]] = {}
    for index, title in enumerate(cells.header):
        if match := match_header(title):
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


def match_header(title: str) -> tuple[str, Header] | None:
    """Return the column that a header names; None if it is none, or has a part that is unknown."""
    if title.startswith("_"):  # W&B's counters: _step counts log calls
        return None
    own = {name: column for column, name in OWN_NAMES.items()}
    if title in own:
        return own[title], Header(title, "", -1)
    if title in TRIAL_COLUMNS and title not in HEADERS:
        return title, Header(title, "", -1)
    words, inside = words_of_header(re.sub(r"\.\d+$", "", title))  # pandas numbers equal headers
    for column, patterns in HEADERS.items():
        texts = [words] if not inside else []
        unit = ""
        if inside and re.fullmatch(UNITS.get(column, ""), inside, re.IGNORECASE):
            texts, unit = [words], inside
        elif inside:
            extra = words_of_header(inside)[0]
            texts = [f"{extra} {words}", f"{words} {extra}"]
        for rank, pattern in enumerate(patterns):
            matched = [text for text in texts if re.fullmatch(pattern, text)]
            if matched:
                return column, Header(title, unit, rank, matched[0])
    return None


def words_of_header(title: str) -> tuple[str, str]:
    """Return a header in plain lower-case words, and the text in its parentheses."""
    plain = title.replace("β", "beta").replace("η", "eta").replace("λ", "lambda")
    inside = " ".join(re.findall(r"[(\[{]([^)\]}]*)[)\]}]?", plain))
    outside = re.sub(r"[(\[{][^)\]}]*[)\]}]?", " ", plain)
    words = re.sub(r"[^a-z0-9]+", " ", outside.lower()).strip()
    return words, inside.strip(" *_`↓↑")


def find_metric(cells: TextTable, metric: str) -> dict[str, Header]:
    """Return the header of a metric, which is its name, apart from case and punctuation."""
    titles = [title for title in cells.header if title == metric]
    if not titles:
        words = words_of_header(metric)
        titles = [title for title in cells.header if words_of_header(title) == words]
    return {metric: Header(titles[0], "", -1)} if len(titles) == 1 else {}


def is_text(column: str) -> bool:
    if column in HEADERS:
        return column in TEXTS
    return TRIAL_COLUMNS.get(column, "float64") not in NUMBERS


def is_in_tokens(header: Header) -> bool:
    return re.search(r"\btok", header.title.lower().replace("_", " ")) is not None


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
    if suffix and column == "batch_size" and not is_in_tokens(header):
        return math.nan  # 1.3B may be parameters, 32k tokens
    scale: float = SUFFIXES.get(suffix or "", 1)
    if column == "hours":
        words = [unit, header.unit, *words_of_header(header.title)[0].split()]
        words_of_unit = (word.lower() for word in words)
        units = [word for word in words_of_unit if re.fullmatch(PATTERNS["unit"], word)]
        scale = UNIT_HOURS[units[0][0]] if units else math.nan
    elif not suffix and has_scale:
        scale = SUFFIXES.get(header.unit[:1], 1)
    value = float(digits.replace(",", "")) * scale
    if column in COUNTS and not is_in_tokens(header) and round(value, 6) % 1:
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


def sequences_of(text: str, unit: str, tokens: float, context: float) -> float:
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


def word_of_flag(column: str, title: str, text: str) -> str:
    """Return the word of success or failure that a cell of true or false means."""
    if re.fullmatch(PATTERNS["true"], text):
        return "finished" if column == "success" else f"failed ({title})"
    if re.fullmatch(PATTERNS["false"], text):
        return "" if column == "failure" or not text else f"not {title}"
    return text


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


def worst_outcome(outcomes: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the state and cause of a row: that of a success only if all of its words are."""
    bad = [outcome for outcome in outcomes if outcome[0] != State.COMPLETE]
    for cause in (Cause.DIVERGED, Cause.OUT_OF_MEMORY):
        if (str(State.FAILED), str(cause)) in bad:
            return str(State.FAILED), str(cause)
    return bad[0] if bad else (str(State.COMPLETE), "")
