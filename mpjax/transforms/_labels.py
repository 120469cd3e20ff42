"""The keys of the loss scales in a state: the name of a loss, if it has one, and its configuration.

As in "generator:dynamic(growth_interval=500)". As part of the structure of a state a key is static
under `jit`, and a checkpoint that was saved under another configuration does not fit.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mpjax._core.errors import MpjaxValueError
from mpjax._core.types import PyTree
from mpjax.transforms._loss_scale_config import (
  LARGEST,
  SMALLEST,
  DynamicLossScale,
  LossScale,
  NoLossScale,
  StaticLossScale,
)


class Label(NamedTuple):
  """What a key says."""

  name: str | None
  config: str  # the text of the configuration alone
  fields: Mapping[str, float]  # those of the configuration; of a dynamic one with its defaults

  @property
  def dynamic(self) -> bool:
    """Whether the scale moves."""
    return self.config.startswith("dynamic")

  @property
  def limits(self) -> tuple[float, float]:
    """The smallest and the largest scale that may be set."""
    return self.fields.get("min_scale", SMALLEST), self.fields.get("max_scale", LARGEST)

  @property
  def largest(self) -> float:
    """The largest scale that training comes to."""
    return self.fields.get("scale", self.limits[1])


def write_label(config: LossScale, name: str | None = None) -> str:
  """Returns the key for a configuration."""
  # `init_scale` is left out, since the state's own scale replaces it, and so are defaults: a field
  # that a later version adds does not change the text of older states.
  changed = [
    f"{field.name}={getattr(config, field.name):.9g}"
    for field in dataclasses.fields(config)
    if field.name != "init_scale" and getattr(config, field.name) != field.default
  ]
  text = _KINDS[type(config)] + (f"({','.join(changed)})" if changed else "")
  return text if name is None else f"{name}:{text}"


_KINDS = {NoLossScale: "none", StaticLossScale: "static", DynamicLossScale: "dynamic"}
_DEFAULTS = dataclasses.asdict(DynamicLossScale())


def parse_label(label: str) -> Label:
  """Returns what a key says."""
  name, colon, config = label.rpartition(":")
  kind, _, text = config.removesuffix(")").partition("(")
  pairs = (field.split("=") for field in text.split(",") if field)
  # Nine digits tell all float32 values apart, so this gives back the very number.
  fields = {key: float(np.float32(number)) for key, number in pairs}
  return Label(
    name if colon else None, config, (_DEFAULTS | fields) if kind == "dynamic" else fields
  )


def label_configs(
  loss_scale: LossScale | Mapping[str, LossScale], name: str | None
) -> dict[str, LossScale]:
  """Returns the configurations by the labels that they have in a state, in the order of a tree."""
  if not isinstance(loss_scale, Mapping):
    return {write_label(loss_scale, name): loss_scale}
  return dict(sorted((write_label(config, key), config) for key, config in loss_scale.items()))


def by_loss(
  tree: PyTree, configs: Mapping[str, LossScale], several: bool, where: str
) -> dict[str, PyTree]:
  """Returns what belongs to each label: an entry of `tree`, or all of it if not `several`."""
  if not several:
    return dict.fromkeys(configs, tree)
  names = {str(parse_label(label).name): label for label in configs}
  if not isinstance(tree, Mapping) or set(tree) != set(names):
    got = f"one with {sorted(map(str, tree))}" if isinstance(tree, Mapping) else type(tree).__name__
    raise MpjaxValueError(
      where,
      expected=f"a dict with one entry for each loss, {sorted(names)}",
      got=got,
      fix="Differentiate each loss by itself, and pass {name: gradients, ...}.",
    )
  return {label: tree[key] for key, label in names.items()}
