"""A test of a training step: is it the same at every loss scale, and nothing at an overflow?"""

import contextlib
import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._core import errors
from mpjax._core.leaves import Path, is_key, is_nnx_variable
from mpjax._core.trees import is_inexact
from mpjax._core.types import Function, Leaf, NumpyArray, P, PyTree
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.in_float32 import in_float32, to_float32
from mpjax.transforms._loss_scale import OwnedScale, refuse_outside, scales_in
from mpjax.transforms._trees import full_like, plain_array

WHERE = "mpjax.check_loss_scaling(step)"
_TWO_CALLS = "Call what it returns: mpjax.check_loss_scaling(step)(*args)."


@errors.check_call(WHERE, fix=_TWO_CALLS)
def check_loss_scaling(step: Callable[P, PyTree]) -> Callable[P, None]:
  """Returns a function that raises unless `step` is right: at every scale the same, or no step.

  It runs `step` in float32, at several loss scales and at an overflow, and warns where nothing
  depends on the gradients. docs/getting_started.md says which results belong to which arguments.

  Args:
    step: any function that returns the new state of a `mpjax.loss_scaling` among its arguments, or
      writes it to an `nnx.Optimizer` there. If it cannot be traced it runs in its own precision.

  Returns:
    A function of the arguments of `step`, which are not changed, nor donated. It returns None.

  Raises:
    MpjaxTypeError: when called: an argument is traced, or no scale is where it should be.
    MpjaxValueError: when called: the step is not right, or computes in float16 with `NoLossScale`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> def step(params, opt_state):
  ...   loss, grads = mpjax.value_and_grad(lambda p: jnp.sum(p**2), opt_state)(params)
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   return optax.apply_updates(params, updates), opt_state
  >>> mpjax.check_loss_scaling(step)(jnp.ones(2), tx.init(jnp.ones(2)))
  """
  errors.check_callable(step, WHERE, expected="a training step", fix=_TWO_CALLS)

  def check(*args: P.args, **kwargs: P.kwargs) -> None:
    call = (*args, kwargs)
    scales = scales_in(call)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(call))
    if traced or not scales:
      expected = "concrete arguments, with the state of an optimizer created by mpjax.loss_scaling"
      fix = "Wrap the optimizer, tx = mpjax.loss_scaling(tx), and call it on the host."
      got = "traced ones" if traced else "no such state in the arguments"
      raise errors.MpjaxTypeError(WHERE, expected=expected, got=got, fix=fix)
    refuse_outside(call, WHERE)
    # Of several optimizers a step may update one alone. A comprehension would be a frame of its own
    # before Python 3.12, and the warning counts frames.
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
      if not any([*map(functools.partial(_check_one, step, call), scales)]):
        raise _not_updated(scales[0])

  return check


