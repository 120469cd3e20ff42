"""The gradients of one batch: over micro-batches one by one, averaged over devices."""

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.leaves import is_key
from mpjax._core.types import Array, Grads, Leaf, Params, PyTree, is_inexact
from mpjax._optim.optimizer_trees import (
  as_stored,
  at_least_float32,
  key_text,
  strong,
  unless_there_before,
)
from mpjax._optim.scaled import scaled
from mpjax._optim.step.traced_loss import (
  LossFn,
  Metrics,
  TracedLoss,
  trace_loss,
  warn_without_float16,
)
from mpjax._optim.step.train_state import TrainState, own_scale


class LossResults(NamedTuple):
  """The results of a loss function for a batch or a micro-batch."""

  loss: Array
  model_state: PyTree
  metrics: Metrics
  grads: Grads  # at least float32


def batch_gradients(
  loss_fn: LossFn,
  state: TrainState,
  batch: PyTree,
  rng: Array | None,
  *,
  micro_batches: int,
  axes: tuple[Hashable, ...],
) -> tuple[LossResults, PyTree]:
  """Returns the results for the batch of a step, the same on all devices, and what decides.

  The second tree is checked for inf and NaN like the gradients: the loss, and the numbers of the
  model state that this step wrote.
  """
  # 1. Make parameters and model state differ between devices, as far as JAX can see.
  params, vary = localise(state.params, axes)
  local = state._replace(params=params, model_state=vary(state.model_state))
  # The trace shows which leaves of the model state are unchanged. `evaluate` may run in a scan,
  # which returns only arrays, so this list carries the result out of it.
  unchanged: list[PyTree] = []

  def evaluate(model_state: PyTree, batch: PyTree, rng: Array | None) -> LossResults:
    traced = trace_loss(loss_fn, params, model_state, batch, rng)
    unchanged.append(traced.unchanged)
    if axes:
      _check_integers(traced, model_state, axes)
    if own_scale(state.opt_state, "").dynamic:
      warn_without_float16(loss_fn, traced.jaxpr)
    local_state = local._replace(model_state=model_state)
    return _differentiate(traced.function, local_state, batch, rng, vary)

  # 2. Differentiate the loss on each device, for the whole batch or for its parts.
  if micro_batches == 1:
    result = evaluate(local.model_state, batch, rng)
  else:
    result = _accumulate(evaluate, local, batch, rng, micro_batches)
  # 3. Combine the results of all devices.
  if axes:
    model_state = jax.tree.map(
      lambda x, old, is_unchanged: old if is_unchanged else _common(x, axes),
      *(result.model_state, state.model_state, unchanged[-1]),
    )
    mean = functools.partial(jax.lax.pmean, axis_name=axes)
    # Floating metrics are means, integers are counts.
    metrics = jax.tree.map(
      lambda x: mean(x) if is_inexact(x) else jax.lax.psum(x, axes), result.metrics
    )
    loss, grads = mean(result.loss), jax.tree.map(mean, result.grads)
    result = LossResults(loss, model_state, metrics, grads)

  # 4. Only numbers that this step wrote decide about skipping: a mask may hold -inf from the start.
  def written(new: Array, old: Array, is_unchanged: bool) -> Leaf:
    return 0 if is_unchanged or not is_inexact(new) else unless_there_before(new, old)

  changed = jax.tree.map(written, result.model_state, state.model_state, unchanged[-1])
  # Compute and store each gradient on a CPU before its consumers run. Otherwise XLA for CPU keeps
  # the transposed gradient of a matmul and copies it for each consumer: the branch, the check and
  # the norm. All copies of all gradients exist at once.
  stored = functools.partial(jax.tree.map, jax.lax.optimization_barrier)
  grads = jax.lax.platform_dependent(result.grads, cpu=stored, default=lambda tree: tree)
  return result._replace(grads=grads), (result.loss, changed)


def _differentiate(
  loss_fn: LossFn,
  state: TrainState,
  batch: PyTree,
  rng: Array | None,
  vary: Callable[[PyTree], PyTree],
) -> LossResults:
  """Returns the results of a loss function for one batch on one device."""
  # A loss that closes over arrays would be traced once more.
  stored = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), state.params)

  def own_loss(view: Params, *args: PyTree) -> tuple[Array, tuple[PyTree, Metrics]]:
    # `loss_fn` may have averaged the loss over devices. The derivative of one common number is each
    # device's share of the gradient, and the mean over devices would divide it again.
    loss, aux = loss_fn(as_stored(view, stored), *args)
    return vary(loss), aux

  differentiate = jax.value_and_grad(scaled(own_loss, state.opt_state), has_aux=True)
  # Gradients of parameters stored in float16 are divided by the scale, and added up, in float32.
  view = jax.tree.map(at_least_float32, state.params)
  (loss, (new, metrics)), grads = differentiate(view, state.model_state, batch, rng)

  def wide(x: Leaf) -> Array:
    # Casts come before any sum, over micro-batches and over devices. A bool is counted in int32.
    x = at_least_float32(x)
    return x if is_inexact(x) or x.dtype.itemsize >= 4 else x.astype(jnp.int32)

  metrics = jax.tree.map(wide, metrics)
  # A weakly typed leaf would change the type of the state, and so compile the next step again.
  new = jax.tree.map(strong, new)
  loss, new = at_least_float32(loss), vary(new)
  return LossResults(loss, new, metrics, grads)


