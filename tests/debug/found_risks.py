"""Find the risks of small functions, for the tests of what audits report."""

import mpjax
from tests.models.values import normal

WEIGHT, INPUT = normal(8, 8) / 3, normal(4, 8, seed=1)


def risks(fn, *args, policy="mixed_bfloat16", **options):
  return mpjax.audit(mpjax.autocast(fn, policy, **options))(*(args or (WEIGHT, INPUT))).risks


def kinds(fn, *args, **options):
  return [x.kind for x in risks(fn, *args, **options)]
