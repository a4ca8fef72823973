"""Prepared data: token ids in memory-mapped files, made once and kept in the cache.

    tokens/<key>/  train.bin  valid.bin    little-endian uint16 (vocabulary ≤ 65,536) or uint32;
                                           a separator id after each document
                   tokenizer.json          where there is one
                   data.json               counts; written last

The key is the hash of identity, tokenizer and format. A folder appears by one rename, under a lock.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweep.config.paths import cache_dir
from sweep.config.trial import TokenizerSettings
from sweep.data.cache import OnProgress, cache_error, locked
from sweep.data.identity import identify_data, identify_files
from sweep.data.sources import TextFile, find_text_files
from sweep.data.synthetic import synthetic_documents
from sweep.data.text import Corpus, Piece, open_text
from sweep.data.tinystories import download_dataset
from sweep.data.tokenizer import (
    SEPARATOR_ID,
    TextTokenizer,
    check_tokenizer,
    load_tokenizer,
    train_bpe,
)
from sweep.errors import SweepError
from sweep.trial.files import read_json, sha256_of, sha256_of_file, write_json

TOKENS_FORMAT = 1
TOKENIZER = "tokenizer.json"
BATCH_CHARACTERS = 1 << 20  # tokenized at once; about 60 bytes of memory per character


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Two splits as token ids."""

    train: NDArray[np.integer]  # (tokens,) memory-mapped; a separator ends each document
    valid: NDArray[np.integer]
    separator: int
    vocabulary_used: int  # ids are below this
    train_documents: int
    valid_documents: int
    train_bytes: int  # UTF-8 bytes of the documents, without separators
    valid_bytes: int
    tokenizer_path: Path | None
    end: int = 0  # a pretrained tokenizer's own id of the end of a text

    def check_window(self, context: int) -> None:
        """Refuse a split that does not fill one window.

        Raises:
            SweepError: naming the split and its tokens.
        """
        for name, tokens in (("train", self.train), ("valid", self.valid)):
            if len(tokens) < context + 1:
                raise SweepError(
                    f"the {name} split must hold at least one window of context + 1 = "
                    f"{context + 1} tokens, got {len(tokens)}. Give more text, or a smaller "
                    "context."
                )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without a separator."""
        return [int(i) for i in self.tokenizer.encode_batch([text])[0]]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of ids; ids that stand for nothing are left out."""
        return self.tokenizer.decode([int(i) for i in ids])

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """What made the ids."""
        return load_tokenizer(self.tokenizer_path, self.end)


def find_prepared(identity: dict[str, Any], tokenizer: TokenizerSettings) -> TokenizedText | None:
    """Return the prepared data if it is in the cache; prepares and writes nothing."""
    return _load(_folder(identity, tokenizer))


def prepare_data(
    identity: dict[str, Any],
    path: str | None,
    tokenizer: TokenizerSettings,
    on_progress: OnProgress | None = None,
    pretrained: str | Path | None = None,
) -> TokenizedText:
    """Return the tokens of a data set, downloading and tokenizing what is not in the cache yet.

    Args:
        identity: from `identify_data`.
        path: where the text is, for an identity of a path.
        on_progress: called with what is being done and the fraction done, 0 to 1.
        pretrained: folder of the pretrained model whose tokenizer it is, if it is one's.

    Raises:
        SweepError: for text that is not what `identity` says or cannot be used, a vocabulary below
            the tokenizer's minimum, no network, or a cache that cannot be written.
    """
    check_tokenizer(tokenizer)
    report = on_progress or (lambda stage, fraction: None)
    folder = _folder(identity, tokenizer)
    if (found := _load(folder)) is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock")):
            if (found := _load(folder)) is not None:  # another process was faster
                return found
            part = folder.with_name(f"{folder.name}.part")
            for leftover in (part, folder):  # of a killed process, or damaged
                if leftover.exists():
                    shutil.rmtree(leftover)
            part.mkdir()
            try:
                if tokenizer.kind == "pretrained":
                    shutil.copyfile(pretrained_path(pretrained, tokenizer), part / TOKENIZER)
                _write(_open_corpus(identity, path, report, on_progress), tokenizer, part, report)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise cache_error(error) from error
    prepared = _load(folder)
    assert prepared is not None
    return prepared


def describe_data(source: str, tokenizer: TokenizerSettings) -> dict[str, Any]:
    """Return what `sweep data info` prints: identity and, once prepared, the sizes of the splits.

    Raises:
        SweepError: as `identify_data`.
    """
    identity = identify_data(source)
    found = find_prepared(identity, tokenizer)
    splits = {}
    if found is not None:
        for name in ("train", "valid"):
            tokens, size = len(getattr(found, name)), getattr(found, f"{name}_bytes")
            splits[name] = {
                "documents": getattr(found, f"{name}_documents"),
                "bytes": size,
                "tokens": tokens,
                "bytes_per_token": size / tokens,
            }
    return {
        "source": source,
        "identity": identity,
        "tokenizer": tokenizer.model_dump(),
        "prepared": found is not None,
        "vocabulary_used": found.vocabulary_used if found else None,
        "folder": str(_folder(identity, tokenizer)),
        "splits": splits,
    }


def _folder(identity: dict[str, Any], tokenizer: TokenizerSettings) -> Path:
    settings = tokenizer.model_dump() if tokenizer.kind != "bytes" else {"kind": "bytes"}
    key = {"identity": identity, "tokenizer": settings, "format": TOKENS_FORMAT}
    return cache_dir() / "tokens" / sha256_of(key)[:24]


