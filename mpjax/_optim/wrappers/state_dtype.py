"""The optax wrapper that stores the moments of an optimizer in low precision."""

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey

from mpjax._core.errors import REFUSALS, MpjaxValueError, check_choice, check_flag
from mpjax._core.trees import is_floating, saturate
from mpjax._core.types import (
  FLOAT32,
  HALF_NAMES,
  Array,
  Class,
  DType,
  DTypeLike,
  Grads,
  Leaf,
  OptState,
  Params,
  PyTree,
  Updates,
)
from mpjax._optim.find_scale import refuse_scale_inside
from mpjax._optim.loss_scale import count_up
from mpjax._optim.optimizer_trees import (
  align_gradients,
  arrays_only,
  float32_view,
  merge_updates,
  place_like,
)
from mpjax._optim.states import StochasticState
from mpjax._optim.wrapper_checks import check_inner, check_state
from mpjax._optim.wrappers.apply_updates import round_stochastically
from mpjax._optim.wrappers.master_weights import init_in_float32, update_in_float32
from mpjax._policy.dtypes import parse_dtype

_WHERE = "mpjax.state_dtype(inner)"

Moment: TypeAlias = Literal["mu", "nu"]
"""A first or a second moment, by the argument that says how it is stored."""

_FIELDS: dict[str, Moment] = {
  **dict.fromkeys(("mu", "trace", "m1", "exp_avg"), "mu"),
  **dict.fromkeys(("nu", "nu_max", "exp_avg_sq"), "nu"),
}
"""Which moment a field of a state holds.

Not m2 of AdEMAMix, which decays by 1e-4 a step.
"""

_FIELDS_OF: dict[str, dict[str, Moment]] = {
  "ScaleBySM3State": {"mu": "nu", "nu": "mu"},
  # The mean, whose square is subtracted from nu: rounded, the difference may be negative.
  "ScaleByRStdDevState": {"mu": "nu", "nu": "nu"},
  "ScaleByRStdDevWithCountState": {"mu": "nu", "nu": "nu"},
  "ScaleByAdanState": {"m": "mu", "v": "mu", "n": "nu"},
}
"""The same for states of optax that mean something else by a name, or have names of their own."""


def state_dtype(
  inner: optax.GradientTransformation,
  *,
  mu: DTypeLike | None = None,
  nu: DTypeLike | None = None,
  allow_second_moments: bool = False,
  rounding: Literal["nearest", "stochastic"] = "nearest",
) -> optax.GradientTransformationExtraArgs:
  """Wrap an optimizer so that its first moments are stored in 16 bits, and computed in float32.

  Each update casts the stored moments to float32, calls `inner.update`, and rounds the new moments.
  Numbers beyond the range of the dtype become its largest number. `inner` sees parameters and
  gradients in float32, so its other moments are in float32 too. Moments are found by the names of
  fields at any depth: `mu`, `trace` (the momentum of `optax.sgd`), `m1`, `exp_avg`, `m` and `v` of
  `optax.adan`, and `nu` of `optax.sm3`, which is its momentum.

  In bfloat16, rounding to nearest works for a decay of 0.9 or 0.95. From 0.998 on, a step changes a
  moment by less than half a unit in the last place, and is lost. Stochastic rounding is right on
  average. float16 has no positive numbers below 6e-8, and first moments are often smaller. Second
  moments raise an error for the same reasons. If they are allowed, `init` warns about a decay that
  the dtype cannot follow. `mpjax.loss_scaling` goes around this wrapper. `mpjax.master_weights`
  goes inside or around.

  Args:
    inner: the optimizer.
    mu: "bfloat16", "float16" or "float32", for first moments. None leaves them.
    nu: the same for second moments (`nu`, `nu_max`, `exp_avg_sq`), with `allow_second_moments`.
    allow_second_moments: permit `nu`.
    rounding: "nearest" or "stochastic". The random bits come from a count of steps in the state.

  Returns:
    An optax transformation. Its state is that of `inner`, with these moments in the dtype. Complex
    and 64-bit moments stay. With stochastic rounding the state has fields `steps` and
    `inner_state`.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation, or an argument has the wrong type; `update`:
      the state is not one of this transformation; `init`: stochastic, with a `loss_scaling` inside.
    MpjaxValueError: a dtype that no moment is stored in; an unknown `rounding`; `nu` without
      `allow_second_moments`; neither `mu` nor `nu`; `init`: there is no such moment.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.state_dtype(optax.adam(1e-3), mu="bfloat16")
  >>> state = tx.init({"w": jnp.ones(2)})
  >>> state[0].mu["w"].dtype, state[0].nu["w"].dtype
  (dtype(bfloat16), dtype('float32'))
  """
  inner = check_inner(inner, _WHERE)
  check_choice(rounding, ("nearest", "stochastic"), "mpjax.state_dtype(rounding)")
  stochastic = rounding == "stochastic"
  dtypes = _parse_dtypes(mu, nu, allow_second_moments)

  def init(params: Params) -> OptState:
    params = arrays_only(params)
    inner_state = init_in_float32(inner, params, _WHERE)
    if stochastic:
      fix = "Swap the two, loss_scaling(state_dtype(inner)): a skipped step takes no random bits."
      refuse_scale_inside(inner_state, _WHERE, got="mpjax.loss_scaling", fix=fix)
    # A user's NamedTuple of parameters may have a field `mu`, which is no moment.
    containers = _types_in(params)
    # Without parameters, such as in an empty group of `multi_transform`, there are no moments.
    if jax.tree.leaves(params):
      _check_moments(dtypes, inner_state, containers)
    if "nu" in dtypes and not stochastic:
      _warn_of_decays(inner, params, dtypes["nu"])
    steps = jnp.zeros((), jnp.int32) if stochastic else None
    return place_like(params, _rounded(inner_state, dtypes, containers, steps))

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, OptState]:
    call = f"{_WHERE}.update"
    inner_state = state
    if stochastic:
      # Stochastic rounding adds a count of steps around the state of `inner`.
      inner_state = check_state(state, StochasticState, f"{call}(state)").inner_state
    params = arrays_only(params)
    grads = align_gradients(updates, params, f"{call}(updates)")
    containers = _types_in(grads if params is None else params)

    # Widen the stored moments, run `inner` in float32, round the new moments.
    def widened(moment: Moment, x: Leaf) -> Leaf:
      return x.astype(jnp.float32) if _is_stored(moment, x, dtypes) else x

    wide = _map_moments(widened, inner_state, containers)
    new_updates, new = update_in_float32(inner, float32_view(grads), wide, params, extra_args, call)
    # `inner` saw no integers and keys. Give them their leaves back, for `apply_updates`.
    new_updates = merge_updates(grads, new_updates, params)
    # The count is the source of random bits, so equal states give equal steps and no key is needed.
    steps = count_up(state.steps) if stochastic else None
    return new_updates, _rounded(new, dtypes, containers, steps)

  return optax.GradientTransformationExtraArgs(init, update)


