"""Check that a training step scales its loss, and that a skipped step keeps everything.

The step runs on copies of its arguments: with the loss scale 1, where it is applied, and with NaN,
where it has to be skipped. Results that may be new versions of arguments are paired with these, and
have to equal them after the skipped step.
"""

import collections
import contextlib
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core import errors
from mpjax._core.frameworks import is_nnx_variable
from mpjax._core.leaves import Path, is_key, raw_value
from mpjax._core.trees import in_low_precision, is_none, low_to_float32
from mpjax._core.types import Args, Array, DType, Function, Kwargs, Leaf, P, PyTree, is_inexact
from mpjax._jaxpr.locations import Location, is_of_inner_gradient
from mpjax._jaxpr.reader import dtype_of
from mpjax._jaxpr.steps import Step, body_of
from mpjax._optim.find_scale import OwnedScale, refuse_outside, scales_in
from mpjax._optim.loss_scale import INT32_MAX, NoLossScale, SkipNonfinite, is_label, read_kind
from mpjax._optim.optimizer_trees import full_like, strong
from mpjax._optim.scaled import scale_value_p
from mpjax._optim.states import MasterWeightsState

WHERE = "mpjax.check_loss_scaling(step)"
_TWO_CALLS = "Call what it returns: mpjax.check_loss_scaling(step)(*args)."
_STATED = "mpjax.check_loss_scaling(returns)"
_STATE_THEM = (
  "State them: for `params, opt_state, loss = step(params, opt_state, batch)` write "
  "mpjax.check_loss_scaling(step, returns=(0, 1, None)), with an entry for each result. A number "
  "is the position of an argument, None a log."
)

Names: TypeAlias = tuple[str, ...]
"""A path without its punctuation: an object, its `nnx.State` and a dict have the same."""

Spec: TypeAlias = tuple[tuple[int, ...], DType]
"""The shape and dtype of an array."""

Tree: TypeAlias = frozenset[tuple[Names, Spec]]
"""The arrays below a node: their names from there on, their shapes and dtypes."""


@errors.check_call(WHERE, fix=_TWO_CALLS)
def check_loss_scaling(step: Callable[P, PyTree], *, returns: PyTree = None) -> Callable[P, None]:
  """Return a function that raises unless a skipped step of `step` keeps everything.

  The function runs `step` with the loss scale NaN. If `mpjax.scaled` has scaled the loss, each of
  its gradients is NaN then, while the forward pass does not change. A step that is applied
  nevertheless has not scaled its loss. A step that is skipped must return its arguments bit for
  bit, except for the scale itself. Integers and keys beside the optimizer's state may move, since
  they count all steps. With `SkipNonfinite` the batch becomes NaN in place of the scale, or else a
  parameter, and a float16 loss has to be scaled by a number, as in a trainer. If the loss contains
  float16 gradients and none of them is scaled, a warning says so.

  A result with the names, shapes and dtypes of an argument, or of a part of it, has to equal that
  argument, whatever its position. Other results are logs. If several arguments are alike, each of
  their results has to equal another one of them. Variables of NNX are compared with their own
  values before the step.

  Args:
    step: any function that returns the new state of a `mpjax.loss_scaling` among its arguments, or
      writes it to an `nnx.Optimizer` there. It runs in its own precision.
    returns: the argument that each result replaces, as a tree with the structure of the results.
      Each entry is a position, the name of a keyword argument, or None: `(0, 1, None)` for
      `params, opt_state, loss = step(params, opt_state, batch)`. None is for logs with the tree of
      an argument, and for state that may move in a skipped step, such as that of a game. An entry
      inside of a result stands for the same part of the argument:
      `{"params": 0, "opt_state": 0, "game": None}` for `state = step(state)`.

  Returns:
    A function of the arguments of `step`, which keeps them and returns None.

  Raises:
    MpjaxTypeError: `returns` has entries other than positions and names. When called: an argument
      is traced, or no argument has a scale.
    MpjaxValueError: when called: the step is wrong, or computes in float16 with `NoLossScale`, or
      with `SkipNonfinite` and a loss that no number scales; more results than arguments are alike,
      or `returns` does not fit.

  >>> import jax, jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> def step(params, opt_state):
  ...   grads = jax.grad(mpjax.scaled(lambda p: jnp.sum(p**2), opt_state))(params)
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   return optax.apply_updates(params, updates), opt_state
  >>> mpjax.check_loss_scaling(step)(jnp.ones(2), tx.init(jnp.ones(2)))
  """
  errors.check_callable(step, WHERE, expected="a training step", fix=_TWO_CALLS)
  # None is an entry here, and JAX drops it from a tree unless it is a leaf.
  entries = {names: x for names, _, x in leaves_of(returns, is_leaf=is_none)}
  for x in entries.values():
    # A bool is an int to Python, and would be taken for position 0 or 1.
    if isinstance(x, bool) or not isinstance(x, (int, str, NoneType)):
      expected = "positions and names of arguments, in the tree of the results"
      got = errors.kind_of(x)
      raise errors.MpjaxTypeError(_STATED, expected=expected, got=got, fix=_STATE_THEM)
  stated = None if returns is None else entries

  def check(*args: P.args, **kwargs: P.kwargs) -> None:
    call = _Call(step, args, kwargs)
    scales = scales_in(call.arguments)
    # The check runs the step with another scale and compares values, so it needs concrete arrays.
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(call.arguments))
    if is_traced or not scales:
      expected = "concrete arguments, with the state of an optimizer created by mpjax.loss_scaling"
      fix = "Wrap tx by mpjax.loss_scaling. Pass its state or the merged nnx.Optimizer on the host."
      got = "traced ones" if is_traced else "no such state in the arguments"
      raise errors.MpjaxTypeError(WHERE, expected=expected, got=got, fix=fix)
    refuse_outside(call.arguments, WHERE)
    # The check makes NaN on purpose, so the debugging flags must not raise. Under `disable_jit` a
    # `while_loop` of the step could not be traced.
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
      place = _check_float16(call, scales)
      if call.scales:
        _check_skipped_step(call, stated, scales)
    if place is not None:
      text = errors.message(
        WHERE,
        expected="gradients inside of the loss in float32, or scaled",
        got=f"one in float16, in {place.path or 'the loss'} at {place.source or 'an unknown line'}",
        fix="The loss scale does not reach it, and it may underflow. Differentiate "
        "mpjax.scaled(fun, 2.0**12) in place of fun.",
      )
      warnings.warn(text, stacklevel=2)

  return check


