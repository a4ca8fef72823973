"""Read documents of plain text, count them, and explain what is not UTF-8 text.

A document is the text between two lines that contain only `<|endoftext|>`, without the white space
around it. Line ends become LF.
"""

import codecs
import contextlib
import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from sweep.errors import SweepError, cut

SEPARATOR = "<|endoftext|>"
SEPARATOR_LINE = re.compile(r"^<\|endoftext\|>[ \t]*(?:\n|\Z)", re.MULTILINE)
# Lines that separate the documents of other tools, whatever their case; here they are text.
OTHER_SEPARATOR_LINE = re.compile(
    r"^(?!(?-i:<\|endoftext\|>))"
    r"(?:</s>|[<\[]\|?(?:end[ _-]?of[ _-]?(?:text|document|sequence|sentence|turn)"
    r"|eo[sdt](?:_id)?|im_end)\|?[>\]])[ \t]*$",
    re.MULTILINE | re.IGNORECASE,
)
MAX_EXPANSION = 200  # characters per byte of a compressed file; gzip can reach 1,000
MAX_CHARACTERS = 1 << 26  # longest text, unless its file is large
PIECE_CHARACTERS = 1 << 16  # a longer document is yielded in parts
CUT_CHARACTERS = 1 << 14  # a cut must lie in this many last characters of a part
# No tokenizer here merges a character with white space after it, so such a cut changes no ids.
CUT = re.compile(r"(?<=\S)[ \n]")
BLOCK_BYTES = 1 << 18
READ_ERRORS = (OSError, EOFError, zlib.error)  # raised for plain and for compressed files

# Longer beginnings come before shorter ones that they begin with.
ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
BINARY_FORMATS = {
    b"\x1f\x8b": "a gzip file, whose name must end in .gz",
    b"PK\x03\x04": "a zip archive or an office document",
    b"%PDF": "a PDF document",
    b"PAR1": "a Parquet file, whose name must end in .parquet",
    b"ARROW1": "an Arrow file",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"\xfd7zXZ": "a file compressed by xz",
    b"BZh": "a file compressed by bzip2",
    b"SQLite format 3": "a SQLite database",
}

BEGINNINGS = {
    "HTML": re.compile(r"<!doctype html|<html", re.IGNORECASE),
    "XML": re.compile(r"<\?xml", re.IGNORECASE),
    "JSON": re.compile(r'\{\s*"|\[\s*\{\s*"'),
    "RTF": re.compile(r"\{\\rtf"),
}


class Piece(NamedTuple):  # a document, or a part of a long one
    text: str
    ends_document: bool = True


Reader = Callable[[], Iterator[Piece]]  # each call reads from the beginning


