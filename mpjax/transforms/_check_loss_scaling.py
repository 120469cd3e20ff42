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
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.errors import (
  REFUSALS,
  MpjaxTypeError,
  MpjaxValueError,
  check_call,
  check_callable,
  flax_errors,
  message,
)
from mpjax._core.leaves import is_key, is_nnx_variable
from mpjax._core.trees import is_inexact
from mpjax._core.types import Function, KeyPath, Leaf, PyTree
from mpjax._jaxprs.in_float32 import in_float32, is_low, to_float32
from mpjax._jaxprs.reader import walk
from mpjax.transforms._loss_scale import LossScaleState
from mpjax.transforms._state import OwnedScale, full_like, plain_array, refuse_outside, scales_in
from mpjax.transforms._trees import nodes_of

Path: TypeAlias = tuple[str, ...]
Leaves: TypeAlias = dict[Path, Leaf]
Versions: TypeAlias = dict[Path, list[Path]]
"""The arguments that a returned leaf may be the new version of."""

WHERE = "mpjax.check_loss_scaling(step)"
EXPECTED_STATE = "the state of an optimizer created by mpjax.loss_scaling"
_MARK = 2**30
"""The count of steps that tells the scale under test from others in what the step returns."""


class Run(NamedTuple):
  states: list[LossScaleState]  # those with the label of the scale under test, wherever they are
  after: Leaves  # what the step returned, and the variables that it was given

  @property
  def updated(self) -> list[LossScaleState]:
    return [one for one in self.states if np.max(one.total) > _MARK]

  @property
  def finite(self) -> bool:
    return all(bool(np.all(one.finite)) for one in self.updated)


def step_runner(
  step: Function, call: PyTree, scale: OwnedScale
) -> tuple[Callable[..., Run], Leaves, ClosedJaxpr | None]:
  """Returns a function that runs the step at a scale, what it is given, and its jaxpr if any."""
  flat = arrays_in(call)
  inputs = {path: jnp.asarray(plain_array(x)) for path, x in flat.items()}

  def outcome(inputs: Leaves) -> Run:
    variables = dict[int, Leaf]()

    def put(path: KeyPath, x: Leaf) -> Leaf:
      value = inputs.get(_path(path), x)
      if not is_nnx_variable(x):
        return value
      variable = jax.tree.unflatten(jax.tree.structure(x), [value])
      return variables.setdefault(id(x), variable)  # One that is tied stays so.

    new = jax.tree_util.tree_map_with_path(put, call, is_leaf=is_nnx_variable)
    out = step(*new[:-1], **new[-1])
    if not variables and scale.label not in {one.label for one in scales_in(out)}:
      got, fix = "none in what step returned", "Return the new opt_state as well."
      # The update of a chain takes any tuple of its length apart.
      if nodes_of(out, LossScaleState):
        got = "one that the update of another optimizer has taken apart in what step returned"
        fix = (
          "Update with the tx that mpjax.loss_scaling returned, not with the optimizer inside of "
          "it."
        )
      raise MpjaxTypeError(WHERE, expected=EXPECTED_STATE, got=got, fix=fix)
    states = [one.state for one in scales_in((out, new)) if one.label == scale.label]
    written = {path: x for path, x in arrays_in(new).items() if is_nnx_variable(flat.get(path))}
    after = {path: plain_array(x) for path, x in (arrays_in(out) | written).items()}
    return Run([one for one in states if one is not None], after)

  wide = program = None
  # What is wrong with it, it raises again where it runs.
  with _quiet(), contextlib.suppress(*REFUSALS, *flax_errors()):
    traced, shapes = jax.make_jaxpr(outcome, return_shape=True)(inputs)
    run_wide, structure = jax.jit(in_float32(traced)), jax.tree.structure(shapes)
    jax.eval_shape(run_wide, *jax.tree.leaves(inputs))
    program, wide = traced, lambda x: structure.unflatten(run_wide(*jax.tree.leaves(x)))

  def run(number: float, start: Leaves | None = None) -> Run:
    # An inf or NaN belongs to all losses, and of several optimizers one alone may be skipped.
    moving = [scale] if np.isfinite(number) else [one for one in scales_in(call) if one.stored]
    marked = {id(one.stored.scale): number for one in moving} | {id(scale.stored.total): _MARK}
    values = inputs | (start or {})
    with _quiet():
      values = {
        path: full_like(x, marked[id(flat[path])]) if id(flat[path]) in marked else jnp.copy(x)
        for path, x in values.items()
      }
      return outcome(values) if wide is None else wide(jax.tree.map(to_float32, values))

  return run, inputs, program


@contextlib.contextmanager
def _quiet() -> Generator[None]:
  with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
    yield


