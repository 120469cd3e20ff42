"""A test of a training step: is it the same at every loss scale, and nothing at an overflow?

To scale by a power of two moves exponents and rounds nothing, so that a right step returns the very
same at each scale: unless float16 loses what is small. So the step is traced and run in float32.
What was never scaled, was unscaled or scaled twice, or carries the scale squared then shows, beside
gradients that are right and behind a clip: far below 1 the mistake is all that is left, and far
above it is gone, or the other way round.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable
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
from mpjax.transforms._loss_scale import (
  LossScaleState,
  OwnedScale,
  full_like,
  plain_array,
  refuse_outside,
  scales_in,
)
from mpjax.transforms._trees import nodes_of

P = ParamSpec("P")
Path: TypeAlias = tuple[str, ...]
Leaves: TypeAlias = dict[Path, Leaf]
Versions: TypeAlias = dict[Path, list[Path]]
"""The arguments that a returned leaf may be the new version of."""

WHERE = "mpjax.check_loss_scaling(step)"
_TWO_CALLS = "Call what it returns: mpjax.check_loss_scaling(step)(*args)."
_STATE = "the state of an optimizer created by mpjax.loss_scaling"
_FIELD = ".loss_scale"
_MARK = 2**30
"""The count of steps that tells the scale under test from others in what the step returns."""
_HIGH, _FACTOR, _LOW = 2.0**14, 4.0, 2.0**-36
_TOLERANCE = 0.25
"""Of how far a leaf moves: a step that runs as it is may round."""


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
  >>> def forgetful(params, opt_state):
  ...   grads = jax.grad(lambda params: jnp.sum(params**2))(params)
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   return optax.apply_updates(params, updates), opt_state
  >>> try:
  ...   mpjax.check_loss_scaling(forgetful)(jnp.ones(2), tx.init(jnp.ones(2)))
  ... except mpjax.errors.MpjaxValueError as error:
  ...   print(error.got.partition(":")[0])
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
      raise MpjaxTypeError(WHERE, expected=_STATE, got="none in the arguments", fix=fix)
    refuse_outside(call, WHERE)
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
      checked = [_check_one(step, call, one) for one in scales]
    # Of several optimizers a step may update one alone.
    any_updated = any(updated for updated, _ in checked)
    for updated, inconclusive in checked:
      if inconclusive is not None and (updated or not any_updated):
        warnings.warn(inconclusive, UserWarning, stacklevel=2)

  return check


class _Run(NamedTuple):
  after: Leaves  # what the step returned, and the variables that it was given
  updated: bool  # whether another state of the scale under test is in it
  finite: bool  # and the step was applied


def _runner(
  step: Function, call: PyTree, scale: OwnedScale
) -> tuple[Callable[[Leaves, float], _Run], Leaves, ClosedJaxpr | None]:
  """Returns a function that runs the step at a scale, what it is given, and its jaxpr if any."""
  flat = _arrays_in(call)
  before = {path: jnp.asarray(plain_array(x)) for path, x in flat.items()}

  def outcome(values: Leaves) -> tuple[list[LossScaleState], Leaves]:
    variables = dict[int, Leaf]()

    def put(path: KeyPath, x: Leaf) -> Leaf:
      value = values.get(_path(path), x)
      if not is_nnx_variable(x):
        return value
      variable = jax.tree.unflatten(jax.tree.structure(x), [value])
      return variables.setdefault(id(x), variable)  # One that is tied stays so.

    new = jax.tree_util.tree_map_with_path(put, call, is_leaf=is_nnx_variable)
    out = step(*new[:-1], **new[-1])
    labels = {one.label for one in scales_in(out)}
    if not variables and scale.label not in labels:
      of_loss = "" if scale.name is None else f" of the loss {scale.name!r}"
      got, fix = f"none{of_loss} in what step returned", "Return the new opt_state as well."
      # The update of a chain takes any tuple of its length apart.
      if not labels and nodes_of(out, LossScaleState):
        got = "one that the update of another optimizer has taken apart in what step returned"
        fix = "Update with the tx that mpjax.loss_scaling returned, not with what is inside of it."
      raise MpjaxTypeError(WHERE, expected=_STATE, got=got, fix=fix)
    states = [one.state for one in scales_in((out, new)) if one.state is not None]
    # Not what the step has added to a module: that is no new version, and may be of any type.
    written = {path: x for path, x in _arrays_in(new).items() if is_nnx_variable(flat.get(path))}
    return states, {path: plain_array(x) for path, x in (_arrays_in(out) | written).items()}

  execute, jaxpr = outcome, None
  # What is wrong with it, it raises again where it runs.
  with contextlib.suppress(*REFUSALS, *flax_errors()):
    traced, shapes = jax.make_jaxpr(outcome, return_shape=True)(before)
    wide, structure = jax.jit(in_float32(traced)), jax.tree.structure(shapes)
    jax.eval_shape(wide, *jax.tree.leaves(before))
    execute = lambda x: structure.unflatten(wide(*map(to_float32, jax.tree.leaves(x))))  # noqa: E731
    jaxpr = traced

  def run(start: Leaves, number: float) -> _Run:
    # An inf or NaN belongs to all losses, and of several optimizers one alone may be skipped.
    moving = [scale] if np.isfinite(number) else [one for one in scales_in(call) if one.stored]
    marked = {id(one.stored.scale): number for one in moving} | {id(scale.stored.total): _MARK}
    values = {
      path: full_like(x, marked[id(flat[path])]) if id(flat[path]) in marked else jnp.copy(x)
      for path, x in start.items()
    }
    states, after = execute(values)
    updated = [x for x in states if np.max(x.total) > _MARK]
    return _Run(after, bool(updated), all(bool(np.all(x.finite)) for x in updated))

  return run, before, jaxpr


def _arrays_in(tree: PyTree) -> Leaves:
  """Returns the arrays and the variables in a tree, by their paths."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_nnx_variable)
  return {_path(path): x for path, x in leaves if is_nnx_variable(x) or hasattr(x, "dtype")}


