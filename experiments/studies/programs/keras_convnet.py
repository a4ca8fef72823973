"""Train a Keras convolutional network on scikit-learn's handwritten digits with `Model.fit`.

KERAS_BACKEND=torch sweep run experiments/studies/programs/keras.toml
"""

import json
import math
import sys

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

rate = float(sys.argv[1])
log = sys.argv[2]
microbatch_size, accumulation, steps, seed = map(int, sys.argv[3:])


class Reports(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        step, rest = divmod(batch + 1, accumulation)
        if rest == 0 and step % 8 == 0:
            report(step, **{"train/loss": logs["loss"]})


def report(step: int, **metrics: float) -> None:
    with open(log, "a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")


images, labels = load_digits(return_X_y=True)
images, valid_images, labels, valid_labels = train_test_split(
    images.reshape(-1, 8, 8, 1) / 16, labels, test_size=517, stratify=labels, random_state=0
)

# Whole epochs in one order: `fit` would make a smaller step at the end of each epoch.
rng = np.random.default_rng(seed)
count = steps * microbatch_size * accumulation
epochs = math.ceil(count / len(labels))
order = np.concatenate([rng.permutation(len(labels)) for _ in range(epochs)])[:count]

keras.utils.set_random_seed(seed)
network = keras.Sequential(
    [
        layers.Conv2D(8, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)
adam = keras.optimizers.Adam(
    rate, gradient_accumulation_steps=accumulation if accumulation > 1 else None
)
network.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
network.fit(
    images[order],
    labels[order],
    batch_size=microbatch_size,
    shuffle=False,
    callbacks=[Reports()],
    verbose=0,
)
loss, accuracy = network.evaluate(valid_images, valid_labels, batch_size=517, verbose=0)
report(steps, **{"valid/loss": loss, "valid/accuracy": accuracy})
