"""The training steps that benchmarks measure: plain, and with loss scaling of two kinds.

Each takes a state (parameters, other collections of the model, optimizer state) and a batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from models import Case

import mpjax


def loss_fn(apply: Callable[..., Any], params: Any, rest: Any, inputs: Any, labels: Any) -> Any:
  """Returns the mean cross-entropy, and the new values of the other collections."""
  logits, new = apply({"params": params, **rest}, inputs, mutable=list(rest))
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean(), new


def optimizer() -> optax.GradientTransformation:
  """Returns what every step uses."""
  return optax.adamw(1e-4)


def plain_step(apply: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """A training step as JAX and optax have it."""
  return step_of(functools.partial(loss_fn, apply), state, *batch)


def step_of(loss: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """The same, with the loss as a function of parameters, other collections and the batch."""
  params, rest, opt_state = state
  (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, *batch)
  updates, opt_state = optimizer().update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), rest, opt_state), value


def mpjax_step(tx: Any, apply: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """A training step with `mpjax.loss_scaling`."""
  params, old, opt_state = state
  loss = functools.partial(loss_fn, apply)
  grad_fn = jax.value_and_grad(mpjax.scaled(loss, opt_state), has_aux=True)
  (value, new), grads = grad_fn(params, old, *batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  rest = mpjax.keep_if_skipped(opt_state, new, old)
  return (optax.apply_updates(params, updates), rest, opt_state), value


def flax_step(apply: Callable[..., Any], state: Any, *batch: Any) -> tuple[Any, Any]:
  """A training step with `flax.training.dynamic_scale`, whose user selects by hand."""
  (params, old, opt_state), scale = state
  loss = functools.partial(loss_fn, apply)
  grad_fn = scale.value_and_grad(loss, has_aux=True)
  scale, finite, (value, new), grads = grad_fn(params, old, *batch)
  updates, new_opt_state = optimizer().update(grads, opt_state, params)
  everything = (optax.apply_updates(params, updates), new, new_opt_state)
  kept = jax.tree.map(functools.partial(jnp.where, finite), everything, (params, old, opt_state))
  return (kept, scale), value


def first_state(case: Case, tx: optax.GradientTransformation) -> tuple[Any, Any, Any]:
  """Returns parameters, other collections and optimizer state; the same for every variant."""
  variables = dict(jax.jit(case.make().init)(jax.random.key(0), case.data()[0]))
  params = variables.pop("params")
  return params, variables, tx.init(params)


def variants(case: Case, half: str) -> dict[str, Callable[..., Any]]:
  """Returns the model's `apply` in float32, with dtypes by hand, and under a policy."""
  return {
    "float32": case.make().apply,
    "by hand": case.make(jnp.dtype(half).type).apply,
    "policy": mpjax.with_policy(case.make(), f"mixed_{half}").apply,
  }
