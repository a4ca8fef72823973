"""Train scikit-learn's MLPClassifier on its handwritten digits, one `partial_fit` per step.

sweep run experiments/studies/programs/sklearn.toml
"""

import os
import pickle

import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import sweep

trial = sweep.settings()
batch_size, steps, checkpoint = trial.batch_size, trial.steps, trial.resume

images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=513, stratify=labels, random_state=0)
images, valid_images, labels, valid_labels = parts

rng = np.random.default_rng(trial.seed)
epochs = steps * batch_size // len(labels) + 1
order = np.concatenate([rng.permutation(len(labels)) for _ in range(epochs)])

network = MLPClassifier(
    (64,), solver="sgd", learning_rate_init=trial.learning_rate, random_state=trial.seed
)
step = 0
if os.path.exists(checkpoint):
    with open(checkpoint, "rb") as file:
        network, step = pickle.load(file)

while step < steps:
    chosen = order[step * batch_size : (step + 1) * batch_size]
    network.partial_fit(images[chosen], labels[chosen], classes=range(10))
    step += 1
    sweep.log({"train/loss": network.loss_}, step=step)
    if step % 8 == 0:
        with open(checkpoint + ".part", "wb") as file:
            pickle.dump((network, step), file)
        os.replace(checkpoint + ".part", checkpoint)

probabilities = network.predict_proba(valid_images)
accuracy = network.score(valid_images, valid_labels)
loss = log_loss(valid_labels, probabilities)
sweep.log({"valid/loss": loss, "valid/accuracy": accuracy}, step=steps)
