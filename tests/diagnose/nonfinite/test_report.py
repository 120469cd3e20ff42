import json

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._diagnose.nonfinite.report import NonfiniteReport
from mpjax._diagnose.report import power

pytestmark = pytest.mark.standard_promotion


def test_nothing_found_is_false_and_says_so():
  report = NonfiniteReport(loss_scale=1024.0, step=3)
  assert not report
  assert "finite" in str(report)
  assert "2^10" in str(report)
  assert repr(report).startswith("<NonfiniteReport: Every value that something")
  assert (power(1024.0), power(0.5), power(1000.0)) == ("2^10", "2^-1", "1000")


def test_a_report_fits_80_columns_and_is_json():
  def fn(x):
    return jnp.sum(jnp.exp(x).astype(jnp.float32))

  report = mpjax.find_nonfinite(fn)(jnp.asarray([1, 12], jnp.float16))
  text = str(report)
  assert max(map(len, text.splitlines())) <= 80
  for part in ("exp", "forward", "test_report.py:", "float16[2]", "1.63e+05", "mixed_bf"):
    assert part in text
  found = json.loads(report.to_json())
  assert found["operation"] == "exp"
  assert found["index"] == [1]
  assert found["result"]["inf"] == 1
  assert "exp" in report._repr_html_()


def test_a_gradient_may_be_scaled_by_hand_and_a_value_of_the_forward_pass_is_not():
  x = jnp.zeros(2)
  assert "unless the loss is scaled" in str(mpjax.find_nonfinite(jax.grad(jnp.linalg.norm))(x))
  assert "no loss scale helps" in str(mpjax.find_nonfinite(jnp.log)(x))


def test_the_columns_of_the_text_are_magnitudes():
  lines = str(mpjax.find_nonfinite(jnp.sqrt)(-jnp.ones(3))).splitlines()
  (header,) = (i for i, line in enumerate(lines) if line.startswith("value "))
  assert lines[header].split("shape")[1].split("inf")[0].split() == [
    "least",
    "|x|",
    "largest",
    "|x|",
  ]
  assert lines[header + 1].split()[-4:-2] == ["1", "1"]
