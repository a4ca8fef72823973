"""The names of metrics that a user chooses: the rule, and names that would hide each other.

A name is used by metrics.jsonl, trials.csv and MLflow, which may keep each metric in a file of this
name. MLflow's rule allows more characters, 250 of them, and no name that a path would change.
"""

import re
import unicodedata

from sweep.errors import SweepError

# Groups that the sweep writes: perf/ and memory/ into curves, final/ and system/ into MLflow.
RESERVED = ("perf", "memory", "final", "system")
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)+")
SECONDS = "perf/seconds"  # all attempts of a trial, up to a line of its curve
MOST_CHARACTERS = 200  # MLflow's names of results are longer by a few characters
MOST_NAMES = 1000  # metrics of one trial
FINAL_VALID = "final_valid_"


def final_column(name: str) -> str:
    """Return the column of trials.csv that has the final value of the metric valid/NAME."""
    return f"{FINAL_VALID}{name}"


def check_metric_name(name: str) -> None:
    """Raise SweepError unless every store of metrics can take a name such as `train/loss`."""
    if NAME.fullmatch(name) and len(name) <= MOST_CHARACTERS:
        return
    rule = f"names of letters, digits and _ . -, with / between parts, up to {MOST_CHARACTERS}"
    remedy = "Rename it, for example valid/accuracy"
    raise SweepError(f"metrics must have {rule}, got {name!r}. {remedy}.")


def check_reported_name(name: str) -> None:
    """Also refuse the groups of names that the sweep writes itself, in any letter case."""
    check_metric_name(name)
    group = name.partition("/")[0]
    if _folded(group) in RESERVED:
        problem = f"must not have names of the groups that sweep writes ({', '.join(RESERVED)})"
        remedy = f"Rename it, for example train/{name.partition('/')[2]}"
        raise SweepError(f"reported metrics {problem}, got {name!r}. {remedy}.")


class MetricNames:
    """The names of one trial's metrics, none of which may be a file or folder of another one."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # as written, by their form without letter case
        self._folders: dict[str, str] = {}  # a name that lies in each folder
        self._known: set[str] = set()

    def add(self, name: str) -> None:
        """Add a name; raise SweepError if a store cannot keep it together with the others."""
        if name in self._known:
            return
        check_metric_name(name)
        folded = _folded(name)
        parts = folded.split("/")
        folders = ["/".join(parts[:count]) for count in range(1, len(parts))]
        others = [self._names.get(folded), self._folders.get(folded)]
        others += [self._names.get(folder) for folder in folders]
        for other in filter(None, others):
            problem = "must differ by more than letter case, and none may continue another one"
            raise SweepError(f"names of metrics {problem}, got {other!r} and {name!r}. Rename one.")
        if len(self._known) == MOST_NAMES:
            raise SweepError(f"a trial must have at most {MOST_NAMES} metrics, got {name!r} too.")
        self._known.add(name)
        self._names[folded] = name
        for folder in folders:
            self._folders.setdefault(folder, name)


def _folded(text: str) -> str:
    """Return the form that is the same for names that some file systems or databases confuse."""
    return unicodedata.normalize("NFKC", text).casefold()
