"""The check for many skipped steps in a row."""

import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._core.errors import MpjaxRuntimeError, MpjaxTypeError, check_int
from mpjax._core.frameworks import is_nnx_object
from mpjax._core.leaves import raw_value
from mpjax._core.types import KeyPath, OptState, Params, PyTree, is_inexact
from mpjax._optim.find_scale import OwnedScale, find_scale, is_damaged, scales_in
from mpjax._optim.optimizer_trees import differentiated, key_text
from mpjax._optim.wrappers.leaf_codes import (
  LeafCode,
  LeafKind,
  find_leaf,
  floating_leaves,
  read_code,
)

_WHERE = "mpjax.check_skipped_steps(opt_state)"


def check_skipped_steps(
  opt_state: OptState,
  max_consecutive_skips: int = 50,
  *,
  params: Params = None,
  name: str | None = None,
) -> None:
  """Raise if many steps in a row were skipped. Call it on the host, such as once per epoch.

  After many skips no scale helps: the loss, the data or the model produces an inf or a NaN. Under
  `NoLossScale` optimizer state and parameters are searched for a NaN.

  Args:
    opt_state: a concrete state that holds a loss scale; under `jax.vmap` the worst member counts.
    max_consecutive_skips: this many skipped steps in a row, at least 1, are an error.
    params: the parameters, or the model of NNX or the variables of Linen that hold them. With them
      the error names the gradient by its path. They may be donated or abstract.
    name: which of several loss scales to check.

  Raises:
    MpjaxRuntimeError: that many steps in a row were skipped. The scale is no positive finite
      number (a damaged checkpoint). Under `NoLossScale`: there is a NaN.
    MpjaxError: the state is traced or has no scale of that `name`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> opt_state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  >>> mpjax.check_skipped_steps(opt_state)
  """
  fix = "1 raises after the first skipped step."
  where = "mpjax.check_skipped_steps(max_consecutive_skips)"
  most = check_int(max_consecutive_skips, where, least=1, fix=fix)
  scale = find_scale(opt_state, _WHERE, name)
  # A `TrainState` has its parameters beside the optimizer state.
  params = getattr(opt_state, "params", None) if params is None else params
  params = _trained(params, opt_state)
  trained = {"opt_state": scale.owner.inner_state, "params": params}
  for x in jax.tree.leaves(scale.state or trained):
    if isinstance(x, Tracer):
      expected, fix = "a concrete state", "Call it on the host, after the jitted step has returned."
      raise MpjaxTypeError(_WHERE, expected=expected, got=f"a traced one ({x})", fix=fix)
  if scale.state is None:
    # `NoLossScale` checks no step. A NaN is never intended, while an inf may be: a best value so
    # far, a mask.
    if (nan := _first_nan(trained)) is not None:
      expected = "no NaN after steps that NoLossScale() does not check"
      fix = "Restore a checkpoint, and train with mpjax.SkipNonfinite(), which skips such steps."
      raise MpjaxRuntimeError(_WHERE, expected=expected, got=f"one at {nan}", fix=fix)
    return
  scales = np.asarray(scale.state.scale)
  if is_damaged(scale.state):
    expected = "a positive finite loss scale"
    fix = "No step produces this: restore another checkpoint, or call mpjax.states.set_loss_scale."
    raise MpjaxRuntimeError(_WHERE, expected=expected, got=str(scales), fix=fix)
  # Several values where the state is vmapped (an ensemble): the worst member counts.
  skips = np.atleast_1d(scale.state.consecutive_skips)
  worst = int(np.argmax(skips))
  if skips[worst] < most:
    return
  # A NaN in the parameters makes every later gradient NaN. No data or learning rate helps then.
  if (nan := _first_nan(params)) is not None:
    advice = f"The parameters hold a NaN at {nan}, which no step removes: restore a checkpoint."
  else:
    advice = (
      "At a small scale the cause is not the scale: look for an inf or NaN in the data and "
      "the loss, a float16 activation above 65504, log(0), a division by 0, or a learning rate "
      "that is too high. "
      "print(mpjax.find_nonfinite(step)(state, batch)) shows where it begins."
    )
  raise MpjaxRuntimeError(
    _WHERE,
    expected=f"fewer than {most} skipped steps in a row",
    got=f"{skips[worst]}, at loss scale {np.atleast_1d(scales)[worst]:.9g}; the last "
    f"step's first non-finite value was in {_first_bad(opt_state, scale, worst, params)}",
    fix=advice,
  )


