"""The new version of a loss scale is known by its count of steps, wherever a step returns it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._optim.step_at_scales import examine, is_updated, locate_scales, pair_versions, run_at
from mpjax._optim.step_call import RETURNED, WRITTEN, StepCall, StepProgram

pytestmark = pytest.mark.standard_promotion("dtypes")

TX = mpjax.loss_scaling(optax.adam(0.1))
W = jnp.ones(3)


def update(w, opt_state):
  def loss_fn(w):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(w))

  grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(w)[1]
  updates, opt_state = TX.update(grads, opt_state, w)
  return optax.apply_updates(w, updates), opt_state


def examined(step, *args):
  call = StepCall(step, args, {})
  return examine(call, StepProgram(call), locate_scales(call))


def test_one_state_as_two_arguments_is_two_scales():
  state = TX.init(W)
  scales = locate_scales(StepCall(update, (W, [state, state]), {}))
  assert [scale.fields["total"][:2] for scale in scales] == [("[1]", "[0]"), ("[1]", "[1]")]


def test_states_that_are_returned_in_another_order_are_told_apart():
  # They have the same tree and the same numbers.
  step = examined(lambda w, a, b: (b, update(w, a)), W, TX.init(W), TX.init(W))
  a, b = step.scales
  assert a.new["total"][:3] == (RETURNED, "[1]", "[1]")
  assert b.new["total"][:2] == (RETURNED, "[0]")
  assert (is_updated(step, a), is_updated(step, b)) == (True, False)


def test_a_state_that_is_dropped_has_no_new_version():
  step = examined(lambda w, state: update(w, state)[0], W, TX.init(W))
  assert not step.scales[0].new
  assert not is_updated(step, step.scales[0])


def test_the_moments_of_a_state_that_is_dropped_have_no_new_version():
  # They have the tree of the parameters, and so would be paired with these.
  step = examined(lambda w, state: (0, update(w, state)[0]), {"w": W}, TX.init({"w": W}))
  assert pair_versions(step, None).pairs == {("[0]", "['w']"): (RETURNED, "[1]", "['w']")}


def looking(step):
  """Returns a step that cannot be traced."""

  def looks(model, optimizer):
    float(model.bias[0])
    return step(model, optimizer)

  return looks


@pytest.mark.parametrize("jit", [nnx.jit, jax.jit, looking])
def test_new_versions_are_in_the_variables_or_in_a_returned_state(jit):
  model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

  @jit
  def step(model, optimizer):
    grads = nnx.value_and_grad(mpjax.scaled(lambda model: jnp.sum(model(W) ** 2), optimizer))(
      model
    )[1]
    optimizer.update(model, grads)
    return nnx.state((model, optimizer))

  result = examined(step, model, optimizer)
  where = RETURNED if jit is jax.jit else WRITTEN
  assert result.scales[0].new["total"][0] == where
  assert {place[0] for place in pair_versions(result, None).pairs.values()} == {where}


def test_a_variable_that_holds_no_array_after_the_step_has_no_new_version():
  kept = nnx.Intermediate(W)

  def step(w, opt_state, kept):
    kept.set_value((w,))
    return update(w, opt_state)

  pairs = pair_versions(examined(step, W, TX.init(W), kept), None).pairs
  assert ("[0]",) in pairs
  assert ("[2]",) not in pairs


def test_a_run_at_a_scale_counts_the_steps_that_are_applied():
  step = examined(lambda w, state: update(*update(w, state)), W, TX.init(W))
  (scale,) = step.scales
  run = run_at(step, scale, 8.0, step.call.arrays)
  assert run.applied == 2
  assert run.after[scale.new["scale"]] == 8
  assert run_at(step, scale, np.nan, step.call.arrays).applied == 0
