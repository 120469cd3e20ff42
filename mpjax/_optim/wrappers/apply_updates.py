"""Adding updates to parameters: from the master, to nearest, or rounded stochastically."""

import contextlib
from collections.abc import Sequence
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_choice, kind_of, listed
from mpjax._core.leaves import is_key
from mpjax._core.trees import (
  check_alike,
  in_low_precision,
  is_array_like,
  is_none,
  tree_differences,
)
from mpjax._core.types import Array, DType, Leaf, OptState, Params, Updates, is_inexact
from mpjax._optim.optimizer_trees import refuse_none, states_of
from mpjax._optim.states import MasterWeightsState
from mpjax._optim.wrapper_checks import refuse_around_masters
from mpjax._optim.wrappers.master_weights import (
  differentiated_as,
  has_no_master,
  is_remainder,
  map_masters,
  masters_in,
  plus,
  stored,
)


def apply_updates(
  params: Params,
  updates: Updates,
  opt_state: OptState = None,
  *,
  rounding: Literal["nearest", "stochastic"] = "nearest",
  key: Array | None = None,
) -> Params:
  """Add updates to parameters like `optax.apply_updates`, or round them from their masters.

  Stochastic rounding picks one of the two neighbours in the narrower dtype, with probabilities
  that make the mean exact (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015).
  The same key gives the same parameters for any sharding. Inside a `shard_map` over sharded
  parameters, fold the device's index into the key.

  Args:
    params: the parameters. Sums in low precision (16 or 8 bits) are computed in float32 and
      rounded.
    updates: a tree like `params`, in its shapes and any dtype. mpjax returns float32. Keys and
      leaves other than arrays do not change, and may have None here.
    opt_state: the state that `update` returned, not the one before. A parameter with a float32
      master in it becomes the rounded master, bit for bit. All others become `param + update`.
    rounding: "nearest" (ties to even) or "stochastic".
    key: a PRNG key for stochastic rounding. Pass a new one in each step.

  Returns:
    A tree like `params`, with the same shapes and dtypes.

  Raises:
    MpjaxTypeError: `opt_state` is a key, or has masters whose updates may have been changed.
    MpjaxValueError: an unknown `rounding`; a `key` that is missing or unused; stochastic rounding
      of parameters with masters; trees that do not match.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> params, updates = jnp.ones(10000, jnp.bfloat16), jnp.full(10000, 1e-3)
  >>> float(jnp.mean(mpjax.apply_updates(params, updates), dtype=jnp.float32))
  1.0
  >>> rounded = mpjax.apply_updates(params, updates, rounding="stochastic", key=jax.random.key(0))
  >>> round(float(jnp.mean(rounded, dtype=jnp.float32)), 3)
  1.001
  """
  call = "mpjax.apply_updates"
  check_choice(rounding, ("nearest", "stochastic"), f"{call}(rounding)")
  # A key in third place would be taken for a state without masters, and ignored.
  if is_array_like(opt_state) and is_key(jnp.result_type(opt_state)):
    expected, fix = "the state of an optimizer", "Write rounding= and key= with their names."
    where = f"{call}(opt_state)"
    raise MpjaxTypeError(where, expected=expected, got=kind_of(opt_state), fix=fix)
  states = states_of(opt_state, MasterWeightsState)
  # An `nnx.Optimizer` and a `TrainState` have the state of the optimizer in an attribute.
  refuse_around_masters(getattr(opt_state, "opt_state", opt_state), f"{call}(opt_state)")
  is_stochastic = rounding == "stochastic"
  # A master keeps the part that rounding cuts off. Random rounding would move the parameter away
  # from it.
  if is_stochastic and states:
    where = f"{call}(opt_state, rounding='stochastic')"
    expected = "a state without mpjax.master_weights, whose parameters are rounded to nearest"
    fix = "Use one of the two, mpjax.master_weights or stochastic rounding."
    raise MpjaxValueError(where, expected=expected, got="a state with masters", fix=fix)
  if is_stochastic != (key is not None):
    where = f"{call}(rounding={rounding!r}, key)"
    expected = "a key for 'stochastic', and none for 'nearest'"
    fix = "Pass another key for each step, jax.random.fold_in(key, step)."
    raise MpjaxValueError(where, expected=expected, got=kind_of(key), fix=fix)

  def filled_in(p: Leaf, u: Leaf) -> Leaf:
    # Functions in a model of Equinox and keys have no gradient. `tx.update` returns None for them.
    return p if u is None and p is not None and _is_untrained(p) else u

  with contextlib.suppress(ValueError):  # For another tree, check_alike says where it differs.
    updates = jax.tree.map(filled_in, params, updates, is_leaf=is_none)
  where, expected = f"{call}(updates)", "updates like the parameters"
  fix = "Pass what tx.update returned for these parameters."
  refuse_none(updates, params, where, expected=expected)
  check_alike(updates, params, where, expected=expected, fix=fix, dtypes=False)
  masters = _masters_of(states, params)
  leaves, treedef = jax.tree.flatten(params)
  new = []
  # A parameter with a master becomes the rounded master: `p + u` in float32 may miss it by a bit.
  # Each leaf folds in its position, since equal leaves must not get equal noise.
  for position, (p, u, m) in enumerate(zip(leaves, jax.tree.leaves(updates), masters, strict=True)):
    if m is not None:
      new.append(stored(jnp.asarray(m, jnp.float32), p))
    else:
      new.append(_add(p, u, None if key is None else jax.random.fold_in(key, position)))
  return treedef.unflatten(new)


