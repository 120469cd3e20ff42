"""Metrics of the last step, the choice of kept state, the check of skips, and the monitor."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from mpjax._core.errors import (
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  check_int,
  kind_of,
)
from mpjax._core.leaves import changes_nothing, is_nonzero, raw_value
from mpjax._core.trees import is_inexact, is_nnx_object, pick, select
from mpjax._core.types import Array, Grads, KeyPath, Leaf, OptState, Params, PyTree, Updates
from mpjax._optim.checks import check_inner, check_params, check_state
from mpjax._optim.leaf_codes import Kind, LeafCode, find_leaf, floating_leaves, read_code
from mpjax._optim.loss_scale import (
  COUNTERS,
  OwnedScale,
  find_scale,
  read_state,
  scales_in,
)
from mpjax._optim.trees import (
  differentiated,
  key_text,
  leaves_with_path,
  place_like,
  states_of,
)

T = TypeVar("T")


def loss_scaling_metrics(
  opt_state: OptState, *, before: OptState | None = None, name: str | None = None
) -> dict[str, Array]:
  """Return metrics of loss scaling after an `update`.

  Args:
    opt_state: a state that holds a loss scale.
    before: the state before the update, for `scale_changed`.
    name: which of several loss scales to read.

  Returns:
    Arrays of shape (). Under `NoLossScale` the scale is 1, `finite` is True and every count is 0.

    - `loss_scale` (float32): the factor on the next loss;
    - `finite` (bool): whether the last step was applied, as `mpjax.step_applied`;
    - `good_steps` (int32): finite steps in a row since the scale last moved;
    - `total`, `skipped` (int32): steps so far, and those that were not applied;
    - `consecutive_skips` (int32): skipped steps since the last applied one;
    - `floor_hits` (int32): overflows at the minimum scale;
    - `bad_updates` (int32): steps skipped for their updates or new state (`check_updates=True`);
    - `scale_changed` (bool), where `before` is given: whether the update moved the scale.

  Raises:
    MpjaxError: the state has no scale or several, or is a constant of the traced function.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(jnp.ones(2)), jnp.ones(2))
  >>> metrics = mpjax.loss_scaling_metrics(opt_state)
  >>> float(metrics["loss_scale"]), bool(metrics["finite"]), int(metrics["skipped"])
  (16384.0, False, 1)
  """
  where = "mpjax.loss_scaling_metrics"
  state = read_state(opt_state, f"{where}(opt_state)", name)
  metrics = {"loss_scale": state.scale, "finite": state.finite}
  metrics |= {key: getattr(state, key) for key in COUNTERS}
  if before is not None:
    old = find_scale(before, f"{where}(before)", name).state or state
    metrics["scale_changed"] = state.scale != old.scale
  return metrics


def step_applied(opt_state: OptState, *, name: str | None = None) -> Array:
  """Return whether the last step was applied.

  Args:
    opt_state: a state that holds a loss scale, after an `update`.
    name: which of several loss scales to read.

  Returns:
    A bool of shape (), traced under `jit`; True before the first step and under `NoLossScale`.

  Raises:
    MpjaxError: as `mpjax.loss_scaling_metrics`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> bool(mpjax.step_applied(mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))))
  True
  """
  return read_state(opt_state, "mpjax.step_applied(opt_state)", name).finite


def keep_if_skipped(opt_state: OptState, new: T, old: T, *, name: str | None = None) -> T:
  """Return `new` if the last step was applied, and `old` if it was skipped.

  Use it for state outside the optimizer: batch statistics, moving averages and counters.

  Args:
    opt_state: the state that `update` returned; it holds a loss scale.
    new: a tree of arrays, after the step.
    old: the same tree before the step, in the same shapes and dtypes.
    name: which of several loss scales to read.

  Returns:
    A tree like `new`. Under `NoLossScale` it is `new`.

  Raises:
    MpjaxValueError: the trees differ in structure, shapes or dtypes.
    MpjaxError: as `mpjax.loss_scaling_metrics`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> _, opt_state = tx.update(jnp.asarray([1.0, jnp.inf]), tx.init(jnp.ones(2)), jnp.ones(2))
  >>> print(mpjax.keep_if_skipped(opt_state, new=jnp.asarray(jnp.nan), old=jnp.asarray(0.5)))
  0.5
  """
  call = "mpjax.keep_if_skipped"
  applied = read_state(opt_state, f"{call}(opt_state)", name).finite
  return select(applied, new, old, f"{call}(opt_state, new, old)")


def check_skipped_steps(
  opt_state: OptState,
  max_consecutive_skips: int = 50,
  *,
  params: Params = None,
  name: str | None = None,
) -> None:
  """Raise if many steps in a row were skipped. Call it on the host, such as once per epoch.

  Then no scale helps, because the loss, the data or the model produces an inf or a NaN. Under
  `NoLossScale` optimizer state and parameters are searched for a NaN.

  Args:
    opt_state: a concrete state that holds a loss scale; under `jax.vmap` the worst member counts.
    max_consecutive_skips: this many skipped steps in a row, at least 1, are an error.
    params: the parameters, `variables["params"]` or `nnx.state(model, nnx.Param)`. With them the
      error names the gradient by its path. They may be donated or abstract.
    name: which of several loss scales to check.

  Raises:
    MpjaxRuntimeError: that many steps in a row were skipped. The scale is no positive finite
      number (a damaged checkpoint). Under `NoLossScale`: there is a NaN.
    MpjaxError: the state is traced or has no scale of that `name`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> opt_state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  >>> mpjax.check_skipped_steps(opt_state)
  """
  where, call = "mpjax.check_skipped_steps(opt_state)", "mpjax.check_skipped_steps"
  fix = "1 raises after the first skipped step."
  most = check_int(max_consecutive_skips, f"{call}(max_consecutive_skips)", least=1, fix=fix)
  scale = find_scale(opt_state, where, name)
  params = getattr(opt_state, "params", None) if params is None else params
  trained = {"opt_state": scale.owner.inner_state, "params": params}
  state = scale.state
  for x in jax.tree.leaves(state or trained):
    if isinstance(x, Tracer):
      expected, fix = "a concrete state", "Call it on the host, after the jitted step has returned."
      raise MpjaxTypeError(where, expected=expected, got=f"a traced one ({x})", fix=fix)
  if state is None:
    # An inf may be meant: a best value so far, a mask.
    if (nan := _first_nan(trained)) is not None:
      expected = "no NaN after steps that NoLossScale() does not check"
      fix = "Restore a checkpoint, and train with mpjax.SkipNonfinite(), which skips such steps."
      raise MpjaxRuntimeError(where, expected=expected, got=f"one at {nan}", fix=fix)
    return
  # Several values where the state is vmapped (an ensemble): the worst member counts.
  scales, skips = np.atleast_1d(state.scale), np.atleast_1d(state.consecutive_skips)
  if not np.all(np.isfinite(scales) & (scales > 0)):
    expected, got = "a positive finite loss scale", str(np.asarray(state.scale))
    fix = "No step produces this: restore another checkpoint, or call mpjax.states.set_loss_scale."
    raise MpjaxRuntimeError(where, expected=expected, got=got, fix=fix)
  worst = int(np.argmax(skips))
  if skips[worst] < most:
    return
  fix = (
    "At a small scale the cause is not the scale: look for an inf or NaN in the data and "
    "the loss, log(0), a division by 0, or a learning rate that is too high. "
    "print(mpjax.find_nonfinite(step)(state, batch)) shows where it begins."
  )
  if (nan := _first_nan(params)) is not None:
    fix = f"The parameters hold a NaN at {nan}, which no step removes: restore a checkpoint."
  # Variables of Linen and models of NNX have more leaves than there are gradients.
  variables = isinstance(params, Mapping) and "params" in params and len(params) > 1
  if variables or is_nnx_object(params):
    fix += ' Pass variables["params"], or nnx.as_pure(nnx.state(model, nnx.Param)).'
    params = None
  expected = f"fewer than {most} skipped steps in a row"
  got = f"{skips[worst]}, at loss scale {scales[worst]:.9g}; the last step's first non-finite "
  got += f"value was in {_first_bad(opt_state, scale, worst, params)}"
  raise MpjaxRuntimeError(where, expected=expected, got=got, fix=fix)


def _first_nan(tree: PyTree) -> str | None:
  """Returns the path of the first leaf with a NaN, if any; donated and abstract ones show none."""
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
      continue
    is_gone = isinstance(x, jax.Array) and x.is_deleted()
    if not is_gone and is_inexact(x) and bool(jnp.any(jnp.isnan(x))):
      return key_text(path)
  return None


def _first_bad(opt_state: OptState, scale: OwnedScale, member: int, params: Params) -> str:
  """Returns where the last step's first non-finite value was."""
  for one in (scale, *scales_in(scale.owner)):
    code = read_code(int(np.atleast_1d(raw_value(one.stored.first_bad))[member]))
    if code is not None:
      text = _leaf_text(code, opt_state, scale, params)
      return text if one.name == scale.name else f"{text}, of the loss {one.name!r}"
  return "the sum of the gradients of all losses, each of which was finite"


