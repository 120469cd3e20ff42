"""A test of a training step: are its gradients scaled once, and unscaled once?

Run at several scales, a right step gives the same parameters and optimizer state each time, but for
rounding. In a wrong one something goes as a power of the scale: gradients that were never scaled or
unscaled twice as 1/scale (squared moments as 1/scale^2), gradients scaled twice as the scale.

Rounding in float16 does not look like that. It grows as 1/scale too where gradients are subnormal,
but never beyond the gradients themselves. So what is measured is the distance from a run in which
there is no gradient left, or a right step is as before: at a scale that is far too large or far too
small. From there the effect of right gradients is constant, until it is lost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._errors import MpjaxTypeError, MpjaxValueError, message
from mpjax._loss_scale import LossScaleState
from mpjax._tree import is_inexact
from mpjax._types import Array, PyTree
from mpjax.transforms._loss_scale_access import Found, LossScalingState, replace_scale, scales_in
from mpjax.transforms._wrapper_trees import float32_view

_FAR = 2.0**100
_START, _FACTOR, _STEPS = 2.0**15, 4.0, 9
_WINDOW = 3
"""So many ratios in a row that are the same power of the factor are no accident."""


class _Leaf(NamedTuple):
  path: str
  value: Any
  in_optimizer: bool


class _Run(NamedTuple):
  finite: bool
  leaves: list[_Leaf]


def check_loss_scaling(step: Callable[..., Any]) -> Callable[..., None]:
  """Returns a function that raises if `step` forgets to scale gradients, or unscales them twice.

  Nothing can see that by looking at the gradients, and a learning rate that is 2^15 times too small
  is no error. This calls `step` about a dozen times for each loss scale, with copies of the
  arguments and the loss scale in them changed, and compares what comes out. Call it once, on the
  host, before training or in a test; it adds nothing to the step.

  What it cannot see is an effect that rounding hides at each scale, as in half parameters without
  a master copy. Under `NoLossScale` there is nothing to see.

  Args:
    step: any function that takes a state of `mpjax.loss_scaling`, anywhere among its arguments, and
      returns the new one, anywhere, or writes it to an `nnx.Optimizer` among its arguments: the
      step of a loop, jitted or not, donating or not.

  Returns:
    A function of the arguments of `step` that returns None. The arguments are not changed, nor
    donated. The gradients of the batch must be finite at some scale.

  Raises:
    MpjaxTypeError: when called: no argument holds a loss scale, or what is returned holds none.
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
  ... except mpjax.MpjaxValueError as error:
  ...   print(str(error).partition("got ")[2].partition(":")[0])
  gradients that were never scaled
  """

  def check(*args: Any, **kwargs: Any) -> None:
    found = scales_in((args, kwargs))
    if not found:
      raise _no_scale("the arguments", "Wrap the optimizer, tx = mpjax.loss_scaling(tx).")
    for one in found:
      if one.state is not None:
        _check_one(step, args, kwargs, one, one.state)

  return check


def _check_one(
  step: Callable[..., Any], args: Any, kwargs: Any, found: Found, state: LossScaleState
) -> None:
  """Checks the step's use of one of the loss scales in its arguments."""

  def run(scale: float) -> _Run:
    moved = state._replace(scale=jnp.full_like(state.scale, scale))
    copies = jax.tree.map(_copy, replace_scale((args, kwargs), found, moved))
    out = step(*copies[0], **copies[1])
    # A step of NNX writes to its arguments, which are copies here.
    counts = [one.state.total for one in scales_in(copies) if one.state is not None]
    written = any(not np.array_equal(count, state.total) for count in counts)
    return _outcome(copies if written and not scales_in(out) else out, found.label)

  start = max(_START, float(np.max(state.scale)))
  first = run(start)
  while not first.finite:
    start /= _FACTOR
    if start < 1 / _START:
      raise MpjaxValueError(
        message(
          "mpjax.check_loss_scaling(step)",
          expected="a step whose gradients are finite at some loss scale",
          got=f"an inf or NaN at every scale down to {start:.9g}",
          fix="Call it with another batch; mpjax.check_progress says which gradient it is.",
        )
      )
    first = run(start)
  far = [one for one in (run(_FAR), run(1 / _FAR)) if one.finite]
  runs = [first, *(run(start / _FACTOR**k) for k in range(1, _STEPS))]
  powers = []
  for position, leaf in enumerate(first.leaves):
    values = [one.leaves[position].value for one in runs]
    for end in far:
      zero = end.leaves[position].value
      distances = [float(_distance(x, zero)) for x in values]
      # A run at the far end that is as the first has its gradients, and what differs is rounding.
      power = _power(distances) if distances[0] else None
      pure = float(_distance(zero, jnp.zeros_like(zero))) < 1e-3 * max(distances)
      if power and not _is_report(leaf, power, pure=pure):
        powers.append((power > 0, leaf.path))
  if powers:
    # Beside those that fall with the scale others may rise: an epsilon makes them.
    rises, path = min(powers, key=lambda one: one[0])
    raise _wrong_step(found, path, _what_happened(rises, run))


