"""Tokenize data, keep the token ids in memory-mapped files in the cache, and order their windows.

    tokens/<key>/  train.bin  valid.bin  little-endian uint16 (vocabulary ≤ 65,536) or uint32
                   tokenizer.json        except for bytes
                   data.json             counts, also of each file that was read, and hashes;
                                         written last

A tokenizer is byte-level BPE by the library `tokenizers`, a pretrained model's, or plain bytes. A
separator ends each document: a pretrained tokenizer's end-of-text id, otherwise id 0.
"""

import fcntl
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweep.config.hub import model_folder
from sweep.config.trial import TokenizerSettings
from sweep.data import sources
from sweep.data.plain_text import SEPARATOR, Piece
from sweep.errors import SweepError, user_code
from sweep.resources import sha256_of_file
from sweep.trial import watchdog
from sweep.trial.files import cache_dir, read_json, require_cache, sha256_of, write_json
from sweep.trial.lease import try_lock

TOKENIZER = "tokenizer.json"
TOKENS_FORMAT = 4  # increased if the files, or the reading of texts, change
TSV_TOKENS_FORMAT = 5  # format 4 joined the rows between two quotes that began fields
Ints = NDArray[np.int64]
TRAINING_BYTES = 1 << 28  # BPE learns its merges from this much of the training split
LOCK_SECONDS = 0.1  # between two tries to take the lock of another preparation
BATCH_CHARACTERS = 1 << 19  # tokenized at once; about 60 bytes of memory per character


