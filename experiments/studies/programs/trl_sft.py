"""Run `python -m trl.scripts.sft`, continue from its last checkpoint, and copy its log.

    python experiments/studies/programs/trl_sft.py OUTPUT LOG [options of trl.scripts.sft]

The Trainer writes its history with every checkpoint; each new line of it is copied to LOG.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

output = Path(sys.argv[1])
log = sys.argv[2]
options = sys.argv[3:]


def checkpoints() -> list[Path]:
    states = output.glob("checkpoint-*/trainer_state.json")
    return sorted(states, key=lambda path: int(path.parent.name.split("-")[1]))


def read_history() -> list[dict[str, float]]:
    """Return the lines of the last checkpoint, or none while it is being written or replaced."""
    try:
        return list(json.loads(checkpoints()[-1].read_text())["log_history"])
    except (IndexError, FileNotFoundError, json.JSONDecodeError):
        return []


copied = 0.0
if checkpoints():
    options += ["--resume_from_checkpoint", str(checkpoints()[-1].parent)]
process = subprocess.Popen(
    ["python", "-m", "trl.scripts.sft", "--output_dir", str(output), *options]
)
while True:
    is_over = process.poll() is not None
    history = read_history()
    with open(log, "a") as file:
        for entry in history:
            names = {"train/loss": "loss", "valid/loss": "eval_loss"}
            values = {name: entry[key] for name, key in names.items() if key in entry}
            if entry["step"] > copied and values:
                file.write(json.dumps({"step": entry["step"], **values}) + "\n")
    copied = max([copied, *(entry["step"] for entry in history)])
    if is_over:
        sys.exit(process.returncode)
    time.sleep(0.5)