def _load(folder: Path) -> TokenizedText | None:
    try:
        data = read_json(folder / "data.json")
        kind = np.dtype(data["dtype"])
        for split in ("train", "valid"):
            size = (folder / f"{split}.bin").stat().st_size
            if size != data[f"{split}_tokens"] * kind.itemsize:
                return None
        tokenizer_path = folder / TOKENIZER if data["kind"] != "bytes" else None
        if tokenizer_path and not tokenizer_path.is_file():
            return None
        train, valid = (
            np.memmap(folder / f"{split}.bin", dtype=kind, mode="r") for split in ("train", "valid")
        )
    except (OSError, SweepError):
        return None
    return TokenizedText(
        train=train,
        valid=valid,
        separator=SEPARATOR_ID,
        vocabulary_used=data["vocabulary_used"],
        train_documents=data["train_documents"],
        valid_documents=data["valid_documents"],
        train_bytes=data["train_bytes"],
        valid_bytes=data["valid_bytes"],
        tokenizer_path=tokenizer_path,
        end=data.get("end", 0),
    )


def pretrained_path(folder: str | Path | None, tokenizer: TokenizerSettings) -> Path:
    """Return the tokenizer.json of a pretrained model, which must be the one that was planned.

    Raises:
        SweepError: if it is another, or not there.
    """
    path = Path(folder or ".") / TOKENIZER
    if not path.is_file() or sha256_of_file(path) != tokenizer.sha256:
        raise SweepError(
            f"{path} must be the tokenizer that was planned with, and is not. Restore it, or "
            "start a new sweep in another folder."
        )
    return path


def _open_corpus(
    identity: dict[str, Any], path: str | None, report: OnProgress, on_download: OnProgress | None
) -> Corpus:
    if identity["name"] == "synthetic":
        return Corpus(
            lambda: _synthetic_pieces(identity, "train"),
            lambda: _synthetic_pieces(identity, "valid"),
        )
    if identity["name"] == "tinystories":
        train, valid = download_dataset(on_progress=on_download)
        return open_text([TextFile(train, "train", "text"), TextFile(valid, "valid", "text")])
    if path is None:
        raise SweepError("data of a path must be prepared from that path, got none. Name it.")
    files = find_text_files(path)
    if identify_files(files) != identity:
        raise SweepError(
            f"data {path!r} must be unchanged since it was planned, but its content differs. "
            "Restore it, or start a new sweep in another folder."
        )
    return open_text(files, lambda fraction: report("splitting by document", fraction))


def _synthetic_pieces(identity: dict[str, Any], split: str) -> Iterator[Piece]:
    count = identity["documents"][split]
    for index, document in enumerate(synthetic_documents(identity, split), start=1):
        yield Piece(document, True, index / count)


def _write(corpus: Corpus, settings: TokenizerSettings, folder: Path, report: OnProgress) -> None:
    tokenizer_path = folder / TOKENIZER if settings.kind != "bytes" else None
    if settings.kind == "bpe":
        pieces = _reported(corpus.train(), "training the tokenizer", report)
        train_bpe(pieces, settings.vocabulary, folder / TOKENIZER)
    tokenizer = load_tokenizer(tokenizer_path, settings.end)
    dtype = "<u2" if tokenizer.vocabulary_used <= 65_536 else "<u4"
    data = {"kind": settings.kind, "dtype": dtype, "vocabulary_used": tokenizer.vocabulary_used}
    data |= {"end": settings.end} if settings.end else {}
    for split, pieces in (("train", corpus.train()), ("valid", corpus.valid())):
        counts = write_tokens(
            _reported(pieces, f"tokenizing {split}", report),
            tokenizer,
            folder / f"{split}.bin",
            dtype,
        )
        data |= {f"{split}_{name}": count for name, count in counts.items()}
        if counts["documents"] == 0:
            raise SweepError(
                f"the {split} data must hold at least one document, got only white space and "
                "separators. Give a file with text."
            )
    write_json(folder / "data.json", data)


def _reported(pieces: Iterable[Piece], stage: str, report: OnProgress) -> Iterator[Piece]:
    last = -1.0
    for piece in pieces:
        if piece.fraction_read >= last + 0.005:
            last = piece.fraction_read
            report(stage, last)
        yield piece
    report(stage, 1.0)


def write_tokens(
    pieces: Iterable[Piece],
    tokenizer: TextTokenizer,
    path: Path,
    dtype: str,
    batch_characters: int = BATCH_CHARACTERS,
) -> dict[str, int]:
    """Tokenize pieces into a file, batch by batch; return its tokens, documents and text bytes."""
    counts = {"tokens": 0, "documents": 0, "bytes": 0}
    separator = np.array([SEPARATOR_ID], dtype=dtype)
    batch: list[Piece] = []
    characters = 0
    with path.open("wb") as file:

        def flush() -> None:
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                file.write(ids.astype(dtype).tobytes())
                counts["tokens"] += len(ids)
                counts["bytes"] += len(piece.text.encode())
                if piece.ends_document:
                    file.write(separator.tobytes())
                    counts["tokens"] += 1
                    counts["documents"] += 1
            batch.clear()

        for piece in pieces:
            batch.append(piece)
            characters += len(piece.text)
            if characters >= batch_characters:
                flush()
                characters = 0
        flush()
        file.flush()
        os.fsync(file.fileno())
    return counts
