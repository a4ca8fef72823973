"""Convert text to token ids and back: byte-level BPE by the library `tokenizers`, or plain bytes.

Id 0 separates documents in both: `<|endoftext|>`, or byte 0. In a pretrained model's tokenizer, the
end-of-text id and id 0 are exchanged.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sweep.config.trial import TokenizerSettings
from sweep.data.text import SEPARATOR, Piece
from sweep.errors import SweepError
from sweep.trial.files import sha256_of_file

TOKENIZER = "tokenizer.json"
SEPARATOR_ID = 0
MINIMUM_VOCABULARY = {"bpe": 257, "bytes": 256}  # all bytes, and for bpe the separator
TRAINING_BYTES = 1 << 28  # BPE learns its merges from this much of the training split


class BytesTokenizer:
    """The UTF-8 bytes of the text."""

    vocabulary_used = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of bytes; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class LibraryTokenizer:
    """A `tokenizers.Tokenizer` whose end-of-text id `end` is exchanged with id 0.

    `<|endoftext|>` inside text is encoded as ordinary text.
    """

    def __init__(self, library_tokenizer: Any, end: int = 0) -> None:
        self._tokenizer, self._end = library_tokenizer, end
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()  # a saved tokenizer may have these two enabled
        self._tokenizer.no_padding()
        self.vocabulary_used = max(int(library_tokenizer.get_vocab_size()), end + 1)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, without separators; all cores work on one batch."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._exchange(np.array(encoding.ids, np.uint32)) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        own_ids = self._exchange(np.array(list(ids), np.int64)).tolist()
        return str(self._tokenizer.decode(own_ids, skip_special_tokens=False))

    def _exchange(self, ids: np.ndarray) -> np.ndarray:
        if self._end == 0:
            return ids
        return np.where(ids == 0, self._end, np.where(ids == self._end, 0, ids)).astype(ids.dtype)


TextTokenizer = BytesTokenizer | LibraryTokenizer


def check_tokenizer(settings: TokenizerSettings) -> None:
    """Refuse a vocabulary that cannot hold every byte."""
    minimum = MINIMUM_VOCABULARY.get(settings.kind, 0)
    if settings.vocabulary < minimum:
        raise SweepError(
            f"vocabulary must be at least {minimum} for the tokenizer {settings.kind}, "
            f"got {settings.vocabulary}. Use {minimum} or more."
        )


def train_bpe(pieces: Iterable[Piece], vocabulary: int, path: Path) -> None:
    """Learn merges from the first `TRAINING_BYTES` of the pieces and save them; deterministic.

    A small text yields fewer ids than `vocabulary`.
    """
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


def load_tokenizer(path: Path | None, end: int = 0) -> TextTokenizer:
    """Load a saved tokenizer of the library; without a path, return the one of bytes."""
    if path is None:
        return BytesTokenizer()
    from tokenizers import Tokenizer

    return LibraryTokenizer(Tokenizer.from_file(str(path)), end)


def pretrained_path(folder: str | Path | None, tokenizer: TokenizerSettings) -> Path:
    """Return the tokenizer.json of a pretrained model, which must be the planned one."""
    path = Path(folder or ".") / TOKENIZER
    if not path.is_file() or sha256_of_file(path) != tokenizer.sha256:
        raise SweepError(
            f"{path} must be the tokenizer of the plan, and is not. Restore it, or start a new "
            "sweep in another folder."
        )
    return path
