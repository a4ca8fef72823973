"""Find and identify the data that `--data` names, read its documents, and split them.

A source is `tinystories`, `synthetic`, `hf:OWNER/NAME[@REVISION]`, or the path of a file or folder.
Empty documents are dropped and counted. Data sets of the Hugging Face hub are read by `datasets`.
"""

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sweep.config.hub import hugging_face, parse_hub_name
from sweep.data import synthetic_stories, tinystories
from sweep.data.files import TEXT_ROLE, DataFiles, format_of, locate_files, name_list
from sweep.data.plain_text import SEPARATOR, Piece, Reader, Tally, parse_text
from sweep.data.tables import parse_table, read_split
from sweep.errors import SweepError, cut
from sweep.resources import sha256_of_file
from sweep.trial.files import sha256_of

HUB_VALID_NAMES = ("valid", "validation", "val")  # splits; the identity does not tell which
TEXT = "text"  # name of a table's column unless the identity has another
SPLITS = ("train", "valid")
# The split of data without a validation file; a part of their identity.
SPLIT_RULE: dict[str, Any] = {"by": "document hash", "valid_fraction": 0.05, "version": 1}


@dataclass(frozen=True)
class NamedSource:
    """A source that --data knows by name."""

    identity: Callable[[], dict[str, Any]]  # in values of canonical JSON
    open_split: Callable[[dict[str, Any], str], Reader]  # `train` or `valid` of an identity


NAMED = {
    "tinystories": NamedSource(tinystories.identity, tinystories.open_split),
    "synthetic": NamedSource(synthetic_stories.synthetic_identity, synthetic_stories.open_split),
}


class CountedReader:
    """Read the files or splits of one role in order, without empty documents."""

    def __init__(self, parts: Mapping[str, Reader]) -> None:
        self._parts = parts
        self.tallies: list[Tally] = []  # one per part, once all have been read

    def __call__(self) -> Iterator[Piece]:
        tallies = []
        for name, read in self._parts.items():
            tally = Tally(name)
            yield from tally.keep(read())
            tallies.append(tally)
        self.tallies = tallies


@dataclass(frozen=True)
class OpenData:
    readers: dict[str, Reader]  # by split, train and valid
    counted: dict[str, CountedReader] = field(default_factory=dict)  # by role
    left_out: dict[str, str] = field(default_factory=dict)  # reasons by name, of the hub


def is_path(source: str) -> bool:
    return source not in NAMED and not source.startswith("hf:")


def is_table(identity: dict[str, Any]) -> bool:
    """Return True for data with columns: tables and data sets of the hub."""
    return identity["name"] == "hf" or not {*identity.get("kind", {}).values()} <= {"text"}


def identify_data(source: str, column: str = TEXT) -> dict[str, Any]:
    """Return the identity of a source in canonical JSON values; it becomes part of trial ids."""
    identity = _identify(source)
    if column != TEXT:
        if not is_table(identity):
            got = cut(source)
            raise SweepError(f"text_column applies to tables, got {got!r}. Leave it out.")
        identity["column"] = column
    return identity


def _identify(source: str) -> dict[str, Any]:
    if source in NAMED:
        return dict(NAMED[source].identity())
    if is_path(source):
        return _identify_files(find_files(source).roles)
    repository, revision = parse_hub_name(source, "data")
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):  # a commit needs no network
        remedy = f"Correct the name, or name a downloaded commit: hf:{repository}@COMMIT."
        with hugging_face(f"data 'hf:{repository}'", remedy):
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(repository, revision=revision, timeout=10).sha
    return {"name": "hf", "repository": repository, "revision": revision, "split": SPLIT_RULE}


def _identify_files(files: dict[str, list[Path]]) -> dict[str, Any]:
    identity: dict[str, Any] = {"name": "path", "sha256": {}, "kind": {}}
    for role, paths in files.items():
        pairs = [(format_of(path), sha256_of_file(path)) for path in paths]
        identity["sha256"][role] = pairs[0][1] if len(pairs) == 1 else sha256_of(pairs)
        identity["kind"][role] = "+".join(sorted({kind for kind, _ in pairs}))
    if TEXT_ROLE in files:
        identity["split"] = SPLIT_RULE
    return identity


def find_files(source: str) -> DataFiles:
    """Return the files of a path by role, and what is left out; refuse a role without text."""
    files = locate_files(source)
    for role, paths in files.roles.items():
        starts = [format_of(file) != "text" or _has_text(file) for file in paths]
        if not any(starts) or not any(file.stat().st_size for file in paths):
            got = cut(source)
            raise SweepError(f"the {role} data of {got!r} must contain text, got empty files.")
    return files


def _has_text(path: Path) -> bool:
    return any(piece.text for piece in parse_text(path))


def open_data(identity: dict[str, Any], path: str | None) -> OpenData:
    """Return a reader of each split; download and split the data if necessary."""
    source = NAMED.get(identity["name"])
    if source is not None:  # valid, the small one, comes first
        return OpenData({split: source.open_split(identity, split) for split in reversed(SPLITS)})

    column = identity.get("column", TEXT)
    if identity["name"] == "hf":
        counted, left_out = _open_hub(identity["repository"], identity["revision"], column)
    else:
        refuse_changed_data(identity, path)
        left_out = {}
        files = find_files(str(path)).roles
        counted = {role: read_files(paths, column) for role, paths in files.items()}
    if "valid" in counted:
        return OpenData({split: counted[split] for split in SPLITS}, counted, left_out)
    [whole] = counted.values()
    return OpenData(split_documents(whole), counted, left_out)