class TextTokenizer:
    """A tokenizer of the library `tokenizers`, or plain bytes. Id `end` separates documents."""

    def __init__(self, path: Path | None, end: int = 0, vocabulary: int | None = None) -> None:
        self.end = end
        self._library = None
        self.vocabulary_used = 256
        if path is not None:
            from tokenizers import Tokenizer

            with user_code(f"{path} must be a tokenizer of the library tokenizers"):
                self._library = Tokenizer.from_file(str(path))
            self._library.encode_special_tokens = True  # as ordinary text
            self._library.no_truncation()  # a saved tokenizer may have these two enabled
            self._library.no_padding()
            ids = self._library.get_vocab().values()
            self.vocabulary_used = max(*ids, end, 0) + 1
            if vocabulary is not None and self.vocabulary_used > vocabulary:
                problem = f"got id {self.vocabulary_used - 1} and vocabulary {vocabulary}"
                raise SweepError(f"the model must know all ids of {path}, {problem}. Use its own.")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, without separators; all cores work on one batch."""
        if self._library is None:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        if self._library is None:
            return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")
        return str(self._library.decode(list(ids), skip_special_tokens=False))


def refuse_small_vocabulary(settings: TokenizerSettings) -> None:
    least = {"bpe": 257, "bytes": 256}.get(settings.kind, 0)  # for bpe with the separator
    if settings.vocabulary < least:
        actual = f"{settings.vocabulary} for the tokenizer {settings.kind}"
        raise SweepError(f"vocabulary must be at least {least}, got {actual}.")


def pretrained_path(folder: str | Path | None, tokenizer: TokenizerSettings) -> Path:
    path = model_folder(str(folder or ".")) / TOKENIZER
    if not path.is_file() or sha256_of_file(path) != tokenizer.sha256:
        raise SweepError(f"the tokenizer {path} is missing or has changed. Restore it.")
    return path


def train_bpe(pieces: Iterable[Piece], vocabulary: int, path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def first_texts() -> Iterator[str]:
        size = 0
        for piece in pieces:
            yield piece.text
            size += len(piece.text.encode())
            if size >= TRAINING_BYTES:
                return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_texts(), trainer)
    tokenizer.save(str(path))


def count_windows(token_count: int, context: int) -> int:
    """Return how many windows of context + 1 tokens a text has, each of which overlaps by one."""
    return (token_count - 1) // context


@dataclass(frozen=True, eq=False)
class TokenizedText:
    train: NDArray[np.integer]  # (tokens,) memory-mapped; a separator ends each document
    valid: NDArray[np.integer]
    tokenizer_path: Path | None
    train_documents: int
    valid_documents: int
    valid_bytes: int  # UTF-8 bytes of the documents, without separators
    end: int  # id that ends each document
    counts: dict[str, Any]  # the content of data.json

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.tokenizer_path, self.end)

    def refuse_short_splits(self, context: int) -> None:
        """Refuse a split that does not fill a window."""
        for split, tokens in (("train", self.train), ("valid", self.valid)):
            if len(tokens) < context + 1:
                raise SweepError(
                    f"the {split} split must hold at least one window of context + 1 = "
                    f"{context + 1} tokens, got {len(tokens)}. Use more text or a smaller context."
                )


def find_prepared(
    identity: dict[str, Any], tokenizer: TokenizerSettings, verify: bool = False
) -> TokenizedText | None:
    """Return the prepared data if the cache has them, with intact files if `verify`."""
    folder = prepared_folder(identity, tokenizer)
    try:
        data = read_json(folder / "data.json")
        if data.get("key") != folder.name:
            return None
        train, valid = (
            np.memmap(folder / f"{split}.bin", data["dtype"], "r", shape=data[f"{split}_tokens"])
            for split in sources.SPLITS
        )
        hashes = data["sha256_of_files"].items()
        if verify and any(_find_hash(folder / name) != sha256 for name, sha256 in hashes):
            return None
    except (OSError, SweepError, ValueError):  # absent or damaged
        return None
    path = folder / TOKENIZER if tokenizer.kind != "bytes" else None
    return TokenizedText(
        train=train,
        valid=valid,
        tokenizer_path=path,
        train_documents=data["train_documents"],
        valid_documents=data["valid_documents"],
        valid_bytes=data["valid_bytes"],
        end=data["end"],
        counts=data,
    )


def _find_hash(path: Path) -> str:
    """Return the sha256 of a file, which this process computes again only if the file changes."""
    status = path.stat()
    return _hash_version(
        path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


@lru_cache(maxsize=16)
def _hash_version(path: Path, *version: int) -> str:
    return sha256_of_file(path)


def prepare_data(
    identity: dict[str, Any],
    path: str | None,  # file or folder of text
    tokenizer: TokenizerSettings,
    on_progress: Callable[[str], None] = lambda work: None,
    pretrained: str | Path | None = None,  # the model whose tokenizer is used
) -> TokenizedText:
    """Return the tokens of a data set; download and tokenize it unless the cache has them."""
    refuse_small_vocabulary(tokenizer)
    text = find_prepared(identity, tokenizer, verify=True)
    if text is not None:
        return text

    require_cache()
    folder = prepared_folder(identity, tokenizer)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock_path = folder.with_name(f"{folder.name}.lock")
        with lock_path.open("a") as lock:
            # The lock of a killed process is free.
            while not try_lock(lock, lock_path, fcntl.LOCK_EX, "Change SWEEP_CACHE"):
                time.sleep(LOCK_SECONDS)
            text = find_prepared(identity, tokenizer, verify=True)
            if text is not None:
                return text

            if folder.exists():  # left by a killed process, or damaged
                on_progress(f"{folder} is incomplete or damaged; preparing the data again")
                shutil.rmtree(folder)
            folder.mkdir()
            try:
                on_progress("Reading the data")
                opened = sources.open_data(identity, path)
                _write(opened, tokenizer, pretrained, folder, on_progress)
                sources.refuse_changed_data(identity, path)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        raise SweepError(f"the cache cannot be written ({error}). Change SWEEP_CACHE.") from error
    text = find_prepared(identity, tokenizer)
    assert text is not None
    return text


def _write(
    opened: sources.OpenData,
    settings: TokenizerSettings,
    pretrained: str | Path | None,
    folder: Path,
    on_progress: Callable[[str], None],
) -> None:
    path = folder / TOKENIZER if settings.kind != "bytes" else None
    if settings.kind == "pretrained":
        shutil.copyfile(pretrained_path(pretrained, settings), folder / TOKENIZER)
    elif settings.kind == "bpe":
        on_progress("Training the tokenizer")
        train_bpe(opened.readers["train"](), settings.vocabulary, folder / TOKENIZER)

    tokenizer = TextTokenizer(path, settings.end, settings.vocabulary)
    dtype = "<u2" if tokenizer.vocabulary_used <= 65_536 else "<u4"
    data: dict[str, Any] = {
        "dtype": dtype,
        "vocabulary_used": tokenizer.vocabulary_used,
        "end": settings.end,
    }
    hashes = {split: array("Q") for split in sources.SPLITS}
    for split in sources.SPLITS:
        on_progress(f"Tokenizing {split}")
        pieces = sources.hash_documents(opened.readers[split](), hashes[split])
        counts = write_tokens(pieces, tokenizer, folder / f"{split}.bin", dtype)
        if counts["documents"] == 0:
            raise SweepError(_no_document(split, opened.counted.get(split)))
        data |= {f"{split}_{name}": count for name, count in counts.items()}
    in_train = np.isin(np.array(hashes["valid"]), np.array(hashes["train"]))
    data["valid_documents_in_train"] = int(in_train.sum())

    # By role. The names and the files left out belong to this folder; others may share the tokens.
    tallies = {}
    for role, reader in opened.counted.items():
        tallies[role] = [asdict(tally) for tally in reader.tallies]
    data["files"] = tallies
    data["left_out"] = opened.left_out

    files = {file.name: sha256_of_file(file) for file in sorted(folder.iterdir())}
    write_json(folder / "data.json", {**data, "key": folder.name, "sha256_of_files": files})


def _no_document(split: str, reader: sources.CountedReader | None) -> str:
    rows = sum(tally.empty for tally in reader.tallies) if reader else 0
    got = f"got {rows} that are all empty" if rows else "got none"
    return f"the {split} data must hold a document, {got}. Add one."


def write_tokens(
    pieces: Iterable[Piece], tokenizer: TextTokenizer, path: Path, dtype: str
) -> dict[str, int]:
    counts = dict.fromkeys(("tokens", "documents", "bytes"), 0)
    separator = np.array([tokenizer.end], dtype).tobytes()
    with path.open("wb") as file:
        for batch in _batches(pieces):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                file.write(ids.astype(dtype).tobytes())
                counts["tokens"] += len(ids)
                counts["bytes"] += len(piece.text.encode())
                if piece.ends_document:
                    file.write(separator)
                    counts["tokens"] += 1
                    counts["documents"] += 1
        file.flush()
        os.fsync(file.fileno())
    return counts


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            watchdog.progress()
            yield batch
            batch = []
            characters = 0
    yield batch


def prepared_folder(identity: dict[str, Any], tokenizer: TokenizerSettings) -> Path:
    settings = tokenizer.model_dump() if tokenizer.kind != "bytes" else {"kind": "bytes"}
    kinds = "+".join(identity.get("kind", {}).values()).split("+")
    tokens_format = TSV_TOKENS_FORMAT if "tsv" in kinds else TOKENS_FORMAT
    key = {"identity": identity, "tokenizer": settings, "format": tokens_format}
    return cache_dir() / "tokens" / sha256_of(key)[:24]


@lru_cache(maxsize=2)  # a batch may end in the next epoch
def _permutation(windows: int, seed: int, epoch: int) -> Ints:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(windows)


class SequenceStream:
    """The endless order of sequences, the same at every batch size: a permutation per epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size  # sequences of an epoch
        self._seed = seed

    def indices(self, start: int, count: int) -> Ints:
        """Return the sequences at stream positions start … start + count − 1, (count,)."""
        parts = [np.empty(0, np.int64)]
        for epoch in range(start // self.size, (start + count - 1) // self.size + 1):
            permutation = _permutation(self.size, self._seed, epoch)
            first = epoch * self.size
            parts.append(permutation[max(start - first, 0) : start + count - first])
        return np.concatenate(parts)
