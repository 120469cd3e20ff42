import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._jaxpr.reader import walk
from tests.errors import refused
from tests.loss_scale_oracle import Oracle
from tests.programs import bits

PARAMS = {"w": jnp.ones(3), "x": jnp.ones(2)}
TX = mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale(init_scale=4, growth_interval=2))
GOOD = jax.tree.map(jnp.ones_like, PARAMS)
WHERE = "mpjax.check_skipped_steps(opt_state)"
BAD = {"w": jnp.ones(3), "x": jnp.asarray([0.0, jnp.nan])}


@jax.jit
def update(grads, state):
  return TX.update(grads, state, PARAMS)[1]


def after(*grads, state=None):
  return functools.reduce(lambda s, g: update(g, s), grads, state or TX.init(PARAMS))


def blamed(state, got, skips=1, fix="look for an inf or NaN in the data", **options):
  """Asserts that so many skipped steps raise, and what is blamed for the last one."""
  with refused(RuntimeError, WHERE, f"fewer than {skips} skipped steps in a row", got, fix):
    mpjax.check_skipped_steps(state, skips, **options)


def test_metrics_are_these_scalars():
  metrics = mpjax.loss_scaling_metrics(after(GOOD, BAD, BAD))
  counters = ("good_steps", "total", "skipped", "consecutive_skips", "floor_hits", "bad_updates")
  dtypes = {"loss_scale": "float32", "finite": "bool"} | dict.fromkeys(counters, "int32")
  off = mpjax.loss_scaling(optax.sgd(1.0), mpjax.NoLossScale()).init(PARAMS)
  for found in (metrics, mpjax.loss_scaling_metrics(off)):
    assert {key: value.dtype.name for key, value in found.items()} == dtypes
    assert list(found) == list(metrics)
    assert {np.shape(value) for value in found.values()} == {()}


def test_metrics_equal_the_oracle():
  state, oracle, step = TX.init(PARAMS), Oracle(init_scale=4, growth_interval=2), jnp.int32(0)
  for flag in [1, 0, 0, 0, 1, 1, 1, 0, 1]:
    old, state = state, update(GOOD if flag else BAD, state)
    step = mpjax.keep_if_skipped(state, step + 1, step)
    numbers = oracle.step(bool(flag)).numbers()
    metrics = mpjax.loss_scaling_metrics(state, before=old)
    moved = metrics["loss_scale"] != mpjax.loss_scaling_metrics(old)["loss_scale"]
    assert bool(metrics.pop("scale_changed")) is bool(moved)
    assert bool(metrics.pop("finite")) == bool(mpjax.step_applied(state)) == bool(flag)
    assert float(metrics.pop("loss_scale")) == numbers.pop("scale")
    numbers.pop("hysteresis")
    assert {key: int(value) for key, value in metrics.items()} == numbers
  assert state.inner_state[0].count == step == 5, "adam counts the applied steps only"


def test_check_skipped_steps_raises_after_so_many_skips():
  state = after(GOOD, *[BAD] * 4)
  mpjax.check_skipped_steps(state)
  mpjax.check_skipped_steps(state, max_consecutive_skips=5)
  last = "the last step's first non-finite value was in gradient leaf 1"
  blamed(state, f"4, at loss scale 1; {last}", 4)
  mpjax.check_skipped_steps(after(GOOD, state=state), max_consecutive_skips=1)
  for wrong in (0, -1, 1.5, "5", True):
    with pytest.raises(mpjax.MpjaxError) as error:
      mpjax.check_skipped_steps(state, wrong)
    assert error.value.where == "mpjax.check_skipped_steps(max_consecutive_skips)"
    assert error.value.expected == "an integer, at least 1"


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.sgd(0.1)], ids=["moments", "none"])
def test_check_skipped_steps_names_no_path_of_what_may_have_more_leaves(optimizer):
  # The first leaf of variables is a batch statistic, the first gradient that of a parameter.
  tx = mpjax.loss_scaling(optimizer)
  _, state = tx.update(BAD, tx.init(PARAMS), PARAMS)
  variables = {"params": PARAMS, "batch_stats": {"mean": jnp.ones(2)}}
  for params in (variables, nnx.Linear(1, 1, rngs=nnx.Rngs(0))):
    mpjax.check_skipped_steps(tx.init(PARAMS), params=params)
    got = "gradient leaf 1 (in the order of jax.tree.leaves of the floating parameters that"
    fix = 'Pass variables["params"], or nnx.as_pure(nnx.state(model, nnx.Param)).'
    blamed(state, got, fix=fix, params=params)


