"""NNX models without running their initialisers, and what a policy makes of their programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from tests.models.values import filled

BF16 = jnp.dtype("bfloat16")
HALF = "params=float32,compute=bfloat16"
X = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)


class Metric(nnx.Variable):
  """A kind of variable of the user's own."""


def linear() -> nnx.Linear:
  return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


class Does(nnx.Module):
  """A layer, other parts, and a method that calls a function with the module and its arguments."""

  def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
    self.body, self.layer = body, nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    for name, part in parts.items():
      setattr(self, name, part)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self.body(self, *args, **kwargs)


def shapes(make: Callable[[nnx.Rngs], nnx.Module]) -> Any:
  # Returns a model whose variables are only shapes and dtypes; keys are real.
  return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


def split(make: Callable[[nnx.Rngs], nnx.Module], seed: int = 0) -> tuple[Any, Any, Any]:
  # Returns graph definition, parameters and all other variables, with values made by NumPy.
  try:
    abstract = shapes(make)
  except ValueError:
    abstract = make(nnx.Rngs(0))  # Layers that keep plain arrays are no result of `eval_shape`.
  graphdef, params, keys, rest = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
  keys = jax.tree.map(_key_or_count, keys)
  return graphdef, by_name(params, seed), nnx.merge_state(keys, by_name(rest, seed))


def by_name(state: Any, seed: int) -> Any:
  # Returns a state with values that go by the names of its variables.
  values = filled(nnx.to_pure_dict(state), seed)
  return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(values))


def _key_or_count(x: Any) -> Any:
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jnp.broadcast_to(jax.random.key(1), x.shape)
  return jnp.zeros(x.shape, x.dtype)


def model(make: Callable[[nnx.Rngs], nnx.Module], seed: int = 0) -> Any:
  """Returns a model with values made by NumPy."""
  return nnx.merge(*split(make, seed))


def under(plain: Any, policy: Any, **options: Any) -> Any:
  """Returns the view of a model; the model itself where there is no policy."""
  return plain if policy is None else mpjax.nnx.with_policy(plain, policy, **options)


def is_float(x: Any) -> bool:
  return bool(jnp.issubdtype(x.dtype, jnp.floating))


def total(tree: Any) -> Any:
  """Returns a float32 loss of all floating outputs; their dtypes stay visible beside it."""
  leaves = [x for x in jax.tree.leaves(tree) if is_float(x)]
  return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves), tree


def functions(graphdef: Any, policy: Any, run: Any, **options: Any) -> tuple[Any, Any]:
  """Returns pure functions of (params, rest, inputs): forward, and with gradients."""
  # Forward returns the outputs and the state afterwards; the other one both and the gradients of
  # parameters and inputs.

  def forward(params, rest, inputs):
    plain = nnx.merge(graphdef, params, rest, copy=True)
    out = run(under(plain, policy, **options), *inputs)
    return out, nnx.state(plain, nnx.Not(nnx.Param))

  def both(params, rest, inputs):
    def loss(params, inputs):
      out, state = forward(params, rest, inputs)
      return total(out)[0], (out, state)

    grads, found = jax.grad(loss, (0, 1), has_aux=True, allow_int=True)(params, inputs)
    return found, grads

  return forward, both
