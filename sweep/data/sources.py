"""Find and identify the data that `--data` names, read its documents, and split them.

A source is `tinystories`, `synthetic`, `hf:OWNER/NAME[@REVISION]`, or the path of a file or folder.
A document of plain text is the text between two lines that contain only `<|endoftext|>`, without
the white space around it. Empty documents are dropped, and line ends become LF.
Tables and data sets of the Hugging Face hub are read by `datasets`.
"""

import csv
import glob
import gzip
import hashlib
import importlib
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from sweep.config import sha256_of_file
from sweep.config.hub import hugging_face, parse_hub_name
from sweep.config.objects import load_object
from sweep.errors import SweepError
from sweep.trial.files import sha256_of

SHIPPED = ("tinystories", "synthetic")  # sources that are objects of the shipped experiments
VALID_NAMES = ("valid", "validation", "val")  # names of files and splits
SKIPPED_NAMES = (".", "readme", "license", "licence", "notice")  # beginnings of file names
TABLE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
TEXT = "text"  # name of a table's column unless the identity has another
SPLITS = ("train", "valid")
SEPARATOR = "<|endoftext|>"
SEPARATOR_LINE = re.compile(r"^<\|endoftext\|>[ \t]*(?:\n|\Z)", re.MULTILINE)
MAX_EXPANSION = 200  # characters per byte of a compressed file; gzip can reach 1,000
MAX_LINE_BYTES = 1 << 26  # longest line in a JSON or CSV file
MAX_DEPTH = 100
MAX_CHARACTERS = 1 << 26  # longest text, unless its files are large
PIECE_CHARACTERS = 1 << 16  # a longer document is yielded in parts
CUT_CHARACTERS = 1 << 14  # a cut must lie in this many last characters of a part
# No tokenizer here merges a character with white space after it, so such a cut changes no ids.
CUT = re.compile(r"(?<=\S)[ \n]")
# The split of data without a validation file; a part of their identity.
SPLIT_RULE: dict[str, Any] = {"by": "document hash", "valid_fraction": 0.05, "version": 1}


class Piece(NamedTuple):  # a document, or a part of a long one
    text: str
    ends_document: bool = True


Reader = Callable[[], Iterator[Piece]]  # each call reads from the beginning


def is_path(source: str) -> bool:
    return source not in SHIPPED and not source.startswith("hf:")


def needs_datasets(identity: dict[str, Any]) -> bool:
    """Return True if the library `datasets` reads this data."""
    return identity["name"] == "hf" or not {*identity.get("kind", {}).values()} <= {"text"}


def identify_data(source: str, column: str = TEXT) -> dict[str, Any]:
    """Return the identity of a source in canonical JSON values; it becomes part of trial ids."""
    identity = _identify(source)
    if column != TEXT:
        if not needs_datasets(identity):
            raise SweepError(f"text_column applies to tables, got {source!r}. Leave it out.")
        identity["column"] = column
    return identity


def _identify(source: str) -> dict[str, Any]:
    if source in SHIPPED:
        return dict(load_object(source).identity())
    if is_path(source):
        return _identify_files(find_files(source))
    repository, revision = parse_hub_name(source, "data")
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):  # a commit needs no network
        remedy = f"Correct the name, or name a downloaded commit: hf:{repository}@COMMIT."
        with hugging_face("huggingface_hub", f"data 'hf:{repository}'", remedy) as hub:
            revision = hub.HfApi().dataset_info(repository, revision=revision, timeout=10).sha
    return {"name": "hf", "repository": repository, "revision": revision, "split": SPLIT_RULE}


def _identify_files(files: dict[str, list[Path]]) -> dict[str, Any]:
    identity: dict[str, Any] = {"name": "path", "sha256": {}, "kind": {}}
    for role, paths in files.items():
        pairs = [(_table_format(path) or "text", sha256_of_file(path)) for path in paths]
        identity["sha256"][role] = pairs[0][1] if len(pairs) == 1 else sha256_of(pairs)
        identity["kind"][role] = "+".join(sorted({kind for kind, _ in pairs}))
    return identity | ({"split": SPLIT_RULE} if "text" in files else {})


def find_files(source: str) -> dict[str, list[Path]]:
    """Return the files with text of a path by role: train and valid, or text, to be split."""
    path = Path(source).expanduser().absolute()
    if not source or not (path.is_file() or path.is_dir()):
        choices = "tinystories, synthetic, hf:OWNER/NAME[@REVISION], or an existing file or folder"
        raise SweepError(f"data must be {choices}, got {source!r}.")
    files = {"text": [path]}
    if path.is_dir():
        usable = [file for file in sorted(path.iterdir()) if file.is_file()]
        usable = [file for file in usable if not file.name.lower().startswith(SKIPPED_NAMES)]
        train = [file for file in usable if file.name.lower().split(".")[0] == "train"]
        valid = [file for file in usable if file.name.lower().split(".")[0] in VALID_NAMES]
        if not usable:
            raise SweepError(f"data folder {source!r} has no text file. Add one.")
        if len(train) > 1 or len(valid) > len(train):
            names = ", ".join(file.name for file in [*train, *valid])
            expected = "one file named train at most and, only with that, one named valid"
            raise SweepError(f"data folder {source!r} must hold {expected}, got {names}.")
        files = {"train": train, "valid": valid} if valid else {"text": train or usable}
    for role, paths in files.items():
        starts = [_table_format(file) or any(read_text(file)) for file in paths]
        if not any(starts) or not any(file.stat().st_size for file in paths):
            raise SweepError(f"the {role} data of {source!r} must contain text, got empty files.")
    return files


