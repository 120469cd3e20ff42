"""Training steps beyond the plain one, and what a user without mpjax writes instead; float8.

For `gpu_hlo.py`, which compiles and compares them: `BASES` says with which. All run the model under
the same policy, or autocast where mpjax traces the loss itself, so that a difference is the step's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import training_steps
from flax.training import dynamic_scale
from models import Case

import mpjax

MICRO_BATCHES = 4

BASES = {
  "static scale": "policy",
  "dynamic scale": "policy",
  "flax DynamicScale": "policy",
  "train step, no scale": "policy",
  "train step, dynamic": "train step, no scale",
  "micro-batches by hand": "policy",
  "micro-batches": "micro-batches by hand",
  "window by hand": "policy",
  "window": "window by hand",
  "masters by hand": "policy",
  "masters": "masters by hand",
  "masters, dynamic": "masters",
  "split masters": "masters",
  "float8": "policy",
}
"""Which version each is compared with. `micro-batches` are those inside of one step, in float32;
`window` is one of several steps, with one update at its end; both without a scale. `masters` are of
half parameters."""


def micro_batches_by_hand(apply: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """A step that adds up the gradients of several micro-batches in float32, in `jax.lax.scan`."""
  params, rest, opt_state = state
  parts = jax.tree.map(lambda x: x.reshape(-1, MICRO_BATCHES, *x.shape[1:]).swapaxes(0, 1), batch)

  def one(carry: Any, part: Any) -> tuple[Any, Any]:
    rest, total = carry
    loss = functools.partial(training_steps.loss_fn, apply)
    (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, *part)
    return (rest, jax.tree.map(jnp.add, total, grads)), value

  (rest, total), values = jax.lax.scan(one, (rest, jax.tree.map(jnp.zeros_like, params)), parts)
  grads = jax.tree.map(lambda g: g / MICRO_BATCHES, total)
  updates, opt_state = training_steps.optimizer().update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), rest, opt_state), values.mean()


def updated(tx: Any, apply: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """`training_steps.plain_step` with another optimizer."""
  params, rest, opt_state = state
  loss = functools.partial(training_steps.loss_fn, apply)
  (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, *batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), rest, opt_state), value


def masters(tx: Any, apply: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """`training_steps.plain_step` for half parameters with masters."""
  params, rest, opt_state = state
  loss = functools.partial(training_steps.loss_fn, apply)
  (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, *batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  params = mpjax.apply_updates(params, updates, opt_state)
  return (params, rest, opt_state), value


def scaled_masters(tx: Any, apply: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """`training_steps.mpjax_step` for half parameters with masters."""
  params, old, opt_state = state
  loss = functools.partial(training_steps.loss_fn, apply)
  grad_fn = jax.value_and_grad(mpjax.scaled(loss, opt_state), has_aux=True)
  (value, new), grads = grad_fn(mpjax.convert(params, "float32"), old, *batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  rest = mpjax.keep_if_skipped(opt_state, new, old)
  params = mpjax.apply_updates(params, updates, opt_state)
  return (params, rest, opt_state), value


def masters_by_hand(apply: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """A step with float32 masters of half parameters, kept beside the state of the optimizer."""
  params, rest, (masters, opt_state) = state
  loss = functools.partial(training_steps.loss_fn, apply)
  (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, *batch)
  grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
  updates, opt_state = training_steps.optimizer().update(grads, opt_state, masters)
  masters = optax.apply_updates(masters, updates)
  params = jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params)
  return (params, rest, (masters, opt_state)), value


def train_step(apply: Callable[..., Any], tx: Any, **options: Any) -> Callable[..., Any]:
  """Returns `mpjax.make_train_step` of the loss, to be jitted and donated to from outside."""

  def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    del rng
    loss, model_state = training_steps.loss_fn(apply, params, model_state, *batch)
    return loss, (model_state, {})

  step = mpjax.make_train_step(loss_fn, tx, donate=False, **options)
  return lambda state, *batch: step(state, batch)


def steps(case: Case, half: str) -> dict[str, tuple[Callable[..., Any], Any]]:
  """Returns the step of each of `BASES` and shapes of its state."""
  apply = mpjax.with_policy(case.make(), f"mixed_{half}").apply
  matmuls = dataclasses.replace(mpjax.Policy.parse(f"mixed_{half}"), matmul=mpjax.Float8())
  float8 = mpjax.with_policy(case.make(), matmuls).apply
  variables = dict(jax.eval_shape(case.make().init, jax.random.key(0), case.inputs))
  params = variables.pop("params")
  low = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, half), params)
  static, dynamic = mpjax.StaticLossScale(2.0**15), mpjax.DynamicLossScale()
  adamw, mastered = training_steps.optimizer(), mpjax.master_weights(training_steps.optimizer())

  def state(tx: Any, params: Any = params) -> Any:
    return params, variables, jax.eval_shape(tx.init, params)

  def stepped(tx: Any, **options: Any) -> tuple[Callable[..., Any], Any]:
    shapes = jax.eval_shape(
      lambda p, v: mpjax.TrainState.create(p, tx, model_state=v), params, variables
    )
    return train_step(apply, tx, **options), shapes

  def with_tx(step: Callable[..., Any], tx: Any, params: Any = params) -> tuple[Any, Any]:
    return functools.partial(step, tx, apply), state(tx, params)

  unscaled = mpjax.loss_scaling(adamw, mpjax.NoLossScale())
  window = optax.MultiSteps(adamw, MICRO_BATCHES).gradient_transformation()
  scaled = mpjax.loss_scaling(adamw, dynamic)
  by_hand = (low, variables, (params, jax.eval_shape(adamw.init, params)))
  found = (
    with_tx(training_steps.mpjax_step, mpjax.loss_scaling(adamw, static)),
    with_tx(training_steps.mpjax_step, scaled),
    (
      functools.partial(training_steps.flax_step, apply),
      (state(adamw), jax.eval_shape(dynamic_scale.DynamicScale)),
    ),
    stepped(unscaled),
    stepped(scaled),
    (functools.partial(micro_batches_by_hand, apply), state(adamw)),
    stepped(unscaled, micro_batches=MICRO_BATCHES),
    with_tx(updated, window),
    with_tx(updated, mpjax.accumulate_gradients(adamw, MICRO_BATCHES)),
    (functools.partial(masters_by_hand, apply), by_hand),
    with_tx(masters, mastered, low),
    with_tx(scaled_masters, mpjax.loss_scaling(mastered, dynamic), low),
    with_tx(updated, mpjax.master_weights(training_steps.optimizer(), storage="split"), low),
    (functools.partial(training_steps.plain_step, float8), state(adamw)),
  )
  return dict(zip(BASES, found, strict=True))
