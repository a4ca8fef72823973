"""Train scikit-learn's MLPClassifier on its handwritten digits, one `partial_fit` per step.

sweep run experiments/studies/programs/sklearn.toml
"""

import json
import os
import pickle
import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

rate = float(sys.argv[1])
log, checkpoint = sys.argv[2:4]
batch_size, steps, seed = map(int, sys.argv[4:])


def report(**metrics: float) -> None:
    with open(log, "a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=513, stratify=labels, random_state=0)
images, valid_images, labels, valid_labels = parts

rng = np.random.default_rng(seed)
epochs = steps * batch_size // len(labels) + 1
order = np.concatenate([rng.permutation(len(labels)) for _ in range(epochs)])

network = MLPClassifier((64,), solver="sgd", learning_rate_init=rate, random_state=seed)
step = 0
if os.path.exists(checkpoint):
    with open(checkpoint, "rb") as file:
        network, step = pickle.load(file)

while step < steps:
    chosen = order[step * batch_size : (step + 1) * batch_size]
    network.partial_fit(images[chosen], labels[chosen], classes=range(10))
    step += 1
    report(**{"train/loss": network.loss_})
    if step % 8 == 0:
        with open(checkpoint + ".part", "wb") as file:
            pickle.dump((network, step), file)
        os.replace(checkpoint + ".part", checkpoint)

probabilities = network.predict_proba(valid_images)
accuracy = network.score(valid_images, valid_labels)
report(**{"valid/loss": log_loss(valid_labels, probabilities), "valid/accuracy": accuracy})
