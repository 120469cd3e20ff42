"""Masters of parameters in 16 bits, in float32 and split: rule, bits, access, refusals."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._core.errors import kind_of
from mpjax._optim.states import MasterWeightsState
from mpjax._optim.wrappers.master_weights import (
  bounded,
  init_in_float32,
  join,
  split,
  stored,
  update_to,
)
from tests.errors import refused
from tests.programs import bits, run

pytestmark = pytest.mark.standard_promotion("dtypes")

HALF = ["float16", "bfloat16"]
F32, BF16 = np.float32, np.dtype(jnp.bfloat16)
STEEP = mpjax.master_weights(optax.sgd(1.0))


def apply_from_master(params, updates, state):
  return mpjax.apply_updates(params, updates, state)


def mixed():
  """Both half types, and a float32 leaf, which has no master."""
  values = np.random.default_rng(0).normal(size=(3, 50))
  return {
    name: jnp.asarray(x, name)
    for name, x in zip([*HALF, "float32"], values.astype(F32), strict=True)
  }


@pytest.mark.parametrize(
  ("half", "far"), [("float16", [60000.0, 2.0**-24]), ("bfloat16", [1e8, 1.0])]
)
def test_a_value_that_a_float32_sum_cannot_reach_follows_on_the_next_step(half, far):
  # From 60000 to 2^-24 takes 40 bits. What is left is reached from 0, where the sum ended.
  old, goal = far
  params = jnp.asarray([old], half)
  state = mpjax.states.set_master_params(STEEP.init(params), jnp.asarray([goal]))
  for reached in (0.0, goal):
    updates, state = STEEP.update(jnp.zeros(1), state, params)
    assert apply_from_master(params, updates, state).tolist() == [goal]
    params = optax.apply_updates(params, updates)
    assert params.tolist() == [reached]


def test_a_float8_parameter_has_a_float32_master_that_small_steps_move():
  params = jnp.ones(3, jnp.float8_e4m3fn)
  tx = mpjax.master_weights(optax.sgd(1.0))
  state = tx.init(params)
  for _ in range(4):
    # A quarter of the distance to the next number in float8: to nearest it would be lost.
    updates, state = tx.update(jnp.full(3, -1 / 32), state, params)
    params = mpjax.apply_updates(params, updates, state)
  assert state.master.dtype == F32
  assert params.dtype == jnp.float8_e4m3fn
  np.testing.assert_array_equal(np.asarray(params, F32), np.full(3, 1.125, F32))


def test_minus_zero_is_the_masters_only_by_our_own_function():
  # No update leads from 0 to -0.
  params = jnp.asarray([0.0, -0.0, 0.0, -0.0], jnp.bfloat16)
  tx = mpjax.master_weights(optax.identity())
  state = mpjax.states.set_master_params(tx.init(params), jnp.asarray([-0.0, 0.0, 0.0, -0.0]))
  updates, state = tx.update(jnp.full(4, -0.0), state, params)
  assert np.signbit(optax.apply_updates(params, updates)).tolist() == [False, False, False, True]
  ours = apply_from_master(params, updates, state)
  assert np.signbit(ours).tolist() == [True, False, False, True]
  assert not np.any(ours)


def test_the_sign_of_zero_is_that_of_the_sum_in_both_storages():
  params = jnp.asarray([-0.0, -0.0], jnp.bfloat16)
  for storage in ("float32", "split"):
    tx = mpjax.master_weights(optax.sgd(1.0), storage=storage)
    updates, state = tx.update(jnp.asarray([-0.0, 0.0]), tx.init(params), params)
    new = mpjax.apply_updates(params, updates)
    for x in (new, mpjax.states.master_params(state, new)):
      assert np.signbit(x).tolist() == [False, True]


@pytest.mark.parametrize("half", HALF)
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
      wide = np.asarray(mpjax.states.master_params(state), np.float64)
      assert np.all(np.isfinite(wide))
      expected = np.clip(wide, -largest, largest).astype(F32).astype(jnp.dtype(half))
      np.testing.assert_array_equal(params, expected)
      beyond.append((np.abs(wide) > largest).tolist())
    assert beyond == [[True, True], [False, False], [False, False]]
    assert np.all(np.abs(np.asarray(params, F32)) < 0.6 * largest)


def test_master_params_with_and_without_parameters():
  params = mixed() | {"none": None}
  state = optax.chain(optax.clip(1.0), mpjax.master_weights(optax.adam(1e-3))).init(params)
  found = mpjax.states.master_params(state)
  assert found["float32"] is found["none"] is None
  whole = mpjax.states.master_params({"train": state}, params)
  assert whole["float32"] is params["float32"]
  assert {x.dtype.name for x in jax.tree.leaves(whole)} == {"float32"}
  assert jax.tree.structure(whole) == jax.tree.structure(params)
  for half in HALF:
    assert whole[half] is found[half]


def test_masked_masters_leave_the_rest_alone():
  params = {"w": jnp.ones(2, jnp.bfloat16), "rest": {"h": jnp.ones(1, jnp.bfloat16)}}
  tx = optax.masked(mpjax.master_weights(optax.sgd(1e-3)), {"w": True, "rest": False})
  updates, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
  assert mpjax.states.master_params(state)["rest"] is None, "one hole for the entire subtree"
  new = apply_from_master(params, updates, state)
  assert new["w"].tolist() == [1, 1]
  assert new["rest"]["h"] == 2, "optax passes the gradient through where it is masked"
  assert mpjax.states.master_params(state, params)["rest"]["h"] is params["rest"]["h"]
  again = mpjax.states.set_master_params(state, params).inner_state
  assert bits(again.master["w"]) == bits(np.ones(2, F32))


def after_one_step(rate, start, storage):
  """A loss after one step: what a hypergradient is of."""
  tx = optax.sgd(rate)
  tx = tx if storage is None else mpjax.master_weights(tx, storage=storage)
  updates, _ = tx.update(start.astype(F32), tx.init(start), start)
  return jnp.sum(jnp.square(mpjax.apply_updates(start, updates).astype(F32)))


@pytest.mark.slow
def test_hypergradients_of_both_storages_are_those_without_masters():
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


def test_a_master_is_never_the_array_that_it_was_made_from():
  # So both may be donated, together too; and no step deletes the parameters of another tree.
  source = {"w": jnp.asarray([1.001, 2.002])}
  params = mpjax.Policy.parse("float16").cast_to_param(source)
  tx = mpjax.master_weights(optax.sgd(1e-3))
  state = mpjax.states.set_master_params(tx.init(params), source)
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


def test_set_master_params_keeps_placement_and_works_under_jit_and_on_the_host(devices):
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
  sharded = jax.NamedSharding(mesh, jax.P("data"))
  params = jnp.ones(8, BF16)
  for tx in (STEEP, mpjax.loss_scaling(mpjax.master_weights(optax.adam(0.1), storage="split"))):
    here, loose = jax.device_put(params, sharded), tx.init(params)
    there = mpjax.states.set_master_params(tx.init(here), np.full(8, 1.001))
    assert tx is not STEEP or there.master.sharding == sharded
    host = mpjax.states.set_master_params(jax.device_get(loose), jnp.full(8, 1.001))
    jitted = jax.jit(mpjax.states.set_master_params)(loose, jnp.full(8, 1.001))
    for new in (there, host, jitted):
      np.testing.assert_array_equal(mpjax.states.master_params(new, params), F32(1.001))
  assert not mpjax.states.set_master_params(STEEP.init(params), params).master.committed


BOTH_KINDS = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(1)}
WHERE = "mpjax.master_weights(inner)"


CALLS = {
  "mpjax.states.master_params": mpjax.states.master_params,
  "mpjax.states.set_master_params": mpjax.states.set_master_params,
}


def test_what_is_not_there_or_twice():
  for state in (None, optax.adam(0.1).init(jnp.ones(1))):
    for name, call in CALLS.items():
      expected = "an optimizer with mpjax.master_weights"
      got, fix = f"{kind_of(state)} without masters", "tx = mpjax.master_weights(tx)"
      with refused(TypeError, f"{name}(opt_state)", expected, got, fix):
        call(state, jnp.ones(1))
  masters, fix = mpjax.master_weights(optax.sgd(0.1)), "tx.update(grads, opt_state, params)"
  with refused(ValueError, f"{WHERE}.update(params)", "the third argument", "None", fix):
    masters.update(BOTH_KINDS, masters.init(BOTH_KINDS))
  where, expected = "mpjax.states.master_params(opt_state)", "masters of separate parts"
  with refused(ValueError, where, expected, "two for the same part", "optax.multi_transform"):
    mpjax.states.master_params(optax.chain(masters, masters).init(BOTH_KINDS))
  state = mpjax.TrainState.create(BOTH_KINDS, mpjax.loss_scaling(masters))
  where, got = "mpjax.states.set_master_params(opt_state)", "a TrainState, whose params would stay"
  with refused(TypeError, where, "an optimizer alone", got, "state.params to the same numbers"):
    mpjax.states.set_master_params(state, BOTH_KINDS)


@pytest.mark.parametrize("storage", ["float32", "split"])
def test_masters_are_written_to_an_optimizer_of_nnx(storage):
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  exact = nnx.as_pure(nnx.state(model, nnx.Param))
  stored = mpjax.Policy.parse("bfloat16").cast_to_param(nnx.state(model, nnx.Param))
  nnx.update(model, stored)
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.adam(0.1), storage=storage))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  assert mpjax.states.set_master_params(optimizer, exact) is optimizer
  # States and parameters may have variables.
  params, state = nnx.state(model, nnx.Param), optimizer.opt_state
  for forms in ((optimizer, params), (state, params), (nnx.as_pure(state), nnx.as_pure(params))):
    assert bits(mpjax.states.master_params(*forms)) == bits(exact)


def test_masters_are_set_in_classes_and_not_in_mappings():
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
  state = nnx.state(nnx.Optimizer(model, mpjax.master_weights(optax.sgd(0.1)), wrt=nnx.Param))
  where, fix = "mpjax.states.set_master_params(opt_state)", "Pass the nnx.Optimizer"
  with refused(TypeError, where, "in their classes", "a State with mappings", fix):
    mpjax.states.set_master_params(state, nnx.as_pure(nnx.state(model, nnx.Param)))


def test_parameters_of_another_tree():
  state = mpjax.master_weights(optax.sgd(0.1)).init(BOTH_KINDS)
  others = {"w": jnp.ones(2)}, {"v": jnp.ones(2), "b": jnp.ones(1)}
  for name, call in CALLS.items():
    for params in others:
      with refused(ValueError, f"{name}(params)", " of th", "another tree", "Pass th"):
        call(state, params)
  for w, got in (
    (jnp.arange(2), "int32[2] for float32[2] at ['w']"),
    (1.0, "float32[] for float32[2] at ['w']"),
  ):
    where, expected = "mpjax.states.set_master_params(params)", "in the shapes of"
    with refused(ValueError, where, expected, got, "the float32 parameters of the same model"):
      mpjax.states.set_master_params(state, {"w": w, "b": jnp.ones(1)})


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
    init_in_float32(optax.GradientTransformation(lambda p: other, STEEP.update), BOTH_KINDS, "test")


# Split masters.

PARAMS = {
  "b": jnp.asarray([1.0, -2.0], jnp.bfloat16),
  "f": jnp.ones(2, jnp.float16),
  "n": jnp.ones(2),
  "none": None,
}


def split_tx(inner):
  return mpjax.master_weights(inner, storage="split")


OF_PARAMS = "mpjax.states.master_params(params)"
FIX = "bfloat16 parameters"


def test_only_bfloat16_is_split_and_its_masters_need_the_parameters():
  state = split_tx(optax.sgd(0.1)).init(PARAMS)
  assert isinstance(state, mpjax.states.MasterWeightsState)
  dtypes = jax.tree.map(lambda x: x.dtype.name, state.master)
  assert dtypes == {"b": "int16", "f": "float32", "n": None, "none": None}
  fix = "mpjax.states.master_params(opt_state, params)"
  with refused(ValueError, OF_PARAMS, 'storage="split"', "None", fix):
    mpjax.states.master_params(state)
  found = mpjax.states.master_params(state, PARAMS)
  assert [None if x is None else x.dtype.name for x in found.values()] == ["float32"] * 3 + [None]
  assert found["b"].tolist() == [1, -2]
  assert found["n"] is PARAMS["n"]


def test_parameters_that_cannot_belong_to_the_state_raise():
  # float32 is a wrapper's view, and for users another dtype.
  state = split_tx(optax.sgd(0.1)).init(PARAMS)
  for wrong, got in (
    (jnp.ones((1, 2), jnp.bfloat16), "bfloat16[1, 2] for bfloat16[2]"),
    (jnp.ones(2), "float32[2] for bfloat16[2]"),
    (None, "None for bfloat16[2]"),
    ({"x": jnp.ones(2, jnp.bfloat16)}, "nothing at ['b']; an extra leaf at ['b']['x']"),
  ):
    with refused(ValueError, OF_PARAMS, "of this state", got, FIX) as excinfo:
      mpjax.states.master_params(state, PARAMS | {"b": wrong})
    error = excinfo.value
    assert (str(error).count("expected"), error.__cause__) == (1, None), "one inside of another"


def test_parameters_of_another_dtype_never_give_masters():
  # float32 parameters have lower bits of their own, which a master would be read with.
  params = {"b": jnp.asarray([1.0, -2.0], jnp.bfloat16)}
  for wrap, named in (
    (lambda tx: tx, "mpjax.master_weights(inner)"),
    (mpjax.loss_scaling, "mpjax.loss_scaling(inner)"),
    (lambda tx: mpjax.accumulate_gradients(tx, 2), "mpjax.accumulate_gradients(inner)"),
    (lambda tx: mpjax.loss_scaling(mpjax.accumulate_gradients(tx, 2)), "mpjax.loss_scaling(inner)"),
    (lambda tx: mpjax.loss_scaling(tx, mpjax.NoLossScale()), "mpjax.master_weights(inner)"),
  ):
    tx = wrap(split_tx(optax.adam(0.1)))
    state = tx.init(params)
    for dtype in ("float32", "float16"):
      got = f"{dtype}[2] for bfloat16[2]"
      with refused(ValueError, f"{named}.update(params)", "of this state", got, FIX):
        tx.update(params, state, {"b": jnp.full(2, 1.003, dtype)})
    new = jax.eval_shape(tx.update, params, state, params)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state)
  # Of another shape, which would be broadcast, however masters are stored.
  for shape, inner in itertools.product(((2, 2), (1,)), (split_tx, mpjax.master_weights)):
    other, tx = {"b": jnp.ones(shape, jnp.bfloat16)}, inner(optax.sgd(0.1))
    where, got = "(inner).update(params)", f"bfloat16{list(shape)} for bfloat16[2]"
    with refused(ValueError, where, "of this state, in the shapes", got, FIX):
      tx.update(other, tx.init(params), other)
    with refused(ValueError, OF_PARAMS, "of this state, in the shapes", got, FIX):
      mpjax.states.master_params(tx.init(params), other)


def test_a_state_is_continued_as_it_is_stored():
  params, storages = jnp.asarray([1.0, -2.0], jnp.bfloat16), ("float32", "split")
  transforms = [mpjax.master_weights(optax.sgd(1e-3), storage=storage) for storage in storages]
  for own, other in (transforms, transforms[::-1]):
    state = own.init(params)
    for tx in (own, other):
      found, new = tx.update(params, state, params)
      assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
      assert bits((found, new)) == bits(own.update(params, state, params))
  where, got = "mpjax.master_weights(storage)", "'splits'"
  with refused(ValueError, where, "'float32' or 'split'", got, "'split'"):
    mpjax.master_weights(optax.sgd(0.1), storage="splits")


def test_trees_without_anything_to_split():
  masked = optax.MaskedNode()
  for params in ((), {}, [None, jnp.ones(2)], masked, {"b": masked}, jnp.ones(2)):
    for storage in ("float32", "split"):
      tx = mpjax.master_weights(optax.sgd(0.1), storage=storage)
      state = tx.init(params)
      _, new = tx.update(params, state, params)
      assert jax.tree.structure(new) == jax.tree.structure(state)


def test_masters_are_set_from_any_dtype():
  # For parameters that were cast, ties to even: half-way to a larger one it is an ulp less.
  values = np.asarray([1.001, -2.0003], F32)
  dtypes = ("float32", "bfloat16", "float16")
  for storage in ("float32", "split"):
    state = mpjax.master_weights(optax.adam(1e-3), storage=storage).init(PARAMS)
    for given in (values, *(jnp.asarray(values, dtype) for dtype in dtypes)):
      new = mpjax.states.set_master_params(state, PARAMS | {"b": given})
      exact = np.asarray(given).astype(F32)
      params = PARAMS | {"b": jnp.asarray(exact, jnp.bfloat16)}
      assert bits(mpjax.states.master_params(new, params)["b"]) == bits(exact)
      assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
      assert bits(new.inner_state) == bits(state.inner_state)
  ties = np.asarray([1 + 2.0**-8, 1 + 3 * 2.0**-8], F32)
  params = PARAMS | {"b": jnp.asarray(ties, jnp.bfloat16)}
  set_to = mpjax.states.master_params(
    mpjax.states.set_master_params(state, params | {"b": ties}), params
  )["b"]
  assert set_to.tolist() == [np.nextafter(ties[0], F32(0)), ties[1]]


def test_the_nearest_master_where_no_update_leads_to_the_rounded_one():
  # From 1 to -3 ulps: float32 rounds -1 - 3 ulps, and the addition ends at -4 ulps.
  ulp, start = F32(2.0**-24), F32(1 - 2.0**-10)
  params = jnp.ones(1, jnp.bfloat16)
  tx = split_tx(optax.sgd(1.0))
  state = mpjax.states.set_master_params(tx.init(params), jnp.full(1, start))
  updates, state = tx.update(jnp.full(1, start + 3 * ulp), state, params)
  params = mpjax.apply_updates(params, updates)
  assert params.tolist() == [-4 * ulp]
  # Half a step of bfloat16 below 4 ulps, where the steps are 2^-8 of it.
  assert mpjax.states.master_params(state, params).tolist() == [-4 * ulp * (1 - F32(2.0**-9))]


ALL = np.arange(2**16, dtype=np.uint16).view(BF16)
MOST = 0x7F7F7FFF
"""The largest number that rounds to a finite bfloat16."""


def sizes(x):
  """Returns the bits of float32 numbers without their signs, in 64 bits."""
  return (np.asarray(x, np.float32).view(np.uint32) & 0x7FFFFFFF).astype(np.int64)


def number(size, sign):
  return (size.astype(np.uint32) | sign << np.uint32(31)).view(np.float32)


def signs(x):
  return np.signbit(x).astype(np.uint32)


def same(a, b):
  """Whether the bits are equal, or both are NaN."""
  a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
  return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def there_and_back(x):
  param = stored(bounded(x), jnp.zeros((), BF16))
  rest = split(bounded(x), param)
  return stored(x, param), rest, join(param, rest), bounded(x)


def test_every_parameter_with_remainders_at_the_edges():
  # All upper 16 bits with lower ones at ties and around, and numbers from anywhere.
  low = np.uint32([0, 1, 2, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
  upper = np.arange(2**16, dtype=np.uint32)[:, None] << np.uint32(16)
  anywhere = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
  x = np.concatenate([(upper | low).ravel(), anywhere]).view(np.float32)
  param, rest, back, master = jax.device_get(run(there_and_back, x))
  finite = np.isfinite(x)
  size = np.where(finite, np.minimum(sizes(x), MOST), sizes(x))
  nearest = (size + 0x8000) >> 16
  assert same(master, number(size, signs(x)))
  assert same(back, master)
  assert same(param[~np.isnan(x)], number(nearest << 16, signs(x))[~np.isnan(x)])
  assert np.all(np.isnan(param[np.isnan(x)].astype(np.float32)))
  assert rest.dtype == np.int16
  np.testing.assert_array_equal(rest, np.where(finite, size - (nearest << 16), 0))


def test_any_parameter_with_any_remainder():
  # Stale ones too: a parameter that was set from outside is no NaN with the remainder of another.
  # Nor is it of the other sign.
  rest = np.int16([-32768, -32767, -5, -1, 0, 1, 32766, 32767])[:, None]
  param = np.broadcast_to(ALL, (8, 2**16))
  wide = param.astype(np.float32)
  size = np.clip(sizes(wide) + rest, 0, MOST)
  expected = np.where(np.isfinite(wide), number(size, signs(wide)), wide)
  assert same(run(join, param, np.broadcast_to(rest, param.shape)), expected)


def test_the_remainder_is_that_to_the_parameter_which_is_committed():
  # As a compiler gives that computes a master twice: at a tie they are an ulp apart.
  #
  # In 16 bits that wrap around, the master would be an ulp of bfloat16 away.
  tie = (np.arange(2**15 - 2**8, dtype=np.uint32) << np.uint32(16) | 0x8000).view(np.float32)
  below = (tie.view(np.uint32) - np.uint32(1)).view(np.float32)
  zero = np.zeros((), BF16)
  back = run(lambda m, p: join(stored(p, zero), split(m, stored(p, zero))), below, tie)
  finite = np.isfinite(stored(tie, zero).astype(np.float32)) & (sizes(tie) < MOST)
  assert same(np.asarray(back)[finite], tie[finite])
  back = run(lambda m, p: join(stored(p, zero), split(m, stored(p, zero))), tie, below)
  assert same(back, below)


def test_where_no_remainder_leads_to_the_master_it_is_the_nearest():
  cases = [
    (1.37e-6, 0.0, 32767 * 2.0**-149),  # The largest number that rounds to 0.
    (-1.37e-6, 0.0, 0.0),
    (-0.0, 0.0, 0.0),
    (1e30, 1.0, 1 + 2.0**-8 - 2.0**-23),
    (0.1, 1.0, 1 - 2.0**-8 + 2.0**-9),
    (5.0, -np.inf, -np.inf),
    (5.0, np.nan, np.nan),
  ]
  master, param, expected = np.asarray(cases, np.float32).T.copy()
  assert same(run(lambda m, p: join(p, split(m, p)), master, param.astype(BF16)), expected)


def test_an_update_leads_to_the_rounded_master():
  # -0.0 changes no bit of one that is there.
  rng = np.random.default_rng(1)
  param, goal = (rng.uniform(0.5, 2.0, 2**16).astype(BF16) for _ in range(2))
  master = goal.astype(np.float32) * np.float32(1 + 2.0**-10)
  update = np.asarray(run(update_to, master, param))
  assert bits((param.astype(np.float32) + update).astype(BF16)) == bits(goal)
  finite = ALL[np.isfinite(ALL.astype(np.float32))]
  # Also where the master moved, but not far enough for another half number.
  for near, old in ((finite.astype(np.float32), finite), (master, goal)):
    assert np.all(np.asarray(run(update_to, near, old)).view(np.int32) == -(2**31))
  # What is left of a step that brings a parameter too near to 0 is a bfloat16 number all the same.
  far = param.astype(np.float32) * 2.0 ** rng.integers(-40, 40, 2**16).astype(np.float32)
  total = param.astype(np.float32) + np.asarray(run(update_to, far, param))
  assert bits(total.astype(BF16).astype(np.float32)) == bits(total)


def test_a_master_that_is_not_finite_shows():
  params, values = jnp.ones(3, jnp.bfloat16), [np.inf, -np.inf, np.nan]
  state = mpjax.states.set_master_params(STEEP.init(params), jnp.asarray(values))
  found = apply_from_master(params, jnp.zeros(3), state)
  for reached in (found.astype(F32), update_to(state.master, params)):
    np.testing.assert_array_equal(reached, values)


# Transformations behind and around the masters.

HALVES = optax.scale(0.5)


class CountState(NamedTuple):
  count: jax.Array
  inner_state: optax.OptState


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class HalvedState:
  inner_state: optax.OptState


def halved(tx, state_class):
  """A wrapper of a user, which halves the updates and keeps a state of its own class."""

  def init(params):
    return state_class(inner_state=tx.init(params))

  def update(updates, state, params=None):
    updates, inner_state = tx.update(updates, state.inner_state, params)
    return jax.tree.map(lambda u: u / 2, updates), state_class(inner_state=inner_state)

  return optax.GradientTransformation(init, update)


TRAINED = {"w": True, "norm": False}
HELD = {"w": jnp.asarray([1.0, -2.0], jnp.bfloat16), "norm": jnp.ones(2)}
CHANGES = {
  "a chain": lambda tx: optax.chain(tx, HALVES),
  "a named chain": lambda tx: optax.named_chain(("masters", tx), ("half", HALVES)),
  "a chain in a chain": lambda tx: optax.chain(optax.chain(tx, HALVES), optax.identity()),
  "behind a mask": lambda tx: optax.chain(optax.masked(tx, TRAINED), optax.masked(HALVES, TRAINED)),
  "behind a partition": lambda tx: optax.chain(
    optax.partition({True: tx, False: optax.sgd(0.1)}, TRAINED), HALVES
  ),
  "hyperparameters": lambda tx: optax.inject_hyperparams(
    lambda factor: optax.chain(tx, optax.scale(factor))
  )(factor=0.5),
  "in MultiSteps": lambda tx: optax.MultiSteps(
    optax.chain(tx, HALVES), 2
  ).gradient_transformation(),
  "around MultiSteps": lambda tx: optax.chain(
    optax.MultiSteps(tx, 2).gradient_transformation(), HALVES
  ),
  "apply_if_finite": lambda tx: optax.apply_if_finite(optax.chain(tx, HALVES), 3),
  "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
  "a user's tuple": lambda tx: halved(tx, functools.partial(CountState, count=jnp.int32(0))),
  "a user's dataclass": lambda tx: halved(tx, HalvedState),
}


@pytest.mark.parametrize("storage", ["float32", "split"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_updates_that_masters_would_not_follow_is_an_error(name, storage):
  tx = CHANGES[name](mpjax.master_weights(optax.sgd(0.25), storage=storage))
  state = tx.init(HELD)
  grads = jax.tree.map(lambda p: jnp.ones_like(p, jnp.float32), HELD)
  updates, state = tx.update(grads, state, HELD)
  fix = "mpjax.master_weights(optax.chain(...))"
  alone = "around the entire optimizer, or last in its chain", "would not follow", fix
  with refused(TypeError, "mpjax.apply_updates(opt_state)", *alone):
    mpjax.apply_updates(HELD, updates, state)
  # The wrappers look when they are initialised, and `scaled` looks at the state that it reads.
  for wrap in (
    mpjax.loss_scaling,
    lambda tx: mpjax.accumulate_gradients(tx, 2),
    lambda tx: mpjax.master_weights(mpjax.loss_scaling(tx)),
  ):
    with refused(TypeError, "(inner)", *alone):
      wrap(tx).init(HELD)


def test_a_state_of_training_may_hold_masters():
  tx = mpjax.master_weights(mpjax.loss_scaling(optax.sgd(0.25)))
  state = CountState(count=jnp.int32(0), inner_state=tx.init(HELD))
  assert mpjax.loss_scaling_metrics(state)["loss_scale"] == 2.0**15


def test_a_loss_is_not_scaled_for_masters_in_front_of_a_change():
  inside = mpjax.master_weights(mpjax.loss_scaling(optax.sgd(0.25)))
  state = optax.chain(inside, HALVES).init(HELD)
  with refused(
    TypeError, "mpjax.scaled(opt_state)", "last in its chain", "would not follow", "Put"
  ):
    mpjax.scaled(jnp.sum, state)


PASSES_ON = {
  "last in a chain": lambda tx: optax.chain(optax.clip(8.0), tx),
  "masked": lambda tx: optax.chain(
    optax.masked(optax.set_to_zero(), {"w": False, "norm": True}), optax.masked(tx, TRAINED)
  ),
  "partition": lambda tx: optax.partition({True: tx, False: optax.set_to_zero()}, TRAINED),
  "hyperparameters": lambda tx: optax.inject_hyperparams(
    lambda rate: mpjax.master_weights(optax.sgd(rate))
  )(rate=0.25),
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
  "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step % 2 == 0),
}


@pytest.mark.parametrize("name", PASSES_ON)
def test_wrappers_of_optax_that_pass_updates_on_end_at_the_rounded_masters(name):
  # The same wrapper around float32 parameters, without masters, makes the numbers of the masters.
  masters = PASSES_ON[name](mpjax.master_weights(optax.sgd(0.25)))
  inner = optax.sgd(0.25)
  if name == "hyperparameters":
    control = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
  else:
    control = PASSES_ON[name](inner)
  held, exact = HELD, jax.tree.map(lambda p: p.astype(jnp.float32), HELD)
  state, its_state = masters.init(held), control.init(exact)
  for size in (2.0**-7, 3 * 2.0**-8, np.inf if name == "apply_if_finite" else 1.0, -(2.0**-6), 0.5):
    grads = jax.tree.map(lambda p, g=size: jnp.full_like(p, g), exact)
    updates, state = masters.update(grads, state, held)
    held = mpjax.apply_updates(held, updates, state)
    updates, its_state = control.update(grads, its_state, exact)
    exact = optax.apply_updates(exact, updates)
    of_w = mpjax.states.master_params(state)["w"]
    np.testing.assert_array_equal(of_w, exact["w"], err_msg=str(size))
    np.testing.assert_array_equal(held["w"], of_w.astype(jnp.bfloat16), err_msg=str(size))
  assert not np.array_equal(exact["w"], HELD["w"])
