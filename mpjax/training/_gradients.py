"""The gradients of one batch: over micro-batches in turn, and over devices at once."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from mpjax._errors import MpjaxTypeError, MpjaxValueError, listed, message
from mpjax._tree import is_inexact, tree_differences
from mpjax._types import Array, PyTree
from mpjax.training._train_state import TrainState
from mpjax.transforms import value_and_grad
from mpjax.transforms._wrapper_trees import strong

LossFn: TypeAlias = Callable[[Any, Any, Any, Any], tuple[Any, tuple[Any, Any]]]
"""`loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`."""

Metrics: TypeAlias = dict[str, Any]

OUR_METRICS = frozenset(
  {
    *("loss", "grad_norm", "retries"),
    *("loss_scale", "finite", "good_steps", "total", "skipped", "consecutive_skips"),
    *("floor_hits", "bad_updates"),
  }
)
"""The names that a loss function leaves to the step."""


def batch_gradients(
  loss_fn: LossFn,
  state: TrainState,
  batch: PyTree,
  rng: Array | None,
  accumulate: int,
  axes: tuple[Hashable, ...],
) -> tuple[Array, PyTree, Metrics, PyTree]:
  """Returns the loss, the model state and metrics after the batch, and scaled float32 gradients."""
  params, vary = _localise(state.params, axes)
  differentiate = value_and_grad(checked(loss_fn), state.opt_state, has_aux=True)

  def run(model_state: PyTree, batch: PyTree, rng: Array | None) -> Any:
    (loss, (new, metrics)), grads = differentiate(params, model_state, batch, rng)
    metrics = jax.tree.map(_metric, metrics)
    new = jax.tree.map(strong, new)
    return _float32(loss), vary(new), metrics, jax.tree.map(_float32, grads)

  model_state = vary(state.model_state)
  if accumulate == 1:
    loss, model_state, metrics, grads = run(model_state, batch, rng)
  else:

    def body(carry: Any, xs: Any) -> Any:
      model_state, total = carry
      index, micro_batch = xs
      key = None if rng is None else jax.random.fold_in(rng, index)
      loss, model_state, metrics, grads = run(model_state, micro_batch, key)
      return (model_state, jax.tree.map(jnp.add, total, grads)), (loss, metrics)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(_float32(p)), params)
    micro_batches = jax.tree.map(lambda x: _cut(x, accumulate), batch)
    (model_state, total), (losses, each) = jax.lax.scan(
      body, (model_state, zeros), (jnp.arange(accumulate), micro_batches)
    )
    grads = jax.tree.map(lambda t: t / accumulate, total)
    loss, metrics = jnp.mean(losses), jax.tree.map(_merge_metric, each)
  if not axes:
    return loss, model_state, metrics, grads
  mean = functools.partial(jax.lax.pmean, axis_name=axes)
  model_state = jax.tree.map(lambda x: _agree(x, axes), model_state)
  metrics = jax.tree.map(lambda x: mean(x) if is_inexact(x) else jax.lax.psum(x, axes), metrics)
  return mean(loss), model_state, metrics, jax.tree.map(mean, grads)


def _float32(x: Any) -> Array:
  """`x` as float32 if it is half or a Python number."""
  x = jnp.asarray(x)
  half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
  return x.astype(jnp.float32) if half else x


def _cut(x: Array, parts: int) -> Array:
  return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)


def first_micro_batch(batch: PyTree, parts: int) -> PyTree:
  """Returns the first of `parts` micro-batches."""
  return batch if parts == 1 else jax.tree.map(lambda x: _cut(x, parts)[0], batch)


def _metric(x: Any) -> Array:
  """`x` in the dtype in which it is added up: at least float32, or int32 (as bool is counted)."""
  x = _float32(x)
  return x if is_inexact(x) or x.dtype.itemsize >= 4 else x.astype(jnp.int32)


def _merge_metric(x: Array) -> Array:
  return jnp.mean(x, axis=0) if is_inexact(x) else jnp.sum(x, axis=0, dtype=x.dtype)


def _agree(x: Array, axes: tuple[Hashable, ...]) -> Array:
  """Returns what all devices have in common: the mean of floating values; the rest is equal."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = _agree(jax.random.key_data(x), axes)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  if is_inexact(x):
    return jax.lax.pmean(_float32(x), axes).astype(x.dtype)
  if x.dtype == jnp.bool_:
    return jax.lax.pmax(x.astype(jnp.int32), axes).astype(jnp.bool_)
  return jax.lax.pmax(x, axes)


def _localise(params: PyTree, axes: tuple[Hashable, ...]) -> tuple[PyTree, Callable[[Any], Any]]:
  """Returns the parameters as each device's own, and a function that does so to other trees.

  Of replicated parameters the gradient that `jax.grad` returns inside of a `shard_map` is already
  summed over devices, in the dtype of the product. Of a device's own ones it is not.
  """
  manual = tuple(name for name in axes if name in jax.sharding.get_abstract_mesh().manual_axes)
  if not manual:
    return params, lambda tree: tree
  try:
    local = jax.tree.map(lambda p: jax.lax.pcast(p, manual, to="varying"), params)
  except ValueError as error:
    raise MpjaxValueError(
      message(
        f"mpjax.make_train_step(axis_name={axes!r})",
        expected="parameters that are the same on all devices along it",
        got=f"some that differ ({error})",
        fix="Pass them with in_specs=jax.P(); for sharded ones use jit over a Mesh, without "
        "axis_name.",
      )
    ) from error
  flag = jax.lax.pcast(jnp.asarray(True), manual, to="varying")
  # Also for what varies already: a scan wants the same from all that it carries.
  return local, lambda tree: jax.tree.map(lambda x: jnp.where(flag, x, x), tree)


def checked(loss_fn: LossFn) -> LossFn:
  """`loss_fn`, made to raise where it returns something else than it should."""

  @functools.wraps(loss_fn)
  def checked(params: PyTree, model_state: PyTree, batch: PyTree, rng: Array | None) -> Any:
    out: Any = loss_fn(params, model_state, batch, rng)
    aux: Any = out[1] if isinstance(out, tuple) and len(out) == 2 else None
    pairs = isinstance(aux, tuple) and len(aux) == 2
    if not pairs or not isinstance(aux[1], Mapping):
      raise MpjaxTypeError(
        message(
          "mpjax.make_train_step(loss_fn)",
          expected="it to return (loss, (model_state, metrics)) with a dict of metrics",
          got=str(jax.tree.map(jax.typeof, out)),
          fix="Return (loss, ((), {})) if there is no model state and nothing to report.",
        )
      )
    new_state, metrics = aux
    taken = sorted(set(metrics) & OUR_METRICS)
    if taken:
      expected, fix = "metrics with other names than ours", "Rename them."
      where = "mpjax.make_train_step(loss_fn): metrics"
      raise MpjaxValueError(message(where, expected=expected, got=str(taken), fix=fix))
    problems = tree_differences(model_state, new_state, dtypes=True)
    if problems:
      raise MpjaxValueError(
        message(
          "mpjax.make_train_step(loss_fn): model_state",
          expected="the structure, shapes and dtypes that it was given",
          got=listed(problems),
          fix="Return the whole new state, cast to the dtypes of the old one.",
        )
      )
    return out

  return checked
