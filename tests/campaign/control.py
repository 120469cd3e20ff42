"""The deleted-step oracle: a training step in plain JAX and optax, that is only shown good batches.

Nothing here is of mpjax. Where its step adds, divides or folds a key, this one does so again, by
hand: micro-batches as slices of the rows, a master as a second tree, a window of accumulation as a
sum and a count.
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
  total: Any  # the sum of the gradients since the last update
  phase: Any  # how many they are
  updates: Any


def start(inner, params, statistics, ema) -> Plain:
  master = () if all(x.dtype == jnp.float32 for x in jax.tree.leaves(params)) else float32(params)
  trained, zero = master or params, jnp.zeros((), jnp.int32)
  average, total = trained if ema else (), nothing(float32(params))
  opt_state = inner.init(trained)
  return Plain(params, master, opt_state, statistics, average, zero, total, zero, zero)


def nothing(tree):
  """The sum of no gradients: -0.0, to which even -0.0 can be added."""
  return jax.tree.map(lambda x: jnp.full_like(x, -0.0), tree)


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


def update(inner, every, state: Plain, grads, statistics) -> Plain:
  """Returns the state after a micro-batch, the last of a window or not.

  Args:
    inner: the optimizer.
    every: the micro-batches of a window, or a function of the updates that are done.
    state: the state before.
    grads: unscaled, float32.
    statistics: the new batch statistics.
  """
  total, count, step = jax.tree.map(jnp.add, state.total, grads), state.phase + 1, state.step + 1
  mean = grads if every == 1 else jax.tree.map(lambda t: t / count.astype(jnp.float32), total)
  trained = state.master or state.params
  updates, opt_state = inner.update(mean, state.opt_state, trained)
  trained = optax.apply_updates(trained, updates)
  params = jax.tree.map(lambda t, p: stored(t, p.dtype), trained, state.params)
  ema = jax.tree.map(lambda e, t: e + (t - e) * 0.5, state.ema, trained if state.ema else ())
  master = trained if state.master else ()
  moved = state._replace(params=params, master=master, opt_state=opt_state)
  moved = moved._replace(statistics=statistics, ema=ema, step=step)
  if every == 1:  # No sum is kept.
    return moved
  moved = moved._replace(total=nothing(total), phase=count * 0, updates=state.updates + 1)
  waited = state._replace(statistics=statistics, step=step, total=total, phase=count)
  full = count == (every(state.updates) if callable(every) else every)
  return where(full, moved, waited)


def where(condition, a, b):
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def is_finite(*trees):
  """Whether all floating leaves are finite."""
  leaves = [x for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.floating)]
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))
