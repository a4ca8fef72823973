"""The meaning of headers and cells of a table of results, by the expressions of headers.toml.

A header, a number or a word of state that is not understood as a whole is not read.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from sweep.analysis.tables import MOST_DIGITS, NUMBERS, TRIAL_COLUMNS
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


def _with_words(patterns: Sequence[str]) -> list[str]:
    return [pattern.format(**_TOML["words"]) for pattern in patterns]


HEADERS = {column: _with_words(patterns) for column, patterns in _TOML["headers"].items()}
# Columns of trials.csv whose names differ here. Only a table that `sweep report` wrote has them:
# elsewhere `tokens` is a header as any other.
OWN_NAMES = {
    "adam_beta2": "beta2",
    "token_budget": "tokens",
    "context_length": "tokens_per_sequence",
    "status": "state",
}
FOREIGN_NAMES = {own: column for column, own in OWN_NAMES.items()}
# Columns of trials.csv that a table of other people may have too.
SHARED_NAMES = {*TRIAL_COLUMNS} - {*HEADERS, *OWN_NAMES.values(), "parameters", "device"}
# A table with all of these was written by `sweep report`; its counts are exact.
OWN_COLUMNS = {"id", "stage", "policy", "batch_size", "state", "cause", "seconds_training"}
# The batch size is the product of these.
PARTS = ("microbatch_size", "gradient_accumulation_steps", "devices")
LOSSES = ("final_valid_loss", "best_valid_loss", "final_train_loss")  # the first that has values
TIMES = ("seconds_training", "time_budget_seconds")
LEAST_SECONDS = 1e-9
MOST_SECONDS = 1e12
COUNTS = (
    *("batch_size", "microbatch_size", "gradient_accumulation_steps", "devices"),
    *("steps", "context_length", "token_budget", "warmup_steps", "seeds"),
)
ARROWS = {"maximize": "↑⬆▲", "minimize": "↓⬇▼"}  # in headers, by better direction
STEPS = "steps_to_target"  # may be a mean
# Rows that differ in one of these are not compared.
FACTORS = ("model", "model_size", "dataset", "schedule", "policy", "optimizer")
FLAGS = ("failure", "success")  # columns whose cells are true or false
STATES = ("status", *FLAGS)
SEVERAL = ("nodes", "hardware")  # columns that may say that several devices shared a batch
READ_ALL = (*STATES, *SEVERAL)  # each column that matches one of these is read
TEXTS = (*READ_ALL, *FACTORS, "seed", "stage")
# Rows that agree in all of these are repetitions of one training.
SETTINGS = (
    *("stage", *FACTORS, "batch_size", "learning_rate", "context_length"),
    *("token_budget", "steps", "epochs", "weight_decay", "adam_beta2"),
)
SCALED = ("batch_size", "steps", STEPS, "token_budget")  # a unit may begin with k, M, G or B
SCALES = "kKMGB"
HARMLESS = r"_./:,#`?|\\↓↑⬇⬆▼▲\ufe0f"  # characters of headers that change no meaning
ZERO_IS_VALID = ("weight_decay", "warmup_steps", "adam_beta2")
UNIT_HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}  # keys: first letters of units
WANDB_COUNTERS = ("_step", "_runtime", "_timestamp", "_wandb")  # _step counts calls of log
MOST_CELL_CHARACTERS = 60  # shown of a cell or a header


LOSSES_OF_UNKNOWN_DATA = HEADERS["final_valid_loss"][1:3]
# Letters of scaling laws, which are read only together.
LETTERS = {"N": "model_size", "D": "token_budget"}


class Header(NamedTuple):
    """One header that was understood."""

    title: str
    rank: int = -1  # index of the expression that matches; -1: a name whose numbers are plain
    words: str = ""  # plain words that match the expression
    unit: str = ""  # in parentheses; "" if there is none, or if the text is a part of the words
    scale: str = ""  # k, K, M, G or B before the unit


class Columns(NamedTuple):
    """The headers of a table by the column that they name."""

    chosen: dict[str, Header]  # the header that is read
    places: dict[str, list[int]]  # all headers that match, for the columns of READ_ALL
    ambiguous: dict[str, str]  # why headers are not read, by header
    unclear: dict[str, list[str]]  # headers of a column that has several, none of which is read


def short_text(text: str) -> str:
    """Return a header or a cell as a message shows it: in one line, and not too long."""
    return cut(printable(" ".join(text.split())), MOST_CELL_CHARACTERS)


def is_own_table(cells: TextTable) -> bool:
    """Return True if `sweep report` wrote a table."""
    return {*cells.header} >= OWN_COLUMNS


def read_headers(cells: TextTable, metric: str = "") -> Columns:
    """Return the header of each column that is read, and why other headers are ambiguous.

    The header of `metric` is read by its own name and is no flag: error may be a metric.
    """
    is_own = is_own_table(cells)
    by_name = find_metric(cells, metric)
    names = {header.title for header in by_name.values()}
    columns = Columns({}, {}, {}, {})
    matches: dict[str, list[tuple[int, Header]]] = {}
    for index, title in enumerate(cells.header):
        match = match_header(title, is_own)
        if match is None and title in LETTERS and {*LETTERS} <= {*cells.header}:
            column = LETTERS[title]
            match = column, Header(title, rank=len(HEADERS[column]))
        if match is None:
            continue
        column, header = match
        if column in FLAGS and title in names:
            continue
        quantity = _find_quantity(cells, index) if column in FLAGS else ""
        if quantity:
            columns.ambiguous[title] = f"it has numbers, such as {short_text(quantity)}"
        else:
            matches.setdefault(column, []).append((index, header))

    for column, candidates in matches.items():
        if column in READ_ALL:
            _, header = candidates[0]
            columns.chosen[column] = header
            columns.places[column] = [index for index, _ in candidates]
            continue
        best = min(header.rank for _, header in candidates)
        equal = [(index, header) for index, header in candidates if header.rank == best]
        texts = {_cells_of_column(cells, index) for index, _ in equal}
        if len(texts) == 1:
            _, header = equal[0]
            columns.chosen[column] = header
            continue
        columns.unclear[column] = [header.title for _, header in equal]
        reason = f"one of {len(equal)} that could be {column}"
        columns.ambiguous.update(dict.fromkeys(columns.unclear[column], reason))

    _refuse_loss_of_unknown_data(columns)
    if metric not in HEADERS:
        columns.chosen.update(by_name)
    return columns


def _cells_of_column(cells: TextTable, index: int) -> tuple[str, ...]:
    return tuple(row[index] for row in cells.rows)


def _find_quantity(cells: TextTable, index: int) -> str:
    """Return a cell that is a fraction or a percentage, which no flag has; "" if there is none."""
    texts = (row[index].strip() for row in cells.rows)
    return next((text for text in texts if re.fullmatch(PATTERNS["quantity"], text)), "")


def _refuse_loss_of_unknown_data(columns: Columns) -> None:
    """Read no loss that does not say of which data it is, next to a training loss."""
    valid = columns.chosen.get("final_valid_loss")
    if valid is None or not any(re.fullmatch(p, valid.words) for p in LOSSES_OF_UNKNOWN_DATA):
        return
    if "final_train_loss" in columns.chosen or "final_train_loss" in columns.unclear:
        columns.ambiguous[valid.title] = "a loss of training or validation"
        del columns.chosen["final_valid_loss"]


def match_header(title: str, is_own: bool = False) -> tuple[str, Header] | None:
    """Return the column that a header names; None if it is none, or has a part that is unknown.

    If `is_own`, `sweep report` wrote the table, and its headers are the columns of trials.csv.
    """
    if title in WANDB_COUNTERS:
        return None
    if title in (TRIAL_COLUMNS if is_own else SHARED_NAMES):
        return FOREIGN_NAMES.get(title, title), Header(title)
    plain = without_exporter(title)
    words, inside = words_of_header(re.sub(r"\.\d+$", "", plain))  # pandas numbers equal headers
    for column, patterns in HEADERS.items():
        texts = [words]
        unit = scale = ""
        unit_and_scale = _read_unit(column, inside)
        if unit_and_scale is not None:
            unit, scale = unit_and_scale
        else:
            extra, _ = words_of_header(inside)
            texts = [f"{extra} {words}", f"{words} {extra}"]
        for rank, pattern in enumerate(patterns):
            matched = [text for text in texts if re.fullmatch(pattern, text)]
            if matched:
                return column, Header(title, rank, matched[0], unit, scale)
    return None


def without_exporter(title: str) -> str:
    """Return a header without the prefix of an exporter, such as `config/` or `params_`."""
    return re.sub(f"^(?:{PATTERNS['exporter']})", "", title)


def is_setting(title: str) -> bool:
    """Return True if an exporter's header is that of a setting, such as `params_dropout`."""
    return re.match(PATTERNS["setting"], title) is not None


