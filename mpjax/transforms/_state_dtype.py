"""The optax wrapper that stores the moments of an optimizer in low precision."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from mpjax._core.dtypes import HALF_NAMES, parse_dtype
from mpjax._core.errors import MpjaxTypeError, MpjaxValueError
from mpjax._core.trees import is_floating
from mpjax._core.types import (
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
from mpjax._core.validators import check_flag
from mpjax.transforms._checks import check_inner, init_inner, update_inner

Order = Literal["first", "second"]

_FIELDS: dict[str, Order] = {
  **dict.fromkeys(("mu", "trace", "m1", "exp_avg"), "first"),
  **dict.fromkeys(("nu", "nu_max", "exp_avg_sq"), "second"),
}
"""Which moment a field of a state holds.

Not m2 of AdEMAMix, which decays by 1e-4 a step.
"""

_FIELDS_OF: dict[str, dict[str, Order]] = {
  "ScaleBySM3State": {"mu": "second", "nu": "first"},
  # The mean, whose square is subtracted from nu: rounded, the difference may be negative.
  "ScaleByRStdDevState": {"mu": "second", "nu": "second"},
  "ScaleByRStdDevWithCountState": {"mu": "second", "nu": "second"},
  "ScaleByAdanState": {"m": "first", "v": "first", "n": "second"},
}
"""The same for states of optax that mean something else by a name, or have names of their own."""


def state_dtype(
  inner: optax.GradientTransformation,
  *,
  mu: DTypeLike | None = None,
  nu: DTypeLike | None = None,
  allow_second_moments: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that its first moments are stored in 16 bits, and computed in float32.

  Each update reads the first moments in float32, computes with them as `inner` does, and rounds
  what it stores to nearest. (`mu_dtype` of optax multiplies the stored moment by its decay in the
  dtype that it is stored in, and some optimizers have none.) Moments are found by the names of
  fields, wherever they are in chains, masks, labels and injected hyperparameters: `mu`, `trace`
  (the momentum of `optax.sgd`), `m1`, `exp_avg`, `m` and `v` of `optax.adan`, and `nu` of
  `optax.sm3`, which is its momentum. `mu` of `optax.rmsprop(centered=True)`, a part of its second
  moment, stays in float32, and so does the slow `m2` of `optax.contrib.ademamix`.

  A decay of 0.9 or 0.95 does in bfloat16. From 0.998 on, a step changes a moment by less than its
  rounding, and is lost. float16 has no numbers below 6e-8, as first moments often are.

  Second moments are refused for the same reasons: with their usual decay of 0.999 they stop in
  bfloat16 at a fraction of what they are; in float16 and int8 small ones are 0, and the update a
  division by epsilon, inf or NaN within steps.

  `mpjax.loss_scaling` belongs around it; it may be inside of `mpjax.master_weights` or around it.
  The state is that of `inner` but for these dtypes: `restore_like(..., cast=True)` of
  `mpjax.checkpoints` reads what was saved without it.

  Args:
    inner: the optimizer.
    mu: "bfloat16", "float16" or "float32", for first moments; None leaves them.
    nu: the same for second moments (`nu`, `nu_max`, `exp_avg_sq`); refused without the next.
    allow_second_moments: store second moments in `nu` nevertheless.

  Returns:
    An optax transformation. Its state is that of `inner`, in which the floating arrays of these
    moments have the dtype; complex and 64-bit ones stay as they are.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation, or an argument has the wrong type.
    MpjaxValueError: a dtype that no moment is stored in; `nu` without `allow_second_moments`;
      neither `mu` nor `nu`; `init`: there is no such moment in the state of `inner`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.state_dtype(optax.adam(1e-3), mu="bfloat16")
  >>> state = tx.init({"w": jnp.ones(2)})
  >>> state[0].mu["w"].dtype, state[0].nu["w"].dtype
  (dtype(bfloat16), dtype('float32'))
  """
  where = "mpjax.state_dtype(inner)"
  inner = check_inner(inner, where)
  check_flag(allow_second_moments, "mpjax.state_dtype(allow_second_moments)")
  if nu is not None and not allow_second_moments:
    raise MpjaxValueError(
      "mpjax.state_dtype(nu)",
      expected="second moments in float32",
      got=repr(nu),
      fix="Leave nu out: with a decay of 0.999 a second moment no longer moves in bfloat16 (a step "
      "is less than its rounding), and in float16 small ones are 0, which gives inf or NaN within "
      "steps. allow_second_moments=True stores them so nevertheless.",
    )
  arguments = {"first": "mu", "second": "nu"}
  dtypes = {
    order: _check_dtype(dtype, f"mpjax.state_dtype({name})")
    for (order, name), dtype in zip(arguments.items(), (mu, nu), strict=True)
    if dtype is not None
  }
  if not dtypes:
    raise MpjaxValueError(
      "mpjax.state_dtype(mu)",
      expected="a dtype for first moments",
      got="None, and none for second ones",
      fix='Write mpjax.state_dtype(inner, mu="bfloat16"), or leave the wrapper out.',
    )

  def init(params: Params) -> OptState:
    found: set[Order] = set()

    def store(x: Leaf, order: Order) -> Leaf:
      found.add(order)
      return _cast(x, dtypes.get(order))

    state = _map_moments(store, init_inner(inner, params, where), _types_in(params))
    missing = [arguments[order] for order in dtypes if order not in found]
    if missing and jax.tree.leaves(params):
      raise MpjaxValueError(
        f"mpjax.state_dtype({', '.join(missing)})",
        expected="an optimizer with such moments in its state",
        got=f"one with {' and '.join(sorted(found)) + ' moments' if found else 'none'}",
        fix="Leave it out for this optimizer; moments are found by the names of fields, "
        f"{', '.join(_FIELDS)}.",
      )
    return state

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, OptState]:
    containers = _types_in(updates if params is None else params)
    wide = dict.fromkeys(dtypes, jnp.dtype(jnp.float32))

    def cast(state: OptState, into: Mapping[str, DType]) -> OptState:
      return _map_moments(lambda x, order: _cast(x, into.get(order)), state, containers)

    new_updates, new = update_inner(
      inner, updates, cast(state, wide), params, extra_args, f"{where}.update"
    )
    return new_updates, cast(new, dtypes)

  return optax.GradientTransformationExtraArgs(init, update)


