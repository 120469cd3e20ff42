"""Loss functions of training steps, and steps over several devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AUTO = jax.sharding.AxisType.Auto


def loss_of(fun: Callable[[Any, Any], Any]) -> Callable[..., Any]:
  """Returns a loss function that passes its model state on and has no metrics.

  >>> mpjax.make_train_step(loss_of(lambda params, batch: jnp.mean((params - batch) ** 2)), tx)

  Args:
    fun: `fun(params, batch)` returns the loss.
  """

  def loss_fn(params: Any, model_state: Any, batch: Any, rng: jax.Array | None) -> Any:
    del rng
    return fun(params, batch), (model_state, {})

  return loss_fn


@functools.cache
def rows(n: int) -> dict[str, Any]:
  # Returns a batch of integers over 16: sums of their products are exact in float32.
  # The targets can be divided by 3 as well, so that a third of a sum is exact too: XLA makes a
  # product with the rounded 1/3 of a division.
  rng = np.random.default_rng(n)
  x = rng.integers(-16, 17, (n, 3)).astype(np.float32) / 16
  return {"x": x, "y": 3 * rng.integers(-16, 17, n).astype(np.float32) / 16}


def quadratic(params: Any, model_state: Any, batch: Any, rng: jax.Array | None) -> Any:
  # Half the mean square of the errors of a linear model, and the largest error.
  del rng
  error = batch["x"] @ params - batch["y"]
  loss = jnp.sum(error**2) * 0.5 / len(batch["y"])
  return loss, (model_state, {"worst": jnp.max(jnp.abs(error))})


def squares(params: Any, model_state: Any, batch: Any, rng: jax.Array | None) -> Any:
  # In the dtype of the batch.
  del rng
  return jnp.mean((batch @ params.astype(batch.dtype)) ** 2), (model_state, {})


def product(params: Any, model_state: Any, batch: Any, rng: jax.Array | None) -> Any:
  # In float16.
  del rng
  out = batch.astype(jnp.float16) @ params.astype(jnp.float16)
  return jnp.mean(out.astype(jnp.float32) ** 2), (model_state, {"largest": jnp.max(out)})


def returning(out: Callable[[Any, Any], Any]) -> Callable[..., Any]:
  """Returns a loss function whose result is `out` of the sum of the parameters and the state."""
  return lambda params, model_state, batch, rng: out(jnp.sum(params), model_state)


def over_devices(
  step: Callable[..., Any], devices: list[Any], **options: Any
) -> Callable[..., Any]:
  """Returns `step(state, batch)`, compiled for a mesh of devices that divide the rows: "data"."""
  mesh = jax.make_mesh((len(devices),), ("data",), (AUTO,), devices=devices)
  specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
  return jax.jit(jax.shard_map(step, mesh=mesh, **specs, **options))
