"""Read the texts of tables: JSON, CSV, TSV and Parquet, and data sets of the Hugging Face hub.

Each row must have a text in the column: its type is declared, never inferred. A row that does not
have the fields of its table is refused with its line.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sweep.config.hub import hugging_face
from sweep.data.files import format_of, name_list
from sweep.data.plain_text import (
    BLOCK_BYTES,
    READ_ERRORS,
    Piece,
    most_characters,
    not_utf8,
    open_text,
    too_large,
    unreadable,
)
from sweep.errors import SweepError, cut

MAX_LINE_CHARACTERS = 1 << 26  # in a JSON or CSV file
MAX_ARRAY_CHARACTERS = 1 << 28  # a file with one JSON array is parsed as a whole
DELIMITERS = {"csv": ",", "tsv": "\t"}
OTHER_DELIMITERS = (";", "\t", ",", "|")
REMEDIES = {
    "csv": "Put texts with separators, quotes or line breaks into double quotes.",
    "tsv": "Save the table as .csv or .jsonl, whose texts can hold tabs, line breaks and quotes.",
}
BATCH_ROWS = 100
TEXT_TYPES = ("string", "large_string", "string_view")  # names of Arrow

Texts = Iterator[tuple[str, Any]]  # the place of each row in words, and what its column holds


def parse_table(path: Path, column: str) -> Iterator[Piece]:
    """Yield the text of each row in order, also empty ones."""
    name = f"data {cut(str(path))!r}"
    kind = format_of(path)
    try:
        if kind == "parquet":
            yield from _check_texts(_parquet_texts(path, column, name), column, name)
        elif kind == "json":
            yield from _check_texts(_json_texts(path, column, name), column, name)
        else:
            texts = _delimited_texts(path, column, name, kind)
            yield from _check_texts(texts, column, name)
    except UnicodeError as error:
        raise not_utf8(path) from error
    except READ_ERRORS as error:
        raise unreadable(path, error) from error


def read_split(rows: Any, name: str, column: str) -> Iterator[Piece]:
    """Yield the text of each row of a split of `datasets`, also empty ones."""
    with hugging_face(name, "Use other data."):
        texts = _batch_texts(rows.with_format("arrow").iter(batch_size=BATCH_ROWS), column, name)
        yield from _check_texts(texts, column, name)


def refuse(name: str, place: str, reason: str, remedy: str = "Correct it.") -> SweepError:
    return SweepError(f"{name} cannot be read ({place}: {cut(reason)}). {remedy}")


def refuse_wrong_column(column: str, names: Sequence[str], name: str) -> None:
    if column not in names:
        problem = f"{name} must have the column {cut(column, 60)!r}, got {name_list(names, 6)}"
        remedy = "Name the column of the texts with --text-column."
        if len(names) == 1 and any(mark in names[0] for mark in OTHER_DELIMITERS):
            remedy = "Separate the fields by commas in .csv files, by tabs in .tsv files."
        raise SweepError(f"{problem}. {remedy}")
    if names.count(column) > 1:
        problem = f"must have one column {cut(column, 60)!r}, got {names.count(column)}"
        raise SweepError(f"{name} {problem}. Rename the others.")


def _check_texts(texts: Texts, column: str, name: str) -> Iterator[Piece]:
    """Refuse what is not a text; yield texts without the white space around them."""
    for place, text in texts:
        if not isinstance(text, str):
            problem = f"{cut(column, 60)!r} must be a text, got {_describe(text)}"
            raise refuse(name, place, problem, "Correct or remove the row.")
        if "\0" in text:
            raise refuse(name, place, "the text has a NUL character", "Remove the character.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"the text is not Unicode ({error.reason})"
            raise refuse(name, place, problem, "Correct or remove the row.") from error
        yield Piece(text.strip())


def _describe(value: object) -> str:
    return cut(json.dumps(value, default=str), 40)


def _lines(path: Path, name: str, newline: str = "") -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their ends; refuse more than fits in memory."""
    limit = most_characters(path)
    size = 0
    with open_text(path, newline) as file:
        while line := file.readline(MAX_LINE_CHARACTERS + 1):
            size += len(line)
            if size > limit:
                raise too_large(path)
            if len(line) > MAX_LINE_CHARACTERS:
                expected = f"lines of at most {MAX_LINE_CHARACTERS:,} characters"
                raise SweepError(f"{name} must have {expected}. Divide its documents.")
            if "\0" in line:
                raise UnicodeError("a NUL byte")
            yield line


def _json_texts(path: Path, column: str, name: str) -> Texts:
    with open_text(path) as file:
        is_array = file.read(BLOCK_BYTES).lstrip().startswith("[")
    rows = _array_rows(path, name) if is_array else _line_rows(path, name)
    for place, row in rows:
        if not isinstance(row, dict):
            raise refuse(name, place, f"a row must be an object, got {_describe(row)}")
        if column not in row:
            refuse_wrong_column(column, list(row), f"{place} of {name}")
        yield place, row[column]


def _line_rows(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_lines(path, name), 1):
        if line.strip():
            place = f"line {number}"
            yield place, _parse_json(line, name, place)


