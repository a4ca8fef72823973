"""Read documents out of plain text files and split them, a block at a time.

A document is the text between two lines that hold only `<|endoftext|>`, without the white space
around it. Empty documents are dropped, and line ends become LF.
"""

import gzip
import hashlib
import io
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

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

OnProgress = Callable[[str, float], None]  # the current work and its fraction done


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool
    fraction_read: float  # of the source


Reader = Callable[[], Iterator[Piece]]  # can be called again to read again


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file that may be compressed; yield its content and the raw file under it."""
    try:
        with path.open("rb") as raw:
            is_gzip = path.name.lower().endswith(".gz")
            yield (cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if is_gzip else raw), raw
    except UnicodeDecodeError as error:
        raise not_text(path) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SweepError(
            f"data must be a whole gzip file, got {str(path)!r}, which is damaged ({error}). "
            "Restore it, or compress the text again."
        ) from error


def not_text(path: Path) -> SweepError:
    """Return the error of a file that is not UTF-8 text."""
    return SweepError(
        f"data must be UTF-8 text, got a file with other bytes, {str(path)!r}. "
        "Save it as UTF-8, or use another file."
    )


def read_text(path: Path, block: int = BLOCK_CHARACTERS) -> Iterator[Piece]:
    """Yield the documents of a plain text file in order."""
    size = path.stat().st_size or 1
    with open_bytes(path) as (content, raw), io.TextIOWrapper(content, "utf-8-sig") as lines:
        for text, ends_document in _documents(lines, block):
            if "\0" in text:
                raise not_text(path)
            yield Piece(text, ends_document, min(raw.tell() / size, 1.0))


def _documents(lines: io.TextIOWrapper, block: int) -> Iterator[tuple[str, bool]]:
    pending, is_open = "", False  # text not yet yielded, and whether its document's start was
    limit = min(PIECE_CHARACTERS, block)
    while text := lines.read(block):
        text += lines.readline(block)  # so that no separator is cut
        *ended, pending = SEPARATOR_LINE.split(pending + text)
        for document in ended:
            document = document.rstrip() if is_open else document.strip()
            if document or is_open:
                yield document, True
            is_open = False
        if not is_open:
            pending = pending.lstrip()
        while len(pending) > limit:
            cuts = CUT.finditer(pending, max(1, limit - CUT_CHARACTERS), limit)
            cut = max((match.start() for match in cuts), default=limit)
            yield pending[:cut], False
            pending, is_open = pending[cut:], True
    if (rest := pending.rstrip()) or is_open:
        yield rest, True


def split_documents(read: Reader, on_progress: OnProgress) -> dict[str, Reader]:
    """Choose the validation documents: the 5 % with the least content hashes.

    These are at least one and at most half of the different documents; equal documents stay
    together. Of a single document, the last 5 % of the characters are for validation, from a line's
    end if possible.
    """
    hashes, digest, characters = array("Q"), hashlib.blake2b(digest_size=8), 0
    for piece in read():
        digest.update(piece.text.encode())
        characters += len(piece.text)
        if piece.ends_document:
            hashes.append(int.from_bytes(digest.digest(), "big"))
            digest = hashlib.blake2b(digest_size=8)
        on_progress("splitting by document", piece.fraction_read)
    different = np.unique(np.array(hashes, dtype=np.uint64))
    if len(hashes) == 1:
        is_valid = np.array([False, True])
        read = partial(_divide, read, characters - max(characters // 20, 1))
    elif len(different) < 2:
        raise SweepError(
            f"data without a validation file must hold at least two different documents, got "
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
            yield piece._replace(text=piece.text[:cut], ends_document=True)
            piece = piece._replace(text=piece.text[cut:])
        yield piece
        start -= length  # below 0 once the document is divided
