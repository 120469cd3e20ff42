"""Masters that are split: which parameters belong to them, what raises, and all bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.transforms._masters import bounded, join, split, stored, update_to
from tests.errors import refused
from tests.programs import bits, run
from tests.transforms.losses import loss_of

F32 = np.float32
PARAMS = {
  "b": jnp.asarray([1.0, -2.0], jnp.bfloat16),
  "f": jnp.ones(2, jnp.float16),
  "n": jnp.ones(2),
  "none": None,
}


def split_tx(inner):
  return mpjax.master_weights(inner, storage="split")


def test_only_bfloat16_is_split():
  state = jax.eval_shape(split_tx(optax.sgd(0.1)).init, PARAMS)
  assert isinstance(state, mpjax.states.MasterWeightsState)
  dtypes = {name: x and x.dtype for name, x in state.master.items()}
  assert dtypes == {"b": np.int16, "f": F32, "n": None, "none": None}


WHERE = "mpjax.master_params(params)"
FIX = "bfloat16 parameters"


def test_masters_need_the_parameters_that_they_were_split_from():
  state = split_tx(optax.sgd(0.1)).init(PARAMS)
  fix = "mpjax.master_params(opt_state, params)"
  with refused(ValueError, WHERE, 'storage="split"', "None", fix):
    mpjax.master_params(state)
  found = mpjax.master_params(state, PARAMS)
  assert [None if x is None else x.dtype.name for x in found.values()] == ["float32"] * 3 + [None]
  assert found["b"].tolist() == [1, -2]
  assert found["n"] is PARAMS["n"]


@pytest.mark.case("B152")
def test_parameters_that_cannot_belong_to_the_state_raise():
  # float32 is a wrapper's view, and for users another dtype.
  state = split_tx(optax.sgd(0.1)).init(PARAMS)
  for wrong, got in (
    (jnp.ones(3, jnp.bfloat16), "bfloat16[3] for bfloat16[2]"),
    (jnp.ones((1, 2), jnp.bfloat16), "bfloat16[1, 2] for bfloat16[2]"),
    (jnp.ones(2, jnp.float16), "float16[2] for bfloat16[2]"),
    (jnp.ones(2), "float32[2] for bfloat16[2]"),
    (jnp.ones(2, jnp.int32), "int32[2] for bfloat16[2]"),
    (None, "None for bfloat16[2]"),
    ({"x": jnp.ones(2, jnp.bfloat16)}, "nothing at ['b']; an extra leaf at ['b']['x']"),
  ):
    with refused(ValueError, WHERE, "of this state", got, FIX) as excinfo:
      mpjax.master_params(state, PARAMS | {"b": wrong})
    error = excinfo.value
    assert (str(error).count("expected"), error.__cause__) == (1, None), "one inside of another"


@pytest.mark.case("B152")
def test_parameters_of_another_dtype_never_give_masters():
  # float32 parameters have lower bits of their own, which a master would be read with.
  params = {"b": jnp.asarray([1.0, -2.0], jnp.bfloat16)}
  for wrap, named in (
    (lambda tx: tx, "mpjax.master_weights(inner)"),
    (mpjax.loss_scaling, "mpjax.loss_scaling(inner)"),
    (lambda tx: mpjax.accumulate_gradients(tx, 2), "mpjax.accumulate_gradients(inner)"),
    (lambda tx: mpjax.loss_scaling(optax.chain(optax.clip(1.0), tx)), "mpjax.loss_scaling(inner)"),
    (lambda tx: mpjax.loss_scaling(mpjax.accumulate_gradients(tx, 2)), "mpjax.loss_scaling(inner)"),
    (lambda tx: mpjax.loss_scaling(tx, mpjax.NoLossScale()), "mpjax.master_weights(inner)"),
  ):
    tx = wrap(split_tx(optax.adam(0.1)))
    state = tx.init(params)
    for dtype, update in itertools.product(("float32", "float16"), (tx.update, jax.jit(tx.update))):
      got = f"{dtype}[2] for bfloat16[2]"
      with refused(ValueError, f"{named}.update(params)", "of this state", got, FIX):
        update(params, state, {"b": jnp.full(2, 1.003, dtype)})
    new = jax.eval_shape(tx.update, params, state, params)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state)
  other = {"b": jnp.ones((2, 2), jnp.bfloat16)}
  tx = split_tx(optax.sgd(0.1))
  where, got = "mpjax.master_weights(inner).update(params)", "bfloat16[2, 2] for bfloat16[2]"
  with refused(ValueError, where, "of this state", got, FIX):
    tx.update(other, tx.init(params), other)


def test_variables_of_nnx_have_to_be_left_out():
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.sgd(0.1)))
  state = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state
  params = nnx.state(model, nnx.Param)
  fix = "nnx.as_pure(optimizer.opt_state) and nnx.as_pure(nnx.state(model, nnx.Param))"
  with refused(ValueError, WHERE, "the parameters of this state", "another tree", fix):
    mpjax.master_params(state, params)
  found = mpjax.master_params(nnx.as_pure(state), nnx.as_pure(params))
  assert bits(found["kernel"]) == bits(np.asarray(model.kernel[...]).astype(F32))


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
      new = mpjax.set_master_params(state, PARAMS | {"b": given})
      exact = np.asarray(given).astype(F32)
      params = PARAMS | {"b": jnp.asarray(exact, jnp.bfloat16)}
      assert bits(mpjax.master_params(new, params)["b"]) == bits(exact)
      assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
      assert new.inner_state is state.inner_state or bits(new.inner_state) == bits(
        state.inner_state
      )
  ties = np.asarray([1 + 2.0**-8, 1 + 3 * 2.0**-8], F32)
  params = PARAMS | {"b": jnp.asarray(ties, jnp.bfloat16)}
  set_to = mpjax.master_params(mpjax.set_master_params(state, params | {"b": ties}), params)["b"]
  assert set_to.tolist() == [np.nextafter(ties[0], F32(0)), ties[1]]
  where, got = "mpjax.set_master_params(params)", "float32[3] for float32[2] at ['b']"
  fix = "Pass the float32 parameters"
  with refused(ValueError, where, "in the shapes of the masters", got, fix):
    mpjax.set_master_params(state, PARAMS | {"b": jnp.ones(3)})


def test_a_train_step_does_not_round_split_parameters_stochastically():
  loss_fn = loss_of(lambda params, batch: jnp.sum(params.astype(jnp.float32) * batch))
  tx = mpjax.loss_scaling(split_tx(optax.sgd(0.1)), mpjax.StaticLossScale(8))
  params = jnp.ones(2, jnp.bfloat16)
  state = mpjax.TrainState.create(params, tx, rng=jax.random.key(0))
  step = mpjax.make_train_step(loss_fn, tx, rounding="stochastic")
  where = "mpjax.make_train_step(rounding='stochastic'): step(state): opt_state"
  with refused(ValueError, where, "no master", "mpjax.master_weights", "Use one of the two"):
    step(state, jnp.ones(2))


def test_masters_of_branches_are_merged():
  params = {"a": jnp.ones(2, jnp.bfloat16), "b": {"c": jnp.ones(3, jnp.bfloat16)}}
  branches = {
    "x": split_tx(optax.sgd(2.0**-9)),
    "y": mpjax.master_weights(optax.sgd(2.0**-10)),
  }
  tx = optax.multi_transform(branches, {"a": "x", "b": "y"})
  updates, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
  params = mpjax.apply_updates(params, updates)
  expected = np.full(2, F32(1 - 2.0**-9)), np.full(3, F32(1 - 2.0**-10))
  assert bits(mpjax.master_params(state, params)) == bits(expected)


def test_the_nearest_master_where_no_update_leads_to_the_rounded_one():
  # From 1 to -3 ulps: float32 rounds -1 - 3 ulps, and the addition ends at -4 ulps.
  ulp, start = F32(2.0**-24), F32(1 - 2.0**-10)
  params = jnp.ones(1, jnp.bfloat16)
  tx = split_tx(optax.sgd(1.0))
  state = mpjax.set_master_params(tx.init(params), jnp.full(1, start))
  updates, state = tx.update(jnp.full(1, start + 3 * ulp), state, params)
  params = mpjax.apply_updates(params, updates)
  assert params.tolist() == [-4 * ulp]
  # Half a step of bfloat16 below 4 ulps, where the steps are 2^-8 of it.
  assert mpjax.master_params(state, params).tolist() == [-4 * ulp * (1 - F32(2.0**-9))]


BF16 = np.dtype(jnp.bfloat16)
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
  #
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
  update = np.asarray(run(update_to, finite.astype(np.float32), finite))
  assert not np.any(update)
  assert np.all(np.signbit(update))
  # What is left of a step that brings a parameter too near to 0 is a bfloat16 number all the same.
  far = param.astype(np.float32) * 2.0 ** rng.integers(-40, 40, 2**16).astype(np.float32)
  total = param.astype(np.float32) + np.asarray(run(update_to, far, param))
  assert bits(total.astype(BF16).astype(np.float32)) == bits(total)
