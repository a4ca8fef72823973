"""Read documents from plain text files and split them, a block at a time.

A document is the text between two lines that contain only `<|endoftext|>`, without the white space
around it. Empty documents are dropped, and line ends become LF.
"""

import gzip
import hashlib
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from sweep.errors import SweepError

SEPARATOR = "<|endoftext|>"
SEPARATOR_LINE = re.compile(r"^<\|endoftext\|>[ \t]*(?:\n|\Z)", re.MULTILINE)
BLOCK_CHARACTERS = 1 << 18  # read at once
PIECE_CHARACTERS = 1 << 16  # a longer document is yielded in parts
CUT_CHARACTERS = 1 << 14  # a cut must lie in this many last characters of a part
# Before white space that follows none, no tokenizer here joins the text on both sides.
CUT = re.compile(r"(?<=\S)[ \n]")

# The split of text without a validation file; a part of the data's identity.
SPLIT_RULE: dict[str, Any] = {"by": "document hash", "valid_fraction": 0.05, "version": 1}


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool = True


Reader = Callable[[], Iterator[Piece]]  # each call reads from the beginning


def read_text(path: Path, block: int = BLOCK_CHARACTERS) -> Iterator[Piece]:
    """Yield the documents of a UTF-8 file in order; a name that ends in .gz means gzip."""
    try:
        open_file = gzip.open if path.name.lower().endswith(".gz") else open
        with open_file(path, "rt", encoding="utf-8-sig") as file:
            yield from _documents(file, block)
    except (UnicodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        expected = "UTF-8 text, plain or in a whole gzip file"
        raise SweepError(f"data must be {expected}, got {str(path)!r} ({error}).") from error


def _documents(file: IO[str], block: int) -> Iterator[Piece]:
    pending, is_open = "", False  # text not yet yielded, and whether its document's start was
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
    """Choose the validation documents: the 5 % with the least content hashes.

    These are at least one and at most half of the different documents; equal documents stay
    together. If there is only one document, the last 5 % of its characters are for validation.
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
    elif len(different) < 2:
        raise SweepError(
            "data without a validation file must hold at least two different documents, got "
            f"{len(different)}. Separate them by lines of {SEPARATOR}, or add a valid.txt."
        )
    else:
        count = max(1, round(SPLIT_RULE["valid_fraction"] * len(different)))
        is_valid = np.array(hashes, dtype=np.uint64) <= different[count - 1]
    return {"train": partial(_select, read, ~is_valid), "valid": partial(_select, read, is_valid)}


def _select(read: Reader, is_selected: np.ndarray) -> Iterator[Piece]:
    index = 0
    for piece in read():
        if is_selected[index]:
            yield piece
        index += piece.ends_document


def _divide(read: Reader, start: int) -> Iterator[Piece]:
    """End a document at a character, or at a line's end or a space soon after it."""
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
