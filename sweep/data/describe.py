"""Describe data: what is read, how many rows and documents, what is left out, and why."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweep.config.trial import TokenizerSettings
from sweep.data.files import TEXT_ROLE, format_of, has_text_suffix, locate_files, name_list
from sweep.data.plain_text import BLOCK_BYTES, READ_ERRORS, SEPARATOR, Tally, open_file, unreadable
from sweep.data.sources import TEXT, identify_data
from sweep.data.tokens import find_prepared, prepared_folder

GZIP_SIZE_BYTES = 4  # at the end of a gzip file
KEYS = ("files", "left_out")  # prepared counts that are shown with the names of this folder


@dataclass(frozen=True)
class FileSummary:
    """A file of a folder, or a split of the hub; without numbers until it is prepared."""

    file: str
    role: str  # train, valid, or text: to be split
    format: str | None  # text, or that of a table; None for a split of the hub
    rows: int | None = None  # in plain text the texts between separators
    documents: int | None = None
    empty: int | None = None
    inner_separators: int | None = None
    other_separators: int | None = None
    looks_like: str | None = None


@dataclass(frozen=True)
class DataSummary:
    files: list[FileSummary]
    left_out: dict[str, str]  # reasons by name
    notes: list[str]  # sentences about what may not be meant


def summarize_data(
    identity: dict[str, Any], source: str | None, tokenizer: TokenizerSettings
) -> DataSummary:
    """Return what is read of a source, with numbers if it is prepared, and what is left out."""
    prepared = find_prepared(identity, tokenizer)
    counts = {} if prepared is None else prepared.counts
    tallies = {}
    for role, fields_of_tallies in counts.get("files", {}).items():
        tallies[role] = [Tally(**fields) for fields in fields_of_tallies]

    notes: list[str] = []
    files: list[FileSummary] = []
    if identity["name"] == "path" and source is not None:
        located = locate_files(source)
        left_out = located.left_out
        notes += located.notes
        for paths in located.roles.values():
            notes += _equal_files(paths)
        for role, paths in located.roles.items():
            of_role = tallies.get(role, [None] * len(paths))
            for path, tally in zip(paths, of_role, strict=True):
                files.append(_summarize(path, role, tally))
    else:  # a split of the hub has the name that it was read by
        left_out = counts.get("left_out", {})
        for role, of_role in tallies.items():
            files += [_summarize(tally.name, role, tally) for tally in of_role]

    notes += _notes(files)
    common = counts.get("valid_documents_in_train")
    if common:
        total = counts["valid_documents"]
        notes.append(f"{common:,} of {total:,} validation documents are also training documents.")
    return DataSummary(files, left_out, notes)


def _summarize(file: Path | str, role: str, tally: Tally | None) -> FileSummary:
    name = file.name if isinstance(file, Path) else file
    file_format = format_of(file) if isinstance(file, Path) else None
    if tally is None:
        return FileSummary(name, role, file_format)
    return FileSummary(
        file=name,
        role=role,
        format=file_format,
        rows=tally.documents + tally.empty,
        documents=tally.documents,
        empty=tally.empty,
        inner_separators=tally.inner_separators,
        other_separators=tally.other_separators,
        looks_like=tally.looks_like,
    )


def _notes(files: Sequence[FileSummary]) -> list[str]:
    notes = []
    texts = [file for file in files if file.format == "text"]
    unknown = [file.file for file in texts if not has_text_suffix(file.file)]
    if unknown:
        notes.append(f"Read as plain text, whatever the name says: {name_list(unknown)}.")

    for kind in dict.fromkeys(file.looks_like for file in texts if file.looks_like):
        names = name_list([file.file for file in texts if file.looks_like == kind])
        notes.append(f"Read as plain text, but looks like {kind}: {names}.")

    divided = {file.file: file.inner_separators for file in files if file.inner_separators}
    if divided:
        total = sum(divided.values())
        names = name_list([*divided])
        notes.append(
            f"{SEPARATOR} occurs {_count(total, 'time')} inside lines of {names}, where it is "
            "ordinary text. Put it on lines of its own if it separates documents."
        )

    others = {file.file: file.other_separators for file in files if file.other_separators}
    if others:
        total = sum(others.values())
        names = name_list([*others])
        notes.append(
            f"Lines such as </s> or <eos> occur {_count(total, 'time')} in {names}, where they are "
            f"ordinary text. Replace them by {SEPARATOR} if they separate documents."
        )
    return notes


def _equal_files(paths: Sequence[Path]) -> list[str]:
    """Return sentences about files with equal content, before compression."""
    by_size = defaultdict[int, list[Path]](list)
    for path in paths:
        by_size[_size_of_content(path)].append(path)

    by_content = defaultdict[bytes, list[str]](list)
    for size, same_size in by_size.items():
        if size == 0 or len(same_size) < 2:
            continue
        for path in same_size:
            by_content[_digest_of_content(path)].append(path.name)

    return [
        f"These files have the same content, which counts {len(names)} times: {name_list(names)}."
        for names in by_content.values()
        if len(names) > 1
    ]


def _digest_of_content(path: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with open_file(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    return digest.digest()


def _size_of_content(path: Path) -> int:
    """Return the number of bytes of a file modulo 2³², of a gzip file after it is expanded.

    A gzip file ends with this number; if it has several parts, with that of its last part.
    """
    size = path.stat().st_size
    if not path.name.lower().endswith(".gz") or size < GZIP_SIZE_BYTES:
        return size % (1 << 32)
    with path.open("rb") as file:
        file.seek(-GZIP_SIZE_BYTES, os.SEEK_END)
        return int.from_bytes(file.read(), "little")


def data_lines(summary: DataSummary) -> list[str]:
    """Return lines for people: one per role, what is left out, and notes."""
    lines = []
    for role in dict.fromkeys(file.role for file in summary.files):
        files = [file for file in summary.files if file.role == role]
        subject = "Data, to be split" if role == TEXT_ROLE else f"Data, {role}"
        is_read = all(file.rows is not None for file in files)
        if len(files) > 1 and not is_read:
            names = name_list([file.file for file in files], 6, 160)
        else:
            names = name_list([f"{file.file} ({_numbers([file])})" for file in files], 6, 160)
        text = names
        if len(files) > 1:
            text = f"{len(files):,} files ({_numbers(files)}): {names}"
        lines.append(f"{subject}: {text}")
    if summary.left_out:
        reasons = [f"{name} ({reason})" for name, reason in summary.left_out.items()]
        lines.append(f"Data left out: {name_list(reasons, 6, 160)}")
    lines += [f"Data: {note}" for note in summary.notes]
    return lines


def _numbers(files: Sequence[FileSummary]) -> str:
    if any(file.rows is None for file in files):
        return "not read yet"
    rows = 0
    documents = 0
    empty = 0
    for file in files:
        rows += file.rows or 0
        documents += file.documents or 0
        empty += file.empty or 0
    return f"{_count(rows, 'row')} read, {_count(documents, 'document')}, {empty:,} empty"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_data(source: str, tokenizer: TokenizerSettings, column: str = TEXT) -> dict[str, Any]:
    """Return the document of `sweep data`; `counts` are those of prepared data."""
    identity = identify_data(source, column)
    prepared = find_prepared(identity, tokenizer)
    counts = None
    if prepared is not None:
        counts = {key: value for key, value in prepared.counts.items() if key not in KEYS}
    return {
        "source": source,
        "identity": identity,
        "tokenizer": tokenizer.model_dump(),
        "prepared": prepared is not None,
        "folder": str(prepared_folder(identity, tokenizer)),
        "counts": counts,
        **asdict(summarize_data(identity, source, tokenizer)),
    }
