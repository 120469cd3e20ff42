# pyright: strict
"""A user's script under a strict type checker: `make lint` checks it, a test runs it.

A finding in it is a fault of mpjax's types. What JAX and optax leave open is ignored at its line.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs]
from flax import nnx

import mpjax

Params = dict[str, Any]
Batch = tuple[jax.Array, jax.Array]


class Mlp(nn.Module):
  features: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    hidden = nn.relu(nn.Dense(self.features)(x))
    return nn.Dense(2, name="head")(hidden)


class Net(nnx.Module):
  def __init__(self, rngs: nnx.Rngs) -> None:
    self.head = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.head(x)


def mean_squares(predicted: jax.Array, labels: jax.Array) -> jax.Array:
  return jnp.mean((predicted - labels) ** 2)


def rules() -> list[mpjax.Rule]:
  """A rule by each selector."""
  return [
    mpjax.Rule("float32", path="head"),
    mpjax.Rule(mpjax.Policy(compute_dtype=jnp.float16), module=(nn.Dense, nn.Conv)),
    mpjax.Rule(None, where=lambda module: isinstance(module, nn.LayerNorm)),
  ]


def logits(model: mpjax.linen.PolicyModule, params: Params, x: jax.Array) -> jax.Array:
  result: jax.Array = model.apply({"params": params}, x)
  return result


def train_linen(batch: Batch) -> float:
  """A training loop in float16, and what reads its state."""
  policy: mpjax.Policy = mpjax.Policy.parse("mixed_float16")
  model = mpjax.linen.with_policy(Mlp(4), policy, rules()[:1])
  params: Params = model.init(jax.random.key(0), batch[0])["params"]
  tx = mpjax.loss_scaling(optax.adam(1e-2), mpjax.DynamicLossScale(init_scale=2.0**10))
  opt_state = tx.init(params)

  def loss_fn(params: Params) -> jax.Array:
    return mean_squares(logits(model, params, batch[0]), batch[1])

  scaled = mpjax.scaled(loss_fn, opt_state)
  loss, grads = jax.value_and_grad(scaled)(params)  # pyright: ignore[reportUnknownMemberType]
  updates, opt_state = tx.update(grads, opt_state, params)
  params = mpjax.apply_updates(params, updates)
  metrics = mpjax.loss_scaling_metrics(opt_state)
  applied: jax.Array = mpjax.step_applied(opt_state)
  kept = mpjax.keep_if_skipped(opt_state, params, params)
  mpjax.check_skipped_steps(opt_state)
  assert kept.keys() == params.keys()
  assert applied.shape == ()
  return float(loss) + float(metrics["loss_scale"])


def train_step(batch: Batch) -> mpjax.TrainState:
  """The step that commits everything or nothing."""
  model = mpjax.linen.with_policy(Mlp(4), "mixed_bfloat16")
  params: Params = model.init(jax.random.key(0), batch[0])["params"]

  def loss_fn(
    params: Params, model_state: tuple[()], batch: Batch, rng: jax.Array | None
  ) -> tuple[jax.Array, tuple[tuple[()], dict[str, jax.Array]]]:
    loss = mean_squares(logits(model, params, batch[0]), batch[1])
    return loss, (model_state, {"squares": loss})

  tx = mpjax.loss_scaling(mpjax.master_weights(optax.sgd(0.1)), mpjax.NoLossScale())
  step = mpjax.make_train_step(loss_fn, tx)
  state, metrics = step(mpjax.TrainState.create(params, tx), batch)
  assert metrics.keys() >= {"loss", "squares"}
  return state


def train_nnx(batch: Batch) -> Net:
  """A view keeps the type of its model."""
  model = mpjax.nnx.with_policy(Net(nnx.Rngs(0)), "mixed_float16", rules()[:1])
  tx = mpjax.loss_scaling(optax.adam(1e-2))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  def loss_fn(model: Net) -> jax.Array:
    return mean_squares(model(batch[0]), batch[1])

  loss, grads = nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))(model)
  optimizer.update(model, grads)  # pyright: ignore[reportUnknownMemberType]
  assert loss > 0
  return model


def part_of(error: mpjax.MpjaxError) -> str:
  return error.where + error.expected + error.got + error.fix


def functions(batch: Batch) -> str:
  """A transformed function keeps its signature."""

  def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x @ w)

  autocast_loss = mpjax.autocast(loss, "bfloat16", ops=mpjax.OpLists())
  w = jnp.ones((4, 2))  # pyright: ignore[reportUnknownMemberType]
  value: jax.Array = autocast_loss(w, batch[0])
  audit: mpjax.reports.AuditReport = mpjax.audit(autocast_loss)(w, batch[0])
  found: mpjax.reports.NonfiniteReport = mpjax.find_nonfinite(loss)(w, batch[0])
  ranges: mpjax.reports.RangesReport = mpjax.ranges(loss)(w, batch[0])
  stored: Params = mpjax.convert({"w": w}, "bfloat16")
  return f"{value} {audit.half_share} {found} {ranges.groups} {stored.keys()}"
