import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._diagnose.monitor import added
from mpjax._jaxpr.reader import walk
from tests.errors import refused

pytestmark = pytest.mark.standard_promotion("dtypes")


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
SKIP = mpjax.SkipNonfinite()


@pytest.mark.slow
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


@pytest.mark.slow
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
  _, state = jax.jit(tx.update)(grads, tx.init(params), params)
  assert (counts_of(state, "w"), counts_of(state, "norm")) == ([3, 1, 1, 0], [3, 1, 2, 1])


@pytest.mark.slow
@HALF
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
  ("wrap", "counts"),
  [
    (lambda tx: mpjax.loss_scaling(tx, SKIP), [3, 1, 2, 1]),
    # The update leads to the rounded master: it is zero where that has not moved.
    (mpjax.master_weights, [3, 1, 1, 0]),
  ],
  ids=["loss_scaling", "master_weights"],
)
def test_updates_of_float8_parameters_are_counted(wrap, counts, dtype):
  params = jnp.ones(3, dtype)
  tx = mpjax.monitor(wrap(optax.sgd(0.5)))
  grads = jnp.asarray([1.0, 2.0**-6, 0.0], dtype)
  _, state = tx.update(grads, tx.init(params), params)
  assert counts_of(state, "params") == counts


@pytest.mark.parametrize(
  "window",
  [
    lambda tx: mpjax.accumulate_gradients(tx, 3),
    lambda tx: optax.MultiSteps(tx, 3).gradient_transformation(),
    lambda tx: optax.chain(tx, optax.apply_every(3)),
  ],
  ids=["accumulate_gradients", "MultiSteps", "apply_every"],
)
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: mpjax.loss_scaling(tx, SKIP)])
def test_micro_batches_of_an_open_window_keep_the_counts(window, wrap):
  params, seen = jnp.ones(2), []
  tx = mpjax.monitor(wrap(window(optax.sgd(1e-9))))
  state = tx.init(params)
  for _ in range(5):
    _, state = jax.jit(tx.update)(jnp.ones(2), state, params)
    seen.append(counts_of(state, "params"))
  assert seen == [[0, 0, 0, 0]] * 2 + [[2, 0, 2, 2]] * 3


def test_a_step_whose_gradients_all_underflow_is_counted():
  tx, params = mpjax.monitor(mpjax.loss_scaling(optax.sgd(0.1), SKIP)), jnp.ones(2)
  _, state = tx.update(jnp.ones(2), tx.init(params), params)
  _, state = tx.update(jnp.zeros(2), state, params)
  assert counts_of(state, "params") == [2, 2, 0, 0]


def test_counts_of_a_parameter_of_2_to_the_31_elements_stop_at_their_limit():
  tx, large = mpjax.monitor(optax.sgd(0.1)), jax.ShapeDtypeStruct((2**16, 2**15), "float32")
  _, state = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), large)
  assert state.counts["params"].dtype == jnp.int32
  below = np.int32(2**31 - 2)
  assert added([below], [below]) == added([below], [np.int32(1)]) == (2**31 - 1,)


def test_of_several_losses_the_zeros_of_the_sum_are_counted():
  params = {"w": jnp.ones(4), "steps": jnp.zeros((), jnp.int32)}
  tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(0.1), {"a": SKIP, "b": SKIP}))
  # In float16 the sum in third place is inf, which is not zero either.
  a, b = (jnp.asarray(x, "float16") for x in ([1, 1, 6e4, 0], [-1, -4, 6e4, 0]))
  zero = np.zeros((), jax.dtypes.float0)
  grads = {"a": {"w": a, "steps": zero}, "b": {"w": b, "steps": zero}}
  updates, state = tx.update(grads, tx.init(params), params)
  assert counts_of(state, "w") == [4, 2, 2, 0]
  np.testing.assert_allclose(updates["w"], [0, 0.3, -12000, 0], rtol=1e-3)


def test_a_gradient_of_the_sum_is_told_by_its_tree():
  # Its keys are the names of the losses too, and Equinox has None as the gradient of a key.
  params = {"a": {"w": jnp.ones(2), "key": jax.random.key(0)}, "b": {"w": jnp.ones(2)}}
  grads = {"a": {"w": jnp.asarray([0.0, 1.0]), "key": None}, "b": {"w": jnp.zeros(2)}}
  scales = dict.fromkeys("ab", mpjax.StaticLossScale(2))
  tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(0.1), scales))
  _, state = tx.update(grads, tx.init(params), params)
  assert [counts_of(state, f"{name}.w")[1] for name in "ab"] == [1, 2]


@pytest.mark.slow
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


@pytest.mark.slow
def test_in_an_nnx_optimizer_parameters_have_the_same_names_at_init_and_update():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  tx = mpjax.monitor(mpjax.loss_scaling(optax.sgd(0.1)))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  _, grads = nnx.value_and_grad(mpjax.scaled(lambda m: jnp.sum(m(jnp.ones((1, 3)))), optimizer))(
    model
  )
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
  state = tx.init({"w": jnp.ones(3), "x": jnp.ones(2)})
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
