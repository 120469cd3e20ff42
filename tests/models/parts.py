"""Modules described once for Linen and NNX: their parts, and what they do when they are called.

`hand` is the dtype that their author would give to each layer by hand.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
from flax import nnx


class Part(NamedTuple):
  """One module in both frameworks; each function is given the module around it, NNX `Rngs` too."""

  linen: Callable[[Any], nn.Module]
  nnx: Callable[[Any, Any], nnx.Module]


def module(call: Callable[..., Any], params: Any = None, own: Any = None, **parts: Part) -> Part:
  """Returns a module: `call(module, *inputs)`, and initialisers and shapes of its parameters.

  `own` is what its field `policy` holds.
  """

  class Linen(nn.Module):
    policy: Any = own

    def setup(self) -> None:
      for name, part in parts.items():
        setattr(self, name, part.linen(self))
      for name, (init, shape) in (params or {}).items():
        setattr(self, name, self.param(name, init, shape))

    def __call__(self, *args: Any) -> Any:
      return call(self, *args)

    def helper(self, fun: Callable[..., Any], *args: Any) -> Any:
      return fun(*args)

  class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
      self.policy = own
      for name, part in parts.items():
        setattr(self, name, part.nnx(self, rngs))
      for name, (init, shape) in (params or {}).items():
        setattr(self, name, nnx.Param(init(rngs.params(), shape)))

    def __call__(self, *args: Any) -> Any:
      return call(self, *args)

    def helper(self, fun: Callable[..., Any], *args: Any) -> Any:
      return fun(*args)

  return Part(lambda around: Linen(), lambda around, rngs: Nnx(rngs))


def dense(
  inputs: int, features: int, hand: Any = None, bias: bool = False, precision: Any = None
) -> Part:
  options: Any = {"use_bias": bias, "dtype": hand, "precision": precision}
  return Part(
    lambda around: nn.Dense(features, **options),
    lambda around, rngs: nnx.Linear(inputs, features, **options, rngs=rngs),
  )


def conv(inputs: int, features: int, size: int, stride: int = 1, **options: Any) -> Part:
  window = ((size, size), (stride, stride))
  return Part(
    lambda around: nn.Conv(features, *window, **options),
    lambda around, rngs: nnx.Conv(inputs, features, *window, **options, rngs=rngs),
  )


def norm(kind: str, features: int, *sizes: int, of_nnx: Any = None, **options: Any) -> Part:
  """Returns one of the norms that both have, `of_nnx` being options that Linen has not."""
  return Part(
    lambda around: getattr(nn, kind)(*sizes, **options),
    lambda around, rngs: getattr(nnx, kind)(
      features, *sizes, **options, **(of_nnx or {}), rngs=rngs
    ),
  )


def dropout(rate: float) -> Part:
  return Part(
    lambda around: nn.Dropout(rate, deterministic=False),
    lambda around, rngs: nnx.Dropout(rate, rngs=rngs),
  )


def stack(layer: Part, length: int, remat: bool = False) -> Part:
  """Returns layers with parameters of their own, in a loop."""

  def step(layer: Any, x: Any) -> Any:
    return layer(x)

  class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
      one = nn.remat(step, prevent_cse=False) if remat else step
      axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
      scan = nn.scan(lambda layer, x, _: (one(layer, x), None), length=length, **axes)
      return scan(layer.linen(None), x, None)[0]

  class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
      self.layers = nnx.vmap(lambda rngs: layer.nnx(None, rngs))(rngs.split(length))

    def __call__(self, x: Any) -> Any:
      one = nnx.remat(step, prevent_cse=False) if remat else step
      scan = nnx.scan(one, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
      return scan(self.layers, x)

  return Part(lambda around: Linen(), lambda around, rngs: Nnx(rngs))