def _accumulate(
  evaluate: Callable[[PyTree, PyTree, Array | None], LossResults],
  state: TrainState,
  batch: PyTree,
  rng: Array | None,
  micro_batches: int,
) -> LossResults:
  """Returns the means over micro-batches, which are evaluated one after the other."""

  # The carry is the model state, which each micro-batch continues, and the sum of gradients.
  def body(carry: tuple[PyTree, Grads], xs: tuple[Array, PyTree]) -> tuple[PyTree, PyTree]:
    (model_state, total), (index, micro_batch) = carry, xs
    key = None if rng is None else jax.random.fold_in(rng, index)
    loss, model_state, metrics, grads = evaluate(model_state, micro_batch, key)
    return (model_state, jax.tree.map(jnp.add, total, grads)), (loss, metrics)

  def cut(x: Array) -> Array:
    # Row i goes to micro-batch i % micro_batches. A sharded batch has consecutive rows on a device,
    # so that each micro-batch has rows of all devices and no row moves.
    rows = x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:])
    return jnp.moveaxis(rows, 1, 0)

  def combined(x: Array) -> Array:
    # Floating metrics are means over rows, integers are counts.
    return jnp.mean(x, axis=0) if is_inexact(x) else jnp.sum(x, axis=0, dtype=x.dtype)

  # float32 also for bfloat16 parameters, in which small gradients would be lost in the sum.
  zeros = jax.tree.map(lambda p: jnp.zeros_like(at_least_float32(p)), state.params)
  start, parts = (state.model_state, zeros), jax.tree.map(cut, batch)
  (model_state, total), (losses, metrics) = jax.lax.scan(
    body, start, (jnp.arange(micro_batches), parts)
  )
  grads = jax.tree.map(lambda t: t / micro_batches, total)
  return LossResults(jnp.mean(losses), model_state, jax.tree.map(combined, metrics), grads)


# Over the devices of a mapped axis: parameters before the loss, model state after it.


def localise(
  params: Params, axes: tuple[Hashable, ...]
) -> tuple[Params, Callable[[PyTree], PyTree]]:
  """Returns the parameters as varying over devices, and a function that converts other trees."""
  # Inside of a `shard_map` JAX sums the gradients of replicated parameters over devices, in the
  # dtype of the matmul. It does not sum those of varying parameters, so they can be cast to float32
  # before the mean.
  # Only the manual axes of a `shard_map` have varying types. `pmap` and `vmap` need no change.
  manual = tuple(name for name in axes if name in jax.sharding.get_abstract_mesh().manual_axes)
  if not manual:
    return params, lambda tree: tree
  try:
    local = jax.tree.map(lambda p: jax.lax.pcast(p, manual, to="varying"), params)
  except ValueError as error:
    where = f"mpjax.make_train_step(axis_name={axes!r})"
    expected, got = "parameters that are the same on all devices along it", "some that differ"
    fix = "Pass them with in_specs=jax.P(); if sharded, use jit over a Mesh, without axis_name."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix) from error
  flag = jax.lax.pcast(jnp.asarray(True), manual, to="varying")

  def vary(x: Leaf) -> Leaf:
    # Integers stay as they are, so that JAX sees which of them a loss computes from its own rows.
    # `pcast` refuses values that vary already, and `where` takes both. A scan needs one type for
    # its carry.
    is_integer = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
    return x if is_integer else jnp.where(flag, x, x)

  return local, functools.partial(jax.tree.map, vary)


def _check_integers(traced: TracedLoss, model_state: PyTree, axes: tuple[Hashable, ...]) -> None:
  """Raises if an integer of the new model state may differ between devices."""
  # Floating leaves have a mean. For an integer, only the loss function knows how it is combined.
  differing = [
    f"{x.dtype}{list(x.shape)} at {key_text(path)}"
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(model_state))
    if not is_inexact(x) and not is_key(x.dtype) and traced.may_differ(i)
  ]
  if differing:
    name = axes[0] if len(axes) == 1 else axes
    raise MpjaxValueError(
      f"mpjax.make_train_step(axis_name={axes!r}): model_state",
      expected="integers that are the same on all devices",
      got=f"some that are computed from the rows of one device: {listed(differing)}",
      fix=f"Add them up in loss_fn: count + jax.lax.psum(rows, {name!r}). JAX sees that they are "
      "the same in a jax.shard_map with check_vma=True; elsewhere count outside of the step.",
    )


def _common(x: Array, axes: tuple[Hashable, ...]) -> Array:
  """Returns a leaf of the model state that is the same on all devices."""
  if is_inexact(x):
    # A mean in bfloat16 would round each partial sum.
    return jax.lax.pmean(at_least_float32(x), axes).astype(x.dtype)
  # Integers and keys are the same already. A maximum makes JAX see that. No reduction takes typed
  # keys or booleans.
  if is_key(x.dtype):
    data = jax.lax.pmax(jax.random.key_data(x), axes)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  number = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
  return jax.lax.pmax(number, axes).astype(x.dtype)
