"""The optax wrapper that keeps a float32 copy of parameters that are stored in half."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, listed
from mpjax._core.trees import is_floating, is_half, round_to, saturate
from mpjax._core.types import Grads, Leaf, OptState, Params, PyTree, Updates
from mpjax.transforms._checks import (
  check_inner,
  check_params,
  check_state,
  init_inner,
  refuse_integers,
  update_inner,
)
from mpjax.transforms._frozen import frozen_leaves, hold, leave_to_window
from mpjax.transforms._state import MasterWeightsState
from mpjax.transforms._trees import (
  KeyPath,
  align_gradients,
  arrays_only,
  float32_view,
  key_text,
  nodes_of,
  place_like,
  strong,
)

T = TypeVar("T")


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it trains a float32 copy of parameters stored in half.

  `inner` sees gradients, parameters and moments in float32, and its updates are added to the
  master: steps too small for half still add up, and weight decay does not underflow. The updates
  that come out lead each half parameter to the rounded master. `mpjax.apply_updates(params,
  updates, master=mpjax.master_params(opt_state))` makes the two equal bit for bit;
  `optax.apply_updates` does so but for the sign of zero, and for steps so large that a float32
  `p + u` cannot reach the master, where the parameter follows on the next step. Where a finite
  master is beyond the range of a parameter's dtype, the parameter is the largest number there.

  Parameters in float32 (norms, say) are trained as without this wrapper, and have no copy. It may
  be inside `mpjax.loss_scaling` or around it, and inside `optax.masked` and
  `optax.multi_transform`. The rule is that of Micikevicius et al., "Mixed Precision Training"
  (2018), section 3.1.

  Args:
    inner: the optimizer. Consumers of parameters, such as weight decay, belong inside.

  Returns:
    An optax transformation. `update` needs `params`, and passes extra arguments to `inner`; its
    updates are float32 in the shapes of the parameters. Its state is a `MasterWeightsState`.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation; `init`: a parameter is no floating array;
      `update`: the state is not one of this transformation.
    MpjaxValueError: `update`: there are no parameters, or the gradients do not match them.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.master_weights(optax.sgd(0.5))
  >>> params = jnp.asarray([1.0], jnp.bfloat16)
  >>> opt_state = tx.init(params)
  >>> for _ in range(3):  # each step is less than half of what bfloat16 can show
  ...   updates, opt_state = tx.update(jnp.asarray([0.003]), opt_state, params)
  ...   params = mpjax.apply_updates(params, updates, master=mpjax.master_params(opt_state))
  >>> print(params, mpjax.master_params(opt_state))
  [0.996094] [0.99549997]
  """
  where = "mpjax.master_weights(inner)"
  inner = check_inner(inner, where)

  def init(params: Params) -> MasterWeightsState:
    refuse_integers(params, f"{where}.init(params)")
    params = arrays_only(params)
    master = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32) if is_half(p) else None, params)
    inner_state = init_inner(inner, _trained(master, params), where)
    return place_like(params, MasterWeightsState(master, jax.tree.map(strong, inner_state)))

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, MasterWeightsState]:
    state = check_state(state, MasterWeightsState, f"{where}.update(state)")
    check_params(params, f"{where}.update(params)")
    if "apply" in extra_args:
      raise MpjaxTypeError(
        f"{where}.update(apply)",
        expected="no apply=, which is mpjax.loss_scaling's alone",
        got="one",
        fix="Its new parameters would be taken for updates here. Put the loss scaling outside, "
        "loss_scaling(master_weights(inner)), or leave apply= out and apply the updates.",
      )
    params = arrays_only(params)
    grads = float32_view(align_gradients(updates, params, f"{where}.update(updates)"))
    trained = _trained(state.master, params)
    frozen, grads = leave_to_window(frozen_leaves([updates], params), grads, state.inner_state)
    new_updates, inner_state = update_inner(
      inner, grads, state.inner_state, trained, extra_args, f"{where}.update"
    )
    new_updates = hold(frozen, new_updates)
    moved = optax.apply_updates(trained, new_updates)
    master = jax.tree.map(
      lambda m, new: m if _is_hole(m) else new, state.master, moved, is_leaf=_is_hole
    )
    new_state = MasterWeightsState(master, inner_state)
    return reach_masters(params, new_updates, new_state), new_state

  return optax.GradientTransformationExtraArgs(init, update)