def _parse_dtypes(
  mu: DTypeLike | None, nu: DTypeLike | None, allow_second_moments: bool
) -> dict[Moment, DType]:
  """Returns the dtype of each moment that gets one."""
  check_flag(allow_second_moments, "mpjax.state_dtype(allow_second_moments)")
  if nu is not None and not allow_second_moments:
    fix = (
      "Leave nu out: with a decay of 0.999 a second moment no longer moves in bfloat16, and in "
      "float16 small ones are 0, which gives inf or NaN. allow_second_moments=True stores them so."
    )
    expected = "second moments in float32"
    raise MpjaxValueError("mpjax.state_dtype(nu)", expected=expected, got=repr(nu), fix=fix)
  dtypes: dict[Moment, DType] = {}
  asked: dict[Moment, DTypeLike | None] = {"mu": mu, "nu": nu}
  for moment, dtype in asked.items():
    if dtype is not None:
      where = f"mpjax.state_dtype({moment})"
      dtypes[moment] = parse_dtype(dtype, where)
      # Float8 would need a scale for each block of a moment.
      check_choice(dtypes[moment].name, (*HALF_NAMES, "float32"), where)
  if not dtypes:
    expected, got = "a dtype for first moments", "None, and none for second ones"
    fix = 'Write mpjax.state_dtype(inner, mu="bfloat16"), or leave the wrapper out.'
    raise MpjaxValueError("mpjax.state_dtype(mu)", expected=expected, got=got, fix=fix)
  return dtypes


def _check_moments(
  dtypes: Mapping[Moment, DType], inner_state: OptState, containers: set[Class]
) -> None:
  """Raises MpjaxValueError if the inner optimizer lacks a moment that has a dtype."""
  # A misspelt or renamed field would leave the moments in float32 silently.
  moments = set[Moment]()

  def note(moment: Moment, x: Leaf) -> Leaf:
    moments.add(moment)
    return x

  _map_moments(note, inner_state, containers)
  missing = [moment for moment in dtypes if moment not in moments]
  if missing:
    raise MpjaxValueError(
      f"mpjax.state_dtype({', '.join(missing)})",
      expected="an optimizer with such moments",
      got=f"one with {' and '.join(sorted(moments)) or 'none'}",
      fix=f"Drop this argument. Moments are found by the names of fields, {', '.join(_FIELDS)}.",
    )


