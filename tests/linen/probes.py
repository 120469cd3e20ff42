"""What the jaxpr of a Linen model under a policy computes in: its products, and those of probes."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import mpjax
from tests.programs import PROBE, equations, products

HALF = ["bfloat16", "float16"]
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)

calls: list[tuple[str, str]] = []
"""What a test notes while it traces, as (name, dtype)."""


def operands(fun: Any, *args: Any) -> list[tuple[str, str]]:
  # Returns the dtypes of both operands of every product of a function.
  return [p.dtypes for p in products(jax.make_jaxpr(fun)(*args))]


def all_half(fun: Any, *args: Any, count: int | None = None) -> None:
  # Asserts that a function has products, so many if it is said, and that all are in bfloat16.
  found = operands(fun, *args)
  assert found
  assert count is None or len(found) == count
  assert set(found) == {("bfloat16", "bfloat16")}, found


def text(fun: Any, *args: Any) -> str:
  # Returns the jaxpr as text, without the addresses that functions print.
  return re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(fun)(*args)))


def dtypes(tree: Any) -> Any:
  return jax.tree.map(lambda x: str(x.dtype), tree)


class Does(nn.Module):
  """Does what a function says, which is given the module; so a module is one line of a table."""

  body: Any

  @nn.compact
  def __call__(self, *args, **kwargs):
    return self.body(self, *args, **kwargs)


def calling(body: Any, lift: Any = lambda method: method) -> Any:
  # Returns a class of its own whose `__call__`, under `lift`, does what a function says.

  class Calling(nn.Module):
    @lift
    @nn.compact
    def __call__(self, *args):
      return body(self, *args)

  return Calling


# Modules that show the dtype of a product in them


def noted_as(path: str, x: Any) -> Any:
  # Computes a product of `x`, named after the module with that path; returns `x` as it is.
  with jax.named_scope(PROBE + path.replace("/", ".")):
    # The casts make an activation of an input: a product of inputs runs as written.
    row = x.astype(jnp.bfloat16).astype(jnp.float32).reshape(1, -1)
    jax.lax.dot(row, row.T)
  return x


def note(module: nn.Module, x: Any) -> Any:
  # Computes a product of what a module is given, named after the module; returns `x` as it is.
  return noted_as("/".join(module.path), x)


class Probe(nn.Module):
  """Returns what it is given, and computes a product of it."""

  @nn.compact
  def __call__(self, x):
    return note(self, x)


def noted(fun: Any, *args: Any) -> list[tuple[str, str]]:
  # Returns (path, dtype) of the product of each probe, in the order of the jaxpr.
  # The path is that which the module had when it was traced: in a jaxpr that `nn.jit` traced once
  # for two modules, that of the first.
  found = []
  for eqn, _ in equations(jax.make_jaxpr(fun)(*args)):
    _, probe, path = str(eqn.source_info.name_stack).rpartition(PROBE)
    if probe and eqn.primitive.name == "dot_general":
      left, right = (str(var.aval.dtype) for var in eqn.invars)
      assert left == right
      found.append((path.partition("/")[0].rstrip(")").replace(".", "/"), left))
  return found


def seen(fun: Any, *args: Any) -> dict[str, str]:
  # Returns the dtype of the product at each path; those of one path must agree.
  found: dict[str, str] = {}
  for path, dtype in noted(fun, *args):
    assert found.setdefault(path, dtype) == dtype, f"{path}: {found[path]} and {dtype}"
  return found


def seen_under(model: nn.Module, policy: Any, rules: Any = (), **options: Any) -> dict[str, str]:
  # Returns the dtype at each path of a model whose variables were made without a policy.
  variables = jax.eval_shape(model.init, KEY, X)
  return seen(mpjax.linen.with_policy(model, policy, rules, **options).apply, variables, X)
