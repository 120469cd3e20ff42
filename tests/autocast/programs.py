"""Whole programs to put under autocast, with values for their arguments.

Every one is in float32, is `(params, batch) -> (loss, outputs)`, and knows nothing of mpjax.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType

from tests.models import other_libraries, plain
from tests.models.other_libraries import Model
from tests.models.values import normal


class Program(NamedTuple):
  """One program."""

  make: Callable[[], Model]  # the function, and values for its arguments
  attention: bool = False  # whether there is attention in it
  backward: bool = True  # whether the loss has a gradient, and does not take its own


def plain_jax(fun: Any, values: Callable[[], Any]) -> Any:
  return lambda: Model(fun, *values())


# Data parallel training on eight devices.


def eight() -> Any:
  return jax.make_mesh((8,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:8])


def _loss(params: Any, x: Any, y: Any) -> tuple[Any, Any]:
  out = jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]
  return ((out - y) ** 2).mean(), out


def sharded_loss(params: Any, batch: Any) -> Any:
  def mean(params, x, y):
    loss, out = _loss(params, x, y)
    return jax.lax.pmean(loss, "data"), out

  spec = jax.P("data")
  fun = jax.shard_map(mean, mesh=eight(), in_specs=(jax.P(), spec, spec), out_specs=(jax.P(), spec))
  return fun(params, batch["x"], batch["y"])


def sharded_step(params: Any, batch: Any) -> Any:
  """Loss and new parameters; each device takes the gradient of its own rows."""

  def local(params, x, y):
    varying = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
    loss, grads = jax.lax.pmean(jax.value_and_grad(lambda p: _loss(p, x, y)[0])(varying), "data")
    return loss, jax.tree.map(lambda p, g: p - g, params, grads)

  spec = jax.P("data")
  fun = jax.shard_map(local, mesh=eight(), in_specs=(jax.P(), spec, spec), out_specs=jax.P())
  return fun(params, batch["x"], batch["y"])


def _sharded_values() -> Any:
  params = {"up": plain.dense(8, 8), "bias": normal(8) / 4, "down": plain.dense(8, 8, 1)}
  return params, {"x": normal(64, 8, seed=2), "y": normal(64, 8, seed=3)}


PROGRAMS: dict[str, Program] = {
  # Other libraries.
  "equinox": Program(other_libraries.equinox_encoder, True),
  "haiku": Program(other_libraries.haiku_language_model, True),
  # Plain JAX.
  "custom_vjp_attention": Program(plain_jax(plain.attend_blockwise, plain.attention_values), True),
  "decoder": Program(plain_jax(plain.decoder, plain.decoder_values), True),
  "experts_by_group": Program(plain_jax(plain.experts_by_group, plain.experts_values)),
  "sharded_loss": Program(plain_jax(sharded_loss, _sharded_values)),
  "sharded_step": Program(plain_jax(sharded_step, _sharded_values), backward=False),
}