def may_be_setting(title: str) -> bool:
    """Return False for a header that names its row or a measurement, such as `run_id`."""
    words, inside = words_of_header(without_exporter(title))
    return re.fullmatch(PATTERNS["no_setting"], f"{words} {inside}".strip().lower()) is None


def words_of_header(title: str) -> tuple[str, str]:
    """Return a header in plain lower-case words, and the text in its parentheses.

    A character that may change the meaning, as in `ΔLoss`, `% Steps` or `- loss`, stays in the
    words, which no expression matches then.
    """
    plain = _without_emphasis(title)
    for letter, name in (("β", "beta"), ("η", "eta"), ("λ", "lambda")):
        plain = plain.replace(letter, name)
    inside = " ".join(re.findall(r"[(\[{]([^)\]}]*)[)\]}]?", plain))
    outside = re.sub(r"[(\[{][^)\]}]*[)\]}]?", " ", plain)
    joined = re.sub(r"(?<=[^\W_])-(?=[^\W_])", " ", outside.lower())
    words = re.sub(rf"[\s{HARMLESS}]+", " ", joined).strip()
    return words, inside.strip(" *_`↓↑")


def _read_unit(column: str, inside: str) -> tuple[str, str] | None:
    """Return unit and scale in the parentheses of a header; None if they have something else."""
    if not inside:
        return "", ""
    known = UNITS.get(column, "(?!)")
    if re.fullmatch(known, inside, re.IGNORECASE):
        return inside, ""

    scale = inside[0]
    unit = inside[1:].strip()
    if column not in SCALED or scale not in SCALES:
        return None
    if unit and not re.fullmatch(known, unit, re.IGNORECASE):
        return None
    return unit, scale


