"""What a data set is, as the JSON that goes into trial ids; nothing is tokenized for it.

A named set is identified by its pinned hashes or its grammar, a path by the hashes of its files.
"""

from pathlib import Path
from typing import Any

from sweep.data.cache import hash_file
from sweep.data.sources import TextFile, find_text_files
from sweep.data.synthetic import synthetic_identity
from sweep.data.tinystories import TINYSTORIES
from sweep.errors import SweepError

# How text without a validation file is split: `sweep.data.text.measure_split`.
SPLIT_RULE = {"by": "document hash", "valid_fraction": 0.05, "version": 1}


def identify_data(source: str) -> dict[str, Any]:
    """Return the identity of `tinystories`, `synthetic` or a path, in canonical JSON values.

    Writes nothing but the cache of content hashes, and not even that where it cannot.

    Raises:
        SweepError: if the source is neither, or is a path to what cannot be text.
    """
    if source == "tinystories":
        return TINYSTORIES.identity()
    if source == "synthetic":
        return synthetic_identity()
    if not source or ("/" not in source and not Path(source).exists()):
        raise SweepError(
            f"data must be tinystories, synthetic, or the path of a text file or folder, "
            f"got {source!r}. Choose one of them."
        )
    return identify_files(find_text_files(source))


def identify_files(files: list[TextFile]) -> dict[str, Any]:
    """Return the identity of text files: their contents and kinds by role, never their names."""
    multiple = sum(file.role == "text" for file in files) > 1
    roles = [
        f"text-{number}" if multiple else file.role for number, file in enumerate(files, start=1)
    ]
    identity: dict[str, Any] = {
        "name": "path",
        "sha256": {role: hash_file(file.path) for role, file in zip(roles, files, strict=True)},
        "kind": {role: file.kind for role, file in zip(roles, files, strict=True)},
    }
    if all(file.role == "text" for file in files):
        identity["split"] = dict(SPLIT_RULE)
    return identity
