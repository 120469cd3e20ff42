"""What autocast adds to the time of tracing, for programs of 100 to 10,000 equations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import measure
import numpy as np
from jax import lax

import mpjax

COUNTS = (100, 300, 1000, 3000, 10_000)

Build = Callable[[int], tuple[Callable[..., Any], Sequence[Any]]]
"""`how many times the pattern is repeated -> (a function, its arguments)`."""


def _lax(times: int) -> tuple[Callable[..., Any], Sequence[Any]]:
  """Products, sums and tanh, each by one call of `jax.lax`."""
  dims = (((1,), (0,)), ((), ()))

  def fun(x: Any, w: Any) -> Any:
    for _ in range(times):
      x = lax.tanh(lax.add(lax.dot_general(x, w, dims), x))
    return lax.reduce_sum(x, (0, 1))

  return fun, _arrays()


def _arrays() -> tuple[Any, Any]:
  return jnp.ones((4, 8)), jnp.ones((8, 8))


def _numpy(times: int) -> tuple[Callable[..., Any], Sequence[Any]]:
  """What `jax.numpy` and `jax.nn` make: literals, promotions, small functions under `jit`."""

  def fun(x: Any, w: Any) -> Any:
    for _ in range(times):
      x = x + jax.nn.gelu(x @ w + 1.0)
      x = x - jnp.mean(x, axis=-1, keepdims=True)
      x = x / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-6)
    return jnp.where(x > 0, x, 0.5 * x).sum()

  return fun, _arrays()


class _Deep(nn.Module):
  times: int

  @nn.compact
  def __call__(self, x: Any) -> Any:
    for _ in range(self.times):
      y = nn.LayerNorm()(x)
      y = nn.MultiHeadDotProductAttention(2)(y)
      x = x + y
      x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
    return x.mean()


def _flax(times: int) -> tuple[Callable[..., Any], Sequence[Any]]:
  """A transformer of Flax Linen, layer after layer."""
  model, x = _Deep(times), jnp.ones((1, 4, 8))
  shapes = jax.eval_shape(model.init, jax.random.key(0), x)
  return model.apply, (jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes), x)


def _plain(fun: Callable[..., Any]) -> Callable[..., Any]:
  return fun


def _cast(fun: Callable[..., Any]) -> Callable[..., Any]:
  return mpjax.autocast(fun, "bfloat16")


def _gradient(wrap: Callable[..., Any]) -> Callable[..., Any]:
  return lambda fun: jax.value_and_grad(wrap(fun))


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

KINDS: Mapping[str, tuple[Build, Wrap, Wrap]] = {
  "jax.lax": (_lax, _plain, _cast),
  "jax.numpy": (_numpy, _plain, _cast),
  "Flax": (_flax, _plain, _cast),
  "value_and_grad(autocast), jax.numpy": (_numpy, _gradient(_plain), _gradient(_cast)),
  "value_and_grad(autocast), Flax": (_flax, _gradient(_plain), _gradient(_cast)),
  "autocast(value_and_grad), jax.numpy": (
    _numpy,
    _gradient(_plain),
    lambda fun: _cast(_gradient(_plain)(fun)),
  ),
}
"""What is built, and what is traced without autocast and with it."""


def equations(fun: Callable[..., Any], args: Sequence[Any]) -> int:
  """Returns how many equations a program has, those inside of others too, as they are written."""
  return sum(1 for _ in jaxprs.walk(jax.make_jaxpr(fun)(*args)))


def sized(kind: str, count: int) -> tuple[Callable[..., Any], Sequence[Any], int]:
  """Returns a program of the kind that has about `count` equations, and how many they are."""
  build, wrap, _ = KINDS[kind]
  one, three = (equations(wrap(f), args) for f, args in map(build, (1, 3)))
  fun, args = build(max(1, round((count - one) / ((three - one) / 2)) + 1))
  return fun, args, equations(wrap(fun), args)


def compare(kind: str, count: int, rounds: int, *, cold: bool = False) -> dict[str, Any]:
  """Returns processor seconds to trace one program, without and with autocast, taken by turns.

  Args:
    kind: a name of `KINDS`.
    count: about how many equations the program is to have.
    rounds: how often each is traced.
    cold: JAX's caches are emptied before each, as in a new process.
  """
  _, plain, cast = KINDS[kind]
  fun, args, found = sized(kind, count)
  # Functions that no cache has seen; what they call inside, such as gelu, it has, unless cold.
  runs = {
    "plain": (lambda *a: plain(lambda *b: fun(*b))(*a), args),
    "autocast": (lambda *a: cast(lambda *b: fun(*b))(*a), args),
  }
  times = measure.trace_turns(runs, rounds=rounds, cold=cold, own_garbage=True)
  return {"equations": found, "cold": cold, **times}