def test_check_skipped_steps_names_the_gradient_by_its_path_or_the_parameters():
  # The parameters if they are NaN, where their values can be looked at.
  nan, donated = {"w": PARAMS["w"].at[0].set(jnp.nan)}, jnp.full(2, jnp.nan)
  donated.delete()
  gone = [{"x": x} for x in (donated, jax.ShapeDtypeStruct((2,), jnp.float32))]
  data, checkpoint = "in the data and the loss, log(0), a division by 0", "restore a checkpoint"
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
  blamed(mpjax.TrainState.create(PARAMS, TX)._replace(opt_state=twice), "gradient of ['x']", 2)


def first_step(tx, params, grads, **extra_args):
  return tx.update(grads, tx.init(params), params, **extra_args)[1]


def test_check_skipped_steps_names_the_loss():
  state = first_step(mpjax.loss_scaling(optax.sgd(0.1)), PARAMS, GOOD, loss=jnp.nan)
  blamed(state, "value was in the loss. ", fix="look for", params=PARAMS)


def test_check_skipped_steps_names_the_update():
  inner = optax.masked(optax.scale(3e38), {"w": False, "x": True})
  tx = mpjax.loss_scaling(inner, mpjax.SkipNonfinite(), check_updates=True)
  state = first_step(tx, PARAMS, {"w": jnp.ones(3), "x": jnp.full(2, 2.0)})
  blamed(state, "in the update of ['x']", fix="look for", params=PARAMS)
  blamed(state, "in update leaf 1 (in the order", fix="look for")


def test_check_skipped_steps_names_the_leaf_of_the_new_optimizer_state():
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.SkipNonfinite(), check_updates=True)
  state = first_step(tx, PARAMS, {"w": jnp.ones(3), "x": jnp.full(2, 1e20)})
  blamed(
    state, "in the new optimizer state at inner_state[0].nu['x']", fix="look for", params=PARAMS
  )


def test_check_skipped_steps_names_the_sum_of_several_losses():
  scales = dict.fromkeys(("box", "class"), mpjax.SkipNonfinite())
  large = {"w": jnp.full(3, 3e38), "x": jnp.ones(2)}
  state = first_step(
    mpjax.loss_scaling(optax.sgd(0.1), scales), PARAMS, dict.fromkeys(scales, large)
  )
  blamed(state, "in the sum of the gradients of all losses", fix="look for", name="box")


LAST = {"a": jnp.ones(2), "c": jnp.ones(2), "d": jnp.full(2, jnp.nan)}


@pytest.mark.parametrize(
  ("wrap", "params", "grads", "got"),
  {
    "a function among the parameters": (
      lambda tx: tx,
      {"a": jnp.tanh, "c": jnp.ones(2), "d": jnp.ones(2)},
      LAST | {"a": None},
      "the gradient of ['d']",
    ),
    "real and imaginary parts": (
      optax.contrib.split_real_and_imaginary,
      {"a": jnp.ones(2, jnp.complex64), "c": jnp.ones(2), "d": jnp.ones(2)},
      LAST | {"a": jnp.ones(2, jnp.complex64)},
      "the gradient of ['d']",
    ),
    "an imaginary part": (
      optax.contrib.split_real_and_imaginary,
      {"a": jnp.ones(2), "d": jnp.ones(2, jnp.complex64)},
      {"a": jnp.ones(2), "d": jnp.full(2, jax.lax.complex(1.0, jnp.nan))},
      "the gradient of ['d'].imaginary",
    ),
    "a mask": (
      lambda tx: optax.masked(tx, {"a": False, "c": True, "d": True}),
      dict.fromkeys("acd", jnp.ones(2)),
      LAST,
      "the gradient of ['d']",
    ),
    "one array": (
      optax.flatten,
      dict.fromkeys("acd", jnp.ones(2)),
      LAST,
      "the gradient of all parameters, one array of 6 numbers",
    ),
  }.values(),
)
def test_check_skipped_steps_names_a_leaf_of_the_tree_that_was_checked(wrap, params, grads, got):
  state = first_step(wrap(mpjax.loss_scaling(optax.sgd(0.1))), params, grads)
  blamed(state, f"was in {got}. ", fix="look for", params=params)


