"""Modules that show the dtype of a product in them, and programs as text to compare."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import mpjax
from tests.programs import PROBE, equations

HALF = ["bfloat16", "float16"]
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)

calls: list[tuple[str, str]] = []
"""What a test notes while it traces, as (name, dtype)."""


def note(module: nn.Module, x: Any) -> Any:
  """Computes a product of what a module is given, named after the module; returns `x` as it is."""
  with jax.named_scope(PROBE + ".".join(module.path)):
    flat = x.reshape(-1)
    jax.lax.dot(flat, flat)
  return x


class Probe(nn.Module):
  """Returns what it is given, and computes a product of it."""

  @nn.compact
  def __call__(self, x):
    return note(self, x)


def noted(fun: Any, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
  """Returns (path, dtype) of the product of each probe, in the order of the traced program.

  The path is that which the module had when it was traced: in a program that `nn.jit` traced once
  for two modules, that of the first.
  """
  program = jax.make_jaxpr(lambda *args: fun(*args, **kwargs))(*args)
  found = []
  for eqn, _ in equations(program):
    _, probe, path = str(eqn.source_info.name_stack).rpartition(PROBE)
    if probe and eqn.primitive.name == "dot_general":
      left, right = (str(var.aval.dtype) for var in eqn.invars)
      assert left == right
      found.append((path.partition("/")[0].rstrip(")").replace(".", "/"), left))
  return found


def seen(fun: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
  """Returns the dtype of the product at each path; those of one path must agree."""
  found: dict[str, str] = {}
  for path, dtype in noted(fun, *args, **kwargs):
    assert found.setdefault(path, dtype) == dtype, f"{path}: {found[path]} and {dtype}"
  return found


def seen_under(
  model: nn.Module, policy: Any, rules: Any = (), *args: Any, **options: Any
) -> dict[str, str]:
  """Returns the dtype at each path of a model whose variables were made without a policy."""
  args = args or (X,)
  variables = jax.eval_shape(model.init, KEY, *args)
  return seen(mpjax.linen.with_policy(model, policy, rules, **options).apply, variables, *args)


def text(fun: Any, *args: Any) -> str:
  """Returns the traced program as text, without the addresses that functions print."""
  return re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(fun)(*args)))


def dtypes(tree: Any) -> Any:
  """Returns the tree of dtype names."""
  return jax.tree.map(lambda x: str(x.dtype), tree)
