"""Copy the last scores of a `spacy train` from the file of its logger to the log of a sweep.

    python experiments/studies/programs/spacy_log.py SPACY_LOG STEPS LOG

spaCy counts steps from 0 and computes its scores after a step's update.
"""

import json
import sys
from pathlib import Path

source, steps, log = sys.argv[1:]
last = json.loads(Path(source).read_text().splitlines()[-1])
assert last["step"] + 1 == int(steps), f"{steps} updates expected, got {last['step'] + 1}"
line = {"step": int(steps), "valid/score": last["scores"]["cats_score"]}
line["train/loss"] = last["losses"]["textcat"]
with open(log, "a") as file:
    file.write(json.dumps(line) + "\n")
