"""Markdown building blocks of the memory pages; the report's pages are templates."""

from collections.abc import Iterable, Sequence

MISSING = "–"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a table; columns in which every cell starts with a digit are aligned right."""
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


def figure(name: str, text: str) -> str:
    """Show a figure of the folder `figures`."""
    return f"![{text}](figures/{name}.png)\n\n*{text}*"
