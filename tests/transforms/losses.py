"""Loss functions of training steps, of what differs between them; steps over several devices."""

from collections.abc import Callable
from typing import Any

import jax

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


def over_devices(
  step: Callable[..., Any], devices: list[Any], **options: Any
) -> Callable[..., Any]:
  """Returns `step(state, batch)`, compiled for a mesh of devices that divide the rows: "data"."""
  mesh = jax.make_mesh((len(devices),), ("data",), (AUTO,), devices=devices)
  specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
  return jax.jit(jax.shard_map(step, mesh=mesh, **specs, **options))
