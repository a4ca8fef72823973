"""Train a Keras convolutional network on scikit-learn's handwritten digits with `Model.fit`.

KERAS_BACKEND=torch sweep run experiments/studies/programs/keras.toml
"""

import math

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import sweep

trial = sweep.settings()

images, labels = load_digits(return_X_y=True)
images, valid_images, labels, valid_labels = train_test_split(
    images.reshape(-1, 8, 8, 1) / 16, labels, test_size=517, stratify=labels, random_state=0
)

# Whole epochs in one order: `fit` would make a smaller step at the end of each epoch.
rng = np.random.default_rng(trial.seed)
epochs = math.ceil(trial.examples / len(labels))
order = np.concatenate([rng.permutation(len(labels)) for _ in range(epochs)])[: trial.examples]

keras.utils.set_random_seed(trial.seed)
network = keras.Sequential(
    [
        layers.Conv2D(8, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)
adam = keras.optimizers.Adam(
    trial.learning_rate,
    gradient_accumulation_steps=trial.accumulation if trial.accumulation > 1 else None,
)
network.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])


def evaluate(step):
    loss, accuracy = network.evaluate(valid_images, valid_labels, batch_size=517, verbose=0)
    sweep.log({"valid/loss": loss, "valid/accuracy": accuracy}, step=step)


evaluate(0)
network.fit(
    images[order], labels[order], batch_size=trial.microbatch_size, shuffle=False, verbose=0
)
evaluate(trial.steps)
