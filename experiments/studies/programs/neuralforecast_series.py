"""Train neuralforecast's NHITS, by Lightning's Trainer, on series that it generates.

    sweep run experiments/studies/programs/neuralforecast.toml

As in its quickstart.
"""

from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from neuralforecast.utils import generate_series

import sweep

trial = sweep.settings()
df = generate_series(n_series=64, freq="D", min_length=100, max_length=100, seed=0)
model = NHITS(
    h=7,
    input_size=21,
    max_steps=trial.steps,
    learning_rate=trial.learning_rate,
    random_seed=trial.seed,
    batch_size=trial.batch_size,
    val_check_steps=trial.eval_steps,
    num_lr_decays=0,
    mlp_units=3 * [[32, 32]],
    callbacks=[sweep.LightningCallback()],
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    num_sanity_val_steps=-1,
)
NeuralForecast(models=[model], freq="D").fit(df, val_size=14)
