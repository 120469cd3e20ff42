"""The checks that the wrappers of optimizers share."""

import collections
import inspect
import itertools
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from mpjax._core.errors import (
  REFUSALS,
  MpjaxError,
  MpjaxTypeError,
  MpjaxValueError,
  check_type,
  listed,
)
from mpjax._core.trees import is_array_like, tree_differences
from mpjax._core.types import Grads, OptState, Params, PyTree, Updates, is_inexact
from mpjax._optim.optimizer_trees import key_text, map_states, nodes_of
from mpjax._optim.states import MasterWeightsState

T = TypeVar("T")

AxisName: TypeAlias = Hashable | Sequence[Hashable]


def axes_of(axis_name: AxisName | None) -> tuple[Hashable, ...]:
  """Returns the mapped axes that an argument `axis_name` names."""
  if axis_name is None:
    return ()
  return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def check_axes(axes: Iterable[Hashable], where: str, *, call: str, fix: str) -> None:
  """Raises unless all `axes` are mapped where `call` is called: `pmin` has an AssertionError."""
  for name in axes:
    try:
      # Outside of a mapped function the axis has no size. JAX says so in its own terms.
      jax.lax.axis_size(name)
    except (NameError, ValueError) as error:  # An integer is an axis of no mesh.
      names = jax.sharding.get_abstract_mesh().axis_names
      expected = f"the name of an axis that is mapped where {call} is called"
      got = f"none of that name ({error}; the axes of the mesh here: {names})"
      fix = f"{fix} leave axis_name out: one jitted function already sees all devices."
      raise MpjaxValueError(where, expected=expected, got=got, fix=fix) from error


def check_inner(inner: object, where: str) -> optax.GradientTransformationExtraArgs:
  """Returns `inner` as a wrapper calls it; raises if it is no optax transformation.

  It takes any extra arguments, and where it fails it says for which parameters, or whose state.
  """
  kind, expected = optax.GradientTransformation, "an optax.GradientTransformation"
  fix = "Pass an optimizer such as optax.adamw(1e-3), or MultiSteps(...).gradient_transformation()."
  inner = check_type(inner, kind, where, expected=expected, fix=fix)
  # The first three parameters of `update` are updates, state and params. The others are the extra
  # arguments that it names. The class does not tell whether it takes any: `MultiSteps` does, and is
  # no GradientTransformationExtraArgs.
  parameters = list(inspect.signature(inner.update).parameters.values())
  takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
  names = {p.name for p in parameters[3:]}
  overwritten = "_overwrite_with_gradient"

  def init(params: Params) -> OptState:
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
      # The collection of Flax's float8 layers: its gradient is its next value.
      if any(getattr(entry, "key", None) == overwritten for entry in path):
        raise MpjaxValueError(
          f"{where}.init(params)",
          expected="parameters that follow their gradients",
          got=f"float8 statistics, which are replaced by theirs, at {jax.tree_util.keystr(path)}",
          fix='Give tx variables["params"] and grads["params"] alone, and take the rest over by '
          f"mpjax.keep_if_skipped(opt_state, grads[{overwritten!r}], variables[{overwritten!r}]).",
        )
    try:
      return inner.init(params)
    # Errors of wrappers inside say more than the one below could.
    except MpjaxError:
      raise
    except ValueError as error:
      raise _refused_parameters(inner, params, f"{where}.init(params)", error) from error

  def update(
    updates: Grads, state: OptState, params: Params = None, **extra_args: PyTree
  ) -> tuple[Updates, OptState]:
    # optax asks optimizers to accept and ignore unknown extra arguments. `optax.contrib.sam` names
    # only its own, and would raise.
    taken = {name: x for name, x in extra_args.items() if takes_any or name in names}
    try:
      return inner.update(updates, state, params, **taken)
    except MpjaxError:
      raise
    except REFUSALS as error:
      # optax fails inside some `tree.map` if a state is of another optimizer. Say so, if it is.
      like = updates if params is None else params
      refuse_other_state(inner, like, state, f"{where}.update(state)", error)
      raise

  return optax.GradientTransformationExtraArgs(init, update)


def _refused_parameters(
  inner: optax.GradientTransformation, params: Params, where: str, error: ValueError
) -> MpjaxValueError:
  """Returns the error of an `inner` that does not take these parameters."""
  # optax names the labels of a `multi_transform` that lack a transformation, but not the paths. So
  # try each parameter separately, with None for the others. If even None everywhere fails, the
  # labels are a fixed tree, and no single parameter is at fault.
  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  nothing = [None] * len(leaves)
  bad = []
  if _first_state(inner, treedef.unflatten(nothing)) is not None:
    for position, (path, x) in enumerate(leaves):
      alone = [*nothing[:position], x, *nothing[position + 1 :]]
      if _first_state(inner, treedef.unflatten(alone)) is None:
        bad.append(key_text(path))
  # optax wraps its messages over several lines. An error here is one line.
  return MpjaxValueError(
    where,
    expected="parameters that inner takes",
    got=f"{' '.join(str(error).split())} (for {', '.join(bad) or 'all of them together'})",
    fix="Give each label of optax.multi_transform a transformation. If a function computes the "
    "labels, this error names the paths. In a fixed tree of labels, search for them.",
  )


