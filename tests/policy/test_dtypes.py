"""Names of dtypes and of precisions of matmuls, what fits what, and what devices multiply."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax._core.types import is_low_precision
from mpjax._policy import dtypes
from tests.errors import refused

WHERE = "mpjax.f(dtype=...)"
EXPECTED = "a floating dtype such as 'float32'"
SPELLINGS = {
  "float16": ["float16", "f16", "fp16", "half", jnp.float16, np.float16, np.dtype("float16")],
  "bfloat16": ["bfloat16", "bf16", jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16")],
  "float32": ["float32", "f32", "fp32", "full", jnp.float32, np.float32, np.dtype("float32")],
}
FLOAT8 = [name for name in dir(ml_dtypes) if name.startswith("float8_")]


def test_every_spelling_of_a_dtype(set_flag):
  for name, spellings in SPELLINGS.items():
    for spelling in spellings:
      found = dtypes.parse_dtype(spelling, WHERE)
      assert isinstance(found, np.dtype)
      assert found == np.dtype(getattr(ml_dtypes, name, name))
    assert is_low_precision(jnp.dtype(name)) == (name != "float32")
  assert not is_low_precision(jnp.dtype("int8"))
  for name in (name for name in FLOAT8 if hasattr(jnp, name)):
    wanted = np.dtype(getattr(ml_dtypes, name))
    for spelling in (name, getattr(ml_dtypes, name)):
      assert dtypes.parse_dtype(spelling, WHERE) == wanted
  # Nothing depends on the default dtype.
  set_flag("jax_enable_x64", True)
  assert dtypes.parse_dtype("f32", WHERE) == np.float32
  assert dtypes.parse_dtype("half", WHERE) == np.float16


def check_dtype(value, builtin, got, fix):
  with refused(builtin, WHERE, EXPECTED, got, fix):
    dtypes.parse_dtype(value, WHERE)


NEAR = {
  **{"bf61": "'bf16'", "bfloat": "'bfloat16'", "Float32": "'float32'", "fp-16": "'fp16'"},
  **{"float_16": "'float16'", "halff": "'half'", "": "'bf16'"},
}


def test_what_is_no_floating_dtype_is_refused():
  for name, near in NEAR.items():
    check_dtype(name, ValueError, repr(name), f"Did you mean {near}")
  for value in (None, float):
    check_dtype(value, TypeError, repr(value), "NumPy reads it as float64; name the dtype")
  # What makes them a trap.
  assert {np.dtype(trap) for trap in (None, float)} == {np.dtype("float64")}
  never = "Integers, booleans, complex numbers and keys are never cast"
  for value, got in [
    *((name, name) for name in ("int32", "bool", "complex64")),
    *((jnp.int8, "int8"), (np.uint16, "uint16"), (ml_dtypes.int4, "int4"), (bool, "bool")),
    *((int, "int64"), (complex, "complex128"), (np.dtype("complex64"), "complex64")),
    ("U3", "str96"),
  ]:
    check_dtype(value, TypeError, got, never)
  # A new format is in `ml_dtypes` before JAX has arrays of it.
  for name in (name for name in FLOAT8 if not hasattr(jnp, name)):
    check_dtype(name, TypeError, name, "your version of JAX has no arrays of other dtypes")
  for value in (3, object(), ["float32"], b"float32x"):
    fix = "Pass a name, a jax.numpy scalar type or a numpy dtype"
    check_dtype(value, TypeError, repr(value), fix)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", ["float", "double", "f8", "<f8", "d", "f4", "single", "f2", "e"])
def test_spellings_of_numpy_are_refused(name, x64, set_flag):
  set_flag("jax_enable_x64", x64)
  read = f"NumPy reads this name as {np.dtype(name).name}; write 'float32'"
  check_dtype(name, ValueError, repr(name), read)


@pytest.mark.parametrize("value", ["float64", "f64", "fp64", jnp.float64, np.dtype("float64")])
def test_float64_needs_64_bit_enabled(value, set_flag):
  set_flag("jax_enable_x64", False)
  check_dtype(value, ValueError, "float64", "enable it or ask for 'float32'")
  set_flag("jax_enable_x64", True)
  assert dtypes.parse_dtype(value, WHERE) == np.float64


BLACKWELL = ("bfloat16", "float16", "float8", "mxfp8", "nvfp4")


@pytest.mark.parametrize(
  ("platform", "capability", "units", "operands", "float32_as"),
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
    ("gpu", "10.0", "Blackwell", BLACKWELL, "TF32"),
    ("gpu", "12.0", "Blackwell", BLACKWELL, "TF32"),
    ("gpu", "9", "Hopper", ("bfloat16", "float16", "float8"), "TF32"),
    ("gpu", None, "not known", (), "float32"),
    ("gpu", "gfx942", "not known", (), "float32"),
  ],
)
def test_units_by_platform_and_compute_capability(
  platform, capability, units, operands, float32_as
):
  found = dtypes.hardware_of(platform, capability)
  assert units in found.units
  assert found[1:] == (operands, float32_as)


# Precisions of matmuls, and which of them fit a dtype


OF_POLICY = "mpjax.Policy(precision=...)"
BF16, F16, F32 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))
Precision, Preset = jax.lax.Precision, jax.lax.DotAlgorithmPreset


def test_names_and_objects():
  for given, wanted, text in [
    ("highest", Precision.HIGHEST, "highest"),
    ("HIGH", Precision.HIGH, "high"),
    (Precision.DEFAULT, Precision.DEFAULT, "default"),
    (Preset.DEFAULT, Precision.DEFAULT, "default"),
    ("bf16_bf16_f32", Preset.BF16_BF16_F32, "BF16_BF16_F32"),
    (Preset.TF32_TF32_F32_X3, Preset.TF32_TF32_F32_X3, "TF32_TF32_F32_X3"),
  ]:
    found = dtypes.parse_precision(given, F32, None)
    assert found is wanted
    assert dtypes.written(found) == text
  # Every precision of JAX has a name that is read.
  for precision in (*Precision, *Preset):
    for dtype in (x for x in (BF16, F16, F32) if dtypes.takes(precision, x)):
      found = dtypes.parse_precision(precision, dtype, None)
      assert dtypes.parse_precision(dtypes.written(found), dtype, None) is found
  expected = "'default', 'high', 'highest', a jax.lax.Precision, or a jax.lax.DotAlgorithmPreset"
  for given, got, fix, builtin in [
    ("hihgest", "'hihgest'", "Did you mean 'highest'", ValueError),
    ("TF32", "'TF32'", "'TF32_TF32_F32'", ValueError),
    (jnp.float32, "float32", 'precision="highest"', TypeError),
    (("highest", "high"), "('highest', 'high')", 'precision="highest"', TypeError),
  ]:
    with refused(builtin, OF_POLICY, expected, got, fix):
      dtypes.parse_precision(given, F32, None)


@pytest.mark.parametrize(
  ("precision", "fitting"),
  [
    (Precision.HIGHEST, {BF16, F16, F32}),
    (Preset.BF16_BF16_F32, {BF16, F32}),
    (Preset.F16_F16_F32, {F16}),
    (Preset.TF32_TF32_F32, {F32}),
    (Preset.ANY_F8_ANY_F8_F32, set()),
  ],
)
def test_the_dtypes_that_a_precision_is_for(precision, fitting):
  assert {dtype for dtype in (BF16, F16, F32) if dtypes.takes(precision, dtype)} == fitting
  for dtype in fitting:
    assert dtypes.parse_precision(precision, dtype, None) is precision
  # What adds up in float32 is for weight gradients in it.
  dtypes.parse_precision(Preset.BF16_BF16_F32, BF16, F32)


@pytest.mark.parametrize(
  ("precision", "compute", "wide", "expected"),
  [
    (Preset.TF32_TF32_F32, BF16, None, "an algorithm for bfloat16: BF16_BF16_BF16, BF16_BF16_F32"),
    (Preset.BF16_BF16_F32, F16, None, "an algorithm for float16: F16_F16_F16, F16_F16_F32"),
    (Preset.ANY_F8_ANY_F8_F32, BF16, None, "'highest', or an algorithm for bfloat16"),
    (Preset.BF16_BF16_BF16, BF16, F32, "an algorithm that adds up in float32"),
  ],
)
def test_what_does_not_fit_the_compute_dtype(precision, compute, wide, expected):
  got = f"{precision.name} with compute_dtype={compute.name}"
  with refused(ValueError, OF_POLICY, expected, got, "Write one"):
    mpjax.Policy(compute_dtype=compute, weight_grad_dtype=wide, precision=precision)