def _check_float16(call: "_Call", scales: Sequence[OwnedScale]) -> Location | None:
  """Raises if a step computes in float16, and neither a loss scale nor a number scales gradients.

  Returns the place of the first float16 gradient inside of the loss, unless a gradient there is
  scaled.
  """
  steps: list[Step] = []
  # A step that fails here may still run as it is. If it fails there too, the user sees that error.
  with contextlib.suppress(*errors.REFUSALS, *errors.flax_errors()):
    program = jax.make_jaxpr(lambda arrays: call.outcome(arrays)[0])(call.arrays)
    steps += body_of(program).every_step()
  # A cast to float16 computes nothing in float16. The steps of a loop are listed in its place.
  computing = (x for x in steps if x.eqn.primitive is not convert_element_type_p and not x.bodies)
  in_float16 = {x for x in computing if any(dtype_of(v) == np.float16 for v in x.eqn.outvars)}
  inner = [x for x in steps if is_of_inner_gradient(x.name_stack)]
  # `mpjax.scaled` multiplies the cotangent with which a backward pass begins. In a trainer it does
  # so by a number, and the optimizer only skips.
  skips = any(one.kind is not NoLossScale for one in scales)
  scaling = [x for x in steps if x.eqn.primitive is scale_value_p]
  by_number = {x for x in scaling if not x.eqn.params["divide"]}.difference(inner)
  is_safe = any(one.multiplies for one in scales) or (skips and by_number)
  if in_float16 and not is_safe:
    raise _wrong(
      "a loss scale, since the step computes in float16, whose gradients underflow",
      f"{scales[0].kind.__name__}()",
      "Use mpjax.loss_scaling(tx, mpjax.DynamicLossScale()), or bfloat16. If a trainer owns the "
      "step, use mpjax.SkipNonfinite() and give it the loss mpjax.scaled(loss_fn, 2.0**15).",
    )
  is_scaled = not set(inner).isdisjoint(scaling)
  return None if is_scaled else next((x.location for x in inner if x in in_float16), None)