def _check_dtype(dtype: DTypeLike, where: str) -> DType:
  expected = "'bfloat16', 'float16' or 'float32'"
  fix = "Narrower numbers need a scale for each block of a moment, which is not done here."
  try:
    found = parse_dtype(dtype, where)
  except MpjaxTypeError as error:
    raise MpjaxTypeError(where, expected=expected, got=repr(dtype), fix=fix) from error
  if found.name not in (*HALF_NAMES, "float32"):
    raise MpjaxValueError(where, expected=expected, got=repr(found.name), fix=fix)
  return found


def _cast(x: Leaf, dtype: DType | None) -> Leaf:
  """Returns an array of a moment in `dtype`; without one, or of 64 bits or complex, as it is."""
  is_stored = is_floating(x) and x.dtype.itemsize <= 4
  return x if dtype is None or not is_stored else x.astype(dtype)


def _types_in(tree: PyTree) -> set[Class]:
  """Returns the types of the containers in a tree of parameters, whose fields are no moments."""
  found: set[Class] = set()

  def visit(x: object) -> bool:
    found.add(type(x))
    return False

  jax.tree.leaves(tree, is_leaf=visit)
  return found


def _map_moments(
  f: Callable[[Leaf, Order], Leaf], state: OptState, containers: set[Class]
) -> OptState:
  """Returns a state with `f` of each array in a moment, and of which moment that is.

  `containers` are types of the parameters' own: a NamedTuple of them may have a field `mu`.
  """

  def visit(x: PyTree) -> PyTree:
    own = type(x) in containers
    names: tuple[str, ...] = getattr(x, "_fields", ())
    if not own and names:
      return x._replace(**{name: field(x, name) for name in names})
    if not own and dataclasses.is_dataclass(x) and not isinstance(x, type):
      inside = [name for name in _children(x) if hasattr(x, name)]
      return dataclasses.replace(x, **{name: field(x, name) for name in inside})
    children, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    if len(children) == 1 and children[0] is x:
      return x
    return treedef.unflatten(map(visit, children))

  def field(owner: PyTree, name: str) -> PyTree:
    order = _FIELDS_OF.get(type(owner).__name__, _FIELDS).get(name)
    value = getattr(owner, name)
    return visit(value) if order is None else jax.tree.map(lambda x: f(x, order), value)

  return visit(state)


def _children(x: PyTree) -> list[str]:
  """Returns the fields of a dataclass that are a part of its tree."""
  found = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda y: y is not x)
  keys = (key for path, _ in found for key in path)
  return [key.name for key in keys if isinstance(key, jax.tree_util.GetAttrKey)]
