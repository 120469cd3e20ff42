"""Masters that are split: which parameters belong to them, and what raises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import check_error
from tests.programs import bits

F32 = np.float32
PARAMS = {
  "b": jnp.asarray([1.0, -2.0], jnp.bfloat16),
  "f": jnp.ones(2, jnp.float16),
  "n": jnp.ones(2),
  "none": None,
}


def split(inner):
  return mpjax.master_weights(inner, storage="split")


def test_only_bfloat16_is_split():
  state = split(optax.sgd(0.1)).init(PARAMS)
  assert isinstance(state, mpjax.MasterWeightsState)
  remainder, parity = state.master
  assert remainder["b"].dtype == np.int16
  assert remainder["f"].dtype == F32
  assert remainder["n"] is None
  assert remainder["none"] is None
  assert remainder["b"].nbytes == 2 * 2
  assert jax.tree.map(lambda x: x.nbytes, parity) == {"b": 1} | dict.fromkeys(("f", "n", "none"))


def test_masters_need_the_parameters_that_they_were_split_from():
  state = split(optax.sgd(0.1)).init(PARAMS)
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.master_params(state)
  check_error(
    excinfo,
    where="mpjax.master_params(params)",
    expected='storage="split"',
    got="None",
    fix="mpjax.master_params(opt_state, params)",
  )
  found = mpjax.master_params(state, PARAMS)
  assert {name: x.dtype.name for name, x in found.items() if x is not None} == {
    "b": "float32",
    "f": "float32",
    "n": "float32",
  }
  assert found["b"].tolist() == [1, -2]
  assert found["n"] is PARAMS["n"]


@pytest.mark.case("B152")
@pytest.mark.parametrize(
  ("wrong", "got"),
  [
    ({"b": jnp.ones(3, jnp.bfloat16)}, "bfloat16[3] for bfloat16[2]"),
    ({"b": jnp.ones((1, 2), jnp.bfloat16)}, "bfloat16[1, 2] for bfloat16[2]"),
    ({"b": jnp.ones(2, jnp.float16)}, "float16[2] for bfloat16[2]"),
    ({"b": jnp.ones(2, jnp.int32)}, "int32[2] for bfloat16[2]"),
    ({"b": None}, "NoneType for bfloat16[2]"),
    ({"b": {"x": jnp.ones(2, jnp.bfloat16)}}, "dict for bfloat16[2]"),
  ],
  ids=str,
)
def test_parameters_that_cannot_belong_to_the_state_raise(wrong, got):
  tx = split(optax.sgd(0.1))
  state = tx.init(PARAMS)
  where = "mpjax.master_params(params)"
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.master_params(state, PARAMS | wrong)
  check_error(excinfo, where=where, expected="of this state", got=got, fix="bfloat16 parameters")


def test_float32_is_a_wrappers_view_and_for_users_another_dtype():
  state = split(optax.sgd(0.1)).init(PARAMS)
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.master_params(state, PARAMS | {"b": jnp.ones(2)})
  check_error(
    excinfo,
    where="mpjax.master_params(params)",
    expected="of this state",
    got="float32[2] for bfloat16[2]",
    fix="bfloat16 parameters",
  )
  assert str(excinfo.value).count("expected") == 1, "an error inside of an error"
  assert excinfo.value.__cause__ is None


WRAPPERS = {
  "mpjax.master_weights(inner)": lambda tx: tx,
  "mpjax.loss_scaling(inner)": mpjax.loss_scaling,
  "mpjax.accumulate_gradients(inner)": lambda tx: mpjax.accumulate_gradients(tx, 2),
  "in a chain": lambda tx: mpjax.loss_scaling(optax.chain(optax.clip(1.0), tx)),
  "of a window": lambda tx: mpjax.loss_scaling(mpjax.accumulate_gradients(tx, 2)),
  "no scale": lambda tx: mpjax.loss_scaling(tx, mpjax.NoLossScale()),
}
NAMED = {
  "in a chain": "mpjax.loss_scaling(inner)",
  "of a window": "mpjax.loss_scaling(inner)",
  "no scale": "mpjax.master_weights(inner)",
}


@pytest.mark.case("B152")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_parameters_of_another_dtype_never_give_masters(wrapper, dtype):
  """float32 parameters have lower bits of their own, which a master would be read with."""
  tx = WRAPPERS[wrapper](split(optax.adam(0.1)))
  params = {"b": jnp.asarray([1.0, -2.0], jnp.bfloat16)}
  state = tx.init(params)
  wrong = {"b": jnp.full(2, 1.003, dtype)}
  for update in (tx.update, jax.jit(tx.update)):
    with pytest.raises(mpjax.MpjaxValueError) as excinfo:
      update(params, state, wrong)
    check_error(
      excinfo,
      where=f"{NAMED.get(wrapper, wrapper)}.update(params)",
      expected="of this state",
      got=f"{dtype}[2] for bfloat16[2]",
      fix="bfloat16 parameters",
    )
    _, new = update(params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize("storage", ["float32", "split"])
def test_variables_of_nnx_have_to_be_left_out(storage):
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.sgd(0.1), storage=storage))
  state = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state
  params = nnx.state(model, nnx.Param)
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.master_params(state, params)
  check_error(
    excinfo,
    where="mpjax.master_params(params)",
    expected="the tree that the state was created for",
    got="another one",
    fix="nnx.as_pure(optimizer.opt_state) and nnx.as_pure(nnx.state(model, nnx.Param))",
  )
  found = mpjax.master_params(nnx.as_pure(state), nnx.as_pure(params))
  assert bits(found["kernel"]) == bits(np.asarray(model.kernel[...]).astype(F32))


def test_update_refuses_what_cannot_be_its_parameters():
  tx = split(optax.sgd(0.1))
  state = tx.init({"b": jnp.ones(2, jnp.bfloat16)})
  other = {"b": jnp.ones((2, 2), jnp.bfloat16)}
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    tx.update(other, state, other)
  check_error(
    excinfo,
    where="mpjax.master_weights(inner).update(params)",
    expected="of this state",
    got="bfloat16[2, 2] for bfloat16[2]",
    fix="bfloat16 parameters",
  )


@pytest.mark.parametrize("storage", ["float32", "split"])
def test_the_state_of_the_other_storage_is_refused(storage):
  other = {"float32": "split", "split": "float32"}[storage]
  params = jnp.ones(2, jnp.bfloat16)
  state = mpjax.master_weights(optax.sgd(0.1), storage=other).init(params)
  with pytest.raises(mpjax.MpjaxTypeError) as excinfo:
    mpjax.master_weights(optax.sgd(0.1), storage=storage).update(params, state, params)
  check_error(
    excinfo,
    where="mpjax.master_weights(inner).update(state)",
    expected=f'storage="{storage}"',
    got="the other storage",
    fix="mpjax.checkpoints.restore_like",
  )


@pytest.mark.parametrize(
  "params",
  [(), {}, [None, jnp.ones(2)], optax.MaskedNode(), {"b": optax.MaskedNode()}, jnp.ones(2)],
  ids=str,
)
@pytest.mark.parametrize("storage", ["float32", "split"])
def test_trees_without_anything_to_split(params, storage):
  tx = mpjax.master_weights(optax.sgd(0.1), storage=storage)
  state = tx.init(params)
  _, new = tx.update(params, state, params)
  assert jax.tree.structure(new) == jax.tree.structure(state)


def test_an_unknown_storage():
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.master_weights(optax.sgd(0.1), storage="splits")
  check_error(
    excinfo,
    where="mpjax.master_weights(storage)",
    expected="'float32' or 'split'",
    got="'splits'",
    fix="'split'",
  )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "numpy"])
def test_masters_are_set_from_any_dtype(dtype):
  values = np.asarray([1.001, -2.0003], F32)
  given = values if dtype == "numpy" else jnp.asarray(values, dtype)
  state = split(optax.adam(1e-3)).init(PARAMS)
  new = mpjax.set_master_params(state, PARAMS | {"b": given})
  exact = np.asarray(given).astype(F32)
  params = PARAMS | {"b": jnp.asarray(exact, jnp.bfloat16)}
  assert bits(mpjax.master_params(new, params)["b"]) == bits(exact)
  assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.set_master_params(state, PARAMS | {"b": jnp.ones(3)})
  check_error(
    excinfo,
    where="mpjax.set_master_params(params)",
    expected="in the shapes of the masters",
    got="float32[3] for float32[2] at ['b']",
    fix="Pass the float32 parameters",
  )


def test_a_train_step_does_not_round_split_parameters_stochastically():
  def loss_fn(params, model_state, batch, rng):
    del rng
    return jnp.sum(params.astype(jnp.float32) * batch), (model_state, {})

  tx = mpjax.loss_scaling(split(optax.sgd(0.1)), mpjax.StaticLossScale(8))
  params = jnp.ones(2, jnp.bfloat16)
  state = mpjax.TrainState.create(params, tx, rng=jax.random.key(0))
  step = mpjax.make_train_step(loss_fn, tx, rounding="stochastic")
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    step(state, jnp.ones(2))
  check_error(
    excinfo,
    where="mpjax.make_train_step(rounding='stochastic'): step(state): opt_state",
    expected="no master",
    got="mpjax.master_weights",
    fix="Use one of the two",
  )


def test_masters_of_branches_are_merged():
  params = {"a": jnp.ones(2, jnp.bfloat16), "b": {"c": jnp.ones(3, jnp.bfloat16)}}
  branches = {"x": split(optax.sgd(2.0**-9)), "y": mpjax.master_weights(optax.sgd(2.0**-10))}
  tx = optax.multi_transform(branches, {"a": "x", "b": "y"})
  updates, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
  params = mpjax.apply_updates(params, updates)
  found = mpjax.master_params(state, params)
  assert bits(found) == bits(
    {"a": np.full(2, F32(1 - 2.0**-9)), "b": {"c": np.full(3, F32(1 - 2.0**-10))}}
  )
  with pytest.raises(mpjax.MpjaxValueError) as excinfo:
    mpjax.master_params([state, state], params)
  check_error(
    excinfo,
    where="mpjax.master_params(opt_state)",
    expected="masters of separate parts",
    got="two for the same part",
    fix="Use master_weights once",
  )


def test_the_nearest_master_where_no_update_leads_to_the_rounded_one():
  """From 1 to -3 ulps: float32 rounds -1 - 3 ulps, and the addition ends at -4 ulps."""
  ulp, start = F32(2.0**-24), F32(1 - 2.0**-10)
  params = jnp.ones(1, jnp.bfloat16)
  tx = split(optax.sgd(1.0))
  state = mpjax.set_master_params(tx.init(params), jnp.full(1, start))
  updates, state = tx.update(jnp.full(1, start + 3 * ulp), state, params)
  params = mpjax.apply_updates(params, updates)
  assert params.tolist() == [-4 * ulp]
  # Half a step of bfloat16 below 4 ulps, where the steps are 2^-8 of it.
  assert mpjax.master_params(state, params).tolist() == [-4 * ulp * (1 - F32(2.0**-9))]
