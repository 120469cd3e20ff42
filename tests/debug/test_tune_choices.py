import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax._debug.tune_choices import Tuner
from mpjax._debug.tune_loss import Goal, TunedCall, prepare, reference_of
from tests.debug.losses_to_tune import Root, prepared
from tests.models.values import normal


def test_the_progress_counts_the_measurements_that_are_announced():
  loss_fn, *args = prepared(Root())
  policy, goal, steps = mpjax.Policy.parse("mixed_bfloat16"), Goal(1e-9, 1.0), []
  tuned = TunedCall((policy,), goal, loss_fn, args, {}, lambda *step: steps.append(step))
  loss = prepare(tuned)
  tuner = Tuner(loss, reference_of(loss))
  assert steps == []
  tuner.measure({})
  tuner.search()
  assert steps == [(i + 1, loss.bound) for i in range(len(tuner.evaluations))]
  assert 1 < len(steps) <= loss.bound


class Scores(nnx.Module):
  def __init__(self):
    self.q, self.k = (nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2))

  def __call__(self, x):
    return self.q(x) @ self.k(x).T


def test_rules_keep_matmuls_of_results_of_modules_in_low_precision():
  def loss(model):
    return jnp.mean(model(normal(32, 64)) ** 2)

  model = Scores()
  mxfp8, float16 = policies = tuple(map(mpjax.Policy.parse, ("mixed_mxfp8", "mixed_float16")))
  goal = Goal(0.1, 8.0)
  tuned_loss = prepare(TunedCall(policies, goal, loss, (model,), {}, lambda step, steps: None))
  tuner = Tuner(tuned_loss, reference_of(tuned_loss))
  low = tuner.measure({})
  tuner.measure({"q": float16, "k": float16, "": mxfp8})
  plain, choice = tuner.evaluations
  assert plain.formats == {"q": ("mxfp8",), "k": ("mxfp8",), "": ("bfloat16",)}
  assert choice.formats == {"q": ("float16",), "k": ("float16",), "": ("bfloat16",)}
  assert [str(rule.policy) for rule in choice.rules] == ["params=float32,compute=float16"] * 2
  assert choice.half_share == 1 == pytest.approx(sum(choice.shares.values()))
  in_model = mpjax.with_policy(model, choice.policy, choice.rules)
  assert mpjax.audit(nnx.grad(loss))(in_model).half_share == 1
  assert jax.eval_shape(in_model, normal(32, 64)).dtype == jnp.float32
  # Matmuls in blocks have another primitive than those in float32.
  assert all(0.01 < row.forward < 0.1 for row in tuner.rows(low))
