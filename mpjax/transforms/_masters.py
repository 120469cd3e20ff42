"""Trees of masters: one for each parameter in low precision, in one array or split."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from mpjax._core.errors import MpjaxValueError, listed
from mpjax._core.trees import is_array_like, is_half, round_to, saturate
from mpjax._core.types import Array, Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax.transforms._checks import update_inner
from mpjax.transforms._split import SplitMaster, join, rounded, split
from mpjax.transforms._state import MasterWeightsState
from mpjax.transforms._trees import float32_view, nodes_of

T = TypeVar("T")


def is_hole(x: object) -> bool:
  """Whether a leaf of a tree of masters is none: its own master, or masked out by optax."""
  return x is None or isinstance(x, optax.MaskedNode)


def is_entry(x: object) -> bool:
  """Whether a tree of masters has this instead of an array, or of a subtree."""
  return is_hole(x) or isinstance(x, SplitMaster)


def map_entries(f: Callable[..., PyTree], master: PyTree, *trees: PyTree) -> PyTree:
  return jax.tree.map(f, master, *trees, is_leaf=is_entry)


def is_split(state: MasterWeightsState) -> bool:
  """Whether the masters of bfloat16 parameters are split."""
  return isinstance(state.master, SplitMaster)


class ShownMaster(SplitMaster):
  """In the state that a wrapper passes on with its parameters shown in float32.

  Nothing else tells `update` whether it is right that they are not bfloat16.
  """


def is_shown(state: MasterWeightsState) -> bool:
  return isinstance(state.master, ShownMaster)


def kind_of(state: MasterWeightsState) -> type[SplitMaster] | None:
  return type(state.master) if is_split(state) else None


def has_split(opt_state: OptState) -> bool:
  """Whether masters in `opt_state` need the parameters that they were split from."""
  states = nodes_of(opt_state, MasterWeightsState)
  return any(is_split(state) and jax.tree.leaves(state.master.parity) for state in states)


def entries_of(state: MasterWeightsState) -> PyTree:
  """Returns the masters in `state`, each float32, a `SplitMaster` or a hole."""
  if not is_split(state):
    return state.master

  def entry(m: Leaf, bits: Leaf) -> Leaf:
    return m if is_hole(bits) else SplitMaster(m, bits)

  return jax.tree.map(entry, state.master.remainder, state.master.parity, is_leaf=is_hole)


def state_of(
  entries: PyTree, inner_state: OptState, kind: type[SplitMaster] | None
) -> MasterWeightsState:
  """Returns the state with these masters, as `entries_of` and `kind_of` return them."""
  if kind is None:
    return MasterWeightsState(entries, inner_state)

  def parity(m: Leaf) -> Leaf:
    if isinstance(m, SplitMaster):
      return m.parity
    return m if is_hole(m) else None

  # Two trees of arrays, since containers of parameters (`nnx.State`) may not hold others.
  remainder = map_entries(lambda m: m.remainder if isinstance(m, SplitMaster) else m, entries)
  return MasterWeightsState(kind(remainder, map_entries(parity, entries)), inner_state)


def map_states(f: Callable[[MasterWeightsState], MasterWeightsState], opt_state: T) -> T:
  """Returns `opt_state` with `f` of each `MasterWeightsState` in it."""

  def is_state(x: object) -> bool:
    return isinstance(x, MasterWeightsState)

  return jax.tree.map(lambda x: f(x) if is_state(x) else x, opt_state, is_leaf=is_state)


def map_masters(f: Callable[[PyTree, bool], PyTree], opt_state: T) -> T:
  """Returns `opt_state` with `f` of the masters in each state, and of whether it splits."""

  def one(state: MasterWeightsState) -> MasterWeightsState:
    return state_of(f(entries_of(state), is_split(state)), state.inner_state, kind_of(state))

  return map_states(one, opt_state)


def marked(opt_state: T, kind: type[SplitMaster] = ShownMaster) -> T:
  """Returns `opt_state` with all that is split in a `kind`."""
  return map_states(
    lambda state: state._replace(master=kind(*state.master)) if is_split(state) else state,
    opt_state,
  )


def update_shown(
  inner: optax.GradientTransformationExtraArgs,
  grads: Grads,
  state: OptState,
  params: Params,
  extra_args: Mapping[str, PyTree],
  where: str,
) -> tuple[Updates, OptState]:
  """Returns `update_inner` of an `inner` that is shown `params` in float32.

  Raises:
    MpjaxValueError: something is split, and `params` are not what it was split from.
  """
  states = nodes_of(state, MasterWeightsState)
  view = None if params is None else float32_view(params)
  if any(map(is_shown, states)):  # A wrapper around this one shows them, and has looked at them.
    return update_inner(inner, grads, state, view, extra_args, where)
  if params is not None:
    for one in states:
      check_split(entries_of(one), params, f"{where}(params)", view=False)
  new_updates, new = update_inner(inner, grads, marked(state), view, extra_args, where)
  return new_updates, marked(new, SplitMaster)


def first_master(param: Leaf, *, splits: bool) -> Leaf:
  """Returns the master of a parameter before the first step; None if that is its own."""
  if not is_half(param):
    return None
  master = jnp.asarray(param, jnp.float32)
  return split(master, param) if splits and param.dtype == jnp.bfloat16 else master


def next_master(old: Leaf, moved: Leaf, param: Leaf, update: Leaf) -> Leaf:
  """Returns what is kept of the master `moved`; `update` leads the parameter to it."""
  if is_hole(old):
    return old
  if not isinstance(old, SplitMaster):
    return moved
  # What the addition of optax or mpjax.apply_updates ends at, should it miss the rounded master.
  return split(moved, rounded(param.astype(jnp.float32) + update))


def lead_to(old: Leaf, moved: Leaf, param: Leaf, update: Leaf) -> Leaf:
  """Returns the update that leads a parameter to the rounded master `moved`."""
  if isinstance(old, SplitMaster):  # Of a parameter that a wrapper may show in float32.
    return _difference(rounded(moved), param)
  return update if is_hole(old) else reach(moved, param, update)


def trained_of(master: PyTree, params: Params) -> Params:
  """Returns what is trained: the master of each parameter, or the parameter itself."""

  def one(m: Leaf, p: Leaf) -> Leaf:
    if isinstance(m, SplitMaster):
      return join(p, m)
    return p if is_hole(m) else m

  return map_entries(one, master, params)


def check_split(master: PyTree, params: Params, where: str, *, view: bool) -> None:
  """Raises if parameters of which a state holds the remainders are not there, or are others.

  `view` says whether they may be bfloat16 in float32, as wrappers show it.
  """
  problems = []
  dtypes = (jnp.bfloat16, jnp.float32) if view else (jnp.bfloat16,)

  def check(m: Leaf, p: Leaf) -> None:
    if isinstance(m, SplitMaster):
      dtype, shape = getattr(p, "dtype", None), jnp.shape(p) if is_array_like(p) else None
      if shape != m.remainder.shape or dtype not in dtypes:
        got = type(p).__name__ if dtype is None else f"{dtype}{list(shape or ())}"
        problems.append(f"{got} for bfloat16{list(m.remainder.shape)}")

  try:
    map_entries(check, master, params)
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
  if is_entry(master):
    return update
  # An inf in the parameter could never be left again: no update leads from it to a number.
  goal = round_to(saturate(master, param.dtype), param.dtype).astype(jnp.float32)
  return _difference(goal, param)


def _difference(goal: Array, param: Array) -> Array:
  old = param.astype(jnp.float32)
  # The one addend that leaves a parameter's bits alone, where it is there already.
  return jnp.where(goal == old, jnp.asarray(-0.0, jnp.float32), goal - old)


def merge_masters(states: Iterable[MasterWeightsState], where: str) -> PyTree:
  """Returns the masters of states for several parts of one tree in one tree."""
  return functools.reduce(lambda a, b: _merge(a, b, where), map(entries_of, states))


def _merge(a: PyTree, b: PyTree, where: str) -> PyTree:
  """Returns two trees of masters in one.

  Where one has a hole, which may replace an entire subtree, the other's subtree is taken.
  """
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


def put_like(new: Array, old: Array) -> Array:
  """Returns `new` on the devices where `old` is."""
  traced = isinstance(old, Tracer) or isinstance(new, Tracer)
  # To put it where an uncommitted one is would commit it, and compile the next step once more.
  return new if traced or not old.committed else jax.device_put(new, old.sharding)
