import json

import jax.numpy as jnp

import mpjax
from mpjax._diagnostics.nonfinite.report import NonfiniteReport, power


def test_nothing_found_is_false_and_says_so():
  report = NonfiniteReport(loss_scale=1024.0, step=3)
  assert not report
  assert "finite" in str(report)
  assert "2^10" in str(report)
  assert repr(report) == "NonfiniteReport(nothing found)"
  assert (power(1024.0), power(0.5), power(1000.0)) == ("2^10", "2^-1", "1000")


def test_a_report_fits_80_columns_and_is_json():
  def fn(x):
    return jnp.sum(jnp.exp(x).astype(jnp.float32))

  report = mpjax.find_nonfinite(fn)(jnp.asarray([1, 12], jnp.float16))
  text = str(report)
  assert max(map(len, text.splitlines())) <= 80
  for part in ("exp", "forward", "test_report.py:", "float16[2]", "1.63e+05 > 65504", "mixed_bf"):
    assert part in text
  found = json.loads(report.to_json())
  assert found["operation"] == "exp"
  assert found["index"] == [1]
  assert found["result"]["inf"] == 1
  assert "exp" in report._repr_html_()
