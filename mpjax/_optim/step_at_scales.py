"""Run a training step at several loss scales, which are located among its arguments."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mpjax._core.leaves import Path, is_key
from mpjax._core.trees import low_to_float32
from mpjax._core.types import Array, Leaf, NumpyArray
from mpjax._optim.find_scale import OwnedScale, scales_in
from mpjax._optim.loss_scale import is_label
from mpjax._optim.new_versions import NewVersions, Stated, names_of
from mpjax._optim.optimizer_trees import full_like
from mpjax._optim.states import LossScaleState
from mpjax._optim.step_call import RETURNED, WRITTEN, ResultPath, Spec, StepCall, StepProgram


class ScaleInStep(NamedTuple):
  """A loss scale, and where a step reads and leaves its numbers.

  Attributes:
    owned: its state and its configuration.
    fields: the paths of its numbers among the arguments, by name; empty under `NoLossScale`.
    new: the places of its numbers after the step; empty if the step drops them.
  """

  owned: OwnedScale
  fields: Mapping[str, Path]
  new: Mapping[str, ResultPath] = {}


class ExaminedStep(NamedTuple):
  """A step after one run, in which each loss scale had a count of its own.

  Attributes:
    call: the step and its arguments.
    program: the computation of the step.
    scales: the loss scales among the arguments, without those of `NoLossScale`.
    start: the arrays that the step was given.
    after: the values that it wrote and returned.
  """

  call: StepCall
  program: StepProgram
  scales: Sequence[ScaleInStep]
  start: Mapping[Path, Array]
  after: Mapping[ResultPath, Leaf]


class Versions(NamedTuple):
  """Which values after a step replace which arrays among its arguments.

  Attributes:
    pairs: the place of the new version of each array that has one.
    inferred: the arrays whose pair follows from the trees alone.
  """

  pairs: Mapping[Path, ResultPath]
  inferred: frozenset[Path]


class Run(NamedTuple):
  """The results of a step at one loss scale.

  Attributes:
    number: the loss scale.
    after: all values after the step, those of low precision in float32.
    applied: how many steps were applied, of a loop some perhaps; None if the scale was not updated.
  """

  number: float
  after: Mapping[ResultPath, NumpyArray]
  applied: int | None


_MARK = 2**20
"""Counts of steps are set to multiples of this, which is more steps than one call takes."""


def locate_scales(call: StepCall) -> list[ScaleInStep]:
  """Returns the loss scales among the arguments of a step, and where their numbers are."""
  # Several states may have one label, and one state may be two arguments. Scales and paths are both
  # in the order of the tree, so the n-th scale of a label has its n-th path.
  by_label: dict[str, list[Mapping[str, Path]]] = {}
  for path, fields in _scale_fields(call.arrays).items():
    by_label.setdefault(names_of(path)[-1], []).append(fields)
  located = []
  for owned in scales_in(call.arguments):
    # The label as it stands in a path.
    (label,) = names_of((f"[{owned.label!r}]",))
    located.append(ScaleInStep(owned, by_label[label].pop(0) if owned.numbers else {}))
  return located


def examine(call: StepCall, program: StepProgram, scales: Sequence[ScaleInStep]) -> ExaminedStep:
  """Runs a step once, and finds the new version of each loss scale by its count of steps."""
  # Give each scale another count. After the step, the count tells whose new version a state is.
  start = dict(call.arrays)
  for i, scale in enumerate(scales):
    total = scale.fields["total"]
    start[total] = full_like(start[total], (i + 1) * _MARK)
  after = program.run(start)
  newest = _newest_scales(after)
  located = [scale._replace(new=newest.get(i, {})) for i, scale in enumerate(scales)]
  return ExaminedStep(call, program, located, start, after)


def is_updated(step: ExaminedStep, scale: ScaleInStep) -> bool:
  """Whether the step counted itself in the state of a loss scale."""
  if not scale.new:
    return False
  return bool(np.any(step.after[scale.new["total"]] > step.start[scale.fields["total"]]))


def pair_versions(step: ExaminedStep, stated: Stated | None) -> Versions:
  """Finds the new version of each array: as stated by the user, in variables, or by trees."""
  call = step.call
  # An optimizer state is three keys above a count: `state.loss_scale[label].total`. Its old and new
  # path follow from the counts.
  states = {
    scale.fields["total"][:-3]: scale.new["total"][1:-3]
    for scale in step.scales
    if scale.new and scale.new["total"][0] == RETURNED
  }
  versions = NewVersions(_waiting(step, states, stated), _returned(step), call.positional)
  # Surest first: pairs of the user, then states by their counts, then their surroundings and equal
  # trees. A later rule pairs only arrays that are still free.
  versions.pair_stated(stated or ())
  for old, new in states.items():
    versions.pair_state(old, new)
  if stated is not None:
    versions.check_all_stated(stated)
  else:
    for old, new in states.items():
      versions.pair_around(old, new)
    versions.pair_trees()
  # A variable is its own new version, unless the step has returned one.
  pairs = {path: (WRITTEN, *path) for path in call.variables}
  pairs |= {path: (RETURNED, *new) for path, new in versions.pairs.items()}
  # In the order of the arguments. Entries of Python numbers, and of variables that hold no array
  # after the step, are dropped.
  arrays = {x: pairs[x] for x in call.arrays if pairs.get(x) in step.after}
  return Versions(arrays, versions.inferred)


def run_at(
  step: ExaminedStep, scale: ScaleInStep, number: float, start: Mapping[Path, Array]
) -> Run:
  """Runs a step at a value of one loss scale; at inf and NaN all loss scales have that value."""
  # At a finite value only one scale changes, so that a wrong factor belongs to it. At an overflow
  # all change, since a step skips as a whole. `finite` is set to the opposite of the coming result:
  # a step that reads the old flag then changes what it should keep.
  overflows = not np.isfinite(number)
  values = dict(start)
  changed = step.scales if overflows else [scale]
  for one in changed:
    for name, x in (("scale", number), ("finite", overflows)):
      path = one.fields[name]
      values[path] = full_like(values[path], x)
  after = {place: to_numpy(x) for place, x in step.program.run(values).items()}
  if not scale.new:
    return Run(number, after, None)
  # The differences count all steps of one call, such as those of a loop.
  steps = after[scale.new["total"]] - to_numpy(values[scale.fields["total"]])
  skipped = after[scale.new["skipped"]] - to_numpy(values[scale.fields["skipped"]])
  applied = int(np.sum(steps - skipped)) if np.max(steps) > 0 else None
  return Run(number, after, applied)


def is_of_scale(path: Path) -> bool:
  """Whether a path, or a place, is that of a number of a loss scale."""
  # Two empty names: a path may have fewer than three.
  *_, field, label, number = ("", "", *names_of(path))
  return field == "loss_scale" and is_label(label) and number in LossScaleState._fields


def to_numpy(x: Leaf) -> NumpyArray:
  """Returns the numbers in an array as a NumPy array, low precision in float32."""
  return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else low_to_float32(x))


def _scale_fields(paths: Iterable[Path]) -> dict[Path, dict[str, Path]]:
  """Returns the numbers of each loss scale among some paths, by its path and by their names."""
  fields: dict[Path, dict[str, Path]] = {}
  for path in paths:
    if is_of_scale(path):
      fields.setdefault(path[:-1], {})[names_of(path)[-1]] = path
  # Other trees may have a key `loss_scale`. A real state has all of these.
  needed = {"scale", "finite", "total", "skipped"}
  return {path: names for path, names in fields.items() if needed <= names.keys()}


def _newest_scales(after: Mapping[ResultPath, Leaf]) -> dict[int, dict[str, ResultPath]]:
  """Returns the places of the numbers of each loss scale that was marked, by its index."""
  newest: dict[int, tuple[int, bool, dict[str, ResultPath]]] = {}
  for fields in _scale_fields(after).values():
    # The lanes of a vmapped state count alike.
    total = int(np.max(after[fields["total"]]))
    # The inverse of the mark in `examine`. A count has grown by less than a mark.
    index = total // _MARK - 1
    # Under `jax.jit` the variables of an `nnx.Optimizer` keep the old count, and a returned
    # `nnx.State` has the new one.
    version = total, fields["total"][0] == WRITTEN, fields
    newest[index] = max(version, newest.get(index, version), key=_age)
  return {index: fields for index, (_, _, fields) in newest.items()}


def _age(version: tuple[int, bool, dict[str, ResultPath]]) -> tuple[int, bool]:
  """Returns the sort key of a version: the larger count, then the one in variables."""
  return version[:2]


def _returned(step: ExaminedStep) -> dict[Path, Spec]:
  """Returns the shapes and dtypes of the step's results, by path."""
  specs = step.program.specs(step.after)
  return {place[1:]: spec for place, spec in specs.items() if place[0] == RETURNED}


