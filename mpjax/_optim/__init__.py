"""Wrappers of optax optimizers, the functions that read their state, and the training step."""
