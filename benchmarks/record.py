"""Where results of benchmarks go: benchmarks/results/<device>/<date>.json."""

import datetime
import json
import platform
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def record(results: dict[str, object], device: str = "cpu") -> Path:
    """Write results beside those of the same device and day; return the file."""
    import torch

    from sweep.training.device import available_cores, device_name

    name, date = device_name(torch.device(device)), datetime.date.today().isoformat()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = HERE / "results" / slug / f"{date}.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    known, commits = document.get("results", {}), document.get("commits", {})
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    document = {
        "date": date,
        "device": name,
        "cores": available_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commits": commits | dict.fromkeys(results, commit.stdout.strip() or None),
        "results": known | results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