def _leaf_text(code: LeafCode, opt_state: OptState, scale: OwnedScale, params: Params) -> str:
  """Returns what a leaf is that was not finite: by its path, or by its position without one."""
  match code.kind:
    case Kind.GRADIENT | Kind.UPDATE:
      of = "the gradient of" if code.kind is Kind.GRADIENT else "the update of"
      named = [(path, f"{of} {text}") for path, text in _parameters(params)]
    case Kind.LOSS:
      named = _watched(getattr(opt_state, "model_state", None))
    case Kind.STATE:
      leaves = floating_leaves(scale.owner.inner_state)
      at = "the new optimizer state at inner_state"
      named = [(path, f"{at}{jax.tree_util.keystr(path)}") for path, _ in leaves]
  if (name := find_leaf(code, named)) is not None:
    return name
  if code.kind in (Kind.LOSS, Kind.STATE):
    return f"{code.kind.name.lower()} leaf {code.position_text}"
  hint = "params= gives its path" if params is None else "params have no leaf at its path"
  return (
    f"{code.kind.name.lower()} leaf {code.position_text} (in the order of jax.tree.leaves of the "
    f"floating parameters that this loss scale sees; {hint})"
  )


_COMPLEX_PARTS = (".real", ".imaginary")
"""The fields that `optax.contrib.split_real_and_imaginary` has in place of a complex parameter."""


