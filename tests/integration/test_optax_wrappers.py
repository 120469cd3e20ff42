"""`loss_scaling` inside and outside of what optax offers: what works, what is wrong by order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import mpjax
from tests.errors import check_error
from tests.programs import bits

STATIC = mpjax.StaticLossScale(1024)
PARAMS = {"w": jnp.asarray([1.0, -2.0]), "b": jnp.asarray([0.5])}
GRADS = {"w": jnp.asarray([0.25, 1.0]), "b": jnp.asarray([2.0])}


def scaled(grads, bad=None):
  grads = jax.tree.map(lambda g: g * 1024, grads)
  return grads if bad is None else grads | {"b": jnp.asarray([bad])}


def quadratic(params):
  return 0.5 * optax.tree.norm(params, squared=True)


@pytest.mark.case("B117")
def test_lookahead_works_inside_where_a_skipped_step_does_not_count():
  """By hand its gradients may have zeros for the slow parameters; in a training step they do."""
  inner = optax.lookahead(optax.sgd(0.1), 2, 0.5)
  tx = mpjax.loss_scaling(inner, STATIC)
  params = control = optax.LookaheadParams.init_synced(PARAMS)
  state, plain = tx.init(params), inner.init(params)
  for bad in (None, np.inf, None, None, np.nan, None):
    fast = scaled(GRADS, bad)
    grads = optax.LookaheadParams(fast, jax.tree.map(jnp.zeros_like, fast))
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    if bad is None:
      updates, plain = inner.update(GRADS, plain, control)
      control = optax.apply_updates(control, updates)
    assert bits(params) == bits(control)
  assert bits(state.inner_state) == bits(plain)
  assert isinstance(params, optax.LookaheadParams)

  step = mpjax.make_train_step(lambda p, ms, b, rng: (quadratic(p.fast) * b, (ms, {})), tx)
  state = mpjax.TrainState.create(optax.LookaheadParams.init_synced(PARAMS), tx)
  for factor in (1.0, np.inf, 1.0):
    state, _ = step(state, jnp.asarray(factor))
  # Twice by 0.9, and then half way back to where it began.
  for name, start in PARAMS.items():
    for found in (state.params.fast[name], state.params.slow[name]):
      np.testing.assert_allclose(found, start * (1 + 0.81) / 2, rtol=1e-6)


def after(tx, *gradients):
  """Returns the last updates, and the state, after these gradients."""
  state = tx.init(PARAMS)
  for grads in gradients:
    updates, state = tx.update(grads, state, PARAMS)
  return updates, state


@pytest.mark.case("B106", "B146", "B105")
def test_only_what_is_inside_is_protected():
  """Momentum before the wrapper swallows a NaN and never gives it back; a clip hides an inf."""
  momentum, rate = optax.trace(0.9), optax.scale(-0.1)
  stream = scaled(GRADS), scaled(GRADS, np.nan), scaled(GRADS)
  _, outside = after(optax.chain(momentum, mpjax.loss_scaling(rate, STATIC)), *stream)
  _, inside = after(mpjax.loss_scaling(optax.chain(momentum, rate), STATIC), *stream)
  assert mpjax.loss_scaling_metrics(outside)["skipped"] == 2, "for ever"
  assert not mpjax.all_finite(outside)
  assert mpjax.loss_scaling_metrics(inside)["skipped"] == 1
  assert mpjax.all_finite(inside)
  for mask, bad, applied in ((optax.clip(1.0), np.inf, -1 / 1024), (optax.zero_nans(), np.nan, 0)):
    grads, sgd = scaled(GRADS, bad), optax.sgd(1.0)
    updates, state = after(optax.chain(mask, mpjax.loss_scaling(sgd, STATIC)), grads)
    assert mpjax.loss_scaling_metrics(state)["finite"], "hidden"
    assert updates["b"] == applied
    assert np.any(updates["w"]), "the rest of a bad gradient was applied"
    updates, state = after(mpjax.loss_scaling(optax.chain(mask, sgd), STATIC), grads)
    assert not mpjax.loss_scaling_metrics(state)["finite"]
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
  assert "protects only what is inside" in " ".join(mpjax.loss_scaling.__doc__.split())


@pytest.mark.case("B146", "B107", "B108")
def test_multi_steps_outside_poisons_its_window():
  """Outside, a NaN stays in the accumulator; inside, the bad micro-batch is never seen."""
  stream = [scaled(GRADS, np.nan), scaled(GRADS), scaled(GRADS), scaled(GRADS)]
  sgd = optax.sgd(1.0)
  _, outside = after(optax.MultiSteps(mpjax.loss_scaling(sgd, STATIC), 2), *stream)
  windows = optax.MultiSteps(sgd, 2).gradient_transformation()
  _, inside = after(mpjax.loss_scaling(windows, STATIC), *stream)
  assert not mpjax.all_finite(outside)
  assert mpjax.all_finite(inside)
  metrics = mpjax.loss_scaling_metrics(inside)
  assert (metrics["total"], metrics["skipped"]) == (4, 1)
  # Three finite micro-batches: one full window of the same gradient has been applied.
  assert inside.inner_state.gradient_step == 1


@pytest.mark.case("B113")
@pytest.mark.parametrize("where", ["mask inside", "mask outside", "partition inside"])
def test_frozen_leaves(where):
  trained = {"w": True, "b": False}
  sgd = optax.sgd(1.0)
  freeze = optax.partition({"t": sgd, "f": optax.set_to_zero()}, {"w": "t", "b": "f"})
  tx = {
    "mask inside": mpjax.loss_scaling(optax.masked(sgd, trained), STATIC),
    "mask outside": optax.masked(mpjax.loss_scaling(sgd, STATIC), trained),
    "partition inside": mpjax.loss_scaling(freeze, STATIC),
  }[where]
  updates, state = tx.update(scaled(GRADS), tx.init(PARAMS), PARAMS)
  # masked hands the gradient itself on; partition with set_to_zero is what freezes.
  assert updates["b"] == {"mask inside": 2, "mask outside": 2048, "partition inside": 0}[where]
  bad, state = tx.update(scaled(GRADS, np.nan), state, PARAMS)
  finite = mpjax.loss_scaling_metrics(state)["finite"]
  if where == "mask outside":
    assert finite, "the frozen leaf is outside of the check"
    assert np.isnan(bad["b"])
  else:
    assert not finite
    assert bad["b"] == 0


@pytest.mark.case("A68")
def test_growing_the_tree_in_the_middle_of_a_run():
  tx = mpjax.loss_scaling(optax.adam(0.1))
  _, state = tx.update(scaled(GRADS, np.inf), tx.init(PARAMS), PARAMS)
  grown = PARAMS | {"new": jnp.ones(2)}
  with pytest.raises(mpjax.errors.MpjaxValueError, match=r"nothing at \['new'\]"):
    tx.update(GRADS, state, grown)
  fresh = tx.init(grown)
  assert mpjax.loss_scaling_metrics(fresh)["loss_scale"] == 2.0**15, "nothing is carried silently"
  scale = float(mpjax.loss_scaling_metrics(state)["loss_scale"])
  carried = mpjax.set_loss_scale(fresh, scale)
  assert mpjax.loss_scaling_metrics(carried)["loss_scale"] == 2.0**14
  start = mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale(init_scale=2.0**14)).init(
    grown
  )
  assert jax.tree.structure(carried) == jax.tree.structure(start)
  assert bits(carried) == bits(start), "the rest equals a run that starts there"
  assert "set it in the state that `init` makes" in " ".join(mpjax.set_loss_scale.__doc__.split())


# Sharpness-aware minimisation: transparent, with a cache in its state, and opaque, with grad_fn.


def sam(opaque):
  adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  return optax.contrib.sam(optax.sgd(0.1), adversary, opaque_mode=opaque)


def in_float16(params):
  return jnp.sum(jnp.square(params.astype(jnp.float16)).astype(jnp.float32))


@pytest.mark.parametrize(("jit", "check"), [(True, True), (True, False), (False, True)])
def test_opaque_sam_takes_the_gradient_function_of_the_step(jit, check):
  """What it returns was taken for unscaled gradients: steps 1024 times too large."""
  params = jnp.asarray([1.0, -2.0])
  tx = mpjax.loss_scaling(sam(True), STATIC, check_updates=check)

  def step(params, state):
    differentiate = mpjax.value_and_grad(in_float16, state)
    grads = differentiate(params)[1]
    return tx.update(grads, state, params, grad_fn=lambda p, _: differentiate(p)[1])

  updates, state = (jax.jit(step) if jit else step)(params, tx.init(params))
  grad = jax.grad(in_float16)
  expected, _ = sam(True).update(
    grad(params), sam(True).init(params), params, grad_fn=lambda p, _: grad(p)
  )
  np.testing.assert_allclose(updates, expected, rtol=1e-6)
  assert mpjax.loss_scaling_metrics(state)["finite"]


@pytest.mark.parametrize("jit", [True, False])
def test_a_gradient_that_overflows_inside_of_sam_skips_the_step_and_backs_off(jit):
  """clip makes a finite update of an inf: only the gradient itself shows it."""
  params = jnp.asarray([1.0, -2.0])
  adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  inner = optax.contrib.sam(
    optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)), adversary, opaque_mode=True
  )
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(init_scale=8))

  def step(params, state, inside):
    def grad_fn(params, _):
      return jnp.stack([params[0] * 8, inside])

    return tx.update(jnp.asarray([8.0, 8.0]), state, params, grad_fn=grad_fn)

  step = jax.jit(step) if jit else step
  updates, good = step(params, tx.init(params), 8.0)
  assert np.all(updates)
  for bad in (jnp.inf, jnp.nan):
    updates, state = step(params, good, bad)
    assert np.all(np.signbit(updates))
    assert not np.any(updates)
    assert bits(state.inner_state) == bits(good.inner_state)
    metrics = mpjax.loss_scaling_metrics(state)
    assert (metrics["loss_scale"], metrics["skipped"], metrics["bad_updates"]) == (4, 1, 0)
    with pytest.raises(mpjax.errors.MpjaxRuntimeError, match="in the gradient of the root"):
      mpjax.check_skipped_steps(state, 1, params=params)


@pytest.mark.parametrize("where", ["cond", "scan", "vmap", "jit"])
def test_a_gradient_function_that_is_called_in_a_loop_or_branch_is_refused(where):
  """It was an UnexpectedTracerError, which named nothing of the user's."""

  def update(updates, state, params=None, *, grad_fn, **_):
    call = lambda p, _=None: (grad_fn(p, 0), 0.0)  # noqa: E731
    inside = {
      "cond": lambda: jax.lax.cond(jnp.sum(params) < 9, call, lambda p: (p, 0.0), params)[0],
      "scan": lambda: jax.lax.scan(call, params, jnp.arange(2))[0],
      "vmap": lambda: jax.vmap(call)(jnp.expand_dims(params, 0))[0][0],
      "jit": lambda: jax.jit(call)(params)[0],
    }
    return jax.tree.map(jnp.add, updates, inside[where]()), state

  inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  params = jnp.asarray([1.0, -2.0])

  def step(config):
    tx = mpjax.loss_scaling(inner, config)
    return tx.update(params, tx.init(params), params, grad_fn=lambda p, _: p * 2)[0]

  for run in (step, jax.jit(step, static_argnums=0)):
    with pytest.raises(TypeError) as error:
      run(STATIC)
    check_error(
      error,
      where="mpjax.loss_scaling(inner).update(grad_fn)",
      expected="inner to call it in Python",
      got="a loop, a branch",
      fix="Call it outside of jax.lax.scan",
      builtin=TypeError,
    )
    assert run(mpjax.NoLossScale()).tolist() == [5, -10] if where == "scan" else [3, -6]


