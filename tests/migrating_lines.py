"""Runs the lines of the feature tables of docs/migrating, on small objects with the guides' names.

A line that gives back a function has run when it has given it back: nothing is trained here.
"""

import ast
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax

NOT_RUN = {
  "state, metrics = update(state, next(data))": "compiles a training step",
  "tx.update(grads, opt_state, params, value=value, grad=grads, value_fn=value_fn)": (
    "compiles a line search"
  ),
  'jax.lax.psum(grads, "data")': "has to be inside of shard_map",
}
"""The lines that nothing here runs, and why: a new one is to be run, or to be named here."""


def worlds() -> list[dict[str, Any]]:
  """Returns what the names of the lines are: a line must hold in one of these worlds.

  The guides write `tx` for the optimizer inside of `mpjax.loss_scaling(tx)` and for what comes out.
  """
  net = nn.Sequential([nn.Dense(2), nn.Dense(2)])
  layer = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
  params = {"head": {"kernel": jnp.ones((2, 2))}, "dense1": jnp.ones(2)}
  half = mpjax.Policy.parse("float16").cast_to_compute(params)
  layer_of_nnx = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  x, sgd = jnp.ones((1, 2)), optax.sgd(0.1, momentum=0.9)
  tx = mpjax.loss_scaling(mpjax.master_weights(sgd))
  several = mpjax.loss_scaling(sgd, {"a": mpjax.DynamicLossScale(), "b": mpjax.StaticLossScale(8)})
  state = mpjax.TrainState.create(half, tx)
  plain = {
    **{"mpjax": mpjax, "jax": jax, "jnp": jnp, "nn": nn, "optax": optax, "re": re},
    **{"model": net, "net": net, "MyModule": nn.Dense, "MyLayer": nn.Dense},
    **{"variables": {"params": {"layers_0": layer, "layers_1": layer}}, "x": x, "batch": {"x": x}},
    **{"params": params, "half": half, "grads": half, "updates": half},
    **{"weights": params, "tree": params, "new": params, "old": params, "finite": jnp.array(True)},
    **{"tx": sgd, "solver": sgd, "inner": sgd, "hook": optax.clip(1.0), "max_norm": 1.0},
    **{"opt_state": state.opt_state, "state": state, "path": state, "loss": jnp.float32(1)},
    **{"policy": mpjax.Policy(), "level": mpjax.opt_level("O1", "float16"), "primitive": "tanh"},
    **dict.fromkeys(("fn", "loss_fn", "forward"), jnp.sum),
    "keep": lambda module, method, call, cast: call,
    "loss_scale": mpjax.NoLossScale(),
    "view": mpjax.nnx.with_policy(layer_of_nnx, "mixed_float16"),
  }
  other = {"model": layer_of_nnx, "opt_state": several.init(params), "path": params}
  return [plain, {**plain, "tx": tx, "params": half}, {**plain, **other}]


def source(code: str) -> str:
  """Returns a line as a whole statement: that of a `with` has a body."""
  return f"{code}\n  pass" if code.endswith(":") else code


def does_something(code: str) -> bool:
  """Whether a line calls something, and is not a name alone, a text, or the type of a field."""
  return any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(source(code))))


def failure(code: str, names: dict[str, Any]) -> str:
  """Runs a line; returns why it failed, or an empty text."""
  try:
    exec(source(code), names)
  except Exception as error:
    return f"{type(error).__name__}: {error}"
  return ""


def failures(lines: list[str], objects: list[dict[str, Any]]) -> dict[str, list[str]]:
  """Runs the lines of a row, in order; returns those that fail in every world, with each error."""
  own = [dict(names) for names in objects]
  found = {code: [failure(code, names) for names in own] for code in lines if does_something(code)}
  return {code: why for code, why in found.items() if all(why)}
