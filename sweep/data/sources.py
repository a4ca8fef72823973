"""Find out what `--data` names, identify it without tokenizing it, and open it.

A source is `tinystories`, `synthetic`, `hf:OWNER/NAME[@REVISION]`, or the path of a file or folder.
"""

import codecs
import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sweep.config.paths import cache_dir
from sweep.data.synthetic import synthetic_documents, synthetic_identity
from sweep.data.tables import VALID_NAMES, open_hub, read_table, resolve_revision, table_format
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
from sweep.data.tinystories import TRAIN, VALID, download, tinystories_identity
from sweep.errors import SweepError
from sweep.trial.files import read_json, sha256_of, sha256_of_file, write_json

HUB_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@(\S+))?")
SKIPPED_NAMES = (".", "readme", "license", "licence", "notice")  # how such files of a folder begin
SAMPLE_BYTES = 1 << 20  # read to see if a file is text
MEMO_BYTES = 1 << 26  # the hash of a larger file is remembered

Files = dict[str, list[Path]]  # by role: train and valid, or text, which is split by document


def is_path(source: str) -> bool:
    """Return True if a source is the path of a file or folder."""
    return source not in ("tinystories", "synthetic") and not source.startswith("hf:")


def identify_data(source: str) -> dict[str, Any]:
    """Return the identity of a source in canonical JSON values; it becomes part of trial ids.

    Writes nothing but the hashes of large files, into the cache.

    Raises:
        SweepError: if there is no such source, or it cannot be text.
    """
    if source == "tinystories":
        return tinystories_identity()
    if source == "synthetic":
        return synthetic_identity()
    if is_path(source):
        return _identify_files(find_files(source))
    if not (match := HUB_NAME.fullmatch(source)):
        raise SweepError(f"data must have the form hf:OWNER/NAME[@REVISION], got {source!r}.")
    revision = resolve_revision(match[1], match[2])
    return {"name": "hf", "repository": match[1], "revision": revision, "split": dict(SPLIT_RULE)}


def find_files(source: str) -> Files:
    """Return the files of a path by role.

    Raises:
        SweepError: if there is none, or one is binary or damaged, or those of a role are empty.
    """
    path = Path(source).expanduser().absolute()
    try:
        if source and path.is_dir():
            files = _files_of_folder(path)
        elif source and path.is_file():
            files = {"text": [path]}
        else:
            raise SweepError(
                "data must be tinystories, synthetic, hf:OWNER/NAME[@REVISION], or the path of an "
                f"existing file or folder, got {source!r}. Choose one of them."
            )
        for role, paths in files.items():
            if not sum(_has_text(path) for path in paths):  # of each path: all are checked
                raise SweepError(
                    f"data must hold text, got an empty file or only white space in the {role} "
                    f"data of {source!r}. Use a file with text."
                )
    except PermissionError as error:
        name = error.filename
        raise SweepError(
            f"data must be readable, got {name!r}. Correct its permissions."
        ) from error
    return files


def _files_of_folder(folder: Path) -> Files:
    usable = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.lower().startswith(SKIPPED_NAMES)
    )
    files: Files = {}
    for role, stems in (("train", ("train",)), ("valid", VALID_NAMES)):
        paths = [path for path in usable if path.name.lower().split(".")[0] in stems]
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths)
            raise SweepError(
                f"data folder {str(folder)!r} must hold one {role} file, got {names}. Remove one."
            )
        if paths:
            files[role] = paths
    if not usable or ("valid" in files and "train" not in files):
        raise SweepError(
            f"data folder {str(folder)!r} must hold a train file, or text files, got "
            f"{'only a validation file' if usable else 'none'}. Name the training text train.txt."
        )
    return files if "valid" in files else {"text": files.get("train", usable)}


def _has_text(path: Path) -> bool:
    """Return whether the start of a file has text; refuse it if that is binary or damaged."""
    with open_bytes(path) as (content, _):
        sample = content.read(SAMPLE_BYTES)
        is_whole = len(sample) < SAMPLE_BYTES
        if table_format(path):
            return bool(sample)
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(sample, final=is_whole)
    if "\0" in text:
        raise not_text(path)
    return bool(text.strip()) or not is_whole


def _identify_files(files: Files) -> dict[str, Any]:
    """Return the identity of files: contents and formats by role, and no names."""
    identity: dict[str, Any] = {"name": "path", "sha256": {}, "kind": {}}
    for role, paths in files.items():
        pairs = [(table_format(path) or "text", hash_file(path)) for path in paths]
        identity["sha256"][role] = pairs[0][1] if len(pairs) == 1 else sha256_of(pairs)
        identity["kind"][role] = "+".join(sorted({kind for kind, _ in pairs}))
    return identity | ({"split": dict(SPLIT_RULE)} if "text" in files else {})


def hash_file(path: Path) -> str:
    """Return the sha256 of a file; that of a large one is remembered by path, size, time, inode."""
    status = path.stat()
    if status.st_size < MEMO_BYTES:
        return sha256_of_file(path)
    key = [str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ino]
    memo = cache_dir() / "hashes" / f"{sha256_of(key)[:24]}.json"
    with contextlib.suppress(OSError, SweepError, KeyError):
        return str(read_json(memo)["content_sha256"])
    digest = sha256_of_file(path)
    with contextlib.suppress(OSError):  # without a writable cache only time is lost
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_json(memo, {"content_sha256": digest})
    return digest


def check_text_length(source: str, context: int) -> None:
    """Refuse files that are shorter than one window of `context` inputs, without tokenizing.

    A token is at least one byte, so this refuses only data that would be refused later too.
    """
    for role, paths in find_files(source).items() if is_path(source) else ():
        size = 0
        for path in paths:
            with open_bytes(path) as (content, _):
                size += len(content.read(context + 1))
        if size < context + 1 and table_format(paths[0]) != "parquet":  # which is compressed
            raise SweepError(
                f"the {role} data of {source!r} must be at least one window of context + 1 = "
                f"{context + 1} tokens, got {size} bytes. Use more text, or a smaller context."
            )


def estimate_training_bytes(identity: dict[str, Any], path: str | None) -> int | None:
    """Return the approximate bytes of training text; None if they are not known yet."""
    if identity["name"] == "tinystories":
        return TRAIN.size
    if identity["name"] == "synthetic":
        sample = [len(text) for text in islice(synthetic_documents(identity, "train"), 100)]
        return int(identity["documents"]["train"] * sum(sample) / len(sample))
    files = find_files(path) if path else {}
    paths = files.get("train") or files.get("text", [])
    return sum(path.stat().st_size for path in paths) or None


def open_data(
    identity: dict[str, Any], path: str | None, on_progress: OnProgress
) -> dict[str, Reader]:
    """Return a reader of each split, train and valid; download and split the data if need be.

    Raises:
        SweepError: if the data cannot be read or is not what `identity` describes.
    """
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
    if len(readers) == 1:
        [read] = readers.values()
        return split_documents(read, on_progress)
    return readers


def _stories(identity: dict[str, Any], split: str) -> Iterator[Piece]:
    for index, document in enumerate(synthetic_documents(identity, split), start=1):
        yield Piece(document, True, index / identity["documents"][split])


def _read_files(paths: Sequence[Path]) -> Iterator[Piece]:
    for index, path in enumerate(paths):
        for piece in read_table(path) if table_format(path) else read_text(path):
            yield piece._replace(fraction_read=(index + piece.fraction_read) / len(paths))
