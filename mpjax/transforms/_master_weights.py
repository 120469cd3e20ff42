"""The optax wrapper that keeps a float32 copy of parameters that are stored in 16 bits."""

from typing import Literal, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import optax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_choice, kind_of, listed
from mpjax._core.trees import is_floating
from mpjax._core.types import Grads, KeyPath, Leaf, OptState, Params, PyTree, Updates
from mpjax.transforms._checks import (
  check_inner,
  check_params,
  check_state,
  init_inner,
  refuse_integers,
  update_inner,
)
from mpjax.transforms._masters import (
  ShownMasterWeightsState,
  SplitMasterWeightsState,
  bounded,
  check_split,
  first_master,
  has_split,
  is_hole,
  is_remainder,
  map_masters,
  map_states,
  merge_masters,
  next_entry,
  split,
  trained_of,
  update_to,
)
from mpjax.transforms._state import MasterWeightsState
from mpjax.transforms._trees import (
  align_gradients,
  arrays_only,
  float32_view,
  key_text,
  nodes_of,
  place_like,
  put_like,
  strong,
)

T = TypeVar("T")

Storage: TypeAlias = Literal["float32", "split"]


def master_weights(
  inner: optax.GradientTransformation, *, storage: Storage = "float32"
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it trains a float32 copy of parameters stored in 16 bits.

  `inner` sees gradients, parameters and moments in float32, and its updates are added to the
  master: steps too small for 16 bits still add up, and weight decay does not underflow. The updates
  that come out lead each 16-bit parameter to the rounded master. `mpjax.apply_updates(params,
  updates, master=mpjax.master_params(opt_state))` makes the two equal bit for bit;
  `optax.apply_updates` does so but for the sign of zero, and for steps so large that a float32
  `p + u` cannot reach the master, where the parameter follows on the next step. bfloat16 parameters
  are rounded to nearest, ties away from zero. Where a finite master is beyond the range of a
  parameter's dtype, the parameter is the largest number there; masters end at 3.3961773e38, what
  rounds to the largest bfloat16. Derivatives take the rounding for the identity.

  Parameters in float32 (norms, say) are trained as without this wrapper, and have no copy. It may
  be inside `mpjax.loss_scaling` or around it, and inside `optax.masked` and
  `optax.multi_transform`. The rule is that of Micikevicius et al., "Mixed Precision Training"
  (2018), section 3.1.

  With `storage="split"` the state has no copy of a bfloat16 parameter, but what its rounding has
  cut off: the parameter and an int16 in its shape are the master, bit for bit, and masters, updates
  and parameters are those of `storage="float32"`. Then `mpjax.apply_updates(params, updates)` or
  `optax.apply_updates` gives the rounded master, without `master=`; `mpjax.master_params` needs the
  parameters that belong to the state; and nothing but these updates may change the parameters
  (nothing that changes updates may follow this in an `optax.chain`). NaN masters come back as some
  NaN. Where no float32 update leads to the rounded master (a step that brings a parameter 2^16
  times nearer to zero), the master becomes the nearest number that rounds to the parameter.

  Args:
    inner: the optimizer. Consumers of parameters, such as weight decay, belong inside.
    storage: "float32", a master of 4 bytes for each float16 or bfloat16 parameter; or "split", what
      is missing in a bfloat16 parameter. float16 parameters, whose exponents have other sizes, have
      float32 masters in both.

  Returns:
    An optax transformation. `update` needs `params`, and passes extra arguments to `inner`; its
    updates are float32 in the shapes of the parameters. Its state is a `MasterWeightsState`.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation; `init`: a parameter is no floating array;
      `update`: the state is not one of this transformation.
    MpjaxValueError: an unknown `storage`; `update`: there are no parameters, or the gradients do
      not match them, or with "split" the parameters cannot be those of the state.

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
  check_choice(storage, get_args(Storage), "mpjax.master_weights(storage)")
  splits = storage != "float32"

  def init(params: Params) -> MasterWeightsState:
    refuse_integers(params, f"{where}.init(params)")
    params = arrays_only(params)
    masters = jax.tree.map(lambda p: first_master(p, splits=splits), params)
    inner_state = init_inner(inner, trained_of(masters, params), where)
    kind = SplitMasterWeightsState if splits else MasterWeightsState
    return place_like(params, kind(masters, jax.tree.map(strong, inner_state)))

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, MasterWeightsState]:
    state = check_state(state, MasterWeightsState, f"{where}.update(state)")
    check_params(params, f"{where}.update(params)")
    if isinstance(state, SplitMasterWeightsState) != splits:
      raise MpjaxTypeError(
        f"{where}.update(state)",
        expected=f'the state of storage="{storage}"',
        got="that of the other storage",
        fix="Convert it together with the parameters, mpjax.checkpoints.restore_like("
        "(params, tx.init(params)), (params, opt_state)).",
      )
    if "apply" in extra_args:
      raise MpjaxTypeError(
        f"{where}.update(apply)",
        expected="no apply=, which is mpjax.loss_scaling's alone",
        got="one",
        fix="Its new parameters would be taken for updates here. Put the loss scaling outside, "
        "loss_scaling(master_weights(inner)), or leave apply= out and apply the updates.",
      )
    params = arrays_only(params)
    check_split(
      state.master,
      params,
      f"{where}.update(params)",
      view=isinstance(state, ShownMasterWeightsState),
    )
    grads = float32_view(align_gradients(updates, params, f"{where}.update(updates)"))
    # A wrapper around this one shows bfloat16 parameters in float32.
    stored = map_masters(
      lambda m, p: p.astype(jnp.bfloat16) if is_remainder(m) else p, state.master, params
    )
    trained = trained_of(state.master, stored)
    new_updates, inner_state = update_inner(
      inner, grads, state.inner_state, trained, extra_args, f"{where}.update"
    )
    moved = optax.apply_updates(trained, new_updates)
    # Those that lead parameters to the rounded masters, and what is then stored of these.
    new_updates = map_masters(
      lambda old, m, p, u: u if is_hole(old) else update_to(m, p),
      *(state.master, moved, stored, new_updates),
    )
    masters = map_masters(next_entry, state.master, moved, stored, new_updates)
    return new_updates, state._replace(master=masters, inner_state=inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def master_params(opt_state: OptState, params: Params = None) -> Params:
  """Returns the float32 masters in an optimizer state: what to export, average or compare.

  Args:
    opt_state: a state that holds one `mpjax.master_weights`, or several for parts of the tree.
    params: the parameters, for those that are their own master. With `storage="split"` they are
      needed: those to which all updates of this state, and no later ones, have been applied. Others
      give other masters, and cannot be told from them but by their shapes and dtypes.

  Returns:
    A tree like the parameters, in their shapes, float32 where a parameter is stored in 16 bits.
    Elsewhere it has the leaf of `params`, or None without them.

  Raises:
    MpjaxTypeError: there is no `master_weights` in the state.
    MpjaxValueError: a parameter has two masters, or `params` is another tree; with
      `storage="split"` there are no `params`, or they are of another shape or dtype.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(2)}
  >>> opt_state = mpjax.master_weights(optax.adam(1e-3)).init(params)
  >>> mpjax.master_params(opt_state)
  {'norm': None, 'w': Array([1., 1.], dtype=float32)}
  """
  where = "mpjax.master_params(opt_state)"
  merged = merge_masters(_require(opt_state, where), where)
  if params is None:
    if has_split(opt_state):
      raise MpjaxValueError(
        "mpjax.master_params(params)",
        expected='the parameters: with storage="split" the state has the lower half of each master',
        got="None",
        fix="Pass mpjax.master_params(opt_state, params) with the parameters that belong to the "
        "state; for mpjax.apply_updates(params, updates) no master is needed.",
      )
    return merged_masters(opt_state)
  try:
    map_masters(lambda m, p: None, merged, params)
  except ValueError as error:
    raise MpjaxValueError(
      "mpjax.master_params(params)",
      expected="the tree that the state was created for",
      got=f"another one ({error})",
      fix="Pass the parameters that are trained with this state. Of Flax NNX, pass state and "
      "parameters without their variables: nnx.as_pure(optimizer.opt_state) and "
      "nnx.as_pure(nnx.state(model, nnx.Param)).",
    ) from error
  check_split(merged, params, "mpjax.master_params(params)", view=False)
  return trained_of(merged, params)


def set_master_params(opt_state: T, params: Params) -> T:
  """Returns `opt_state` with its masters set to `params`: how 16-bit training starts from float32.

  The parameters themselves are the caller's to round: `policy.cast_to_param(params)`. With
  `storage="split"` these, and no others, belong to the new state. A number half-way between two of
  bfloat16, which they have rounded towards zero, is then stored as the float32 number next to it.

  Args:
    opt_state: a state that holds `mpjax.master_weights`, created by `init` for the 16-bit
      parameters. It is not changed.
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
    if is_hole(old):
      return old
    if not is_floating(new) or jnp.shape(new) != old.shape:
      problems.append(f"{jax.typeof(new)} for float32{list(old.shape)} at {key_text(path)}")
      return old
    # A new array: an alias could not be donated with its source.
    new = bounded(jnp.asarray(new, jnp.float32))
    # The parameter is the one that the caller has by a cast, ties to even.
    return put_like(split(new, new.astype(jnp.bfloat16)) if is_remainder(old) else new, old)

  def put_all(state: MasterWeightsState) -> MasterWeightsState:
    new = jax.tree_util.tree_map_with_path(put, state.master, params, is_leaf=is_hole)
    return state._replace(master=new)

  fix = "Pass the float32 parameters of the same model, with the tree that init was given."
  try:
    new_state = map_states(put_all, opt_state)
  except ValueError as error:
    expected, got = "the tree that the state was created for", f"another one ({error})"
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix) from error
  if problems:
    expected, got = "floating arrays in the shapes of the masters", listed(problems)
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return new_state


def merged_masters(opt_state: OptState) -> Params:
  """Returns the float32 masters in `opt_state`, with None for other parameters; or None."""
  if not nodes_of(opt_state, MasterWeightsState):
    return None
  merged = merge_masters(_require(opt_state, ""), "")
  return map_masters(lambda m: None if is_hole(m) or is_remainder(m) else m, merged)


def _require(opt_state: OptState, where: str) -> list[MasterWeightsState]:
  states = nodes_of(opt_state, MasterWeightsState)
  if not states:
    raise MpjaxTypeError(
      where,
      expected="the state of an optimizer with mpjax.master_weights",
      got=f"{kind_of(opt_state)} without masters",
      fix="Wrap the optimizer, tx = mpjax.master_weights(tx); parameters that are stored in "
      "float32 need none.",
    )
  return states