def _rounded(
  state: OptState, dtypes: Mapping[Moment, DType], containers: set[Class], steps: Array | None
) -> OptState:
  """Returns a state with the moments in their dtypes.

  They are rounded to nearest, or by random bits that depend on a number of `steps`, which is then
  kept beside the state.
  """
  key = None if steps is None else jax.random.fold_in(jax.random.key(0), steps)
  # Each leaf folds in its position: equal moments must not be rounded by equal bits.
  number = itertools.count()

  def rounded(moment: Moment, x: Leaf) -> Leaf:
    if not _is_stored(moment, x, dtypes):
      return x
    dtype = dtypes[moment]
    # A moment beyond 65504 would be inf in float16, and would stay inf for ever.
    x = saturate(x.astype(jnp.float32), dtype)
    # In float32 nothing is dropped, so no random bits are drawn.
    if key is None or dtype == jnp.float32:
      return x.astype(dtype)
    return round_stochastically(x, dtype, jax.random.fold_in(key, next(number)))

  new = _map_moments(rounded, state, containers)
  return new if steps is None else StochasticState(steps, new)


def _is_stored(moment: Moment, x: Leaf, dtypes: Mapping[Moment, DType]) -> bool:
  """Whether a moment gets a dtype: a real one of at most 32 bits."""
  return moment in dtypes and is_floating(x) and x.dtype.itemsize <= FLOAT32.itemsize


def _warn_of_decays(
  inner: optax.GradientTransformationExtraArgs, params: Params, dtype: DType
) -> None:
  """Warns if second moments of `inner` do not come near their value in `dtype`."""
  # Measure the decay, since closures hide it. A step with a gradient of 0 multiplies a moment of 1
  # by its decay. A maximum or a sum stays 1.
  containers, decays = _types_in(params), set[float]()

  def one_for_nu(moment: Moment, x: Leaf) -> Leaf:
    return jnp.ones_like(x) if moment == "nu" else x

  def note_nu(moment: Moment, x: Leaf) -> Leaf:
    if moment == "nu":
      decays.add(float(x.max()))
    return x

  try:
    # Under `jit`, `init` gets tracers. So measure with concrete arrays of one element.
    with jax.ensure_compile_time_eval():
      single = jax.tree.map(lambda p: jnp.ones((1,) * p.ndim, p.dtype), params)
      zeros = jax.tree.map(jnp.zeros_like, single)
      # The first step of some optimizers sets their moments, so begin with the second.
      _, state = inner.update(zeros, inner.init(single), single)
      _, state = inner.update(zeros, _map_moments(one_for_nu, state, containers), single)
      _map_moments(note_nu, state, containers)
  except REFUSALS:  # It wants more arguments, other shapes, or a traced learning rate.
    return

  def settled(decay: float) -> float:
    # Follow a moment that starts at 0, with a squared gradient of 1 in each step, until rounding
    # swallows the step.
    old, new = -1.0, 0.0
    while new != old:
      old, new = new, float(np.asarray(decay * new + (1 - decay), dtype))
    return new

  stops = ((settled(decay), decay) for decay in decays if 0 < decay < 1)
  # Warn of the worst of several second moments. In bfloat16 a decay of 0.9 settles at 0.98 and
  # passes, and 0.95 settles at 0.96.
  reached, decay = min(stops, default=(1.0, 0.0))
  if reached < 1 - 2.0**-5:
    warnings.warn(
      f"mpjax.state_dtype(nu): second moments that decay by {decay:.6g} settle in {dtype} at "
      f"{reached:.2f} of their value: nearer to it a step is less than their rounding. Pass "
      "rounding='stochastic', or leave nu out.",
      UserWarning,
      stacklevel=3,
    )


def _types_in(tree: PyTree) -> set[Class]:
  """Returns the types of the containers in a tree of parameters, whose fields are no moments."""
  types = set[Class]()

  def note_type(node: object) -> bool:
    types.add(type(node))
    return False  # JAX then goes on to the nodes inside.

  jax.tree.leaves(tree, is_leaf=note_type)
  return types


def _map_moments(
  f: Callable[[Moment, Leaf], Leaf], state: OptState, containers: set[Class]
) -> OptState:
  """Returns a state with `f` of each moment's name and of each array in it."""
  # Descend one level at a time, because the field of a state decides what its subtree holds.
  # `containers` are types of the parameters: a NamedTuple of them may have a field `mu`.
  pairs, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: x is not state)
  if any(child is state for _, child in pairs):
    return state  # A leaf.
  fields = {} if type(state) in containers else _FIELDS_OF.get(type(state).__name__, _FIELDS)
  children = []
  for (*_, key), child in pairs:
    moment = fields.get(key.name) if isinstance(key, GetAttrKey) else None
    if moment is None:
      children.append(_map_moments(f, child, containers))
    else:
      children.append(jax.tree.map(functools.partial(f, moment), child))
  return treedef.unflatten(children)