def open_data(identity: dict[str, Any], path: str | None) -> dict[str, Reader]:
    """Return a reader of each split, train and valid; download and split the data if necessary."""
    column = identity.get("column", TEXT)
    if identity["name"] in SHIPPED:  # valid, the small one, comes first
        source = load_object(identity["name"])
        return {split: source.open(identity, split) for split in reversed(SPLITS)}
    if identity["name"] == "hf":
        readers = _open_hub(identity["repository"], identity["revision"], column)
    else:
        check_unchanged(identity, path)
        files = find_files(str(path))
        readers = {role: partial(read_files, paths, column) for role, paths in files.items()}
    return readers if "valid" in readers else split_documents(*readers.values())


def check_unchanged(identity: dict[str, Any], path: str | None) -> None:
    """Refuse files whose content is not the identified one; other sources cannot change."""
    files = {key: value for key, value in identity.items() if key != "column"}
    is_path = identity["name"] == "path"
    if is_path and (path is None or _identify_files(find_files(path)) != files):
        raise SweepError(f"data {path!r} has changed since the sweep was planned. Restore it.")


def _table_format(path: Path) -> str | None:
    return TABLE_FORMATS.get(Path(path.name.lower().removesuffix(".gz")).suffix)


def read_files(paths: list[Path], column: str = TEXT) -> Iterator[Piece]:
    for path in paths:
        characters = 0
        for piece in _read_file(path, column):
            characters += len(piece.text)
            _check_expansion(path, characters)
            yield piece


def _check_expansion(path: Path, size: int) -> None:
    """Refuse a file whose content, so far, is much larger than the file."""
    if size > max(MAX_CHARACTERS, MAX_EXPANSION * path.stat().st_size):
        expected = f"hold at most {MAX_EXPANSION} characters per byte of its files"
        raise SweepError(f"data {str(path)!r} must {expected}. Use other data.")


def _read_file(path: Path, column: str) -> Iterator[Piece]:
    if not (loader := _table_format(path)):
        yield from read_text(path)
    else:
        options: dict[str, Any] = {}
        name = f"data {str(path)!r}"
        files = {"data_files": [glob.escape(str(path))], "split": "train", "streaming": True}
        with hugging_face("datasets", name, "Correct the file.") as datasets:
            if loader == "parquet":
                options = {"batch_size": 100}  # by default a whole row group is expanded
                file = importlib.import_module("pyarrow.parquet").ParquetFile(path).metadata
                groups = map(file.row_group, range(file.num_row_groups))
                _check_expansion(path, sum(group.total_byte_size for group in groups))
            else:
                _check_lines(path, is_json=loader == "json")
            if loader == "csv":
                # Otherwise pandas turns the texts "NA" and "007" into a missing value and a number.
                texts = {"converters": {column: str}, "keep_default_na": False}
                options = {"usecols": [column], **texts}
                with _open_file(path, "rt", encoding="utf-8-sig", newline="") as file:
                    _check_column(column, next(csv.reader(file), [column]), name)
            rows = datasets.load_dataset(loader, **files, **options)
            yield from _read_rows(rows, name, column)


def _check_column(column: str, names: Sequence[str], data: str) -> None:
    if column not in names:
        problem = f"{data} must have the column {column!r}, got {', '.join(names)}"
        raise SweepError(f"{problem}. Name the column of the texts with --text-column.")


