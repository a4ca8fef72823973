"""Kinds of training: model, stream of sequences, loss and evaluation."""