def _check_skipped_step(
  call: "_Call", stated: Mapping[Names, int | str | None] | None, scales: Sequence[OwnedScale]
) -> None:
  """Raises unless a step scales its loss, and keeps everything when it is skipped."""
  # 1. At the scale 1 the step is applied. Otherwise it would be skipped whether or not it scales.
  first = call.run(call.arrays, call.scales, 1)
  # Of several optimizers a step may update one alone, which may be one without a loss scale.
  if not first.applied and any(one.kind is NoLossScale for one in scales):
    return
  if not all(first.applied.values()):
    raise _wrong(
      "a step that is applied at the loss scale 1",
      "an inf or NaN in its gradients or its loss",
      "Call it with another batch, or give mpjax.scaled a smaller number, if that is its scale. "
      "mpjax.check_skipped_steps says which gradient it is.",
    )
  # 2. Pair results with the arguments that they replace. What the step wrote to variables is their
  # new version. `jax.jit` drops writes, and a step under it returns states.
  if stated is not None:
    groups = groups_as_stated(stated, call.specs, first.results, call.roots)
  else:
    unwritten = {x: spec for x, spec in call.specs.items() if x not in first.written}
    groups = groups_by_tree(unwritten, first.results, call.roots.values())
    for arguments, results in groups:
      if len(arguments) < len(results):
        old = errors.listed([call.text((_WRITTEN, *x)) for x in arguments], most=3)
        new = errors.listed([call.text((_RETURNED, *x)) for x in results], most=3)
        raise _wrong(
          "one result with the names, shapes and dtypes of each argument that step replaces",
          f"several that fit: for the arguments {old} the results {new}",
          _STATE_THEM,
        )
  nodes = [*call.variables, *(node for group in groups for node in group.arguments)]
  replaced = [x for x in call.arrays if any(_is_below(x, node) for node in nodes)]

  # 3. With NaN gradients it is skipped.
  start = _with_other_numbers(call.arrays, replaced)
  skipped = _skipped_run(call, start, replaced)
  if lost := (first.applied.keys() or {*call.scales}) - skipped.applied.keys():
    raise _not_updated(call, min(lost)[-1])

  # 4. Each new version is its argument.
  if changed := _changed(call, groups, skipped):
    raise _changes_when_skipped(call, changed)


def _with_other_numbers(
  arrays: Mapping[Names, Array], replaced: Sequence[Names]
) -> dict[Names, Array]:
  """Returns the arrays, of which each replaced one has other numbers than all others, and no zeros.

  An average may begin as a copy of the parameters, and a multiple of 0 does not show a change.
  """
  has_masters = any(map(_is_master, arrays))
  start = dict(arrays)
  for i, path in enumerate(replaced):
    if is_inexact(x := arrays[path]):
      old = np.asarray(low_to_float32(x))
      # Factors from 0.5 to 1, so that no product overflows. `mpjax.apply_updates` makes a parameter
      # its rounded master, which it stays if both are doubled, since that rounds nothing.
      is_rounded = has_masters and (_is_master(path) or in_low_precision(x))
      factor = 2 if is_rounded else (1 + i / len(replaced)) / 2
      start[path] = full_like(x, jnp.asarray(factor * (old if np.any(old) else 0.6875)))
  return start


def _skipped_run(call: "_Call", start: Mapping[Names, Array], replaced: Sequence[Names]) -> "_Run":
  """Runs a step so that it is skipped, and raises if it is not; `replaced` have new versions."""
  # At the scale NaN no retry helps, and no limit makes the next scale a number. Each scale is NaN
  # alone, since another one may skip the step for it. Then all are, because state that several
  # optimizers share may move until all of them skip.
  runs = [*((scale,) for scale in call.scales), tuple(call.scales)]
  for chosen in dict.fromkeys(runs):
    skipped = call.run(start, chosen, np.nan)
    if skipped.unscaled:
      raise _not_scaled(call, skipped.unscaled[0][-1])
    if not any(skipped.applied.values()) and chosen == runs[-1]:
      return skipped
  # Where no scale makes gradients NaN, as under `SkipNonfinite`, the batch does, or a parameter:
  # first all arrays without a new version, then each array alone.
  states = [scale[:-2] for scale in call.scales]
  inexact = [x for x in call.arrays if is_inexact(call.arrays[x])]
  numbers = [x for x in inexact if not any(_is_below(x, state) for state in states)]
  for poison in [[x for x in numbers if x not in replaced], *([x] for x in numbers)]:
    values = {**start} | {x: full_like(start[x], np.nan) for x in poison}
    skipped = call.run(values, call.scales, np.nan)
    if not any(skipped.applied.values()):
      return skipped
  raise _wrong(
    "a step that is skipped when its batch or a parameter is NaN",
    "an applied one in each case, so that nothing was checked",
    "Pass update the gradients of the loss. SkipNonfinite skips by these, and by loss=.",
  )


