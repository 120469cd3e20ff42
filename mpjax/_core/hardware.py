"""What is known of a device: which low-precision dtypes it has matmul units for."""

from typing import NamedTuple

_TENSOR_CORES: tuple[tuple[int, int, str, tuple[str, ...]], ...] = (
  (7, 0, "Volta", ("float16",)),
  (7, 5, "Turing", ("float16",)),
  (8, 0, "Ampere", ("bfloat16", "float16")),
  (8, 9, "Ada", ("bfloat16", "float16", "float8")),
  (9, 0, "Hopper", ("bfloat16", "float16", "float8")),
  (10, 0, "Blackwell", ("bfloat16", "float16", "float8")),
)
"""From which compute capability on, generation, and dtypes, the better one to train in first."""


class Hardware(NamedTuple):
  """The units of a device that multiply matrices.

  Fields:
    units: what they are, in words.
    dtypes: the low-precision dtypes that they multiply, the better one to train in first.
    float32_as: the dtype in which they multiply float32 unless told otherwise, see
      `jax_default_matmul_precision`.
  """

  units: str
  dtypes: tuple[str, ...] = ()
  float32_as: str = "float32"


def hardware_of(platform: str, capability: object = None) -> Hardware:
  """Returns what is known of a device.

  `platform` is that of a `jax.Device`, `capability` the compute capability of NVIDIA's, "8.0" say.
  """
  if platform == "tpu":
    return Hardware("matrix units of a TPU", ("bfloat16",), "bfloat16")
  if platform == "cpu":
    return Hardware("a CPU: no Tensor Cores")
  major, _, minor = str(capability).partition(".")
  if not major.isdecimal():
    return Hardware("not known to mpjax")
  at = (int(major), int(minor) if minor.isdecimal() else 0)
  found = [row for row in _TENSOR_CORES if row[:2] <= at]
  if not found:
    return Hardware(f"no Tensor Cores (compute capability {capability})")
  *_, name, dtypes = found[-1]
  units = f"Tensor Cores of the {name} generation (compute capability {capability})"
  return Hardware(units, dtypes, "TF32" if "bfloat16" in dtypes else "float32")
