"""What trials read, told before anything runs: which text, which weights, and where they lie."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.config.experiment import Experiment
from sweep.errors import SweepError
from sweep.plan.plan import Start, tokenizer_of, tokens_per_sequence
from sweep.trial.folder import SweepFolder
from sweep.trial.start import identify_start


@dataclass(frozen=True)
class Inputs:
    """Identities, which are part of a trial, and paths, which are not."""

    data: dict[str, Any] | None = None
    data_path: str | None = None
    start: Start | None = None

    def paths(self) -> dict[str, str | None]:
        """Return where they lie now, as fields of a plan."""
        return {"data_path": self.data_path, "init_path": self.start.path if self.start else None}


def identify_inputs(experiment: Experiment, folder: SweepFolder) -> Inputs:
    """Identify what an experiment reads; downloads and tokenizes nothing.

    Raises:
        SweepError: if the text or the weights cannot be what the experiment needs.
    """
    data, path = None, None
    if experiment.data is not None:
        from sweep.data.sources import check_text_length, identify_data, is_path
        from sweep.data.tokenizer import check_tokenizer

        check_tokenizer(tokenizer_of(experiment))
        check_text_length(experiment.data, tokens_per_sequence(experiment))
        data = identify_data(experiment.data)
        path = _seen_from(folder, experiment.data) if is_path(experiment.data) else None
    if experiment.grpo is None or experiment.grpo.init is None:
        return Inputs(data, path)
    init = experiment.grpo.init
    found = identify_start(init)
    own = {"model": experiment.model.model_dump(mode="json"), "data": data}
    has_tokenizer = data is not None or experiment.tokenizer == "pretrained"
    own["tokenizer"] = tokenizer_of(experiment).model_dump(mode="json") if has_tokenizer else None
    for name, wanted in own.items():
        if name in found and found[name] != wanted:
            raise SweepError(
                f"init must be a trial of the experiment's {name}, got one of {found[name]!r} for "
                f"{wanted!r}. Give the {name} of that trial."
            )
    start = Start({"weights": found["weights"]}, _seen_from(folder, init))
    return Inputs(data, path, start)


def _seen_from(folder: SweepFolder, source: str) -> str:
    """Keep an absolute path; write any other as seen from the sweep folder, which may move too."""
    path = Path(source).expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path, folder.path)
