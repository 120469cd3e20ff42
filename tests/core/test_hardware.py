"""What is known of devices."""

import pytest

from mpjax._core.hardware import hardware_of


@pytest.mark.parametrize(
  ("platform", "capability", "units", "dtypes", "float32_as"),
  [
    ("cpu", None, "a CPU", (), "float32"),
    ("tpu", None, "TPU", ("bfloat16",), "bfloat16"),
    ("gpu", "6.1", "no Tensor Cores", (), "float32"),
    ("gpu", "7.0", "Volta", ("float16",), "float32"),
    ("gpu", "7.5", "Turing", ("float16",), "float32"),
    ("gpu", "8.0", "Ampere", ("bfloat16", "float16"), "TF32"),
    ("gpu", "8.6", "Ampere", ("bfloat16", "float16"), "TF32"),
    ("gpu", "8.9", "Ada", ("bfloat16", "float16", "float8"), "TF32"),
    ("cuda", "9.0", "Hopper", ("bfloat16", "float16", "float8"), "TF32"),
    ("gpu", "10.0", "Blackwell", ("bfloat16", "float16", "float8"), "TF32"),
    ("gpu", "12.0", "Blackwell", ("bfloat16", "float16", "float8"), "TF32"),
    ("gpu", "9", "Hopper", ("bfloat16", "float16", "float8"), "TF32"),
    ("gpu", None, "not known", (), "float32"),
    ("gpu", "gfx942", "not known", (), "float32"),
  ],
)
def test_units_by_platform_and_compute_capability(platform, capability, units, dtypes, float32_as):
  found = hardware_of(platform, capability)
  assert units in found.units
  assert found[1:] == (dtypes, float32_as)