def _changed(call: "_Call", groups: Sequence["Group"], skipped: "_Run") -> dict[Names, bool]:
  """Returns the places that a skipped step does not keep, and whether they held inexact numbers."""
  # Integers beside the optimizer's state may count all steps: a cursor, the number of batches.
  around = {scale[:n] for scale in call.scales for n in range(len(scale))}
  kept = {
    path: _digest(x)
    for path, x in skipped.given.items()
    if path[:-1] not in call.scales and (path[:-1] not in around or is_inexact(x))
  }
  trees, found, new = _trees_of(call.specs), _trees_of(skipped.results), skipped.digests

  def differing(old: Names, result: Names) -> dict[Names, Names]:
    names = [x for x, _ in sorted(trees[old] & found[result])]
    pairs = {(_RETURNED, *result, *x): (*old, *x) for x in names}
    return {place: x for place, x in pairs.items() if x in kept and kept[x] != new[place]}

  # A variable may hold no array after the step.
  variables = {(_WRITTEN, *x): x for x in kept if x in call.variables}
  changed = {place: x for place, x in variables.items() if new.get(place, kept[x]) != kept[x]}
  for group in groups:
    # Each result has to be one of the arguments. The pairs that differ least come first.
    pairs = {pair: differing(*pair) for pair in itertools.product(*group)}
    while pairs:
      old, result = nearest = min(pairs, key=lambda pair: len(pairs[pair]))
      changed |= pairs[nearest]
      pairs = {x: more for x, more in pairs.items() if x[0] != old and x[1] != result}
  return {place: is_inexact(skipped.given[x]) for place, x in changed.items()}


# The pairs of arguments and results.


class Group(NamedTuple):
  """Arguments with equal trees, and the results with this tree, which have to equal arguments."""

  arguments: list[Names]
  results: list[Names]


def groups_by_tree(
  arguments: Mapping[Names, Spec], results: Mapping[Names, Spec], roots: Iterable[Names]
) -> list[Group]:
  """Returns the arguments for which a result has an equal tree, or else parts for which one has.

  `roots` are the paths of entire arguments.
  """
  trees, groups, free = _trees_of(arguments), list[Group](), set(results)
  # Arguments and results that may be versions of each other have one key.
  fitting = collections.defaultdict[tuple[Names, Tree], list[Names]](list)
  for node, tree in _trees_of(results).items():
    fitting[_pair_key(tree, node)].append(node)
  waiting = collections.defaultdict[tuple[Names, Tree], list[Names]](list)
  for root in roots:
    if root in trees:
      waiting[_pair_key(trees[root], root[-1:])].append(root)
  while waiting:
    # Start with the largest. A larger tree is a safer match than one of its parts.
    key = max(waiting, key=lambda one: len(one[1]))
    alike, (_, tree) = waiting.pop(key), key
    leaves = {node: {(*node, *names) for names, _ in tree} for node in fitting[key]}
    if found := [node for node, below in leaves.items() if below <= free]:
      groups.append(Group(alike, found))
      free.difference_update(*(leaves[node] for node in found))
      continue
    # No result has this tree, so look for the parts of these arguments.
    children = {names[:1] for names, _ in tree if names}
    for part in sorted((*node, *child) for node in alike for child in children):
      # Parts of a tuple, such as a batch, are arrays without names. Equal shapes mean little there.
      if _last_name(part) or not _is_leaf(trees[part]):
        waiting[_pair_key(trees[part], part)].append(part)
  return groups


def _pair_key(tree: Tree, place: Names) -> tuple[Names, Tree]:
  """Returns what an argument and its new version share: the tree, and the name of an array."""
  if not _is_leaf(tree):
    return (), tree
  # All arrays of one shape have the same tree, and only the name tells a mean from a variance. A
  # number without a name is a loss or a metric more often than a state. It needs the same place.
  ((_, (shape, _)),) = tree
  return _last_name(place) or (() if shape else place), tree


