"""The arithmetic of loss scaling: the state, how it moves, and how gradients are unscaled."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from mpjax._core.together import read_together
from mpjax._core.trees import is_inexact
from mpjax._core.types import Array, Grads, Leaf
from mpjax.transforms._loss_scale_config import (
  INT32_MAX,
  DynamicLossScale,
  LossScale,
  NoLossScale,
)
from mpjax.transforms._trees import at_least_float32, strong


class LossScaleState(NamedTuple):
  """The scale and its counters; every field is a strongly typed scalar array.

  Counters stop at 2^31 - 1 instead of wrapping round.
  """

  scale: Array  # float32: the factor on the next loss
  good_steps: Array  # int32: finite steps in a row since the scale last moved
  hysteresis: Array  # int32: overflows left before the scale backs off
  total: Array  # int32: calls of update
  skipped: Array  # int32: steps that were not applied, for whatever reason
  consecutive_skips: Array  # int32: the skipped steps since the last applied one
  floor_hits: Array  # int32: overflows that found the scale at its minimum already
  bad_updates: Array  # int32: steps skipped for their updates alone
  first_bad: Array  # int32: the last step's first non-finite leaf; their number if none was
  finite: Array  # bool: the last step was applied


ScaleState: TypeAlias = LossScaleState | tuple[()]
"""What belongs to one loss; () for `NoLossScale`."""


def init_scale(config: LossScale) -> ScaleState:
  """Returns the state before the first step."""
  if isinstance(config, NoLossScale):
    return ()
  dynamic = isinstance(config, DynamicLossScale)
  zero = dict.fromkeys(("good_steps", "total", "skipped", "consecutive_skips"), 0)
  zero |= dict.fromkeys(("floor_hits", "bad_updates", "first_bad"), 0)
  counters = {field: jnp.asarray(value, jnp.int32) for field, value in zero.items()}
  return LossScaleState(
    scale=jnp.asarray(config.init_scale if dynamic else config.scale, jnp.float32),
    hysteresis=jnp.asarray(config.hysteresis if dynamic else 0, jnp.int32),
    finite=jnp.asarray(True, jnp.bool_),
    **counters,
  )


def adjust(
  config: LossScale,
  state: LossScaleState,
  *,
  finite: Array,
  applied: Array,
  first_bad: Array,
  all_finite: Array | None = None,
) -> LossScaleState:
  """Returns the state after a step."""
  # The scale follows the gradients of its own loss alone; what counts as skipped follows `applied`.
  # `finite` is about the gradients (and the loss) of this loss, `all_finite` about those of all;
  # `first_bad` is the position of its first gradient leaf that is not finite.
  dynamic = isinstance(config, DynamicLossScale)
  new = {"finite": finite, "applied": applied, "first_bad": first_bad}
  new["all_finite"] = finite if all_finite is None else all_finite
  # A static scale is not computed from anything, and stays the array that it is.
  unread = {"finite", "first_bad"} if dynamic else {"finite", "first_bad", "scale"}
  old = {field: x for field, x in state._asdict().items() if field not in unread}
  read = read_together(old | new)
  state = state._replace(**{field: read[field] for field in old})
  finite, applied, first_bad, all_finite = (read[name] for name in new)
  good_steps = jnp.where(finite, _count_up(state.good_steps, finite), 0)
  scale, hysteresis, floor_hits = state.scale, state.hysteresis, state.floor_hits
  if dynamic:
    low, high = _float32(config.min_scale), _float32(config.max_scale)
    left = jnp.where(finite, hysteresis, jnp.maximum(hysteresis - 1, 0))
    back_off = jnp.logical_and(jnp.logical_not(finite), left == 0)
    # >=, not ==: a state restored into a shorter interval may be past it already.
    grow = jnp.logical_and(finite, good_steps >= config.growth_interval)
    factor = jnp.where(
      grow,
      _float32(config.growth_factor),
      jnp.where(back_off, _float32(config.backoff_factor), _float32(1)),
    )
    floor_hits = _count_up(floor_hits, jnp.logical_and(back_off, scale <= low))
    # A multiplication that overflows is inf, one that underflows is 0: the limits catch both.
    scale = jnp.minimum(jnp.maximum(scale * factor, low), high)
    hysteresis = jnp.where(grow, config.hysteresis, left)
    good_steps = jnp.where(grow, 0, good_steps)
  skip = jnp.logical_not(applied)
  return LossScaleState(
    scale=scale,
    good_steps=good_steps,
    hysteresis=hysteresis,
    total=_count_up(state.total, True),
    skipped=_count_up(state.skipped, skip),
    consecutive_skips=jnp.where(skip, _count_up(state.consecutive_skips, skip), 0),
    floor_hits=floor_hits,
    bad_updates=_count_up(state.bad_updates, jnp.logical_and(all_finite, skip)),
    first_bad=first_bad,
    finite=applied,
  )


def _float32(value: float) -> Array:
  return jnp.asarray(value, jnp.float32)


def _count_up(count: Array, by_one: Array | bool) -> Array:
  return jnp.where(jnp.logical_and(by_one, count < INT32_MAX), count + 1, count)


def unscale_tree(grads: Grads, scale: Array | None) -> Grads:
  """Returns `grads` divided by `scale`, in float32 (float64 and complex leaves as they are)."""
  # The cast comes first: in float16 the quotient would underflow. XLA turns the division into a
  # multiplication by 1/scale, which is exact for a power of two and otherwise within 1 ulp of the
  # gradient; the limits of a scale keep the reciprocal a normal number. Leaves that are no floating
  # or complex numbers are returned as they are. Without a scale, leaves are only cast.
  return jax.tree.map(lambda g: _unscale_leaf(g, scale), grads)


def _unscale_leaf(g: Leaf, scale: Array | None) -> Leaf:
  if not is_inexact(g):
    return g
  g = strong(at_least_float32(g))
  if scale is None:
    return g
  by = scale.astype(g.real.dtype)
  # Part by part: a complex division squares the scale on the way, which overflows.
  return jax.lax.complex(g.real / by, g.imag / by) if jnp.iscomplexobj(g) else g / by