def direction_of_header(title: str) -> tuple[int, str] | None:
    """Return how well a header names a metric, and its better direction; None if it names none.

    A metric of validation (0) is better named than one without data (1) or of a test (2).
    """
    objectives = _TOML["objectives"]
    arrows = {better for better, signs in ARROWS.items() if any(sign in title for sign in signs)}
    words, inside = words_of_header(without_exporter(title))
    plain = re.sub(rf"\b{objectives['around']}\b|%", " ", f"{words} {inside.lower()}")
    name, of_valid = re.subn(rf"\b{_TOML['words']['valid']}\b", " ", plain)
    name, of_test = re.subn(r"\btest\b", " ", name)
    rank = 2 if of_test else 0 if of_valid else 1
    for direction in ("maximize", "minimize"):
        if re.fullmatch(objectives[direction], " ".join(name.split())):
            is_contradicted = bool(arrows - {direction})
            return None if is_contradicted else (rank, direction)
    return (rank, arrows.pop()) if len(arrows) == 1 else None


def find_metric(cells: TextTable, metric: str) -> dict[str, Header]:
    """Return the header of a metric, which is its name, apart from case and punctuation."""
    titles = [title for title in cells.header if title == metric]
    if not titles:
        words = words_of_header(metric)
        titles = [
            title for title in cells.header if words_of_header(without_exporter(title)) == words
        ]
    return {metric: Header(titles[0])} if len(titles) == 1 else {}