def _is_hole(x: object) -> bool:
  """Whether a leaf of a tree of masters is none: its own master, or masked out by optax."""
  return x is None or isinstance(x, optax.MaskedNode)


def _trained(master: PyTree, params: Params) -> Params:
  """Returns what is trained: the master of each parameter, or the parameter itself."""
  return jax.tree.map(lambda m, p: p if _is_hole(m) else m, master, params, is_leaf=_is_hole)


def _map_masters(f: Callable[[PyTree], PyTree], opt_state: T) -> T:
  """Returns `opt_state` with `f` applied to the tree of masters in each `MasterWeightsState`."""

  def is_state(x: object) -> bool:
    return isinstance(x, MasterWeightsState)

  return jax.tree.map(
    lambda x: x._replace(master=f(x.master)) if is_state(x) else x, opt_state, is_leaf=is_state
  )


def adopt_masters(params: Params, opt_state: OptState, where: str) -> OptState:
  """Returns `opt_state`, made for a float32 view of `params`, with masters for what is half.

  A wrapper that shows float32 to what is inside hides from `master_weights` which parameters are
  stored in half; it calls this after `init`, and `reach_masters` after `update`.

  Raises:
    MpjaxTypeError: a tree of masters does not have the structure of the parameters.
  """
  problems = []

  def adopt(master: PyTree) -> PyTree:
    def one(m: Leaf, p: Leaf) -> Leaf:
      # A None is a leaf of its own, while what optax masks out may be a subtree.
      if m is None and p is not None and not jax.tree_util.all_leaves([p]):
        problems.append(f"one array for {jax.tree.structure(p)}")
      return jnp.asarray(p, jnp.float32) if m is None and is_half(p) else m

    try:
      return jax.tree.map(one, master, params, is_leaf=_is_hole)
    except ValueError as error:
      problems.append(str(error))
      return master

  adopted = _map_masters(adopt, opt_state)
  if problems:
    raise MpjaxTypeError(
      where,
      expected="master_weights to see the tree of the parameters",
      got=f"a tree of another structure ({'; '.join(problems)})",
      fix="Put master_weights around what reshapes the tree, such as optax.flatten.",
    )
  return adopted


def reach_masters(params: Params, updates: Updates, opt_state: OptState) -> Updates:
  """Returns `updates` that lead every half parameter with a master to the rounded master."""
  for state in nodes_of(opt_state, MasterWeightsState):
    updates = jax.tree.map(_reach, state.master, params, updates, is_leaf=_is_hole)
  return updates


def keep_masters(frozen: PyTree, old: OptState, new: OptState) -> OptState:
  """Returns the state `new` with the masters of `old` for what is `frozen` (see `hold`)."""
  if frozen is None:
    return new
  masters = iter([state.master for state in nodes_of(old, MasterWeightsState)])

  def pick(n: Leaf, o: Leaf, f: Leaf) -> Leaf:
    if _is_hole(n) or f is False:  # Of a hole f may be a subtree.
      return n
    return o if f is True else jnp.where(f, o, n)

  def keep(moved: PyTree) -> PyTree:
    return jax.tree.map(pick, moved, next(masters), frozen, is_leaf=_is_hole)

  return _map_masters(keep, new)


def _reach(master: Leaf, param: Leaf, update: Leaf) -> Leaf:
  if _is_hole(master):
    return update
  # An inf in the parameter could never be left again: no update leads from it to a number.
  goal = round_to(saturate(master, param.dtype), param.dtype).astype(jnp.float32)
  old = param.astype(jnp.float32)
  # The one addend that leaves a parameter's bits alone, where it is there already.
  return jnp.where(goal == old, jnp.asarray(-0.0, jnp.float32), goal - old)


