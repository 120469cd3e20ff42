"""Where a value is rounded decides the result: policies against dtypes by hand, in numbers."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests import programs
from tests.models.delicate import CASES

# As people run them.
pytestmark = pytest.mark.standard_promotion

HALF = ("bfloat16", "float16")


class Linen(nn.Module):
  """A function with parameters as a module, its body in a submodule."""

  name_of: str

  @nn.compact
  def __call__(self, x):
    fun, params, _ = CASES[self.name_of]
    return fun({key: self.param(key, lambda _, v=v: v) for key, v in params.items()}, x, None)


class Nnx(nnx.Module):
  def __init__(self, name: str):
    fun, params, _ = CASES[name]
    self.fun, self.params = fun, nnx.data({key: nnx.Param(v) for key, v in params.items()})

  def __call__(self, x):
    return self.fun({key: v[...] for key, v in self.params.items()}, x, None)


def policied(name: str, half: str) -> Any:
  model = mpjax.linen.with_policy(Linen(name), f"mixed_{half}")
  return lambda params, x: model.apply({"params": params}, x)


def with_gradient(fun: Any) -> Any:
  """Returns a function that returns its result, and the gradient of the mean of its square."""

  def both(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
      out = fun(params, x)
      return jnp.mean(out.astype(jnp.float32) ** 2), out

    grads, out = jax.grad(loss, has_aux=True)(params)
    return out, grads

  return both


def near(x: Any, seed: int) -> Any:
  """Returns an input like `x`: itself for seed 0."""
  if seed == 0 or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
    return x
  return x * np.float32(1 + 0.05 * np.random.default_rng(seed).standard_normal(np.shape(x)))


def stacked(*draws: Any) -> Any:
  return np.stack([np.asarray(x, np.float64) for x in draws])


@pytest.mark.parametrize("names", [list(CASES)[i::4] for i in range(4)], ids=lambda n: n[0])
def test_errors_are_at_most_those_of_dtypes_by_hand(names):
  @programs.jitted
  def every(params: Any, inputs: Any) -> Any:
    found = {}
    for name in names:
      forms = {"plain": functools.partial(CASES[name].fun, low=None)}
      for half in HALF:
        forms[half] = policied(name, half)
        forms[f"{half} by hand"] = functools.partial(CASES[name].fun, low=jnp.dtype(half))
      args = params[name], inputs[name]
      found[name] = {form: with_gradient(fun)(*args) for form, fun in forms.items()}
    return found

  wrong = []
  params = {name: dict(CASES[name].params) for name in names}
  # In one draw alone it is chance which of two roundings is the larger one.
  draws = [every(params, {name: near(CASES[name].x, seed) for name in names}) for seed in range(4)]
  for (name, found), half in itertools.product(jax.tree.map(stacked, *draws).items(), HALF):
    forms = found[half], found[f"{half} by hand"], found["plain"]
    for what, got, hand, want in zip(("result", "gradient"), *forms, strict=True):
      ours, by_hand = programs.relative_error(got, want), programs.relative_error(hand, want)
      if np.isfinite(by_hand) and not np.isfinite(ours):
        wrong.append(f"{name}, {half}, {what}: not finite, as it is by hand")
      # Gradients in float16 that are not scaled overflow and underflow, and that of a norm is zero:
      # they say nothing.
      if what == "gradient" and (half == "float16" or by_hand > 0.5):
        continue
      if not ours <= 1.2 * by_hand + 1e-6:
        wrong.append(f"{name}, {half}, {what}: {ours:.2g}, by hand {by_hand:.2g}")
  assert wrong == []


@pytest.mark.parametrize("name", CASES)
def test_autocast_a_scope_and_nnx_compute_the_same(name):
  fun, params, x = CASES[name]
  ways = {
    "linen": policied(name, "bfloat16"),
    "autocast": mpjax.autocast(lambda p, x: fun(p, x, None), data_argnums=1),
  }
  found = {
    way: programs.operations(jax.make_jaxpr(call)(dict(params), x)) for way, call in ways.items()
  }
  with mpjax.linen.policy_scope("mixed_bfloat16"):
    call = lambda p, x: Linen(name).apply({"params": p}, x)  # noqa: E731
    found["scope"] = programs.operations(jax.make_jaxpr(call)(dict(params), x))
  view = mpjax.nnx.with_policy(Nnx(name), "mixed_bfloat16")
  graph, state = nnx.split(view)
  called = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, x)
  found["nnx"] = programs.operations(called)
  differ = [way for way, each in found.items() if sorted(each) != sorted(found["linen"])]
  assert differ == []