def groups_as_stated(
  stated: Mapping[Names, int | str | None],
  arguments: Mapping[Names, Spec],
  results: Mapping[Names, Spec],
  roots: Mapping[int | str, Names],
) -> list[Group]:
  """Returns each result with the argument that the user has stated; raises if they do not fit."""
  trees, new, nothing = _trees_of(arguments), _trees_of(results), Tree()
  groups = []
  for result, argument in stated.items():
    if argument is None:
      continue
    if argument not in roots:
      expected = f"positions or names of arguments: {', '.join(map(repr, roots))}"
      raise errors.MpjaxValueError(_STATED, expected=expected, got=repr(argument), fix=_STATE_THEM)
    # The argument and the result are both empty, like the statistics of a model that has none.
    if roots[argument] not in trees and result not in new:
      continue
    # An entry inside of a result is for the part of the argument that is at the same place there.
    places = [(*roots[argument], *result[n:]) for n in range(len(result) + 1)]
    same = {x: trees.get(x, nothing) & new.get(result, nothing) for x in places}
    part = max(places, key=lambda x: len(same[x]))
    if not same[part]:
      raise errors.MpjaxValueError(
        _STATED,
        expected=f"a new version of argument {argument} at {'/'.join(result) or 'the root'}",
        got="no array there with the name, shape and dtype of one in that argument",
        fix="In returns=, give each result the position of the argument it replaces, or None.",
      )
    groups.append(Group([part], [result]))
  # An entry covers all leaves below it.
  without = ["/".join(x) for x in results if not any(_is_below(x, node) for node in stated)]
  if without:
    expected, got = "an entry for each result", f"none for {errors.listed(without, most=3)}"
    raise errors.MpjaxValueError(_STATED, expected=expected, got=got, fix=_STATE_THEM)
  return groups


def _trees_of(specs: Mapping[Names, Spec]) -> dict[Names, Tree]:
  """Returns the tree below each node, from the root to the leaves."""
  below: dict[Names, list[tuple[Names, Spec]]] = {}
  for names, spec in specs.items():
    # Every prefix of a leaf's path is a node.
    for n in range(len(names) + 1):
      below.setdefault(names[:n], []).append((names[n:], spec))
  return {node: frozenset(tree) for node, tree in below.items()}


def _is_leaf(tree: Tree) -> bool:
  return any(names == () for names, _ in tree)


def _last_name(place: Names) -> Names:
  """Returns the last name and the positions behind it; nothing if there are only positions."""
  named = [i for i, name in enumerate(place) if not name.isdigit()]
  return place[named[-1] :] if named else ()


# The runs.

_WRITTEN, _RETURNED = "written", "returned"
"""The first name of a place: in a variable of the argument with this path, or in the results."""


class _Run(NamedTuple):
  """What is known after a step.

  Attributes:
    given: the arrays of its arguments.
    digests: the digest of each array in variables and results, by place.
    results: the shape and dtype of each array that it returned.
    written: the variables of arguments to which it wrote.
    applied: whether a step was applied, for each loss scale that was updated, by place.
    unscaled: the NaN scales with which a step was applied.
  """

  given: Mapping[Names, Array]
  digests: Mapping[Names, int]
  results: Mapping[Names, Spec]
  written: Collection[Names]
  applied: Mapping[Names, bool]
  unscaled: Sequence[Names]