def arrays_in(tree: PyTree) -> Leaves:
  """Returns the arrays and the variables in a tree, by their paths."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_nnx_variable)
  return {_path(path): x for path, x in leaves if is_nnx_variable(x) or hasattr(x, "dtype")}


def _path(path: KeyPath) -> Path:
  return tuple(jax.tree_util.keystr((key,)) for key in path)


P = ParamSpec("P")

_TWO_CALLS = "Call what it returns: mpjax.check_loss_scaling(step)(*args)."
_HIGH, _FACTOR, _LOW = 2.0**14, 4.0, 2.0**-30
_TOLERANCE, _COARSE = 2.0**-8, 0.25
"""Of how far a leaf moves, in float32 and in a step that runs as it is, and may round."""
_FIELD = ".loss_scale"
_UNTOUCHED = "an opt_state whose loss scale was returned as it was"
_SAME = "the same parameters and optimizer state from a step that was applied and one skipped"
_NEVER = (
  "the same parameters and optimizer state at each scale, and no skipped step at the scale inf: "
  "the gradients were never scaled, or all are zero"
)


@check_call(WHERE, fix=_TWO_CALLS)
def check_loss_scaling(step: Callable[P, PyTree]) -> Callable[P, None]:
  """Returns a function that raises unless `step` is right: at every scale the same, or no step.

  Nothing can see that by looking at the gradients, and a learning rate that is 2^15 times too small
  is no error. This traces `step`, runs it in float32 at several loss scales, where a right step
  returns the same, and at an overflow, at once and after a finite step, where nothing may change:
  parameters, moments, batch statistics, counts of random numbers. Call it once, on the host, before
  training or in a test; it adds nothing to the step.

  What is compared are new versions of arguments: what has the type of one and its name (the key of
  a dict, the field of a class), or its place, as long as results begin as the arguments do (behind
  the optimizer's state a number ends this, for it may be a loss). What is only logged may depend on
  the scale; arrays that might be taken for arguments belong into a dict. Integers and keys that are
  meant to move on a skipped step (a PRNG key, a data cursor, `nnx.Optimizer.step`) belong beside
  the optimizer's state, directly in a container that holds it too, or the step closes over them. A
  step that looks at values, and so cannot be traced, runs as it is.

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
      something, or takes the scale back, when it is skipped; or float16 meets `NoLossScale`.

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
  check_callable(step, WHERE, expected="a training step", fix=_TWO_CALLS)

  def check(*args: P.args, **kwargs: P.kwargs) -> None:
    call = (*args, kwargs)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(call)):
      fix = "Call it on the host, before training: not inside of jit, grad or vmap."
      raise MpjaxTypeError(WHERE, expected="concrete arguments", got="traced ones", fix=fix)
    scales = scales_in(call)
    if not scales:
      fix = "Wrap the optimizer, tx = mpjax.loss_scaling(tx)."
      raise MpjaxTypeError(WHERE, expected=EXPECTED_STATE, got="none in the arguments", fix=fix)
    refuse_outside(call, WHERE)
    unseen = [_check_one(step, call, one) for one in scales]
    # Of several optimizers a step may update one alone.
    none_used = all(got == _UNTOUCHED for got in unseen)
    for one, got in zip(scales, unseen, strict=True):
      if got is not None and (none_used or got != _UNTOUCHED):
        _warn_inconclusive(one, got)

  return check


