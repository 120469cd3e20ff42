import pytest
from jax.extend.core import primitives as p

from mpjax._diagnostics.nonfinite.cures import Fault, cause_and_cure, pattern
from mpjax._diagnostics.nonfinite.report import Range


def ranged(dtype="float32", least=1.0, most=2.0, inf=0, nan=0, value=None):
  return Range(
    name="", dtype=dtype, shape=(2,), least=least, most=most, inf=inf, nan=nan, value=value
  )


def fault(primitive, operands, result, wide=None, finite_at=None, path="Net/up", from_state=True):
  return Fault(primitive, path, tuple(operands), result, wide, finite_at, from_state)


@pytest.mark.parametrize(
  ("given", "cause", "cure"),
  [
    (
      fault(p.mul_p, [ranged("float16")], ranged("float16", inf=1), ranged(most=7.1e4)),
      "7.1e+04",
      'Rule("float32", path="**/up")',
    ),
    (
      fault(p.mul_p, [ranged("float16")], ranged("float16", inf=1), finite_at=2.0**13),
      "at this loss scale",
      "set_loss_scale(opt_state, 8192)",
    ),
    (
      fault(p.mul_p, [ranged(value=0), ranged(inf=1, value=float("-inf"))], ranged(nan=1)),
      "0 * inf",
      "jnp.where(mask",
    ),
    (
      fault(p.sub_p, [ranged(inf=1, value=float("-inf"))] * 2, ranged(nan=1)),
      "inf - inf",
      "jnp.finfo(jnp.float32).min",
    ),
    (fault(p.log_p, [ranged(value=0)], ranged(inf=1)), "log of 0", "jnp.where(x > 0, x, 1)"),
    (fault(p.div_p, [ranged(), ranged(value=0)], ranged(inf=1)), "is 0", "x / jnp.where"),
    (fault(p.exp_p, [ranged(value=99)], ranged(inf=1)), "overflows float32", "jnp.max(x)"),
  ],
)
def test_the_cause_and_the_cure(given, cause, cure):
  found = cause_and_cure(given)
  assert cause in found[0]
  assert cure in found[1]


def test_the_path_of_a_rule():
  assert pattern("Net/up") == "**/up"
  assert pattern("head") == "**/head"