def master_params(opt_state: OptState, params: Params = None) -> Params:
  """Returns the float32 masters in an optimizer state: what to export, average or compare.

  Args:
    opt_state: a state that holds one `mpjax.master_weights`, or several for parts of the tree.
    params: the parameters, for those that are their own master.

  Returns:
    A tree like the parameters, in their shapes, float32 where a parameter is stored in half.
    Elsewhere it has the leaf of `params`, or None without them.

  Raises:
    MpjaxTypeError: there is no `master_weights` in the state.
    MpjaxValueError: a parameter has two masters, or `params` is another tree.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(2)}
  >>> opt_state = mpjax.master_weights(optax.adam(1e-3)).init(params)
  >>> mpjax.master_params(opt_state)
  {'norm': None, 'w': Array([1., 1.], dtype=float32)}
  """
  where = "mpjax.master_params(opt_state)"
  found = _require(opt_state, where)
  merged = found[0].master
  for state in found[1:]:
    merged = _merge(merged, state.master, where)
  if params is None:
    return jax.tree.map(lambda m: None if _is_hole(m) else m, merged, is_leaf=_is_hole)
  try:
    return _trained(merged, params)
  except ValueError as error:
    raise MpjaxValueError(
      "mpjax.master_params(params)",
      expected="the tree that the state was created for",
      got=f"another one ({error})",
      fix="Pass the parameters that are trained with this state.",
    ) from error


def set_master_params(opt_state: T, params: Params) -> T:
  """Returns `opt_state` with its masters set to `params`: how half training starts from float32.

  The parameters themselves are the caller's to round: `policy.cast_to_param(params)`.

  Args:
    opt_state: a state that holds `mpjax.master_weights`, created by `init` for the half parameters.
      It is not changed.
    params: a tree like the parameters, in their shapes, of any floating dtype; it is stored in
      float32.

  Returns:
    A state like `opt_state`, with float32 masters that share no memory with `params`.

  Raises:
    MpjaxTypeError: there is no `master_weights` in the state.
    MpjaxValueError: `params` has other leaves or shapes, or is not floating.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> trained = {"w": jnp.asarray([1.001])}
  >>> params = mpjax.Policy.parse("bfloat16").cast_to_param(trained)
  >>> opt_state = mpjax.master_weights(optax.adam(1e-3)).init(params)
  >>> opt_state = mpjax.set_master_params(opt_state, trained)
  >>> print(params["w"], mpjax.master_params(opt_state)["w"])
  [1] [1.001]
  """
  where = "mpjax.set_master_params(params)"
  _require(opt_state, "mpjax.set_master_params(opt_state)")
  problems = []

  def put(path: KeyPath, old: Leaf, new: Leaf) -> Leaf:
    if _is_hole(old):
      return old
    if not is_floating(new) or jnp.shape(new) != old.shape:
      problems.append(f"{jax.typeof(new)} for float32{list(old.shape)} at {key_text(path)}")
      return old
    new = jnp.array(new, jnp.float32, copy=True)  # An alias could not be donated with its source.
    traced = isinstance(old, Tracer) or isinstance(new, Tracer)
    # To put it where an uncommitted one is would commit it, and compile the next step once more.
    return new if traced or not old.committed else jax.device_put(new, old.sharding)

  fix = "Pass the float32 parameters of the same model, with the tree that init was given."
  try:
    new_state = _map_masters(
      lambda master: jax.tree_util.tree_map_with_path(put, master, params, is_leaf=_is_hole),
      opt_state,
    )
  except ValueError as error:
    expected, got = "the tree that the state was created for", f"another one ({error})"
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix) from error
  if problems:
    expected, got = "floating arrays in the shapes of the masters", listed(problems)
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return new_state


def merged_masters(opt_state: OptState) -> Params:
  """Returns the masters in `opt_state`, or None if it has none."""
  return master_params(opt_state) if nodes_of(opt_state, MasterWeightsState) else None


def _require(opt_state: OptState, where: str) -> list[MasterWeightsState]:
  found = nodes_of(opt_state, MasterWeightsState)
  if not found:
    raise MpjaxTypeError(
      where,
      expected="the state of an optimizer with mpjax.master_weights",
      got=f"a {type(opt_state).__name__} without masters",
      fix="Wrap the optimizer, tx = mpjax.master_weights(tx); parameters that are stored in "
      "float32 need none.",
    )
  return found


def _merge(a: PyTree, b: PyTree, where: str) -> PyTree:
  """Returns two trees of masters in one.

  Where one has a hole, which may replace an entire subtree, the other's subtree is taken.
  """
  if _is_hole(a) or _is_hole(b):
    return b if _is_hole(a) else a
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
