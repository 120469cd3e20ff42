"""The deleted-step oracle: a training step in plain JAX and optax, that is only shown good batches.

Nothing here is of mpjax. Where its step adds, divides or folds a key, this one does so again, by
hand: micro-batches as slices of the rows, devices in a Python loop, a master as a second tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Plain(NamedTuple):
  """What a run changes. Without half parameters `master` is () and `params` are trained."""

  params: Any
  master: Any
  opt_state: Any
  statistics: Any
  ema: Any
  step: Any


def start(inner: optax.GradientTransformation, params: Any, statistics: Any, ema: bool) -> Plain:
  master = () if _are_float32(params) else _float32(params)
  trained = params if _are_float32(params) else master
  average = trained if ema else ()
  zero = jnp.zeros((), jnp.int32)
  return Plain(params, master, inner.init(trained), statistics, average, zero)


def _are_float32(tree: Any) -> bool:
  return all(x.dtype == jnp.float32 for x in jax.tree.leaves(tree))


def _float32(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def gradients(
  loss_fn: Callable[..., Any],
  params: Any,
  statistics: Any,
  batch: Any,
  key: Any,
  scale: Any,
  parts: int = 1,
  devices: int = 1,
) -> tuple[Any, Any, Any]:
  """Returns the loss, the gradients of `scale` times it in float32, and the new statistics.

  Args:
    loss_fn: as for `mpjax.make_train_step`.
    params: the parameters.
    statistics: the batch statistics.
    batch: the whole batch.
    key: the key of this step, or None.
    scale: what the loss is multiplied by before it is differentiated.
    parts: row i belongs to micro-batch i % parts.
    devices: the rows are cut into so many blocks, each with a key of its own if there are several.
  """

  def scaled(params, statistics, batch, key):
    loss, (new, _) = loss_fn(params, statistics, batch, key)
    return loss * scale, (loss, new)

  def one_device(batch, key):
    def body(carry, part):
      total, new = carry
      number, rows = part
      own = key if key is None or parts == 1 else jax.random.fold_in(key, number)
      grads, (loss, new) = jax.grad(scaled, has_aux=True)(params, new, rows, own)
      return (jax.tree.map(jnp.add, total, _float32(grads)), new), loss

    zeros = jax.tree.map(jnp.zeros_like, _float32(params))
    micro_batches = jax.tree.map(lambda x: jnp.stack([x[i::parts] for i in range(parts)]), batch)
    (total, new), losses = jax.lax.scan(
      body, (zeros, statistics), (jnp.arange(parts), micro_batches)
    )
    return jnp.mean(losses), jax.tree.map(lambda g: g / parts, total), new

  if devices == 1:
    return one_device(batch, key)
  blocks = []
  for device in range(devices):
    block = jax.tree.map(lambda x, d=device: x.reshape(devices, -1, *x.shape[1:])[d], batch)
    blocks.append(one_device(block, None if key is None else jax.random.fold_in(key, device)))
  return jax.tree.map(_mean, *blocks)


def _mean(*xs: Any) -> Any:
  return xs[0] if jnp.issubdtype(xs[0].dtype, jnp.integer) else sum(xs) / len(xs)


def apply(
  inner: optax.GradientTransformation, state: Plain, grads: Any, statistics: Any, active: Any = True
) -> Plain:
  """Returns the state after an update; `state` itself where not `active`.

  Args:
    inner: the optimizer.
    state: the state before.
    grads: unscaled, float32.
    statistics: the new batch statistics.
    active: scalar bool.
  """
  trained = state.master or state.params
  updates, opt_state = inner.update(grads, state.opt_state, trained)
  trained = optax.apply_updates(trained, updates)
  params = jax.tree.map(lambda t, p: t.astype(p.dtype), trained, state.params)
  ema = jax.tree.map(lambda e, t: e + (t - e) * 0.5, state.ema, trained if state.ema else ())
  master = trained if state.master else ()
  new = Plain(params, master, opt_state, statistics, ema, state.step + 1)
  return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, state)


def is_finite(*trees: Any) -> Any:
  """Whether all floating leaves are finite."""
  flags = [
    jnp.all(jnp.isfinite(x))
    for x in jax.tree.leaves(trees)
    if jnp.issubdtype(x.dtype, jnp.floating)
  ]
  return jnp.all(jnp.stack(flags))
