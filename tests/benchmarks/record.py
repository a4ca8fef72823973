"""Write results of benchmarks to results/benchmarks/<device>/<date>.json.

`python tests/benchmarks/record.py FILE.json …` adds results that another machine wrote.
"""

import datetime
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from sweep.training.record import git_commit

RESULTS = Path(__file__).parents[2] / "results" / "benchmarks"


def record(results: dict[str, object], device: str = "cpu", folder: Path = RESULTS) -> Path:
    """Add results to the file of this device and day; return the file.

    The commit is that of the environment variable SWEEP_COMMIT if it is set, else git's.
    """
    import torch

    from sweep.training.device import available_cores, device_name

    name, date = device_name(torch.device(device)), datetime.date.today().isoformat()
    commit = os.environ.get("SWEEP_COMMIT") or git_commit()
    document = {
        "date": date,
        "device": name,
        "cores": available_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commits": dict.fromkeys(results, commit),
        "results": results,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return _add(document, folder / slug / f"{date}.json")


def _add(document: dict[str, Any], path: Path) -> Path:
    """Merge a document into the file, result by result."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    for part in ("commits", "results"):
        document[part] = earlier.get(part, {}) | document[part]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


if __name__ == "__main__":
    for source in map(Path, sys.argv[1:]):
        target = RESULTS / source.absolute().parent.name / source.name
        print(f"wrote {_add(json.loads(source.read_text()), target)}")
