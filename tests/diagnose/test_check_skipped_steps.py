import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.optim.steps import ADAM, BAD, GOOD, PARAMS, after, update

pytestmark = pytest.mark.standard_promotion("dtypes")

WHERE = "mpjax.check_skipped_steps(opt_state)"


def blamed(state, got, skips=1, fix="look for an inf or NaN in the data", **options):
  """Asserts that so many skipped steps raise, and what is blamed for the last one."""
  with refused(RuntimeError, WHERE, f"fewer than {skips} skipped steps in a row", got, fix):
    mpjax.check_skipped_steps(state, skips, **options)


def test_check_skipped_steps_raises_after_so_many_skips():
  state = after(GOOD, *[BAD] * 4)
  mpjax.check_skipped_steps(state)
  mpjax.check_skipped_steps(state, max_consecutive_skips=5)
  last = "the last step's first non-finite value was in gradient leaf 1"
  blamed(state, f"4, at loss scale 1; {last}", 4)
  # Nor has it a name where params have no leaf at its path.
  got = "leaf 1 (in the order of jax.tree.leaves of the floating parameters that this loss scale "
  got += "sees; params have no leaf at its path)"
  blamed(state, got, params={"y": jnp.ones(3), "z": jnp.ones(2)})
  mpjax.check_skipped_steps(after(GOOD, state=state), max_consecutive_skips=1)
  for wrong in (0, -1, 1.5, "5", True):
    with pytest.raises(mpjax.MpjaxError) as error:
      mpjax.check_skipped_steps(state, wrong)
    assert error.value.where == "mpjax.check_skipped_steps(max_consecutive_skips)"
    assert error.value.expected == "an integer, at least 1"


def test_check_skipped_steps_finds_the_parameters_among_the_variables_of_linen():
  # The first leaf of the variables is a batch statistic, the first gradient that of a parameter.
  variables = {"params": PARAMS, "batch_stats": {"mean": jnp.full(2, jnp.nan)}}
  blamed(after(BAD), "was in the gradient of ['x']. ", params=variables)


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.BatchStat])
def test_check_skipped_steps_finds_the_trained_variables_of_a_model_of_nnx(wrt):
  model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(0.1)), wrt=wrt)
  bad = jax.tree.map(lambda x: x * jnp.inf, nnx.state(model, wrt))
  optimizer.update(model, bad)
  first = {nnx.Param: "bias", nnx.BatchStat: "mean"}[wrt]
  blamed(optimizer, f"was in the gradient of ['{first}']. ", params=model)


def test_check_skipped_steps_names_the_gradient_by_its_path_or_the_parameters():
  # The parameters if they are NaN, where their values can be looked at.
  nan, donated = {"w": PARAMS["w"].at[0].set(jnp.nan)}, jnp.full(2, jnp.nan)
  donated.delete()
  gone = [{"x": x} for x in (donated, jax.ShapeDtypeStruct((2,), jnp.float32))]
  data, checkpoint = "in the data and the loss, a float16 activation", "restore a checkpoint"
  twice, parameters = after(BAD, BAD), "hold a NaN at ['w'], "
  for state, params, got, fix in (
    (twice, PARAMS, "in the gradient of ['x']", data),
    (after(*[BAD | {"w": jnp.full(3, jnp.inf)}] * 2), PARAMS, "the gradient of ['w']", data),
    (twice, PARAMS | nan, parameters, checkpoint),
    (twice, PARAMS | nan | {"step": 3, "rate": 0.5}, parameters, checkpoint),
    *((twice, PARAMS | x, "in the gradient of ['x']", data) for x in gone),
    *((twice, nan | x, parameters, checkpoint) for x in gone),
  ):
    blamed(state, got, 2, fix, params=params)
  # The parameters of a train state are its own.
  blamed(mpjax.TrainState.create(PARAMS, ADAM)._replace(opt_state=twice), "gradient of ['x']", 2)


def first_step(tx, params, grads, **extra_args):
  return tx.update(grads, tx.init(params), params, **extra_args)[1]


def test_check_skipped_steps_names_the_loss():
  state = first_step(mpjax.loss_scaling(optax.sgd(0.1)), PARAMS, GOOD, loss=jnp.nan)
  blamed(state, "value was in the loss. ", params=PARAMS)


