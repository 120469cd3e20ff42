"""The deleted-step oracle: a training step in plain JAX and optax, that is only shown good batches.

Nothing here is of mpjax. Where its step adds, divides or folds a key, this one does so again, by
hand: micro-batches as slices of the rows, a master as a second tree.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs import stored


class Plain(NamedTuple):
  """What a run changes. Without half parameters `master` is () and `params` are trained."""

  params: Any
  master: Any
  opt_state: Any
  statistics: Any
  ema: Any
  step: Any


def start(inner, params, statistics, ema) -> Plain:
  master = () if all(x.dtype == jnp.float32 for x in jax.tree.leaves(params)) else float32(params)
  trained = master or params
  average, zero = trained if ema else (), jnp.zeros((), jnp.int32)
  return Plain(params, master, inner.init(trained), statistics, average, zero)


def float32(tree):
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def gradients(loss_fn, params, statistics, batch, key, scale, parts=1):
  """Returns the loss, the gradients of `scale` times it in float32, and the new statistics.

  Args:
    loss_fn: as for `mpjax.make_train_step`.
    params: the parameters.
    statistics: the batch statistics.
    batch: the whole batch.
    key: the key of this step.
    scale: what the loss is multiplied by before it is differentiated.
    parts: row i belongs to micro-batch i % parts.
  """

  def scaled(params, statistics, batch, key):
    loss, (new, _) = loss_fn(params, statistics, batch, key)
    return loss * scale, (loss, new)

  def body(carry, part):
    total, new = carry
    number, rows = part
    own = key if parts == 1 else jax.random.fold_in(key, number)
    grads, (loss, new) = jax.grad(scaled, has_aux=True)(params, new, rows, own)
    return (jax.tree.map(jnp.add, total, float32(grads)), new), loss

  first = jax.tree.map(jnp.zeros_like, float32(params)), statistics
  micro_batches = jax.tree.map(lambda x: jnp.stack([x[i::parts] for i in range(parts)]), batch)
  (total, new), losses = jax.lax.scan(body, first, (jnp.arange(parts), micro_batches))
  return jnp.mean(losses), jax.tree.map(lambda g: g / parts, total), new


def update(inner, state: Plain, grads, statistics) -> Plain:
  """Returns the state after a step.

  Args:
    inner: the optimizer.
    state: the state before.
    grads: unscaled, float32.
    statistics: the new batch statistics.
  """
  trained = state.master or state.params
  updates, opt_state = inner.update(grads, state.opt_state, trained)
  trained = optax.apply_updates(trained, updates)
  params = jax.tree.map(lambda t, p: stored(t, p.dtype), trained, state.params)
  ema = jax.tree.map(lambda e, t: e + (t - e) * 0.5, state.ema, trained if state.ema else ())
  return Plain(params, trained if state.master else (), opt_state, statistics, ema, state.step + 1)


def where(condition, a, b):
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def is_finite(*trees):
  """Whether all floating leaves are finite."""
  leaves = [x for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))