def _open_file(path: Path, *arguments: Any, **options: Any) -> IO[Any]:
    """Open a file; a name that ends in .gz means gzip."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    return opener(path, *arguments, **options)  # type: ignore[no-any-return]


def _check_lines(path: Path, is_json: bool) -> None:
    """Refuse lines that `datasets` would read into memory at once, or that would crash pyarrow."""
    with _open_file(path, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            _check_expansion(path, file.tell())
            if len(line) > MAX_LINE_BYTES or (is_json and _depth(line) > MAX_DEPTH):
                most = f"lines of at most {MAX_LINE_BYTES >> 20} MiB, nested {MAX_DEPTH} deep"
                raise SweepError(f"data {str(path)!r} must have {most}. Divide its documents.")


def _depth(line: bytes) -> int:
    """Return how deep the brackets of a line of JSON are nested; 0 if they are too few to count."""
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:
        return 0
    brackets = re.sub(rb'"(?:[^"\\]|\\.)*+"|[^][{}"]++', b"", line)
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def _open_hub(repository: str, revision: str, column: str) -> dict[str, Reader]:
    name = f"data 'hf:{repository}@{revision}'"
    if Path(repository).exists():  # `datasets` would read it instead
        raise SweepError(f"{name} must not be a local path too. Use another folder.")
    with hugging_face("datasets", name, "It must have a split train.") as datasets:
        splits = datasets.load_dataset(repository, revision=revision)
        readers: dict[str, Reader] = {"train": partial(_read_rows, splits["train"], name, column)}
    for split in [split for split in VALID_NAMES if split in splits][:1]:
        readers["valid"] = partial(_read_rows, splits[split], name, column)
    return readers


def _read_rows(rows: Any, data: str, column: str) -> Iterator[Piece]:
    remedy = f"Each row needs a text without NUL in column {column}."
    with hugging_face("datasets", data, remedy):
        for batch in rows.with_format("arrow").iter(batch_size=100):
            _check_column(column, batch.column_names, data)
            for text in batch[column].to_pylist():
                if not isinstance(text, str) or "\0" in text:
                    raise ValueError(f"the text {text!r:.40}")
                text.encode()  # raises if it is not Unicode
                if document := text.strip():
                    yield Piece(document)


def read_text(path: Path, block: int = 1 << 18) -> Iterator[Piece]:
    """Yield the documents of a UTF-8 file in order; a name that ends in .gz means gzip."""
    try:
        with _open_file(path, "rt", encoding="utf-8-sig") as file:
            yield from _documents(file, block)
    except (OSError, UnicodeError, EOFError, zlib.error) as error:
        expected = "readable UTF-8 text, plain or in a whole gzip file"
        raise SweepError(f"data must be {expected}, got {path} ({error}). Check it.") from error


def _documents(file: IO[str], block: int) -> Iterator[Piece]:
    pending, is_open = "", False  # text not yet yielded; True if its document's start was yielded
    limit = min(PIECE_CHARACTERS, block)
    while text := file.read(block):
        text += file.readline(block)  # so that no separator is cut
        if "\0" in text:
            raise UnicodeError("a NUL byte")
        *ended, pending = SEPARATOR_LINE.split(pending + text)
        for document in ended:
            document = document.rstrip() if is_open else document.strip()
            if document or is_open:
                yield Piece(document)
            is_open = False
        if not is_open:
            pending = pending.lstrip()
        while len(pending) > limit:
            cuts = CUT.finditer(pending, max(1, limit - CUT_CHARACTERS), limit)
            cut = max((match.start() for match in cuts), default=limit)
            yield Piece(pending[:cut], ends_document=False)
            pending, is_open = pending[cut:], True
    if (rest := pending.rstrip()) or is_open:
        yield Piece(rest)


def split_documents(read: Reader) -> dict[str, Reader]:
    """Choose for validation the 5 % of the different documents with the least content hashes.

    A single document is divided: the last 5 % of its characters are for validation.
    """
    hashes, digest, characters = array("Q"), hashlib.blake2b(digest_size=8), 0
    for piece in read():
        digest.update(piece.text.encode())
        characters += len(piece.text)
        if piece.ends_document:
            hashes.append(int.from_bytes(digest.digest(), "big"))
            digest = hashlib.blake2b(digest_size=8)
    different = np.unique(np.array(hashes, dtype=np.uint64))
    if len(hashes) == 1:
        is_valid = np.array([False, True])
        read = partial(_divide, read, characters - max(characters // 20, 1))
    elif (count := len(different)) < 2:
        remedy = f"Separate them by lines of {SEPARATOR}, or add a valid.txt."
        raise SweepError(f"data must hold at least two different documents, got {count}. {remedy}")
    else:
        valid_count = max(1, round(SPLIT_RULE["valid_fraction"] * count))
        is_valid = np.array(hashes, dtype=np.uint64) <= different[valid_count - 1]
    return {"train": partial(_select, read, ~is_valid), "valid": partial(_select, read, is_valid)}


def _select(read: Reader, is_selected: np.ndarray) -> Iterator[Piece]:
    index = 0
    for piece in read():
        if is_selected[index]:
            yield piece
        index += piece.ends_document


def _divide(read: Reader, start: int) -> Iterator[Piece]:
    for piece in read():
        length = len(piece.text)
        if 0 <= start < length:
            stop = start + (length - start) // 2
            ends = (piece.text.find(mark, max(start, 1), stop) for mark in "\n ")
            cut = next((end for end in ends if end >= 0), start)
            yield Piece(piece.text[:cut])
            piece = piece._replace(text=piece.text[cut:])
        yield piece
        start -= length  # below 0 once the document is divided
