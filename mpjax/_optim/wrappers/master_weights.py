"""Float32 masters of parameters stored in 16 bits: float32 arrays, or int16 remainders."""

import functools
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_choice, kind_of, listed
from mpjax._core.frameworks import is_nnx_object, is_nnx_variable
from mpjax._core.leaves import is_nonzero, raw_value, set_raw_value
from mpjax._core.trees import (
  check_alike,
  in_low_precision,
  is_floating,
  round_to,
  saturate,
  tree_differences,
)
from mpjax._core.types import Array, DType, Grads, KeyPath, Leaf, OptState, Params, PyTree, Updates
from mpjax._optim.optimizer_trees import (
  align_gradients,
  arrays_only,
  float32_view,
  key_text,
  map_states,
  nodes_of,
  place_like,
  put_like,
  states_of,
  strong,
)
from mpjax._optim.states import (
  CheckedMasterWeightsState,
  MasterWeightsState,
  SplitMasterWeightsState,
)
from mpjax._optim.wrapper_checks import (
  check_inner,
  check_params,
  check_state,
  refuse_around_masters,
  refuse_integers,
)

T = TypeVar("T")

Storage: TypeAlias = Literal["float32", "split"]
Numeric: TypeAlias = Callable[..., Array]

# Rounding and remainders are integer arithmetic on the bits of float32 numbers. XLA may remove a
# cast to bfloat16 and back, but no integer operation.
_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
_number = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)

_LARGEST = np.int32(0x7F7F7FFF).view(np.float32)
"""The largest master: the largest number that rounds to a finite bfloat16."""


def differentiated_as(exact: Numeric) -> Callable[[Numeric], Numeric]:
  """Gives a function that rounds the derivative of `exact`, which does not round."""
  # The derivative of integer operations is 0, so each rounding gets that of the identity. `jit`
  # makes it one equation, traced once for all arrays of one shape.

  def decorate(function: Numeric) -> Numeric:
    rounding = jax.custom_jvp(function)
    rounding.defjvp(lambda x, dx: (rounding(*x), jax.jvp(exact, x, dx)[1]))
    return jax.jit(rounding)

  return decorate


@differentiated_as(lambda param, update: (param + update).astype(param.dtype))
def plus(param: Array, update: Array) -> Array:
  """Returns a parameter plus its update. An update of -0.0 keeps all bits of the parameter."""
  # A CPU flushes subnormal numbers in additions. Such an update is that of a skipped step.
  parts = (jnp.real(update), jnp.imag(update)) if jnp.iscomplexobj(update) else (update,)
  is_nothing = functools.reduce(jnp.logical_and, (jnp.signbit(u) & ~is_nonzero(u) for u in parts))
  return jnp.where(is_nothing, param, (param + update).astype(param.dtype))


@differentiated_as(lambda master: master)
def bounded(master: Array) -> Array:
  """Returns a float32 master no larger than what rounds to a finite bfloat16; an inf stays."""
  nearest = jnp.clip(master, -_LARGEST, _LARGEST)
  # `clip` compares floats, where a CPU flushes subnormal numbers to 0. So keep `master` itself
  # wherever it is within the limits.
  is_beyond = jnp.logical_and(jnp.isfinite(master), nearest != master)
  return jnp.where(is_beyond, nearest, master)


@jax.jit
def split(master: Array, param: Array) -> Array:
  """Returns the remainder of a float32 master, to a parameter in bfloat16 or as float32."""
  # XLA may compute a master twice, with and without a fused multiply-add. At a tie the two differ
  # by an ulp, and the remainder no longer fits an int16. It is clipped, because one that wraps
  # around is an ulp of bfloat16. A zero of the other sign is clipped too, and `join` ignores it.
  # The bits of two NaNs may differ, so a number that is not finite has the remainder 0. The
  # remainder is the distance in ulps of float32, since neighbouring floats have neighbouring bits.
  rest = jnp.clip(_bits(master) - _bits(param.astype(jnp.float32)), -(2**15), 2**15 - 1)
  return jnp.where(jnp.isfinite(param), rest, 0).astype(jnp.int16)


