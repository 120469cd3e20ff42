"""Names of precisions of matmuls, and which of them fit a dtype."""

import functools

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._core.dtypes import check_precision, parse_precision, takes, written
from tests.errors import check_refused

WHERE = "mpjax.Policy(precision=...)"
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
    found = parse_precision(given, WHERE)
    assert found is wanted
    assert written(found) == text
  # Every precision of JAX has a name that is read.
  for precision in (*Precision, *Preset):
    found = parse_precision(precision, WHERE)
    assert parse_precision(written(found), WHERE) is found
  expected = "'default', 'high', 'highest', a jax.lax.Precision, or a jax.lax.DotAlgorithmPreset"
  for given, got, fix, builtin in [
    ("hihgest", "'hihgest'", "Did you mean 'highest'", ValueError),
    ("TF32", "'TF32'", "'TF32_TF32_F32'", ValueError),
    (jnp.float32, "float32", 'precision="highest"', TypeError),
    (("highest", "high"), "('highest', 'high')", 'precision="highest"', TypeError),
  ]:
    parts = {"where": WHERE, "expected": expected, "got": got, "fix": fix, "builtin": builtin}
    check_refused(functools.partial(parse_precision, given, WHERE), **parts)


@pytest.mark.parametrize(
  ("precision", "dtypes"),
  [
    (Precision.HIGHEST, {BF16, F16, F32}),
    (Preset.BF16_BF16_F32, {BF16, F32}),
    (Preset.F16_F16_F32, {F16}),
    (Preset.TF32_TF32_F32, {F32}),
    (Preset.ANY_F8_ANY_F8_F32, set()),
  ],
)
def test_the_dtypes_that_a_precision_is_for(precision, dtypes):
  assert {dtype for dtype in (BF16, F16, F32) if takes(precision, dtype)} == dtypes
  for dtype in dtypes:
    check_precision(precision, dtype, None, WHERE)
  # What adds up in float32 is for weight gradients in it.
  check_precision(Preset.BF16_BF16_F32, BF16, F32, WHERE)


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
  fields = {"compute_dtype": compute, "weight_grad_dtype": wide, "precision": precision}
  got = f"{precision.name} with compute_dtype={compute.name}"
  parts = {"expected": expected, "got": got, "fix": "Write one", "builtin": ValueError}
  check_refused(lambda: mpjax.Policy(**fields), where=WHERE, **parts)
