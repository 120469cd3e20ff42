"""The gradients of one batch: over micro-batches one by one, averaged over devices."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.leaves import is_key, path_text
from mpjax._core.types import Array, Grads, KeyPath, Leaf, Params, PyTree, is_inexact
from mpjax._optim.optimizer_trees import (
  as_stored,
  at_least_float32,
  stored_first,
  strong,
  unless_there_before,
)
from mpjax._optim.scaled import scaled
from mpjax._optim.traced_loss import LossFn, Metrics, trace_loss, warn_without_float16
from mpjax._optim.train_state import TrainState, own_scale

IntegerState: TypeAlias = Literal["sum", "same"] | Mapping[str, Literal["sum", "same"]] | None
"""How integers of the model state are combined: all alike, or by path."""


class LossResults(NamedTuple):
  """The results of a loss function for a batch or a micro-batch."""

  loss: Array
  model_state: PyTree
  metrics: Metrics
  grads: Grads  # at least float32


class BatchGradients(NamedTuple):
  """The results of a loss function for the batch of a step, the same on all devices."""

  loss: Array
  model_state: PyTree
  metrics: Metrics
  grads: Grads  # at least float32
  watched: PyTree  # checked for inf and NaN like the gradients: the loss, and the new model state


def batch_gradients(
  loss_fn: LossFn,
  state: TrainState,
  batch: PyTree,
  rng: Array | None,
  *,
  micro_batches: int,
  axes: tuple[Hashable, ...],
  integer_state: IntegerState,
) -> BatchGradients:
  """Returns loss, model state, metrics and gradients of a batch, over micro-batches and devices."""
  # 1. Make parameters and model state differ between devices, as far as JAX can see.
  params, vary = localise(state.params, axes)
  local = state._replace(params=params, model_state=vary(state.model_state))
  # The trace tells which leaves of the model state are unchanged. `evaluate` may run in a scan,
  # which returns only arrays, so the list carries that out.
  unchanged: list[PyTree] = []

  def evaluate(model_state: PyTree, batch: PyTree, rng: Array | None) -> LossResults:
    traced = trace_loss(loss_fn, params, model_state, batch, rng)
    unchanged.append(traced.unchanged)
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
    model_state = common_state(
      result.model_state, state.model_state, unchanged[-1], axes, integer_state
    )
    result = _averaged(result._replace(model_state=model_state), axes)
  # 4. Only numbers that this step wrote decide about skipping: a mask may hold -inf from the start.
  changed = jax.tree.map(_changed_numbers, result.model_state, state.model_state, unchanged[-1])
  grads = stored_first(result.grads)
  return BatchGradients(
    result.loss, result.model_state, result.metrics, grads, (result.loss, changed)
  )


def _differentiate(
  loss_fn: LossFn,
  state: TrainState,
  batch: PyTree,
  rng: Array | None,
  vary: Callable[[PyTree], PyTree],
) -> LossResults:
  """Returns the results of a loss function for one batch on one device."""

  def own_loss(view: Params, *args: PyTree) -> tuple[Array, tuple[PyTree, Metrics]]:
    # `loss_fn` may have averaged the loss over devices. The derivative of one common number is each
    # device's share of the gradient, and the mean over devices would divide it again.
    loss, aux = loss_fn(as_stored(view, state.params), *args)
    return vary(loss), aux

  differentiate = jax.value_and_grad(scaled(own_loss, state.opt_state), has_aux=True)
  # Gradients of parameters stored in float16 are divided by the scale, and added up, in float32.
  view = jax.tree.map(at_least_float32, state.params)
  (loss, (new, metrics)), grads = differentiate(view, state.model_state, batch, rng)
  # Casts come before any sum: over micro-batches, and over devices.
  metrics = jax.tree.map(_metric, metrics)
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


def _averaged(result: LossResults, axes: tuple[Hashable, ...]) -> LossResults:
  """Returns loss, metrics and gradients averaged over devices; integers in metrics are added."""
  mean = functools.partial(jax.lax.pmean, axis_name=axes)

  def combined(x: Array) -> Array:
    return mean(x) if is_inexact(x) else jax.lax.psum(x, axes)

  metrics = jax.tree.map(combined, result.metrics)
  loss, grads = mean(result.loss), jax.tree.map(mean, result.grads)
  return result._replace(loss=loss, metrics=metrics, grads=grads)


def _changed_numbers(new: Array, old: Array, is_unchanged: bool) -> Leaf:
  """Returns a leaf of the new model state, with 0 for numbers that were there before."""
  if is_unchanged or not is_inexact(new):
    return 0
  return unless_there_before(new, old)


def _metric(x: Leaf) -> Array:
  """Returns a metric in the dtype in which it is summed: at least float32, or int32 for bool."""
  x = at_least_float32(x)
  return x if is_inexact(x) or x.dtype.itemsize >= 4 else x.astype(jnp.int32)


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
  # `pcast` refuses values that vary already, and `where` takes both. A scan needs one type for its
  # carry.
  return local, lambda tree: jax.tree.map(lambda x: jnp.where(flag, x, x), tree)


def common_state(
  new: PyTree,
  old: PyTree,
  unchanged: PyTree,
  axes: tuple[Hashable, ...],
  integer_state: IntegerState,
) -> PyTree:
  """Returns the model state that all devices continue with.

  Leaves that no device has changed keep their values. Floating leaves are averaged. Integers and
  booleans need a rule in `integer_state`, for the leaf or for the nearest branch around it.
  """
  # A single rule is the rule of the root, and so of every leaf.
  rules: _Rules = integer_state if isinstance(integer_state, Mapping) else {"": integer_state}
  _check_rules(rules, new, unchanged, axes)

  def common(path: KeyPath, x: Array, before: Array, is_unchanged: bool) -> Array:
    return before if is_unchanged else _combine(x, before, _rule_for(path, rules), axes)

  return jax.tree_util.tree_map_with_path(common, new, old, unchanged)


_Rules: TypeAlias = Mapping[str, Literal["sum", "same"] | None]
"""How integers are combined, by the path of a leaf or a branch; "" is the root."""


def _is_inside(path: KeyPath, branch: str) -> bool:
  """Whether a path is that of a branch, or inside of it."""
  # With "/" at both ends: "layer_1" is not inside of "layer_10".
  return branch == "" or f"{path_text(path)}/".startswith(f"{branch}/")


def _rule_for(path: KeyPath, rules: _Rules) -> str | None:
  """Returns the rule for a leaf; None if there is none."""
  # The longest branch around a leaf is the nearest one.
  branches = [branch for branch in rules if _is_inside(path, branch)]
  return rules[max(branches, key=len)] if branches else None


def _check_rules(rules: _Rules, new: PyTree, unchanged: PyTree, axes: tuple[Hashable, ...]) -> None:
  """Raises unless all integers that change have a rule, and all rules have a leaf."""
  problems: list[str] = []
  leaves = jax.tree_util.tree_leaves_with_path(new)
  for (path, x), is_unchanged in zip(leaves, jax.tree.leaves(unchanged), strict=True):
    # Floating leaves have a mean and keys are equal. For an integer, only the user knows.
    needs_rule = not (is_unchanged or is_inexact(x) or is_key(x.dtype))
    if needs_rule and _rule_for(path, rules) is None:
      text = path_text(path) or "the root"
      problems.append(f"no rule for {x.dtype}{list(x.shape)} at {text}")
  for branch in rules:
    if branch != "" and not any(_is_inside(path, branch) for path, _ in leaves):
      problems.append(f"{branch!r}, where the state has no leaf")
  if problems:
    raise MpjaxValueError(
      f"mpjax.make_train_step(axis_name={axes!r}): model_state",
      expected="integer_state= with a rule for each integer that loss_fn changes",
      got=listed(problems),
      fix='Pass integer_state="sum" for counts of rows, whose changes are added, "same" for counts '
      'of steps, which are equal on all devices, or a dict from paths ("a/b") to these.',
    )


def _combine(x: Array, old: Array, rule: str | None, axes: tuple[Hashable, ...]) -> Array:
  """Returns a leaf of the model state that is the same on all devices."""
  if is_key(x.dtype):
    # Keys are the same on all devices. A maximum makes JAX see that, and typed keys have none, so
    # it is taken of their data.
    data = jax.lax.pmax(jax.random.key_data(x), axes)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  if is_inexact(x):
    # A mean in bfloat16 would round each partial sum.
    return jax.lax.pmean(at_least_float32(x), axes).astype(x.dtype)
  # No reduction of JAX takes booleans. A flag is True if any device set it.
  if x.dtype == jnp.bool_:
    return jax.lax.pmax(x.astype(jnp.int32), axes).astype(jnp.bool_)
  if rule == "sum":
    # Add the changes of all devices. A counter that the step sets back to 0 would go down once per
    # device.
    return old + jax.lax.psum(x - old, axes)
  # "same": the maximum of equal numbers, which JAX then knows to be equal.
  return jax.lax.pmax(x, axes)
