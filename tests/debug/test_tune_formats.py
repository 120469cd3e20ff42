import mpjax
from mpjax._debug.tune_formats import cost_of
from mpjax._debug.tune_report import Evaluation


def test_the_share_of_float32_decides_among_choices_and_then_the_preferred_format():
  policies = tuple(map(mpjax.Policy.parse, ("mixed_int8", "mixed_bfloat16", "mixed_float16")))

  def cost(others=(), policies=policies, policy=policies[0], **shares):
    choice = Evaluation((), (), 0.0, 1.0, policy, 8.0, dict(others), shares, {})
    return cost_of(policies, {"a": 4, "b": 6}, choice)

  wide = cost(int8=0.9, float32=0.1)
  ranked = [
    cost(int8=0.4, bfloat16=0.6),
    cost({"a": policies[1]}, int8=0.4, bfloat16=0.6),
    cost(bfloat16=1.0),
    cost(float16=1.0),
    wide,
  ]
  assert ranked == sorted(ranked)
  assert len(set(ranked)) == 5
  # Bfloat16 beside int8 is not preferred to float16, so that the choice with fewer rules is.
  int8, _, float16 = policies
  all_float16 = cost(policies=(int8, float16), policy=float16, float16=1.0)
  assert all_float16 < cost({"a": float16}, (int8, float16), float16=0.6, bfloat16=0.4)
