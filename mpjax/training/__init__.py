"""One training step that holds everything: state, gradients, optimizer, and what skips with it."""

from mpjax.training._train_state import TrainState
from mpjax.training._train_step import make_train_step

__all__ = ["TrainState", "make_train_step"]