def test_check_skipped_steps_names_the_gradient_of_an_update_without_parameters():
  tx = mpjax.loss_scaling(optax.sgd(0.1))
  params = {"a": jax.random.key(0), "c": jnp.ones(2), "d": jnp.ones(2)}
  _, state = tx.update(LAST | {"a": None}, tx.init(params))
  blamed(state, "was in the gradient of ['d']. ", fix="look for", params=params)


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
    blamed(optimizer, "was in the gradient of ['z']['bias']", fix="look for", params=params)


def test_check_skipped_steps_names_no_path_that_params_do_not_have():
  state = first_step(mpjax.loss_scaling(optax.sgd(0.1)), PARAMS, BAD)
  got = "floating parameters that this loss scale sees; params have no leaf at its path)"
  blamed(
    state,
    f"gradient leaf 1 (in the order of jax.tree.leaves of the {got}",
    fix="look for",
    params={"y": jnp.ones(3), "z": jnp.ones(2)},
  )


def test_check_skipped_steps_names_the_gradient_behind_a_mask():
  # Each optimizer sees its part of the parameters, where the first gradient is another one.
  nets = {"critic": {"b": jnp.ones(1), "w": jnp.ones(2)}, "generator": {"b": jnp.ones(1)}}
  bad = nets | {"generator": {"b": jnp.full(1, jnp.nan)}}
  scaled = {name: mpjax.loss_scaling(optax.adam(0.1), name=name) for name in nets}
  tx = optax.multi_transform(scaled, {name: name for name in nets})
  _, state = tx.update(bad, tx.init(nets), nets)
  mpjax.check_skipped_steps(state, 1, params=nets, name="critic")
  got = "the gradient of ['generator']['b']. "
  blamed(state, got, fix="look for", params=nets, name="generator")


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
    blamed(state, got, fix="look for", params=params, name=name)


def test_check_skipped_steps_sees_the_nan_of_a_run_without_loss_scaling():
  for optimizer, params, got in (
    (optax.adam(0.1), None, "one at ['opt_state'][0].mu['x']"),
    (optax.sgd(0.1), PARAMS | {"x": BAD["x"]}, "one at ['params']['x']"),
  ):
    tx = mpjax.loss_scaling(optimizer, mpjax.NoLossScale())
    _, state = tx.update(GOOD, tx.init(PARAMS), PARAMS)
    # An inf is not yet a NaN, and may be meant: a mask, or the best value so far.
    mpjax.check_skipped_steps(state, params=PARAMS | {"x": jnp.full(2, -jnp.inf)})
    _, state = tx.update(BAD, state, PARAMS)
    with refused(RuntimeError, WHERE, "no NaN", got, "mpjax.SkipNonfinite()"):
      mpjax.check_skipped_steps(state, params=params)
    with pytest.raises(TypeError, match="got a traced one"):
      jax.eval_shape(lambda s: mpjax.check_skipped_steps(s, params=PARAMS["w"] * 1), state)
  with refused(TypeError, WHERE, "a concrete state", "traced", "after the jitted step"):
    jax.eval_shape(mpjax.check_skipped_steps, TX.init(PARAMS))


def with_scale(state, **fields):
  ((label, scale),) = state.loss_scale.items()
  return state._replace(loss_scale={label: scale._replace(**fields)})


def test_check_skipped_steps_finds_a_damaged_scale():
  for scale in (np.nan, np.inf, 0.0, -1.0):
    expected, got = "a positive finite loss scale", str(np.float32(scale))
    with refused(RuntimeError, WHERE, expected, got, "restore another checkpoint"):
      mpjax.check_skipped_steps(with_scale(TX.init(PARAMS), scale=jnp.float32(scale)))


def test_check_skipped_steps_looks_at_the_worst_member():
  states = jax.vmap(TX.init)(jax.tree.map(lambda p: jnp.stack([p] * 3), PARAMS))
  states = with_scale(states, consecutive_skips=jnp.asarray([0, 7, 2], jnp.int32))
  mpjax.check_skipped_steps(states, 8)
  blamed(states, "7, at loss scale 4", 7)


SGD = mpjax.loss_scaling(optax.sgd(0.1))


def after_step(*, finite):
  """Returns the state after one step, which was applied if the gradient was finite."""
  grads = jnp.asarray([1.0, 2.0 if finite else jnp.inf])
  return SGD.update(grads, SGD.init(jnp.ones(2)), jnp.ones(2))[1]


