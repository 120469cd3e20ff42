"""Nothing of a skipped step of NNX remains, statistics, counts and new optimizers included."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.programs import bits


def network():
  """Returns a model with a layer that is tied, statistics and dropout."""
  rngs = nnx.Rngs(0)
  layers = [nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)]
  model = nnx.Sequential(*layers, nnx.Dropout(0.5, rngs=rngs))
  model.layers[1].kernel = model.layers[0].kernel
  return model


ADAM = optax.adam(0.1)


def training(inner=ADAM):
  model = network()
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(init_scale=8))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def plain_step(model, optimizer, x):
  loss, grads = mpjax.nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2), optimizer)(model)
  optimizer.update(model, grads)
  return loss


def numbers(model, optimizer):
  """Everything but the loss scale."""
  state = nnx.state((model, optimizer.opt_state.inner_state, optimizer.step))
  leaves = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "type"))
  return bits([nnx.as_pure(x) for x in leaves])


def counts(optimizer):
  metrics = mpjax.loss_scaling_metrics(optimizer)
  return tuple(metrics[key] for key in ("total", "skipped", "consecutive_skips", "finite"))


GOOD, BAD = jnp.arange(8.0).reshape(2, 4), jnp.full((2, 4), jnp.inf)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_skipped_step_is_a_deleted_one(wrap):
  step = wrap(mpjax.nnx.atomic_step(plain_step))
  ours, deleted, plain = training(), training(), training()
  for x in (GOOD, BAD, BAD, GOOD):
    step(*ours, x)
    if x is GOOD:
      step(*deleted, x)
      wrap(plain_step)(*plain, x)
    else:
      assert not mpjax.last_step_finite(ours[1])
  assert numbers(*ours) == numbers(*deleted) == numbers(*plain)
  assert mpjax.loss_scaling_metrics(ours[1])["loss_scale"] == 2
  assert ours[0].layers[1].kernel is ours[0].layers[0].kernel


def test_of_two_optimizers_the_one_that_is_updated_decides():
  # The other one has skipped its last step, which was another.
  (model, optimizer), (other, skipped) = training(), training()
  plain_step(other, skipped, BAD)
  assert not mpjax.last_step_finite(skipped)
  with pytest.raises(mpjax.errors.MpjaxRuntimeError, match="skipped steps in a row"):
    mpjax.check_skipped_steps(skipped, 1)
  step = mpjax.nnx.atomic_step(lambda m, o, unused, x: plain_step(m, o, x))
  step(model, optimizer, skipped, GOOD)
  assert int(model.layers[3].rngs.count[...]) == int(optimizer.step[...]) == 1


@mpjax.nnx.atomic_step
def both(one, x, other, y):
  plain_step(*one, x)
  plain_step(*other, y)


def test_where_one_of_two_optimizers_has_skipped_the_other_keeps_its_moments_as_well():
  # Else they were of a step that the parameters have not made; split masters were others.
  labels = lambda params: jax.tree.map(lambda p: p.ndim, params)  # noqa: E731
  for inner in (ADAM, optax.multi_transform({1: optax.set_to_zero(), 2: ADAM}, labels)):
    one, other = training(inner), training()
    before = numbers(*one)
    both(one, GOOD, other, BAD)
    assert numbers(*one) == before
    assert counts(one[1]) == (1, 1, 1, False)
    both(one, GOOD, other, GOOD)
    assert counts(one[1]) == (2, 1, 0, True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_updates_of_a_step_are_applied_or_none(dtype):
  # Of an only optimizer, which keeps its own state, but in each update by itself.
  def each(model, optimizer, batches):
    return [plain_step(model, optimizer, x) for x in batches]

  def start():
    model, tx = network(), mpjax.loss_scaling(mpjax.master_weights(ADAM, storage="split"))
    nnx.update(model, jax.tree.map(lambda p: p.astype(dtype), nnx.state(model, nnx.Param)))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

  ours, plain = start(), start()
  before, compiled = numbers(*ours), nnx.jit(step := mpjax.nnx.atomic_step(each))
  for batches in ([BAD, GOOD], [GOOD, BAD]):
    compiled(*ours, batches)
    assert numbers(*ours) == before
  assert counts(ours[1]) == (4, 4, 4, False)
  step(*ours, [GOOD, GOOD])
  each(*plain, [GOOD, GOOD])
  assert numbers(*ours) == numbers(*plain)


def test_without_a_scale():
  where = "mpjax.nnx.atomic_step(step)"
  for other in (GOOD, mpjax.loss_scaling(ADAM).init(GOOD)):  # A state in no variables is returned.
    with refused(TypeError, where, "a loss scale among the arguments", "none", "nnx.Optimizer"):
      mpjax.nnx.atomic_step(lambda x: x)(other)
  with refused(TypeError, where, "a function", "3", "@mpjax.nnx.atomic_step"):
    mpjax.nnx.atomic_step(3)
  model = network()
  tx = mpjax.loss_scaling(ADAM, mpjax.NoLossScale())
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  mpjax.nnx.atomic_step(plain_step)(model, optimizer, BAD)
  assert int(optimizer.step[...]) == 1, "nothing is skipped"
  before = numbers(model, optimizer)
  both((model, optimizer), GOOD, training(), BAD)
  assert numbers(model, optimizer) == before


def test_it_needs_no_more_memory():
  # The moments are kept by the update itself: a second choice would keep the old ones beside.
  model, optimizer = training()
  graphdef, state = nnx.split((model, optimizer))

  def temporaries(step):
    def pure(state, x):
      model, optimizer = nnx.merge(graphdef, state, copy=True)
      loss = step(model, optimizer, x)
      return nnx.state((model, optimizer)), loss

    compiled = jax.jit(pure, donate_argnums=0).lower(state, GOOD).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(mpjax.nnx.atomic_step(plain_step)) <= temporaries(plain_step) + 256