class _Call:
  """A call of a step, whose arrays can be replaced.

  Attributes:
    arguments: all of them as one tree. Keyword arguments are in a dict behind the others.
    roots: the path of each argument, by its position or its name.
    arrays: the arrays among them, also those that variables hold, by path.
    specs: the shape and dtype of each array and Python number.
    scales: the paths of the loss scales that have numbers.
    variables: the paths of the arrays that variables hold.
    in_variables: whether a loss scale is among these, as that of an `nnx.Optimizer` is.
  """

  def __init__(self, step: Function, args: Args, kwargs: Kwargs) -> None:
    self._step = step
    self.arguments = (*args, kwargs)
    self.roots: dict[int | str, Names] = {i: (str(i),) for i in range(len(args))}
    self.roots |= {name: (str(len(args)), name) for name in kwargs}
    self._leaves = {path: x for path, _, x in leaves_of(self.arguments)}
    self._texts = {(_WRITTEN, *path): text for path, text, _ in leaves_of(self.arguments)}
    # A tied variable is at several paths, and belongs to the first. Other leaves are their own.
    first = {id(x): path for path, x in reversed(self._leaves.items())}
    self._owners = {
      path: first[id(x)] if is_nnx_variable(x) else path for path, x in self._leaves.items()
    }
    own = {path: x for path, x in self._leaves.items() if self._owners[path] == path}
    # Python numbers have no dtype, so the step gets them as they are.
    held = {path: raw_value(x) for path, x in own.items()}
    self.arrays = {path: jnp.asarray(x) for path, x in held.items() if hasattr(x, "dtype")}
    self.specs = {path: (x.shape, x.dtype) for path, x in _as_arrays(own).items()}
    self.scales = _scales_in(self.arrays)
    self.variables = [path for path in self.arrays if is_nnx_variable(self._leaves[path])]
    self.in_variables = any(path[:-1] in self.scales for path in self.variables)

  def text(self, place: Names) -> str:
    """Returns a place, or a node above some, as Python writes it."""
    text = next(text for x, text in self._texts.items() if _is_below(x, place))
    return "".join(text[: len(place) - 1]) or "the whole result"

  def run(self, arrays: Mapping[Names, Array], chosen: Collection[Names], number: float) -> _Run:
    """Runs the step on other arrays, at a value of some loss scales. The others are 1."""
    given = dict(arrays)
    for scale in self.scales:
      # A step that reads the old `finite` then applies what it should skip.
      fields = {"scale": number if scale in chosen else 1, "total": 0, "skipped": 0, "finite": True}
      for field, x in fields.items():
        given[(*scale, field)] = full_like(given[(*scale, field)], x)
    after, written = self.outcome(given)
    applied, unscaled = dict[Names, bool](), list[Names]()
    for new in _scales_in(after):
      scale, total, skipped = (np.asarray(after[(*new, x)]) for x in ("scale", "total", "skipped"))
      # The lanes of a vmapped state count alike.
      if np.max(total) > 0:
        applied[new] = bool(np.any(total > skipped))
        # A step that is given its scale elsewhere, and sets it, returns a number in place of NaN.
        if applied[new] and np.all(np.isnan(scale)) and read_kind(new[-1]) is not SkipNonfinite:
          unscaled.append(new)
    digests = {place: _digest(x) for place, x in after.items()}
    results = {x[1:]: (y.shape, y.dtype) for x, y in after.items() if x[0] == _RETURNED}
    return _Run(given, digests, results, written, applied, unscaled)

  def outcome(self, arrays: Mapping[Names, Array]) -> tuple[dict[Names, Leaf], set[Names]]:
    """Calls the step with copies of arrays.

    Returns:
      The arrays in variables and results, by place, and the variables to which the step wrote.
    """
    # The step may donate its arguments, and writes to variables, which must not be the user's.
    given = {path: jnp.copy(x) for path, x in arrays.items()}
    new = {}
    for path, leaf in self._leaves.items():
      held = [given[path]] if path in given else jax.tree.leaves(leaf)
      new[path] = jax.tree.structure(leaf).unflatten(held)
    treedef = jax.tree.structure(self.arguments, is_leaf=is_nnx_variable)
    *args, kwargs = treedef.unflatten(new[path] for path in self._owners.values())
    returned = {(_RETURNED, *x): (text, y) for x, text, y in leaves_of(self._step(*args, **kwargs))}
    self._texts |= {place: text for place, (text, _) in returned.items()}
    # An argument to which the step wrote need not be written to as a whole.
    unwritten = set(map(id, given.values()))
    root_of = {x: next(y for y in self.roots.values() if _is_below(x, y)) for x in self.variables}
    roots = {root_of[x] for x in self.variables if id(raw_value(new[x])) not in unwritten}
    after = {(_WRITTEN, *path): new[path] for path in self.variables}
    after |= {place: x for place, (_, x) in returned.items()}
    return _as_arrays(after), {x for x in self.variables if root_of[x] in roots}


def _digest(x: Leaf) -> int:
  """Returns a hash of the bits of an array. NaN equals itself then, and the sign of zero counts."""
  return hash(np.asarray(jax.random.key_data(x) if is_key(x.dtype) else x).tobytes())


