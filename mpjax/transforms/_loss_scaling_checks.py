"""What `mpjax.loss_scaling` may be called with, and may be around or inside of."""

import functools
import warnings
from collections.abc import Mapping

import jax
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError
from mpjax._core.trees import is_half
from mpjax._core.types import Function, Leaf, OptState, Params, PyTree, Updates
from mpjax._core.validators import check_flag, check_value, wrong_type
from mpjax.transforms._checks import check_inner
from mpjax.transforms._loss_scale_config import DynamicLossScale, NoLossScale, StaticLossScale
from mpjax.transforms._masters import merge_masters
from mpjax.transforms._state import ChainedLossScalingState, MasterWeightsState
from mpjax.transforms._trees import key_text, nodes_of


def check_arguments(
  inner: object,
  loss_scale: object,
  check_updates: object,
  name: object,
  unknown: Mapping[str, object],
) -> None:
  """Raises unless the arguments of `mpjax.loss_scaling` are of the right kind and agree."""
  call = "mpjax.loss_scaling"
  if unknown:
    raise MpjaxTypeError(
      f"{call}({', '.join(f'{key}=' for key in unknown)})",
      expected="loss_scale, axis_name, check_updates or name",
      got=f"the unknown keyword {', '.join(map(repr, unknown))}",
      fix="Clipping, decay, averaging and accumulation are set on inner; mpjax.monitor counts.",
    )
  check_inner(inner, f"{call}(inner)")
  _check_loss_scale(loss_scale, name)
  check_flag(check_updates, f"{call}(check_updates)")
  configs = loss_scale.values() if isinstance(loss_scale, Mapping) else (loss_scale,)
  if check_updates and any(isinstance(config, NoLossScale) for config in configs):
    expected = "False with NoLossScale(), which checks nothing"
    fix = "Use StaticLossScale(1) to check and skip without scaling."
    raise MpjaxValueError(f"{call}(check_updates)", expected=expected, got="True", fix=fix)
  if name is not None:
    _check_name(name, f"{call}(name)")


def _check_name(name: object, where: str) -> None:
  check_value(
    name,
    isinstance(name, str) and name != "" and not set(name) & set(":/"),
    where,
    expected="a non-empty string without ':' and '/', or None",
    fix="It becomes a key of the state; a plain word such as 'generator' will do.",
  )


def _check_loss_scale(loss_scale: object, name: object) -> None:
  where = "mpjax.loss_scaling(loss_scale)"
  configs = list(loss_scale.values()) if isinstance(loss_scale, Mapping) else [loss_scale]
  for config in configs:
    if not isinstance(config, (NoLossScale, StaticLossScale, DynamicLossScale)):
      raise wrong_type(
        config,
        where,
        expected="a NoLossScale, StaticLossScale or DynamicLossScale",
        fix="For a constant scale pass mpjax.StaticLossScale(1024); to start elsewhere, "
        "mpjax.DynamicLossScale(init_scale=1024).",
      )
  if not isinstance(loss_scale, Mapping):
    return
  for key in loss_scale:
    _check_name(key, f"{where} with the key {key!r}")
  scaled = [not isinstance(config, NoLossScale) for config in configs]
  if not configs or name is not None or any(scaled) != all(scaled):
    raise MpjaxValueError(
      where,
      expected="one scale for each loss, without name=, and either all or none NoLossScale()",
      got=f"{dict(loss_scale)!r} and name={name!r}",
      fix="The keys are the names. StaticLossScale(1) leaves one of several losses unscaled, but "
      "checked.",
    )


def warn_of_half(params: Params, inner_state: OptState) -> None:
  """Warns, once, if parameters stored in low precision have no master."""
  states = nodes_of(inner_state, MasterWeightsState)
  merged = merge_masters(states, "mpjax.loss_scaling(inner).init") if states else None
  covered = {path for path, _ in jax.tree_util.tree_leaves_with_path(merged)}
  leaves = jax.tree_util.tree_leaves_with_path(params)
  half = [path for path, x in leaves if is_half(x) and path not in covered]
  if half:
    warnings.warn(
      f"mpjax.loss_scaling(inner).init(params): {len(half)} parameters are stored in low "
      f"precision (the first: {key_text(half[0])}), where updates smaller than the rounding are "
      "lost. Store them in float32 (a policy casts them where they are used), keep a "
      "float32 copy in the optimizer state with mpjax.master_weights(inner), or round "
      'stochastically with mpjax.apply_updates(..., rounding="stochastic").',
      UserWarning,
      stacklevel=3,
    )


class LossScalingTransformation(optax.GradientTransformationExtraArgs):
  """An optax transformation whose `update` takes `apply=` only where it is called by name.

  `optax.chain` unpacks its transformations: what it gets refuses `apply=`, since the next one in
  the chain would take new parameters for updates.
  """

  @property
  def init(self) -> Function:  # pyright: ignore[reportIncompatibleVariableOverride]
    held: Leaf = self[0]
    ours = isinstance(held, functools.partial) and held.func is _init_in_a_chain
    return held.args[0] if ours else held

  @property
  def update(self) -> Function:  # pyright: ignore[reportIncompatibleVariableOverride]
    # Not what somebody has put there (`_replace`), whatever that wraps.
    held: Leaf = self[1]
    ours = isinstance(held, functools.partial) and held.func is _update_in_a_chain
    return held.args[0] if ours else held


def transformation(
  init: optax.TransformInitFn, update: Function
) -> optax.GradientTransformationExtraArgs:
  """Returns the optax transformation of these two functions, of which `update` takes `apply=`."""
  return LossScalingTransformation(
    functools.partial(_init_in_a_chain, init), functools.partial(_update_in_a_chain, update)
  )


def _init_in_a_chain(init: optax.TransformInitFn, params: Params) -> OptState:
  state: PyTree = init(params)
  return ChainedLossScalingState(*state)


def _update_in_a_chain(
  update: Function, *args: PyTree, apply: object = None, **kwargs: PyTree
) -> tuple[Updates, OptState]:
  if apply is not None:
    raise not_outermost("one that is part of an optax.chain, or was unpacked")
  return update(*args, **kwargs)


def refuse_apply_to_parts(params: Params) -> None:
  """Raises if `params` are what `optax.masked` or `multi_transform` left of the parameters."""
  if nodes_of(params, optax.MaskedNode):
    raise not_outermost("one that sees a part of the parameters (optax.masked, multi_transform)")


def not_outermost(got: str) -> MpjaxTypeError:
  return MpjaxTypeError(
    "mpjax.loss_scaling(inner).update(apply)",
    expected="mpjax.loss_scaling to be outermost",
    got=got,
    fix="What is outside would take the new parameters for updates. Write "
    "mpjax.loss_scaling(optax.chain(...)) and call tx.update, or leave apply= out and apply the "
    "updates.",
  )
