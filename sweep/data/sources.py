"""Text that a user names by a path: which files it means, and whether they can be text at all.

Cheap enough for planning: reads at most the first and last megabyte of each file.
"""

import codecs
import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sweep.errors import SweepError

SAMPLE_BYTES = 1 << 20  # read at each end of a file to see whether it is text
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")  # looked for in a folder
NOT_TEXT = (
    *(".json", ".csv", ".tsv", ".parquet", ".arrow", ".npy", ".npz", ".bin", ".pt", ".safetensors"),
    *(".zip", ".zst", ".bz2", ".xz", ".7z", ".tar", ".tgz", ".tar.gz", ".pdf", ".docx", ".html"),
)
ROLE_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val")}
NOT_DATA = ("readme", "license", "licence", "notice")  # how text about the data begins

FORMS_HINT = (
    "Give a .txt, .txt.gz or .jsonl file (one JSON object with a text field per line), "
    "or a folder with train.txt and valid.txt"
)


@dataclass(frozen=True)
class TextFile:
    """One file of documents."""

    path: Path
    role: str  # train, valid, or text: to be split by document
    kind: Literal["text", "jsonl"]

    @property
    def is_gzip(self) -> bool:
        """Whether the file is compressed."""
        return self.path.name.lower().endswith(".gz")


def find_text_files(source: str) -> list[TextFile]:
    """Return the files that a path means, checked to be text: train and valid, or text only.

    Raises:
        SweepError: if there is no such file, or one is empty, binary or of an unsupported kind.
    """
    path = Path(source).expanduser().absolute()
    try:
        if path.is_dir():
            files = _files_of_folder(path)
        elif path.is_file():
            files = [_text_file(path, "text")]
        else:
            raise SweepError(
                f"data must be an existing file or folder, got {source!r}. "
                "Check the path, or use --data synthetic."
            )
        for file in files:
            _check_file(file)
    except PermissionError as error:
        raise SweepError(
            f"data must be readable, got {error.filename!r}. Correct its permissions."
        ) from error
    return files


def check_text_length(source: str, context: int) -> None:
    """Refuse text that is shorter than one window of `context` inputs, without tokenizing.

    A token is at least one byte, so this refuses only what would certainly be refused later. Names
    of built-in data sets pass.

    Raises:
        SweepError: if a split has fewer bytes than the `context` + 1 tokens of a window.
    """
    if source in ("tinystories", "synthetic"):
        return
    sizes: dict[str, int] = {}
    for file in find_text_files(source):
        size = len(_read_head(file)) if file.is_gzip else file.path.stat().st_size
        whole = file.is_gzip and size >= SAMPLE_BYTES  # longer than we have looked
        sizes[file.role] = sizes.get(file.role, 0) + (10**18 if whole else size)
    for role, size in sizes.items():
        if size < context + 1:
            raise SweepError(
                f"the {role} data of {source!r} must be at least one window of context + 1 = "
                f"{context + 1} tokens, got {size} bytes. Give more text, or a smaller context."
            )


def _files_of_folder(folder: Path) -> list[TextFile]:
    usable = sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.name.lower().endswith(SUFFIXES)
        and not path.name.lower().startswith((".", *NOT_DATA))
    )
    roles: dict[str, Path] = {}
    for role, names in ROLE_NAMES.items():
        found = [path for path in usable if path.name.lower().split(".")[0] in names]
        if len(found) > 1:
            raise SweepError(
                f"data folder {str(folder)!r} must hold one {role} file, got "
                f"{' and '.join(path.name for path in found)}. Remove one of them."
            )
        if found:
            roles[role] = found[0]
    if "valid" in roles and "train" not in roles:
        raise SweepError(
            f"data folder {str(folder)!r} must hold a train file beside "
            f"{roles['valid'].name}, got none. Name it train.txt."
        )
    if "valid" in roles:
        return [_text_file(path, role) for role, path in roles.items()]
    texts = [roles["train"]] if roles else usable
    if not texts:
        raise SweepError(
            f"data folder {str(folder)!r} must hold a file that ends in "
            f"{', '.join(SUFFIXES)}, got none. {FORMS_HINT}."
        )
    return [_text_file(path, "text") for path in texts]


