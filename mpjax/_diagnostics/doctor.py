"""What this machine and its settings mean for mixed precision: `python -m mpjax doctor`."""

import collections
import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from mpjax._core.errors import MpjaxRuntimeError
from mpjax._core.hardware import Hardware, hardware_of
from mpjax._diagnostics.report import Column, Json, Report, Section


class Device(Protocol):
  """A `jax.Device`, as far as it is looked at. NVIDIA's have a `compute_capability` too."""

  @property
  def platform(self) -> str: ...

  @property
  def device_kind(self) -> str: ...


class Kind(NamedTuple):
  """Devices of one kind, and how many there are."""

  name: str
  platform: str
  number: int
  hardware: Hardware


class Version(NamedTuple):
  """A package, the version that is installed ("" for none), and those that are supported."""

  package: str
  installed: str
  supported: str
  fits: bool


class Setting(NamedTuple):
  """A setting, its value, and what that means here."""

  name: str
  value: str
  meaning: str


SUPPORTED: Mapping[str, str] = {
  "python": "3.11",
  "jax": "0.10",
  "jaxlib": "0.10",
  "flax": "0.12.7",
  "optax": "0.2.8",
}
"""The oldest version of each."""

OPTIONS = (
  "jax_default_matmul_precision",
  "jax_optimization_level",
  "jax_enable_x64",
  "jax_debug_nans",
  "jax_debug_infs",
)
"""The options of `jax.config` that are looked at."""

VARIABLES = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")
"""The environment variables that are looked at."""

_EXCESS = "--xla_allow_excess_precision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis(Report):
  """What `python -m mpjax doctor` prints.

  Attributes:
    devices: the devices, by kind.
    preset: the name of the policy that fits the first of them.
    why: the reason, in sentences.
    versions: of the packages that count.
    settings: those of JAX and XLA that change numbers or speed.
    warnings: what should be changed.
  """

  devices: tuple[Kind, ...]
  preset: str
  why: str
  versions: tuple[Version, ...]
  settings: tuple[Setting, ...]
  warnings: tuple[str, ...]

  def sections(self) -> Sequence[Section]:
    first = (f'Policy for this machine: "{self.preset}"', self.why)
    wide = Column("Units", wide=True)
    return (
      Section("", (*first, *(f"Warning: {text}" for text in self.warnings))),
      Section(
        "Devices",
        (),
        (Column("Kind"), Column("Platform"), Column("Count", "right"), wide, Column("Dtypes")),
        tuple(
          (kind.name, kind.platform, str(kind.number), kind.hardware.units, _listed(kind.hardware))
          for kind in self.devices
        ),
      ),
      Section(
        "Versions",
        (),
        (Column("Package"), Column("Installed"), Column("Supported")),
        tuple((v.package, v.installed or "-", v.supported) for v in self.versions),
      ),
      Section(
        "Settings",
        (),
        (Column("Setting"), Column("Value"), Column("Meaning", wide=True)),
        self.settings,
      ),
    )

  def as_dict(self) -> Mapping[str, Json]:
    return {
      "preset": self.preset,
      "why": self.why,
      "warnings": self.warnings,
      "devices": [{**kind._asdict(), "hardware": kind.hardware._asdict()} for kind in self.devices],
      "versions": [version._asdict() for version in self.versions],
      "settings": [setting._asdict() for setting in self.settings],
    }


def _listed(hardware: Hardware) -> str:
  return ", ".join(hardware.dtypes) or "-"


def doctor() -> Diagnosis:
  """Returns what is known of this machine.

  Raises:
    MpjaxRuntimeError: JAX finds no device.
  """
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
  options = {name: getattr(config, name, None) for name in OPTIONS}
  environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
  return diagnosis(devices, installed_versions(), options, environment)


def installed_versions() -> dict[str, str]:
  """Returns the versions of what counts here; "" for what is not installed."""
  found = {"python": platform.python_version()}
  for package in (*SUPPORTED, "mpjax"):
    if package not in found:
      try:
        found[package] = importlib.metadata.version(package)
      except importlib.metadata.PackageNotFoundError:
        found[package] = ""
  return found


def diagnosis(
  devices: Sequence[Device],
  versions: Mapping[str, str],
  options: Mapping[str, object],
  environment: Mapping[str, str],
) -> Diagnosis:
  """Returns what devices, versions and settings mean.

  Args:
    devices: at least one; the policy is for the first.
    versions: by package.
    options: those of `jax.config`, by name.
    environment: environment variables.
  """
  kinds = _kinds(devices)
  preset, why = _preset(kinds[0])
  rows = tuple(_version(package, installed) for package, installed in versions.items())
  old = [
    f"{row.package} {row.installed or 'is missing'}: supported is {row.supported}."
    for row in rows
    if not row.fits
  ]
  settings = tuple(_settings(kinds[0].hardware, options, environment))
  return Diagnosis(
    devices=kinds,
    preset=preset,
    why=why,
    versions=rows,
    settings=settings,
    warnings=(*old, *_warnings(kinds, options)),
  )


def _kinds(devices: Iterable[Device]) -> tuple[Kind, ...]:
  """Returns the devices by kind, in order."""
  keys = [(d.device_kind, d.platform, getattr(d, "compute_capability", None)) for d in devices]
  return tuple(
    Kind(name, where, number, hardware_of(where, capability))
    for (name, where, capability), number in collections.Counter(keys).items()
  )


