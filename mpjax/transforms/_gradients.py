"""The gradients of one batch: over micro-batches one by one, and over devices in parallel."""

import functools
from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from mpjax._core.trees import is_inexact
from mpjax._core.types import Array, Grads, Leaf, PyTree
from mpjax.transforms._across_devices import IntegerState, common_state, localise
from mpjax.transforms._skip import stored_first
from mpjax.transforms._traced_loss import LossFn, Metrics, trace_loss, warn_without_float16
from mpjax.transforms._train_state import TrainState, own_scale
from mpjax.transforms._trees import at_least_float32, strong
from mpjax.transforms._value_and_grad import value_and_grad

Aux: TypeAlias = tuple[PyTree, Metrics]
Totals: TypeAlias = tuple[PyTree, Grads]


class BatchResult(NamedTuple):
  """What a batch gives; the gradients are scaled and float32."""

  loss: Array
  model_state: PyTree
  metrics: Metrics
  grads: Grads
  watched: PyTree  # the new model state, with 0 for what was there before the batch


def batch_gradients(
  loss_fn: LossFn,
  state: TrainState,
  batch: PyTree,
  rng: Array | None,
  accumulate: int,
  axes: tuple[Hashable, ...],
  integer_state: IntegerState,
) -> BatchResult:
  """Returns the gradients of a batch, and what else its forward pass computes."""
  params, vary = localise(state.params, axes)
  dynamic = own_scale(state.opt_state, "").says.dynamic
  seen = []  # Whether leaves of the model state are returned as they were given.

  def run(
    model_state: PyTree, batch: PyTree, rng: Array | None
  ) -> tuple[Array, PyTree, Metrics, Grads]:
    traced = trace_loss(loss_fn, params, model_state, batch, rng)
    seen.append(traced.unchanged)
    if dynamic:
      warn_without_float16(loss_fn, traced.jaxpr)

    def own_loss(*args: PyTree) -> tuple[Array, Aux]:
      # A loss that loss_fn has reduced is one number for all devices: differentiated as such, each
      # would get its share of the gradient, and the mean below would divide that once more.
      loss, aux = traced.fun(*args)
      return vary(loss), aux

    differentiate = value_and_grad(own_loss, state.opt_state, has_aux=True)
    (loss, (new, metrics)), grads = differentiate(params, model_state, batch, rng)
    metrics = jax.tree.map(_metric, metrics)
    new = jax.tree.map(strong, new)
    return at_least_float32(loss), vary(new), metrics, jax.tree.map(at_least_float32, grads)

  model_state = vary(state.model_state)
  if accumulate == 1:
    loss, model_state, metrics, grads = run(model_state, batch, rng)
  else:

    def body(carry: Totals, xs: tuple[Array, PyTree]) -> tuple[Totals, tuple[Array, Metrics]]:
      model_state, total = carry
      index, micro_batch = xs
      key = None if rng is None else jax.random.fold_in(rng, index)
      loss, model_state, metrics, grads = run(model_state, micro_batch, key)
      return (model_state, jax.tree.map(jnp.add, total, grads)), (loss, metrics)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(at_least_float32(p)), params)
    # Row i goes to micro-batch i % accumulate: what is divided over devices stays where it is.
    cut = lambda x: x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:])  # noqa: E731
    micro_batches = jax.tree.map(lambda x: jnp.moveaxis(cut(x), 1, 0), batch)
    (model_state, total), (losses, each) = jax.lax.scan(
      body, (model_state, zeros), (jnp.arange(accumulate), micro_batches)
    )
    grads = jax.tree.map(lambda t: t / accumulate, total)
    loss, metrics = jnp.mean(losses), jax.tree.map(_merge_metric, each)
  unchanged = seen[-1]
  if axes:
    mean = functools.partial(jax.lax.pmean, axis_name=axes)
    model_state = common_state(model_state, state.model_state, unchanged, axes, integer_state)
    metrics = jax.tree.map(lambda x: mean(x) if is_inexact(x) else jax.lax.psum(x, axes), metrics)
    loss, grads = mean(loss), jax.tree.map(mean, grads)
  watched = jax.tree.map(_unless_there_before, model_state, state.model_state, unchanged)
  return BatchResult(loss, model_state, metrics, stored_first(grads), watched)


def _unless_there_before(new: Array, old: Array, unchanged: bool) -> Array | int:
  """Returns `new`, but 0 for the numbers that are as they were: a mask may well hold -inf."""
  if unchanged or not is_inexact(new):
    return 0
  both_nan = jnp.logical_and(jnp.isnan(new), jnp.isnan(old))
  return jnp.where(jnp.logical_or(new == old, both_nan), jnp.zeros_like(new), new)


def _metric(x: Leaf) -> Array:
  """`x` in the dtype in which it is added up: at least float32, or int32 (as bool is counted)."""
  x = at_least_float32(x)
  return x if is_inexact(x) or x.dtype.itemsize >= 4 else x.astype(jnp.int32)


def _merge_metric(x: Array) -> Array:
  return jnp.mean(x, axis=0) if is_inexact(x) else jnp.sum(x, axis=0, dtype=x.dtype)
