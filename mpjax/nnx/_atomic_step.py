"""A step that writes to NNX objects, and is applied or skipped as a whole."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from mpjax._core.errors import (
  MpjaxTypeError,
  MpjaxValueError,
  check_callable,
  check_scalar,
  listed,
)
from mpjax._core.frameworks import is_nnx_variable
from mpjax._core.leaves import raw_value, set_raw_value
from mpjax._core.trees import pick, same_objects, tree_differences
from mpjax._core.types import Array, P, PyTree
from mpjax._optim.find_scale import OwnedScale, scales_in, store_scale
from mpjax._optim.loss_scale import INT32_MAX, UPDATE_OBSERVER, as_skipped
from mpjax._optim.states import LossScaleState
from mpjax.nnx._link import model_of

R = TypeVar("R")

Variable: TypeAlias = nnx.Variable[Any]

_WHERE = "mpjax.nnx.atomic_step(step)"


def atomic_step(step: Callable[P, R]) -> Callable[P, R]:
  """Make `step` restore everything that it wrote if one of its updates is skipped.

  An optimizer that skips its update keeps parameters and optimizer state. The step may have written
  more: batch statistics, counts of random numbers, `optimizer.step`, or the updates of another
  optimizer. All of these get their old values back, bit for bit. Only loss scales and their
  counters move.

  Variables that the step replaces, adds or deletes are restored too. Under `nnx.jit` tracing
  decides which variables exist. There a replaced variable gets its old value back, a new one stays,
  and a deleted one stays deleted.

  If the step makes several updates, read metrics after the call, in a function around it. Inside of
  the step an update may look applied, although a later one is skipped, which reverts both.

  Args:
    step: a function of models, of an `nnx.Optimizer` around `mpjax.loss_scaling`, and of anything
      else, in any order. Put `nnx.jit` around the result: `jax.jit` drops what a step writes.

  Returns:
    A function that returns what `step` does.

  Raises:
    MpjaxTypeError: `step` is no function. When called: no argument holds a loss scale.
    MpjaxValueError: when called: the step replaced a loss scale. Under `nnx.jit`: it changed the
      structure, a shape or a dtype of a variable's value.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> from flax import nnx
  >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
  >>> optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(0.1)), wrt=nnx.Param)
  >>> @nnx.jit
  ... @mpjax.nnx.atomic_step
  ... def step(model, optimizer, x):
  ...   grad_fn = nnx.value_and_grad(mpjax.scaled(lambda model: jnp.mean(model(x) ** 2), optimizer))
  ...   loss, grads = grad_fn(model)
  ...   optimizer.update(model, grads)
  ...   return loss
  >>> loss = step(model, optimizer, jnp.full((2, 3), jnp.inf))
  >>> print(model.mean[...], optimizer.step[...], mpjax.step_applied(optimizer))
  [0. 0. 0.] 0 False
  """
  fix = "Write it above the step: @nnx.jit, @mpjax.nnx.atomic_step, def step(model, optimizer, x)."
  check_callable(step, _WHERE, expected="a function", fix=fix)

  @functools.wraps(step)
  def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
    arguments = {**{f"args[{i}]": x for i, x in enumerate(args)}, **kwargs}
    # 1. Note what the arguments hold now. The step writes to these very objects.
    before, scales = _state_of(arguments), _scales_of(arguments)
    states = [one.state for one in scales]
    # 2. Run the step, and note which counts each update reads and returns. An atomic step inside
    # of it notes its own.
    counts: _Counts = []
    outer = UPDATE_OBSERVER.set(lambda *pair: counts.append(pair))
    try:
      result = step(*args, **kwargs)
    finally:
      UPDATE_OBSERVER.reset(outer)
    # 3. A step is applied if each of its updates is.
    updates = _updates_of(scales, states, _scales_of(arguments), counts)
    applied = jnp.asarray(True)
    for each in updates:
      applied &= each.applied
    fix = "Reduce it first, or jax.vmap the entire call: one flag decides for all leaves."
    check_scalar(applied, _WHERE, expected="a scalar flag", fix=fix)
    # 4. Under `nnx.jit` both outcomes are compiled: each variable selects its value. Outside,
    # restore only if the step was skipped.
    if isinstance(applied, Tracer):
      _select(applied, before, arguments, updates)
    elif not applied:
      before.restore()
      for each in updates:
        # The restore has also put back the old scale and counters. These do move.
        store_scale(each.before, each.skipped)
    return result

  return wrapper


_Container: TypeAlias = list[Any] | dict[Any, Any]


class _State(NamedTuple):
  """The objects of NNX among the arguments of a step, as they were at one moment."""

  contents: list[tuple[_Container, _Container]]  # containers, each with a copy
  variables: dict[str, Variable]  # by path: one that is tied has several
  values: dict[int, tuple[Variable, PyTree]]  # by the identity of the variable

  def restore(self) -> None:
    """Gives containers and modules what they held, and variables the values that they had."""
    # Containers keep their identity, since others may hold them: only their content is replaced.
    for container, content in self.contents:
      container.clear()
      if isinstance(container, list):
        container.extend(content)
      else:
        container.update(content)
    for variable, value in self.values.values():
      _put(variable, value)


def _state_of(arguments: Mapping[str, PyTree]) -> _State:
  """Returns the present state of the objects of NNX among the arguments of a step."""
  met: dict[int, object] = {}
  nodes = [pair for name, x in arguments.items() for pair in nodes_in(x, name, met)]
  variables = {path: x for path, x in nodes if is_nnx_variable(x)}
  modules = [x for _, x in nodes if isinstance(x, nnx.Pytree)]
  # A view passes attributes that are set on it to the user's module, so that is written too.
  behind = [model for module in modules if (model := model_of(module)) is not None]
  attributes: list[_Container] = [vars(module) for module in (*modules, *behind)]
  containers = [x for _, x in nodes if isinstance(x, (list, dict))] + attributes
  return _State(
    contents=[(x, copy.copy(x)) for x in containers],
    variables=variables,
    # Copy the containers in a value, since a dict or list may be changed in place. Arrays are
    # shared.
    values={id(x): (x, jax.tree.map(lambda y: y, raw_value(x))) for x in variables.values()},
  )


def nodes_in(tree: PyTree, path: str, met: dict[int, object]) -> Iterator[tuple[str, Any]]:
  """Yields each node of a tree, and each variable in it with all attributes that hold it.

  `met` has the containers that were searched before. A container that is shared is searched once.
  """
  # `nnx.iter_graph` yields one path of each object. Here all paths count, because a step may
  # replace a tied variable at one of them.
  if isinstance(tree, jax.Array):
    return
  if is_nnx_variable(tree):
    yield path, tree
    return
  if id(tree) in met:
    return
  met[id(tree)] = tree
  if isinstance(tree, nnx.State):
    # Indexing an `nnx.State` creates new objects. The mapping holds its variables.
    tree = tree.raw_mapping
  yield path, tree
  if isinstance(tree, nnx.Pytree):
    parts = {f".{name}": x for name, x in vars(tree).items()}
  else:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    parts = {jax.tree_util.keystr(keys): x for keys, x in leaves}
  for key, part in parts.items():
    yield from nodes_in(part, path + key, met)


def _put(variable: Variable, value: PyTree) -> None:
  """Stores a value in a variable that does not hold it already."""
  leaves, structure = jax.tree.flatten(value)
  held, held_structure = jax.tree.flatten(raw_value(variable))
  # A write that changes nothing may still be refused: NNX checks the trace that a variable is from.
  if structure != held_structure or not same_objects(leaves, held):
    set_raw_value(variable, value)


def _scales_of(arguments: PyTree) -> list[OwnedScale]:
  """Returns the loss scales that a step can write to."""
  scales = [one for one in scales_in(arguments) if one.in_variables]
  if not scales:
    fix = (
      "Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param). In bfloat16 leave out "
      "atomic_step, or pass mpjax.SkipNonfinite() to loss_scaling."
    )
    expected, got = "an optimizer with a loss scale among the arguments", "none"
    raise MpjaxTypeError(_WHERE, expected=expected, got=got, fix=fix)
  return scales


_Counts: TypeAlias = list[tuple[Array, Array]]


class _Update(NamedTuple):
  """One loss scale before and after a step."""

  before: OwnedScale
  old: LossScaleState
  after: OwnedScale
  new: LossScaleState
  in_place: bool  # whether the update itself has kept the optimizer's state where it skipped

  @property
  def applied(self) -> Array:
    """Whether the step was applied, as far as this scale knows: none of its updates was skipped."""
    # A count that has stopped at its largest number says nothing. Then the last update decides.
    is_known = self.old.skipped < INT32_MAX
    return (self.new.skipped == self.old.skipped) & (is_known | self.new.applied)

  @property
  def skipped(self) -> LossScaleState:
    """The numbers after a step that is skipped: an update that is taken back counts as skipped."""
    # The step is skipped because another update was, or one of several.
    return self.new if self.in_place else as_skipped(self.old, self.new)


def _updates_of(
  before: list[OwnedScale],
  old: list[LossScaleState | None],
  after: list[OwnedScale],
  counts: _Counts,
) -> list[_Update]:
  """Returns the loss scales before and after a step, without those of `NoLossScale`.

  `counts` has the number of steps that each update has read, and the one that it has returned.
  """
  # The step has replaced an optimizer state. Its scales do not pair with the old ones.
  labels, now = ([one.label for one in scales] for scales in (before, after))
  if labels != now:
    expected = f"a step that keeps its loss scales, {', '.join(labels)}"
    fix = (
      "Keep optimizer.opt_state in its variables: optimizer.update(model, grads) writes to them."
    )
    raise MpjaxValueError(_WHERE, expected=expected, got=", ".join(now), fix=fix)
  updates: list[_Update] = []
  for was, a, one in zip(before, old, after, strict=True):
    b = one.state
    if a is not None and b is not None:
      # A single optimizer that was updated once has kept its own state if it was skipped. These
      # very arrays show that, see `UPDATE_OBSERVER`.
      is_one_update = any(x is a.total and y is b.total for x, y in counts)
      updates.append(_Update(was, a, one, b, in_place=len(before) == 1 and is_one_update))
  return updates


def _select(
  applied: Array, before: _State, arguments: Mapping[str, PyTree], updates: Sequence[_Update]
) -> None:
  """Gives variables their values from before the step where it was not applied."""
  after = _state_of(arguments)
  # The state of an optimizer that has selected by itself is right already. Scales are written last.
  own = [each.after.owner if each.in_place else each.after.numbers for each in updates]
  kept = set(map(id, jax.tree.leaves(own, is_leaf=is_nnx_variable)))
  # A tied variable is one, whatever the number of its paths.
  paths: dict[int, list[str]] = {}
  for path, variable in after.variables.items():
    paths.setdefault(id(variable), []).append(path)
  variables: list[Variable] = []
  news: list[PyTree] = []
  olds: list[PyTree] = []
  problems: list[str] = []
  for key, (variable, new) in after.values.items():
    # The variables that were at these paths. One that is at no old path was moved or is new: then
    # look for its own old value. A new variable has none.
    held = [before.variables[path] for path in paths[key] if path in before.variables]
    identities = dict.fromkeys(id(x) for x in held or [variable])
    values = [before.values[x][1] for x in identities if x in before.values]
    if not values or key in kept:
      continue
    variables.append(variable)
    news.append(new)
    olds.append(values[0])
    # `jnp.where` cannot choose between values of another structure, shape or dtype.
    if len(values) > 1:
      texts = [f"one variable instead of {len(values)}"]
    else:
      texts = tree_differences(values[0], new, dtypes=True)
    where = " and ".join(sorted(paths[key]))
    problems += [f"{where}: {text.removesuffix(' at the root')}" for text in texts]
  if problems:
    raise MpjaxValueError(
      _WHERE,
      expected="variables whose values keep their structure, shapes and dtypes",
      got=listed(problems),
      fix="Under nnx.jit a skipped step can only restore a value of the same structure, shapes and "
      "dtypes. Pop what model.sow has stored, before or in the step: nnx.pop(model, "
      "nnx.Intermediate).",
    )
  # In one call, so that variables of one shape share a mask, see `masks_of`.
  for variable, value in zip(variables, pick(applied, news, olds), strict=True):
    _put(variable, value)
  for each in updates:
    store_scale(each.after, pick(applied, each.new, each.skipped))
