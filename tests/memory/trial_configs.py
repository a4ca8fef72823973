"""A trial's config for one microbatch size, as probing builds it."""

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.plan.plan import build_plan


def trial_config(size, experiment="quick", **settings):
    fields = {"batches": [size], "precision": "fp32", "budget": 10**9, **settings}
    plan = build_plan(
        load_experiment(experiment, fields),
        Execution(device="cpu", threads=2, evaluation_batch_size=size, loss_chunk_rows=1024),
        data={"name": "synthetic"},
        microbatch=size,
    )
    return plan.trial_config(plan.trials[0], "probe")
