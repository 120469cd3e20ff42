"""A test of a training step: is it the same at every loss scale, and nothing at an overflow?

To scale by a power of two moves exponents and rounds nothing, so that a right step returns the very
same at each scale: unless float16 loses what is small. So the step is traced and run in float32.
What was never scaled, was unscaled or scaled twice, or carries the scale squared then shows, beside
gradients that are right and behind a clip: far below 1 the mistake is all that is left, and far
above it is gone, or the other way round.
"""

import collections
import contextlib
import warnings
from collections.abc import Callable, Generator
from typing import NamedTuple, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_call, message
from mpjax._core.paths import is_key
from mpjax._core.trees import half_to_float32, is_half, is_inexact
from mpjax._core.types import Array, Function, Leaf, PyTree
from mpjax._jaxprs.walk import walk
from mpjax.transforms._in_float32 import in_float32
from mpjax.transforms._loss_scale import LossScaleState
from mpjax.transforms._state import OwnedScale, plain_array, refuse_outside, scales_in
from mpjax.transforms._trees import is_nnx_variable, nodes_of

P = ParamSpec("P")
Path: TypeAlias = tuple[str, ...]

_WHERE = "mpjax.check_loss_scaling(step)"
_HIGH, _FACTOR, _LOW = 2.0**14, 4.0, 2.0**-30
_TOLERANCE = 2.0**-8
"""Of how far a leaf moves; a right step is at 0, but for what is smaller than float32 holds."""
_MARK = 2**30
"""The count of steps that tells the scale under test from others in what the step returns."""
_FIELD = ".loss_scale"
_STATE = "the state of an optimizer created by mpjax.loss_scaling"
_UNTOUCHED = "an opt_state whose loss scale was returned as it was"
_SAME = "the same parameters and optimizer state from a step that was applied and one skipped"
_NEVER = (
  "the same parameters and optimizer state at each scale, and no skipped step at the scale inf: "
  "the gradients were never scaled, or all are zero"
)


class _Run(NamedTuple):
  states: list[LossScaleState]  # those with the label of the scale under test, wherever they are
  after: dict[Path, Leaf]  # what the step returned, and the variables that it was given

  @property
  def updated(self) -> list[LossScaleState]:
    return [one for one in self.states if np.max(one.total) > _MARK]

  @property
  def finite(self) -> bool:
    return all(bool(np.all(one.finite)) for one in self.updated)


