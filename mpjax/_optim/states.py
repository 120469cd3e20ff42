"""The states of the wrappers of optimizers.

Wrappers look into the states of others, so states are below all of them.

Checkpoints hold the names of fields, so a field keeps its name. A field that a later version adds
stands at the end, and has a default: the number that it has before the first step, as a NumPy
scalar of its dtype. A state that was saved without the field gets the default.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from mpjax._core.types import Array, OptState, PyTree

S = TypeVar("S", bound=NamedTuple)


def has_fields_of(kind: type[NamedTuple], mapping: Mapping[Any, PyTree]) -> bool:
  """Whether a mapping has the fields of a state; those with a default may be missing."""
  fields = set(kind._fields)
  return fields.difference(kind._field_defaults) <= set(mapping) <= fields


def as_state(kind: type[S], mapping: Mapping[Any, PyTree]) -> S:
  """Returns a mapping with the fields of a state as an instance of its class.

  An `nnx.State` and a checkpoint lack fields without arrays, such as the state of `optax.sgd`.
  """
  without_arrays = {field: () if field == "inner_state" else None for field in kind._fields}
  values = {**without_arrays, **kind._field_defaults, **mapping}
  return kind._make(values[field] for field in kind._fields)


class LossScaleState(NamedTuple):
  """The scale and its counters: strongly typed scalars, which stop at 2^31 - 1."""

  scale: Array  # float32: the scale of the next backward pass
  good_steps: Array  # int32: finite gradients of this loss in a row since the scale last moved
  hysteresis: Array  # int32: overflows left before the scale backs off
  total: Array  # int32: calls of update
  skipped: Array  # int32: steps that were not applied
  consecutive_skips: Array  # int32: the skipped steps since the last applied one
  floor_hits: Array  # int32: overflows at the minimum scale
  bad_updates: Array  # int32: steps skipped for their updates or new state alone
  first_bad: Array  # int32: the code of the last step's first non-finite leaf, see leaf_codes.py
  finite: Array  # bool: the last step was applied; read it as `applied`

  @property
  def applied(self) -> Array:
    """Whether the last step was applied, which needs more than finite gradients of this loss.

    The field has another name because checkpoints and metrics have it.
    """
    return self.finite


class StepCount(NamedTuple):
  """The state of `NoLossScale`, which has no scale."""

  total: Array  # int32: calls of update


ScaleState: TypeAlias = LossScaleState | StepCount


class LossScalingState(NamedTuple):
  """The state of `mpjax.loss_scaling`.

  Args:
    loss_scale: one entry for each loss, of scalars: `scale` in float32, counts in int32, and the
      bool `finite`, which says whether the last step was applied. Under `NoLossScale` an entry has
      the count `total` alone. The key of an entry holds the name and the configuration. It is part
      of the tree's structure, so that a checkpoint of another configuration does not fit.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> list(mpjax.loss_scaling(optax.sgd(0.1), name="actor").init(jnp.ones(2)).loss_scale)
  ['actor:dynamic']
  """

  loss_scale: dict[str, ScaleState]
  inner_state: OptState


class AccumulationState(NamedTuple):
  """The state of `mpjax.accumulate_gradients`.

  Args:
    micro_batches: int32 of shape (), the number in the open window.
    updates_done: int32 of shape (), the number of updates, as schedules count them.
    total: float32 in the shapes of the parameters, the sum of the window's gradients.
    inner_state: the state of the inner optimizer.
    value: float32 of shape (), the sum of the window's `value=`; None unless `inner` takes it.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> mpjax.accumulate_gradients(optax.sgd(0.1), 4).init(jnp.ones(2)).total.dtype
  dtype('float32')
  """

  micro_batches: Array
  updates_done: Array
  total: PyTree
  inner_state: OptState
  value: PyTree = None


class MasterWeightsState(NamedTuple):
  """The state of `mpjax.master_weights`.

  Args:
    master: float32 arrays in the shapes of the parameters. It is None for float32 parameters, which
      are their own masters. With `storage="split"` it is int16 for bfloat16 parameters: the bits of
      the master minus 2^16 times those of its parameter.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> mpjax.master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.bfloat16)).master.dtype
  dtype('float32')
  """

  master: PyTree
  inner_state: OptState


class SplitMasterWeightsState(MasterWeightsState):
  """The state of `storage="split"`: `master` has an int16 remainder for a bfloat16 parameter."""


class CheckedMasterWeightsState(SplitMasterWeightsState):
  """The same, passed on by a wrapper that has checked parameters, and shows them in float32."""


class MonitorState(NamedTuple):
  """The state of `mpjax.monitor`.

  Args:
    counts: int32 of shape (4,) for each parameter, by its path: elements, zero gradients, nonzero
      updates and lost updates of the last step that updated the parameters.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> mpjax.monitor(optax.sgd(0.1)).init({"w": jnp.ones(2)}).counts["w"].dtype
  dtype('int32')
  """

  counts: dict[str, Array]
  inner_state: OptState


class StochasticState(NamedTuple):
  """The state of `mpjax.state_dtype(..., rounding="stochastic")`."""

  steps: Array  # int32 of shape (): the updates so far, from which the random bits come
  inner_state: OptState