def refuse_changed_data(identity: dict[str, Any], path: str | None) -> None:
    """Refuse files whose content is not the identified one; other sources cannot change."""
    files = {key: value for key, value in identity.items() if key != "column"}
    if identity["name"] != "path":
        return
    if path is None or _identify_files(find_files(path).roles) != files:
        got = cut(str(path))
        raise SweepError(f"data {got!r} has changed since the sweep was planned. Restore it.")


def read_files(paths: Iterable[Path], column: str = TEXT) -> CountedReader:
    """Return a reader of files in order."""
    parts: dict[str, Reader] = {}
    for path in paths:
        if format_of(path) == "text":
            parts[path.name] = partial(parse_text, path)
        else:
            parts[path.name] = partial(parse_table, path, column)
    return CountedReader(parts)


def _open_hub(
    repository: str, revision: str, column: str
) -> tuple[dict[str, CountedReader], dict[str, str]]:
    """Return readers by role of the default configuration, and the splits that are left out."""
    name = f"data 'hf:{repository}@{revision}'"
    if Path(repository).exists():  # `datasets` would read it instead
        raise SweepError(f"{name} must not be a local path too. Use another folder.")
    remedy = "It must have one default configuration. Or download its files and name their folder."
    with hugging_face(name, remedy):
        from datasets import load_dataset

        splits = load_dataset(repository, revision=revision)
    if "train" not in splits:
        raise SweepError(
            f"{name} must have a split train, got {name_list([*splits])}. Use other data."
        )
    chosen = {"train": "train"}
    valid = [split for split in splits if split in HUB_VALID_NAMES]
    if len(valid) > 1:
        remedy = "Download its files and name a folder with one of them."
        raise SweepError(f"{name} must have one validation split, got {name_list(valid)}. {remedy}")
    if valid:
        chosen["valid"] = valid[0]
    counted = {}
    for role, split in chosen.items():
        rows = splits[split]
        if rows.info.builder_name == "csv":  # `datasets` guesses types, and shifts long rows
            remedy = f"Download it (hf download --repo-type dataset {repository}), name its folder."
            raise SweepError(f"{name} must hold JSON, Parquet or text, got CSV. {remedy}")
        part = f"{rows.info.config_name}/{split}"
        counted[role] = CountedReader({part: partial(read_split, rows, name, column)})
    others = [split for split in splits if split not in chosen.values()]
    return counted, {split: "a split that is neither train nor valid" for split in others}


def hash_documents(pieces: Iterable[Piece], hashes: "array[int]") -> Iterator[Piece]:
    """Yield the pieces, and append a hash of each document."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece.text.encode())
        if piece.ends_document:
            hashes.append(int.from_bytes(digest.digest(), "big"))
            digest = hashlib.blake2b(digest_size=8)
        yield piece


def split_documents(read: CountedReader) -> dict[str, Reader]:
    """Choose for validation the 5 % of the different documents with the least content hashes.

    A single document is divided: the last 5 % of its characters are for validation.
    """
    hashes = array("Q")
    characters = sum(len(piece.text) for piece in hash_documents(read(), hashes))
    different = np.unique(np.array(hashes, dtype=np.uint64))
    if len(hashes) == 1:
        is_valid = np.array([False, True])
        train_characters = characters - max(characters // 20, 1)
        parts: Reader = partial(_divide, read, train_characters)
    elif len(different) < 2:
        raise _too_few_documents(read.tallies)
    else:
        parts = read
        valid_count = max(1, round(SPLIT_RULE["valid_fraction"] * len(different)))
        is_valid = np.array(hashes, dtype=np.uint64) <= different[valid_count - 1]

    train = partial(_select, parts, ~is_valid)
    valid = partial(_select, parts, is_valid)
    return {"train": train, "valid": valid}


def _too_few_documents(tallies: Iterable[Tally]) -> SweepError:
    """Return the refusal of data without documents, or whose documents are all equal."""
    tallies = list(tallies)
    documents = sum(tally.documents for tally in tallies)
    empty = sum(tally.empty for tally in tallies)
    names = name_list([tally.name for tally in tallies])
    if documents:
        got = f"1, which occurs {documents} times in {names}"
        remedy = "Add other documents, or a validation file."
    else:
        got = f"0, because all {empty} in {names} are empty"
        remedy = f"Add texts, separated by lines of {SEPARATOR} or in rows of a table."
    problem = f"data must hold at least two different documents, got {got}"
    return SweepError(f"{problem}. {remedy}")


def _select(read: Reader, is_selected: np.ndarray) -> Iterator[Piece]:
    index = 0
    for piece in read():
        if is_selected[index]:
            yield piece
        if piece.ends_document:
            index += 1


def _divide(read: Reader, start: int) -> Iterator[Piece]:
    for piece in read():
        length = len(piece.text)
        if 0 <= start < length:
            stop = start + (length - start) // 2
            ends = (piece.text.find(mark, max(start, 1), stop) for mark in "\n ")
            end = next((end for end in ends if end >= 0), start)
            yield Piece(piece.text[:end])
            piece = piece._replace(text=piece.text[end:])
        yield piece
        start -= length  # below 0 once the document is divided