def _check_one(step: Function, call: PyTree, scale: OwnedScale) -> str | None:
  """Checks the use of one loss scale; returns what came where nothing depends on the gradients."""
  run, before, program = step_runner(step, call, scale)
  if scale.state is None:
    # Nothing scales the gradients. What is only cast to float16 and back is not computed in it.
    eqns = [] if program is None else walk(program)
    results = [v.aval for x in eqns if x.primitive is not convert_element_type_p for v in x.outvars]
    if any(getattr(aval, "dtype", None) == jnp.float16 for aval in results):
      raise MpjaxValueError(
        WHERE,
        expected="a loss scale, since the step computes in float16, whose gradients underflow",
        got="NoLossScale()",
        fix="Use mpjax.loss_scaling(tx, mpjax.DynamicLossScale()), or bfloat16.",
      )
    return None

  # Steps that are applied: at several scales, unless the scale is always 1.
  is_one = scale.says.fields == {"scale": 1}
  high = 1.0 if is_one else _HIGH
  while not (first := run(high)).finite:
    if high <= 1 / _HIGH:
      raise MpjaxValueError(
        WHERE,
        expected="a step whose gradients are finite at some loss scale",
        got=f"an inf or NaN at every scale down to {high:.9g}",
        fix="Call it with another batch; mpjax.check_skipped_steps says which gradient it is.",
      )
    high /= _FACTOR
  scales = (high / _FACTOR, high * _LOW)[: 0 if is_one else 1 if program is None else 2]
  applied = [first, *(one for one in map(run, scales) if one.finite)]

  # One that is skipped: it may try again at a lower scale than inf, but a NaN stays one. And one
  # that is not: divided by inf a plain gradient is 0, and a scaled one is NaN.
  skipped, at_inf = (run(np.nan), run(np.inf)) if first.updated else (first, first)
  if first.updated and not skipped.updated:
    raise MpjaxValueError(
      WHERE,
      expected="a step that returns the new loss scale when it is skipped too",
      got="the old one: it was taken back with all else, and never falls",
      fix="Select params and statistics, never opt_state: tx.update has taken back what is in it.",
    )
  skips = not skipped.finite

  # What is the new version of what? Of several arguments a skipped step returns one as it was.
  old, sure = _old_versions(before, first.after)
  same = _same(old, before, skipped.after)
  alone = {path: one for path, one in sure.items() if not skips or len(one) == 1}
  pairs = [(path, x) for path, one in (same | alone).items() for x in one]

  # What is wrong? Beside what falls with the scale other things may rise: a clip makes them.
  goes_on = sure if at_inf.finite and not is_one else {}
  tolerance, wrong = (_COARSE if program is None else _TOLERANCE), list[tuple[bool, bool, Path]]()
  for path, x in pairs:
    values = [one.after[path] for one in applied]
    if _differs(before[x], values, tolerance):
      rises = _distance(before[x], values[0]) > _distance(before[x], values[-1])
      wrong.append((False, rises, path))
    elif path in goes_on and _differs(before[x], [*values, at_inf.after[path]], tolerance):
      wrong.append((True, False, path))
  if wrong:
    raise _depends_on_scale(scale, at_inf.finite, *min(wrong))

  # Skipped at once, and after a step: momentum that is 0 at first stays 0.
  if skips:
    moved_on = before | {x: first.after[path] for path, x in pairs}
    for start, after in ((before, skipped.after), (moved_on, run(np.nan, moved_on).after)):
      _refuse_changes(scale, sure, _same(old, start, after), after)
  nothing = (skipped if skips else at_inf).after
  if any(is_inexact(nothing[x]) and _distance(first.after[x], nothing[x]) for x, _ in pairs):
    return None
  return (_SAME if skips else _NEVER) if first.updated else _UNTOUCHED


def _depends_on_scale(
  scale: OwnedScale, never: bool, replaced: bool, rises: bool, path: Path
) -> MpjaxValueError:
  of_loss, grad_fn, update = _words(scale)
  got = (
    "gradients that were unscaled twice, or clipped (or normalised) while they were scaled, or "
    "some that were never scaled among others"
  )
  if rises:
    got = "gradients that still carry the loss scale, or carry it twice"
  elif never:
    got = "gradients that were never scaled"
  if replaced:
    got += ", or whose inf and NaN were replaced (jnp.nan_to_num), which then skip no step"
  return MpjaxValueError(
    WHERE,
    expected=f"a step that is the same at every loss scale{of_loss}",
    got=f"{got}: what is returned at {''.join(path)} changes with the scale",
    fix=f"Pass the gradients of {grad_fn} to {update} unchanged, with penalties inside of "
    "loss_fn, and clip inside: tx = mpjax.loss_scaling(optax.chain(clip, optimizer)). "
    "mpjax.unscale is for logging alone. A loss that needs gradients itself takes those of "
    "jax.grad.",
  )


def _old_versions(before: Leaves, after: Leaves) -> tuple[Versions, Versions]:
  """Returns the old versions of each returned leaf, and those of what is the new one for sure."""
  carried, of_type = _carried(before, after), collections.defaultdict[object, list[Path]](list)
  for path, x in before.items():
    of_type[_type(x)] += [path] if _FIELD not in path else []
  # What is beside the optimizer's state, and no floating array, may count calls.
  places = {path[: path.index(_FIELD)] for path in before if _FIELD in path}
  old, sure = dict[Path, list[Path]](), dict[Path, list[Path]]()
  for path in [path for path in after if _FIELD not in path]:
    new = after[path]
    # Arguments of its type whose paths end as its own does, as far as any does: by names, for an
    # index says nothing but of what is `carried`.
    shared = {other: _shared(path, other, carried) for other in of_type[_type(new)]}
    most = max(shared.values(), default=0)
    old[path] = [other for other, length in shared.items() if length == most]
    beside = any(place[: len(x) - 1] == x[:-1] for place in places for x in old[path])
    if most and (is_inexact(new) or not beside):
      sure[path] = old[path]
  return old, sure


def _shared(path: Path, other: Path, carried: Sequence[Path]) -> int:
  """Returns with how many equal keys two paths end; 0 if that says nothing."""
  equal = [a == b for a, b in zip(reversed(path), reversed(other), strict=False)]
  length = [*equal, False].index(False)
  is_named = any(not key[1:-1].isdigit() for key in path[len(path) - length :])
  return length if is_named or (path == other and path in carried) else 0