def refuse_other_state(
  inner: optax.GradientTransformation,
  params: Params,
  state: OptState,
  where: str,
  cause: Exception | None,
) -> None:
  """Raises if a state is not like that which `inner` makes; says nothing if that cannot be told."""
  # Leave masters out of the comparison. They are compared with the parameters elsewhere, and
  # wrappers around add and mark them.

  def bare(tree: OptState) -> OptState:
    return map_states(lambda x: MasterWeightsState(None, x.inner_state), tree)

  # If `init` fails there is nothing to compare with, and the caller raises its own error.
  own = bare(_first_state(inner, params))
  problems = [] if own is None else tree_differences(own, bare(state), dtypes=False)
  if problems:
    expected = "the state that init of this very transformation created"
    got = f"one of another optimizer, or of other parameters: {listed(problems, most=4)}"
    fix = "Pass the tx that made it, wrapped by mpjax.loss_scaling and configured alike, and the "
    fix += "params that it was made for, or make a new state."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix) from cause


def _first_state(inner: optax.GradientTransformation, params: Params) -> OptState:
  """Returns the abstract state that `init` creates; None if `init` refuses these parameters."""
  try:
    with warnings.catch_warnings(action="ignore"):  # The real `init` has warned already.
      return jax.eval_shape(inner.init, params)
  except REFUSALS:
    return None


def check_state(state: object, kind: type[T], where: str) -> T:
  """Raises unless `state` is a `kind`, which `init` of the same transformation makes."""
  fix = "Pass the opt_state of this very transformation; restore checkpoints into tx.init(params)."
  return check_type(state, kind, where, expected="the state that init created", fix=fix)


def check_params(params: Params, where: str) -> None:
  """Raises if `update` was not given the parameters."""
  if params is None:
    expected = "the parameters as the third argument of update"
    fix = "Write tx.update(grads, opt_state, params)."
    raise MpjaxValueError(where, expected=expected, got="None", fix=fix)


def refuse_integers(params: Params, where: str) -> None:
  """Raises if a leaf of `params` is an array that cannot be trained."""
  integers = [
    f"{jnp.result_type(x)} at {key_text(path)}"
    for path, x in jax.tree_util.tree_leaves_with_path(params)
    if is_array_like(x) and not is_inexact(x)
  ]
  if integers:
    fix = "Keep counters, tables of integers and keys out of params: in model_state, say. Of an "
    fix += "Equinox model pass equinox.partition(model, equinox.is_inexact_array)[0]."
    raise MpjaxTypeError(where, expected="floating parameters", got=listed(integers), fix=fix)


PICKS_PARTS = (optax.MaskedState, optax.PartitionState, optax.contrib.SplitRealAndImaginaryState)
"""The states of the wrappers of optax that only pick parts of a tree, and count nothing."""

_KEEPS_UPDATES = (
  *PICKS_PARTS,
  *(optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState),
  *(optax.MultiStepsState, optax.ApplyIfFiniteState, optax.ConditionallyMaskState),
)
"""The states of those wrappers of optax that return the updates of their inner optimizer, or zeros
while its state stays."""


def refuse_around_masters(opt_state: OptState, where: str, *, in_container: bool = False) -> None:
  """Raises if a transformation behind or around `mpjax.master_weights` may change its updates.

  The masters have moved by the full updates, and decide what the parameters become. So only
  wrappers that are known to pass updates on may be around. With `in_container` a class that is
  neither of optax nor of mpjax may be a container of the state, such as a `TrainState`. Otherwise
  it is the state of a wrapper that nobody knows.
  """
  if isinstance(opt_state, MasterWeightsState) or not nodes_of(opt_state, MasterWeightsState):
    return
  # The children of this node. Each is visited below.
  parts = jax.tree.leaves(opt_state, is_leaf=lambda x: x is not opt_state)
  kind, got = type(opt_state), ""
  library = kind.__module__.partition(".")[0]
  is_known = isinstance(opt_state, (list, Mapping, *_KEEPS_UPDATES)) or library == "mpjax"
  if kind in (tuple, collections.OrderedDict):
    # The state of a chain has the states of its transformations in their order.
    followed = any(nodes_of(part, MasterWeightsState) for part, _ in itertools.pairwise(parts))
    got = "one in a chain before another transformation" if followed else ""
  elif not is_known and (library == "optax" or not in_container):
    got = f"one inside of the state {library}.{kind.__name__}"
  if got:
    raise MpjaxTypeError(
      where,
      expected="mpjax.master_weights around the entire optimizer, or last in its chain",
      got=f"{got}, whose changes of updates the masters would not follow",
      fix="Put all of it inside, mpjax.master_weights(optax.chain(...)). A wrapper of yours works "
      "inside too. A transformation of other parameters, such as one in optax.masked, may come "
      "before it in the chain.",
    )
  for part in parts:
    refuse_around_masters(part, where, in_container=in_container)
