"""Which names of dtypes are understood, what is said of the others, and what devices multiply."""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax._core.dtypes import hardware_of, is_float8, is_low_precision, parse_dtype, scalar_type
from tests.errors import check_refused

WHERE = "mpjax.f(dtype=...)"
EXPECTED = "a floating dtype such as 'float32'"
SPELLINGS = {
  "float16": ["float16", "f16", "fp16", "half", jnp.float16, np.float16, np.dtype("float16")],
  "bfloat16": ["bfloat16", "bf16", jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16")],
  "float32": ["float32", "f32", "fp32", "full", jnp.float32, np.float32, np.dtype("float32")],
}
FLOAT8 = sorted(name for name in dir(ml_dtypes) if name.startswith("float8_"))


@pytest.mark.case("A102", "B043", "B137")
def test_every_spelling_of_a_dtype(set_flag):
  for name, spellings in SPELLINGS.items():
    for spelling in spellings:
      found = parse_dtype(spelling, WHERE)
      assert isinstance(found, np.dtype)
      assert found == np.dtype(getattr(ml_dtypes, name, name))
    assert not is_float8(jnp.dtype(name))
    assert is_low_precision(jnp.dtype(name)) == (name != "float32")
  assert not is_low_precision(jnp.dtype("int8"))
  for name in FLOAT8:
    wanted = np.dtype(getattr(ml_dtypes, name))
    assert parse_dtype(name, WHERE) == parse_dtype(getattr(ml_dtypes, name), WHERE) == wanted
    assert is_float8(wanted)
  # Scalar types are those that code compares by identity.
  for name in (*SPELLINGS, *FLOAT8):
    assert scalar_type(jnp.dtype(name)) is getattr(jnp, name)
  # Nothing depends on the default dtype.
  set_flag("jax_enable_x64", True)
  assert parse_dtype("f32", WHERE) == np.float32
  assert parse_dtype("half", WHERE) == np.float16


def check_dtype(value, builtin, got, fix):
  parts = {"where": WHERE, "expected": EXPECTED, "got": got, "fix": fix, "builtin": builtin}
  check_refused(functools.partial(parse_dtype, value, WHERE), **parts)


NEAR = {
  **{"bf61": "'bf16'", "bfloat": "'bfloat16'", "Float32": "'float32'", "fp-16": "'fp16'"},
  **{"float_16": "'float16'", "halff": "'half'", "": "'bf16'"},
}


@pytest.mark.case("A96", "A102", "B043", "B137", "B139")
def test_what_is_no_floating_dtype_is_refused():
  for name, near in NEAR.items():
    check_dtype(name, ValueError, repr(name), f"Did you mean {near}")
  for value in ("float", "double"):
    check_dtype(value, ValueError, repr(value), "NumPy reads this name as float64; write 'float32'")
  for value in (None, float):
    check_dtype(value, TypeError, repr(value), "NumPy reads it as float64; name the dtype")
  # What makes them a trap.
  assert {np.dtype(trap) for trap in ("float", "double", None, float)} == {np.dtype("float64")}
  never = "Integers, booleans, complex numbers and keys are never cast"
  for value, got in [
    *((name, name) for name in ("int32", "bool", "complex64")),
    *((jnp.int8, "int8"), (np.uint16, "uint16"), (ml_dtypes.int4, "int4"), (bool, "bool")),
    *((int, "int64"), (complex, "complex128"), (np.dtype("complex64"), "complex64")),
    ("U3", "str96"),
  ]:
    check_dtype(value, TypeError, got, never)
  for value in (3, object(), ["float32"], b"float32x"):
    fix = "Pass a name, a jax.numpy scalar type or a numpy dtype"
    check_dtype(value, TypeError, repr(value), fix)


@pytest.mark.case("B044")
@pytest.mark.parametrize("value", ["float64", "f64", "fp64", jnp.float64, np.dtype("float64")])
def test_float64_needs_64_bit_enabled(value, set_flag):
  set_flag("jax_enable_x64", False)
  parts = {"expected": EXPECTED, "got": "float64", "fix": "enable it or ask for 'float32'"}
  check_refused(lambda: parse_dtype(value, WHERE), where=WHERE, builtin=ValueError, **parts)
  set_flag("jax_enable_x64", True)
  assert parse_dtype(value, WHERE) == np.float64


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