def test_check_skipped_steps_names_the_update():
  inner = optax.masked(optax.scale(3e38), {"w": False, "x": True})
  tx = mpjax.loss_scaling(inner, mpjax.SkipNonfinite(), check_updates=True)
  state = first_step(tx, PARAMS, {"w": jnp.ones(3), "x": jnp.full(2, 2.0)})
  blamed(state, "in the update of ['x']", params=PARAMS)
  blamed(state, "in update leaf 1 (in the order")


def test_check_skipped_steps_names_the_leaf_of_the_new_optimizer_state():
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.SkipNonfinite(), check_updates=True)
  state = first_step(tx, PARAMS, {"w": jnp.ones(3), "x": jnp.full(2, 1e20)})
  blamed(state, "in the new optimizer state at inner_state[0].nu['x']", params=PARAMS)


def test_check_skipped_steps_names_the_sum_of_several_losses():
  scales = dict.fromkeys(("box", "class"), mpjax.SkipNonfinite())
  large = {"w": jnp.full(3, 3e38), "x": jnp.ones(2)}
  state = first_step(
    mpjax.loss_scaling(optax.sgd(0.1), scales), PARAMS, dict.fromkeys(scales, large)
  )
  blamed(state, "in the sum of the gradients of all losses", name="box")


ONES, COMPLEX = jnp.ones(2), jnp.ones(2, jnp.complex64)
TREE = dict.fromkeys("acd", ONES)
SPLIT = optax.contrib.split_real_and_imaginary
LAST = TREE | {"d": ONES * jnp.nan}
IMAGINARY = jax.lax.complex(ONES, ONES * jnp.nan)


@pytest.mark.parametrize(
  ("wrap", "params", "grads", "got"),
  {
    "a function": (lambda tx: tx, TREE | {"a": jnp.tanh}, LAST | {"a": None}, "['d']"),
    "complex": (SPLIT, TREE | {"a": COMPLEX}, LAST | {"a": COMPLEX}, "['d']"),
    "imaginary": (SPLIT, TREE | {"d": COMPLEX}, TREE | {"d": IMAGINARY}, "['d'].imaginary"),
    "a mask": (
      lambda tx: optax.masked(tx, {"a": False, "c": True, "d": True}),
      TREE,
      LAST,
      "['d']",
    ),
    "one array": (optax.flatten, TREE, LAST, "all parameters, one array of 6 numbers"),
  }.values(),
)
def test_check_skipped_steps_names_a_leaf_of_the_tree_that_was_checked(wrap, params, grads, got):
  state = first_step(wrap(mpjax.loss_scaling(optax.sgd(0.1))), params, grads)
  blamed(state, f"was in the gradient of {got}. ", params=params)


def test_check_skipped_steps_names_the_gradient_of_an_update_without_parameters():
  tx = mpjax.loss_scaling(optax.sgd(0.1))
  params = TREE | {"a": jax.random.key(0)}
  _, state = tx.update(LAST | {"a": None}, tx.init(params))
  blamed(state, "was in the gradient of ['d']. ", params=params)


def test_check_skipped_steps_names_the_gradient_of_a_part_of_a_model():
  class Two(nnx.Module):
    def __init__(self):
      self.a = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      self.z = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

  model, part = Two(), nnx.All(nnx.Param, nnx.PathContains("z"))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(0.1)), wrt=part)
  grads = jax.tree.map(lambda x: x * jnp.nan, nnx.state(model, part))
  optimizer.update(model, grads)
  for params in (nnx.state(model, nnx.Param), nnx.as_pure(nnx.state(model, nnx.Param))):
    blamed(optimizer, "was in the gradient of ['z']['bias']", params=params)


def test_check_skipped_steps_names_the_gradient_behind_a_mask():
  # Each optimizer sees its part of the parameters, where the first gradient is another one.
  nets = {"critic": {"b": jnp.ones(1), "w": jnp.ones(2)}, "generator": {"b": jnp.ones(1)}}
  bad = nets | {"generator": {"b": jnp.full(1, jnp.nan)}}
  scaled = {name: mpjax.loss_scaling(optax.adam(0.1), name=name) for name in nets}
  tx = optax.multi_transform(scaled, {name: name for name in nets})
  _, state = tx.update(bad, tx.init(nets), nets)
  mpjax.check_skipped_steps(state, 1, params=nets, name="critic")
  got = "the gradient of ['generator']['b']. "
  blamed(state, got, params=nets, name="generator")