APPLIED, SKIPPED = after_step(finite=True), after_step(finite=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_keep_if_skipped_returns_one_of_two_trees_to_the_bit(wrap, bad):
  rest = {"none": None, "nothing": np.zeros(2, jax.dtypes.float0)}
  new = {"mean": jnp.asarray([bad, 1.0]), "n": jnp.asarray(4), "key": jax.random.key(1)} | rest
  old = {"mean": jnp.asarray([0.5, -0.0]), "n": jnp.asarray(3), "key": jax.random.key(0)} | rest
  keep = wrap(mpjax.keep_if_skipped)
  for kept in (keep(SKIPPED, new, old), keep(APPLIED, old, new)):
    assert kept.pop("key") == old["key"]
    assert kept["nothing"].dtype == jax.dtypes.float0
    assert bits(kept) == bits({name: x for name, x in old.items() if name != "key"})
    assert kept["none"] is None


def test_keep_if_skipped_takes_python_numbers():
  old = {"step": 3, "rate": 0.25, "text": "a"}
  assert mpjax.keep_if_skipped(SKIPPED, old | {"step": 4, "rate": 0.5}, old) == old


def test_keep_if_skipped_without_a_scale_returns_the_new_tree():
  state = mpjax.loss_scaling(optax.sgd(0.1), mpjax.NoLossScale()).init(jnp.ones(2))
  assert mpjax.keep_if_skipped(state, jnp.asarray(1.0), jnp.asarray(2.0)) == 1


def test_keep_if_skipped_reads_the_scale_of_a_name():
  scales = {"a": mpjax.StaticLossScale(8), "b": mpjax.StaticLossScale(8)}
  tx = mpjax.loss_scaling(optax.sgd(0.1), scales)
  state = tx.init(jnp.ones(2))
  _, state = tx.update({"a": jnp.ones(2), "b": jnp.full(2, jnp.nan)}, state, jnp.ones(2))
  for name in scales:  # One decision for both.
    assert mpjax.keep_if_skipped(state, jnp.asarray(1.0), jnp.asarray(2.0), name=name) == 2
  with refused(TypeError, "mpjax.keep_if_skipped(opt_state)", "one loss scale", "with 2", "name="):
    mpjax.keep_if_skipped(state, jnp.asarray(1.0), jnp.asarray(2.0))


KEEP = "mpjax.keep_if_skipped(opt_state, new, old)"


def test_keep_if_skipped_of_several_members_needs_vmap():
  several = jax.tree.map(lambda *x: jnp.stack(x), APPLIED, SKIPPED)
  with refused(ValueError, KEEP, "a scalar flag", "shape (2,)", "jax.vmap"):
    mpjax.keep_if_skipped(several, jnp.ones(2), jnp.zeros(2))
  kept = jax.vmap(mpjax.keep_if_skipped)(several, jnp.ones(2), jnp.zeros(2))
  assert kept.tolist() == [1, 0]


def test_keep_if_skipped_needs_a_state():
  where, made = "mpjax.keep_if_skipped(opt_state)", "created by mpjax.loss_scaling"
  for state, got in ((jnp.ones(2), "an array float32[2]"), (True, "True"), (None, "None")):
    with refused(TypeError, where, made, got, "tx = mpjax.loss_scaling(tx)"):
      mpjax.keep_if_skipped(state, jnp.ones(2), jnp.zeros(2))


def test_keep_if_skipped_wants_trees_alike():
  for new, got in (
    ({"a": jnp.ones(2)}, "nothing at ['b']"),
    ({"a": jnp.ones(2), "b": jnp.ones(2, jnp.float16)}, "float16[2] for float32[2] at ['b']"),
    ({"a": jnp.ones(3), "b": jnp.ones(2)}, "float32[3] for float32[2] at ['a']"),
    ({"a": jnp.ones(1), "b": jnp.arange(2)}, "float32[1] for float32[2] at ['a']; int32[2]"),
    ({"a": jnp.ones(2), "b": jnp.ones(2), "c": 1.0}, "an extra leaf at ['c']"),
    ({"a": jnp.ones(2), "b": None}, "None for float32[2] at ['b']"),
  ):
    with refused(ValueError, KEEP, "like the old one", got, "same structure"):
      mpjax.keep_if_skipped(APPLIED, new, {"a": jnp.ones(2), "b": jnp.ones(2)})


# The monitor.


def problem(dtype):
  keys = jax.random.split(jax.random.key(0), 4)
  params = {
    "dense": {"kernel": jax.random.normal(keys[0], (8, 5), dtype), "bias": jnp.zeros(5, dtype)},
    "steps": jnp.zeros((), jnp.int32),
  }

  def gradients(step):
    # A third of the gradients are zero.
    g = jax.random.normal(jax.random.fold_in(keys[1], step), (8, 5)).at[::3].set(0)
    return {"dense": {"kernel": g, "bias": g[1]}, "steps": None}

  return params, gradients


def counts_of(opt_state, path):
  """Returns its size, zero gradients, updates and lost updates."""
  counts = mpjax.states.monitor_counts(opt_state)[path]
  assert list(counts) == ["size", "zero_gradients", "updates", "lost_updates"]
  return [int(n) for n in counts.values()]


HALF = pytest.mark.filterwarnings("ignore:.*stored in low precision")


@HALF
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_counts_of_a_run_equal_those_of_numpy(dtype):
  params, gradients = problem(dtype)
  tx = mpjax.monitor(mpjax.loss_scaling(optax.adam(1e-3), mpjax.StaticLossScale(8)))

  @jax.jit
  def step(params, opt_state, grads):
    scaled = jax.tree.map(lambda g: (8 * g).astype(dtype), grads)
    updates, opt_state = tx.update(scaled, opt_state, params)
    return mpjax.apply_updates(params, updates), opt_state, updates

  opt_state, seen = tx.init(params), 0
  for number in range(4):
    old = params
    params, opt_state, updates = step(params, opt_state, gradients(number))
    for leaf in ("kernel", "bias"):
      before, after, u = (np.asarray(t["dense"][leaf]) for t in (old, params, updates))
      lost = np.sum((before == after) & (u != 0))
      seen += lost
      zero = np.sum(np.asarray(gradients(number)["dense"][leaf]) == 0)
      assert counts_of(opt_state, f"dense.{leaf}") == [u.size, zero, np.sum(u != 0), lost]
  assert (seen > 0) == (dtype != jnp.float32)
  assert set(mpjax.states.monitor_counts(opt_state)) == {"dense.kernel", "dense.bias"}


def test_underflow_is_seen_as_zero_gradients():
  params, small = {"w": jnp.ones(4)}, jnp.asarray([1e-8, 1e-8, 1.0, 1.0])
  for scale, zeros in ((2.0, 2), (1024.0, 0)):
    tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(1e-3), mpjax.StaticLossScale(scale)))
    grads = {"w": (scale * small).astype(jnp.float16)}
    _, state = tx.update(grads, tx.init(params), params)
    assert counts_of(state, "w")[1] == zeros


