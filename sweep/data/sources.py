"""Find out what `--data` names, identify it without tokenizing it, and open it.

A source is `tinystories`, `synthetic`, `hf:OWNER/NAME[@REVISION]`, or the path of a file or folder.
"""

import codecs
import contextlib
import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sweep.data.hub import (
    TRAIN,
    VALID,
    VALID_NAMES,
    download,
    open_hub,
    read_table,
    resolve_revision,
    table_format,
    tinystories_identity,
)
from sweep.data.synthetic import synthetic_documents, synthetic_identity
from sweep.data.text import (
    SPLIT_RULE,
    OnProgress,
    Piece,
    Reader,
    not_text,
    open_bytes,
    read_text,
    split_documents,
)
from sweep.errors import SweepError
from sweep.trial.files import cache_dir, read_json, sha256_of, sha256_of_file, write_json

HUB_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@(\S+))?")
SKIPPED_NAMES = (".", "readme", "license", "licence", "notice")  # how such files of a folder begin
SAMPLE_BYTES = 1 << 20  # read to see if a file is text
MEMO_BYTES = 1 << 26  # the hash of a larger file is remembered

Files = dict[str, list[Path]]  # by role: train and valid, or text, which is split by document


def is_path(source: str) -> bool:
    """Return True if a source is the path of a file or folder."""
    return source not in ("tinystories", "synthetic") and not source.startswith("hf:")


def identify_data(source: str) -> dict[str, Any]:
    """Return the identity of a source in canonical JSON values; it becomes part of trial ids."""
    if source == "tinystories":
        return tinystories_identity()
    if source == "synthetic":
        return synthetic_identity()
    if is_path(source):
        return _identify_files(find_files(source))
    if not (match := HUB_NAME.fullmatch(source)):
        raise SweepError(f"data must have the form hf:OWNER/NAME[@REVISION], got {source!r}.")
    revision = resolve_revision(match[1], match[2])
    return {"name": "hf", "repository": match[1], "revision": revision, "split": SPLIT_RULE}


def find_files(source: str, minimum_bytes: int = 1) -> Files:
    """Return the files of a path by role; refuse binary or damaged files and too little text."""
    path = Path(source).expanduser().absolute()
    if not source or not path.exists():
        raise SweepError(
            "data must be tinystories, synthetic, hf:OWNER/NAME[@REVISION], or the path of an "
            f"existing file or folder, got {source!r}. Choose one of them."
        )
    files = _files_of_folder(path) if path.is_dir() else {"text": [path]}
    for role, paths in files.items():
        size = sum(_text_bytes(path) for path in paths)
        if size < minimum_bytes:
            raise SweepError(
                f"the {role} data of {source!r} must hold at least {minimum_bytes} bytes of text, "
                f"got {size or 'an empty file'}. Use more text, or a smaller context."
            )
    return files


def check_text_length(source: str, context: int) -> None:
    """Refuse files that are too short for one window of `context` + 1 tokens of at least a byte."""
    if is_path(source):
        find_files(source, context + 1)


def _files_of_folder(folder: Path) -> Files:
    usable = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.lower().startswith(SKIPPED_NAMES)
    )
    train = [path for path in usable if path.name.lower().split(".")[0] == "train"]
    valid = [path for path in usable if path.name.lower().split(".")[0] in VALID_NAMES]
    if not usable or len(train) > 1 or len(valid) > len(train):
        names = ", ".join(path.name for path in [*train, *valid]) or "none"
        raise SweepError(
            f"data folder {str(folder)!r} must hold text files, at most one named train and, "
            f"only with that, one named valid, got {names}. Add, rename or remove files."
        )
    return {"train": train, "valid": valid} if valid else {"text": train or usable}


def _text_bytes(path: Path) -> int:
    """Return the bytes of text at the start of a file; refuse a binary or damaged file."""
    with open_bytes(path) as (content, _):
        sample = content.read(SAMPLE_BYTES)
        if table_format(path) == "parquet":  # compressed
            return SAMPLE_BYTES if sample else 0
        is_whole = len(sample) < SAMPLE_BYTES
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(sample, final=is_whole)
    if "\0" in text:
        raise not_text(path)
    return len(sample) if text.strip() else 0


def _identify_files(files: Files) -> dict[str, Any]:
    """Return the identity of files: contents and formats by role, and no names."""
    identity: dict[str, Any] = {"name": "path", "sha256": {}, "kind": {}}
    for role, paths in files.items():
        pairs = [(table_format(path) or "text", hash_file(path)) for path in paths]
        identity["sha256"][role] = pairs[0][1] if len(pairs) == 1 else sha256_of(pairs)
        identity["kind"][role] = "+".join(sorted({kind for kind, _ in pairs}))
    return identity | ({"split": SPLIT_RULE} if "text" in files else {})


def hash_file(path: Path) -> str:
    """Return the sha256 of a file; that of a large one is remembered by path, size, time, inode."""
    status = path.stat()
    if status.st_size < MEMO_BYTES:
        return sha256_of_file(path)
    key = [str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ino]
    memo = cache_dir() / "hashes" / f"{sha256_of(key)[:24]}.json"
    with contextlib.suppress(OSError, SweepError):
        return str(read_json(memo)["content_sha256"])
    digest = sha256_of_file(path)
    with contextlib.suppress(OSError):  # without a writable cache only time is lost
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_json(memo, {"content_sha256": digest})
    return digest


def estimate_training_bytes(identity: dict[str, Any], path: str | None) -> int | None:
    """Return the approximate bytes of training text; None if they are not known yet."""
    if identity["name"] == "tinystories":
        return TRAIN.size
    if identity["name"] == "synthetic":
        sample = [len(text) for text in islice(synthetic_documents(identity, "train"), 100)]
        return int(identity["documents"]["train"] * sum(sample) / len(sample))
    files = find_files(path) if path else {}
    return sum(path.stat().st_size for path in next(iter(files.values()), [])) or None


def open_data(
    identity: dict[str, Any], path: str | None, on_progress: OnProgress
) -> dict[str, Reader]:
    """Return a reader of each split, train and valid; download and split the data if need be."""
    if identity["name"] == "synthetic":
        return {split: partial(_stories, identity, split) for split in ("train", "valid")}
    readers: dict[str, Reader] = {}
    if identity["name"] == "tinystories":
        for split, file in (("valid", VALID), ("train", TRAIN)):  # the small file first
            on_progress(f"downloading {file.name}", 0.0)
            readers[split] = partial(read_text, download(file))
    elif identity["name"] == "hf":
        on_progress(f"downloading {identity['repository']}", 0.0)
        readers = open_hub(identity["repository"], identity["revision"])
    elif path is None or _identify_files(files := find_files(path)) != identity:
        raise SweepError(
            f"data {path!r} must be unchanged since it was planned, but its content differs. "
            "Restore it, or start a new sweep in another folder."
        )
    else:
        readers = {role: partial(_read_files, paths) for role, paths in files.items()}
    return readers if "valid" in readers else split_documents(readers.popitem()[1], on_progress)


def _stories(identity: dict[str, Any], split: str) -> Iterator[Piece]:
    for index, document in enumerate(synthetic_documents(identity, split), start=1):
        yield Piece(document, True, index / identity["documents"][split])


def _read_files(paths: list[Path]) -> Iterator[Piece]:
    for index, path in enumerate(paths):
        for piece in read_table(path) if table_format(path) else read_text(path):
            yield piece._replace(fraction_read=(index + piece.fraction_read) / len(paths))
