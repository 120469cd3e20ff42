"""An estimate of how long a compiled program takes on a GPU that is not there.

Matmuls and convolutions take as long as their FLOPs at the peak of their dtype, or as their bytes
at the bandwidth of the memory, whichever is longer; everything else as long as its bytes. Nothing
is known of caches, of launches, or of how close a kernel comes to these limits: ratios of two
programs are worth more than the times, and measured ones more than either.
"""

import pathlib
import re
from collections.abc import Mapping

TARGETS = pathlib.Path(__file__).parent / "targets"

_HOPPER = {
  **{"float8": 1979e12, "float16": 989e12, "bfloat16": 989e12},
  **{"tf32": 495e12, "float32": 67e12},
}

PEAKS: Mapping[str, Mapping[str, float]] = {
  "v100": {"float16": 125e12, "float32": 15.7e12},
  "a100": {"float16": 312e12, "bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12},
  "h100": _HOPPER,
  "h200": _HOPPER,
  "b200": {
    **{"float4": 9000e12, "float8": 4500e12, "float16": 2250e12, "bfloat16": 2250e12},
    **{"tf32": 1125e12, "float32": 75e12},
  },
}
"""Dense floating-point operations per second by dtype, of NVIDIA's data sheets (SXM)."""


def bandwidth(gpu: str) -> float:
  """Returns the bytes per second between memory and chip, as `targets/` has them for XLA."""
  text = (TARGETS / f"{gpu}.txtpb").read_text(encoding="utf-8")
  found = re.search(r"memory_bandwidth: (\d+)", text)
  if found is None:
    raise ValueError(f"{TARGETS / gpu}.txtpb names no memory_bandwidth")
  return float(found[1])


def seconds(
  gpu: str, flops: Mapping[str, int], product_bytes: int, other_bytes: int
) -> float | None:
  """Returns the estimate for a program; None for what is no GPU of `PEAKS`.

  Args:
    gpu: one of `PEAKS`.
    flops: those of matmuls and convolutions by the dtype of their operands, "tf32" for float32
      that Tensor Cores round.
    product_bytes: operands and results of the kernels with matmuls and convolutions.
    other_bytes: those of all other kernels.
  """
  if gpu not in PEAKS:
    return None
  peaks = PEAKS[gpu]
  # A dtype without units of its own is computed in float32: bfloat16 on a V100.
  compute = sum(count / peaks.get(_unit(dtype), peaks["float32"]) for dtype, count in flops.items())
  memory = bandwidth(gpu)
  return max(compute, product_bytes / memory) + other_bytes / memory


def _unit(dtype: str) -> str:
  return next((name for name in ("float4", "float8") if dtype.startswith(name)), dtype)
