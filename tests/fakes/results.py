"""The content of a result.json that no training wrote."""

from typing import Any

from sweep.trial.result import FIELDS


def result_of(trial_id: str, **fields: Any) -> dict[str, Any]:
    """Return the result of a complete trial; what is not given is empty or the same for all."""
    return {
        **dict.fromkeys(name for name, column in FIELDS.items() if column.is_in_file),
        "id": trial_id,
        "stage": "final",
        "policy": "fixed",
        "batch_size": 4,
        "seed": 0,
        "learning_rate": 0.1,
        "tokens": 400,
        "steps": 100,
        "devices": 1,
        "microbatch_size": 4,
        "gradient_accumulation_steps": 1,
        "state": "COMPLETE",
        "attempts": 1,
        "final_valid_loss": 1.0,
        "seconds_total": 2.0,
        "seconds_training": 1.0,
        "device": "Example CPU",
        "execution": {},
        "metrics_sha256": "",
        **fields,
    }
