"""Finding and reading the loss scales in the states of optimizers."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib
from jax.core import Tracer

from mpjax._core.errors import (
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  kind_of,
)
from mpjax._core.leaves import Path, raw_value
from mpjax._core.nnx_objects import is_nnx_object, is_nnx_variable
from mpjax._core.types import Array, KeyPath, Leaf, OptState, PyTree
from mpjax._optim.loss_scale import (
  LARGEST,
  SMALLEST,
  LossScale,
  NoLossScale,
  SkipNonfinite,
  StaticLossScale,
  init_scale,
  is_label,
  read_kind,
  read_label,
)
from mpjax._optim.states import LossScaleState, LossScalingState, StepCount


class OwnedScale(NamedTuple):
  """One loss scale: the state around it, and the configuration in its label."""

  node: Any  # of the tree that was searched: a `LossScalingState`, or a mapping with its fields
  owner: LossScalingState
  label: str
  name: str | None
  numbers: Any  # of a `ScaleState`, in variables perhaps
  fields: Mapping[str, float]  # of the configuration

  @property
  def state(self) -> LossScaleState | None:
    """The numbers, or None under `NoLossScale`."""
    return LossScaleState(*map(raw_value, self.numbers)) if self.skips else None

  @property
  def skips(self) -> bool:
    """Whether steps may be skipped."""
    return self.kind is not NoLossScale

  @property
  def dynamic(self) -> bool:
    """Whether the scale moves."""
    return "growth_interval" in self.fields

  @property
  def kind(self) -> type[LossScale]:
    """The class of the configuration."""
    return read_kind(self.label)

  @property
  def multiplies(self) -> bool:
    """Whether losses are multiplied by a scale that the user has chosen."""
    return self.kind not in (NoLossScale, SkipNonfinite)

  @property
  def in_variables(self) -> bool:
    """Whether its numbers are in variables, as those of an `nnx.Optimizer` are."""
    return any(map(is_nnx_variable, self.numbers))

  @property
  def limits(self) -> tuple[float, float]:
    """The smallest and the largest scale that may be set."""
    return self.fields.get("min_scale", SMALLEST), self.fields.get("max_scale", LARGEST)

  @property
  def largest(self) -> float:
    """The largest scale that training comes to."""
    return self.fields.get("scale", self.limits[1])


def scales_in(tree: PyTree) -> list[OwnedScale]:
  """Returns every loss scale in `tree`, wherever it is."""
  return [
    OwnedScale(node, owner, label, label.rpartition(":")[0] or None, numbers, read_label(label))
    for _, node, owner in scaling_states(tree)
    for label, numbers in owner.loss_scale.items()
  ]


def scaling_states(tree: PyTree) -> Iterator[tuple[KeyPath, PyTree, LossScalingState]]:
  """Yields each state of `mpjax.loss_scaling` in `tree`: its path, its node, and its content.

  An `nnx.State`, its pure dict and a checkpoint that was read without a target have mappings in
  place of classes. Their nodes are no `LossScalingState`.
  """
  nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaling_state)
  yield from ((path, node, with_classes(node)) for path, node in nodes if is_scaling_state(node))


def leaves_of(tree: PyTree, is_leaf: Callable[..., bool] = is_nnx_variable) -> dict[Path, Leaf]:
  """Returns all leaves of a tree by their paths, each key as Python writes it.

  In a state of `mpjax.loss_scaling` these are the keys of its classes, also where it has mappings.
  """
  # `with_classes` returns a node itself if it has the class. Another object means a mapping.
  mappings = [path for path, node, owner in scaling_states(tree) if node is not owner]
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  return {_names(path, mappings): x for path, x in leaves}


def _names(path: KeyPath, mappings: Iterable[KeyPath]) -> Path:
  """Returns the keys of a path, below `mappings` those of the classes that these stand for."""
  names = [jax.tree_util.keystr((key,)) for key in path]
  for root in mappings:
    if path[: len(root)] != root:
      continue
    # A path into a state is: a field of `LossScalingState`, a label, a field of `LossScaleState`. A
    # mapping writes fields as `['scale']`, the class as `.scale`. Labels are keys in both.
    field, _, number = range(len(root), len(root) + 3)
    is_scale = names[field : field + 1] == ["['loss_scale']"]
    positions = (field, number) if is_scale else (field,)
    names = [f".{x[2:-2]}" if i in positions else x for i, x in enumerate(names)]
  return tuple(names)


def is_scaling_state(node: object) -> bool:
  """Whether a node of a tree is a state of `mpjax.loss_scaling`, or a mapping with its fields."""
  if isinstance(node, LossScalingState):
    return True
  scales = node.get("loss_scale") if isinstance(node, Mapping) else None
  if not isinstance(scales, Mapping) or not scales:
    return False
  return all(_is_loss_scale(label, numbers) for label, numbers in scales.items())


def _is_loss_scale(label: object, numbers: object) -> bool:
  """Whether an entry of a mapping holds the numbers of a loss scale."""
  if not isinstance(label, str) or not isinstance(numbers, Mapping) or not is_label(label):
    return False
  return set(numbers) == set(_class_of(label)._fields)


def _class_of(label: str) -> type[LossScaleState] | type[StepCount]:
  """Returns the class of the numbers that belong to a label."""
  return StepCount if read_kind(label) is NoLossScale else LossScaleState


def with_classes(node: PyTree) -> LossScalingState:
  """Returns a node that `is_scaling_state` as an instance of its class."""
  if isinstance(node, LossScalingState):
    return node
  scales = {label: _class_of(label)(**numbers) for label, numbers in node["loss_scale"].items()}
  # An `nnx.State` has no node for a state without arrays, such as that of `optax.sgd`.
  return LossScalingState(scales, node.get("inner_state", ()))


def find_scale(opt_state: OptState, where: str, name: str | None) -> OwnedScale:
  """Returns the one loss scale in `opt_state` (called `name`, if one is given)."""
  scales = scales_in(opt_state)
  if not scales:
    fix = "Wrap the optimizer: tx = mpjax.loss_scaling(tx)."
    if isinstance(opt_state, optax.GradientTransformation):
      fix = "Pass its state, opt_state = tx.init(params), or an nnx.Optimizer."
    elif is_nnx_object(opt_state):
      fix = (
        "Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param). Bfloat16 needs no "
        "loss scale: differentiate by nnx.value_and_grad."
      )
    expected = "the state of an optimizer created by mpjax.loss_scaling"
    got = f"{kind_of(opt_state)} without a loss scale"
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  # The scale is there, but its place in a chain may be wrong.
  refuse_outside(opt_state, where, chains=True)
  picked = [one for one in scales if name is None or one.name == name]
  expected = "a state with one loss scale, or the name of a loss scale in it"
  got = f"one with {len(scales)}, named {[one.name for one in scales]}"
  fix = "Choose one by name=. mpjax.loss_scaling(..., name=...) gives each its name."
  if not picked:
    raise MpjaxValueError(f"{where} with name={name!r}", expected=expected, got=got, fix=fix)
  if len(picked) > 1:
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  return picked[0]


def read_state(opt_state: OptState, where: str, name: str | None) -> LossScaleState:
  """Returns the numbers of the one loss scale in `opt_state`; `NoLossScale` has those of 1."""
  owned = find_scale(opt_state, where, name)
  state = owned.state
  if state is None:
    total = raw_value(owned.numbers.total)
    state = LossScaleState(*init_scale(StaticLossScale(1)))._replace(total=total)
  if _is_constant(state.total):
    raise _stale(where, _CONSTANT)
  return state


def scale_reader(owned: OwnedScale, where: str) -> Callable[[PyTree], Array]:
  """Returns a function that reads a loss scale, and raises if the scale is stale.

  The function takes the values that the scale is for, such as the arguments of a loss. If one of
  these is traced, a dynamic scale has to be traced too, because a constant never changes. The scale
  of a donated state raises too. Outside `jit` the function cannot detect an old state, and reads
  its scale.
  """
  # Close over the scale alone. The whole state would keep the moments in memory.
  source, is_dynamic = owned.numbers.scale, owned.dynamic

  def read(beside: PyTree) -> Array:
    scale = raw_value(source)
    # A donated array raises an error of XLA when it is read, which does not say why.
    if isinstance(scale, jax.Array) and not isinstance(scale, Tracer) and scale.is_deleted():
      raise _stale(where, "one of a state that was donated to a step")
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(beside))
    if is_dynamic and is_traced and _is_constant(scale):
      raise _stale(where, _CONSTANT)
    return scale

  return read


_CONSTANT = "one from outside of the function that is being traced, where it would be a constant"


def _is_constant(x: Leaf) -> bool:
  """Whether `x` is a constant of a function that is traced."""
  # Under `jit` or `scan` an operation on a constant returns a tracer. Under `vmap` or `grad` alone
  # it returns an array, and the scale is read again at each call.
  return not isinstance(x, Tracer) and isinstance(jax.lax.neg(x), Tracer)


def _stale(where: str, got: str) -> MpjaxRuntimeError:
  return MpjaxRuntimeError(
    where,
    expected="the loss scale of the state that this step updates",
    got=got,
    fix="Build it inside of the step, from the state that the step is given: "
    "mpjax.scaled(loss_fn, opt_state), with opt_state or an nnx.Optimizer. Pass that state, like "
    "params, as an argument to jit, checkpoint and eval_shape, and as the carry of scan.",
  )


def refuse_scale_inside(inner_state: OptState, where: str, *, got: str, fix: str) -> None:
  """Raises if the optimizer inside of a wrapper has a loss scale."""
  if scales_in(inner_state):
    expected = "an optimizer without a loss scale"
    raise MpjaxTypeError(where, expected=expected, got=f"one that holds {got}", fix=fix)


_HARMLESS = (optax.MaskedState, optax.PartitionState, optax.contrib.SplitRealAndImaginaryState)
"""The states of those wrappers of optax that count nothing and compute nothing: they pick parts."""


def refuse_outside(tree: PyTree, where: str, *, chains: bool = False) -> None:
  """Raises if a scale is inside of the state of a wrapper not known to be harmless there.

  With `chains` a tuple is the state of a chain: nothing beside the scale may keep a state.
  """
  if is_scaling_state(tree) or not _is_scaled(tree):
    return
  # The children of this node. Each is visited below.
  parts = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
  got = ""
  # A wrapper of optax around the scale: `MultiSteps` would add the NaN of an overflow to its sum.
  if type(tree).__module__.startswith("optax.") and not isinstance(tree, _HARMLESS):
    got = f"one inside of the state optax.{type(tree).__name__}"
  elif chains and type(tree) in (tuple, collections.OrderedDict):
    got = _beside_in_chain(parts)
  if got:
    expected = "mpjax.loss_scaling around the entire optimizer"
    fix = (
      "Put all of it inside, mpjax.loss_scaling(optax.chain(...)), once. To read one of several "
      "optimizers, pass its state alone, or keep them in a dict."
    )
    got += ": it would keep the NaN of an overflow, or count steps that are skipped"
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  for part in parts:
    refuse_outside(part, where, chains=chains)


def _is_scaled(tree: PyTree) -> bool:
  """Whether there is a loss scale in `tree`, other than `NoLossScale`."""
  return any(one.skips for one in scales_in(tree))


def _beside_in_chain(parts: list[PyTree]) -> str:
  """Names a state that must not be beside a loss scale in a chain; "" if there is none."""
  # `optax.masked` may restrict each scale to other parameters. Otherwise the second one would not
  # see that the first has skipped a step.
  scaled = [x for x in parts if _is_scaled(x)]
  if len(scaled) > 1 and not all(isinstance(x, optax.MaskedState) for x in scaled):
    return f"a chain of {len(scaled)}, each of which skips steps by itself"
  # States are NamedTuples, also those of users. A transformation without arrays, such as
  # `optax.scale`, has nothing to keep.
  others = [x for x in parts if not _is_scaled(x)]
  states = jax.tree.leaves(others, is_leaf=lambda x: hasattr(x, "_fields"))
  stateful = [type(x) for x in states if isinstance(x, tuple) and jax.tree.leaves(x)]
  if not stateful:
    return ""
  kind = stateful[-1]
  library = kind.__module__.partition(".")[0]
  return f"one in a chain beside the state {library}.{kind.__name__}"
