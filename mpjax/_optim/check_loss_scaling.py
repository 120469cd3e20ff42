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
from mpjax._core.leaves import Path, is_key, is_nnx_variable, raw_value
from mpjax._core.trees import is_inexact
from mpjax._core.types import Function, Leaf, NumpyArray, P, PyTree
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.in_float32 import in_float32, to_float32
from mpjax._optim.loss_scale import (
  OwnedScale,
  is_scaling_state,
  leaves_of,
  refuse_outside,
  scales_in,
)
from mpjax._optim.trees import full_like, last_name

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
      fix = "Wrap tx by mpjax.loss_scaling. Pass its state or the merged nnx.Optimizer on the host."
      got = "traced ones" if traced else "no such state in the arguments"
      raise errors.MpjaxTypeError(WHERE, expected=expected, got=got, fix=fix)
    refuse_outside(call, WHERE)
    # Of several optimizers a step may update one alone. A comprehension would be a frame of its own
    # before Python 3.12, and the warning counts frames.
    states = leaves_of(call, is_scaling_state).items()
    roots = [p for p, x in states if is_scaling_state(x) for _ in scales_in(x)]
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
      if not any([*map(functools.partial(_check_one, step, call), scales, roots)]):
        raise _not_updated(scales[0])

  return check


def _check_one(step: Function, call: PyTree, scale: OwnedScale, root: Path) -> bool:
  """Checks the use of the loss scale at `root`, and returns whether the step updates it."""
  flat, own = leaves_of(call), (*root, ".loss_scale", f"[{scale.label!r}]")
  before = {path: jnp.asarray(x) for path, x in _arrays(flat).items()}

  def outcome(values: dict[Path, Leaf]) -> dict[Path, Leaf]:
    new = {p: jax.tree.map(lambda x, p=p: values.get(p, x), node) for p, node in flat.items()}
    # By identity: a variable that is tied stays so.
    tied = {id(x): new[path] for path, x in flat.items() if is_nnx_variable(x)}
    new |= {path: tied[id(x)] for path, x in flat.items() if id(x) in tied}
    *args, kwargs = jax.tree.structure(call, is_leaf=is_nnx_variable).unflatten(new.values())
    # A state of NNX is returned as arrays are. What the step has added to a module is no new
    # version, and may be of any type.
    results = leaves_of(step(*args, **kwargs))
    return _arrays({p: x for p, x in new.items() if is_nnx_variable(x)} | results)

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
    depends = structure.unflatten(graph.depends_on([p == (*own, ".scale") for p in sorted(before)]))
  states = sorted(x for x in before if ".loss_scale" in x)
  if scale.state is None:
    # Nothing scales the gradients. What is only cast to float16 and back is not computed in it.
    if any(x.dtype == jnp.float16 for x in computed):
      expected = "a loss scale, since the step computes in float16, whose gradients underflow"
      fix = "Use mpjax.loss_scaling(tx, mpjax.DynamicLossScale()), or bfloat16."
      raise errors.MpjaxValueError(WHERE, expected=expected, got="NoLossScale()", fix=fix)
    return True

  def run(number: float, start: dict[Path, Leaf]) -> tuple[float, dict[Path, Leaf], int | None]:
    # How many steps were applied, of a loop some perhaps; None if none has updated the scale. An
    # inf or NaN belongs to all losses: of several one alone may be skipped. Results may have other
    # paths: there a scale is told apart by a count that no other has.
    # The flag of the step before is the opposite: one that reads it changes what is to stay.
    mine = {".scale": number, ".finite": not np.isfinite(number)}
    mine |= {".total": 2**30, ".skipped": 2**30}
    others = {} if np.isfinite(number) else mine | {".total": 0, ".skipped": 0}
    new = {path: (mine if path[:-1] == own else others).get(path[-1]) for path in states}
    values = {path: full_like(start[path], x) for path, x in new.items() if x is not None}
    after = {p: _numbers(x) for p, x in execute(jax.tree.map(jnp.copy, start | values)).items()}
    totals = {p: np.max(x) for p, x in after.items() if ".loss_scale" in p and p[-1] == ".total"}
    updated = [path[:-1] for path, total in totals.items() if total > 2**30]
    # One that is read for another number than a scale has to be updated.
    used = any(x for path, x in depends.items() if ".loss_scale" not in path)
    if not updated and (used or not np.isfinite(number)):
      raise _not_updated(scale)
    counts = [int(np.sum(after[*x, ".total"] - after[*x, ".skipped"])) for x in updated]
    return number, after, sum(counts) if updated else None

  # A right step returns the very same at each scale, but for float16, which overflows and
  # underflows. Far below 1 a mistake is all that is left, and far above it is gone, or the other
  # way round, behind a clip as well: one of small gradients shows at the largest scale alone. Nor
  # is a step applied at inf, which makes 0 of a plain gradient and NaN of a scaled one, unless it
  # is tried again at a lower scale, and then returns the same; a NaN stays one. At a scale that is
  # always 1 plain gradients are right.
  usual = [max(scale.largest, 2.0**14), 2.0**14, 2.0**-22] if computed else [2.0**8, 2.0**6]
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
    got = f"an inf or NaN at {', '.join(f'{x:.9g}' for x in numbers if np.isfinite(x))}"
    fix = "Call it with another batch; mpjax.check_skipped_steps says which gradient it is."
    raise errors.MpjaxValueError(WHERE, expected=expected, got=got, fix=fix)

  # What may be the new version of an argument? It has its type, and its name, or its position if it
  # has none: a number behind the optimizer's state may be a loss, what follows a log. Of several it
  # has the path that differs least, as seen from the leaf.
  first, old = finite[0], {x: _numbers(v) for x, v in before.items() if x not in states}
  bare = {p: x for p, x in first.items() if p > states[-1] and not last_name(p) and is_inexact(x)}
  loss = min((path for path, x in bare.items() if x.shape == ()), default=("~",))
  kind = lambda path, x: (last_name(path) or path, x.dtype, x.shape)  # noqa: E731
  apart = lambda x, path: len({*enumerate(x[::-1])} ^ {*enumerate(path[::-1])})  # noqa: E731
  pairs, wrong, moves = list[tuple[Path, Path]](), list[tuple[bool, bool, Path]](), False
  for x in (x for x in sorted(old) if last_name(x) or x < loss):
    alike = {p: apart(x, p) for p, value in first.items() if kind(p, value) == kind(x, old[x])}
    pairs += [(x, path) for path, n in alike.items() if n == min(alike.values())]

  # One that is skipped, by all losses, a step later: an average that begins as a copy is none then.
  # Momentum that is 0 may stay 0, so there nothing is.
  later = {x: first[path] for x, path in pairs if not is_key(before[x].dtype)}
  later |= {x: 0.6875 for x in old if is_inexact(old[x]) and not np.any(later.get(x, old[x]))}
  start = before | {x: full_like(before[x], value) for x, value in later.items()}
  _, skipped, _ = run(np.nan, start)

  # Is it kept when the step is skipped? What holds the value of one argument is no new version of
  # another: one that is not returned, such as a frozen network, has none.
  same = [(x, path) for x, path in pairs if _numbers(start[x]).tobytes() == skipped[path].tobytes()]
  other = [(x, path) for x, path in pairs if all(x != a and path != b for a, b in same)]
  # What is beside the optimizer's state may count all steps; zeros are the updates of one.
  beside = {path[:n] for path in states for n in range(len(path))}
  free = [x[:-1] in beside if not is_inexact(old[x]) else not np.any(skipped[p]) for x, p in other]
  changed = [path for (_, path), is_free in zip(other, free, strict=True) if not is_free]
  # What depends on the scale? Beside what falls other things may rise: a clip makes them.
  for x, path in ((x, path) for x, path in same + other if is_inexact(old[x])):
    moved = [_distance(old[x], after[path]) for after in finite]
    moves = moves or (moved[0] > 0 and depends.get(path, True))
    # In low precision a step rounds. At inf and NaN another optimizer may have skipped: named last.
    if any(far := [_distance(first[path], end[path]) > 0.25 * max(moved) for end in applied]):
      wrong.append((not any(far[: len(finite)]), moved[0] > moved[-1], path))
  nnx, name = scale.in_variables, "" if scale.name is None else f", name={scale.name!r}"
  if wrong:
    _, rises, path = min(wrong)
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


def _arrays(leaves: dict[Path, Leaf]) -> dict[Path, Leaf]:
  return {path: y for path, x in leaves.items() if hasattr(y := raw_value(x), "dtype")}


def _numbers(x: Leaf) -> NumpyArray:
  return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else to_float32(x))


def _distance(a: NumpyArray, b: NumpyArray) -> float:
  # From 0 where it begins at inf, as the best loss so far does: all numbers are as far from that.
  size = np.abs(np.where(np.isfinite(a), a, 0) - b)
  return float(np.nan_to_num(np.sum(size, where=a != b, dtype=np.float64), nan=np.inf))
