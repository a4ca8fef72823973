"""What would help where not even one sequence fits: forecasts of the same step, changed."""

from sweep.config.numbers import format_bytes
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.memory.forecast import forecast_step
from sweep.training.process import ShouldStop

CHUNK_ROWS = 512
PRECISIONS = ("fp32", "bf16", "bf16-pure")  # from wide to narrow


def describe_remedies(config: TrialConfig, should_stop: ShouldStop) -> str:
    """Return sentences: what one sequence takes by forecast, as planned and with each remedy."""
    config = config.sized(config.science.batch_size, 1)
    try:
        planned = forecast_step(config)
    except SweepError as error:
        return str(error)
    said = [f"One sequence takes {format_bytes(planned.peak_bytes)} by forecast"]
    for flag, changed in _changes(config).items():
        try:
            said.append(f"{format_bytes(forecast_step(changed).peak_bytes)} with {flag}")
        except SweepError:
            continue  # a model of the user's that cannot be changed so
    held = sum(planned.by_category[name] for name in ("weights", "gradients", "optimizer"))
    shared = planned.peak_bytes - held // 2
    said.append(f"{format_bytes(shared)} with weights, gradients and optimizer over 2 devices")
    return "; ".join(said) + "."


def _changes(config: TrialConfig) -> dict[str, TrialConfig]:
    execution, science = config.execution, config.science
    changes = {}
    if not execution.activation_checkpointing:
        changed = execution.model_copy(update={"activation_checkpointing": True})
        changes["--activation-checkpointing"] = config.model_copy(update={"execution": changed})
    if not execution.loss_chunk_rows:
        changed = execution.model_copy(update={"loss_chunk_rows": CHUNK_ROWS})
        flag = f"--loss-chunk-rows {CHUNK_ROWS}"
        changes[flag] = config.model_copy(update={"execution": changed})
    for precision in PRECISIONS[PRECISIONS.index(science.precision) + 1 :]:
        if science.workload != "quadratic":
            narrow = science.model_copy(update={"precision": precision})
            changes[f"--precision {precision}"] = config.model_copy(update={"science": narrow})
    return changes
