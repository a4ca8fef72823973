"""Numbers as people write them: 327M, 24GB, 47.4GiB, 1,8,32, 1..512."""

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

from sweep.errors import SweepError

MOST_BATCHES = 64  # in one experiment
MOST_BUDGETS = 16  # in one sweep
LEAST_BUDGET_RATIO = 1.5  # least ratio of a budget to the one before
MOST_SECONDS = 30 * 86400  # largest budget of time
EXAMPLES = {
    "the budget": "327.68M or 10min",
    "budget": "327.68M",
    "batches": "1,8,32",
}
EXAMPLES |= {"max_seeds": "8", "seeds": "8, or auto"}
EXAMPLES |= {"number of tokens": "64ktok or 64Kitok", "tokens": "1B", "params": "350M"}
SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
# 24GB, 47.4GiB, 15.99 GiB, 81559MiB; 16Gi as in Kubernetes.
SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([kmgt]?b?|[kmgt]ib?)", re.IGNORECASE)
LEAST_WITHOUT_UNIT = 2**16  # bytes: smaller numbers have lost their unit
DECIMAL_SIZES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
MOST = 10**18
TOKENS = re.compile(r"(.+?)(Ki|Mi|Gi|)tok")  # a batch size in tokens: 64ktok, 64Kitok
BINARY = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}  # by unit


def parse_count(
    text: str | int | float, subject: str = "number", least: int = 1, unit: int = 1
) -> int:
    """Read a whole number of at least `least`: `327.68M`, `3.2768e8`, `1000`; times a unit."""
    written = str(text).strip().replace("_", "")
    suffix = next((suffix for suffix in SUFFIXES if written.endswith(suffix)), "")
    try:
        value = Decimal(written.removesuffix(suffix)) * SUFFIXES.get(suffix, 1) * unit
        is_whole = value >= least and value == value.to_integral_value()
    except ArithmeticError:  # InvalidOperation, Overflow
        is_whole = False
    if not is_whole:
        problem = f"must be a whole number of at least {least}, got {text!r}"
        example = next((EXAMPLES[name] for name in EXAMPLES if name in subject), "8")
        raise SweepError(f"{subject} {problem}. Write it such as {example}.")
    if value > MOST:
        raise SweepError(f"{subject} must be at most 1e18, got {text!r}. Lower it.")
    return int(value)


def parse_bytes(text: str | int, subject: str = "memory") -> int:
    """Read a size in bytes, down to whole ones: GB is 10⁹ bytes and GiB 2³⁰.

    Raises:
        SweepError: if it is not from 1 to 10¹⁸ bytes, or a small number without a unit.
    """
    from pydantic import ByteSize, TypeAdapter  # which `sweep --help` does not import

    match = SIZE.fullmatch(str(text).strip())
    size = 0
    if match is not None:
        unit = match[2] + "B" if match[2].lower().endswith("i") else match[2]
        size = int(TypeAdapter(ByteSize).validate_python(match[1].replace("_", "") + unit))
    if not 1 <= size <= MOST:
        raise SweepError(
            f"{subject} must be a size of 1 to 1e18 bytes, got {text!r}. Write it such as 24GB "
            "(10⁹ bytes each) or 47.4GiB (2³⁰)."
        )
    is_bare = isinstance(text, str) and match is not None and not match[2]
    if is_bare and size < LEAST_WITHOUT_UNIT:  # numbers are bytes, as in plan.json
        raise SweepError(
            f"{subject} must have a unit, got {text!r}, which would be bytes. Write it such as "
            f"{text}GB, or {text}B."
        )
    return size


def parse_budget(value: Any) -> int | str | tuple[int, ...]:
    """Read one budget, or several numbers of tokens, ascending: `1M,4M,16M`.

    One is a number of tokens, `327.68M`, or a time, `10min`, which is written in its largest whole
    unit.
    """
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    if len(items) == 1:
        return _parse_one_budget(items[0])
    budgets = sorted(parse_count(item, "the budget") for item in items)
    if not 0 < len(budgets) <= MOST_BUDGETS:
        raise SweepError(f"budget must have 1 to {MOST_BUDGETS} numbers, got {len(budgets)}.")
    refuse_close_budgets(budgets)
    return tuple(budgets)


def refuse_close_budgets(budgets: Sequence[int]) -> None:
    """Refuse budgets, ascending, that are so close that they tell nothing new."""
    for smaller, larger in pairwise(budgets):
        if larger < LEAST_BUDGET_RATIO * smaller:
            raise SweepError(
                f"each budget must be at least {LEAST_BUDGET_RATIO:g} times the one before, got "
                f"{smaller} and {larger}. Leave one out."
            )


def _parse_one_budget(value: str | int | float) -> int | str:
    match = re.fullmatch(r"\s*([\d.]+)\s*(d|h|min|s)\s*", str(value))
    if match is None:
        return parse_count(value, "the budget")
    try:
        seconds = Decimal(match[1]) * SECONDS[match[2]]
    except ArithmeticError:
        seconds = Decimal(0)
    if not 1 <= seconds <= MOST_SECONDS:
        problem = f"a time must be from 1 s to {MOST_SECONDS // 86400} d, got {value!r}"
        raise SweepError(f"the budget: {problem}. Write it such as 10min or 2h.")
    unit = next(unit for unit, size in SECONDS.items() if seconds % size == 0 or unit == "s")
    return f"{(seconds / SECONDS[unit]).normalize():f}{unit}"