def test_masters_lose_nothing():
  params = {"w": jnp.ones(3, jnp.bfloat16), "norm": jnp.ones(3)}
  grads = {"w": jnp.asarray([1e-4, 0.5, 0.0]), "norm": jnp.asarray([1e-4, 1e-9, 0.0])}
  tx = mpjax.monitor(mpjax.loss_scaling(mpjax.master_weights(optax.sgd(1.0))))
  _, state = jax.jit(tx.update)(jax.tree.map(lambda g: g * 2.0**15, grads), tx.init(params), params)
  assert (counts_of(state, "w"), counts_of(state, "norm")) == ([3, 1, 1, 0], [3, 1, 2, 1])


@HALF
def test_in_a_train_step_without_a_scale_and_of_several_losses():
  params, gradients = problem(jnp.bfloat16)
  params, grads = ({"dense": tree["dense"]} for tree in (params, gradients(0)))

  def loss_fn(params, model_state, batch, rng):
    loss = sum(jnp.sum(p.astype(jnp.float32) * batch) for p in jax.tree.leaves(params))
    return loss, (model_state, {})

  tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(1e-3), mpjax.StaticLossScale(8)))
  state = mpjax.TrainState.create(params, tx)
  for batch in (1.0, jnp.inf):  # The second is skipped.
    state, _ = mpjax.make_train_step(loss_fn, tx, donate=False)(state, jnp.float32(batch))
    assert counts_of(state.opt_state, "dense.bias") == [5, 0, 5, 0]
  several = {"a": mpjax.StaticLossScale(8), "b": mpjax.StaticLossScale(2)}
  zeros = jax.tree.map(jnp.zeros_like, grads)
  for inner, given in (
    (optax.sgd(1e-3), grads),
    (mpjax.loss_scaling(optax.sgd(1e-3), mpjax.NoLossScale()), grads),
    (mpjax.loss_scaling(optax.sgd(1e-3), several), {"a": grads, "b": zeros}),
    (mpjax.loss_scaling(optax.sgd(1e-3), {"a": several["a"]}), {"a": grads}),
  ):
    tx = mpjax.monitor(inner)
    _, state = jax.jit(tx.update)(given, tx.init(params), params)
    assert counts_of(state, "dense.kernel")[1] == 15


