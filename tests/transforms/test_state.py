import pickle

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._core.errors import kind_of
from mpjax.transforms._state import find_scale
from tests.errors import refused

PARAMS = {"w": jnp.ones(3), "b": jnp.ones(1)}
SCALED = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))


def nests():
  """Every place in which optax can put a state."""
  first, identity = {"w": "a", "b": "b"}, optax.identity()
  return {
    "alone": SCALED,
    "chain": optax.chain(identity, optax.chain(SCALED, identity)),
    "named chain": optax.named_chain(("one", identity), ("two", SCALED)),
    "masked": optax.masked(SCALED, {"w": True, "b": False}),
    "partition": optax.partition({"a": SCALED, "b": optax.set_to_zero()}, first),
    "flatten": optax.flatten(SCALED),
  }


def test_the_scale_is_found_wherever_it_sits():
  loss = jnp.asarray(2.0)
  for name, tx in nests().items():
    state = tx.init(PARAMS)
    assert mpjax.scale_loss(loss, state) == 16, name
    assert mpjax.loss_scaling_metrics(state)["loss_scale"] == 8
    moved = mpjax.set_loss_scale(state, 4)
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    assert (mpjax.scale_loss(loss, moved), mpjax.unscale(loss, moved)) == (8, 0.5)
    assert mpjax.scale_loss(loss, state) == 16, "the old state is as it was"


def test_a_train_state_will_do():
  state = flax.training.train_state.TrainState.create(
    apply_fn=lambda: None, params=PARAMS, tx=SCALED
  )
  assert mpjax.scale_loss(jnp.asarray(2.0), state) == 16
  assert mpjax.set_loss_scale(state, 4).opt_state.loss_scale["static(scale=8)"].scale == 4


@pytest.mark.case("A37", "B026")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.filterwarnings("ignore:.*the loss is float16")
def test_half_loss_is_cast_before_it_is_multiplied(wrap):
  state = mpjax.loss_scaling(optax.sgd(0.1)).init(PARAMS)
  half = jnp.asarray(5, jnp.float16)
  for loss in (half, half.astype(jnp.bfloat16), np.float16(5), 5.0):
    found = wrap(mpjax.scale_loss)(loss, state)
    assert found == 163840
    assert jax.typeof(found) == jax.typeof(jnp.float32(0)), "strongly typed"


WIDE = mpjax.DynamicLossScale()
EXCEEDS = WIDE, mpjax.DynamicLossScale(init_scale=1, max_scale=2**16), mpjax.StaticLossScale(2**16)
FITS = mpjax.DynamicLossScale(max_scale=2**15), mpjax.StaticLossScale(2**15), mpjax.NoLossScale()


def test_a_float16_loss_whose_scale_may_exceed_its_range_is_told_at_once():
  # The cotangent of a float16 loss is the scale in float16, inf from 2^16 on.
  def scaled(params, state, dtype=jnp.float16):
    return mpjax.scale_loss(jnp.mean(params["w"].astype(dtype)), state)

  for config in EXCEEDS:
    state = mpjax.loss_scaling(optax.sgd(0.1), config).init(PARAMS)
    with pytest.warns(UserWarning, match="the loss is float16.*cast to float32") as found:
      jax.eval_shape(jax.grad(scaled), PARAMS, state)
    assert len(found) == 1
    # What it says is so.
    with pytest.warns(UserWarning, match="the loss is float16"):
      grads = jax.grad(scaled)(PARAMS, mpjax.set_loss_scale(state, 2**16))
    assert not mpjax.all_finite(grads)
  # Another warning would be an error here.
  fits = [(config, jnp.float16) for config in FITS]
  for config, dtype in [*fits, (WIDE, jnp.float32), (WIDE, jnp.bfloat16)]:
    state = mpjax.loss_scaling(optax.sgd(0.1), config).init(PARAMS)
    jax.grad(scaled)(PARAMS, state, dtype)