def seconds_of(budget: int | str | tuple[int, ...]) -> float | None:
    """Return the seconds of a budget of time, as `parse_budget` writes it; None for tokens."""
    if not isinstance(budget, str):
        return None
    unit = next(unit for unit in SECONDS if budget.endswith(unit))
    return float(budget.removesuffix(unit)) * SECONDS[unit]


def parse_batches(text: str | int | list[int] | tuple[int, ...]) -> tuple[int, ...]:
    """Read batch sizes, ascending: `1,8,32`, or `1..512` for the powers of two between."""
    if isinstance(text, str) and ".." in text:
        low, _, high = text.partition("..")
        first = parse_count(low, "batches: a range's end")
        last = parse_count(high, "batches: a range's end")
        if first.bit_count() != 1 or last.bit_count() != 1 or first > last:
            problem = f"a range must go up between powers of two, got {text!r}"
            raise SweepError(f"batches: {problem}. Write it such as 1..512, or list sizes: 1,8,32.")
        return tuple(2**e for e in range(first.bit_length() - 1, last.bit_length()))

    items = text if isinstance(text, list | tuple) else str(text).split(",")
    sizes = sorted(parse_count(item, "batches: each batch size") for item in items)
    if not 0 < len(sizes) <= MOST_BATCHES or len({*sizes}) < len(sizes):
        expected = f"name each batch size once, and at most {MOST_BATCHES}"
        raise SweepError(f"batches must {expected}, got {str(text)!r}. Write 1,8,32.")
    return tuple(sizes)


def batches_in_sequences(text: Any, tokens_per_sequence: int) -> Any:
    """Return batch sizes with those in tokens, `64ktok`, as sequences; all others as they are.

    k is 1,000 and Ki 1,024.

    Raises:
        SweepError: if a number of tokens is no multiple of those of a sequence, or a sequence has
            no tokens.
    """
    if not isinstance(text, str | list | tuple):
        return text
    items = text.split(",") if isinstance(text, str) else text
    sizes = []
    for item in items:
        match = TOKENS.fullmatch(str(item).strip())
        if match is None:
            sizes.append(item)
            continue
        if tokens_per_sequence == 1:
            raise SweepError(
                f"batches must count examples, because these have no tokens, got {item}. Leave tok "
                "out."
            )
        subject = "batches: each number of tokens"
        tokens = parse_count(match[1], subject, unit=BINARY[match[2]])
        if tokens % tokens_per_sequence:
            nearest = nearest_multiples(tokens, tokens_per_sequence, "tok")
            raise SweepError(
                f"batches: {item} must be a multiple of the {tokens_per_sequence} tokens of a "
                f"sequence, got {tokens}. Write {nearest}."
            )
        sizes.append(tokens // tokens_per_sequence)
    return sizes


def nearest_multiples(value: int, unit: int, suffix: str = "") -> str:
    """Write the multiples of a unit below and above a number: "6 or 9", or "8" if none is below."""
    below = value // unit * unit
    above = -(-value // unit) * unit
    return f"{below}{suffix} or {above}{suffix}" if below else f"{above}{suffix}"


def format_count(number: float) -> str:
    for suffix, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(number) >= 0.999995 * size:  # also what rounds to 1
            return f"{number / size:.2f}".rstrip("0").rstrip(".") + suffix
    return f"{number:.0f}"


def short(number: float) -> str:
    """Format a number so that reading it back gives the same: 3e-4, 0.01, 32."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(float(number))
    scientific = f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e+")
    is_shorter = 0 < abs(number) < 0.01 and float(scientific) == number
    return scientific if is_shorter else text


def format_bytes(number: float, digits: int = 3) -> str:
    for suffix, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(number) / size >= 0.9995:  # also what rounds to 1
            return f"{_digits(number / size, digits)} {suffix}"
    return f"{number:.0f} B"


def format_both(number: int) -> str:
    """Write a size in units of 1,024 and of 1,000, in four digits: `22.35 GiB (24 GB)`."""
    suffix, size = next((s for s in DECIMAL_SIZES if number >= s[1]), DECIMAL_SIZES[-1])
    return f"{format_bytes(number, digits=4)} ({_digits(number / size, 4)} {suffix})"


def format_seconds(seconds: float) -> str:
    units = (("d", 86400), ("h", 3600), ("min", 60))
    unit, size = next((unit for unit in units if seconds >= 2 * unit[1]), ("s", 1))
    return f"{_digits(seconds / size, 3)} {unit}"


def _digits(number: float, digits: int) -> str:
    """Write some digits, and all digits of a whole part with more: 1023 and not 1.02e+03."""
    least = 10**digits - 0.5
    return f"{number:.0f}" if abs(number) >= least else f"{number:.{digits}g}"


def parse_options(text: str | Mapping[str, Any], subject: str) -> dict[str, Any]:
    """Read `width=128,activation=gelu`; values are JSON, or else texts."""
    if isinstance(text, Mapping):
        return dict(text)
    options = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value):
            raise SweepError(f"{subject} must be KEY=VALUE, got {part!r}. Write it as width=128.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options
