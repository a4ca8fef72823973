"""Handwritten digits by a small convolutional network; batch sizes are compared by accuracy."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from sweep import Workload

VALIDATION = 360  # the last images


class Digits(Workload):
    objective, direction = "accuracy", "maximize"
    tolerance = 0.01

    def __init__(self, config, device):
        super().__init__(config, device)
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.float32, device=device)
        self.labels = torch.tensor(labels, device=device)
        self.train_sequences = len(labels) - VALIDATION

    def build_model(self):
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 16, 10),
        )

    def build_batch(self, first, count):
        chosen = self.stream.indices(first, count)
        return self.images[chosen], self.labels[chosen]

    def loss_sum(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="sum")

    def evaluate(self, model):
        images, labels = self.images[-VALIDATION:], self.labels[-VALIDATION:]
        logits = model(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"accuracy": accuracy, "loss": F.cross_entropy(logits, labels)}