def is_text(column: str) -> bool:
    if column in HEADERS:
        return column in TEXTS
    return TRIAL_COLUMNS.get(column, "float64") not in NUMBERS


def is_in_tokens(header: Header) -> bool:
    return re.search(r"\btok", f"{header.words} {header.unit.lower()}") is not None


def read_number(column: str, header: Header, text: str) -> float:
    """Read `25,701`, `**3e-4**`, `~327.68M tokens` or `7.22 hrs`; NaN if it is anything else."""
    if header.rank < 0:
        number = plain_number(text)
        if column in TIMES:
            return number if LEAST_SECONDS <= number <= MOST_SECONDS else math.nan
        is_read = not math.isnan(number) or column in (*TRIAL_COLUMNS, *HEADERS)
        if is_read:  # else a score in words of people, such as ~0.68
            return math.nan if column in LOSSES and math.isinf(number) else number

    plain = _plain_text(text)
    if header.title == column and column in LOSSES:  # written by a program, however small
        number = plain_number(plain)
        return number if math.isfinite(number) else math.nan
    if column == "batch_size":
        whole = _whole_batch(plain)
        if whole is not None:
            return whole
    if column == "hours" and re.fullmatch(PATTERNS["duration"], plain):
        parts = re.findall(rf"(\d+(?:\.\d+)?)\s*{PATTERNS['unit']}", plain)
        return sum(float(number) * UNIT_HOURS[unit[0]] for number, unit in parts)
    if column == "hours":
        clock = re.fullmatch(PATTERNS["clock"], plain)
        if clock:
            days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
            return 24 * days + hours + minutes / 60 + seconds / 3600
    if column in COUNTS and not header.scale and re.fullmatch(r"[1-9]\d{0,2}(\.\d{3})+", plain):
        return math.nan  # 640.000 may be 640,000
    if column == "clipped_step_fraction":
        return _share(header, plain)
    return _scaled_number(column, header, plain)


def _scaled_number(column: str, header: Header, plain: str) -> float:
    """Read a number with the scale and the unit of its cell or of its header."""
    match = re.fullmatch(PATTERNS["number"], plain)
    if match is None:
        return math.nan
    digits, suffix, unit, remark = match.groups(default="")
    if not _is_harmless(column, remark) or not _is_unit(column, unit):
        return math.nan

    scale_letter = suffix if suffix else header.scale
    if scale_letter and not _may_have_scale(column, header):
        return math.nan
    scale: float = SUFFIXES.get(scale_letter, 1)
    if column == "hours":
        scale = _hours_of_unit(unit, header)

    may_have_comma = column in (*COUNTS, STEPS) or scale == UNIT_HOURS["s"]
    if "," in digits and (not may_have_comma or scale_letter):
        return math.nan  # a loss of 1,389 may be 1.389, and 1,311 B tokens 1.311 B
    value = float(digits.replace(",", "")) * scale
    if column in COUNTS and not is_in_tokens(header) and round(value, 6) % 1:
        return math.nan
    if value == 0:
        is_valid = column in (*ZERO_IS_VALID, *LOSSES) or column not in HEADERS
        return value if is_valid else math.nan
    if value < 0 and column in HEADERS and column not in LOSSES:
        return math.nan
    return value if 1e-18 <= abs(value) <= 1e18 else math.nan


def _may_have_scale(column: str, header: Header) -> bool:
    """Return True if a k or an M after the number, or in the header, has one meaning.

    A context of 4k may be 4,000 or 4,096 tokens, and a batch size of 1.3B may be parameters.
    """
    if column == "batch_size":
        return is_in_tokens(header)
    return column in COUNTS and column != "context_length"


