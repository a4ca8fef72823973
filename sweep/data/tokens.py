"""Prepare data: token ids in memory-mapped files, written once and kept in the cache.

    tokens/<key>/  train.bin  valid.bin    little-endian uint16 (vocabulary ≤ 65,536) or uint32;
                                           a separator id after each document
                   tokenizer.json          except for bytes
                   data.json               counts; written last

The key is the hash of identity, tokenizer and format. A folder appears by one rename, under a lock.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweep.config.trial import TokenizerSettings
from sweep.data.sources import identify_data, open_data
from sweep.data.text import Piece, Reader
from sweep.data.tokenizer import (
    SEPARATOR_ID,
    TOKENIZER,
    TextTokenizer,
    check_tokenizer,
    load_tokenizer,
    pretrained_path,
    train_bpe,
)
from sweep.errors import SweepError
from sweep.trial.files import cache_dir, read_json, sha256_of, write_json

TOKENS_FORMAT = 1
SPLITS = ("train", "valid")
BATCH_CHARACTERS = 1 << 20  # tokenized at once; about 60 bytes of memory per character


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Two splits as token ids."""

    train: NDArray[np.integer]  # (tokens,) memory-mapped; a separator ends each document
    valid: NDArray[np.integer]
    tokenizer_path: Path | None
    vocabulary_used: int  # ids are below this
    train_documents: int
    valid_documents: int
    train_bytes: int  # UTF-8 bytes of the documents, without separators
    valid_bytes: int
    end: int = 0  # a pretrained tokenizer's own end-of-text id
    separator: int = SEPARATOR_ID

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the ids."""
        return load_tokenizer(self.tokenizer_path, self.end)

    def check_window(self, context: int) -> None:
        """Refuse a split that does not fill one window of context + 1 tokens."""
        for split in SPLITS:
            if (count := len(getattr(self, split))) < context + 1:
                raise SweepError(
                    f"the {split} split must hold at least one window of context + 1 = "
                    f"{context + 1} tokens, got {count}. Use more text, or a smaller context."
                )


def find_prepared(identity: dict[str, Any], tokenizer: TokenizerSettings) -> TokenizedText | None:
    """Return the prepared data if it is in the cache; write nothing."""
    folder = _folder(identity, tokenizer)
    try:
        data = read_json(folder / "data.json")
        train, valid = (
            np.memmap(folder / f"{split}.bin", data["dtype"], "r", shape=data[f"{split}_tokens"])
            for split in SPLITS
        )
    except (OSError, SweepError, ValueError):  # absent or damaged
        return None
    path = folder / TOKENIZER if tokenizer.kind != "bytes" else None
    counts = {field.name: data[field.name] for field in fields(TokenizedText) if field.name in data}
    return TokenizedText(train, valid, path, **counts)


def prepare_data(
    identity: dict[str, Any],
    path: str | None,
    tokenizer: TokenizerSettings,
    on_progress: Callable[[str], None] = lambda work: None,
    pretrained: str | Path | None = None,
) -> TokenizedText:
    """Return the tokens of a data set; download and tokenize it unless it is in the cache.

    Args:
        identity: from `identify_data`.
        path: location of the text if the identity is that of a path.
        on_progress: called with a description of each part of the work.
        pretrained: folder of the pretrained model whose tokenizer is used.
    """
    check_tokenizer(tokenizer)
    if (text := find_prepared(identity, tokenizer)) is not None:
        return text
    folder = _folder(identity, tokenizer)
    part = folder.with_name(f"{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the lock of a killed process is free
            if (text := find_prepared(identity, tokenizer)) is not None:
                return text
            for leftover in (part, folder):  # of a killed process, or damaged
                shutil.rmtree(leftover, ignore_errors=True)
            part.mkdir()
            try:
                on_progress("reading the data")
                _write(open_data(identity, path), tokenizer, pretrained, part, on_progress)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise SweepError(
            f"the cache folder {str(cache_dir())!r} must be writable with enough space, but "
            f"{error.strerror or error}. Free some space, or set SWEEP_CACHE to another folder."
        ) from error
    text = find_prepared(identity, tokenizer)
    assert text is not None
    return text


def _write(
    readers: dict[str, Reader],
    settings: TokenizerSettings,
    pretrained: str | Path | None,
    folder: Path,
    on_progress: Callable[[str], None],
) -> None:
    path = folder / TOKENIZER if settings.kind != "bytes" else None
    if settings.kind == "pretrained":
        shutil.copyfile(pretrained_path(pretrained, settings), folder / TOKENIZER)
    elif settings.kind == "bpe":
        on_progress("training the tokenizer")
        train_bpe(readers["train"](), settings.vocabulary, folder / TOKENIZER)
    tokenizer = load_tokenizer(path, settings.end)
    dtype = "<u2" if tokenizer.vocabulary_used <= 65_536 else "<u4"
    data = {"dtype": dtype, "vocabulary_used": tokenizer.vocabulary_used, "end": settings.end}
    for split in SPLITS:
        on_progress(f"tokenizing {split}")
        counts = write_tokens(readers[split](), tokenizer, folder / f"{split}.bin", dtype)
        if counts["documents"] == 0:
            raise SweepError(f"the {split} data must hold a document, got none. Use other text.")
        data |= {f"{split}_{name}": count for name, count in counts.items()}
    write_json(folder / "data.json", data)


def write_tokens(
    pieces: Iterable[Piece], tokenizer: TextTokenizer, path: Path, dtype: str
) -> dict[str, int]:
    """Tokenize pieces into a file, batch by batch; return its tokens, documents and text bytes."""
    tokens = documents = size = 0
    separator = np.array([SEPARATOR_ID], dtype).tobytes()
    with path.open("wb") as file:
        for batch in _batches(pieces):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                file.write(ids.astype(dtype).tobytes() + separator * piece.ends_document)
                tokens += len(ids) + piece.ends_document
                documents += piece.ends_document
                size += len(piece.text.encode())
        file.flush()
        os.fsync(file.fileno())
    return {"tokens": tokens, "documents": documents, "bytes": size}


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def describe_data(source: str, tokenizer: TokenizerSettings) -> dict[str, Any]:
    """Return the identity of a source and, once it is prepared, the sizes of its splits."""
    identity = identify_data(source)
    text = find_prepared(identity, tokenizer)
    splits = {}
    for split in SPLITS if text else ():
        sizes = {name: getattr(text, f"{split}_{name}") for name in ("documents", "bytes")}
        tokens = len(getattr(text, split))
        splits[split] = {**sizes, "tokens": tokens, "bytes_per_token": sizes["bytes"] / tokens}
    return {
        "source": source,
        "identity": identity,
        "tokenizer": tokenizer.model_dump(),
        "prepared": text is not None,
        "vocabulary_used": text.vocabulary_used if text else None,
        "folder": str(_folder(identity, tokenizer)),
        "splits": splits,
    }


def _folder(identity: dict[str, Any], tokenizer: TokenizerSettings) -> Path:
    settings = tokenizer.model_dump() if tokenizer.kind != "bytes" else {"kind": "bytes"}
    key = {"identity": identity, "tokenizer": settings, "format": TOKENS_FORMAT}
    return cache_dir() / "tokens" / sha256_of(key)[:24]