def _check_one(step: Function, call: PyTree, scale: OwnedScale) -> bool:
  """Checks the use of one loss scale, and returns whether the step updates it."""
  flat = _leaves(call)
  before = {path: jnp.asarray(plain_array(x)) for path, x in flat.items()}

  def outcome(values: dict[Path, Leaf]) -> dict[Path, Leaf]:
    # By identity: a variable that is tied stays so.
    new = {id(x): jax.tree.unflatten(jax.tree.structure(x), [values[p]]) for p, x in flat.items()}
    *args, kwargs = jax.tree.map(lambda x: new.get(id(x), x), call, is_leaf=is_nnx_variable)
    # Not what the step has added to a module: that is no new version, and may be of any type.
    written = {path: new[id(x)] for path, x in flat.items() if is_nnx_variable(x)}
    # A state of NNX is returned as arrays are.
    return {p: plain_array(x) for p, x in (written | _leaves(step(*args, **kwargs))).items()}

  # In float32, where to scale by a power of two rounds nothing. What is wrong with a step that
  # cannot be traced, it raises again where it runs.
  execute, computed, depends = outcome, [], dict[Path, bool]()
  with contextlib.suppress(*errors.REFUSALS, *errors.flax_errors()):
    jaxpr, shapes = jax.make_jaxpr(outcome, return_shape=True)(before)
    wide, structure = jax.jit(in_float32(jaxpr)), jax.tree.structure(shapes)
    execute = lambda x: structure.unflatten(wide(*map(to_float32, jax.tree.leaves(x))))  # noqa: E731
    graph = Graph(jaxpr)
    computed = [x for each in graph.operations if not each.casts for x in each.results]
    # On gradients, which update divides by the scale. Statistics depend on no more than whether the
    # step is applied.
    is_scale = [any(flat[path] is x for x in scale.stored[:1]) for path in sorted(before)]
    depends = structure.unflatten(graph.depends_on(is_scale))
  if scale.state is None:
    # Nothing scales the gradients. What is only cast to float16 and back is not computed in it.
    if any(x.dtype == jnp.float16 for x in computed):
      expected = "a loss scale, since the step computes in float16, whose gradients underflow"
      fix = "Use mpjax.loss_scaling(tx, mpjax.DynamicLossScale()), or bfloat16."
      raise errors.MpjaxValueError(WHERE, expected=expected, got="NoLossScale()", fix=fix)
    return True

  def run(number: float, start: dict[Path, Leaf]) -> tuple[float, dict[Path, Leaf], int | None]:
    # How many steps were applied, of a loop some perhaps; None if none has updated the scale. An
    # inf or NaN belongs to all losses: of several one alone may be skipped.
    moving = [scale] if np.isfinite(number) else [one for one in scales_in(call) if one.stored]
    fields = {"scale": number, "finite": False, "total": 2**30, "skipped": 2**30}
    new = {id(getattr(one.stored, field)): x for one in moving for field, x in fields.items()}
    values = {p: full_like(start[p], new[id(x)]) for p, x in flat.items() if id(x) in new}
    after = {p: _numbers(x) for p, x in execute(jax.tree.map(jnp.copy, start | values)).items()}
    states = [p[:-1] for p in after if p[-1:] == (".total",) and f"[{scale.label!r}]" in p]
    updated = [state for state in states if np.max(after[*state, ".total"]) > 2**30]
    if not states or not (updated or np.isfinite(number)):
      raise _not_updated(scale)
    counts = [int(np.sum(after[*x, ".total"] - after[*x, ".skipped"])) for x in updated]
    return number, after, sum(counts) if updated else None

  # A right step returns the very same at each scale, but for float16, which overflows and
  # underflows. Far below 1 a mistake is all that is left, and far above it is gone, or the other
  # way round, behind a clip as well. Nor is a step applied at inf, which makes 0 of a plain
  # gradient and NaN of a scaled one, unless it is tried again at a lower scale, and then returns
  # the same; a NaN stays one. At a scale that is always 1 plain gradients are right.
  usual = [2.0**14, 2.0**-22] if computed else [2.0**8, 2.0**6]
  numbers = [1.0] if scale.fields == {"scale": 1} else [*usual, np.inf, np.nan]
  runs = [run(numbers[0], before)]
  if runs[0][2] is None:
    return False
  runs += [run(number, before) for number in numbers[1:]]
  most = max(count or 0 for _, _, count in runs) or None
  applied = [after for _, after, count in runs if count == most]
  finite = [after for number, after, count in runs if count == most and np.isfinite(number)]
  if not finite:
    expected = "a step whose gradients are finite at some loss scale"
    got = f"an inf or NaN at {', '.join(f'{number:.9g}' for number in numbers[:2])}"
    fix = "Call it with another batch; mpjax.check_skipped_steps says which gradient it is."
    raise errors.MpjaxValueError(WHERE, expected=expected, got=got, fix=fix)

  # One that is skipped, by all losses. Momentum that is 0 stays 0, so here nothing is.
  first, old = finite[0], {x: _numbers(v) for x, v in before.items()}
  states = sorted(x for x in old if ".loss_scale" in x)
  zeros = [x for x in set(old) - set(states) if is_inexact(old[x]) and not np.any(old[x])]
  start = before | {x: full_like(before[x], 0.6875) for x in zeros}
  _, skipped, _ = run(np.nan, start)

  # What is returned for each argument, and is it kept when the step is skipped? That has its type,
  # and its path or name. A number behind the optimizer's state may be a loss, what follows a log.
  bare = {p: x for p, x in first.items() if p > states[-1] and not _name(p) and is_inexact(x)}
  loss = min((path for path, x in bare.items() if x.shape == ()), default=("~",))
  changed, wrong, moves = list[Path](), list[tuple[bool, Path]](), False
  for x in sorted(set(old) - set(states)):
    alike = [path for path in first if jax.typeof(first[path]) == jax.typeof(old[x])]
    paths = [path for path in alike if _name(path) == _name(x) != ()]
    paths = [x] if x in alike and (_name(x) or x < loss) else paths
    kept = [path for path in paths if _numbers(start[x]).tobytes() == skipped[path].tobytes()]
    # What is beside the optimizer's state may count all steps; zeros are the updates of one.
    is_beside = any(path[: len(x) - 1] == x[:-1] for path in states)
    has_zeros = not all(np.any(skipped[path]) for path in paths)
    changed += [] if kept or (has_zeros if is_inexact(old[x]) else is_beside) else paths
    # What depends on the scale? Beside what falls other things may rise: a clip makes them.
    for path in (kept or paths) if is_inexact(old[x]) else []:
      moved = [_distance(old[x], after[path]) for after in finite]
      moves = moves or (moved[0] > 0 and depends.get(path, True))
      # In low precision a step rounds.
      if max(_distance(first[path], after[path]) for after in applied) > 0.25 * max(moved):
        wrong.append((moved[0] > moved[-1], path))
  nnx, name = scale.in_variables, "" if scale.name is None else f", name={scale.name!r}"
  if wrong:
    rises, path = min(wrong)
    got = "gradients that were unscaled twice, clipped while scaled, or in part never scaled"
    if rises:
      got = "gradients that still carry the loss scale, or carry it twice"
    elif len(applied) > len(finite):
      got = "gradients that were never scaled, clipped, all zero, or had inf and NaN replaced"
    expected = f"{''.join(path)} to be the same at every value of the loss scale {scale.label!r}"
    grads = f"mpjax.value_and_grad(loss_fn, {'optimizer' if nnx else 'opt_state'}{name})"
    fix = f"Pass what {grads} returns to update; clip in mpjax.loss_scaling, penalise in loss_fn."
  elif changed and not any(np.any(x) for p, x in skipped.items() if p[-1:] == (".finite",)):
    expected = "a step that changes nothing when it is skipped"
    got = f"another {''.join(changed[0])}"
    fix = "Wrap it by @mpjax.nnx.atomic_step." if nnx else "Keep the old one by mpjax.select_tree."
    fix += " A key that may move belongs beside the optimizer's state, a log under its own name."
  else:
    if not moves:
      expected = "a step whose gradients change what it returns"
      got = "the same from a step that was applied and one skipped, so that nothing was checked"
      fix = "After a step or two there may be more; else gradients are zero, or updates are lost."
      warnings.warn(errors.message(WHERE, expected=expected, got=got, fix=fix), stacklevel=3)
    return True
  raise errors.MpjaxValueError(WHERE, expected=expected, got=got, fix=fix)


