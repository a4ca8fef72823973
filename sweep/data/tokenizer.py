"""Text to token ids and back: byte-level BPE (by the library `tokenizers`), or plain bytes.

Id 0 separates documents in both: `<|endoftext|>`, or byte 0. In a pretrained model's tokenizer the
id that ends a text changes places with id 0. The tokenizers are built with the
library's own parallelism, which the library switches off by itself in a forked process.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sweep.config.trial import TokenizerSettings
from sweep.data.text import SEPARATOR, Piece
from sweep.errors import SweepError

SEPARATOR_ID = 0
MINIMUM_VOCABULARY = {"bpe": 257, "bytes": 256}  # all bytes, for bpe and the separator
TRAINING_BYTES = 1 << 28  # bpe learns its merges from this much of the training split


class TextTokenizer(Protocol):
    """What turns text into ids below `vocabulary_used`, and back."""

    vocabulary_used: int

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, without separators."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; ids that stand for nothing are left out."""
        ...


class BytesTokenizer:
    """The UTF-8 bytes of the text."""

    vocabulary_used = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; what is not UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class LibraryTokenizer:
    """Of the library; text that reads `<|endoftext|>` is encoded as ordinary text.

    Args:
        library_tokenizer: such as byte-level BPE.
        end: its id of the end of a text, which changes places with id 0.
    """

    def __init__(self, library_tokenizer: Any, end: int = 0) -> None:
        self._tokenizer, self._end = library_tokenizer, end
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()  # which a saved one may have been told
        self._tokenizer.no_padding()
        self.vocabulary_used = max(int(library_tokenizer.get_vocab_size()), end + 1)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text; all cores work on one batch."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            exchanged(np.array(encoding.ids, dtype=np.uint32), self._end) for encoding in encodings
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        own = exchanged(np.array(ids, dtype=np.int64), self._end).tolist()
        return str(self._tokenizer.decode(own, skip_special_tokens=False))


def exchanged(ids: np.ndarray, end: int) -> np.ndarray:
    """Return ids with 0 and `end` in each other's place."""
    if end == 0:
        return ids
    return np.where(ids == 0, end, np.where(ids == end, 0, ids)).astype(ids.dtype)


def check_tokenizer(settings: TokenizerSettings) -> None:
    """Refuse a vocabulary that cannot hold every byte.

    Raises:
        SweepError: naming the minimum.
    """
    least = MINIMUM_VOCABULARY.get(settings.kind, 0)
    if settings.vocabulary < least:
        raise SweepError(
            f"vocabulary must be at least {least} for the tokenizer {settings.kind}, "
            f"got {settings.vocabulary}. Use {least} or more."
        )


def train_bpe(pieces: Iterable[Piece], vocabulary: int, path: Path) -> None:
    """Learn merges from the first `TRAINING_BYTES` of the pieces and save them; deterministic.

    A small text yields fewer ids than `vocabulary`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(pieces, TRAINING_BYTES), trainer)
    tokenizer.save(str(path))


def _sample(pieces: Iterable[Piece], limit: int) -> Iterator[str]:
    taken = 0
    for piece in pieces:
        yield piece.text
        taken += len(piece.text.encode())
        if taken >= limit:
            return


def load_tokenizer(path: Path | None, end: int = 0) -> TextTokenizer:
    """Return a saved tokenizer of the library, or that of bytes where there is no file."""
    if path is None:
        return BytesTokenizer()
    from tokenizers import Tokenizer

    return LibraryTokenizer(Tokenizer.from_file(str(path)), end)