@differentiated_as(lambda param, remainder: param.astype(jnp.float32))
def join(param: Array, remainder: Array) -> Array:
  """Returns the float32 master of a bfloat16 parameter."""
  # The sum of bits is no master if the parameter is not finite. Nor is it one if the user has set
  # the parameter to 0 and the remainder is negative. The parameter is then its own master.
  base = param.astype(jnp.bfloat16).astype(jnp.float32)
  master = _number(_bits(base) + remainder.astype(jnp.int32))
  return jnp.where(jnp.abs(master) <= _LARGEST, master, base)


@differentiated_as(lambda master, param: master.astype(param.dtype))
def stored(master: Array, param: Array) -> Array:
  """Returns a float32 master as it is stored in the dtype of `param`."""
  return _rounded(master, param.dtype).astype(param.dtype)


@differentiated_as(lambda master, param: master - param.astype(jnp.float32))
def update_to(master: Array, param: Array) -> Array:
  """Returns the float32 update that leads a parameter to its rounded master."""
  # If the parameter is the rounded master already, the update is -0.0, which keeps its bits. `goal
  # - old` is +0.0 there, and turns a parameter of -0.0 into 0.0.
  goal, old = _rounded(master, param.dtype), param.astype(jnp.float32)
  return jnp.where(_bits(goal) == _bits(old), np.float32(-0.0), goal - old)


@jax.jit
def split_update(master: Array, param: Array) -> tuple[Array, Array]:
  """Returns the update that leads a bfloat16 parameter to its rounded master, and the remainder."""
  param = param.astype(jnp.bfloat16)
  update = update_to(master, param)
  # Compute the parameter that the caller's addition will give. The sum of the two is a bfloat16
  # number, also in float32.
  return update, split(master, plus(param.astype(jnp.float32), update))


def _rounded(master: Array, dtype: DType) -> Array:
  """Returns float32 numbers rounded to nearest in `dtype`, still in float32."""
  # Saturate: no finite update leads from an inf back to a number.
  if dtype != jnp.bfloat16:
    return round_to(saturate(master, dtype), dtype).astype(jnp.float32)
  # Add half a unit of bfloat16 and cut the lower 16 bits: ties go away from zero. Ties to even
  # would need a remainder of 2^15, one more than an int16 holds.
  nearest = (_bits(bounded(master)) + np.int32(2**15)) & np.int32(-(2**16))
  # An inf or NaN stays. The addition could carry a NaN into the sign, and make it a zero.
  return jnp.where(jnp.isfinite(master), _number(nearest), master)


def has_no_master(x: object) -> bool:
  """Whether a tree of masters has no master here: a float32 parameter, or one that is masked."""
  return x is None or isinstance(x, optax.MaskedNode)


def is_remainder(x: Leaf) -> bool:
  """Whether a leaf of a tree of masters is the int16 remainder of a bfloat16 parameter."""
  return not has_no_master(x) and x.dtype == jnp.int16


def map_masters(f: Callable[..., PyTree], master: PyTree, *trees: PyTree) -> PyTree:
  """Returns `jax.tree.map` over a tree of masters. A missing master is a leaf, not a subtree."""
  return jax.tree.map(f, master, *trees, is_leaf=has_no_master)


def _trained(master: Leaf, param: Leaf) -> Leaf:
  """Returns the trained array: the master of a parameter, or the parameter itself."""
  if is_remainder(master):
    return join(param, master)
  return param if has_no_master(master) else master