def test_in_an_nnx_optimizer_parameters_have_the_same_names_at_init_and_update():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(0.1)))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  _, grads = mpjax.value_and_grad(lambda m: jnp.sum(m(jnp.ones((1, 3)))), optimizer)(model)
  optimizer.update(model, grads)
  params = nnx.state(model, nnx.Param)  # And in their variables.
  _, state = tx.update(params, tx.init(params), params)
  for counts in map(mpjax.states.monitor_counts, (optimizer, state)):
    assert {name: int(one["updates"]) for name, one in counts.items()} == {"bias": 2, "kernel": 6}


def test_monitors_of_parts_of_a_tree_count_all_of_it():
  # The first alone was reported; two paths with one text were one parameter.
  params = {"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(3), "['a": {"b']": jnp.ones(4)}}
  parts = {label: mpjax.monitor(optax.sgd(0.1)) for label in "xy"}
  several = optax.multi_transform(parts, {"a": "x", "a.b": "y", "['a": "x"})
  for inner in (several, parts["x"]):
    tx = mpjax.loss_scaling(inner)
    _, state = tx.update(params, tx.init(params), params)
    sizes = {name: int(one["size"]) for name, one in mpjax.states.monitor_counts(state).items()}
    assert sizes == {"a.b": 2, "['a.b']": 3, """["['a"].b']""": 4}


ADAM = optax.adam(0.1)


@pytest.mark.parametrize(
  "tx",
  {
    "loss_scaling": mpjax.loss_scaling(ADAM),
    "several losses": mpjax.loss_scaling(ADAM, dict.fromkeys("ab", mpjax.StaticLossScale(2))),
    "no scale": mpjax.loss_scaling(ADAM, mpjax.NoLossScale()),
    "master_weights": mpjax.master_weights(ADAM),
    "split": mpjax.master_weights(ADAM, storage="split"),
    "accumulate_gradients": mpjax.accumulate_gradients(ADAM, 2),
    "state_dtype": mpjax.state_dtype(ADAM, mu="bfloat16"),
    "monitor": mpjax.monitor(ADAM),
    "monitor of all": mpjax.monitor(mpjax.loss_scaling(mpjax.master_weights(ADAM))),
    "monitor inside": mpjax.loss_scaling(mpjax.monitor(ADAM)),
  }.values(),
)
def test_optax_maps_what_is_like_the_parameters_in_the_state_of_each_wrapper(tx):
  state = tx.init(PARAMS)
  new = optax.tree_map_params(tx, lambda x: x + 1, state)
  assert jax.tree.structure(new) == jax.tree.structure(state)
  moved = [
    jax.tree_util.keystr(path)
    for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(new), strict=True)
    if np.any(a != b)
  ]
  assert {"mu['w']", "nu['x']"} <= {path.rpartition(".")[2] for path in moved}
  assert not any("counts" in path or "loss_scale" in path for path in moved)


def test_errors_of_the_monitor():
  params, fix = {"w": jnp.ones(2)}, "tx.update(grads, opt_state, params)"
  plain = mpjax.loss_scaling(optax.sgd(0.1))
  tx = mpjax.monitor(plain)
  with refused(ValueError, "update(params)", "the parameters", "None", fix):
    tx.update(params, tx.init(params))
  where, got = "mpjax.states.monitor_counts(opt_state)", "without a monitor"
  with refused(TypeError, where, "keeps counts", got, "mpjax.monitor(mpjax.loss_scaling(inner))"):
    mpjax.states.monitor_counts(plain.init(params))
  with refused(TypeError, "update(state)", "the state", "a LossScalingState", "init"):
    tx.update(params, plain.init(params), params)
  two, got = (tx.init(params), tx.init(params)), "2 that count the same parameters"
  with refused(ValueError, where, "monitors of separate parts", got, "of one optimizer alone"):
    mpjax.states.monitor_counts(two)


def test_it_reads_each_array_in_one_pass():
  params = {"a": jnp.ones(8), "b": jnp.ones((2, 4))}

  def operations(monitor):
    tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))
    tx = mpjax.monitor(tx) if monitor else tx
    program = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    return collections.Counter(eqn.primitive.name for eqn in walk(program))

  more = operations(True) - operations(False)
  # Whatever is counted of a parameter, one reduction counts it: more of them would read it again.
  assert more["reduce"] == len(params)
  assert not {name for name in more if name.startswith("reduce_")}
