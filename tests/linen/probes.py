"""Modules that say which dtype they were called in, and programs as text to compare."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import mpjax

HALF = ["bfloat16", "float16"]
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)

calls: list[tuple[str, str]] = []
"""(module path, dtype of the argument) for each call of a probe, in order of tracing."""


def note(module: nn.Module, x: Any) -> Any:
  """Notes the dtype that a module was handed, which is the one that it computes in."""
  calls.append(("/".join(module.path), str(x.dtype)))
  return x


class Probe(nn.Module):
  """Hands on what it is given, and notes its dtype."""

  @nn.compact
  def __call__(self, x):
    return note(self, x)


def seen(fun: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
  """Returns the dtype seen at each path while `fun` is traced; a path seen twice must agree."""
  calls.clear()
  jax.eval_shape(lambda *args: fun(*args, **kwargs), *args)
  found: dict[str, str] = {}
  for path, dtype in calls:
    assert found.setdefault(path, dtype) == dtype, f"{path}: {found[path]} and {dtype}"
  return found


def seen_under(
  model: nn.Module, policy: Any, rules: Any = (), *args: Any, **options: Any
) -> dict[str, str]:
  """Returns the dtype at each path of a model whose variables were made without a policy."""
  args = args or (X,)
  variables = model.init(KEY, *args)
  return seen(mpjax.linen.with_policy(model, policy, rules, **options).apply, variables, *args)


def text(fun: Any, *args: Any) -> str:
  """Returns the traced program as text, without the addresses that functions print."""
  return re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(fun)(*args)))


def dtypes(tree: Any) -> Any:
  """Returns the tree of dtype names."""
  return jax.tree.map(lambda x: str(x.dtype), tree)