def _preset(kind: Kind) -> tuple[str, str]:
  """Returns the name of the policy that fits a device, and why."""
  dtypes = kind.hardware.dtypes
  if dtypes[:1] == ("bfloat16",):
    return "mixed_bfloat16", (
      f"{kind.name} multiplies bfloat16 several times as fast as float32, and bfloat16 has the "
      "range of float32: it needs no loss scale. Parameters stay float32."
    )
  if dtypes:
    return "mixed_float16", (
      f"{kind.name} multiplies float16 several times as fast as float32, and has no units for "
      "bfloat16. Gradients in float16 underflow without a loss scale: wrap the optimizer in "
      "mpjax.loss_scaling."
    )
  memory = 'Where memory is short, "mixed_bfloat16" keeps most activations in half of the bytes.'
  if kind.platform == "cpu":
    return "float32", (
      f"A CPU gains no speed from low precision, since it mostly computes it in float32. {memory}"
    )
  return "float32", f"No units for low precision are known of {kind.name}. {memory}"


def _version(package: str, installed: str) -> Version:
  oldest = SUPPORTED.get(package)
  if oldest is None:
    return Version(package, installed, "-", fits=True)
  return Version(package, installed, f"{oldest} or later", _numbers(installed) >= _numbers(oldest))


def _numbers(version: str) -> tuple[int, ...]:
  """Returns the first numbers of a version: "0.10.2.dev1" is (0, 10, 2)."""
  found: list[int] = []
  for part in version.split("."):
    digits = part[: len(part) - len(part.lstrip("0123456789"))]
    if not digits:
      break
    found.append(int(digits))
    if digits != part:
      break
  return tuple(found)


def _settings(
  hardware: Hardware, options: Mapping[str, object], environment: Mapping[str, str]
) -> Iterable[Setting]:
  """Yields the settings and what they mean on a device."""
  flags = environment.get("XLA_FLAGS", "")
  precision = options.get("jax_default_matmul_precision")
  yield Setting("jax_default_matmul_precision", _text(precision), _precision(hardware, precision))
  override = environment.get("NVIDIA_TF32_OVERRIDE")
  if override is not None:
    off = override.strip() == "0"
    meaning = "NVIDIA's libraries never use TF32." if off else "NVIDIA's libraries decide."
    yield Setting("NVIDIA_TF32_OVERRIDE", override, meaning)
  yield Setting(
    "jax_optimization_level",
    _text(options.get("jax_optimization_level")),
    "UNKNOWN leaves it to XLA; O0 compiles fast and runs slowly, O3 the other way round.",
  )
  excess = [flag.partition("=")[2] for flag in flags.split() if flag.partition("=")[0] == _EXCESS]
  no = bool(excess) and excess[-1].lower() in ("false", "0")
  yield Setting(
    "xla_allow_excess_precision",
    excess[-1] if excess else "not set (true)",
    "Each cast to low precision rounds, as the jaxpr says."
    if no
    else "XLA may leave out a cast to low precision and back: results can be more exact than the "
    "jaxpr says, and differ from those on another device.",
  )
  yield Setting("XLA_FLAGS", flags or "not set", "All other flags of XLA are in it.")
  for name in ("jax_enable_x64", "jax_debug_nans", "jax_debug_infs"):
    yield Setting(name, _text(options.get(name)), _SWITCHES[name])


_SWITCHES: Mapping[str, str] = {
  "jax_enable_x64": "On, NumPy's float64 arrays stay float64, which no policy casts to low "
  "precision.",
  "jax_debug_nans": "On, a NaN raises where loss scaling would skip the step.",
  "jax_debug_infs": "On, an overflow raises where loss scaling would skip the step.",
}


def _precision(hardware: Hardware, precision: object) -> str:
  """Returns what `jax_default_matmul_precision` means for float32 matmuls on a device."""
  if hardware.float32_as == "float32":
    return "Without effect here: float32 matmuls are multiplied as float32."
  if precision in (None, "default", "fastest", "bfloat16"):
    return (
      f"float32 matmuls and convolutions are multiplied in {hardware.float32_as}. For float32: "
      'mpjax.Policy(precision="highest"), for a model or by a rule.'
    )
  if precision in ("highest", "float32"):
    return "float32 matmuls are multiplied as float32, everywhere. Low precision is unaffected."
  return "float32 matmuls are multiplied so, everywhere. Low precision is unaffected."


def _text(value: object) -> str:
  return "not set" if value is None else str(value)


def _warnings(kinds: Sequence[Kind], options: Mapping[str, object]) -> Iterable[str]:
  """Yields what should be changed."""
  if len(kinds) > 1:
    yield f"There are devices of {len(kinds)} kinds; the policy is for {kinds[0].name}."
  if options.get("jax_optimization_level") in ("O0", "O1"):
    yield f"jax_optimization_level is {options['jax_optimization_level']}: XLA optimizes little."
  for name in ("jax_debug_nans", "jax_debug_infs"):
    if options.get(name):
      yield f"{name} is on: the overflows that a dynamic loss scale expects raise errors."
