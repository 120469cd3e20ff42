"""The keys of the loss scales in a state: written and read here, and nowhere else.

A key is the name of a loss, if it has one, and its configuration, as in
"generator:dynamic(growth_interval=500)". As part of the structure of a state it is static under
`jit`, and a checkpoint that was saved under another configuration does not fit.
"""

import dataclasses
import re
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
  """What a key says: the name of a loss, and what a state is asked of its configuration."""

  name: str | None
  config: str  # the text of the configuration alone
  dynamic: bool  # whether the scale moves
  limits: tuple[float, float]  # the smallest and the largest scale that may be set
  largest: float  # the largest scale that training comes to
  backoff_factor: float


def write_label(config: LossScale, name: str | None = None) -> str:
  """Returns the key for a configuration.

  `init_scale` is left out, since the state's own scale replaces it, and so are defaults: a
  field that a later version adds does not change the text of older states.
  """
  if isinstance(config, NoLossScale):
    text = "none"
  elif isinstance(config, StaticLossScale):
    text = f"static(scale={config.scale:.9g})"
  else:
    changed = [
      f"{field.name}={getattr(config, field.name):.9g}"
      for field in dataclasses.fields(config)
      if field.name != "init_scale" and getattr(config, field.name) != field.default
    ]
    text = f"dynamic({','.join(changed)})" if changed else "dynamic"
  return text if name is None else f"{name}:{text}"


def parse_label(label: str) -> Label:
  """Returns what a key says; fields that it does not name have their defaults."""
  name, colon, config = label.rpartition(":")
  # Nine digits tell all float32 values apart, so this gives back the very number.
  given = {key: float(np.float32(text)) for key, text in re.findall(r"(\w+)=([^,)]+)", config)}
  dynamic = config.startswith("dynamic")
  low = given.get("min_scale", DynamicLossScale.min_scale) if dynamic else SMALLEST
  high = given.get("max_scale", DynamicLossScale.max_scale) if dynamic else LARGEST
  return Label(
    name=name if colon else None,
    config=config,
    dynamic=dynamic,
    limits=(low, high),
    largest=given.get("scale", high),
    backoff_factor=given.get("backoff_factor", DynamicLossScale.backoff_factor),
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
  """Returns what belongs to each label: an entry of `tree`, or all of it if not `several`.

  Raises:
    MpjaxValueError: `tree` is no dict with the names of the losses.
  """
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
