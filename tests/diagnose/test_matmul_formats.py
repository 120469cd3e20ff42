import collections

from mpjax._diagnose.matmul_formats import shares_of


def test_shares_are_of_all_modules_and_float32_comes_last():
  flops = {
    "a": collections.Counter(float32=1, int8=3),
    "b": collections.Counter(float16=2, bfloat16=2),
  }
  shares = shares_of(flops)
  assert shares == {"int8": 3 / 8, "bfloat16": 2 / 8, "float16": 2 / 8, "float32": 1 / 8}
  assert next(iter(shares)) == "int8"
  assert [*shares][-1] == "float32"