def _parameters(params: Params) -> list[tuple[KeyPath, str]]:
  """Returns the paths of gradients and updates, and what they are in an error."""
  leaves = floating_leaves(differentiated(params))
  # `optax.contrib.split_real_and_imaginary` makes two of a complex one, `optax.flatten` one of all.
  parts = [
    (*path, jax.tree_util.GetAttrKey(part[1:]))
    for path, x in leaves
    if jnp.iscomplexobj(x)
    for part in _COMPLEX_PARTS
  ]
  named = [(path, key_text(path)) for path in [*(path for path, _ in leaves), *parts]]
  if len(leaves) > 1:
    named.append(((), f"all parameters, one array of {sum(np.size(x) for _, x in leaves)} numbers"))
  return named


def _watched(model_state: PyTree) -> list[tuple[KeyPath, str]]:
  """Returns the paths of what is looked at as `loss=`, and what it is in an error."""
  loss, state = map(jax.tree_util.SequenceKey, (0, 1))
  # `make_train_step` passes a pair of the loss and the model state, others a loss alone.
  leaves = floating_leaves(model_state)
  of_state = [((state, *path), f"the model state at {key_text(path)}") for path, _ in leaves]
  return [((loss,), "the loss"), *of_state, ((), "the loss")]


class MonitorState(NamedTuple):
  """The state of `mpjax.monitor`.

  Args:
    counts: int32 of shape (4,) for each parameter, by its path: elements, zero gradients, nonzero
      updates and lost updates of the last applied step.
    inner_state: the state of the inner optimizer.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> mpjax.monitor(optax.sgd(0.1)).init({"w": jnp.ones(2)}).counts["w"].dtype
  dtype('int32')
  """

  counts: dict[str, Array]
  inner_state: OptState


