"""Report devices, versions and settings for mixed precision: `python -m mpjax doctor`."""

import dataclasses
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mpjax._autocast.precision import asked_precision
from mpjax._diagnose.report import Report, Section
from mpjax._policy.dtypes import Hardware, hardware_of

PACKAGES = ("jax", "jaxlib", "flax", "optax", "mpjax")
OPTIONS = {
  "jax_default_matmul_precision": "{precision}",
  "jax_enable_x64": "On, NumPy's float64 arrays stay float64, which no policy casts.",
  "jax_debug_nans": "On, an overflow raises where loss scaling would skip the step.",
  "jax_debug_infs": "On, an overflow raises where loss scaling would skip the step.",
}
"""The options of `jax.config` that change numbers, and their meaning."""

_WHY = {
  "mixed_bfloat16": "{device} multiplies bfloat16 several times as fast as float32, and bfloat16 "
  "has the range of float32: it needs no loss scale. Parameters stay float32.",
  "mixed_float16": "{device} multiplies float16 several times as fast as float32, and has no units "
  "for bfloat16. Gradients in float16 underflow without a loss scale: wrap the optimizer in "
  "mpjax.loss_scaling.",
  "float32": "No units for low precision are known for {device}, so it gains no speed. If memory "
  'is short, "mixed_bfloat16" stores most activations in 2 bytes instead of 4.',
}
"""Why a policy fits a device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis(Report):
  """The report of `python -m mpjax doctor`."""

  preset: str  # the name of the policy that fits the first device
  why: str  # the reason, in sentences
  warnings: tuple[str, ...]  # settings to change, and devices without the policy
  devices: tuple[tuple[str, ...], ...]  # kind, platform, count, units and dtypes
  versions: tuple[tuple[str, str], ...]  # package and version; "-" if it is not installed
  settings: tuple[tuple[str, str, str], ...]  # name, value and meaning

  def sections(self) -> Sequence[Section]:
    first = (f'Policy for this machine: "{self.preset}"', self.why)
    kinds = ("Kind", "Platform", "Count", "Units", "Dtypes")
    return (
      Section("", (*first, *(f"Warning: {text}" for text in self.warnings))),
      Section("Devices", (), kinds, self.devices),
      Section("Versions", (), ("Package", "Installed"), self.versions),
      Section("Settings", (), ("Setting", "Value", "Meaning"), self.settings),
    )


def doctor() -> Diagnosis:
  """Returns the report of this machine; raises RuntimeError if JAX finds no device."""
  # A newer JAX may drop an option.
  options = {name: getattr(jax.config, name, None) for name in OPTIONS}
  return diagnosis(jax.devices(), options, os.environ)


def diagnosis(
  devices: Sequence[Any], options: Mapping[str, object], environment: Mapping[str, str]
) -> Diagnosis:
  """Returns the report of devices and settings; the policy is for the first device."""
  # The compute capability of a GPU tells its units. Other devices have none.
  keys = [(d.device_kind, d.platform, getattr(d, "compute_capability", None)) for d in devices]
  units = {key: hardware_of(*key[1:]) for key in keys}
  first = keys[0][0]
  hardware = units[keys[0]]
  # `Hardware.dtypes` lists the preferred dtype first.
  preset = f"mixed_{hardware.dtypes[0]}" if hardware.dtypes else "float32"
  debugging = [name for name in ("jax_debug_nans", "jax_debug_infs") if options.get(name)]
  warnings = [f"{name} is on: overflows that loss scaling expects raise." for name in debugging]
  if len(units) > 1:
    warnings.append(f"There are devices of {len(units)} kinds; the policy is for {first}.")
  precision = _precision(hardware, options["jax_default_matmul_precision"])
  settings = list[Any]()
  for name, meaning in OPTIONS.items():
    value = "not set" if options[name] is None else str(options[name])
    settings.append((name, value, meaning.format(precision=precision)))
  flags = environment.get("XLA_FLAGS", "")
  # XLA takes the last of repeated flags.
  (excess,) = re.findall(r"--xla_allow_excess_precision=(\S*)", flags)[-1:] or ["not set (true)"]
  rounding = (
    "XLA may leave out a cast to low precision and back: results can be more exact than the jaxpr "
    "says, and differ from those on another device."
  )
  if excess.lower() in ("false", "0"):
    rounding = "Each cast to low precision rounds, as the jaxpr says."
  settings.append(("xla_allow_excess_precision", excess, rounding))
  # A missing package has no metadata, and importing optional packages would be slow.
  installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
  return Diagnosis(
    preset=preset,
    why=_WHY[preset].format(device=first),
    warnings=tuple(warnings),
    devices=tuple(
      (key[0], key[1], str(keys.count(key)), one.units, ", ".join(one.dtypes) or "-")
      for key, one in units.items()
    ),
    versions=(
      ("python", platform.python_version()),
      *((x, installed.get(x, "-")) for x in PACKAGES),
    ),
    settings=tuple(settings),
  )


def _precision(hardware: Hardware, precision: object) -> str:
  """Returns what `jax_default_matmul_precision` means for float32 matmuls on a device."""
  if hardware.float32_as == "float32":
    return "Without effect here: float32 matmuls are multiplied as float32."
  if not asked_precision(precision):
    return (
      f"float32 matmuls and convolutions are multiplied in {hardware.float32_as}. For float32: "
      'mpjax.Policy(precision="highest"), for a model or by a rule.'
    )
  # Only these names ask for float32. Others, such as "high", ask for a format in between.
  exactly = "as float32" if precision in ("highest", "float32") else "so"
  return f"float32 matmuls are multiplied {exactly}, everywhere. Low precision is unaffected."
