"""What a report of a conversion counts, compares and shows."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.errors import check_error

convert = mpjax.convert


def values(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def apply(tree, x):
  return {"y": x @ tree["kernel"] + tree["bias"][None], "n": 3}


@pytest.mark.standard_promotion
def test_the_report_counts_and_compares():
  table = jnp.asarray(values(4, 4))
  before = {
    "kernel": table,
    "tied": table,
    "bias": jnp.array([1e-30, 0.0, 2.0, 3.0]),
    "n": jnp.arange(2),
  }
  after = convert(before, "float16")
  x = values(2, 4, seed=1)
  report = mpjax.conversion_report(before, after, apply, x)
  # The table once: 16 numbers, 4 of the bias, and two integers.
  assert (report.bytes_before, report.bytes_after, report.bytes_saved) == (88, 48, 40)
  rows = {leaf.path: leaf for leaf in report.leaves}
  assert set(rows) == {"kernel", "tied", "bias"}
  assert (rows["bias"].shape, rows["bias"].lost, rows["kernel"].lost) == ((4,), 1, 0)
  assert (rows["bias"].before, rows["bias"].after) == (np.dtype("float32"), np.dtype("float16"))
  old, new = (np.asarray(tree["kernel"], np.float64) for tree in (before, after))
  np.testing.assert_allclose(rows["kernel"].error, abs(old - new).max() / abs(old).max(), rtol=1e-6)
  wide, narrow = (np.asarray(apply(tree, x)["y"], np.float64) for tree in (before, after))
  error = abs(wide - narrow).max() / abs(wide).max()
  np.testing.assert_allclose(report.output_error, error, rtol=1e-5)
  text = str(report)
  assert "88 bytes → 48 (45.5% saved), output error" in text
  assert re.search(r"kernel +│ 4x4 +│ +float32 → float16 │ +\d\.\de-0\d │ +0 │", text)
  assert re.search(r"bias +│ 4 +│ .* +1 │", text)


def test_the_report_of_nothing():
  report = mpjax.conversion_report({"n": 3}, {"n": 3}, lambda tree: jnp.ones(2))
  assert (report.leaves, report.bytes_saved, report.output_error) == ((), 0, 0.0)
  assert mpjax.conversion_report({}, {}).output_error is None


@pytest.mark.parametrize(
  "fn",
  [
    lambda tree: float(tree["w"].max()),
    lambda tree: tree["w"].astype(int).sum(),
    lambda tree: tree["w"].astype(complex) * 1j,
    lambda tree: {"mean": tree["w"].mean(dtype=jnp.float32), "name": "relu"},
  ],
  ids=["number", "integer", "complex", "beside a name"],
)
def test_outputs_of_all_kinds_are_compared(fn):
  before = {"w": jnp.array([1.0, 2049.0])}
  report = mpjax.conversion_report(before, convert(before, "float16"), fn)
  np.testing.assert_allclose(report.output_error, 1 / 2049, rtol=0.01)


def test_a_long_path_is_shown_whole():
  name = "/".join(["transformer", *(f"layer_with_a_long_name_{i}" for i in range(5)), "kernel"])
  before = {name: jnp.ones(2)}
  text = str(mpjax.conversion_report(before, convert(before, "bfloat16")))
  cells = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
  assert "".join(cells) == name


@pytest.mark.standard_promotion
def test_an_output_that_is_no_longer_finite_is_an_infinite_error():
  before, after = {"w": jnp.array([300.0])}, {"w": jnp.array([300.0], jnp.float16)}
  found = mpjax.conversion_report(before, after, lambda tree: tree["w"] * 300)
  assert found.output_error == np.inf
  same = mpjax.conversion_report(
    before, before, lambda tree: tree["w"] * jnp.array([jnp.nan, jnp.inf])
  )
  assert same.output_error == 0


def test_trees_that_are_not_alike_are_not_compared():
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.conversion_report({"w": jnp.ones(3)}, {"w": jnp.ones(4)})
  check_error(
    excinfo,
    where="mpjax.conversion_report(before, after)",
    expected="two trees that differ in dtypes only",
    got="shape [4] for shape [3] at ['w']",
    fix="Pass what was converted",
    builtin=ValueError,
  )


@pytest.mark.parametrize("wrong", ["no function", "nothing to compare", "abstract"])
def test_what_cannot_be_compared(wrong):
  tree = {"w": jnp.ones(3)}
  abstract = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
  call, where, expected, got, fix = {
    "no function": (
      lambda: mpjax.conversion_report(tree, tree, jnp.ones(2)),
      *("(fn=...)", "a function of a tree", "ArrayImpl", "model.apply, x"),
    ),
    "nothing to compare": (
      lambda: mpjax.conversion_report(tree, tree, lambda tree: "text"),
      *("(fn=...)", "returns arrays or numbers", "one that returns", "such as the logits"),
    ),
    "abstract": (
      lambda: mpjax.conversion_report(abstract, abstract),
      *("(before, after)", "arrays", "a ShapeDtypeStruct at w", "on the host"),
    ),
  }[wrong]
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    call()
  builtin = ValueError if wrong == "nothing to compare" else TypeError
  where = f"mpjax.conversion_report{where}"
  check_error(excinfo, where=where, expected=expected, got=got, fix=fix, builtin=builtin)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_linen_model_in_the_place_of_its_variables(wrapped):
  model = mpjax.linen.with_policy(nn.Dense(3), "bfloat16") if wrapped else nn.Dense(3)
  with pytest.raises(mpjax.MpjaxTypeError) as excinfo:
    mpjax.conversion_report(model, model)
  check_error(
    excinfo,
    where="mpjax.conversion_report(before, after)",
    expected="the parameters of a model",
    got="a model of Linen",
    fix="model.convert(variables, x)",
  )
