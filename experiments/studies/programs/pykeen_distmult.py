"""Train PyKEEN's DistMult on its data set of kinships, as a Python function.

    sweep run experiments/studies/programs/pykeen.toml

PyKEEN makes a smaller step at the end of an epoch, so the batch sizes divide it.
"""

from pykeen.pipeline import pipeline


def train(trial):
    result = pipeline(
        dataset="kinships",
        model="DistMult",
        model_kwargs={"embedding_dim": 32},
        optimizer="adam",
        optimizer_kwargs={"lr": trial.learning_rate},
        training_kwargs={"num_epochs": trial.epochs, "batch_size": trial.batch_size},
        random_seed=trial.seed,
        device=trial.device,
    )
    mrr = result.get_metric("both.realistic.inverse_harmonic_mean_rank")
    trial.log({"train/loss": result.losses[-1], "valid/mrr": mrr}, step=trial.steps)
