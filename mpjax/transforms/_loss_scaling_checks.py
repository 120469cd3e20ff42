"""What `mpjax.loss_scaling` may be called with: its arguments, its state, and several losses."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError
from mpjax._core.types import PyTree
from mpjax._core.validators import check_flag, check_value, wrong_type
from mpjax.transforms._checks import check_inner, check_state
from mpjax.transforms._loss_scale_access import LossScalingState, scales_in
from mpjax.transforms._loss_scale_config import (
  DynamicLossScale,
  LossScale,
  NoLossScale,
  StaticLossScale,
  config_label,
)


def check_arguments(
  inner: Any,
  loss_scale: Any,
  axis_name: Any,
  check_updates: Any,
  name: Any,
  unknown: dict[str, Any],
) -> None:
  """Raises unless the arguments of `mpjax.loss_scaling` are of the right kind and agree."""
  call = "mpjax.loss_scaling"
  if unknown:
    raise MpjaxTypeError(
      f"{call}({', '.join(f'{key}=' for key in unknown)})",
      expected="loss_scale, axis_name, check_updates or name",
      got=f"the unknown keyword {', '.join(map(repr, unknown))}",
      fix="Clipping, decay, averaging and accumulation are set on inner.",
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


def _check_loss_scale(loss_scale: Any, name: Any) -> None:
  where = "mpjax.loss_scaling(loss_scale)"
  several = isinstance(loss_scale, Mapping)
  configs = list(loss_scale.values()) if several else [loss_scale]
  for config in configs:
    if not isinstance(config, (NoLossScale, StaticLossScale, DynamicLossScale)):
      raise wrong_type(
        config,
        where,
        expected="a NoLossScale, StaticLossScale or DynamicLossScale",
        fix="For a constant scale pass mpjax.StaticLossScale(1024); to start elsewhere, "
        "mpjax.DynamicLossScale(init_scale=1024).",
      )
  if not several:
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


def label_configs(
  loss_scale: LossScale | Mapping[str, LossScale], name: str | None
) -> dict[str, LossScale]:
  """Returns the configurations by the labels that they have in a state, in the order of a tree."""
  if not isinstance(loss_scale, Mapping):
    label = config_label(loss_scale)
    return {label if name is None else f"{name}:{label}": loss_scale}
  labels = {f"{key}:{config_label(config)}": config for key, config in loss_scale.items()}
  return dict(sorted(labels.items()))


def by_loss(
  tree: PyTree, configs: Mapping[str, LossScale], several: bool, where: str
) -> dict[str, PyTree]:
  """Returns what belongs to each label: an entry of `tree`, or all of it if not `several`.

  Raises:
    MpjaxValueError: `tree` is no dict with the names of the losses.
  """
  if not several:
    return dict.fromkeys(configs, tree)
  names = {label.rpartition(":")[0]: label for label in configs}
  if not isinstance(tree, Mapping) or set(tree) != set(names):
    got = f"one with {sorted(map(str, tree))}" if isinstance(tree, Mapping) else type(tree).__name__
    raise MpjaxValueError(
      where,
      expected=f"a dict with one entry for each loss, {sorted(names)}",
      got=got,
      fix="Differentiate each loss by itself, and pass {name: gradients, ...}.",
    )
  return {label: tree[key] for key, label in names.items()}


def own_scales(state: Any, configs: Mapping[str, LossScale]) -> dict[str, Any]:
  """Returns the scales in the state of this very transformation, by label."""
  where = "mpjax.loss_scaling(inner).update(state)"
  check_state(state, LossScalingState, where)
  if set(state.loss_scale) != set(configs):
    raise MpjaxValueError(
      where,
      expected=f"a state made with the configuration {', '.join(map(repr, configs))}",
      got=f"one made with {', '.join(map(repr, state.loss_scale))}",
      fix="Build the optimizer as it was, or make a new state with init, put the old "
      "inner_state into it (_replace) and carry the scale over with mpjax.set_loss_scale.",
    )
  return {label: state.loss_scale[label] for label in configs}


def refuse_nesting(inner_state: PyTree) -> None:
  """Raises if what was wrapped has a loss scale already."""
  if scales_in(inner_state):
    raise MpjaxTypeError(
      "mpjax.loss_scaling(inner)",
      expected="an optimizer without a loss scale",
      got="one that holds another mpjax.loss_scaling",
      fix="Wrap once, outermost: the inner one would divide by its scale again.",
    )


class LossScalingTransformation(optax.GradientTransformationExtraArgs):
  """An optax transformation whose `update` takes `apply=` only where it is called by name.

  `optax.chain` unpacks its transformations: what it gets refuses `apply=`, since the next one in
  the chain would take new parameters for updates.
  """

  @property
  def update(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
    # Not what somebody has put in its place (`_replace`), whatever that wraps.
    held: Any = self[1]
    ours = isinstance(held, functools.partial) and held.func is _update_in_a_chain
    return held.args[0] if ours else held


def transformation(
  init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
  """Returns the optax transformation of these two functions, of which `update` takes `apply=`."""
  return LossScalingTransformation(init, functools.partial(_update_in_a_chain, update))


def _update_in_a_chain(
  update: Callable[..., Any], *args: Any, apply: Any = None, **kwargs: Any
) -> Any:
  if apply is not None:
    raise _not_outermost("one that is part of an optax.chain, or was unpacked")
  return update(*args, **kwargs)


def refuse_apply_to_parts(params: PyTree) -> None:
  """Raises if `params` are what `optax.masked` or `multi_transform` left of the parameters."""

  def is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)

  if any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
    raise _not_outermost("one that sees a part of the parameters (optax.masked, multi_transform)")


def _not_outermost(got: str) -> MpjaxTypeError:
  return MpjaxTypeError(
    "mpjax.loss_scaling(inner).update(apply)",
    expected="mpjax.loss_scaling to be outermost",
    got=got,
    fix="What is outside would take the new parameters for updates. Write "
    "mpjax.loss_scaling(optax.chain(...)) and call tx.update, or leave apply= out and apply the "
    "updates.",
  )