@dataclass
class Tally:
    """Counts the documents read from a file, or from a split of the hub."""

    name: str
    documents: int = 0
    empty: int = 0
    inner_separators: int = 0  # within documents, where they separate nothing
    other_separators: int = 0  # lines such as </s>, which separate nothing
    looks_like: str | None = None  # the format of the first document, if it seems to have one

    def keep(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Count the documents, and yield those that are not empty."""
        is_open = False  # True if a part of the document was yielded
        for piece in pieces:
            if piece.text or is_open:
                if not self.documents and not is_open:
                    self.looks_like = _find_markup(piece.text)
                if piece.ends_document:
                    self.documents += 1
                self.inner_separators += piece.text.count(SEPARATOR)
                self.other_separators += len(OTHER_SEPARATOR_LINE.findall(piece.text))
                yield piece
            else:
                self.empty += 1
            is_open = not piece.ends_document


def _find_markup(text: str) -> str | None:
    """Return what a text seems to be by its first characters; None for plain text."""
    return next((what for what, start in BEGINNINGS.items() if start.match(text)), None)


def open_file(path: Path, *arguments: Any, **options: Any) -> IO[Any]:
    """Open a file; a name that ends in .gz means gzip."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    return opener(path, *arguments, **options)  # type: ignore[no-any-return]


@contextlib.contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a UTF-8 file after its byte-order mark, if it has one.

    The codec utf-8-sig takes a part of a mark, which is not UTF-8, for an empty file.
    """
    with open_file(path, "rt", encoding="utf-8", newline=newline) as file:
        if file.read(1) != "\ufeff":
            file.seek(0)
        yield file


def most_characters(path: Path) -> int:
    """Return how many characters a file may hold, which bounds what a compressed one expands to."""
    return max(MAX_CHARACTERS, MAX_EXPANSION * path.stat().st_size)


def too_large(path: Path) -> SweepError:
    expected = f"hold at most {MAX_EXPANSION} characters per byte of its files"
    return SweepError(f"data {cut(str(path))!r} must {expected}. Use other data.")


def read_text(path: Path, block: int = BLOCK_BYTES) -> Iterator[Piece]:
    """Yield the documents of a UTF-8 file in order; a name that ends in .gz means gzip."""
    yield from Tally(path.name).keep(parse_text(path, block))


def parse_text(path: Path, block: int = BLOCK_BYTES) -> Iterator[Piece]:
    """Yield the documents of a UTF-8 file in order, also empty ones."""
    characters = 0
    try:
        limit = most_characters(path)
        with open_text(path) as file:
            for piece in _documents(file, block):
                characters += len(piece.text)
                if characters > limit:
                    raise too_large(path)
                yield piece
    except UnicodeError as error:
        raise not_utf8(path) from error
    except READ_ERRORS as error:
        raise unreadable(path, error) from error


def _documents(file: IO[str], block: int) -> Iterator[Piece]:
    pending = ""  # text not yet yielded
    is_open = False  # True if the start of its document was yielded
    limit = min(PIECE_CHARACTERS, block)
    while text := file.read(block):
        text += file.readline(block)  # so that no separator is cut
        if "\0" in text:
            raise UnicodeError("a NUL byte")

        *ended, pending = SEPARATOR_LINE.split(pending + text)
        for document in ended:
            yield Piece(document.rstrip() if is_open else document.strip())
            is_open = False

        if not is_open:
            pending = pending.lstrip()
        while len(pending) > limit:
            cuts = CUT.finditer(pending, max(1, limit - CUT_CHARACTERS), limit)
            end = max((match.start() for match in cuts), default=limit)
            yield Piece(pending[:end], ends_document=False)
            pending = pending[end:]
            is_open = True

    rest = pending.rstrip()
    if rest or is_open:
        yield Piece(rest)


def unreadable(path: Path, error: BaseException) -> SweepError:
    expected = "readable UTF-8 text, plain or in a whole gzip file"
    reason = cut(str(error))
    return SweepError(f"data must be {expected}, got {cut(str(path))} ({reason}). Check it.")


def not_utf8(path: Path) -> SweepError:
    """Return the refusal of a file with bytes that are not UTF-8, or with NUL bytes."""
    try:
        problem, remedy = _explain_bytes(path)
    except READ_ERRORS as error:  # a compressed file that is cut, too
        return unreadable(path, error)
    return SweepError(f"data must be UTF-8 text, got {cut(str(path))}: {problem}. {remedy}")


def _explain_bytes(path: Path) -> tuple[str, str]:
    """Return what a file that is not UTF-8 text seems to be, with the place, and a remedy."""
    with open_file(path, "rb") as file:
        start = file.read(BLOCK_BYTES)
    for mark, encoding in ENCODINGS.items():
        if start.startswith(mark):
            return f"it begins with the mark of {encoding}", _convert(encoding)
    for mark, what in BINARY_FORMATS.items():
        if start.startswith(mark):
            return f"it seems to be {what}", "Convert it."
    place, byte = _find_bad_byte(path)
    if byte == 0:
        utf16 = _utf16_without_mark(start)
        if utf16 is not None:
            return f"it seems to be {utf16}, with a NUL byte in {place}", _convert(utf16)
        return f"it has a NUL byte in {place}", "Remove the NUL bytes, or give other data."
    problem = f"the byte 0x{byte:02x} in {place} is not UTF-8; it may be Windows-1252 or Latin-1"
    return problem, _convert("WINDOWS-1252")


def _convert(encoding: str) -> str:
    return f"Convert it: iconv -f {encoding} -t UTF-8 OLD > NEW"


def _utf16_without_mark(start: bytes) -> str | None:
    """Return UTF-16LE or UTF-16BE if almost only odd or only even bytes are NUL."""
    even = start[0::2].count(0)
    odd = start[1::2].count(0)
    if odd > 10 * even:
        return "UTF-16LE"
    return "UTF-16BE" if even > 10 * odd else None


def _find_bad_byte(path: Path) -> tuple[str, int]:
    """Return the place of the first byte that is NUL or not UTF-8, in words, and its value."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1  # the number of the first line of the block
    size = 0  # bytes before the block
    with open_file(path, "rb") as file:
        while True:
            block = file.read(BLOCK_BYTES)
            pending = decoder.getstate()[0]  # the beginning of a character
            content = pending + block
            try:
                decoder.decode(block, final=not block)
                index = content.find(b"\0")
            except UnicodeDecodeError as error:
                nul = content.find(b"\0", 0, error.start)
                index = error.start if nul < 0 else nul
            if index >= 0:
                line += content.count(b"\n", 0, index)
                position = size - len(pending) + index + 1
                return f"line {line:,} (byte {position:,} of the file)", content[index]
            assert block, "the caller has seen a byte that is not UTF-8"
            line += block.count(b"\n")
            size += len(block)