def test_check_skipped_steps_names_the_other_loss_whose_gradients_were_bad():
  scales = dict.fromkeys(("box", "class"), mpjax.StaticLossScale(2))
  tx = mpjax.loss_scaling(optax.sgd(0.1), scales)
  _, state = tx.update({"box": GOOD, "class": BAD}, tx.init(PARAMS), PARAMS)
  for name, params, got in (
    ("box", PARAMS, "the gradient of ['x'], of the loss 'class'"),
    (
      "box",
      None,
      "gradient leaf 1 (in the order of jax.tree.leaves of the floating parameters that",
    ),
    ("class", PARAMS, "in the gradient of ['x']. "),
  ):
    blamed(state, got, params=params, name=name)


@pytest.mark.parametrize(
  ("optimizer", "params", "got"),
  [
    (optax.adam(0.1), None, "one at ['opt_state'][0].mu['x']"),
    (optax.sgd(0.1), PARAMS | {"x": BAD["x"]}, "one at ['params']['x']"),
  ],
  ids=["state", "parameters"],
)
def test_check_skipped_steps_sees_the_nan_of_a_run_without_loss_scaling(optimizer, params, got):
  tx = mpjax.loss_scaling(optimizer, mpjax.NoLossScale())
  _, state = tx.update(GOOD, tx.init(PARAMS), PARAMS)
  # An inf is not yet a NaN, and may be meant: a mask, or the best value so far.
  mpjax.check_skipped_steps(state, params=PARAMS | {"x": jnp.full(2, -jnp.inf)})
  _, state = tx.update(BAD, state, PARAMS)
  with refused(RuntimeError, WHERE, "no NaN", got, "mpjax.SkipNonfinite()"):
    mpjax.check_skipped_steps(state, params=params)
  with pytest.raises(TypeError, match="got a traced one"):
    jax.eval_shape(lambda s: mpjax.check_skipped_steps(s, params=PARAMS["w"] * 1), state)


def test_check_skipped_steps_refuses_a_traced_state():
  with refused(TypeError, WHERE, "a concrete state", "traced", "after the jitted step"):
    jax.eval_shape(mpjax.check_skipped_steps, ADAM.init(PARAMS))


def with_scale(state, **fields):
  ((label, scale),) = state.loss_scale.items()
  return state._replace(loss_scale={label: scale._replace(**fields)})


@pytest.mark.parametrize("scale", [np.nan, np.inf, 0.0, -1.0])
def test_check_skipped_steps_finds_a_damaged_scale(scale):
  expected, got = "a positive finite loss scale", str(np.float32(scale))
  with refused(RuntimeError, WHERE, expected, got, "restore another checkpoint"):
    mpjax.check_skipped_steps(with_scale(ADAM.init(PARAMS), scale=jnp.float32(scale)))


def test_a_damaged_scale_that_is_set_anew_is_none():
  state = mpjax.states.set_loss_scale(with_scale(ADAM.init(PARAMS), scale=jnp.float32(jnp.nan)), 4)
  mpjax.check_skipped_steps(state)
  assert mpjax.loss_scaling_metrics(update(GOOD, state))["skipped"] == 0


def test_find_nonfinite_shows_where_skipped_steps_begin():
  def step(params, state):
    loss_fn = lambda p: jnp.sum(jnp.log(p["w"] - 1))  # noqa: E731
    loss, grads = jax.value_and_grad(mpjax.scaled(loss_fn, state))(params)
    return loss, ADAM.update(grads, state, params)[1]

  params = {"w": PARAMS["w"]}
  state = ADAM.init(params)
  with pytest.raises(RuntimeError) as error:
    mpjax.check_skipped_steps(step(params, state)[1], 1)
  assert "print(mpjax.find_nonfinite(step)(state, batch)) shows where" in str(error.value)
  found = mpjax.find_nonfinite(step)(params, state)
  assert (found.operation, found.direction, found.verdict) == ("log", "forward", "value")


def test_check_skipped_steps_looks_at_the_worst_member():
  states = jax.vmap(ADAM.init)(jax.tree.map(lambda p: jnp.stack([p] * 3), PARAMS))
  states = with_scale(states, consecutive_skips=jnp.asarray([0, 7, 2], jnp.int32))
  mpjax.check_skipped_steps(states, 8)
  blamed(states, "7, at loss scale 4", 7)


def test_skipped_steps_leave_no_nan_behind():
  """What is advised where `NoLossScale` let a NaN in."""
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.SkipNonfinite())
  updates, state = tx.update(BAD, tx.init(PARAMS), PARAMS)
  params = optax.apply_updates(PARAMS, updates)
  mpjax.check_skipped_steps(state, params=params)
  assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((params, state.inner_state)))
