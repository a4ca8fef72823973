"""Markdown building blocks and the formats of numbers in the report."""

import math
from collections.abc import Iterable, Sequence

from sweep.analysis.comparison import SEEDS_FOR_SPREAD, short
from sweep.config.numbers import format_bytes, format_seconds

MISSING = "–"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a table; columns in which every cell starts with a number are aligned right."""
    body = list(rows)
    rule = ["--:" if _is_numeric([row[k] for row in body]) else ":--" for k in range(len(headers))]
    lines = [headers, rule, *body]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def _is_numeric(column: Sequence[str]) -> bool:
    starts = [text.lstrip("-")[:1] for text in column if text != MISSING]
    return bool(starts) and all(start.isdigit() for start in starts)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def bullets(items: Iterable[str]) -> str:
    """Build a list."""
    return "\n".join(f"- {item}" for item in items)


def document(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Join sections under their headings."""
    parts = [f"# {title}", *(f"## {heading}\n\n{body.strip()}" for heading, body in sections)]
    return "\n\n".join(parts) + "\n"


def figure(name: str, text: str) -> str:
    """Show a figure of the folder `figures`."""
    return f"![{text}](figures/{name}.png)\n\n*{text}*"


def join_words(words: Sequence[str]) -> str:
    """Join as in a sentence: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def loss(value: float) -> str:
    """Four decimals: a ten-thousandth of a nat is far below the noise of seeds."""
    return f"{value:.4f}" if _is_number(value) else MISSING


def spread_loss(mean: float, sd: float, count: int) -> str:
    """Write a mean, with its standard deviation over seeds where there are enough of them."""
    if count >= SEEDS_FOR_SPREAD and _is_number(sd):
        return f"{loss(mean)} ± {loss(sd)}"
    return loss(mean)


def rate(value: float) -> str:
    """Three significant digits: 3e-4, 7.07e-4, 0.05."""
    return short(float(f"{value:.3g}"))


def seconds(value: float) -> str:
    """3.2 s, 12 min, 7.6 h."""
    return format_seconds(value) if _is_number(value) else MISSING


def size(value: float) -> str:
    """14.8 GiB."""
    return format_bytes(value) if _is_number(value) else MISSING


def count(value: float) -> str:
    """12,345."""
    return f"{value:,.0f}" if _is_number(value) else MISSING


def percent(value: float) -> str:
    """Two significant digits: 0.43 %, 12 %, 100 %."""
    if not _is_number(value):
        return MISSING
    return f"{100 * value:.2g} %" if abs(value) < 0.995 else f"{100 * value:.0f} %"


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
