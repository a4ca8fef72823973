"""The inputs of a sweep: its text, initial weights and user code, identified or fetched."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweep.config.hub import PREFIX, weights_folder
from sweep.config.trial import tokenizer_of
from sweep.config.workloads import DECLARATIONS
from sweep.data.tokens import count_windows, prepare_data
from sweep.errors import SweepError, cut
from sweep.orchestration.inspection import inspect_plan
from sweep.orchestration.request import Request
from sweep.plan.plan import Inputs, Plan
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder
from sweep.trial.start import identify_start, weights_of
from sweep.usercode.identity import identify_code

LOG = logging.getLogger(__name__)


def identify_inputs(request: Request) -> tuple[Request, Inputs]:
    """Identify the text, the initial weights and the user code; downloads none of them.

    Returns:
        The request with what the user's workload declares, and the identities.
    """
    experiment = request.experiment
    folder = request.folder
    fields: dict[str, Any] = {}
    if experiment.user_code:
        fields["code"], declared = run_job(
            identify_code, experiment.user_code, DECLARATIONS, experiment.code_folder
        )
        if experiment.code_folder:
            fields["code_path"] = _relative_to(folder, experiment.code_folder)
        workload = experiment.workload.with_declarations(declared, experiment.surroundings)
        experiment = experiment.model_copy(update={"workload": workload})

    tokenizer = tokenizer_of(experiment)
    if experiment.data is not None:
        from sweep.data.sources import identify_data, is_path
        from sweep.data.tokens import refuse_small_vocabulary

        if tokenizer:
            refuse_small_vocabulary(tokenizer)
        fields["data"] = identify_data(experiment.data, experiment.text_column)
        if is_path(experiment.data):
            fields["data_path"] = _relative_to(folder, experiment.data)

    if experiment.init is not None:
        present = {
            "model": weights_of(experiment.model),
            "data": fields.get("data"),
            "tokenizer": tokenizer.model_dump(mode="json") if tokenizer else None,
        }
        fields["start"] = _start_of(experiment.init, present)

    if experiment.init:
        fields["init_path"] = _relative_to(folder, experiment.init)
    elif experiment.tokenizer == "pretrained" and experiment.model_source:
        fields["init_path"] = _relative_to(folder, experiment.model_source)
    return replace(request, experiment=experiment), Inputs(**fields)


def _start_of(init: str, present: dict[str, Any]) -> dict[str, Any]:
    """Identify initial weights; refuse those of a trial with another model, data or tokenizer."""
    start = identify_start(init)
    for name, expected in present.items():
        if name in start and start[name] != expected:
            raise SweepError(
                f"init must be a trial with the experiment's {name} ({cut(repr(expected))}), "
                f"got {cut(repr(start[name]))}. Give the {name} of that trial."
            )
    return {"weights": start["weights"]}


def _relative_to(folder: SweepFolder, source: str) -> str:
    """Keep an absolute path or a name of the hub; write a path relative to the sweep folder."""
    path = Path(source).expanduser()
    if source.startswith(PREFIX):
        return source
    return str(path) if path.is_absolute() else os.path.relpath(path, folder.path)


def get_inputs(plan: Plan, folder: SweepFolder) -> None:
    """Get data and weights, and check prompts, before anything of the sweep is written.

    Raises:
        KeyboardInterrupt: if `sweep stop` has asked the command to end meanwhile.
    """
    located = folder.located(plan)
    if located.start and located.init_path:
        weights_folder(located.init_path)

    tokenizer = tokenizer_of(plan.settings)
    if located.data and tokenizer:
        text = prepare_data(located.data, located.data_path, tokenizer, LOG.info, located.init_path)
        if plan.settings.workload.samples:
            inspect_plan(plan, folder)  # its prompts
        else:
            text.refuse_short_splits(plan.tokens_per_sequence)
            _warn_of_few_windows(plan, len(text.valid))

    if folder.stop_path.exists():
        raise KeyboardInterrupt


def _warn_of_few_windows(plan: Plan, valid_tokens: int) -> None:
    asked = plan.settings.evaluation.sequences or 0
    windows = count_windows(valid_tokens, plan.tokens_per_sequence)
    if asked > windows and plan.settings.target is None:
        LOG.warning(
            f"The validation split has {windows:,} sequences, so evaluations take all of "
            f"them, not evaluation.sequences ({asked:,})."
        )
