"""Trees of masters, one for each parameter in low precision, and how wrappers show parameters.

A master is a float32 array, or split: the bfloat16 parameter and an int16 remainder.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, listed
from mpjax._core.trees import is_array_like, is_half, round_to, saturate
from mpjax._core.types import Array, DType, Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax.transforms._checks import init_inner, update_inner
from mpjax.transforms._state import MasterWeightsState
from mpjax.transforms._trees import float32_view, nodes_of, strong

_LARGEST = np.int32(0x7F7F7FFF).view(np.float32)
"""The largest number that rounds to a finite bfloat16."""


def differentiated_as(
  exact: Callable[..., Array],
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
  """Gives a function that rounds the derivative of `exact`, which does not round."""
  # Within `jit` it is one equation for each array, and is traced once for all of one shape.

  def decorate(function: Callable[..., Array]) -> Callable[..., Array]:
    rounding = jax.custom_jvp(function)
    rounding.defjvp(lambda x, dx: (rounding(*x), jax.jvp(exact, x, dx)[1]))
    return jax.jit(rounding)

  return decorate


@differentiated_as(lambda master: master)
def bounded(master: Array) -> Array:
  """Returns a float32 master no larger than what rounds to a finite bfloat16; an inf stays."""
  return _bounded(master)


@jax.jit
def split(master: Array, param: Array) -> Array:
  """Returns the remainder of a float32 master, to a parameter in bfloat16 or as float32."""
  # A compiler may compute a master twice, at a tie an ulp apart. So the remainder is that to the
  # parameter, and is clipped: as int16 it would wrap around, which is an ulp of bfloat16.
  base = param.astype(jnp.float32)
  # With the sign: where 0 has another one than the master, the remainder is clipped, and ignored.
  rest = jnp.clip(_bits(master) - _bits(base), -(2**15), 2**15 - 1)
  return jnp.where(jnp.isfinite(base), rest, 0).astype(jnp.int16)


@differentiated_as(lambda param, remainder: param.astype(jnp.float32))
def join(param: Array, remainder: Array) -> Array:
  """Returns the float32 master of a bfloat16 parameter."""
  # It is finite where the parameter is, which someone may have set to 0 with a remainder below 0.
  base = param.astype(jnp.float32)
  total = _bits(base) + remainder.astype(jnp.int32)
  is_usable = jnp.logical_and(jnp.isfinite(base), (total ^ _bits(base)) >= 0)
  return jnp.where(is_usable, _number(total), base)


@differentiated_as(lambda master, param: master.astype(param.dtype))
def stored(master: Array, param: Array) -> Array:
  """Returns a float32 master as it is stored in the dtype of `param`."""
  return _rounded(master, param.dtype).astype(param.dtype)


@differentiated_as(lambda master, param: master - param.astype(jnp.float32))
def update_to(master: Array, param: Array) -> Array:
  """Returns the float32 update that leads a parameter to its rounded master."""
  # It is -0.0, which leaves all bits alone, where the parameter is there already.
  goal, old = _rounded(master, param.dtype), param.astype(jnp.float32)
  return jnp.where(_bits(goal) == _bits(old), np.float32(-0.0), goal - old)


def _rounded(master: Array, dtype: DType) -> Array:
  """Returns float32 numbers rounded to nearest in `dtype`, still in float32."""
  # Beyond its range they are the largest number: from an inf no update would lead to a number.
  if dtype != jnp.bfloat16:
    return round_to(saturate(master, dtype), dtype).astype(jnp.float32)
  nearest = (_bits(_bounded(master)) + np.int32(2**15)) & np.int32(-(2**16))
  # An inf or NaN stays. In integers a NaN could become 0.
  return jnp.where(jnp.isfinite(master), _number(nearest), master)


def _bounded(master: Array) -> Array:
  nearest = jnp.clip(master, -_LARGEST, _LARGEST)
  # Where it is the same, `master` itself: a CPU takes a subnormal number for zero here.
  is_beyond = jnp.logical_and(jnp.isfinite(master), nearest != master)
  return jnp.where(is_beyond, nearest, master)


def _bits(x: Array) -> Array:
  return jax.lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: Array) -> Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


T = TypeVar("T")


class SplitMasterWeightsState(MasterWeightsState):
  """The state of `storage="split"`: `master` has an int16 remainder for a bfloat16 parameter."""


class ShownMasterWeightsState(SplitMasterWeightsState):
  """The same as a wrapper passes it on that shows the parameters in float32.

  Nothing else tells `update` whether it is right that they are not bfloat16.
  """


def is_hole(x: object) -> bool:
  """Whether a leaf of a tree of masters is none: its own master, or masked out by optax."""
  return x is None or isinstance(x, optax.MaskedNode)


def is_remainder(x: Leaf) -> bool:
  """Whether a leaf of a tree of masters is what a bfloat16 parameter lacks of its master."""
  return not is_hole(x) and x.dtype == jnp.int16


def map_masters(f: Callable[..., PyTree], master: PyTree, *trees: PyTree) -> PyTree:
  return jax.tree.map(f, master, *trees, is_leaf=is_hole)


def has_split(opt_state: OptState) -> bool:
  """Whether masters in `opt_state` need the parameters that they were split from."""
  states = nodes_of(opt_state, MasterWeightsState)
  return any(map(is_remainder, jax.tree.leaves([state.master for state in states])))


def map_states(f: Callable[[MasterWeightsState], MasterWeightsState], opt_state: T) -> T:
  """Returns `opt_state` with `f` of each `MasterWeightsState` in it."""

  def is_state(x: object) -> bool:
    return isinstance(x, MasterWeightsState)

  return jax.tree.map(lambda x: f(x) if is_state(x) else x, opt_state, is_leaf=is_state)


def init_shown(
  inner: optax.GradientTransformationExtraArgs, params: Params, where: str
) -> OptState:
  """Returns the state of an `inner` that is shown `params` in float32, with all masters."""
  # What is inside cannot tell which of them are stored in low precision: masters are added here.
  problems = []

  def adopted(state: MasterWeightsState) -> MasterWeightsState:
    splits = isinstance(state, SplitMasterWeightsState)

    def one(m: Leaf, p: Leaf) -> Leaf:
      # A None is a leaf of its own, while what optax masks out may be a subtree.
      if m is None and p is not None and not jax.tree_util.all_leaves([p]):
        problems.append(f"one array for {jax.tree.structure(p)}")
      return first_master(p, splits=splits) if m is None else m

    try:
      return state._replace(master=map_masters(one, state.master, params))
    except ValueError as error:
      problems.append(str(error))
      return state

  state = map_states(adopted, init_inner(inner, float32_view(params), where))
  if problems:
    raise MpjaxTypeError(
      where,
      expected="master_weights to see the tree of the parameters",
      got=f"a tree of another structure ({'; '.join(problems)})",
      fix="Put master_weights around what reshapes the tree, such as optax.flatten.",
    )
  return jax.tree.map(strong, state)


def update_shown(
  inner: optax.GradientTransformationExtraArgs,
  grads: Grads,
  state: OptState,
  params: Params,
  extra_args: Mapping[str, PyTree],
  where: str,
) -> tuple[Updates, OptState]:
  """Returns `inner.update` where `inner` is shown `params` in float32: updates lead to masters."""
  states = nodes_of(state, MasterWeightsState)
  view = None if params is None else float32_view(params)
  if any(isinstance(one, ShownMasterWeightsState) for one in states):
    # A wrapper around this one shows them, and has looked at them.
    new_updates, new = update_inner(inner, grads, state, view, extra_args, where)
  else:
    for one in states if params is not None else ():
      check_split(one.master, params, f"{where}(params)", view=False)
    new_updates, new = update_inner(inner, grads, marked(state), view, extra_args, where)
    new = marked(new, SplitMasterWeightsState)
  for one in nodes_of(new, MasterWeightsState):
    new_updates = map_masters(reach, one.master, params, new_updates)
  return new_updates, new


def marked(opt_state: T, kind: type[SplitMasterWeightsState] = ShownMasterWeightsState) -> T:
  """Returns `opt_state` with all that is split in a `kind`."""
  return map_states(lambda x: kind(*x) if isinstance(x, SplitMasterWeightsState) else x, opt_state)


def first_master(param: Leaf, *, splits: bool) -> Leaf:
  """Returns the master of a parameter before the first step; None if that is its own."""
  if not is_half(param):
    return None
  master = jnp.asarray(param, jnp.float32)
  return split(master, param) if splits and param.dtype == jnp.bfloat16 else master


def trained_of(master: PyTree, params: Params) -> Params:
  """Returns what is trained: the master of each parameter, or the parameter itself."""

  def one(m: Leaf, p: Leaf) -> Leaf:
    if is_remainder(m):
      return join(p, m)
    return p if is_hole(m) else m

  return map_masters(one, master, params)


def next_entry(old: Leaf, moved: Leaf, param: Leaf, update: Leaf) -> Leaf:
  """Returns what is stored of the master `moved`; `update` leads the parameter to it."""
  if is_remainder(old):
    # The sum that the addition of optax or mpjax.apply_updates ends at is a bfloat16 number.
    return split(moved, param.astype(jnp.float32) + update)
  return old if is_hole(old) else bounded(moved)


def check_split(master: PyTree, params: Params, where: str, *, view: bool) -> None:
  """Raises if the parameters whose remainders a state holds are not there, or are others."""
  # `view` says whether they may be bfloat16 in float32, as wrappers show it.
  problems = []
  dtypes = (jnp.bfloat16, jnp.float32) if view else (jnp.bfloat16,)

  def check(m: Leaf, p: Leaf) -> None:
    if is_remainder(m):
      dtype, shape = getattr(p, "dtype", None), jnp.shape(p) if is_array_like(p) else None
      if shape != m.shape or dtype not in dtypes:
        got = type(p).__name__ if dtype is None else f"{dtype}{list(shape or ())}"
        problems.append(f"{got} for bfloat16{list(m.shape)}")

  try:
    map_masters(check, master, params)
  except ValueError as error:
    problems.append(f"another tree ({error})")
  if problems:
    raise MpjaxValueError(
      where,
      expected='the parameters of this state: with storage="split" they are the upper half of it',
      got=listed(problems),
      fix="Pass the bfloat16 parameters to which the updates of this very state were applied.",
    )


def reach(master: Leaf, param: Leaf, update: Leaf) -> Leaf:
  """Returns the update that leads a parameter to its rounded master, or `update` if it does."""
  return update if is_hole(master) or is_remainder(master) else update_to(master, param)


def merge_masters(states: Iterable[MasterWeightsState], where: str) -> PyTree:
  """Returns the masters of states for several parts of one tree in one tree."""
  return functools.reduce(lambda a, b: _merge(a, b, where), (state.master for state in states))


def _merge(a: PyTree, b: PyTree, where: str) -> PyTree:
  """Returns two trees of masters in one."""
  # Where one has a hole, which may replace an entire subtree, the other's subtree is taken.
  if is_hole(a) or is_hole(b):
    return b if is_hole(a) else a
  a_children, treedef = jax.tree.flatten(a, is_leaf=lambda x: x is not a)
  b_children, other = jax.tree.flatten(b, is_leaf=lambda x: x is not b)
  if treedef != other or any(child is a for child in a_children):
    raise MpjaxValueError(
      where,
      expected="masters of separate parts of one tree",
      got=f"two for the same part, {jax.tree.structure(a)} and {jax.tree.structure(b)}",
      fix="Use master_weights once, or in the branches of one optax.multi_transform.",
    )
  return treedef.unflatten(
    [_merge(*pair, where) for pair in zip(a_children, b_children, strict=True)]
  )