def _trained(params: Params, opt_state: OptState) -> Params:
  """Returns the parameters in the variables of a Linen model, or in a model of NNX.

  Other variables have no gradient, and a position among them would name the wrong leaf.
  """
  if is_nnx_object(params):
    nnx = sys.modules["flax.nnx"]
    return nnx.state(params, getattr(opt_state, "wrt", nnx.Param))
  is_variables = isinstance(params, Mapping) and "params" in params and len(params) > 1
  return params["params"] if is_variables else params


def _first_nan(tree: PyTree) -> str | None:
  """Returns the path of the first leaf with a NaN, if any; donated and abstract ones show none."""
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
      continue
    # A step donates parameters, and reading a deleted array would raise.
    is_gone = isinstance(x, jax.Array) and x.is_deleted()
    if not is_gone and is_inexact(x) and bool(jnp.any(jnp.isnan(x))):
      return key_text(path)
  return None


def _first_bad(opt_state: OptState, scale: OwnedScale, member: int, params: Params) -> str:
  """Returns where the last step's first non-finite value was."""
  # With several losses, the leaf may belong to another loss than the one that is asked about.
  for one in (scale, *scales_in(scale.owner)):
    code = read_code(int(np.atleast_1d(raw_value(one.numbers.first_bad))[member]))
    if code is not None:
      text = _leaf_text(code, opt_state, scale, params)
      return text if one.name == scale.name else f"{text}, of the loss {one.name!r}"
  return "the sum of the gradients of all losses, each of which was finite"


def _leaf_text(code: LeafCode, opt_state: OptState, scale: OwnedScale, params: Params) -> str:
  """Names a leaf that was not finite, by its path or else by its position."""
  # A code has a checksum of the leaf's path. List the paths that such a leaf can have, with names.
  match code.kind:
    case LeafKind.GRADIENT | LeafKind.UPDATE:
      of = "the gradient of" if code.kind is LeafKind.GRADIENT else "the update of"
      named = [(path, f"{of} {text}") for path, text in _parameters(params)]
    case LeafKind.LOSS:
      # `make_train_step` passes a pair of the loss and the model state, others a loss alone.
      loss, state = map(jax.tree_util.SequenceKey, (0, 1))
      leaves = floating_leaves(getattr(opt_state, "model_state", None))
      of_state = [((state, *path), f"the model state at {key_text(path)}") for path, _ in leaves]
      named = [((loss,), "the loss"), *of_state, ((), "the loss")]
    case LeafKind.STATE:
      leaves = floating_leaves(scale.owner.inner_state)
      at = "the new optimizer state at inner_state"
      named = [(path, f"{at}{jax.tree_util.keystr(path)}") for path, _ in leaves]
  if (name := find_leaf(code, named)) is not None:
    return name
  # No path has the checksum: the tree that was checked differs from the user's.
  if code.kind in (LeafKind.LOSS, LeafKind.STATE):
    return f"{code.kind.name.lower()} leaf {code.position_text}"
  hint = "params= gives its path" if params is None else "params have no leaf at its path"
  return (
    f"{code.kind.name.lower()} leaf {code.position_text} (in the order of jax.tree.leaves of the "
    f"floating parameters that this loss scale sees; {hint})"
  )


_COMPLEX_PARTS = (".real", ".imaginary")
"""Attributes that `optax.contrib.split_real_and_imaginary` has in place of a complex number."""


def _parameters(params: Params) -> list[tuple[KeyPath, str]]:
  """Returns the paths of gradients and updates, with names for errors."""
  leaves = floating_leaves(differentiated(params))
  # Two wrappers of optax show gradients in another tree. `split_real_and_imaginary` makes two
  # leaves of a complex one. `flatten` makes one leaf of all, whose path is ().
  paths: list[KeyPath] = [path for path, _ in leaves]
  for path, x in leaves:
    if jnp.iscomplexobj(x):
      paths += [(*path, jax.tree_util.GetAttrKey(part[1:])) for part in _COMPLEX_PARTS]
  named = [(path, key_text(path)) for path in paths]
  if len(leaves) > 1:
    named.append(((), f"all parameters, one array of {sum(np.size(x) for _, x in leaves)} numbers"))
  return named