def _array_rows(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    with open_text(path) as file:
        text = file.read(min(MAX_ARRAY_CHARACTERS, most_characters(path)) + 1)
    if len(text) > most_characters(path):
        raise too_large(path)
    if len(text) > MAX_ARRAY_CHARACTERS:
        expected = f"at most {MAX_ARRAY_CHARACTERS:,} characters in one JSON array"
        remedy = "Write an object per line (jq -c '.[]' OLD > NEW.jsonl)."
        raise SweepError(f"{name} must have {expected}. {remedy}")
    if "\0" in text:
        raise UnicodeError("a NUL byte")
    rows = _parse_json(text, name)
    for number, row in enumerate(rows, 1):
        yield f"element {number}", row


def _parse_json(text: str, name: str, place: str | None = None) -> Any:
    """Parse a line, or a whole text, whose lines the parser counts."""
    try:
        return json.loads(text, object_pairs_hook=_unique_names)
    except json.JSONDecodeError as error:
        if place is None:
            reason = f"{error.msg}, character {error.colno}"
            raise refuse(name, f"line {error.lineno}", reason) from error
        raise refuse(name, place, f"{error.msg}, character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a repeated name, a huge number, deep nesting
        raise refuse(name, place or "its array", str(error)) from error


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [key for key, _ in pairs]
        repeated = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the name {cut(repeated, 60)!r} occurs twice in an object")
    return row


def _delimited_texts(path: Path, column: str, name: str, kind: str) -> Texts:
    """Yield the texts of a .csv file, or of a .tsv file, in which quotes have no meaning.

    Some programs quote the fields of .tsv files too. Both readings of such a field are possible, so
    it is refused.
    """
    remedy = REMEDIES[kind]
    lines = _lines(path, name, _line_end(path))
    reader = csv.reader(
        lines,
        delimiter=DELIMITERS[kind],
        quoting=csv.QUOTE_NONE if kind == "tsv" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    header = _next_row(reader, name, remedy)
    if header is None:
        raise refuse(name, "line 1", "the header is missing", "Add a header with the column names.")
    if kind == "tsv":
        _refuse_quoted(header, name, "line 1")
    refuse_wrong_column(column, header, name)
    index = header.index(column)
    while True:
        place = f"line {reader.line_num + 1}"
        row = _next_row(reader, name, remedy)
        if row is None:
            return
        if not row and len(header) > 1:  # a blank line
            continue
        fields = row or [""]
        if kind == "tsv":
            _refuse_quoted(fields, name, place)
        if len(fields) != len(header):
            problem = f"a row must have {len(header)} fields like the header, got {len(fields)}"
            raise refuse(name, place, problem, remedy)
        yield place, fields[index]


def _refuse_quoted(fields: Sequence[str], name: str, place: str) -> None:
    for field in fields:
        if field.startswith('"'):
            problem = f"a field must not begin with a double quote, got {cut(field, 40)}"
            raise refuse(name, place, problem, REMEDIES["tsv"])


def _line_end(path: Path) -> str:
    """Return the character that ends the lines of a table, so that others do not divide texts.

    The csv module then refuses them outside of quotes.
    """
    with open_text(path, "") as file:
        first_line = file.readline(BLOCK_BYTES)
    return "\r" if first_line.endswith("\r") else "\n"


def _next_row(reader: Any, name: str, remedy: str) -> list[str] | None:
    """Return the next row of a csv.reader, None at the end."""
    first_line = reader.line_num + 1
    limit = csv.field_size_limit(MAX_LINE_CHARACTERS)  # a setting of the whole process
    try:
        row: list[str] | None = next(reader, None)
    except csv.Error as error:
        place = f"line {first_line}"
        if reader.line_num > first_line:
            place = f"lines {first_line} to {reader.line_num}"
        reason = str(error).partition(" - ")[0]  # the rest is for programmers
        raise refuse(name, place, reason, remedy) from error
    finally:
        csv.field_size_limit(limit)
    return row


def _parquet_texts(path: Path, column: str, name: str) -> Texts:
    with hugging_face(name, "Correct the file."):
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as file:
            refuse_wrong_column(column, file.schema_arrow.names, name)
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            if sum(group.total_byte_size for group in groups) > most_characters(path):
                raise too_large(path)
            # A whole row group would be expanded without a batch size.
            batches = file.iter_batches(batch_size=BATCH_ROWS, columns=[column])
            yield from _batch_texts(batches, column, name)


def _batch_texts(batches: Any, column: str, name: str) -> Texts:
    """Yield the texts of Arrow tables or batches whose column must be declared as text."""
    number = 0
    for batch in batches:
        refuse_wrong_column(column, batch.schema.names, name)
        kind = batch.schema.field(column).type
        text_type = kind.value_type if str(kind).startswith("dictionary<") else kind
        if str(text_type) not in TEXT_TYPES:
            problem = f"must declare the column {cut(column, 60)!r} as text"
            remedy = "Convert the column to strings, or name another with --text-column."
            raise SweepError(f"{name} {problem}, got {cut(str(kind), 60)}. {remedy}")
        for text in batch[column].to_pylist():
            number += 1
            yield f"row {number}", text
