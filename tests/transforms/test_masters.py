"""The float32 copy of half parameters: its rule, where it is found, how it is set, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._core.errors import kind_of
from mpjax.transforms._masters import MasterWeightsState, init_shown, update_to
from tests.errors import refused
from tests.programs import bits

HALF = ["float16", "bfloat16"]
BOTH = pytest.mark.parametrize("half", HALF)
F32, BF16 = np.float32, jnp.bfloat16
STEEP = mpjax.master_weights(optax.sgd(1.0))


def dtypes(tree):
  return jax.tree.map(lambda x: x.dtype.name, tree)


def apply_from_master(params, updates, state):
  return mpjax.apply_updates(params, updates, master=mpjax.master_params(state))


def mixed():
  """Both half types, and a float32 leaf, which has no master."""
  values = np.random.default_rng(0).normal(size=(3, 50))
  return {
    name: jnp.asarray(x, name)
    for name, x in zip([*HALF, "float32"], values.astype(F32), strict=True)
  }


@pytest.mark.case("B115")
@BOTH
def test_weight_decay_acts_on_the_master(half):
  # With 1e-3 and 0.1 it takes 1e-4 of a weight: nothing in half, and 0 of a small float16.
  params = jnp.asarray([1.0, 6e-5, -3.0], half)
  inner = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-3))
  tx = mpjax.master_weights(inner)
  state, plain_state = tx.init(params), inner.init(params)
  start = plain = params
  master, zero = np.asarray(params, F32), jnp.zeros(3, half)
  for _ in range(100):
    updates, state = tx.update(zero, state, params)
    params = apply_from_master(params, updates, state)
    updates, plain_state = inner.update(zero, plain_state, plain)
    plain = optax.apply_updates(plain, updates)
    master = master + F32(-1e-3) * (F32(0.1) * master)
  assert bits(plain) == bits(start), "without masters nothing moves"
  assert bits(mpjax.master_params(state)) == bits(master)
  assert bits(params) == bits(master.astype(half))
  np.testing.assert_allclose(master, np.asarray(start, F32) * (1 - 1e-4) ** 100, rtol=1e-5)
  assert np.all(np.asarray(params != start))


@pytest.mark.parametrize(
  ("half", "far"), [("float16", [60000.0, 2.0**-24]), ("bfloat16", [1e8, 1.0])]
)
def test_a_value_that_a_float32_sum_cannot_reach_follows_on_the_next_step(half, far):
  # From 60000 to 2^-24 takes 40 bits. What is left is reached from 0, where the sum ended.
  old, goal = far
  params = jnp.asarray([old], half)
  state = mpjax.set_master_params(STEEP.init(params), jnp.asarray([goal]))
  for reached in (0.0, goal):
    updates, state = STEEP.update(jnp.zeros(1), state, params)
    assert apply_from_master(params, updates, state).tolist() == [goal]
    params = optax.apply_updates(params, updates)
    assert params.tolist() == [reached]


def test_minus_zero_is_the_masters_only_by_our_own_function():
  # No update leads from 0 to -0.
  params = jnp.asarray([0.0, -0.0, 0.0, -0.0], jnp.bfloat16)
  tx = mpjax.master_weights(optax.identity())
  state = mpjax.set_master_params(tx.init(params), jnp.asarray([-0.0, 0.0, 0.0, -0.0]))
  updates, state = tx.update(jnp.full(4, -0.0), state, params)
  assert np.signbit(optax.apply_updates(params, updates)).tolist() == [False, False, False, True]
  ours = apply_from_master(params, updates, state)
  assert np.signbit(ours).tolist() == [True, False, False, True]
  assert not np.any(ours)


def test_n14_the_sign_of_zero_is_that_of_the_sum_in_both_storages():
  params = jnp.asarray([-0.0, -0.0], jnp.bfloat16)
  for storage in ("float32", "split"):
    tx = mpjax.master_weights(optax.sgd(1.0), storage=storage)
    updates, state = tx.update(jnp.asarray([-0.0, 0.0]), tx.init(params), params)
    new = mpjax.apply_updates(params, updates)
    for x in (new, mpjax.master_params(state, new)):
      assert np.signbit(x).tolist() == [False, True]


def test_updates_that_change_nothing_are_minus_zero():
  # Also where the master moved, but not far enough for another half number.
  params = jnp.asarray([1.0, -0.0, 0.0, 2.0], jnp.bfloat16)
  updates, state = STEEP.update(jnp.asarray([1e-6, 0, 0, 0]), STEEP.init(params), params)
  assert not np.any(updates)
  assert np.all(np.signbit(updates))
  assert bits(optax.apply_updates(params, updates)) == bits(params)
  assert mpjax.master_params(state)[0] < 1


def test_inner_reads_masters_and_gets_extra_arguments():
  seen = []

  def spy(updates, state, params=None, **extra_args):
    seen.append((updates, params, extra_args))
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), spy)
  params = {"h": jnp.ones(1, jnp.bfloat16), "w": jnp.ones(1), "none": None}
  tx = mpjax.master_weights(inner)
  state = mpjax.set_master_params(tx.init(params), {"h": 1.001 * jnp.ones(1), "w": 5.0, "none": 0})
  tx.update({"h": params["h"], "w": params["w"], "none": None}, state, params, value=3)
  ((updates, trained, extra_args),) = seen
  assert dtypes(updates) == {"h": "float32", "w": "float32", "none": None}
  assert trained == {"h": F32(1.001), "w": 1, "none": None}, "float32 is its own master"
  assert extra_args == {"value": 3}


@BOTH
def test_a_parameter_beyond_its_range_comes_back_when_its_master_does(half):
  # It is the largest number of its dtype meanwhile; as an inf it could never be left again.
  largest = float(jnp.finfo(half).max)
  ends = np.float32([largest, -largest])
  for apply in (lambda p, u, s: optax.apply_updates(p, u), apply_from_master):
    params, beyond = jnp.asarray(ends, half), []
    state = STEEP.init(params)
    for share in (-0.003, 0.004, 0.5):  # bfloat16 ends 0.004 before float32 does.
      updates, state = STEEP.update(jnp.asarray(F32(share) * ends), state, params)
      params = apply(params, updates, state)
      wide = np.asarray(mpjax.master_params(state), np.float64)
      assert np.all(np.isfinite(wide))
      expected = np.clip(wide, -largest, largest).astype(F32).astype(jnp.dtype(half))
      np.testing.assert_array_equal(params, expected)
      beyond.append((np.abs(wide) > largest).tolist())
    assert beyond == [[True, True], [False, False], [False, False]]
    assert np.all(np.abs(np.asarray(params, F32)) < 0.6 * largest)


def test_a_master_that_is_not_finite_shows():
  params, values = jnp.ones(3, jnp.bfloat16), [np.inf, -np.inf, np.nan]
  state = mpjax.set_master_params(STEEP.init(params), jnp.asarray(values))
  found = apply_from_master(params, jnp.zeros(3), state)
  for reached in (found.astype(F32), update_to(state.master, params)):
    np.testing.assert_array_equal(reached, values)


def test_master_params_with_and_without_parameters():
  params = mixed() | {"none": None}
  state = optax.chain(optax.clip(1.0), mpjax.master_weights(optax.adam(1e-3))).init(params)
  found = mpjax.master_params(state)
  assert found["float32"] is found["none"] is None
  whole = mpjax.master_params({"train": state}, params)
  assert whole["float32"] is params["float32"]
  assert {x.dtype.name for x in jax.tree.leaves(whole)} == {"float32"}
  assert jax.tree.structure(whole) == jax.tree.structure(params)
  for half in HALF:
    assert whole[half] is found[half]


def test_masked_masters_leave_the_rest_alone():
  params = {"w": jnp.ones(2, jnp.bfloat16), "rest": {"h": jnp.ones(1, jnp.bfloat16)}}
  tx = optax.masked(mpjax.master_weights(optax.sgd(1e-3)), {"w": True, "rest": False})
  updates, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
  assert mpjax.master_params(state)["rest"] is None, "one hole for the entire subtree"
  new = apply_from_master(params, updates, state)
  assert new["w"].tolist() == [1, 1]
  assert new["rest"]["h"] == 2, "optax passes the gradient through where it is masked"
  assert mpjax.master_params(state, params)["rest"] is params["rest"]
  again = mpjax.set_master_params(state, params).inner_state
  assert bits(again.master["w"]) == bits(np.ones(2, F32))


@pytest.mark.parametrize("storage", ["float32", "split"])
def test_n6_set_master_params_of_a_state_on_the_host(storage):
  params = jnp.ones(3, jnp.bfloat16)
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.adam(0.1), storage=storage))
  state = jax.device_get(tx.init(params))
  new = mpjax.set_master_params(state, jnp.full(3, 1.001))
  assert bits(mpjax.master_params(new, params)) == bits(np.full(3, 1.001, F32))


def after_one_step(rate, start, storage):
  """A loss after one step: what a hypergradient is of."""
  tx = optax.sgd(rate)
  tx = tx if storage is None else mpjax.master_weights(tx, storage=storage)
  updates, _ = tx.update(start.astype(F32), tx.init(start), start)
  return jnp.sum(jnp.square(mpjax.apply_updates(start, updates).astype(F32)))


def test_n1_hypergradients_of_both_storages_are_those_without_masters():
  # With respect to the learning rate, and to the parameters before the step; none is 0.
  start, found = np.float32([1, -2, 3]), {}
  for storage, dtype in (("float32", BF16), ("split", BF16), (None, F32)):
    params = jnp.asarray(start, dtype)
    found[storage] = jax.grad(after_one_step, (0, 1))(0.125, params, storage)
  # Of p' = (1 - rate) p, both are exact: -2 (1 - rate) p^2, and 2 (1 - rate)^2 p.
  exact = np.sum(-2 * 0.875 * start**2), 2 * 0.875**2 * start
  for rate, params in found.values():
    assert rate == exact[0]
    assert params.tolist() == exact[1].astype(params.dtype).tolist()
  # And where the parameter does not move, but the master does.
  small = jax.grad(after_one_step)(1e-6, jnp.asarray(start, BF16), "split")
  np.testing.assert_allclose(small, np.sum(-2 * start**2), rtol=1e-5)


@pytest.mark.case("B133", "B134")
def test_a_master_is_never_the_array_that_it_was_made_from():
  # So both may be donated, together too; and no step deletes the parameters of another tree.
  source = {"w": jnp.asarray([1.001, 2.002])}
  params = mpjax.Policy.parse("float16").cast_to_param(source)
  tx = mpjax.master_weights(optax.sgd(1e-3))
  state = mpjax.set_master_params(tx.init(params), source)
  start = np.asarray(source["w"])

  def step(params, state, source):
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    return apply_from_master(params, updates, state), state, jax.tree.map(lambda x: x + 1, source)

  donating, master = jax.jit(step, donate_argnums=(0, 1, 2)), start
  for i in range(1, 3):
    params, state, source = donating(params, state, source)
    np.testing.assert_array_equal(source["w"], start + i)
    master = master + F32(-1e-3)
  assert bits(state.master["w"]) == bits(master)
  assert bits(params["w"]) == bits(master.astype(np.float16))
  # Nor does init take a float32 array of the parameters for its own.
  params = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
  state = tx.init(params)
  donated = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
  assert not any(x.is_deleted() for x in jax.tree.leaves(params))
  assert donated.master["w"].tolist() == [2, 2]


def test_set_master_params_keeps_placement_and_works_under_jit(devices):
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
  sharded = jax.NamedSharding(mesh, jax.P("data"))
  params = jax.device_put(jnp.ones(8, jnp.bfloat16), sharded)
  state = STEEP.init(params)
  new = mpjax.set_master_params(state, np.full(8, 1.001))
  assert state.master.sharding == new.master.sharding == sharded
  loose = STEEP.init(jnp.ones(8, jnp.bfloat16))
  assert not mpjax.set_master_params(loose, jnp.ones(8)).master.committed
  jitted = jax.jit(mpjax.set_master_params)(loose, jnp.full(8, 1.001))
  for found in (new, jitted):
    np.testing.assert_array_equal(found.master, F32(1.001))


BOTH_KINDS = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(1)}
WHERE = "mpjax.master_weights(inner)"


def test_what_update_is_called_with():
  tx = mpjax.master_weights(optax.sgd(0.1))
  state, fix = tx.init(BOTH_KINDS), "tx.update(grads, opt_state, params)"
  with refused(ValueError, f"{WHERE}.update(params)", "the third argument", "None", fix):
    tx.update(BOTH_KINDS, state)


CALLS = {
  "mpjax.master_params": mpjax.master_params,
  "mpjax.set_master_params": mpjax.set_master_params,
}


def test_states_without_masters_or_with_two():
  for state in (None, optax.adam(0.1).init(jnp.ones(1))):
    for name, call in CALLS.items():
      expected = "an optimizer with mpjax.master_weights"
      got, fix = f"{kind_of(state)} without masters", "tx = mpjax.master_weights(tx)"
      with refused(TypeError, f"{name}(opt_state)", expected, got, fix):
        call(state, jnp.ones(1))
  twice = optax.chain(mpjax.master_weights(optax.sgd(0.1)), mpjax.master_weights(optax.sgd(0.1)))
  where, expected = "mpjax.master_params(opt_state)", "masters of separate parts"
  with refused(ValueError, where, expected, "two for the same part", "optax.multi_transform"):
    mpjax.master_params(twice.init(BOTH_KINDS))


def test_parameters_of_another_tree():
  state = mpjax.master_weights(optax.sgd(0.1)).init(BOTH_KINDS)
  others = jnp.ones(2), {"w": jnp.ones(2)}, {"v": jnp.ones(2), "b": jnp.ones(1)}, [1, 2]
  for name, call in CALLS.items():
    for params in others:
      with refused(ValueError, f"{name}(params)", " of th", "another tree", "Pass th"):
        call(state, params)
  for w, got in (
    (jnp.ones(3), "float32[3] for float32[2] at ['w']"),
    (jnp.ones(()), "float32[] for float32[2] at ['w']"),
    (jnp.arange(2), "int32[2] for float32[2] at ['w']"),
    (np.ones((2, 1), np.int64), "for float32[2] at ['w']"),
    (1.0, "float32[] for float32[2] at ['w']"),
  ):
    where, expected = "mpjax.set_master_params(params)", "in the shapes of"
    with refused(ValueError, where, expected, got, "the float32 parameters of the same model"):
      mpjax.set_master_params(state, {"w": w, "b": jnp.ones(1)})


def test_what_reshapes_the_tree_cannot_be_around_masters():
  inner = optax.flatten(mpjax.master_weights(optax.sgd(0.1)))
  for tx in (mpjax.loss_scaling(inner), mpjax.accumulate_gradients(inner, 2)):
    expected = "master_weights to see the tree of the parameters"
    got = "one array for PyTreeDef({'b': *, 'w': *})"
    with refused(TypeError, "(inner)", expected, got, "Put master_weights around what reshapes"):
      tx.init(BOTH_KINDS)
  other = MasterWeightsState({"w": None, "v": None}, ())
  expected, got = "master_weights to see", "another structure"
  with refused(TypeError, "test", expected, got, "optax.flatten"):
    init_shown(optax.GradientTransformation(lambda p: other, STEEP.update), BOTH_KINDS, "test")