def _path(path: KeyPath) -> Path:
  return tuple(jax.tree_util.keystr((key,)) for key in path)


def _check_one(step: Function, call: PyTree, scale: OwnedScale) -> tuple[bool, str | None]:
  """Checks the use of one loss scale.

  Returns whether the step updates it, and a warning where nothing depends on the gradients.
  """
  # What a user of optax, or of NNX, writes.
  holder, update = "opt_state", "tx.update"
  to_update = "Return the new opt_state, and call it for a step that updates."
  to_take_back = (
    "Take it back by mpjax.select_tree(mpjax.last_step_finite(opt_state), new, old), put momentum "
    "inside of mpjax.loss_scaling, or use mpjax.make_train_step."
  )
  if any(plain_array(x) is not x for x in scale.stored):  # In an `nnx.Optimizer`.
    holder, update = "optimizer", "optimizer.update"
    to_update = (
      "Call optimizer.update(model, grads) in step, and compile it by nnx.jit: jax.jit drops what "
      "a step writes to the variables of its arguments."
    )
    to_take_back = "Wrap the step: @mpjax.nnx.atomic_step takes back all that it has written."
  of_loss = "" if scale.name is None else f" of the loss {scale.name!r}"
  name = "" if scale.name is None else f", name={scale.name!r}"
  grad_fn = f"mpjax.value_and_grad(loss_fn, {holder}{name})"

  run, before, jaxpr = _runner(step, call, scale)
  if scale.state is None:
    # Nothing scales the gradients. What is only cast to float16 and back is not computed in it.
    eqns = [] if jaxpr is None else walk(jaxpr)
    results = [v.aval for x in eqns if x.primitive is not convert_element_type_p for v in x.outvars]
    if any(getattr(aval, "dtype", None) == jnp.float16 for aval in results):
      raise MpjaxValueError(
        WHERE,
        expected="a loss scale, since the step computes in float16, whose gradients underflow",
        got="NoLossScale()",
        fix="Use mpjax.loss_scaling(tx, mpjax.DynamicLossScale()), or bfloat16.",
      )
    return True, None

  # Steps that are applied: at several scales, unless the scale is always 1.
  is_one = scale.fields == {"scale": 1}
  high = 1.0 if is_one else _HIGH
  while not (first := run(before, high)).finite:
    if high <= 1 / _HIGH:
      raise MpjaxValueError(
        WHERE,
        expected="a step whose gradients are finite at some loss scale",
        got=f"an inf or NaN at every scale down to {high:.9g}",
        fix="Call it with another batch; mpjax.check_skipped_steps says which gradient it is.",
      )
    high /= _FACTOR
  others = [] if is_one else [high / _FACTOR, high * _LOW]
  if jaxpr is None:  # In float16 gradients would underflow at the last.
    others = others[:1]
  applied = [first, *(one for x in others if (one := run(before, x)).finite)]

  # One that is skipped: it may try again at a lower scale than inf, but a NaN stays one. And one
  # that is not: divided by inf a plain gradient is 0, and a scaled one is NaN.
  skipped, at_inf = first, first
  if first.updated:
    skipped, at_inf = run(before, np.nan), run(before, np.inf)
    if not skipped.updated:
      raise MpjaxValueError(
        WHERE,
        expected="a step that returns the new loss scale when it is skipped too",
        got="the old one: it was taken back with all else, and never falls",
        fix="Select params and statistics, never opt_state: tx.update has taken back what is in "
        "it.",
      )

  # What is the new version of what? Of several arguments a skipped step returns one as it was.
  old, sure = _old_versions(before, first.after)

  def same(start: Leaves, after: Leaves) -> Versions:
    return {p: [x for x in xs if not _distance(start[x], after[p])] for p, xs in old.items()}

  skips = not skipped.finite
  alone = {path: xs for path, xs in sure.items() if not skips or len(xs) == 1}
  versions = same(before, skipped.after) | alone
  pairs = [(path, x) for path, xs in versions.items() for x in xs]

  # What depends on the scale? Beside what falls with it other things may rise: a clip makes them.
  goes_on = at_inf.finite and not is_one
  # A step that has tried again may have counted that, in what is no new version for sure.
  for_sure = [(path, x) for path, x in pairs if path in sure] if goes_on else []
  for runs, compared in ((applied, pairs), ([*applied, at_inf], for_sure)):
    wrong = list[tuple[bool, Path]]()
    for path, x in compared:
      moved = [_distance(before[x], one.after[path]) for one in runs]
      apart = [_distance(first.after[path], one.after[path]) for one in runs]
      if max(apart) > _TOLERANCE * max(moved):
        wrong.append((moved[0] > moved[len(applied) - 1], path))
    if not wrong:
      continue
    rises, path = min(wrong)
    mistakes = {
      "gradients that were never scaled, or whose inf and NaN were replaced (jnp.nan_to_num), "
      "which then skip no step": runs is not applied,
      "gradients that still carry the loss scale, or carry it twice": rises,
      "gradients that were never scaled": at_inf.finite,
      "gradients that were unscaled twice, or clipped (or normalised) while they were scaled, or "
      "some that were never scaled among others": True,
    }
    got = next(mistake for mistake, is_seen in mistakes.items() if is_seen)
    raise MpjaxValueError(
      WHERE,
      expected=f"a step that is the same at every loss scale{of_loss}",
      got=f"{got}: what is returned at {''.join(path)} changes with the scale",
      fix=f"Pass the gradients of {grad_fn} to {update} unchanged, with penalties "
      "inside of loss_fn, and clip inside: tx = mpjax.loss_scaling(optax.chain(clip, optimizer)). "
      "mpjax.unscale is for logging alone. A loss that needs gradients itself takes those of "
      "jax.grad.",
    )

  # What does a skipped step change, at once, and after a step? Momentum that is 0 at first stays 0.
  moved_on = before | {x: first.after[path] for path, x in pairs}
  for start in (before, moved_on) if skips else ():
    after = (skipped if start is before else run(moved_on, np.nan)).after
    unchanged = same(start, after)
    settled = {x for xs in unchanged.values() for x in xs}
    for path, xs in sure.items():
      # Of several that may be its new version one alone is; others are logs, of gradients say.
      # Zeros are the updates of a skipped step.
      is_log = settled.issuperset(xs) or (is_inexact(after[path]) and not np.any(after[path]))
      if not unchanged[path] and not is_log:
        raise MpjaxValueError(
          WHERE,
          expected="a step that changes nothing when it is skipped",
          got=f"another {''.join(path)}",
          fix=f"{to_take_back} An integer or a key that is meant to move, such as a data cursor, "
          "belongs directly into a container that holds the optimizer's state too, or the step "
          "closes over it; what is only logged, into a dict of names that no argument has.",
        )

  # Does anything depend on the gradients?
  nothing = (skipped if skips else at_inf).after
  if any(is_inexact(nothing[x]) and _distance(first.after[x], nothing[x]) for x, _ in pairs):
    return first.updated, None
  got = "the same parameters and optimizer state from a step that was applied and one skipped"
  fix = (
    "Call it after a step that was applied, with a learning rate that is not zero. If that warns "
    "too, all gradients are zero (does the loss use its argument?), or the updates are lost in "
    "parameters of low precision."
  )
  if not first.updated:
    got = "an opt_state whose loss scale was returned as it was"
    fix = to_update
  elif not skips:
    got = (
      "the same parameters and optimizer state at each scale, and no skipped step at the scale "
      "inf: the gradients were never scaled, or all are zero"
    )
    fix = f"Let {grad_fn} make the gradients. {fix}"
  expected = f"a step whose gradients{of_loss} change what it returns"
  got = f"{got}, so that nothing could be checked"
  return first.updated, message(WHERE, expected=expected, got=got, fix=fix)


