import jax
import jax.numpy as jnp
import optax

import mpjax
from mpjax._diagnostics.arguments import Call
from mpjax._diagnostics.nonfinite.scales import implied_scale, scale_of
from mpjax._jaxprs.steps import body_of


def implied(fn, *args):
  call = Call(args, {})
  return implied_scale(body_of(call.traced(fn)[0], compiled=True), call.arrays)


def test_the_state_of_an_optimizer_holds_the_scale():
  tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.DynamicLossScale(init_scale=2.0**10, min_scale=4))
  state = tx.init(jnp.ones(2))
  args = (jnp.ones(2), state)
  leaves = Call(args, {}).arrays
  scale = scale_of(args, {}, leaves)
  assert (scale.value, scale.least, scale.step) == (1024, 4, 0)
  assert [float(leaves[i]) for i in scale.positions] == [1024]


def test_a_factor_of_the_loss_and_of_its_cotangent_is_a_scale_and_a_weight_is_none():
  def step(w, scale):
    return jax.value_and_grad(lambda w: jnp.sum(w * w) * scale)(w)

  w = jnp.ones(2)
  for scale in (1024.0, jnp.asarray(1024.0)):
    found, body, leaves = implied(step, w, scale)
    assert found.value == 1024
    assert [(float(leaves[i]), body.avals[body.inputs[i]].shape) for i in found.positions] == [
      (1024, ()),
      (1024, ()),
    ]
  assert implied(step, w, 0.5)[0] is None
  assert implied(jnp.median, jnp.ones(4))[0] is None  # It has a factor that is a float of Python.
  assert scale_of((w,), {}, [w]) is None