def _masters_of(states: Sequence[MasterWeightsState], params: Params) -> list[Leaf]:
  """Returns the float32 master of each parameter, None where there is none."""
  # The update of a split master ends at the rounded master exactly, so its remainder is not needed.
  master = map_masters(
    lambda m: None if has_no_master(m) or is_remainder(m) else m,
    masters_in(states, "mpjax.master_weights(inner)"),
  )
  try:
    # None means that the parameter has no master. With the parameter itself there, trees can be
    # compared.
    filled = jax.tree.map(lambda m, p: p if m is None else m, master, params, is_leaf=is_none)
    problems = tree_differences(params, filled, dtypes=False)
    # A hole (None, or a MaskedNode) may replace a subtree: give each parameter below it one.
    spread = jax.tree.broadcast(master, params, is_leaf=is_none)
    masters = jax.tree.structure(params).flatten_up_to(spread)
  except ValueError as error:
    problems, masters = [str(error)], []
  if problems:
    expected = "the state of these parameters"
    fix = "Pass the state that update returned with these updates."
    where = "mpjax.apply_updates(opt_state)"
    raise MpjaxValueError(where, expected=expected, got=listed(problems), fix=fix)
  return masters


def _is_untrained(param: Leaf) -> bool:
  """Whether nothing can be added to a leaf: a key, or no array at all (a function in a model)."""
  return not is_array_like(param) or is_key(jnp.result_type(param))


def _add(param: Leaf, update: Leaf, key: Array | None) -> Array:
  """Returns a parameter plus its update, rounded once to the parameter's dtype."""
  # None of the sums below is defined for keys and functions.
  if _is_untrained(param):
    return cast("Array", param)
  if not is_inexact(param):
    return cast("Array", optax.apply_updates(param, update))
  # float32 and wider sums are those of optax, bit for bit.
  if not in_low_precision(param):
    return plus(param, update)
  # A weakly typed update would be added, and lost, in low precision.
  exact = plus(jnp.asarray(param, jnp.float32), jnp.asarray(update, jnp.float32))
  if key is None:
    return exact.astype(param.dtype)
  return round_stochastically(exact, param.dtype, key)


def round_stochastically(exact: Array, dtype: DType, key: Array) -> Array:
  """Returns float32 numbers in a narrower dtype, each rounded to one of its neighbours there."""
  # The dtype goes in as an array, because a jitted `custom_jvp` takes nothing else.
  noise = jax.random.bits(key, exact.shape, jnp.uint32)
  return _add_noise(exact, noise, np.zeros((), dtype))


@differentiated_as(lambda exact, noise, like: exact.astype(like.dtype))
def _add_noise(exact: Array, noise: Array, like: Array) -> Array:
  """Returns float32 numbers rounded to the dtype of `like` by uniform 32-bit noise."""
  dtype, limits = like.dtype, jnp.finfo(like.dtype)
  # The number of mantissa bits that a normal number loses: 16 for bfloat16, 13 for float16.
  dropped = jnp.finfo(jnp.float32).nmant - limits.nmant
  # Add uniform noise below the last kept bit, then cut. The noise carries into the kept bits with a
  # probability of dropped part / unit, so the result is right on average.
  bits = jax.lax.bitcast_convert_type(exact, jnp.uint32) + (noise >> np.uint32(32 - dropped))
  kept = np.uint32(2**32 - 2**dropped)
  rounded = jax.lax.bitcast_convert_type(bits & kept, jnp.float32)
  if limits.smallest_normal > jnp.finfo(jnp.float32).smallest_normal:
    # float16 and float8 have fewer exponents than float32. Their subnormal numbers are equally
    # spaced, and lose more bits than the noise above covers.
    spacing = np.float32(limits.smallest_subnormal)
    units = exact / spacing
    below = jnp.floor(units)
    # 24 bits of noise as a float32 number in [0, 1), exactly.
    uniform = (noise >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)
    steps = jnp.where(uniform < units - below, below + np.float32(1), below)
    is_subnormal = jnp.abs(exact) < np.float32(limits.smallest_normal)
    rounded = jnp.where(is_subnormal, steps * spacing, rounded)
  low = rounded.astype(dtype)
  # Noise could turn the largest numbers into inf, and would change an inf or NaN. These are rounded
  # to nearest.
  nearest = exact.astype(dtype)
  usable = jnp.logical_and(jnp.isfinite(exact), jnp.isfinite(low))
  return jnp.where(usable, low, nearest)
