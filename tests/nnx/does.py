"""A module of NNX that is one line of a table: its parts, and what it does with them."""

from collections.abc import Callable
from typing import Any

from flax import nnx


class Does(nnx.Module):
  """A layer, other parts, and a method that calls a function with the module and its arguments."""

  def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
    self.body, self.layer = body, nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    for name, part in parts.items():
      setattr(self, name, part)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self.body(self, *args, **kwargs)
