"""Download TinyStories (Eldan and Li 2023, arXiv:2305.07759), pinned by revision and sha256.

A file in the folder `tinystories` of the cache is used instead of a download.
"""

from pathlib import Path
from typing import Any, NamedTuple

from sweep.config.paths import cache_dir
from sweep.data.tables import hugging_face
from sweep.errors import SweepError
from sweep.trial.files import sha256_of_file

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
