"""`NoLossScale`: the inner optimizer as it is, in a state that this package recognises."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.trees import is_inexact
from mpjax._core.types import PyTree
from mpjax.transforms._branch import hold
from mpjax.transforms._checks import init_inner
from mpjax.transforms._loss_scale_access import LossScalingState
from mpjax.transforms._loss_scale_config import LossScale
from mpjax.transforms._loss_scaling_checks import (
  by_loss,
  own_scales,
  refuse_apply_to_parts,
  refuse_nesting,
  transformation,
)
from mpjax.transforms._master_weights import keep_masters
from mpjax.transforms._windows import leave_to_window
from mpjax.transforms._wrapper_trees import (
  align_gradients,
  arrays_only,
  by_part,
  differentiated,
  fill_gradients,
  float32_view,
  frozen_leaves,
  hide_untrained,
  keep_half,
  merge_updates,
)


def without_loss_scale(
  inner: optax.GradientTransformationExtraArgs, configs: dict[str, LossScale], several: bool
) -> optax.GradientTransformationExtraArgs:
  """`inner` itself, in a state that the functions of this package recognise.

  It takes the trees that a scaled optimizer takes. For floating ones nothing is done to them.
  """

  def init(params: PyTree) -> LossScalingState:
    inner_state = init_inner(inner, hide_untrained(params), "mpjax.loss_scaling(inner)")
    refuse_nesting(inner_state)
    return LossScalingState(dict.fromkeys(configs, ()), inner_state)

  def update(
    updates: PyTree,
    state: PyTree,
    params: PyTree = None,
    *,
    loss: PyTree = None,
    apply: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, LossScalingState]:
    del loss
    own_scales(state, configs)
    if apply is not None:
      refuse_apply_to_parts(params)
    # NumPy scalars: as constants they add no operation, unless inner uses them.
    extra_args = flag_and_scale(extra_args, np.bool_(True), np.float32(1))
    where = "mpjax.loss_scaling(inner).update(updates)"
    own = differentiated(params)
    by_label = by_loss(updates, configs, several, where)
    by_label = {label: differentiated(g) for label, g in by_label.items()}
    frozen = frozen_leaves(by_label.values(), own)
    grads = _plain_sum(by_label, own, where)
    if "grad" in extra_args:
      where = "mpjax.loss_scaling(inner).update(grad)"
      given = by_loss(extra_args["grad"], configs, several, where)
      extra_args["grad"] = _plain_sum(given, own, where)
    if several and "grad_fn" in extra_args:
      grad_fn, call = extra_args["grad_fn"], "mpjax.loss_scaling(inner).update(grad_fn)"
      extra_args["grad_fn"] = lambda *args: _plain_sum(
        by_loss(grad_fn(*args), configs, several, call), own, call
      )
    grads, view = fill_gradients(grads, own), hide_untrained(params)
    # None of `params` can be hidden without a mark in its place, so the structures tell.
    hidden = jax.tree.structure(view) != jax.tree.structure(params)
    seen = hide_untrained(grads, own) if hidden else grads
    frozen, seen = leave_to_window(frozen, seen, state.inner_state)
    if hidden and "grad" in extra_args:
      extra_args["grad"] = hide_untrained(extra_args["grad"], own)
    updates, inner_state = inner.update(seen, state.inner_state, view, **extra_args)
    if hidden:
      updates = by_part(lambda u, p: merge_updates(grads, u, p), updates, arrays_only(params))
    inner_state = keep_half(state.inner_state, inner_state, params)
    inner_state = keep_masters(frozen, state.inner_state, inner_state)
    updates = by_part(lambda u, _: hold(frozen, u), updates, params)
    result = updates if apply is None else apply(params, updates, inner_state)
    return result, LossScalingState(dict.fromkeys(configs, ()), inner_state)

  return transformation(init, update)


def flag_and_scale(extra_args: dict[str, Any], finite: Any, scale: Any) -> dict[str, Any]:
  """`extra_args` with the flag and the scale, where they are welcome."""
  # A line search calls value_fn with every argument that has another name.
  if "value_fn" in extra_args:
    return extra_args
  return {"grads_finite": finite, "loss_scale": scale} | extra_args


def _plain_sum(grads: dict[str, PyTree], params: PyTree, where: str) -> PyTree:
  """The sum of gradients that were not scaled: added in float32, in the dtype that they have.

  `inner` is called as it is, and the state that it made for half parameters is half.
  """
  if len(grads) == 1:
    return next(iter(grads.values()))

  def add(*leaves: Any) -> Any:
    if not is_inexact(leaves[0]):
      return leaves[0]
    return functools.reduce(jnp.add, float32_view(leaves)).astype(jnp.result_type(*leaves))

  return jax.tree.map(add, *(align_gradients(g, params, where) for g in grads.values()))
