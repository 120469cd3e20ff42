"""A test of a training step: are its gradients scaled once, and unscaled once?

Run at several scales, a right step gives the same parameters and optimizer state each time, but for
rounding. In a wrong one something goes as a power of the scale: gradients that were never scaled or
unscaled twice as 1/scale (squared moments as 1/scale^2), gradients scaled twice as the scale.

Rounding in float16 does not look like that. It grows as 1/scale too where gradients are subnormal,
but never beyond the gradients themselves. So what is measured is the distance from a run in which
there is no gradient left, or a right step is as before: at a scale that is far too large or far too
small. From there the effect of right gradients is constant, until it is lost.

Two more things are looked at. Where a scale is so small that float16 has lost all that was scaled,
only gradients that were not scaled still grow: that shows them beside others that were. And a step
at the scale inf is skipped, if its gradients were scaled: what it then leaves as it was is what
depends on them. Where that is nothing, there was nothing to see.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_call, message
from mpjax._core.trees import is_inexact
from mpjax._core.types import Array, Function, Leaf, PyTree
from mpjax.transforms._loss_scale import LossScaleState
from mpjax.transforms._state import (
  LossScalingState,
  OwnedScale,
  plain_array,
  refuse_outside,
  replace_scale,
  scales_in,
)
from mpjax.transforms._trees import float32_view, key_text, nodes_of

P = ParamSpec("P")

_WHERE = "mpjax.check_loss_scaling(step)"
_FAR, _LOW, _GROWN = 2.0**100, 2.0**-60, 2.0**10
"""What float16 holds at a scale, it has lost at _LOW of it; squares fit into float32 there."""
_START, _FACTOR, _STEPS = 2.0**15, 4.0, 9
_WINDOW = 3
"""So many ratios in a row that are the same power of the factor are no accident."""
_UNTOUCHED = "an opt_state whose loss scale was returned as it was"
_SAME = "the same parameters and optimizer state from a step that was applied and one skipped"
_SAME_NEVER_SCALED = (
  "the same parameters and optimizer state at each scale, and no skipped step at the scale inf: "
  "the gradients were never scaled, or all are zero"
)


class _Leaf(NamedTuple):
  path: str
  value: Leaf
  in_optimizer: bool


class _Run(NamedTuple):
  finite: bool
  skipped: int
  untouched: bool
  """Whether the loss scale came back as it was given: no update saw it."""
  leaves: list[_Leaf]


@check_call(_WHERE, fix="Call what it returns: mpjax.check_loss_scaling(step)(*args).")
def check_loss_scaling(step: Callable[P, PyTree]) -> Callable[P, None]:
  """Returns a function that raises if `step` forgets to scale gradients, or unscales them twice.

  Nothing can see that by looking at the gradients, and a learning rate that is 2^15 times too small
  is no error. This calls `step` about sixteen times for each loss scale, with copies of the
  arguments and the loss scale in them changed, and compares what is returned. Call it once, on the
  host, before training or in a test; it adds nothing to the step.

  Where nothing that is returned depends on the gradients there is nothing to compare, and a warning
  says so: the learning rate is zero (a warmup from zero, before a first step), or all gradients
  are. Call it then after a step or two. Under `NoLossScale` there is nothing to see.

  Args:
    step: any function that takes a state of `mpjax.loss_scaling`, anywhere among its arguments, and
      returns the new one, anywhere, or writes it to an `nnx.Optimizer` among its arguments: the
      step of a loop, jitted or not, donating or not.

  Returns:
    A function of the arguments of `step` that returns None. The arguments are not changed, nor
    donated. The gradients of the batch must be finite at some scale.

  Raises:
    MpjaxTypeError: when called: no argument holds a loss scale, or one inside of what would see
      scaled gradients (`optax.MultiSteps`), or what is returned holds none.
    MpjaxValueError: when called: the step depends on the scale, or is finite at no scale.

  >>> import jax, jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> def loss_fn(params):
  ...   return jnp.sum(params**2)
  >>> def right(params, opt_state):
  ...   loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params)
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   return optax.apply_updates(params, updates), opt_state
  >>> def forgetful(params, opt_state):
  ...   updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
  ...   return optax.apply_updates(params, updates), opt_state
  >>> params = jnp.ones(2)
  >>> mpjax.check_loss_scaling(right)(params, tx.init(params))
  >>> try:
  ...   mpjax.check_loss_scaling(forgetful)(params, tx.init(params))
  ... except mpjax.errors.MpjaxValueError as error:
  ...   print(str(error).partition("got ")[2].partition(":")[0])
  gradients that were never scaled
  """

  def check(*args: P.args, **kwargs: P.kwargs) -> None:
    found = scales_in((args, kwargs))
    if not found:
      raise _no_scale("none in the arguments", "Wrap the optimizer, tx = mpjax.loss_scaling(tx).")
    refuse_outside((args, kwargs), _WHERE)
    scaled = [(one, one.state) for one in found if one.state is not None]
    unseen = [_check_one(step, args, kwargs, one, state) for one, state in scaled]
    # Of several optimizers a step may update one alone.
    none_used = all(got == _UNTOUCHED for got in unseen)
    for (one, _), got in zip(scaled, unseen, strict=True):
      if got is not None and (none_used or got != _UNTOUCHED):
        _warn_inconclusive(one, got)

  return check


def _check_one(
  step: Function,
  args: tuple[PyTree, ...],
  kwargs: dict[str, PyTree],
  found: OwnedScale,
  state: LossScaleState,
) -> str | None:
  """Checks the step's use of one of the loss scales in its arguments.

  Returns:
    None, or what came where nothing depends on the gradients.
  """
  others = [one.state for one in scales_in((args, kwargs)) if one.owner is not found.owner]

  def run(scale: float) -> _Run:
    moved = state._replace(scale=jnp.full_like(state.scale, scale))
    copies = jax.tree.map(_copy, replace_scale((args, kwargs), found, moved))
    with jax.debug_nans(False), jax.debug_infs(False):
      out = step(*copies[0], **copies[1])
    # A step of NNX writes to its arguments, which are copies here.
    counts = [one.state.total for one in scales_in(copies) if one.state is not None]
    written = any(not np.array_equal(count, state.total) for count in counts)
    return _outcome(copies if written and not scales_in(out) else out, found, moved, others)

  start = max(_START, float(np.max(state.scale)))
  first = run(start)
  while not first.finite:
    start /= _FACTOR
    if start < 1 / _START:
      raise MpjaxValueError(
        _WHERE,
        expected="a step whose gradients are finite at some loss scale",
        got=f"an inf or NaN at every scale down to {start:.9g}",
        fix="Call it with another batch; mpjax.check_skipped_steps says which gradient it is.",
      )
    first = run(start)
  runs = [first, *(run(start / _FACTOR**k) for k in range(1, _STEPS))]
  low = [run(start * _LOW / _FACTOR**k) for k in range(_WINDOW + 1)]
  far = [one for one in (run(_FAR), low[-1]) if one.finite]
  at_inf = run(float("inf"))
  # A gradient that was multiplied by inf is not finite, wherever it is divided again. What is
  # finite all the same, after a skipped step, was tried again at another scale.
  tried_again = at_inf.finite and at_inf.skipped != low[-1].skipped
  finite = at_inf.finite and not tried_again
  never = finite and not at_inf.untouched
  wrong, reports = list[tuple[bool, str]](), set[str]()
  for position, leaf in enumerate(first.leaves):
    for power, pure in _powers(position, runs, low, far):
      if _is_report(leaf, power, pure=pure, inverse=1 / start if never else None):
        reports.add(leaf.path)
      else:
        wrong.append((power > 0, leaf.path))
  if never and not wrong:
    # Under an optimizer that normalises all gradients are alike, but not those that are zero.
    wrong = [(False, x.path) for x, _ in _moved(low[-1], at_inf) if not _is_scalar(x)]
  if wrong:
    # Beside those that fall with the scale others may rise: an epsilon makes them.
    rises, path = min(wrong, key=lambda one: one[0])
    raise _wrong_step(found, path, _what_happened(rises and not never, finite))
  if at_inf.untouched:
    return _UNTOUCHED
  if never:
    return _SAME_NEVER_SCALED
  # Numbers that are logged may tell of the skipped step. A parameter is still what it was.
  given = [x for x in jax.tree.leaves((args, kwargs)) if is_inexact(x) and not jnp.ndim(x)]
  depends = tried_again or any(
    not _is_scalar(x) or any(np.array_equal(y.value, z) for z in given)
    for x, y in _moved(first, at_inf)
    if x.path not in reports
  )
  return None if depends else _SAME


def _copy(x: Leaf) -> Leaf:
  return jnp.copy(x) if isinstance(x, jax.Array) else x


def _outcome(
  out: PyTree, found: OwnedScale, given: LossScaleState, others: list[LossScaleState | None]
) -> _Run:
  scales = [one.state for one in scales_in(out) if one.label == found.label]
  own = [state for state in scales if state is not None]
  if not own:
    raise _no_scale(*_none_returned(out, found))
  # Another optimizer that was not updated may have been skipped before.
  active = [
    s for s in own if not any(one is not None and _same(s, one) for one in (given, *others))
  ]
  finite = all(bool(np.all(state.finite)) for state in active or own)
  skipped = sum(int(np.sum(state.skipped)) for state in own)
  untouched = any(_same(state, given) for state in own)
  leaves = []
  pairs = jax.tree_util.tree_leaves_with_path(out, is_leaf=_is_state)
  for path, node in pairs:
    inside = _is_state(node)
    for rest, x in jax.tree_util.tree_leaves_with_path(node.inner_state if inside else node):
      if is_inexact(x):
        leaves.append(_Leaf(key_text((*path, *rest)), x, inside))
  return _Run(finite, skipped, untouched, leaves)


def _same(a: LossScaleState, b: LossScaleState) -> bool:
  return all(map(np.array_equal, a, b))


def _is_state(x: object) -> bool:
  return isinstance(x, LossScalingState)


@jax.jit
def _distance(a: Leaf, b: Leaf) -> Array:
  """The largest difference of two elements: a norm would overflow, and add up what is rounded."""
  a, b = float32_view([jnp.asarray(a), jnp.asarray(b)])
  return jnp.max(jnp.abs(a - b), initial=0.0)


def _power(distances: list[float]) -> int | None:
  """Returns the power of the scale that the distances follow for a while, or None."""
  with np.errstate(divide="ignore", invalid="ignore"):
    ratios = np.asarray(distances[1:]) / np.asarray(distances[:-1])
  for power in (-1, -2, 1):
    follows = np.abs(ratios * _FACTOR**power - 1) < 0.1
    if any(follows[k : k + _WINDOW].all() for k in range(len(follows) - _WINDOW + 1)):
      return power
  return None


def _powers(
  position: int, runs: list[_Run], low: list[_Run], far: list[_Run]
) -> Iterator[tuple[int, bool]]:
  """Yields the powers of the scale that a leaf follows, and whether it is nothing else."""
  values = [one.leaves[position].value for one in runs]
  for end in far:
    zero = end.leaves[position].value
    distances = [float(_distance(x, zero)) for x in values]
    # A run at the far end that is as the first has its gradients, and what differs is rounding.
    power = _power(distances) if distances[0] else None
    if power:
      yield power, float(_distance(zero, jnp.zeros_like(zero))) < 1e-3 * max(distances)
  # Here float16 has lost what was scaled, and other dtypes have it as it was: whatever rounding
  # did, nothing in a right step is beyond what it was at first.
  first = values[0]
  grown = [float(_distance(one.leaves[position].value, first)) for one in low if one.finite]
  if len(grown) == len(low) and grown[0] > _GROWN * float(_distance(first, jnp.zeros_like(first))):
    power = _power(grown)
    if power and power < 0:
      yield power, True


def _moved(some: _Run, others: _Run) -> list[tuple[_Leaf, _Leaf]]:
  """Returns the leaves that differ, and are finite, between two runs."""
  pairs = zip(some.leaves, others.leaves, strict=True)
  return [(x, y) for x, y in pairs if 0 < float(_distance(x.value, y.value)) < float("inf")]


def _is_scalar(leaf: _Leaf) -> bool:
  """Whether a leaf may be a number to be logged."""
  return jnp.ndim(leaf.value) == 0 and not leaf.in_optimizer


def _is_report(leaf: _Leaf, power: int, *, pure: bool, inverse: float | None) -> bool:
  """Whether a leaf is a number to be logged: the scale itself, its inverse, or scaled gradients.

  Those are a power of the scale and nothing else, while parameters are added to. But one that
  starts at zero is that as well, if it is a scalar and its gradients were never scaled. Where that
  is so, `inverse` is the inverse of the scale, the one number that is still likely to be logged.
  """
  if power > 0:
    return pure and (jnp.ndim(leaf.value) == 0 or not leaf.in_optimizer)
  return pure and _is_scalar(leaf) and (inverse is None or np.isclose(leaf.value, inverse, atol=0))


def _what_happened(rises: bool, finite_at_inf: bool) -> str:
  if rises:
    return "gradients that still carry the loss scale, or carry it twice"
  if finite_at_inf:
    return "gradients that were never scaled"
  return (
    "gradients that were unscaled twice, or clipped (or normalised) while they were scaled, or "
    "some that were never scaled among others"
  )


def _wrong_step(found: OwnedScale, path: str, what: str) -> MpjaxValueError:
  grad_fn, update = _calls(found)
  return MpjaxValueError(
    _WHERE,
    expected=f"a step that is the same at every loss scale{_of_loss(found)}",
    got=f"{what}: what is returned at {path} changes with the scale",
    fix=f"Give what {grad_fn} returned to {update} as it is, with penalties inside of loss_fn, "
    "and clip inside: tx = mpjax.loss_scaling(optax.chain(clip, optimizer)). What mpjax.unscale "
    "returns is to look at.",
  )


def _warn_inconclusive(found: OwnedScale, got: str) -> None:
  fix = "Return the new opt_state, and call it for a step that updates."
  if got != _UNTOUCHED:
    fix = (
      "Call it after a step that was applied, with a learning rate that is not zero. If that warns "
      "too, all gradients are zero (does the loss use its argument?), or the updates are lost in "
      "parameters of low precision."
    )
  if got == _SAME_NEVER_SCALED:
    fix = f"Let {_calls(found)[0]} make the gradients. {fix}"
  expected = f"a step whose gradients{_of_loss(found)} change what it returns"
  text = message(_WHERE, expected=expected, got=f"{got}, so that nothing could be checked", fix=fix)
  warnings.warn(text, UserWarning, stacklevel=3)


def _of_loss(found: OwnedScale) -> str:
  return "" if found.name is None else f" of the loss {found.name!r}"


def _calls(found: OwnedScale) -> tuple[str, str]:
  """Returns what makes the gradients of this loss scale, and what takes them."""
  if _in_variables(found):
    return "mpjax.nnx.value_and_grad(loss_fn, optimizer)", "optimizer.update"
  return "mpjax.value_and_grad(loss_fn, opt_state)", "tx.update"


def _in_variables(found: OwnedScale) -> bool:
  """Whether a loss scale is in an `nnx.Optimizer`, which keeps its state in variables."""
  scale = getattr(found.owner.loss_scale[found.label], "scale", None)
  return plain_array(scale) is not scale


def _no_scale(got: str, fix: str) -> MpjaxTypeError:
  return MpjaxTypeError(
    _WHERE, expected="the state of an optimizer created by mpjax.loss_scaling", got=got, fix=fix
  )


def _none_returned(out: PyTree, found: OwnedScale) -> tuple[str, str]:
  """Returns what came instead of the state with this loss scale, and what to do."""
  if _in_variables(found):
    return "none in what step returned", "Call optimizer.update(model, grads) in step."
  if nodes_of(out, LossScaleState):
    # The update of a chain takes any tuple apart that has as many parts.
    return (
      "one that the update of another optimizer has taken apart in what step returned",
      "Update with the tx that mpjax.loss_scaling returned, not with the optimizer inside of it.",
    )
  return (
    "none in what step returned",
    "Return the new opt_state as well, that of the tx which mpjax.loss_scaling returned.",
  )
