"""Which names of dtypes are understood, and what is said of the others."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax._core.dtypes import is_float8, parse_dtype, scalar_type
from tests.errors import check_error

WHERE = "mpjax.f(dtype=...)"
EXPECTED = "a floating dtype such as 'float32'"
SPELLINGS = {
  "float16": ["float16", "f16", "fp16", "half", jnp.float16, np.float16, np.dtype("float16")],
  "bfloat16": ["bfloat16", "bf16", jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16")],
  "float32": ["float32", "f32", "fp32", "full", jnp.float32, np.float32, np.dtype("float32")],
}
FLOAT8 = sorted(name for name in dir(ml_dtypes) if name.startswith("float8_"))


@pytest.mark.case("A102", "B043", "B137")
@pytest.mark.parametrize(
  ("spelling", "name"),
  [(spelling, name) for name, spellings in SPELLINGS.items() for spelling in spellings],
  ids=str,
)
def test_every_spelling_of_a_dtype(spelling, name):
  found = parse_dtype(spelling, WHERE)
  assert isinstance(found, np.dtype)
  assert found == np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", FLOAT8)
def test_8_bit_formats_are_known_by_name_and_by_type(name):
  wanted = np.dtype(getattr(ml_dtypes, name))
  assert parse_dtype(name, WHERE) == wanted
  assert parse_dtype(getattr(ml_dtypes, name), WHERE) == wanted
  assert is_float8(wanted)


def test_wider_formats_are_not_8_bit():
  assert not any(is_float8(jnp.dtype(name)) for name in SPELLINGS)


@pytest.mark.case("A96", "B137")
@pytest.mark.parametrize(
  ("name", "near"),
  [
    ("bf61", "'bf16'"),
    ("bfloat", "'bfloat16'"),
    ("Float32", "'float32'"),
    ("fp-16", "'fp16'"),
    ("float_16", "'float16'"),
    ("halff", "'half'"),
    ("", "'bf16'"),
  ],
)
def test_an_unknown_name_gets_the_nearest_ones(name, near):
  with pytest.raises(ValueError) as excinfo:
    parse_dtype(name, WHERE)
  check_error(
    excinfo,
    where=WHERE,
    expected=EXPECTED,
    got=repr(name),
    fix=f"Did you mean {near}",
    builtin=ValueError,
  )


@pytest.mark.case("B043")
@pytest.mark.parametrize("name", ["float", "double"])
def test_names_that_numpy_reads_as_float64_are_refused(name):
  assert np.dtype(name) == np.float64  # What makes them a trap.
  with pytest.raises(ValueError) as excinfo:
    parse_dtype(name, WHERE)
  check_error(
    excinfo,
    where=WHERE,
    expected=EXPECTED,
    got=repr(name),
    fix="NumPy reads this name as float64; write 'float32'",
    builtin=ValueError,
  )


@pytest.mark.case("B043")
@pytest.mark.parametrize("value", [None, float])
def test_values_that_numpy_reads_as_float64_are_refused(value):
  assert np.dtype(value) == np.float64
  with pytest.raises(TypeError) as excinfo:
    parse_dtype(value, WHERE)
  check_error(
    excinfo,
    where=WHERE,
    expected=EXPECTED,
    got=repr(value),
    fix="NumPy reads it as float64; name the dtype",
    builtin=TypeError,
  )


@pytest.mark.case("A102", "B139")
@pytest.mark.parametrize(
  ("value", "name"),
  [
    ("int32", "int32"),
    ("bool", "bool"),
    ("complex64", "complex64"),
    (jnp.int8, "int8"),
    (np.uint16, "uint16"),
    (bool, "bool"),
    (int, "int64"),
    (complex, "complex128"),
    (np.dtype("complex64"), "complex64"),
    (ml_dtypes.int4, "int4"),
    ("U3", "str96"),
  ],
  ids=str,
)
def test_dtypes_that_are_not_floating_are_refused(value, name):
  with pytest.raises(TypeError) as excinfo:
    parse_dtype(value, WHERE)
  check_error(
    excinfo,
    where=WHERE,
    expected=EXPECTED,
    got=name,
    fix="Integers, booleans, complex numbers and keys are never cast",
    builtin=TypeError,
  )


@pytest.mark.case("A102")
@pytest.mark.parametrize(
  "value",
  [3, object(), ["float32"], b"float32x"],
  ids=["int", "object", "list", "bytes"],
)
def test_what_is_no_dtype_at_all_is_refused(value):
  with pytest.raises(TypeError) as excinfo:
    parse_dtype(value, WHERE)
  check_error(
    excinfo,
    where=WHERE,
    expected=EXPECTED,
    got=repr(value),
    fix="Pass a name, a jax.numpy scalar type or a numpy dtype",
    builtin=TypeError,
  )


@pytest.mark.case("B044")
@pytest.mark.parametrize("value", ["float64", "f64", "fp64", jnp.float64, np.dtype("float64")])
def test_float64_needs_64_bit_enabled(value, set_flag):
  set_flag("jax_enable_x64", False)
  with pytest.raises(ValueError) as excinfo:
    parse_dtype(value, WHERE)
  check_error(
    excinfo,
    where=WHERE,
    expected=EXPECTED,
    got="float64",
    fix="enable it or ask for 'float32'",
    builtin=ValueError,
  )
  set_flag("jax_enable_x64", True)
  assert parse_dtype(value, WHERE) == np.float64


@pytest.mark.case("A102", "B043", "B044", "B137", "B139")
@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype"])
@pytest.mark.parametrize("value", ["bf61", "float", "double", None, "float64", "int32", 3])
def test_a_policy_names_its_field(field, value):
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    mpjax.Policy(**{field: value})
  check_error(
    excinfo,
    where=f"mpjax.Policy({field}=...)",
    expected=EXPECTED,
    got=value if value in ("float64", "int32") else repr(value),
    fix=".",
  )


@pytest.mark.parametrize("name", [*SPELLINGS, *FLOAT8])
def test_scalar_types_are_those_that_code_compares_by_identity(name):
  assert scalar_type(jnp.dtype(name)) is getattr(jnp, name)


def test_nothing_depends_on_the_default_dtype(set_flag):
  set_flag("jax_enable_x64", True)
  assert parse_dtype("f32", WHERE) == np.float32
  assert jax.numpy.zeros((), parse_dtype("half", WHERE)).dtype == np.float16
