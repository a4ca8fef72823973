"""The official TinyStories text (Eldan and Li 2023, arXiv:2305.07759), from the Hugging Face hub.

Pinned by revision, size and sha256. The files lie in the cache folder under `tinystories/`, by
their own names; put there by other means they are checked and used alike.
"""

import contextlib
import errno
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.config.numbers import format_bytes
from sweep.config.paths import cache_dir
from sweep.data.cache import OnProgress, cache_error, hash_file, locked
from sweep.errors import SweepError

CONNECT_SECONDS = 10.0
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


@dataclass(frozen=True)
class HubFile:
    """One pinned file of a data set."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class HubDataset:
    """A data set of two text files on a hub."""

    name: str
    repository: str
    revision: str
    train: HubFile
    valid: HubFile

    def identity(self) -> dict[str, Any]:
        """Return what goes into trial ids."""
        return {
            "name": self.name,
            "revision": self.revision,
            "sha256": {"train": self.train.sha256, "valid": self.valid.sha256},
        }

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return cache_dir() / self.name


TINYSTORIES = HubDataset(
    name="tinystories",
    repository="roneneldan/TinyStories",
    revision="f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
    train=HubFile(
        "TinyStoriesV2-GPT4-train.txt",
        2_227_753_162,
        "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
    ),
    valid=HubFile(
        "TinyStoriesV2-GPT4-valid.txt",
        22_502_601,
        "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
    ),
)


def download_dataset(
    dataset: HubDataset = TINYSTORIES,
    endpoint: str | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Path, Path]:
    """Return the paths of the train and valid files, downloading what is not there yet.

    An interrupted download goes on where it stopped, also in another process.

    Args:
        endpoint: of the hub; None for HF_ENDPOINT or the official one.
        on_progress: replaces the library's progress bars.

    Raises:
        SweepError: without network, for a wrong size or checksum, or a cache that is not writable.
    """
    try:
        dataset.folder.mkdir(parents=True, exist_ok=True)
        with locked(dataset.folder / "download.lock"):
            valid = _obtain(dataset, dataset.valid, endpoint, on_progress)  # the small one first
            train = _obtain(dataset, dataset.train, endpoint, on_progress)
    except OSError as error:
        raise cache_error(error) from error
    return train, valid


def _obtain(
    dataset: HubDataset, file: HubFile, endpoint: str | None, on_progress: OnProgress | None
) -> Path:
    path = dataset.folder / file.name
    if not path.is_file():
        part = path.with_name(f"{path.name}.part")
        _fetch(dataset, file, part, endpoint, on_progress)
        if on_progress:
            on_progress(f"checking {file.name}", 0.0)
        if part.stat().st_size == file.size and hash_file(part) == file.sha256:
            part.replace(path)
        else:
            size = part.stat().st_size
            part.unlink()
            raise _wrong_content(file, f"{size:,} bytes that do not match", "Download it again")
    elif path.stat().st_size != file.size or hash_file(path) != file.sha256:
        raise _wrong_content(file, str(path), "Remove that file and download it again")
    return path


def _wrong_content(file: HubFile, given: str, remedy: str) -> SweepError:
    return SweepError(
        f"{file.name} must be the pinned {file.size:,} bytes with sha256 {file.sha256[:12]}…, "
        f"got {given}. {remedy}; a changed data set can be used as --data PATH."
    )


class _Part(io.FileIO):
    """A partial download that tells how far it is."""

    def __init__(self, path: Path, file: HubFile, on_progress: OnProgress | None) -> None:
        super().__init__(path, "a+")
        self._file, self._on_progress = file, on_progress

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        if self._on_progress:
            self._on_progress(f"downloading {self._file.name}", self.tell() / self._file.size)
        return written


def _fetch(
    dataset: HubDataset,
    file: HubFile,
    part: Path,
    endpoint: str | None,
    on_progress: OnProgress | None,
) -> None:
    """Append the missing bytes to a partial file.

    `hf_hub_download` starts again from nothing in a new process (as of huggingface_hub 1.0), so
    this uses the function below it, which takes an offset.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get

    url = hf_hub_url(
        dataset.repository,
        file.name,
        repo_type="dataset",
        revision=dataset.revision,
        endpoint=endpoint,
    )
    if part.is_file() and part.stat().st_size > file.size:
        part.unlink()
    try:
        size = get_hf_file_metadata(url, token=False, timeout=CONNECT_SECONDS).size
        if size not in (None, file.size):
            raise _wrong_content(file, f"one of {size:,} bytes at {url}", "Check the endpoint")
        with _Part(part, file, on_progress) as target, _library_bars(not on_progress):
            http_get(url, target, resume_size=target.tell(), expected_size=file.size)
    except SweepError:
        raise
    except Exception as error:  # connection, HTTP status, offline mode: the library's own classes
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise  # of the disk, not of the network
        raise _unreachable(dataset, error) from error


@contextlib.contextmanager
def _library_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _unreachable(dataset: HubDataset, error: Exception) -> SweepError:
    files = " and ".join(file.name for file in (dataset.train, dataset.valid))
    total = format_bytes(dataset.train.size + dataset.valid.size)
    return SweepError(
        f"{dataset.name} must be downloaded once ({total}), but the hub cannot be used "
        f"({type(error).__name__}). Use --data PATH with text of yours, or --data synthetic, or "
        f"copy {files} of the data set {dataset.repository} into {dataset.folder}."
    )