def _waiting(
  step: ExaminedStep, states: Mapping[Path, Path], stated: Stated | None
) -> dict[Path, Spec]:
  """Returns the arrays among the arguments whose new versions may be among the results."""
  specs = step.call.specs
  if stated is None:
    # A variable that the step wrote is its own new version. A state whose scale was dropped has
    # none: its moments, which are like the parameters, must not be paired with new parameters.
    owners = [scale.fields["total"][:-3] for scale in step.scales]
    dropped = [owner for owner in owners if owner not in states]
    for path in _written_variables(step):
      del specs[path]
    specs = {x: spec for x, spec in specs.items() if not any(_is_below(x, y) for y in dropped)}
  return specs


def _is_below(path: Path, node: Path) -> bool:
  """Whether a path is that of a node or of a part of it."""
  return path[: len(node)] == node


def _written_variables(step: ExaminedStep) -> set[Path]:
  """Returns the variables of those arguments to which a step writes."""
  call = step.call
  # If one variable of a model changes, the step writes to that model. Its unchanged variables are
  # then kept versions, not missing ones.
  arguments = set()
  for path in call.variables:
    new = step.after.get((WRITTEN, *path))
    if new is None or to_numpy(step.start[path]).tobytes() != to_numpy(new).tobytes():
      arguments.add(call.argument_of(path))
  return {path for path in call.variables if call.argument_of(path) in arguments}