def _text_file(path: Path, role: str) -> TextFile:
    name = path.name.lower()
    if name.endswith(NOT_TEXT):
        suffix = max((end for end in NOT_TEXT if name.endswith(end)), key=len)
        raise SweepError(f"data must be text, got a {suffix} file, {str(path)!r}. {FORMS_HINT}.")
    return TextFile(path, role, "jsonl" if name.removesuffix(".gz").endswith(".jsonl") else "text")


def _check_file(file: TextFile) -> None:
    if file.path.stat().st_size == 0:
        raise SweepError(f"data must not be empty, got the empty file {str(file.path)!r}.")
    head = _read_head(file)
    tail = b"" if file.is_gzip else _read_tail(file.path)
    for sample in (head, tail):
        if b"\0" in sample or not _is_utf8(sample, at_start=sample is head):
            raise binary_file(file.path)
    if not head.removeprefix(codecs.BOM_UTF8).strip() and len(head) < SAMPLE_BYTES:
        raise SweepError(f"data must hold text, got only white space in {str(file.path)!r}.")
    if file.kind == "jsonl":
        lines = head.decode("utf-8-sig", errors="ignore").split("\n")
        whole = lines if len(head) < SAMPLE_BYTES else lines[:-1]
        for number, line in enumerate(whole, start=1):
            parse_json_line(line, file.path, number)


def binary_file(path: Path) -> SweepError:
    """Return the error for a file that is not UTF-8 text."""
    return SweepError(
        f"data must be UTF-8 text, got a file with other bytes, {str(path)!r}. "
        "Save it as UTF-8, or give another file."
    )


def damaged_gzip(path: Path, error: Exception) -> SweepError:
    """Return the error for a compressed file that cannot be read to its end."""
    return SweepError(
        f"data must be a whole gzip file, got {str(path)!r}, which is damaged ({error}). "
        "Restore it, or compress the text again."
    )


def parse_json_line(line: str, path: Path, number: int) -> str:
    """Return the document on a line of a .jsonl file; empty for a blank line.

    Raises:
        SweepError: if it is not a JSON object with a text.
    """
    if not line.strip():
        return ""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise SweepError(
            f"line {number} of {str(path)!r} must be a JSON object, but {error}. Correct the line."
        ) from error
    text = data.get("text") if isinstance(data, dict) else None
    if not isinstance(text, str):
        raise SweepError(
            f"line {number} of {str(path)!r} must have a field text that is a string, got "
            f"{line.strip()[:40]!r}. Add the field, or convert the file to plain text."
        )
    return text


def _read_head(file: TextFile) -> bytes:
    """Return up to `SAMPLE_BYTES` from the start, decompressed."""
    if not file.is_gzip:
        with file.path.open("rb") as plain:
            return plain.read(SAMPLE_BYTES)
    try:
        with gzip.open(file.path, "rb") as packed:
            return packed.read(SAMPLE_BYTES)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged_gzip(file.path, error) from error


def _read_tail(path: Path) -> bytes:
    """Return the last `SAMPLE_BYTES` of a file that is longer than its head."""
    size = path.stat().st_size
    if size <= SAMPLE_BYTES:
        return b""
    with path.open("rb") as file:
        file.seek(max(size - SAMPLE_BYTES, 0))
        return file.read()


def _is_utf8(sample: bytes, at_start: bool) -> bool:
    """Tell whether it decodes, but for a character cut at the end that is not the file's own."""
    if not at_start:  # a character may begin before the sample
        sample = sample[
            next((i for i in range(min(4, len(sample))) if sample[i] & 0xC0 != 0x80), 0) :
        ]
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(sample, final=not at_start or len(sample) < SAMPLE_BYTES)
    except UnicodeDecodeError:
        return False
    return True