@pytest.mark.parametrize("scaled", [True, False])
def test_opaque_sam_with_several_losses(scaled):
  config = mpjax.StaticLossScale(4) if scaled else mpjax.NoLossScale()
  tx = mpjax.loss_scaling(sam(True), {"a": config, "b": config})
  params = jnp.asarray([1.0, -2.0])
  factor = 4.0 if scaled else 1.0

  def both(params, _=None):
    return {"a": factor * params, "b": factor * params**2}

  updates, _ = tx.update(both(params), tx.init(params), params, grad_fn=both)
  total = lambda p, _=None: p + p**2  # noqa: E731
  plain = sam(True)
  expected, _ = plain.update(total(params), plain.init(params), params, grad_fn=total)
  np.testing.assert_allclose(updates, expected, rtol=1e-6)


def test_sam_in_a_training_step_which_hands_it_a_value_it_does_not_know():
  params = jnp.asarray([1.0, -2.0])
  tx = mpjax.loss_scaling(mpjax.accumulate_gradients(sam(False), 1), mpjax.StaticLossScale(4))
  step = mpjax.make_train_step(lambda p, ms, b, rng: (in_float16(p) * b, (ms, {})), tx)
  state = mpjax.TrainState.create(params, tx)
  plain, control = sam(False), params
  plain_state = plain.init(params)
  for factor in (1.0, np.inf, 1.0, 1.0, 1.0):
    state, _ = step(state, jnp.asarray(factor))
    if np.isfinite(factor):
      updates, plain_state = plain.update(jax.grad(in_float16)(control), plain_state, control)
      control = optax.apply_updates(control, updates)
    np.testing.assert_allclose(state.params, control, rtol=1e-5)
  assert state.step == 4
