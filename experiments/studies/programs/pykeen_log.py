"""Copy the loss and the mean reciprocal rank of a `pykeen train` to the log of a sweep.

python experiments/studies/programs/pykeen_log.py FOLDER STEPS LOG
"""

import json
import sys
from pathlib import Path

folder, steps, log = sys.argv[1:]
results = json.loads((Path(folder) / "results.json").read_text())
mrr = results["metrics"]["both"]["realistic"]["inverse_harmonic_mean_rank"]
line = {"step": int(steps), "train/loss": results["losses"][-1], "valid/mrr": mrr}
with open(log, "a") as file:
    file.write(json.dumps(line) + "\n")
