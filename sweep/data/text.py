"""Documents out of text files, in pieces, so that a file of any size never sits in memory.

A document is the text between two lines that hold only `<|endoftext|>`, or the `text` of a JSON
line, without the white space around it; empty ones are dropped, line ends become LF.
"""

import gzip
import hashlib
import io
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple, cast

import numpy as np

from sweep.data.sources import TextFile, binary_file, damaged_gzip, parse_json_line
from sweep.errors import SweepError

SEPARATOR = "<|endoftext|>"
SEPARATOR_LINE = re.compile(r"^<\|endoftext\|>[ \t]*(?:\n|\Z)", re.MULTILINE)
BLOCK_CHARACTERS = 1 << 18  # read at once
PIECE_CHARACTERS = 1 << 16  # a longer unfinished document is given out in parts
CUT_WINDOW = 1 << 14  # a cut is looked for in this many last characters

# Before white space that follows none, no tokenizer here joins what is left and right of it.
CUT = re.compile(r"(?<=\S)[ \n]")


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends_document: bool
    fraction_read: float  # of the files that it comes from


@dataclass(frozen=True)
class Corpus:
    """Two splits, each of which can be read again and again."""

    train: Callable[[], Iterator[Piece]]
    valid: Callable[[], Iterator[Piece]]


def open_text(files: list[TextFile], on_progress: Callable[[float], None] | None = None) -> Corpus:
    """Return the splits of text files; those of role `text` are read through once to split them."""
    if all(file.role == "text" for file in files):
        split = measure_split(files, on_progress)
        return Corpus(lambda: split.select(files, False), lambda: split.select(files, True))
    train = [file for file in files if file.role == "train"]
    valid = [file for file in files if file.role == "valid"]
    return Corpus(lambda: read_pieces(train), lambda: read_pieces(valid))


def read_pieces(files: list[TextFile], block: int = BLOCK_CHARACTERS) -> Iterator[Piece]:
    """Yield the documents of files in order.

    Raises:
        SweepError: for a file that turns out not to be UTF-8 text, JSON lines or whole gzip.
    """
    total = max(sum(file.path.stat().st_size for file in files), 1)
    done = 0
    for file in files:
        try:
            with file.path.open("rb") as raw, _decode(file, raw) as lines:
                parts = _json_parts if file.kind == "jsonl" else _text_parts
                for text, ends in parts(file, lines, block):
                    if "\0" in text:
                        raise binary_file(file.path)
                    yield Piece(text, ends, min((done + raw.tell()) / total, 1.0))
        except UnicodeDecodeError as error:
            raise binary_file(file.path) from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise damaged_gzip(file.path, error) from error
        done += file.path.stat().st_size


def _decode(file: TextFile, raw: IO[bytes]) -> io.TextIOWrapper:
    plain = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if file.is_gzip else raw
    return io.TextIOWrapper(plain, encoding="utf-8-sig")


def _json_parts(file: TextFile, lines: io.TextIOWrapper, block: int) -> Iterator[tuple[str, bool]]:
    for number, line in enumerate(lines, start=1):
        if text := parse_json_line(line, file.path, number).strip():
            yield text, True


def _text_parts(file: TextFile, lines: io.TextIOWrapper, block: int) -> Iterator[tuple[str, bool]]:
    pending, started = "", False  # text of the open document; whether some was given out
    limit = min(PIECE_CHARACTERS, block)
    while text := lines.read(block):
        text += lines.readline(block)  # so that no separator is cut
        *ended, pending = SEPARATOR_LINE.split(pending + text)
        for document in ended:
            document = document.rstrip() if started else document.strip()
            if document or started:
                yield document, True
            started = False
        if not started:
            pending = pending.lstrip()
        while len(pending) > limit:
            cut = _find_cut(pending, limit)
            yield pending[:cut], False
            pending, started = pending[cut:], True
    if (rest := pending.rstrip()) or started:
        yield rest, True


def _find_cut(text: str, limit: int) -> int:
    """Return where to cut: at most at `limit`, where tokens end, if there is such a place."""
    cuts = [match.start() for match in CUT.finditer(text, max(1, limit - CUT_WINDOW), limit)]
    return cuts[-1] if cuts else limit


@dataclass(frozen=True)
class DocumentSplit:
    """Which documents are for validation; a single one is divided into two first."""

    is_valid: np.ndarray  # (documents,) bool
    divide_from: int | None = None  # character of a single document

    def select(self, files: list[TextFile], valid: bool) -> Iterator[Piece]:
        """Yield the documents of one split in file order."""
        pieces, index = read_pieces(files), 0
        if self.divide_from is not None:
            pieces = _divide(pieces, self.divide_from)
        for piece in pieces:
            if self.is_valid[index] == valid:
                yield piece
            index += piece.ends_document


def _divide(pieces: Iterator[Piece], start: int) -> Iterator[Piece]:
    """End a document at a character, or better at a line's end or a space soon after it."""
    for piece in pieces:
        length = len(piece.text)
        if 0 <= start < length:
            stop = start + (length - start) // 2
            found = (piece.text.find(mark, max(start, 1), stop) for mark in "\n ")
            cut = next((at for at in found if at >= 0), start)
            yield piece._replace(text=piece.text[:cut], ends_document=True)
            piece = piece._replace(text=piece.text[cut:])
        yield piece
        start -= length  # below 0 once the document is divided


def measure_split(
    files: list[TextFile], on_progress: Callable[[float], None] | None = None
) -> DocumentSplit:
    """Choose the validation documents: the 5 % with the least content hashes.

    At least one and at most half of the different documents; equal documents stay together. Of a
    text that is a single document the last 5 % of the characters, from a line's end if possible.

    Raises:
        SweepError: if there is nothing to split.
    """
    hashes, digest, characters = array("Q"), hashlib.blake2b(digest_size=8), 0
    for piece in read_pieces(files):
        digest.update(piece.text.encode())
        characters += len(piece.text)
        if piece.ends_document:
            hashes.append(int.from_bytes(digest.digest(), "big"))
            digest = hashlib.blake2b(digest_size=8)
        if on_progress:
            on_progress(piece.fraction_read)
    found = np.array(hashes, dtype=np.uint64)
    different = np.unique(found)
    if len(found) == 1:
        tail = max(characters // 20, 1)
        return DocumentSplit(np.array([False, True]), characters - tail)
    if len(different) < 2:
        raise SweepError(
            f"data without a validation file must hold at least two different documents, got "
            f"{len(different)}. Separate them by lines of {SEPARATOR}, or add a valid.txt."
        )
    count = max(1, round(0.05 * len(different)))
    return DocumentSplit(found <= different[count - 1])
