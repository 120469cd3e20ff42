"""What this machine and its settings mean for mixed precision: `python -m mpjax doctor`."""

import dataclasses
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from mpjax._core.dtypes import Hardware, hardware_of
from mpjax._core.errors import MpjaxRuntimeError
from mpjax._diagnostics.report import Column, Report, Section

PACKAGES = ("jax", "jaxlib", "flax", "optax", "mpjax")
_RAISES = "On, an overflow raises where loss scaling would skip the step."

OPTIONS = {
  "jax_default_matmul_precision": "",  # It depends on the device: see `_precision`.
  "jax_optimization_level": "UNKNOWN leaves it to XLA; O0 compiles fast and runs slowly, O3 the "
  "other way round.",
  "jax_enable_x64": "On, NumPy's float64 arrays stay float64, which no policy casts.",
  "jax_debug_nans": _RAISES,
  "jax_debug_infs": _RAISES,
}
"""The options of `jax.config` that change numbers or speed, and what they mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis(Report):
  """What `python -m mpjax doctor` prints: tables of text, and the name of a policy."""

  preset: str  # the name of the policy that fits the first device
  why: str  # the reason, in sentences
  warnings: tuple[str, ...]  # what should be changed
  devices: tuple[tuple[str, ...], ...]  # kind, platform, count, units and dtypes
  versions: tuple[tuple[str, str], ...]  # package and version; "-" for what is not installed
  settings: tuple[tuple[str, str, str], ...]  # name, value and meaning

  def sections(self) -> Sequence[Section]:
    first = (f'Policy for this machine: "{self.preset}"', self.why)
    kinds = (Column("Kind"), Column("Platform"), Column("Count", "right"))
    meaning = Column("Meaning", wide=True)
    return (
      Section("", (*first, *(f"Warning: {text}" for text in self.warnings))),
      Section("Devices", (), (*kinds, Column("Units", wide=True), Column("Dtypes")), self.devices),
      Section("Versions", (), (Column("Package"), Column("Installed")), self.versions),
      Section("Settings", (), (Column("Setting"), Column("Value"), meaning), self.settings),
    )


def doctor() -> Diagnosis:
  """Returns what is known of this machine; raises MpjaxRuntimeError if JAX finds no device."""
  try:
    devices = jax.devices()
  except RuntimeError as error:
    raise MpjaxRuntimeError(
      "python -m mpjax doctor",
      expected="a device that JAX can use",
      got=str(error).splitlines()[0],
      fix="Run it with JAX_PLATFORMS=cpu to see the rest, and check the driver and the jax[cuda12] "
      "or jax[tpu] that is installed.",
    ) from error
  config: Any = jax.config  # Its attributes have no types.
  return diagnosis(devices, {name: getattr(config, name, None) for name in OPTIONS}, os.environ)


def diagnosis(
  devices: Sequence[Any], options: Mapping[str, object], environment: Mapping[str, str]
) -> Diagnosis:
  """Returns what devices and settings mean; the policy is for the first device."""
  keys = [(d.device_kind, d.platform, getattr(d, "compute_capability", None)) for d in devices]
  units = {key: hardware_of(*key[1:]) for key in keys}
  first, hardware = keys[0][0], units[keys[0]]
  preset, why = _preset(first, hardware)
  debugging = [name for name in ("jax_debug_nans", "jax_debug_infs") if options.get(name)]
  warnings = [f"{name} is on: overflows that loss scaling expects raise." for name in debugging]
  if len(units) > 1:
    warnings.append(f"There are devices of {len(units)} kinds; the policy is for {first}.")
  if options.get("jax_optimization_level") in ("O0", "O1"):
    level = options["jax_optimization_level"]
    warnings.append(f"jax_optimization_level is {level}: XLA optimizes little.")
  return Diagnosis(
    preset=preset,
    why=why,
    warnings=tuple(warnings),
    devices=tuple(
      (key[0], key[1], str(keys.count(key)), one.units, ", ".join(one.dtypes) or "-")
      for key, one in units.items()
    ),
    versions=(("python", platform.python_version()), *((x, _version(x)) for x in PACKAGES)),
    settings=tuple(_settings(hardware, options, environment)),
  )


def _preset(name: str, hardware: Hardware) -> tuple[str, str]:
  """Returns the name of the policy that fits a device, and why."""
  if hardware.dtypes[:1] == ("bfloat16",):
    return "mixed_bfloat16", (
      f"{name} multiplies bfloat16 several times as fast as float32, and bfloat16 has the "
      "range of float32: it needs no loss scale. Parameters stay float32."
    )
  if hardware.dtypes:
    return "mixed_float16", (
      f"{name} multiplies float16 several times as fast as float32, and has no units for "
      "bfloat16. Gradients in float16 underflow without a loss scale: wrap the optimizer in "
      "mpjax.loss_scaling."
    )
  return "float32", (
    f"No units for low precision are known of {name}: it gains no speed from it. Where memory is "
    'short, "mixed_bfloat16" keeps most activations in half of the bytes.'
  )


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "-"


def _settings(
  hardware: Hardware, options: Mapping[str, object], environment: Mapping[str, str]
) -> Iterable[tuple[str, str, str]]:
  """Yields the settings and what they mean on a device."""
  for name, meaning in OPTIONS.items():
    value = options.get(name)
    shown = "not set" if value is None else str(value)
    yield name, shown, meaning or _precision(hardware, value)
  flags = environment.get("XLA_FLAGS", "")
  excess = re.findall(r"--xla_allow_excess_precision=(\S*)", flags)[-1:] or ["not set (true)"]
  meaning = (
    "XLA may leave out a cast to low precision and back: results can be more exact than the jaxpr "
    "says, and differ from those on another device."
  )
  if excess[0].lower() in ("false", "0"):
    meaning = "Each cast to low precision rounds, as the jaxpr says."
  yield "xla_allow_excess_precision", excess[0], meaning
  yield "XLA_FLAGS", flags or "not set", "All other flags of XLA are in it."
  if "NVIDIA_TF32_OVERRIDE" in environment:
    value = environment["NVIDIA_TF32_OVERRIDE"]
    yield "NVIDIA_TF32_OVERRIDE", value, "0: NVIDIA's libraries never use TF32."


def _precision(hardware: Hardware, precision: object) -> str:
  """Returns what `jax_default_matmul_precision` means for float32 matmuls on a device."""
  if hardware.float32_as == "float32":
    return "Without effect here: float32 matmuls are multiplied as float32."
  if precision in (None, "default", "fastest", "bfloat16"):
    return (
      f"float32 matmuls and convolutions are multiplied in {hardware.float32_as}. For float32: "
      'mpjax.Policy(precision="highest"), for a model or by a rule.'
    )
  exactly = "as float32" if precision in ("highest", "float32") else "so"
  return f"float32 matmuls are multiplied {exactly}, everywhere. Low precision is unaffected."