def master_weights(
  inner: optax.GradientTransformation, *, storage: Storage = "float32"
) -> optax.GradientTransformationExtraArgs:
  """Wrap an optimizer so that it trains a float32 copy of parameters stored in 16 bits.

  `inner` sees gradients, parameters and moments in float32. Its updates are added to the masters.
  Steps too small for 16 bits add up, and weight decay does not underflow (Micikevicius et al.,
  "Mixed Precision Training", 2018, section 3.1). Float32 parameters are their own masters. The
  wrapper goes inside `mpjax.loss_scaling` or around it.

  Apply the updates by `mpjax.apply_updates(params, updates, opt_state)`. Each 16-bit parameter is
  then the rounded master bit for bit. `optax.apply_updates` may differ in the sign of zero, and
  after very large steps until the next one. Bfloat16 is rounded to nearest, ties away from zero.
  Derivatives treat the rounding as the identity.

  Use `storage="split"` to store only the 16 bits that rounding cut off, in an int16 for each
  bfloat16 parameter. The numbers are the same, except after a step so large that no float32 update
  reaches the rounded master. Nothing but these updates may then change the parameters, so put
  transformations of updates inside.

  Args:
    inner: the optimizer. Consumers of parameters, such as weight decay, and all that changes
      updates go inside. A chain that goes on behind the masters is an error where mpjax sees it.
    storage: "float32", or "split" for bfloat16 parameters. Float16 parameters have float32 masters
      in both. An existing state keeps its storage.

  Returns:
    An optax transformation. `update` needs `params`, and passes extra arguments to `inner`. Its
    updates are float32 in the shapes of the parameters. Its state is a `MasterWeightsState`.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation; `init`: a parameter is no floating array.
    MpjaxValueError: an unknown `storage`; `update`: there are no parameters, the gradients do not
      match them, or they cannot be those of the state.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.master_weights(optax.sgd(0.5))
  >>> params = jnp.asarray([1.0], jnp.bfloat16)
  >>> opt_state = tx.init(params)
  >>> for _ in range(3):  # each step is less than half of what bfloat16 can show
  ...   updates, opt_state = tx.update(jnp.asarray([0.003]), opt_state, params)
  ...   params = mpjax.apply_updates(params, updates, opt_state)
  >>> print(params, mpjax.states.master_params(opt_state))
  [0.996094] [0.99549997]
  """
  where = "mpjax.master_weights(inner)"
  inner = check_inner(inner, where)
  check_choice(storage, get_args(Storage), "mpjax.master_weights(storage)")
  # The class tells `init_in_float32` which kind of master to add. `update` goes by the dtype of
  # each master, so that an existing state keeps its storage.
  kind = MasterWeightsState if storage == "float32" else SplitMasterWeightsState

  def init(params: Params) -> MasterWeightsState:
    refuse_integers(params, f"{where}.init(params)")
    params = arrays_only(params)
    # `inner` creates its moments from the masters, so they are float32.
    masters = jax.tree.map(lambda p: _first_master(p, kind), params)
    inner_state = inner.init(map_masters(_trained, masters, params))
    return place_like(params, kind(masters, jax.tree.map(strong, inner_state)))

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, MasterWeightsState]:
    state = check_state(state, MasterWeightsState, f"{where}.update(state)")
    check_params(params, f"{where}.update(params)")
    params = arrays_only(params)
    # The wrapper around has checked the stored parameters, and passes them on in float32.
    if not isinstance(state, CheckedMasterWeightsState):
      _check_params_of(state.master, params, f"{where}.update(params)")
    grads = float32_view(align_gradients(updates, params, f"{where}.update(updates)"))
    # 1. `inner` makes its step from the masters, not from the rounded parameters.
    trained = map_masters(_trained, state.master, params)
    new_updates, inner_state = inner.update(grads, state.inner_state, trained, **extra_args)
    moved = jax.tree.map(plus, trained, new_updates)

    # 2. Each update leads from the stored parameter to the rounded new master.
    def committed(m: Leaf, new: Leaf, p: Leaf, u: Leaf) -> tuple[Leaf, Leaf]:
      if is_remainder(m):
        return split_update(new, p)
      return (u, m) if has_no_master(m) else (update_to(new, p), bounded(new))

    pairs = map_masters(committed, state.master, moved, params, new_updates)
    # Each leaf is a pair of an update and a master. Separate the two trees.
    new_updates = map_masters(lambda _, pair: pair[0], state.master, pairs)
    masters = map_masters(lambda _, pair: pair[1], state.master, pairs)
    return new_updates, state._replace(master=masters, inner_state=inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _first_master(param: Leaf, kind: type[MasterWeightsState]) -> Leaf:
  """Returns the first master of a parameter; None if the parameter is its own master."""
  if not in_low_precision(param):
    return None
  master = jnp.asarray(param, jnp.float32)
  splits = issubclass(kind, SplitMasterWeightsState) and param.dtype == jnp.bfloat16
  return split(master, param) if splits else master


def _check_params_of(master: PyTree, params: Params, where: str) -> None:
  """Raises if the parameters whose masters a state holds are of another tree, shape or dtype."""

  # Another shape would be broadcast. With float32 masters the dtype is free, since a wrapper shows
  # parameters in float32.
  def stored_with(m: Leaf, p: Leaf) -> Leaf:
    dtype = jnp.bfloat16 if is_remainder(m) else getattr(p, "dtype", jnp.bfloat16)
    return p if has_no_master(m) else jax.ShapeDtypeStruct(m.shape, dtype)

  try:
    problems = tree_differences(map_masters(stored_with, master, params), params, dtypes=True)
  except ValueError as error:
    problems = [f"another tree ({error})"]
  if problems:
    expected = "the parameters of this state, in the shapes of their masters; with "
    expected += 'storage="split" they are the upper half of it'
    fix = (
      "Pass those to which the updates of this very state were applied, bfloat16 parameters if "
      "masters are split. Of Flax NNX pass state and parameters without their variables: "
      "nnx.as_pure(optimizer.opt_state) and nnx.as_pure(nnx.state(model, nnx.Param))."
    )
    raise MpjaxValueError(where, expected=expected, got=listed(problems), fix=fix)


# Wrappers show parameters in float32 to the inner optimizer. If that contains `master_weights`, it
# cannot see which parameters are stored in 16 bits. The next two functions tell it.


def init_in_float32(
  inner: optax.GradientTransformationExtraArgs, params: Params, where: str
) -> OptState:
  """Returns the state of an `inner` that is shown `params` in float32, with all masters."""

  def reshaped(got: str) -> MpjaxTypeError:
    expected = "master_weights to see the tree of the parameters"
    fix = "Put master_weights around what reshapes the tree, such as optax.flatten."
    got = f"a tree of another structure ({got})"
    return MpjaxTypeError(where, expected=expected, got=got, fix=fix)

  # Inside, `master_weights` sees float32 parameters and creates no masters (None). Add them here,
  # from the stored parameters.
  def adopted(state: MasterWeightsState) -> MasterWeightsState:
    def one(m: Leaf, p: Leaf) -> Leaf:
      # `map_masters` pairs None with a subtree if a wrapper such as `optax.flatten` made one array
      # of it.
      if m is None and p is not None and not jax.tree_util.all_leaves([p]):
        raise reshaped(f"one array for {jax.tree.structure(p)}")
      return _first_master(p, type(state)) if m is None else m

    return state._replace(master=map_masters(one, state.master, params))

  state = inner.init(float32_view(params))
  refuse_around_masters(state, where)
  try:
    return jax.tree.map(strong, map_states(adopted, state))
  except ValueError as error:
    raise reshaped(str(error)) from error


def update_in_float32(
  inner: optax.GradientTransformationExtraArgs,
  grads: Grads,
  state: OptState,
  params: Params,
  extra_args: Mapping[str, PyTree],
  where: str,
) -> tuple[Updates, OptState]:
  """Returns `inner.update` where `inner` is shown `params` in float32: updates lead to masters."""
  # Compare the masters with the stored parameters once, in the outermost wrapper. `as_checked`
  # tells `master_weights` inside that this is done.
  states = nodes_of(state, MasterWeightsState)
  outermost = not any(isinstance(one, CheckedMasterWeightsState) for one in states)
  if outermost and params is not None:
    for one in states:
      _check_params_of(one.master, params, f"{where}(params)")
  new_updates, new = inner.update(grads, as_checked(state), float32_view(params), **extra_args)
  new = as_checked(new, SplitMasterWeightsState) if outermost else new

  # The caller selects between the new state and the old one, so both need the same structure.
  fix = "Let init make all that update returns: optax.snapshot measures in init, optax.monitor not."
  check_alike(new, state, f"{where}: the state of inner", fix=fix)

  # `inner` moved the float32 view of a parameter. A parameter with a float32 master has to reach
  # the rounded master from its stored value instead.
  def reach(master: Leaf, param: Leaf, update: Leaf) -> Leaf:
    return update if has_no_master(master) or is_remainder(master) else update_to(master, param)

  for one in nodes_of(new, MasterWeightsState):
    new_updates = map_masters(reach, one.master, params, new_updates)
  return new_updates, new


def as_checked(opt_state: T, kind: type[SplitMasterWeightsState] = CheckedMasterWeightsState) -> T:
  """Returns `opt_state` with each state of split masters as an instance of `kind`."""
  return map_states(lambda x: kind(*x) if isinstance(x, SplitMasterWeightsState) else x, opt_state)


def masters_in(opt_state: OptState, where: str) -> PyTree:
  """Returns the masters of all parts of a tree in one tree; None if there is no state of any."""

  def merge(a: PyTree, b: PyTree) -> PyTree:
    # A place without a master may be an entire subtree. Take the other tree there.
    if has_no_master(a) or has_no_master(b):
      return b if has_no_master(a) else a
    # Flatten by one level only, since such places at different depths must meet. A leaf is its own
    # child.
    a_children, treedef = jax.tree.flatten(a, is_leaf=lambda x: x is not a)
    b_children, other = jax.tree.flatten(b, is_leaf=lambda x: x is not b)
    if treedef != other or any(child is a for child in a_children):
      expected = "masters of separate parts of one tree"
      got = f"two for the same part, {jax.tree.structure(a)} and {jax.tree.structure(b)}"
      fix = "Use master_weights once, or in the branches of one optax.multi_transform."
      raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
    return treedef.unflatten(map(merge, a_children, b_children))

  # With `optax.multi_transform`, each part of the parameters has a state of its own.
  states = nodes_of(opt_state, MasterWeightsState)
  return functools.reduce(merge, (state.master for state in states), None)


def master_params(opt_state: OptState, params: Params = None) -> Params:
  """Return the float32 masters in an optimizer state.

  Args:
    opt_state: a state that holds one `mpjax.master_weights`, or several for parts of the tree; an
      `nnx.Optimizer`, or its `nnx.State`.
    params: the parameters, which replace None in the result. `storage="split"` needs those
      after the last update of this state. Other parameters give wrong masters.

  Returns:
    A tree of arrays like the parameters, float32 where a parameter is stored in 16 bits. Elsewhere
    it has the leaf of `params`, or None without them.

  Raises:
    MpjaxTypeError: there is no `master_weights` in the state.
    MpjaxValueError: a parameter has two masters, or `params` are missing or not those of the state.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(2)}
  >>> mpjax.states.master_params(mpjax.master_weights(optax.adam(1e-3)).init(params))
  {'norm': None, 'w': Array([1., 1.], dtype=float32)}
  """
  where, of_state = "mpjax.states.master_params(params)", "mpjax.states.master_params(opt_state)"
  if not (states := states_of(opt_state, MasterWeightsState)):
    raise _without_masters(opt_state, of_state)
  masters = masters_in(states, of_state)
  if params is not None:
    params = jax.tree.map(raw_value, params, is_leaf=is_nnx_variable)
    _check_params_of(masters, params, where)
    return map_masters(_trained, masters, params)
  # A remainder alone is no master. It needs the upper 16 bits, which are the parameter.
  if any(map(is_remainder, jax.tree.leaves(masters))):
    expected = 'the parameters: with storage="split" the state has the lower half of each master'
    fix = (
      "Pass mpjax.states.master_params(opt_state, params) with the parameters that belong to the "
      "state."
    )
    raise MpjaxValueError(where, expected=expected, got="None", fix=fix)
  return map_masters(lambda m: None if has_no_master(m) else m, masters)


def set_master_params(opt_state: T, params: Params) -> T:
  """Return `opt_state` with its masters set to float32 `params`.

  Round the parameters themselves by `policy.cast_to_param(params)`. With `storage="split"` only
  these parameters belong to the new state. A cast rounds ties to even, and `mpjax.apply_updates`
  rounds them away from zero. A bfloat16 parameter whose master is a tie therefore moves by one unit
  at the first step, even if that is skipped.

  Args:
    opt_state: a state of `mpjax.master_weights`, from `init` of the 16-bit parameters. The
      variables of an `nnx.Optimizer` are written.
    params: a tree like the parameters, in their shapes, of any floating dtype.

  Returns:
    A state like `opt_state`, with float32 masters that share no memory with `params`.

  Raises:
    MpjaxTypeError: there is no `master_weights` in the state.
    MpjaxValueError: `params` has other leaves or shapes, or is not floating.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx, params = mpjax.master_weights(optax.adam(1e-3)), jnp.ones(1, jnp.bfloat16)
  >>> opt_state = mpjax.states.set_master_params(tx.init(params), jnp.asarray([1.001]))
  >>> print(mpjax.states.master_params(opt_state))
  [1.001]
  """
  problems = list[str]()
  params = jax.tree.map(raw_value, params, is_leaf=is_nnx_variable)
  # Write the variables of an optimizer in place. All other states get a copy with new masters.
  variables = getattr(opt_state, "opt_state", None) if is_nnx_object(opt_state) else None
  if variables is not None:
    arrays = jax.tree.map(raw_value, variables, is_leaf=is_nnx_variable)
    new = set_master_params(arrays, params)
    jax.tree.map(set_raw_value, variables, new, is_leaf=is_nnx_variable)
    return opt_state
  where = "mpjax.states.set_master_params(opt_state)"
  if not states_of(opt_state, MasterWeightsState):
    raise _without_masters(opt_state, where)
  if not nodes_of(opt_state, MasterWeightsState):
    expected, got = "states in their classes", f"{kind_of(opt_state)} with mappings instead"
    fix = "Pass the nnx.Optimizer, merged, or the state that init returned."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  # The step would add updates to the old parameters of a `TrainState`.
  if hasattr(opt_state, "params") and hasattr(opt_state, "opt_state"):
    got = f"{kind_of(opt_state)}, whose params would stay as they are"
    fix = "Set the masters in state.opt_state, and state.params to the same numbers, rounded."
    raise MpjaxTypeError(where, expected="the state of an optimizer alone", got=got, fix=fix)

  def put(path: KeyPath, old: Leaf, new: Leaf) -> Leaf:
    if has_no_master(old):
      return old
    if not is_floating(new) or jnp.shape(new) != old.shape:
      problems.append(f"{jax.typeof(new)} for float32{list(old.shape)} at {key_text(path)}")
      return old
    # A new array: an alias could not be donated with its source.
    new = bounded(jnp.asarray(new, jnp.float32))
    # The caller's parameters were rounded by a cast, ties to even.
    return put_like(split(new, new.astype(jnp.bfloat16)) if is_remainder(old) else new, old)

  def put_all(state: MasterWeightsState) -> MasterWeightsState:
    new = jax.tree_util.tree_map_with_path(put, state.master, params, is_leaf=has_no_master)
    return state._replace(master=new)

  try:
    opt_state = map_states(put_all, opt_state)
  except ValueError as error:
    problems.append(f"another tree ({error})")
  if problems:
    where, got = "mpjax.states.set_master_params(params)", listed(problems)
    expected = "floating arrays in the tree and in the shapes of the masters"
    fix = "Pass the float32 parameters of the same model, with the tree that init was given."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return opt_state


def _without_masters(opt_state: OptState, where: str) -> MpjaxTypeError:
  """Returns the error of a state without masters."""
  expected = "the state of an optimizer with mpjax.master_weights"
  got = f"{kind_of(opt_state)} without masters"
  fix = "Wrap the optimizer, tx = mpjax.master_weights(tx), if parameters are stored in 16 bits."
  return MpjaxTypeError(where, expected=expected, got=got, fix=fix)