@pytest.mark.parametrize("several", [False, True], ids=["one loss", "several"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_value_and_grad_of_a_float16_loss_takes_any_scale(dtype, several):
  # A step was lost at each growth beyond 2^15, for ever.
  name = "a" if several else None
  params = {"w": jnp.asarray([1.0, 3.0], dtype)}

  def fun(params):
    return jnp.sum(params["w"].astype(jnp.float16) ** 2 / 2**14)

  grad_fn = jax.jit(lambda p, s: mpjax.value_and_grad(fun, s, name=name)(p))
  losses = {"a": WIDE, "b": mpjax.StaticLossScale(1)}
  tx = mpjax.loss_scaling(optax.sgd(0.1), losses if several else WIDE)
  for scale in (2.0**14, 2.0**16, 2.0**24):
    state = mpjax.set_loss_scale(tx.init(params), scale, name=name)
    loss, grads = grad_fn(params, state)
    assert loss.dtype == jnp.float16
    expected = np.asarray([1.0, 3.0]) * 2 / 2**14 * scale
    np.testing.assert_array_equal(grads["w"], expected.astype(dtype))
    assert grads["w"].dtype == dtype


@pytest.mark.case("B046")
def test_under_strict_promotion():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    state = mpjax.loss_scaling(optax.sgd(0.1)).init(PARAMS)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
      fun = lambda p, dtype=dtype: jnp.sum(p["w"] * p["w"]).astype(dtype)  # noqa: E731
      _, grads = mpjax.value_and_grad(fun, state)(PARAMS)
      _, new = mpjax.loss_scaling(optax.sgd(0.1), check_updates=True).update(
        grads, state, PARAMS, loss=jnp.ones((), dtype)
      )
      mpjax.unscale(grads, new)
      mpjax.loss_scaling_metrics(mpjax.set_loss_scale(new, 2))
      mpjax.check_skipped_steps(new)
      mpjax.select_tree(new.loss_scale["dynamic"].finite, PARAMS, PARAMS)


def test_float64_loss_stays_float64(set_flag):
  set_flag("jax_enable_x64", True)
  found = mpjax.scale_loss(jnp.asarray(1 / 3, jnp.float64), SCALED.init(PARAMS))
  assert found.dtype == jnp.float64
  assert found == 8 / 3


def test_what_is_no_loss():
  state = SCALED.init(PARAMS)
  for loss, builtin, got in (
    (jnp.ones(2), ValueError, "shape (2,)"),
    (jnp.ones((1, 1)), ValueError, "shape (1, 1)"),
    (jnp.asarray(2), TypeError, "int32[]"),
    (jnp.asarray(2j), TypeError, "complex64[]"),
    (2, TypeError, "2"),
    (True, TypeError, "True"),
    ("2", TypeError, "'2'"),
    (jax.random.key(0), TypeError, "key<fry>[]"),
  ):
    with refused(builtin, "mpjax.scale_loss(loss)", "a floating scalar", got, "jnp.mean"):
      mpjax.scale_loss(loss, state)


CALLS = {
  "scale_loss": lambda state, **kw: mpjax.scale_loss(jnp.asarray(1.0), state, **kw),
  "unscale": lambda state, **kw: mpjax.unscale(jnp.asarray(1.0), state, **kw),
  "set_loss_scale": lambda state, **kw: mpjax.set_loss_scale(state, 4, **kw),
  "loss_scaling_metrics": mpjax.loss_scaling_metrics,
  "check_skipped_steps": mpjax.check_skipped_steps,
  "value_and_grad": lambda state, **kw: mpjax.value_and_grad(jnp.sum, state, **kw),
}


@pytest.mark.case("A60", "B146")
def test_states_without_a_scale_and_with_two():
  pair = {"actor": SCALED.init(PARAMS), "critic": SCALED.init(PARAMS)}
  none = optax.adam(1e-3).init(PARAMS), PARAMS, None, ()
  made, wrap = "created by mpjax.loss_scaling", "tx = mpjax.loss_scaling(tx)"
  for state, expected, got, fix in (
    (pair, "one loss scale", "one with 2, named [None, None]", "by name="),
    *((x, made, f"{kind_of(x)} without a loss scale", wrap) for x in none),
  ):
    for name, call in CALLS.items():
      with refused(TypeError, f"mpjax.{name}(opt_state)", expected, got, fix):
        call(state)


@pytest.mark.case("A66")
def test_names_tell_scales_apart():
  one = mpjax.loss_scaling(optax.sgd(1.0), mpjax.StaticLossScale(2), name="actor")
  two = mpjax.loss_scaling(optax.sgd(1.0), mpjax.StaticLossScale(4), name="critic")
  state = {"a": one.init(PARAMS), "c": two.init(PARAMS)}
  assert find_scale(state, "test", "critic").label == "critic:static(scale=4)"
  for call in CALLS.values():
    call(state, name="actor")
    where, got = "(opt_state) with name='citric'", "['actor', 'critic']"
    with refused(ValueError, where, "the name of a loss scale", got, "name="):
      call(state, name="citric")
  moved = mpjax.set_loss_scale(state, 16, name="critic")
  scales = [mpjax.loss_scaling_metrics(moved, name=n)["loss_scale"] for n in ("actor", "critic")]
  assert scales == [2, 16]
  assert mpjax.value_and_grad(lambda w: w, moved, name="critic")(1.0) == (1, 16)


def test_a_tuple_is_taken_for_a_chain():
  # What is in a chain may see scaled gradients and skipped steps; parameters are no state.
  tx = {name: mpjax.loss_scaling(optax.adam(0.1), name=name) for name in "gd"}
  trace, adam = optax.trace(0.9), optax.adam(0.1)
  beside = adam, mpjax.accumulate_gradients(adam, 2), optax.chain(trace), tx["d"]
  states = {name: one.init(PARAMS) for name, one in tx.items()}
  for read in (mpjax.loss_scaling_metrics, mpjax.last_step_finite, mpjax.check_skipped_steps):
    for name in tx:
      read(states, name=name)
      read((PARAMS, states[name]), name=name)
    for other in beside:
      state = optax.chain(optax.clip(1.0), tx["g"], other).init(PARAMS)
      _, state = optax.chain(optax.clip(1.0), tx["g"], other).update(PARAMS, state, PARAMS)
      for in_a_chain in (state, (states["g"], other.init(PARAMS))):
        with pytest.raises(mpjax.MpjaxError, match=r"entire optimizer, got .* in a dict\."):
          read(in_a_chain, name="g")


@pytest.mark.case("A39")
def test_everything_works_without_a_scale():
  state = mpjax.loss_scaling(optax.sgd(0.1), mpjax.NoLossScale()).init(PARAMS)
  loss = jnp.asarray(3.0, jnp.float16)
  assert mpjax.scale_loss(loss, state) is loss
  assert mpjax.unscale(loss, state).dtype == jnp.float32
  mpjax.check_skipped_steps(state)
  metrics = mpjax.loss_scaling_metrics(state)
  assert metrics.pop("loss_scale") == 1
  assert metrics.pop("finite")
  assert {int(value) for value in metrics.values()} == {0}
  where, fix = "mpjax.set_loss_scale(opt_state)", "StaticLossScale or DynamicLossScale"
  with refused(ValueError, where, "a scale that can move", "NoLossScale()", fix):
    mpjax.set_loss_scale(state, 1)


@pytest.mark.case("A10", "B032")
def test_set_loss_scale_refuses():
  state, where = mpjax.loss_scaling(optax.sgd(0.1)).init(PARAMS), "mpjax.set_loss_scale(value)"
  for value, builtin, expected in (
    (0, ValueError, "positive"),
    (-2.0, ValueError, "positive"),
    (float("nan"), ValueError, "finite"),
    (float("inf"), ValueError, "finite"),
    (2.0**127, ValueError, "[2^-126, 2^126]"),
    (2.0**25, ValueError, "[1, 16777216], the limits of this state"),
    (0.5, ValueError, "[1, 16777216], the limits of this state"),
    (True, TypeError, "a plain number"),
    ("8", TypeError, "a plain number"),
    (np.ones(2), TypeError, "a plain number"),
  ):
    with refused(builtin, where, expected, repr(value), ". "):
      mpjax.set_loss_scale(state, value)
  with refused(ValueError, where, "a scale of shape ()", "shape (2,)", "one for all"):
    jax.eval_shape(mpjax.set_loss_scale, state, jnp.ones(2))


def test_a_scale_that_is_an_array_or_an_input_of_the_step():
  # As MindSpore's `sens`: each call scales by its own number, and update divides by it.
  tx = mpjax.loss_scaling(optax.sgd(0.5), mpjax.StaticLossScale(jnp.float32(4)))

  @jax.jit
  def step(params, state, scale):
    state = mpjax.set_loss_scale(state, scale)
    _, grads = mpjax.value_and_grad(lambda p: jnp.sum(p["w"] ** 2), state)(params)
    updates, state = tx.update(grads, state, params)
    return grads["w"], updates["w"], state

  state = jax.device_get(tx.init(PARAMS))  # A state on the host will do.
  for scale in (jnp.float32(8), np.float32(1024), np.float32(2.0**127)):
    grads, updates, state = step(PARAMS, state, scale)
    within = min(scale, 2.0**126)  # The limits of a static scale.
    np.testing.assert_array_equal(grads, np.float32([2 * within] * 3))
    np.testing.assert_array_equal(updates, np.float32([-1] * 3))
  host = jax.device_get(mpjax.loss_scaling(optax.sgd(0.1)).init(PARAMS))
  assert mpjax.loss_scaling_metrics(mpjax.set_loss_scale(host, jnp.float32(4)))["loss_scale"] == 4


@pytest.mark.case("B031")
def test_set_loss_scale_warns_once_of_other_than_powers_of_two():
  with pytest.warns(UserWarning, match="value=1000 is not a power of two") as caught:
    state = mpjax.set_loss_scale(mpjax.loss_scaling(optax.sgd(0.1)).init(PARAMS), 1000)
  assert [one.filename for one in caught] == [__file__]
  assert mpjax.loss_scaling_metrics(state)["loss_scale"] == 1000


def test_set_loss_scale_starts_a_new_window_and_keeps_the_rest():
  tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.DynamicLossScale(growth_interval=3))
  _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
  moved = mpjax.set_loss_scale(state, 4)
  (old,), (new,) = state.loss_scale.values(), moved.loss_scale.values()
  assert old.good_steps == 1
  assert new == old._replace(scale=new.scale, good_steps=new.good_steps)
  assert (new.scale, new.good_steps) == (4, 0)


def test_set_loss_scale_under_jit_and_vmap_and_in_host_memory():
  state = jax.vmap(mpjax.loss_scaling(optax.sgd(0.1)).init)(jnp.ones((3, 2)))
  for wrap in (lambda f: f, jax.jit):
    moved = wrap(lambda s: mpjax.set_loss_scale(s, 2))(state)
    assert mpjax.loss_scaling_metrics(moved)["loss_scale"].tolist() == [2, 2, 2]
  host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  moved = mpjax.set_loss_scale(jax.device_put(state, host), 2)
  assert {x.sharding for x in jax.tree.leaves(moved)} == {host}


@pytest.mark.case("A11", "A40")
def test_golden_tree():
  tx = mpjax.loss_scaling(optax.sgd(0.1, momentum=0.9), name="all")
  state = tx.init({"w": jnp.ones(3)})
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
  label = ".loss_scale['all:dynamic']"
  fields = "scale good_steps hysteresis total skipped consecutive_skips floor_hits bad_updates"
  assert paths == [
    *(f"{label}.{field}" for field in [*fields.split(), "first_bad", "finite"]),
    ".inner_state[0].trace['w']",
  ]
  leaves = jax.tree.leaves(state)
  assert not any(x.weak_type for x in leaves)
  assert [x.dtype.name for x in leaves] == ["float32", *["int32"] * 8, "bool", "float32"]
  assert jax.tree.structure(pickle.loads(pickle.dumps(state))) == jax.tree.structure(state)
  off = mpjax.loss_scaling(optax.sgd(0.1), mpjax.NoLossScale()).init({"w": jnp.ones(3)})
  assert off.loss_scale == {"none": ()}
  assert jax.tree.leaves(off) == []