def _copy(x: Any) -> Any:
  return jnp.copy(x) if isinstance(x, jax.Array) else x


def _outcome(out: PyTree, label: str) -> _Run:
  own = [one.state for one in scales_in(out) if one.label == label]
  if not own:
    raise _no_scale("what step returned", "Return the new opt_state as well.")
  finite = all(bool(np.all(state.finite)) for state in own if state is not None)
  leaves = []
  pairs = jax.tree_util.tree_leaves_with_path(out, is_leaf=_is_state)
  for path, node in pairs:
    inside = _is_state(node)
    for rest, x in jax.tree_util.tree_leaves_with_path(node.inner_state if inside else node):
      if is_inexact(x):
        name = jax.tree_util.keystr((*path, *rest)) or "the root"
        leaves.append(_Leaf(name, x, inside))
  return _Run(finite, leaves)


def _is_state(x: Any) -> bool:
  return isinstance(x, LossScalingState)


@jax.jit
def _distance(a: Any, b: Any) -> Array:
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


def _is_report(leaf: _Leaf, power: int, *, pure: bool) -> bool:
  """Whether a leaf is a number to be logged: the scale itself, its inverse, or scaled gradients.

  Those are a power of the scale and nothing else, while parameters are added to.
  """
  scalar = jnp.ndim(leaf.value) == 0
  if power > 0:
    return pure and (scalar or not leaf.in_optimizer)
  return pure and scalar and not leaf.in_optimizer


def _what_happened(rises: bool, run: Callable[[float], _Run]) -> str:
  if rises:
    return "gradients that still carry the loss scale, or carry it twice"
  # A gradient that was multiplied by inf is not finite, wherever it is divided again.
  if run(float("inf")).finite:
    return "gradients that were never scaled"
  return "gradients that were unscaled twice, or clipped (or normalised) while they were scaled"


def _wrong_step(found: Found, path: str, what: str) -> MpjaxValueError:
  name = "" if found.name is None else f" of the loss {found.name!r}"
  return MpjaxValueError(
    message(
      "mpjax.check_loss_scaling(step)",
      expected=f"a step that is the same at every loss scale{name}",
      got=f"{what}: what is returned at {path} goes as a power of the scale",
      fix="Give what mpjax.value_and_grad(loss_fn, opt_state) returned to tx.update as it is, and "
      "clip inside: tx = mpjax.loss_scaling(optax.chain(clip, optimizer)). What mpjax.unscale "
      "returns is to look at.",
    )
  )


def _no_scale(where: str, fix: str) -> MpjaxTypeError:
  return MpjaxTypeError(
    message(
      "mpjax.check_loss_scaling(step)",
      expected="the state of an optimizer made by mpjax.loss_scaling",
      got=f"none in {where}",
      fix=fix,
    )
  )
