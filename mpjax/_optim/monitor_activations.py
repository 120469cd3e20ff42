"""Statistics of the activations of chosen modules, kept beside the state of an optimizer."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_int, kind_of
from mpjax._core.types import Array, Grads, OptState, Params, PyTree, Updates
from mpjax._optim.optimizer_trees import place_like, states_of
from mpjax._optim.states import ActivationMonitorState
from mpjax._optim.wrapper_checks import check_inner, check_state
from mpjax._policy.rules import check_glob

_CALL = "mpjax.monitor_activations"


class ActivationStatistics(NamedTuple):
  """Statistics of the activations of some modules.

  Args:
    size: how many elements they have.
    overflows: how many are inf or NaN.
    underflows: how many are subnormal: not 0, and below the smallest normal number of their dtype.
    largest: the largest finite magnitude.
    headroom: the least ratio of the largest number of a dtype to the largest magnitude in it, inf
      if that is beyond float32. Values that grow by this factor overflow. It is 0 after an
      overflow.

  All are float32 arrays of shape (). `size` is 0 before the first sample.

  >>> import mpjax
  >>> mpjax.states.ActivationStatistics._fields
  ('size', 'overflows', 'underflows', 'largest', 'headroom')
  """

  size: Array | float
  overflows: Array | float
  underflows: Array | float
  largest: Array | float
  headroom: Array | float


LARGEST_HEADROOM = float(np.finfo(np.float32).max)
"""Stands for inf in a state: `mpjax.find_nonfinite` would take an inf for the fault."""


def no_activations() -> Array:
  """Returns the statistics of no activations, as the state holds them."""
  # In the order of the fields: a row of a state has no names, so that it is a single array.
  none = ActivationStatistics(0, 0, 0, 0, headroom=LARGEST_HEADROOM)
  return jnp.asarray(none, jnp.float32)


def monitor_activations(
  inner: optax.GradientTransformation, modules: str | Sequence[str], *, every: int = 100
) -> optax.GradientTransformationExtraArgs:
  """Wrap an optimizer so that its state has room for statistics of activations.

  `mpjax.sample_activations` measures them in the step. This wrapper changes no update.

  Args:
    inner: the optimizer, with a loss scale or without.
    modules: a glob of module paths, or several, as `mpjax.Rule(path=...)` takes them. All modules
      that a glob matches share one row of statistics.
    every: how many steps there are for one sample, at least 1. The first step is sampled.

  Returns:
    An optax transformation with the updates of `inner`. Its state is an
    `mpjax.states.ActivationMonitorState`.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation, or a glob is no string; `update`: the state
      is another's.
    MpjaxValueError: no glob, a malformed one, or `every` below 1.

  >>> import jax, jax.numpy as jnp, mpjax, optax
  >>> def loss_fn(params, x):
  ...   with jax.named_scope("layer"):
  ...     x = jnp.asarray(params * x, jnp.float16)
  ...   return jnp.mean(x)
  >>> tx = mpjax.monitor_activations(mpjax.loss_scaling(optax.sgd(0.1)), "layer", every=10)
  >>> params, x = jnp.asarray(2.0), jnp.asarray([1.0, 16.0])
  >>> opt_state = mpjax.sample_activations(loss_fn, tx.init(params))(params, x)
  >>> float(mpjax.states.activation_statistics(opt_state)["layer"].headroom)
  2047.0
  """
  inner = check_inner(inner, f"{_CALL}(inner)")
  globs = _parse_globs(modules)
  fix = "1 samples each step."
  every = check_int(every, f"{_CALL}(every)", least=1, fix=fix)

  def init(params: Params) -> ActivationMonitorState:
    # `every` is in the state, since `sample_activations` sees only the state.
    activations = {glob: no_activations() for glob in globs}
    calls, period = jnp.zeros((), jnp.int32), jnp.asarray(every, jnp.int32)
    # Counters on the devices of the parameters. Elsewhere, the second step would compile again.
    state = place_like(params, (activations, calls, period))
    return ActivationMonitorState(*state, inner.init(params))

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, ActivationMonitorState]:
    old = check_state(state, ActivationMonitorState, f"{_CALL}(inner).update(state)")
    # Statistics change in `sample_activations`, which runs the forward pass. Here they are kept.
    new_updates, new = inner.update(updates, old.inner_state, params, **extra_args)
    return new_updates, old._replace(inner_state=new)

  return optax.GradientTransformationExtraArgs(init, update)


def _parse_globs(modules: object) -> tuple[str, ...]:
  """Returns globs of module paths as a tuple, checked."""
  where = f"{_CALL}(modules)"
  # A string is a sequence too: of one-letter globs.
  globs: tuple[Any, ...] = (modules,)
  if isinstance(modules, Sequence) and not isinstance(modules, str):
    globs = tuple(modules)
  expected = "a glob of module paths, or several"
  fix = 'Write modules=["encoder/*", "head"].'
  if not globs:
    raise MpjaxValueError(where, expected=expected, got="none", fix=fix)
  # A glob is matched in `sample_activations`. A malformed one should raise here, where it was
  # written.
  for glob in globs:
    if not isinstance(glob, str):
      raise MpjaxTypeError(where, expected=expected, got=kind_of(glob), fix=fix)
    check_glob(glob, where)
  return globs


def activation_statistics(opt_state: OptState) -> dict[str, ActivationStatistics]:
  """Return the statistics of the last sample of `mpjax.sample_activations`.

  Args:
    opt_state: a state that holds one of `mpjax.monitor_activations`; an `nnx.Optimizer`, or its
      `nnx.State`.

  Returns:
    For each glob of module paths the statistics of all modules that it matches, as float32 arrays
    of shape ().

  Raises:
    MpjaxTypeError: the state keeps no statistics of activations.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.monitor_activations(optax.sgd(0.1), ["encoder/*", "head"])
  >>> list(mpjax.states.activation_statistics(tx.init(jnp.ones(2))))
  ['encoder/*', 'head']
  """
  state = monitor_state(opt_state, "mpjax.states.activation_statistics(opt_state)")
  return {glob: _unpacked(jnp.asarray(row)) for glob, row in state.activations.items()}


def _unpacked(row: Array) -> ActivationStatistics:
  """Returns the statistics in a row of a state, by name."""
  # The statistics are the last axis. A vmapped state has other axes before it.
  stored = ActivationStatistics(*jnp.moveaxis(row, -1, 0))
  # Give the user inf again, for which the state holds the largest float32 number.
  headroom = jnp.where(stored.headroom < LARGEST_HEADROOM, stored.headroom, math.inf)
  return stored._replace(headroom=headroom)


def monitor_state(opt_state: OptState, where: str) -> ActivationMonitorState:
  """Returns the one state in `opt_state` that keeps statistics of activations."""
  states = states_of(opt_state, ActivationMonitorState)
  if len(states) != 1:
    raise MpjaxTypeError(
      where,
      expected="a state with one monitor of activations",
      got=f"{kind_of(opt_state)} with {len(states)} of them",
      fix=f'Write tx = {_CALL}(tx, "encoder/*") once. Pass tx.init(params) or the nnx.Optimizer.',
    )
  return states[0]
