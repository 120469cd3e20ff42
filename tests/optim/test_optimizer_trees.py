"""Half, hidden and missing leaves; placement; weak types."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._optim import optimizer_trees
from tests.errors import refused
from tests.optim.wrapped import WRAPPERS
from tests.programs import bits

pytestmark = pytest.mark.standard_promotion("dtypes")

ADAM = mpjax.loss_scaling(optax.adam(0.1))
CONFIGS = [mpjax.SkipNonfinite(), mpjax.NoLossScale()]
# What works with a scale works without one.
DROP_IN = pytest.mark.parametrize("config", CONFIGS, ids=str)


def aligned(grads, params):
  return ADAM.update(grads, ADAM.init(params), params)


def test_half_parameters_warn_once_and_train_in_float32():
  params = {"b": jnp.ones(2), "w": jnp.ones(3, jnp.float16), "x": jnp.ones(1, jnp.bfloat16)}
  with pytest.warns(UserWarning, match="2 parameters are stored in low precision") as caught:
    state = ADAM.init(params)
  assert len(caught) == 1
  assert "['w']" in str(caught[0].message)
  assert "master_weights" in str(caught[0].message)
  assert "Frozen parameters lose nothing" in str(caught[0].message)
  assert caught[0].filename == __file__
  moments = state.inner_state[0]
  assert {x.dtype.name for x in jax.tree.leaves((moments.mu, moments.nu))} == {"float32"}
  grads = jax.tree.map(lambda p: (p * 64).astype(p.dtype), params)
  updates, new = ADAM.update(grads, state, params)
  assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
  applied = optax.apply_updates(params, updates)
  assert jax.tree.map(lambda x: x.dtype, applied) == jax.tree.map(lambda x: x.dtype, params)
  # As if they had been float32 all along.
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), (grads, params))
  assert bits(updates) == bits(ADAM.update(wide[0], ADAM.init(wide[1]), wide[1])[0])


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_narrow_parameter_without_a_master_warns(dtype):
  with pytest.warns(UserWarning, match="1 parameters are stored in low precision"):
    ADAM.init(jnp.ones(2, dtype))


@DROP_IN
def test_hidden_leaves_come_through_untouched(config):
  key = jax.random.key(0)
  params = {"n": jnp.arange(2), "flag": jnp.asarray(True), "none": None, "w": jnp.ones(2)}
  params |= {"raw": jax.random.key_data(key)}
  plain, without_gradient = optax.sgd(0.5, momentum=0.5), {"m": jnp.arange(1), "key": key}
  tx = mpjax.loss_scaling(plain, config)
  state, control = tx.init(params | without_gradient), plain.init(params["w"])
  assert len(jax.tree.leaves(state.inner_state)) == 1, "the momentum of w"
  fun = lambda p: jnp.sum(p["w"]) * jnp.sum(p["n"])  # noqa: E731
  for _ in range(2):
    _, grads = jax.value_and_grad(mpjax.scaled(fun, state), allow_int=True)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    grads |= dict.fromkeys(without_gradient)
    updates, state = jax.jit(tx.update)(grads, state, params | without_gradient)
    expected, control = plain.update(jnp.ones(2), control, params["w"])
    assert bits(updates["w"]) == bits(expected)
    kept = mpjax.apply_updates(params | without_gradient, updates)
    assert (kept["m"].tolist(), kept["key"]) == ([0], key)
    new = optax.apply_updates(params, {name: updates[name] for name in params})
    params = params | {"w": new["w"]}
    assert bits(params) == bits(new)


def test_without_parameters_hidden_gradients_are_passed_through():
  tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.StaticLossScale(4))
  grads = {"indices": jnp.asarray([3, 1]), "values": jnp.asarray([8.0, 2.0])}
  grads |= {"nothing": np.zeros(2, jax.dtypes.float0), "key": jax.random.key(0)}
  updates, _ = tx.update(grads, tx.init(grads))
  assert all(updates[name] is grads[name] for name in ("indices", "nothing", "key"))
  assert updates["values"].tolist() == [-8.0, -2.0]


def test_parameters_that_are_none_or_keys_and_one_whose_gradient_is_zero():
  params = {"w": jnp.ones(2), "unused": jnp.ones(3), "none": {"a": None}, "key": jax.random.key(0)}
  grads = params | {"unused": jnp.zeros(3), "key": np.zeros((), jax.dtypes.float0)}
  updates, state = aligned(grads, params)
  assert mpjax.loss_scaling_metrics(state)["finite"]
  assert updates["unused"].tolist() == [0, 0, 0]
  assert updates["key"].dtype == jax.dtypes.float0
  assert updates["none"] == mpjax.apply_updates(params, updates)["none"] == {"a": None}


def test_odd_trees():
  for params in ({}, (), None, jnp.ones(()), jnp.ones((0, 3)), [jnp.ones(1)]):
    updates, state = aligned(params, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert mpjax.loss_scaling_metrics(state)["finite"]


def test_gradients_of_another_dtype_are_float32_before_inner_sees_them():
  @jax.custom_vjp
  def cube(x):
    return x**3

  cube.defvjp(lambda x: (x**3, x), lambda x, g: ((3 * x**2 * g).astype(jnp.bfloat16),))
  tx = mpjax.loss_scaling(optax.scale(1 + 2.0**-10), mpjax.StaticLossScale(2))
  w = jnp.asarray(2.0)
  state = tx.init(w)
  _, grads = jax.value_and_grad(mpjax.scaled(cube, state))(w)
  assert grads.dtype == jnp.bfloat16
  updates, _ = tx.update(grads, state, w)
  assert updates == 12 * (1 + 2.0**-10), "in bfloat16 it would be 12"


def test_states_are_placed_with_the_parameters_and_others_left_alone(devices):
  mesh = jax.make_mesh((4,), ("data",), devices=devices)
  params = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P()))
  sgd = optax.sgd(1.0, momentum=0.5)
  for tx in (mpjax.monitor(sgd), mpjax.accumulate_gradients(sgd, 2), mpjax.loss_scaling(sgd)):
    state = tx.init(params)
    assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(state)} == {4}, type(state)
  there = jax.device_put(jnp.ones(2), devices[1])
  assert optimizer_trees.place_like(params, {"a": there})["a"] is there


# Its state holds the parameters twice.
SHARING = optax.GradientTransformation(lambda params: (params, params), lambda g, s, p=None: (g, s))


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_parameters_and_state_can_be_donated(wrap, dtype):
  tx = wrap(optax.chain(SHARING, optax.adam(0.1)))
  params = {"w": jnp.ones(2, dtype), "b": jnp.zeros(3, dtype)}
  state = tx.init(params)
  arrays = jax.tree.leaves((params, state))
  assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
  step = jax.jit(lambda p, s: tx.update(p, s, p)[1], donate_argnums=(1,))
  for _ in range(2):
    state = step(params, state)
  assert not any(x.is_deleted() for x in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_tree_as_mask_may_be_of_stored_dtypes(wrap):
  params = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(3)}
  mask = jax.tree.map(lambda p: p.dtype == jnp.bfloat16, params)
  tx = wrap(optax.chain(optax.adam(0.1), optax.masked(optax.set_to_zero(), mask)))
  state = tx.init(params)
  for _ in range(2):
    updates, state = tx.update(params, state, params)
  assert jax.tree.map(lambda u: bool(jnp.any(u != 0)), updates) == {"w": False, "b": True}


def test_an_abstract_state_is_placed():
  tx, params = mpjax.accumulate_gradients(optax.adam(0.1), 2), jnp.ones(2)
  assert jax.tree.map(jax.typeof, jax.jit(tx.init)(params)) == jax.tree.map(
    jax.typeof, tx.init(params)
  )
  assert jax.tree.structure(jax.eval_shape(tx.init, params)) == jax.tree.structure(tx.init(params))


def test_a_gradient_is_wide_where_its_parameter_is(set_flag):
  set_flag("jax_enable_x64", True)
  params = {"d": np.ones(1), "f": np.ones(1, np.float32), "c": np.ones(1, np.complex64)}
  params |= {"z": np.ones(1, np.complex128), "h": np.ones(1, np.float16)}
  grads = {"d": params["f"], "f": params["d"], "c": params["z"], "z": params["c"]}
  grads |= {"h": params["h"]}
  found = optimizer_trees.align_gradients(grads, params, "test")
  dtypes = {"d": "float64", "f": "float32", "c": "complex64", "z": "complex128", "h": "float16"}
  assert {key: x.dtype.name for key, x in found.items()} == dtypes
  assert (
    optimizer_trees.align_gradients({"w": params["f"]}, {"w": params["f"]}, "test")["w"]
    is params["f"]
  )
  with pytest.raises(ValueError, match=r"shape \[\] for None at \['w'\]"):
    optimizer_trees.align_gradients({"w": 1.0}, {"w": None}, "test")


def test_a_gradient_that_overflows_when_it_is_narrowed_is_bad(set_flag):
  set_flag("jax_enable_x64", True)
  tx, params = mpjax.loss_scaling(optax.identity()), jnp.ones(1, jnp.float32)
  _, state = jax.jit(tx.update)(jnp.asarray([1e300]), tx.init(params), params)
  assert not mpjax.loss_scaling_metrics(state)["finite"]


@DROP_IN
@pytest.mark.parametrize("odd", ["none", "integer"])
def test_none_and_integers_work_under_lookahead(odd, config):
  # Without a scale it was a ValueError of jax.tree.map.
  integer = odd == "integer"
  params = {"w": jnp.ones(2), "b": jnp.arange(2) if integer else None}
  grads = {"w": jnp.ones(2), "b": np.zeros(2, jax.dtypes.float0) if integer else None}
  tx = mpjax.loss_scaling(optax.lookahead(optax.sgd(0.5), 2, 0.5), config)
  both = optax.LookaheadParams.init_synced(params)
  state, update = tx.init(both), jax.jit(tx.update)
  for _ in range(2):
    updates, state = update(grads, state, both)
    both = mpjax.apply_updates(both, updates)
  for part in both:  # Twice by 0.5, and then half way back to where it began.
    assert part["w"].tolist() == [0.5, 0.5]
    assert bits(part["b"]) == bits(params["b"])


@DROP_IN
def test_functions_among_the_parameters_are_left_alone(config):
  # As in Equinox: the model is the tree, and its gradients are None where it has functions.
  model = {"activation": jnp.tanh, "w": jnp.ones(2)}
  grads = {"activation": None, "w": jnp.ones(2)}
  tx = mpjax.master_weights(mpjax.loss_scaling(optax.adamw(0.5), config))
  updates, _ = tx.update(grads, tx.init(model | {"activation": None}), model)
  plain = optax.adamw(0.5)
  expected, _ = plain.update(jnp.ones(2), plain.init(jnp.ones(2)), jnp.ones(2))
  assert updates["activation"] is None
  assert jnp.array_equal(updates["w"], expected)
  assert mpjax.apply_updates(model, updates)["activation"] is jnp.tanh


# None is the gradient of what cannot be trained, and freezes nothing.


def none_refused(where, got, expected="a gradient for each parameter"):
  fix = (
    'optax.multi_transform({"train": inner, "freeze": optax.set_to_zero()}, labels) or '
    "optax.chain(inner, optax.masked(optax.set_to_zero(), frozen))"
  )
  return refused(ValueError, where, expected, got, fix)


TREE = {"a": jnp.ones(2), "b": {"c": jnp.ones((), jnp.bfloat16), "n": jnp.arange(2), "none": None}}
C = "None for bfloat16[] at ['b']['c']"
NONE = {
  "a leaf inside": ({"b": {**TREE["b"], "c": None}}, C),
  "every leaf": ({"a": None, "b": None}, f"None for float32[2] at ['a']; {C}"),
}
SCALED = "mpjax.loss_scaling(inner).update(updates)"


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.parametrize("name", NONE)
def test_none_for_the_gradient_of_a_trained_parameter_is_refused(name):
  none, got = NONE[name]
  sgd, both = optax.sgd(1.0), optax.LookaheadParams.init_synced(TREE)
  for config in (mpjax.StaticLossScale(2), mpjax.NoLossScale()):
    tx, several = (mpjax.loss_scaling(sgd, how) for how in (config, {"x": config, "y": config}))
    lookahead = mpjax.loss_scaling(optax.lookahead(sgd, 2, 0.5), config)
    state, losses = tx.init(TREE), several.init(TREE)
    for update, *args in (
      (tx.update, TREE | none, state, TREE),
      (jax.jit(tx.update), TREE | none, state, TREE),
      *([(tx.update, None, state, TREE)] if name == "every leaf" else []),
      (several.update, {"x": TREE, "y": TREE | none}, losses, TREE),
      (lookahead.update, TREE | none, lookahead.init(both), both),
    ):
      with none_refused(SCALED, got):
        update(*args)
    with none_refused("mpjax.loss_scaling(inner).update(grad)", got):
      tx.update(TREE, state, TREE, grad=TREE | none)
  # The other wrappers take no integers.
  params = {"a": TREE["a"], "b": {"c": TREE["b"]["c"], "none": None}}
  grads = params | none | ({"b": {"c": None, "none": None}} if name == "a leaf inside" else {})
  masters = mpjax.master_weights(sgd)
  with none_refused("mpjax.master_weights(inner).update(updates)", got):
    masters.update(grads, masters.init(params), params)
  window = mpjax.accumulate_gradients(sgd, 2)
  for given in (params, None):
    kept = got if given else got.replace("bfloat16", "float32")
    with none_refused("mpjax.accumulate_gradients(inner).update(updates)", kept):
      window.update(grads, window.init(params), given)
  with none_refused("mpjax.apply_updates(updates)", got, expected="updates like the parameters"):
    mpjax.apply_updates(params, grads)


INNER, FREEZE = optax.adamw(0.1, weight_decay=0.1), optax.set_to_zero()
FROZEN = [
  optax.multi_transform({"train": INNER, "freeze": FREEZE}, {"a": "train", "b": "freeze"}),
  optax.chain(INNER, optax.masked(FREEZE, {"a": False, "b": True})),
]


@pytest.mark.parametrize("frozen", FROZEN, ids=["multi_transform", "masked"])
def test_what_the_error_advises_keeps_parameters_and_masters_whatever_decays(frozen):
  masters = mpjax.master_weights(mpjax.accumulate_gradients(frozen, 2), storage="split")
  tx = mpjax.loss_scaling(masters, mpjax.StaticLossScale(4))
  start = params = dict.fromkeys("ab", jnp.asarray([1.0, 3e-3], jnp.bfloat16))
  state, update = tx.init(params), jax.jit(tx.update)
  for _ in range(4):
    updates, state = update(params, state, params)
    params = mpjax.apply_updates(params, updates)
  assert bits(params["b"]) == bits(start["b"])
  found = mpjax.states.master_params(state, params)
  assert found["b"].tolist() == start["b"].astype(jnp.float32).tolist()
  assert np.all(found["a"] < 0.9 * start["a"].astype(jnp.float32))


OLD = {"x": jnp.asarray([1.0, -0.0]), "n": jnp.asarray(3, jnp.int32)}


def step(old):
  return {"x": old["x"] * 2}, {"x": jnp.exp(old["x"]), "n": old["n"] + 1}


def test_outside_of_jit_what_is_skipped_does_not_run():
  seen = []

  def spy(old):
    seen.append(isinstance(old["x"], jax.core.Tracer))
    return step(old)

  _, state = optimizer_trees.step_or_skip(jnp.asarray(False), spy, OLD)
  assert seen == [True], "only looked at for its shapes"
  assert state is OLD


def test_in_a_shard_map_where_the_new_state_varies(devices):
  # One branch returns what differs by device, the other the old state, which does not.
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)

  def one_device(condition, shard):
    step = lambda old: (shard * 2, {"x": old["x"] + shard})  # noqa: E731
    updates, state = optimizer_trees.step_or_skip(condition, step, {"x": jnp.ones(2)})
    return updates, state["x"]

  specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
  mapped = jax.jit(jax.shard_map(one_device, mesh=mesh, **specs))
  shards = jnp.arange(8.0)
  updates, x = mapped(True, shards)
  np.testing.assert_array_equal(updates, shards * 2)
  np.testing.assert_array_equal(x, shards + 1)
  updates, x = mapped(False, shards)
  assert np.all(np.signbit(updates))
  assert not np.any(updates)
  np.testing.assert_array_equal(x, np.ones(8))


def test_whether_the_program_is_for_a_cpu_is_known_when_it_is_compiled():
  on_cpu = jax.default_backend() == "cpu"
  assert bool(optimizer_trees.compiled_for_cpu()) == on_cpu
  choose = jax.jit(lambda x: jax.lax.cond(optimizer_trees.compiled_for_cpu(), jnp.sin, jnp.cos, x))
  text = choose.lower(jnp.ones(3)).compile().as_text()
  assert (" sine(" in text, " cosine(" in text) == (on_cpu, not on_cpu), "the other branch is gone"