def _old_versions(before: Leaves, after: Leaves) -> tuple[Versions, Versions]:
  """Returns the old versions of each returned leaf, and those of what is the new one for sure."""
  # Results begin as the arguments do, with the optimizer's state. Behind that state a floating
  # number ends them, since it may be a loss.
  carried, has_state = set[Path](), False
  for path, other in zip(sorted(before), sorted(after), strict=False):
    x = before[path]
    is_loss = has_state and _FIELD not in path and x.shape == () and is_inexact(x)
    if path != other or _type(x) != _type(after[path]) or is_loss:
      break
    carried.add(path)
    has_state = has_state or _FIELD in path

  types = {path: _type(x) for path, x in before.items() if _FIELD not in path}
  states = {path[: path.index(_FIELD)] for path in before if _FIELD in path}
  old, sure = dict[Path, list[Path]](), dict[Path, list[Path]]()
  for path in [path for path in after if _FIELD not in path]:
    new, kind = after[path], _type(after[path])
    # It has the place of an argument, or it is one of those whose paths end as its own does, as far
    # as any does. They have its type, and some name in common: an index by itself says nothing.
    shared = {other: _shared(path, other) for other, x in types.items() if x == kind}
    if has_state and path in carried:
      shared = {path: len(path)}
    most = max(shared.values(), default=0)
    old[path] = [other for other, length in shared.items() if length == most]
    # What is beside the optimizer's state, and no floating array, may count calls.
    beside = any(state[: len(x) - 1] == x[:-1] for state in states for x in old[path])
    if most and (is_inexact(new) or not beside):
      sure[path] = old[path]
  return old, sure


def _shared(path: Path, other: Path) -> int:
  """Returns with how many equal keys two paths end; 0 if there is no name among them."""
  pairs = zip(reversed(path), reversed(other), strict=False)
  keys = [key for key, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
  return len(keys) if any(not key[1:-1].isdigit() for key in keys) else 0


def _type(x: Leaf) -> tuple[object, ...]:
  return jnp.shape(x), "float32" if is_low(x) else str(x.dtype)


def _distance(a: Leaf, b: Leaf) -> float:
  """Returns the sum of the differences; numbers that are the same, NaN too, have none."""
  a, b = (np.asarray(jax.random.key_data(x) if is_key(x.dtype) else to_float32(x)) for x in (a, b))
  with np.errstate(all="ignore"):
    apart = np.where((a == b) | ((a != a) & (b != b)), 0, np.abs(a - b) if is_inexact(a) else 1)
  return float(np.sum(np.nan_to_num(apart, nan=np.inf), dtype=np.float64))