def _carried(before: Leaves, after: Leaves) -> list[Path]:
  """Returns the paths with which results begin as the arguments do, with the optimizer's state."""
  # Behind that state a floating number ends them, since it may be a loss.
  paths, has_state = list[Path](), False
  for path, other in zip(sorted(before), sorted(after), strict=False):
    x = before[path]
    is_loss = has_state and _FIELD not in path and x.shape == () and is_inexact(x)
    if path != other or _type(x) != _type(after[path]) or is_loss:
      break
    paths.append(path)
    has_state = has_state or _FIELD in path
  return paths if has_state else []


def _same(versions: Versions, start: Leaves, after: Leaves) -> Versions:
  """Returns which of the old versions of a leaf have its values."""
  is_same = lambda path, x: not _distance(start[x], after[path])  # noqa: E731
  return {path: [x for x in old if is_same(path, x)] for path, old in versions.items()}


def _type(x: Leaf) -> tuple[object, ...]:
  return jnp.shape(x), "float32" if is_low(x) else str(x.dtype)


def _differs(old: Leaf, values: Sequence[Leaf], tolerance: float) -> bool:
  """Whether values are apart, measured by how far they are from the old one."""
  apart = max(_distance(values[0], value) for value in values)
  return apart > tolerance * max(_distance(old, value) for value in values)


def _refuse_changes(scale: OwnedScale, sure: Versions, same: Versions, after: Leaves) -> None:
  """Raises if an argument is not among what a skipped step returns."""
  # Of several that may be its new version one alone is; others are logs, of gradients say. Zeros
  # are the updates of a skipped step.
  settled = {x for unchanged in same.values() for x in unchanged}
  for path, old in sure.items():
    if same[path] or settled.issuperset(old) or not np.any(_numbers(after[path])):
      continue
    fix = (
      "Take it back by mpjax.select_tree(mpjax.last_step_finite(opt_state), new, old), put "
      "momentum inside of mpjax.loss_scaling, or use mpjax.make_train_step."
    )
    if scale.in_variables:
      fix = "Wrap the step: @mpjax.nnx.atomic_step takes back all that it has written."
    raise MpjaxValueError(
      WHERE,
      expected="a step that changes nothing when it is skipped",
      got=f"another {''.join(path)}",
      fix=f"{fix} An integer or a key that is meant to move, such as a data cursor, belongs "
      "directly into a container that holds the optimizer's state too, or the step closes over "
      "it; what is only logged, into a dict of names that no argument has.",
    )


def _numbers(x: Leaf) -> np.ndarray:
  return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else to_float32(x))


def _distance(a: Leaf, b: Leaf) -> float:
  """Returns the sum of the differences; numbers that are the same, NaN too, have none."""
  a, b = _numbers(a), _numbers(b)
  with np.errstate(all="ignore"):
    apart = np.where((a == b) | ((a != a) & (b != b)), 0, np.abs(a - b) if is_inexact(a) else 1)
  return float(np.sum(np.nan_to_num(apart, nan=np.inf), dtype=np.float64))


def _warn_inconclusive(scale: OwnedScale, got: str) -> None:
  of_loss, grad_fn, _ = _words(scale)
  fix = "Return the new opt_state, and call it for a step that updates."
  if got == _UNTOUCHED and scale.in_variables:
    fix = (
      "Call optimizer.update(model, grads) in step, and compile it by nnx.jit: jax.jit drops what "
      "a step writes to the variables of its arguments."
    )
  elif got != _UNTOUCHED:
    fix = (
      "Call it after a step that was applied, with a learning rate that is not zero. If that warns "
      "too, all gradients are zero (does the loss use its argument?), or the updates are lost in "
      "parameters of low precision."
    )
  if got == _NEVER:
    fix = f"Let {grad_fn} make the gradients. {fix}"
  expected = f"a step whose gradients{of_loss} change what it returns"
  text = message(WHERE, expected=expected, got=f"{got}, so that nothing could be checked", fix=fix)
  warnings.warn(text, UserWarning, stacklevel=3)


def _words(scale: OwnedScale) -> tuple[str, str, str]:
  """Returns whose scale it is, what makes gradients with it, and what takes them, for errors."""
  name = "" if scale.name is None else f"name={scale.name!r}"
  of_loss = name.replace("name=", " of the loss ")
  if scale.in_variables:
    return of_loss, "mpjax.value_and_grad(loss_fn, optimizer)", "optimizer.update"
  arguments = ", ".join(filter(None, ("loss_fn", "opt_state", name)))
  return of_loss, f"mpjax.value_and_grad({arguments})", "tx.update"