def _hours_of_unit(unit: str, header: Header) -> float:
    """Return the hours of the unit in a cell, else in its header; NaN if there is none."""
    words = (word.lower() for word in [unit, header.unit, *header.words.split()])
    units = [word for word in words if re.fullmatch(PATTERNS["unit"], word)]
    return UNIT_HOURS[units[0][0]] if units else math.nan


def _whole_batch(text: str) -> float | None:
    """Read `8 (effective 64)` and `4 x 8 = 32`; NaN if the numbers disagree, None if it is neither.

    A remark such as `8 (n=5)` is not understood, so that such a cell is not read at all.
    """
    if len(text) > MOST_CELL_CHARACTERS:
        return None
    total = re.fullmatch(PATTERNS["total"], text)
    if total:
        part = int(total[1])
        whole = int(total[2].replace(",", ""))
        return float(whole) if part and whole % part == 0 else math.nan

    product = re.fullmatch(PATTERNS["product"], text)
    if product:
        factors = map(int, re.findall(r"\d+", product[1]))
        whole = int(product[2].replace(",", ""))
        return float(whole) if math.prod(factors) == whole else math.nan
    return None


def with_decimal_point(text: str) -> str:
    """Return a number of a file with semicolons, in which a comma separates decimals."""
    return text.replace(",", ".") if re.fullmatch(PATTERNS["comma"], text) else text


def may_be_decimal_comma(text: str) -> bool:
    """Return True if a comma in a cell separates decimals: `0,70`."""
    return re.fullmatch(PATTERNS["decimal_comma"], text) is not None


def says_several_devices(text: str) -> bool:
    """Return True for `8`, `8 A100` or `A100 x8`, or if a number may be one of devices."""
    return re.search(PATTERNS["several"], text) is not None


def _without_emphasis(text: str) -> str:
    """Return a text without Markdown's emphasis around its words."""
    return re.sub(r"(?<!\w)(\*\*|\*|__|_|`)(?=\S)(.+?)(?<=\S)\1(?!\w)", r"\2", text.strip())


def _plain_text(text: str) -> str:
    """Return a cell without emphasis, `~` at its start, and `_` between digits."""
    plain = _without_emphasis(text)
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
    share = float(match[1])
    if match[2] or "%" in header.title:
        share /= 100
    return share


def plain_number(text: str) -> float:
    try:
        return float(text) if len(text) <= MOST_DIGITS else math.nan
    except ValueError:
        return math.nan


def sequences_of(text: str, header_scale: str, tokens: float, context: float) -> float:
    """Return a batch size in tokens in sequences; NaN if it is not a whole number of them.

    A k is 1,000 or 1,024: whichever gives a whole number, or a power of two if both do.
    """
    match = re.search(r"\d\s*([kKMGB])(?![A-Za-z])", text)
    suffix = match[1] if match else header_scale
    power = {"K": 1, "M": 2, "G": 3, "B": 3}.get(suffix.upper(), 0)
    sizes = {round(tokens / context, 6), round(tokens * 1.024**power / context, 6)}
    whole = [size for size in sizes if size >= 1 and size % 1 == 0]
    powers = [size for size in whole if math.log2(size) % 1 == 0]
    chosen = whole if len(whole) == 1 else powers
    return chosen[0] if len(chosen) == 1 else math.nan


def word_of_flag(column: str, title: str, text: str) -> str:
    """Return the word of success or failure that a cell of true or false means.

    An empty cell among those of success is not a success.
    """
    if re.fullmatch(PATTERNS["true"], text):
        return "finished" if column == "success" else f"failed ({title})"
    if re.fullmatch(PATTERNS["false"], text):
        return "" if column == "failure" else f"not {title}"
    return text


def word_of_loss(column: str, text: str) -> str:
    """Return a word of failure in place of a loss; "" if it is a loss or empty.

    NaN is a failure, but may be a missing value and shows no divergence. Infinity is where a best
    loss starts.
    """
    if column == "best_valid_loss" and re.fullmatch(r"(?i)\+?inf(inity)?", text):
        return ""
    return text if re.search(PATTERNS["failed"], text) else ""


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