@check_call(_WHERE, fix="Call what it returns: mpjax.check_loss_scaling(step)(*args).")
def check_loss_scaling(step: Callable[P, PyTree]) -> Callable[P, None]:
  """Returns a function that raises unless `step` is right: at every scale the same, or no step.

  Nothing can see that by looking at the gradients, and a learning rate that is 2^15 times too small
  is no error. This traces `step`, runs it in float32 at several loss scales, where a right step
  returns the same, and at the scale inf, where nothing may change: parameters, moments, batch
  statistics, counts of random numbers. Call it once, on the host, before training or in a test; it
  adds nothing to the step.

  What is compared are new versions of what the step was given: what is only logged may depend on
  the scale. A count beside the optimizer's state, such as `nnx.Optimizer.step`, may count skipped
  steps. A step that cannot be traced runs as it is.

  Where nothing that is returned depends on the gradients there is nothing to compare, and a warning
  says so: the learning rate is zero (a warmup from zero, before a first step), or all gradients
  are. Call it then after a step or two.

  Args:
    step: any function that takes a state of `mpjax.loss_scaling`, anywhere among its arguments, and
      returns the new one, anywhere, or writes it to an `nnx.Optimizer` among its arguments: the
      step of a loop, jitted or not, donating or not.

  Returns:
    A function of the arguments of `step` that returns None. The arguments are not changed, nor
    donated. The gradients of the batch must be finite at some scale.

  Raises:
    MpjaxTypeError: when called: an argument is traced, none holds a loss scale, or one inside of
      what would see scaled gradients (`optax.MultiSteps`), or what is returned holds none.
    MpjaxValueError: when called: the step depends on the scale, is finite at no scale, or changes
      something when it is skipped; or float16 gradients meet `NoLossScale`.

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
    call = (args, kwargs)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(call)):
      fix = "Call it on the host, before training: not inside of jit, grad or vmap."
      raise MpjaxTypeError(_WHERE, expected="concrete arguments", got="traced ones", fix=fix)
    scales = scales_in(call)
    if not scales:
      fix = "Wrap the optimizer, tx = mpjax.loss_scaling(tx)."
      raise MpjaxTypeError(_WHERE, expected=_STATE, got="none in the arguments", fix=fix)
    refuse_outside(call, _WHERE)
    unseen = [_check_one(step, call, one) for one in scales]
    # Of several optimizers a step may update one alone.
    none_used = all(got == _UNTOUCHED for got in unseen)
    for one, got in zip(scales, unseen, strict=True):
      if got is not None and (none_used or got != _UNTOUCHED):
        _warn_inconclusive(one, got)

  return check


def _check_one(step: Function, call: PyTree, scale: OwnedScale) -> str | None:
  """Checks the use of one loss scale; returns what came where nothing depends on the gradients."""
  run, program = _runner(step, call, scale)
  if scale.state is None:
    _refuse_float16(program)
    return None
  high, first = _HIGH, run(_HIGH)
  if not first.updated:
    return _UNTOUCHED
  while not first.finite:
    high /= _FACTOR
    if high < 1 / _HIGH:
      raise MpjaxValueError(
        _WHERE,
        expected="a step whose gradients are finite at some loss scale",
        got=f"an inf or NaN at every scale down to {high:.9g}",
        fix="Call it with another batch; mpjax.check_skipped_steps says which gradient it is.",
      )
    first = run(high)
  runs = [first, run(high / _FACTOR), *([] if program is None else [run(high * _LOW)])]
  overflows = [run(number, every=True) for number in (float("inf"), float("nan"))]
  never = overflows[1].finite  # A step may try again at a lower scale than inf: a NaN stays one.
  overflows = [run(float("inf"))] if never else [one for one in overflows if not one.finite]
  runs = [one for one in (*runs, *overflows * never) if one.finite]
  tolerance, depends, wrong = (0.25 if program is None else _TOLERANCE), False, []
  before = collections.defaultdict[object, dict[Path, Leaf]](dict)
  for path, x in _leaves(call).items():
    before[_type(x)][path] = x
  state = next(path[: path.index(_FIELD)] for path in _leaves(call, scales=True) if _FIELD in path)
  for path, new in first.after.items():
    values, last = [one.after[path] for one in runs], overflows[-1].after[path]
    named, old = _old_versions(path, before[_type(new)])
    unchanged = [x for x in old.values() if not any(_distance(x, o.after[path]) for o in overflows)]
    for x in old.values() if never and named else unchanged:
      moved = [_distance(x, value) for value in values]
      if max(_distance(new, value) for value in values) > tolerance * max(moved):
        wrong.append((moved[0] > moved[len(values) - 1 - never], path))
    # What counts calls beside the optimizer's state, as nnx.Optimizer does, may count this one.
    counts = not is_inexact(last) and any(x[:-1] == state[:-1] for x in old)
    if named and not (never or unchanged or counts or wrong or _is_log(last)):
      raise _not_skipped(scale, "".join(path))
    depends |= bool(old) and is_inexact(last) and _distance(new, last) > 0
  if wrong:  # Beside those that fall with the scale others may rise: a clip makes them.
    rises, path = min(wrong)
    raise _wrong_step(scale, path, rises=rises, never=never)
  if depends:
    return None
  return _NEVER if never else _SAME


def _runner(
  step: Function, call: PyTree, scale: OwnedScale
) -> tuple[Callable[..., _Run], ClosedJaxpr | None]:
  """Returns a function that runs the step at a scale, and the jaxpr of the step if it has one."""
  flat, treedef = jax.tree.flatten(call, is_leaf=is_nnx_variable)
  places = [i for i, x in enumerate(flat) if is_nnx_variable(x) or hasattr(x, "dtype")]
  inputs = [jnp.asarray(plain_array(flat[i])) for i in places]

  def outcome(inputs: list[Array]) -> _Run:
    new, shared = list(flat), dict[int, Leaf]()
    for i, value in zip(places, inputs, strict=True):
      new[i] = value
      if is_nnx_variable(flat[i]):  # One that is tied stays so.
        variable = jax.tree.unflatten(jax.tree.structure(flat[i]), [value])
        new[i] = shared.setdefault(id(flat[i]), variable)
    args, kwargs = treedef.unflatten(new)
    out = step(*args, **kwargs)
    if not shared and scale.label not in {one.label for one in scales_in(out)}:
      raise _none_returned(out)
    states = [one.state for one in scales_in((out, args, kwargs)) if one.label == scale.label]
    written = _leaves((args, kwargs), variables=True)
    return _Run([one for one in states if one is not None], _leaves(out) | written)

  wide = program = None
  with _quiet(), contextlib.suppress(Exception):  # What is wrong with the step it raises below.
    traced, shapes = jax.make_jaxpr(outcome, return_shape=True)(inputs)
    run_wide, structure = jax.jit(in_float32(traced)), jax.tree.structure(shapes)
    jax.eval_shape(run_wide, *inputs)
    program, wide = traced, lambda inputs: structure.unflatten(run_wide(*inputs))

  def run(number: float, *, every: bool = False) -> _Run:
    moving = [one for one in scales_in(call) if one.stored] if every else [scale]
    marked = {id(one.stored.scale): number for one in moving} | {id(scale.stored.total): _MARK}
    with _quiet():
      values = [
        jnp.full_like(x, marked[id(flat[i])]) if id(flat[i]) in marked else jnp.copy(x)
        for i, x in zip(places, inputs, strict=True)
      ]
      return (outcome if wide is None else wide)(values)

  return run, program


@contextlib.contextmanager
def _quiet() -> Generator[None]:
  with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
    yield


def _leaves(tree: PyTree, *, variables: bool = False, scales: bool = False) -> dict[Path, Leaf]:
  """Returns the arrays in a tree by their paths, or only variables; perhaps those of scales too."""
  pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_nnx_variable)
  arrays = [one for one in pairs if is_nnx_variable(one[1]) or hasattr(one[1], "dtype")]
  named = {
    tuple(jax.tree_util.keystr((key,)) for key in path): plain_array(x)
    for path, x in arrays
    if is_nnx_variable(x) or not variables
  }
  return named if scales else {path: x for path, x in named.items() if _FIELD not in path}


def _old_versions(path: Path, before: dict[Path, Leaf]) -> tuple[bool, dict[Path, Leaf]]:
  """Returns the arguments that a leaf may be the new version of, and whether their names say so.

  Of those of its type, the ones whose paths end as its own does, as far as any does.
  """
  shared = {}
  for other in before:
    same = [a == b for a, b in zip(reversed(path), reversed(other), strict=False)]
    length = [*same, False].index(False)
    # Positions alone say nothing: a batch may be where the loss is returned.
    has_name = any(not key[1:-1].isdigit() for key in path[len(path) - length :])
    shared[other] = length if has_name else 0
  best = max(shared.values(), default=0)
  return best > 0, {other: before[other] for other, length in shared.items() if length == best}


def _type(x: Leaf) -> tuple[object, ...]:
  return jnp.shape(x), "float32" if is_half(x) else str(x.dtype)


def _is_log(last: Leaf) -> bool:
  """Whether a leaf is of gradients or updates: not finite, or zero, where a step is skipped."""
  x = _numbers(last)
  return not np.any(x) or not np.all(np.isfinite(x))


def _numbers(x: Leaf) -> np.ndarray:
  return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else half_to_float32(x))


def _distance(a: Leaf, b: Leaf) -> float:
  """Returns the sum of the differences; numbers that are the same, NaN too, have none."""
  a, b = _numbers(a), _numbers(b)
  with np.errstate(all="ignore"):
    apart = np.where((a == b) | ((a != a) & (b != b)), 0, np.abs(a - b) if is_inexact(a) else 1)
  return float(np.sum(np.nan_to_num(apart, nan=np.inf), dtype=np.float64))


def _refuse_float16(program: ClosedJaxpr | None) -> None:
  """Raises if a step computes in float16 where nothing scales its gradients."""
  eqns = [visit.eqn for visit in walk(program)] if program is not None else []
  results = [v.aval for x in eqns if x.primitive is not convert_element_type_p for v in x.outvars]
  if any(getattr(aval, "dtype", None) == jnp.float16 for aval in results):
    raise MpjaxValueError(
      _WHERE,
      expected="a loss scale, since the step computes in float16, whose gradients underflow",
      got="NoLossScale()",
      fix="Use mpjax.loss_scaling(tx, mpjax.DynamicLossScale()), or bfloat16.",
    )


def _wrong_step(scale: OwnedScale, path: Path, *, rises: bool, never: bool) -> MpjaxValueError:
  grad_fn, update = _calls(scale)
  what = (
    "gradients that were unscaled twice, or clipped (or normalised) while they were scaled, or "
    "some that were never scaled among others"
  )
  if never or rises:
    carry = "gradients that still carry the loss scale, or carry it twice"
    what = "gradients that were never scaled" if never else carry
  return MpjaxValueError(
    _WHERE,
    expected=f"a step that is the same at every loss scale{_of_loss(scale)}",
    got=f"{what}: what is returned at {''.join(path)} changes with the scale",
    fix=f"Pass the gradients of {grad_fn} to {update} unchanged, with penalties inside of loss_fn, "
    "and clip inside: tx = mpjax.loss_scaling(optax.chain(clip, optimizer)). mpjax.unscale is for "
    "logging alone. A loss that needs gradients itself takes those of jax.grad.",
  )


def _not_skipped(scale: OwnedScale, path: str) -> MpjaxValueError:
  return MpjaxValueError(
    _WHERE,
    expected="a step that changes nothing when it is skipped",
    got=f"another {path}",
    fix="Wrap the step: @mpjax.nnx.atomic_step takes back all that it has written."
    if scale.in_variables
    else "Take it back by mpjax.select_tree(mpjax.last_step_finite(opt_state), new, old), or use "
    "mpjax.make_train_step.",
  )


def _warn_inconclusive(scale: OwnedScale, got: str) -> None:
  fix = "Return the new opt_state, and call it for a step that updates."
  if got == _UNTOUCHED and scale.in_variables:
    fix = "Call optimizer.update(model, grads) in step."
  elif got != _UNTOUCHED:
    fix = (
      "Call it after a step that was applied, with a learning rate that is not zero. If that warns "
      "too, all gradients are zero (does the loss use its argument?), or the updates are lost in "
      "parameters of low precision."
    )
  if got == _NEVER:
    fix = f"Let {_calls(scale)[0]} make the gradients. {fix}"
  expected = f"a step whose gradients{_of_loss(scale)} change what it returns"
  text = message(_WHERE, expected=expected, got=f"{got}, so that nothing could be checked", fix=fix)
  warnings.warn(text, UserWarning, stacklevel=3)


def _of_loss(scale: OwnedScale) -> str:
  return "" if scale.name is None else f" of the loss {scale.name!r}"


def _calls(scale: OwnedScale) -> tuple[str, str]:
  """Returns what makes the gradients of this loss scale, and what takes them."""
  if scale.in_variables:
    return "mpjax.value_and_grad(loss_fn, optimizer)", "optimizer.update"
  name = "" if scale.name is None else f", name={scale.name!r}"
  return f"mpjax.value_and_grad(loss_fn, opt_state{name})", "tx.update"


def _none_returned(out: PyTree) -> MpjaxTypeError:
  got, fix = "none in what step returned", "Return the new opt_state as well."
  if nodes_of(out, LossScaleState):  # The update of a chain takes any tuple of its length apart.
    got = "one that the update of another optimizer has taken apart in what step returned"
    fix = (
      "Update with the tx that mpjax.loss_scaling returned, not with the optimizer inside of it."
    )
  return MpjaxTypeError(_WHERE, expected=_STATE, got=got, fix=fix)