def _scales_in(paths: Iterable[Names]) -> list[Names]:
  """Returns the paths of the loss scales that have numbers."""
  # Other trees may have a key `loss_scale`.
  ends = [(path, ("", "", *path)[-3:]) for path in paths]
  return [
    path[:-1] for path, end in ends if end[::2] == ("loss_scale", "skipped") and is_label(end[1])
  ]


def _is_master(path: Names) -> bool:
  """Whether a path is that of a master of `mpjax.master_weights`."""
  return MasterWeightsState._fields[0] in path


def _as_arrays(leaves: Mapping[Names, Leaf]) -> dict[Names, Leaf]:
  """Returns the arrays, and Python numbers as arrays: `TrainState.step` begins as an int."""
  held = {path: raw_value(x) for path, x in leaves.items()}
  # An int that is too large for int32 is a time in nanoseconds or a seed, and no state.
  fits = {path: x for path, x in held.items() if not isinstance(x, int) or abs(x) <= INT32_MAX}
  return {path: y for path, x in fits.items() if hasattr(y := strong(x), "dtype")}


def leaves_of(
  tree: PyTree, is_leaf: Callable[[object], bool] = is_nnx_variable
) -> Iterator[tuple[Names, Path, Leaf]]:
  """Yields the names on the path to each leaf, its path as Python writes it, and the leaf."""
  for keys, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
    path = tuple(jax.tree_util.keystr((key,)) for key in keys)
    # `.kernel` and `['kernel']` are both kernel, and `[0]` is 0.
    yield tuple(x[1:] if x.startswith(".") else x[1:-1].strip("'\"") for x in path), path, x


def _is_below(path: Names, node: Names) -> bool:
  """Whether a path is that of a node or of a part of it."""
  return path[: len(node)] == node


# The errors.


def _wrong(expected: str, got: str, fix: str) -> errors.MpjaxValueError:
  return errors.MpjaxValueError(WHERE, expected=expected, got=got, fix=fix)


def _not_scaled(call: "_Call", label: str) -> errors.MpjaxValueError:
  """Returns the error for a step that is applied at the scale NaN."""
  library, state, arguments = "jax", "opt_state", "params, batch"
  if call.in_variables:
    library, state, arguments = "nnx", "optimizer", "model, batch"
  if loss_name := label.rpartition(":")[0]:
    state += f", name={loss_name!r}"
  return _wrong(
    f"a step that is skipped when the loss scale {label!r} is NaN",
    "an applied one: gradients that were never scaled, are all zero, or had NaN replaced",
    f"Write {library}.value_and_grad(mpjax.scaled(loss_fn, {state}))({arguments}). If a number "
    "scales the loss, as in a trainer, the scale is mpjax.SkipNonfinite().",
  )


def _not_updated(call: "_Call", label: str) -> errors.MpjaxValueError:
  """Returns the error for a step that drops the new loss scale."""
  fix = "Return the opt_state that tx.update of mpjax.loss_scaling returned, and never select it."
  if call.in_variables:
    fix = (
      "Call optimizer.update(model, grads), and compile step by nnx.jit: jax.jit drops writes, and "
      "a step under it returns nnx.state((model, optimizer))."
    )
  expected = f"a step that returns the new loss scale {label!r}, when it is skipped too"
  return _wrong(expected, "none, or the old one", fix)


def _changes_when_skipped(call: "_Call", changed: Mapping[Names, bool]) -> errors.MpjaxValueError:
  """Returns the error for a skipped step that changes some of its arguments."""
  # Statistics are named first. Keys and counts of random numbers follow from the same mistake.
  first, *others = map(call.text, sorted(changed, key=lambda place: not changed[place]))
  fix = "Keep the old one by mpjax.keep_if_skipped."
  if call.in_variables:
    fix = "Wrap it by @mpjax.nnx.atomic_step."
  if not any(changed.values()):
    fix += " A key that may move belongs beside the optimizer's state."
  return _wrong(
    "a step that changes nothing when it is skipped",
    f"another {first}" + (f" (and {errors.listed(others, most=3)})" if others else ""),
    f"{fix} If a result is no new version of an argument, or may move, say so: "
    "mpjax.check_loss_scaling(step, returns=...), with None for it.",
  )
