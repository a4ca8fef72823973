"""What a plan costs: seconds, epochs, disk; filled in where the machine and the cache know."""

from fractions import Fraction

from sweep.plan.plan import Plan, PlannedTrial


def with_estimates(
    plan: Plan,
    seconds: dict[tuple[int, int], float],
    peaks: dict[tuple[int, int], int],
    data_tokens: int | None,
    is_exact: bool,
    at_once: int,
) -> Plan:
    """Fill in what depends on the machine and the cache: seconds, epochs, disk.

    Args:
        plan: to fill in.
        seconds: estimated training seconds by batch size and tokens; {} where unknown.
        peaks: forecast bytes of a training step by batch and microbatch size; {} where unknown.
        data_tokens: training tokens of the data, or None.
        is_exact: whether they were counted, not estimated from bytes.
        at_once: trials that run at the same time.
    """
    epochs = None
    if data_tokens:
        windows = max(1, (data_tokens - 1) // plan.tokens_per_sequence)
        most = max(row.tokens for row in plan.trials)
        epochs = float(Fraction(most, windows * plan.tokens_per_sequence))
    rows = tuple(
        row.model_copy(
            update={
                "forecast_seconds": seconds.get((row.batch_size, row.tokens)),
                "forecast_bytes": peaks.get((row.batch_size, row.microbatch_size)),
            }
        )
        for row in plan.trials
    )
    parameters = plan.model["parameters"]
    disk = (
        None if parameters is None else disk_needed(parameters, rows, plan.execution.keep, at_once)
    )
    return plan.model_copy(
        update={
            "trials": rows,
            "epochs": epochs,
            "epochs_are_estimated": not is_exact,
            "disk_bytes": disk,
        }
    )


def disk_needed(
    parameters: int, rows: tuple[PlannedTrial, ...], keep: str, at_once: int = 1
) -> int:
    """Return the bytes that a sweep writes at most, checkpoints of running trials included.

    A checkpoint holds weights and AdamW's two moments in float32; two are kept and a third is
    being written. Curves, logs, losses and the tracking store: about 1 MB per trial.
    """
    weights, checkpoint = 4 * parameters, 12 * parameters
    kept = {"none": 0, "weights": weights, "checkpoints": weights + 2 * checkpoint}[keep]
    reported = sum(row.stage == "report" for row in rows)
    return at_once * 3 * checkpoint + reported * kept + len(rows) * 2**20
