"""Read tables and data sets of the Hugging Face hub, and download TinyStories."""

import glob
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sweep.data.text import Piece, Reader
from sweep.errors import SweepError
from sweep.trial.files import cache_dir, sha256_of_file

LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
# Without these, pandas would turn the texts "NA" and "007" into a missing value and a number.
CSV_OPTIONS = {"usecols": ["text"], "converters": {"text": str}, "keep_default_na": False}
ROWS = 100  # read at once
VALID_NAMES = ("valid", "validation", "val")  # of files and of splits


@contextmanager
def hugging_face(library: str, data: str, remedy: str) -> Iterator[Any]:
    """Import a library of Hugging Face, and turn its errors into one sentence.

    Telemetry is off unless the user turns it on. Without a terminal there are no progress bars.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # our message contains its errors
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        yield importlib.import_module(library)
    except SweepError:
        raise
    except Exception as error:  # these libraries raise classes of pyarrow, pandas, httpx and others
        cause = error.__cause__ or error  # `datasets` wraps the error of a row
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0].rstrip(".")
        raise SweepError(
            f"data {data!r} must be readable by {library}, got {reason}. {remedy}"
        ) from error


def table_format(path: Path) -> str | None:
    """Return json, csv or parquet for a table; None for plain text."""
    return LOADERS.get(Path(path.name.lower().removesuffix(".gz")).suffix)


def read_table(path: Path) -> Iterator[Piece]:
    """Yield the rows of a local file in order, each as a document."""
    loader = table_format(path)
    options = CSV_OPTIONS if loader == "csv" else {}
    files = {"data_files": [glob.escape(str(path))], "split": "train", "streaming": True}
    with hugging_face("datasets", str(path), "Correct the file, or use plain text.") as datasets:
        yield from _documents(datasets.load_dataset(loader, **files, **options), str(path))


def resolve_revision(repository: str, revision: str | None) -> str:
    """Return the commit that a revision of a data set names now; asks the hub unless it is one."""
    if re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        return str(revision)
    remedy = f"Correct the name, or name a downloaded commit: hf:{repository}@COMMIT."
    with hugging_face("huggingface_hub", f"hf:{repository}", remedy) as hub:
        return str(hub.HfApi().dataset_info(repository, revision=revision, timeout=10).sha)


def open_hub(repository: str, revision: str) -> dict[str, Reader]:
    """Download a data set; return the readers of its train split and, if any, validation split."""
    name = f"hf:{repository}@{revision}"
    if Path(repository).exists():  # `datasets` would read it instead
        raise SweepError(f"data {name!r} must not be a local path too. Use another folder.")
    with hugging_face("datasets", name, "Correct the name, or use plain text.") as datasets:
        splits = datasets.load_dataset(repository, revision=revision)
    if "train" not in splits:
        raise SweepError(f"data {name!r} must have a split train, got {', '.join(splits)}.")
    readers: dict[str, Reader] = {"train": partial(_documents, splits["train"], name)}
    for split in VALID_NAMES:
        if split in splits:
            readers["valid"] = partial(_documents, splits[split], name)
    return readers


def _documents(rows: Any, source: str) -> Iterator[Piece]:
    number = 0
    for batch in rows.with_format("arrow").iter(batch_size=ROWS):
        names = batch.column_names
        for text in batch["text"].to_pylist() if "text" in names else [None]:
            number += 1
            if not isinstance(text, str) or "\0" in text:
                raise SweepError(
                    f"row {number} of {source!r} must have a text without NUL in the column text, "
                    f"got {text!r:.40} and the columns {', '.join(names)}. Correct the row."
                )
            if document := text.strip():
                yield Piece(document, True, 0.0)


REPOSITORY = "roneneldan/TinyStories"
REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"


class PinnedFile(NamedTuple):
    """One file of the data set."""

    name: str
    size: int  # bytes
    sha256: str


TRAIN = PinnedFile(
    "TinyStoriesV2-GPT4-train.txt",
    2_227_753_162,
    "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
)
VALID = PinnedFile(
    "TinyStoriesV2-GPT4-valid.txt",
    22_502_601,
    "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
)


def tinystories_identity() -> dict[str, Any]:
    """Return the identity of the data set: its revision and the hashes of its files."""
    hashes = {"train": TRAIN.sha256, "valid": VALID.sha256}
    return {"name": "tinystories", "revision": REVISION, "sha256": hashes}


def download(file: PinnedFile, repository: str = REPOSITORY, revision: str = REVISION) -> Path:
    """Return the path of a file, downloaded if need be, after checking its hash."""
    path = cache_dir() / "tinystories" / file.name
    if not path.is_file():
        remedy = f"Use --data PATH with your text, or --data synthetic, or copy the file to {path}."
        with hugging_face("huggingface_hub", f"{repository}/{file.name}", remedy) as hub:
            where = {"repo_type": "dataset", "revision": revision}
            path = Path(hub.hf_hub_download(repository, file.name, **where))
    if sha256_of_file(path) != file.sha256:
        raise SweepError(
            f"{file.name} must have the pinned sha256 {file.sha256[:12]}…, got other content. "
            f"Remove {path.resolve()} to download it again, or use --data PATH for a changed data "
            "set."
        )
    return path