def _not_updated(scale: OwnedScale) -> errors.MpjaxValueError:
  expected = f"a step that returns the new loss scale {scale.label!r}, when it is skipped too"
  fix = "Return the opt_state that tx.update of mpjax.loss_scaling returned, and never select it."
  if scale.in_variables:
    fix = "Call optimizer.update(model, grads), and compile step by nnx.jit: jax.jit drops writes."
  return errors.MpjaxValueError(WHERE, expected=expected, got="none, or the old one", fix=fix)


def _leaves(tree: PyTree) -> dict[Path, Leaf]:
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_nnx_variable)
  leaves = [(path, x) for path, x in leaves if is_nnx_variable(x) or hasattr(x, "dtype")]
  return {tuple(jax.tree_util.keystr((key,)) for key in path): x for path, x in leaves}


def _name(path: Path) -> Path:
  """Returns the last name on a path and what follows it; nothing if there are only positions."""
  names = [i for i, key in enumerate(path) if not key[1:-1].isdigit()]
  return path[names[-1] :] if names else ()


def _numbers(x: Leaf) -> NumpyArray:
  return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else to_float32(x))


def _distance(a: NumpyArray, b: NumpyArray) -> float:
  with np.errstate(invalid="ignore"):
    return float(np.nan_to_num(np.sum(np.abs(a - b), where=a != b, dtype=np.float64), nan=np.inf))
