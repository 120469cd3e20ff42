"""Functions with one float32 leak each, on a line marked `# LEAK` or of its own.

Each maker returns the function and its arguments, as shapes or arrays. What is in low precision
otherwise is there by hand, by a policy, or by autocast.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax

BF16, F32 = jnp.bfloat16, jnp.float32
X = jax.ShapeDtypeStruct((16, 8), BF16)
WIDE = jax.ShapeDtypeStruct((16, 8), F32)
W = jax.ShapeDtypeStruct((8, 8), BF16)


class Planted(NamedTuple):
  """A leak.

  Fields:
    make: returns the function and its arguments.
    path: that of the leak ends so.
    kind: of its cause.
    name: the name of its cause contains it.
    operation: where float32 enters.
    leaky: a function of one line, which is that of the leak.
  """

  make: Callable[[], tuple[Any, tuple[Any, ...]]]
  path: str
  kind: str
  name: str
  operation: str
  leaky: Callable[..., Any] | None = None

  @property
  def line(self) -> int:
    """The line of `leaky`, or with the mark."""
    if self.leaky is not None:
      return self.leaky.__code__.co_firstlineno
    lines, first = inspect.getsourcelines(self.make)
    (found,) = (first + i for i, line in enumerate(lines) if "# LEAK" in line)
    return found


LEAKS: dict[str, Planted] = {}


def planted(path: str, kind: str, name: str, operation: str) -> Callable[[Any], Any]:
  def add(make: Any) -> Any:
    LEAKS[make.__name__] = Planted(make, path, kind, name, operation)
    return make

  return add


# Plain functions, cast by hand.


def between(op: Callable[..., Any], *more: Any) -> tuple[Any, tuple[Any, ...]]:
  """Returns a function with an operation between two matmuls in bfloat16, and its arguments."""
  return (lambda x, w, *args: op(x @ w, *args) @ w), (X, W, *more)


TABLE = np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)
IDS = jax.ShapeDtypeStruct((16,), jnp.int32)
MEAN = functools.partial(jnp.mean, axis=-1, keepdims=True, dtype=jnp.float32)

# The operation, its other arguments; the kind and the name of the cause, where float32 enters.
BETWEEN: dict[str, tuple[Any, ...]] = {
  "float32_constant": (lambda h: h + TABLE, (), "constant", "float32[16,8]", "add"),
  "zeros_without_a_dtype": (*(lambda h: jnp.zeros((16, 8)) + h, ()), *("filled", "of 0", "add")),
  "numpy_scalar": (lambda h: h * np.float32(0.5), (), "number", "0.5", "mul"),
  "float32_mask": (lambda h, mask: jnp.tanh(h) * mask, (WIDE,), "argument", "args[0]", "mul"),
  "chosen": (
    *(lambda h, fallback: jnp.where(h > 0, h, fallback), (WIDE,)),
    *("argument", "args[0]", "select_n"),
  ),
  "one_hot": (
    *(lambda h, ids: h + jax.nn.one_hot(ids, 8), (IDS,)),
    *("operation", "convert_element_type", "add"),
  ),
  "number_before_a_cast": (
    *(lambda h, w: (y := h * np.float32(3)) @ w.T.astype(y.dtype) @ w.astype(y.dtype), (W,)),
    *("number", "3", "mul"),
  ),
  "scaled_or_0": (lambda h: jnp.where(h > 0, h * np.float32(2), 0), (), "number", "2", "mul"),
  "mean_by_hand": (
    *(lambda h: h - h.astype(F32).mean(0, keepdims=True), ()),
    *("operation", "reduce_sum", "sub"),
  ),
  "mean_of_a_half_array": (lambda h: h - MEAN(h), (), "operation", "reduce_sum", "sub"),
}
for called, (op, more, *cause) in BETWEEN.items():
  LEAKS[called] = Planted(functools.partial(between, op, *more), "", *cause, leaky=op)


@planted("", "number", "2.8", "div")
def square_root_of_numpy_before_a_mask():
  def fn(q, k, mask):
    scores = q @ k.T / np.sqrt(np.float32(8))  # LEAK
    scores = jnp.where(mask, scores, -1e9)
    return jnp.sum(((scores @ k) @ k.T) ** 2)

  return jax.grad(fn), (X, X, jax.ShapeDtypeStruct((16, 16), jnp.bool_))


@planted("head", "operation", "add of bfloat16 and float16", "add")
def bfloat16_and_float16():
  def fn(x, other):
    with jax.named_scope("head"):
      return (x + other) @ x.T  # LEAK

  return fn, (X, jax.ShapeDtypeStruct((16, 8), jnp.float16))


@planted("", "cast", "convert_element_type", "dot_general")
def cast_by_hand():
  def fn(x, w):
    h = jax.nn.relu(x @ w)
    return h.astype(jnp.float32) @ w  # LEAK

  return fn, (X, W)


@planted("", "matmul", "dot_general", "dot_general")
def preferred_element_type():
  def fn(x, w):
    h = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return h @ w  # LEAK

  return fn, (X, W)


@planted("", "parameter", "lora_a", "dot_general")
def float32_lora():
  def fn(params, x):
    h = x @ params["kernel"]
    update = (x @ params["lora_a"]) @ params["lora_b"]  # LEAK
    return (h + update) @ params["kernel"]

  wide = jax.ShapeDtypeStruct((8, 2), F32), jax.ShapeDtypeStruct((2, 8), F32)
  return fn, ({"kernel": W, "lora_a": wide[0], "lora_b": wide[1]}, X)


@planted("", "argument", "state", "add")
def float32_carry():
  def fn(state, xs, w):
    def step(carry, x):
      carry = jnp.tanh(x @ w + carry)  # LEAK
      return carry, carry.astype(BF16)

    return jax.lax.scan(step, state, xs)

  return fn, (WIDE, jax.ShapeDtypeStruct((4, 16, 8), BF16), W)


@planted("", "argument", "bias", "add")
def inside_of_a_branch():
  def fn(flag, x, w, bias):
    def leaky(x):
      return ((x @ w + bias) @ w).astype(BF16)  # LEAK

    return jax.lax.cond(flag, leaky, lambda x: x @ w, x)

  return fn, (jax.ShapeDtypeStruct((), bool), X, W, WIDE)


# Linen, by hand.


class Net(nn.Module):
  """A module whose call is a function."""

  body: Callable[[nn.Module, Any], Any]

  @nn.compact
  def __call__(self, x):
    return self.body(self, x)


def linen(body: Any, x: Any = X, policy: str | None = None) -> tuple[Any, tuple[Any, ...]]:
  variables = jax.eval_shape(Net(body).init, jax.random.key(0), x)
  model = Net(body) if policy is None else mpjax.linen.with_policy(Net(body), policy)
  return (lambda variables, x: model.apply(variables, x)), (variables, x)


def half_dense(**options: Any) -> nn.Module:
  return nn.Dense(8, dtype=BF16, **options)


@planted("LayerNorm_0", "parameter", "LayerNorm_0/scale", "mul")
def norm_without_a_dtype():
  def body(net, x):
    h = nn.LayerNorm()(half_dense()(x))  # LEAK
    return h @ net.param("head", nn.initializers.ones, (8, 8), BF16)

  return linen(body)


# Linen and NNX under a policy.


@planted("Net", "constant", "float32[16,8]", "add")
def table_under_a_policy():
  return linen(
    lambda net, x: nn.Dense(8)(nn.Dense(8)(x) + TABLE),  # LEAK
    *(WIDE, "mixed_bfloat16"),
  )


@planted("", "argument", "x/up/memory", "add")
def second_input_under_a_policy():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.up = nnx.Linear(8, 8, rngs=rngs)
      self.down = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
      h = self.up(x["up"]["x"])  # It is named as a module is.
      h = h + x["up"]["memory"]  # LEAK
      return self.down(nnx.relu(h))

  model = Net(nnx.Rngs(0))

  def fn(model, x):
    return mpjax.nnx.with_policy(model, "mixed_bfloat16")(x)

  return fn, (model, {"up": {"x": WIDE, "memory": WIDE}})
