"""The data source `tinystories`: two files of Eldan and Li 2023 with pinned hashes."""

from functools import partial
from pathlib import Path
from typing import Any

from sweep.config.hub import hugging_face
from sweep.data.plain_text import Reader, read_text
from sweep.errors import SweepError
from sweep.resources import sha256_of_file
from sweep.trial.files import cache_dir

REPOSITORY = "roneneldan/TinyStories"
REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
SHA256 = {  # by split
    "train": "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
    "valid": "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
}


def identity() -> dict[str, Any]:
    return {"name": "tinystories", "revision": REVISION, "sha256": SHA256}


def open_split(identity: dict[str, Any], split: str) -> Reader:
    return partial(read_text, download(split))


def download(split: str) -> Path:
    """Return the path of a file of TinyStories with the pinned hash; download it if necessary."""
    name = f"TinyStoriesV2-GPT4-{split}.txt"
    path = cache_dir() / "tinystories" / name
    if not path.is_file():
        remedy = f"Use --data PATH with your text, or --data synthetic, or copy the file to {path}."
        with hugging_face(f"data '{REPOSITORY}/{name}'", remedy):
            from huggingface_hub import hf_hub_download

            downloaded = hf_hub_download(REPOSITORY, name, repo_type="dataset", revision=REVISION)
            path = Path(downloaded)
    expected = SHA256[split]
    if sha256_of_file(path) != expected:
        raise SweepError(f"{path.resolve()} must have the sha256 {expected}. Remove it.")
    return path