def monitor(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Wrap an optimizer so that it counts zero gradients and lost updates of each parameter.

  Put it outermost, because it compares updates with the stored parameters. It does not change
  the updates. `mpjax.states.monitor_counts` returns the counts of the last applied step.

  Args:
    inner: the optimizer, with a loss scale or without.

  Returns:
    An optax transformation with the updates of `inner`. Its state is a `MonitorState`.

  Raises:
    MpjaxTypeError: `inner` is no optax transformation; `update`: the state is another's.
    MpjaxValueError: `update`: there are no parameters.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(1e-3), mpjax.SkipNonfinite()))
  >>> params = {"lora_a": jnp.full(3, 1e5)}
  >>> grads = {"lora_a": jnp.asarray([1.0, 0.0, 80.0])}
  >>> updates, opt_state = tx.update(grads, tx.init(params), params)
  >>> {key: int(n) for key, n in mpjax.states.monitor_counts(opt_state)["lora_a"].items()}
  {'size': 3, 'zero_gradients': 1, 'updates': 2, 'lost_updates': 1}
  """
  where = "mpjax.monitor(inner)"
  inner = check_inner(inner, where)

  def init(params: Params) -> MonitorState:
    return MonitorState(place_like(params, _zeros_for(params)), inner.init(params))

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, MonitorState]:
    old = check_state(state, MonitorState, f"{where}.update(state)")
    check_params(params, f"{where}.update(params)")
    new_updates, new = inner.update(updates, old.inner_state, params, **extra_args)
    scales = scales_in(new)
    by_loss = isinstance(updates, Mapping) and set(updates) == {one.name for one in scales}
    if by_loss and jax.tree.structure(updates) != jax.tree.structure(params):
      updates = functools.reduce(functools.partial(jax.tree.map, jnp.add), updates.values())
    counts = _count(updates, params, new_updates, old.counts)
    for one in scales:
      if one.state is not None:
        counts = pick(one.state.finite, counts, old.counts)
    return new_updates, MonitorState(counts, new)

  return optax.GradientTransformationExtraArgs(init, update)


def _zeros_for(params: Params) -> PyTree:
  """Returns the counts before the first step."""
  if _stands_for_parameters(params):
    return jnp.zeros((4,), jnp.int32)  # Any leaf: it stands for the dict of all counts.
  names = [name for name, x in _by_name(params).items() if is_inexact(x)]
  return {name: jnp.zeros((4,), jnp.int32) for name in names}


def _stands_for_parameters(params: Params) -> bool:
  """Whether `params` is a node that `optax.tree_map_params` puts where the parameters would be."""
  # It has no children, and is no empty container.
  has_children = jax.tree_util.treedef_children(jax.tree.structure(params))
  is_leaf = jax.tree_util.all_leaves([params])
  return not (has_children or is_leaf or isinstance(params, (Mapping, Sequence, NoneType)))


def _by_name(tree: PyTree) -> dict[str, Leaf]:
  """Returns the arrays of a tree by their paths as text, which differ where the paths do."""
  # A key that might be read as several is in quotes.
  text = jax.tree_util.keystr
  part = lambda key: text((key,), simple=not set(text((key,), simple=True)) & set(".["))  # noqa: E731
  leaves = leaves_with_path(differentiated(tree))
  return {".".join(map(part, path)) or "params": raw_value(x) for path, x in leaves}


def _count(
  grads: Grads, params: Params, updates: Updates, counted: Iterable[str]
) -> dict[str, Array]:
  """Returns the counts of a step, for the parameters as they are stored."""

  def count(p: Leaf, g: Leaf, u: Leaf) -> Array:
    p, g, u = map(jnp.asarray, (p, g, u))
    wide = jnp.promote_types(p.dtype, u.dtype)
    new = (p.astype(wide) + u.astype(wide)).astype(p.dtype)
    lost = changes_nothing(p, new, u.astype(wide))
    nonzero = lambda x: is_nonzero(jnp.real(x)) | is_nonzero(jnp.imag(x))  # noqa: E731
    masks = jnp.logical_not(nonzero(g)), nonzero(u), lost
    # One reduction of all masks: each array that they come from is read once.
    numbers, zeros = tuple(mask.astype(jnp.int32) for mask in masks), (np.int32(0),) * len(masks)
    add = lambda a, b: tuple(map(jnp.add, a, b))  # noqa: E731
    sums = jax.lax.reduce(numbers, zeros, add, tuple(range(p.ndim)))
    return jnp.stack([jnp.full((), p.size, jnp.int32), *sums])

  trees = tuple(map(_by_name, (params, grads, updates)))
  # In the order of the old ones: a dict of another order is another tree to `jax.lax.cond`.
  return {name: count(*(tree[name] for tree in trees)) for name in counted}


def monitor_counts(opt_state: OptState) -> dict[str, dict[str, Array]]:
  """Return the counts of `mpjax.monitor` for the last applied step.

  Args:
    opt_state: a state that holds one of `mpjax.monitor`, or several for parts of the tree; an
      `nnx.Optimizer`, or its `nnx.State`.

  Returns:
    A dict for each parameter, by its path ("Dense_0.kernel"), of int32 arrays of shape ():

    - `size`: how many elements it has;
    - `zero_gradients`: how many of its gradients are zero: underflow, where they are float16;
    - `updates`: how many of its updates are not zero;
    - `lost_updates`: how many of these change nothing, since `param + update` rounds to `param`.

  Raises:
    MpjaxTypeError: the state keeps no counts.
    MpjaxValueError: it has several of one parameter.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> list(mpjax.states.monitor_counts(mpjax.monitor(optax.sgd(0.1)).init({"w": jnp.ones(2)}))["w"])
  ['size', 'zero_gradients', 'updates', 'lost_updates']
  """
  where = "mpjax.states.monitor_counts(opt_state)"
  if not (states := states_of(opt_state, MonitorState)):
    expected, got = "a state that keeps counts", f"{kind_of(opt_state)} without a monitor"
    fix = "Write tx = mpjax.monitor(mpjax.loss_scaling(inner)), and make the state with its init."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  each = [item for state in states for item in state.counts.items()]
  if len(dict(each)) < len(each):
    expected = "monitors of separate parts of one tree, as in optax.multi_transform"
    got = f"{len(states)} that count the same parameters"
    fix = "Pass the state of one optimizer alone."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  keys = ("size", "zero_gradients", "updates", "lost_updates")
  return {path: {key: counts[..., i] for i, key in enumerate(keys)} for path, counts in each}
