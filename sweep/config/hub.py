"""Models and data sets of the Hugging Face hub: names, downloads, and errors in one sentence."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sweep.errors import SweepError, cut

PREFIX = "hf:"
MODEL_FILES = ("config.json", "tokenizer.json")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def parse_hub_name(source: str, subject: str) -> tuple[str, str | None]:
    """Return OWNER/NAME and the revision, None if it is not given."""
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@(\S+))?", source)
    if match is None:
        raise SweepError(f"{subject} must have the form hf:OWNER/NAME[@REVISION], got {source!r}.")
    return match[1], match[2]


def model_folder(source: str, files: tuple[str, ...] = MODEL_FILES) -> Path:
    """Return the folder of a model or of its config.json; download the files of one on the hub."""
    if not source.startswith(PREFIX):
        path = Path(source).expanduser()
        return path.parent if path.name == "config.json" else path
    repository, revision = parse_hub_name(source, "model")
    remedy = "Correct the name, or give the folder of a downloaded model."
    with hugging_face(f"model {source!r}", remedy):
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            repository, revision=revision, allow_patterns=[*files], ignore_patterns="*/*"
        )
    return Path(folder)


def weights_folder(source: str) -> Path:
    """Return the folder of a model and its weights; download them if they are on the hub."""
    folder = model_folder(source, (*MODEL_FILES, *WEIGHTS))
    if not any(folder.glob("*.safetensors")):
        raise SweepError(f"{source} must hold weights in safetensors, got none. Convert them.")
    return folder


def _home_in_cache() -> dict[str, str]:
    """Return a home for these libraries in SWEEP_CACHE if theirs cannot be written."""
    cache = os.environ.get("SWEEP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(f"{base}/huggingface")
    try:
        home = home.expanduser()
        home.mkdir(parents=True, exist_ok=True)
        is_usable = os.access(home, os.W_OK)
    except (OSError, RuntimeError):  # the user may have no home
        is_usable = False
    if is_usable or not cache:
        return {}
    return {"HF_HOME": f"{cache}/huggingface"}


@contextmanager
def hugging_face(subject: str, remedy: str) -> Iterator[None]:
    """Turn telemetry off and the errors of these libraries into one sentence.

    The libraries are imported inside of it, because they read their environment when imported.
    """
    defaults = {"HF_HUB_DISABLE_TELEMETRY": "1", "DATASETS_VERBOSITY": "critical"}
    if not sys.stderr.isatty():
        defaults |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    os.environ.update({**defaults, **_home_in_cache(), **os.environ})
    try:
        yield
    except SweepError:
        raise
    except Exception as error:  # these libraries raise classes of pyarrow, pandas, httpx and others
        cause = error.__cause__ or error  # `datasets` wraps the error of a row
        reason = cut(" ".join(f"{type(cause).__name__}: {cause}".split())).rstrip(".")
        raise SweepError(f"{subject} cannot be read ({reason}). {remedy}") from error
