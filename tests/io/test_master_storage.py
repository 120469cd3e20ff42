"""Masters saved in one storage and restored into the other: the same numbers, or an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import mpjax
from tests.errors import check_refused
from tests.programs import bits
from tests.transforms.losses import loss_of

pytestmark = pytest.mark.standard_promotion  # optax adds float32 to what is stored in half.
STORAGES = ("float32", "split")
restore_like = mpjax.checkpoints.restore_like
WHERE = "mpjax.checkpoints.restore_like(target, restored)"


def start():
  rng = np.random.default_rng(0)
  return {
    "layer": {"w": jnp.asarray(rng.normal(size=(8, 16)), jnp.bfloat16)},
    "b": jnp.zeros(16, jnp.bfloat16),
    "scalar": jnp.ones((), jnp.bfloat16),
    "half": jnp.ones(16, jnp.float16),
    "norm": jnp.ones(16),
  }


def start_with_empty():
  shapes = (0, 4), (2, 0, 3), (4, 0)
  return start() | {"empty": [jnp.zeros(shape, jnp.bfloat16) for shape in shapes]}


@functools.cache
def transformation(storage):
  """Returns the transformation, and its step compiled."""
  masters = mpjax.master_weights(optax.adam(1e-2), storage=storage)
  tx = mpjax.loss_scaling(optax.chain(optax.clip(1.0), masters))

  @jax.jit
  def step(params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    master = None if storage == "split" else mpjax.master_params(opt_state)
    return mpjax.apply_updates(params, updates, master=master), opt_state

  return tx._replace(init=jax.jit(tx.init)), step


def trained(step, state, first, steps):
  """Steps with gradients of their own, some of them not finite."""
  params, opt_state = state
  for i in range(first, first + steps):
    rng = np.random.default_rng(i)
    grads = jax.tree.map(lambda p, rng=rng: rng.normal(size=p.shape).astype(np.float32), params)
    grads["b"][3] = np.nan if i % 5 == 4 else 1.0
    params, opt_state = step(params, opt_state, grads)
  return params, opt_state


@functools.cache
def history(storage):
  """Returns the state after 12 steps, and after 8 more."""
  (tx, step), params = transformation(storage), start_with_empty()
  state = trained(step, (params, tx.init(params)), 0, 12)
  return state, trained(step, state, 12, 8)


@jax.jit
def masters_of(state):
  params, opt_state = state
  return mpjax.master_params(opt_state, params)


def saved(tree, how, path):
  """Returns what `restore_like` takes after `tree` was saved so."""
  if how == "arrays":
    np.savez(path / "file.npz", **mpjax.checkpoints.to_arrays(tree))
    return dict(np.load(path / "file.npz"))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path / "orbax", tree)
  return path / "orbax"


def without_empty(tree):
  """Returns what Orbax can save of a tree."""
  is_params = lambda x: isinstance(x, dict) and "empty" in x  # noqa: E731
  drop = lambda x: {k: v for k, v in x.items() if k != "empty"} if is_params(x) else x  # noqa: E731
  return jax.tree.map(drop, tree, is_leaf=is_params)


@pytest.mark.case("B153", "I19")
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("into", STORAGES)
def test_training_goes_on_in_the_other_storage(into, storage, tmp_path):
  (tx, step), (state, end) = transformation(into), history(storage)
  fresh = (state[0], tx.init(state[0]))
  target = jax.eval_shape(lambda: fresh)
  found = restore_like(target, state)
  assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, fresh)
  assert bits(masters_of(found)) == bits(masters_of(state))
  again = trained(step, found, 12, 8)
  assert bits(again[0]) == bits(end[0])
  assert bits(masters_of(again)) == bits(masters_of(end))
  # The same from files.
  arrays = saved(state, "arrays", tmp_path)
  assert bits(restore_like(target, arrays)) == bits(found)
  path = saved(without_empty(state), "orbax", tmp_path)
  of_orbax = restore_like(without_empty(target), path)
  assert bits(of_orbax) == bits(without_empty(found))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_train_state_on_a_mesh(storage, devices, tmp_path):
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
  where = jax.NamedSharding(mesh, jax.P("data"))
  into = {"float32": "split", "split": "float32"}[storage]
  params = {"w": jax.device_put(start()["layer"]["w"], where)}

  loss_fn = loss_of(lambda p, batch: jnp.mean(jnp.square((batch @ p["w"]).astype(jnp.float32))))

  def begin(storage):
    masters = mpjax.master_weights(optax.adam(1e-2), storage=storage)
    tx = mpjax.loss_scaling(masters, mpjax.StaticLossScale(8))
    step = mpjax.make_train_step(loss_fn, tx, ema_decay=0.5, donate=False)
    return step, mpjax.TrainState.create(params, tx, ema=True)

  (step, state), (again, target) = begin(storage), begin(into)
  batch = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.bfloat16)
  for _ in range(3):
    state, _ = step(state, batch)
  found = restore_like(target, saved(state, "orbax", tmp_path))
  held = found.opt_state.inner_state
  assert held.master["w"].sharding == where
  state, found = step(state, batch)[0], again(found, batch)[0]
  masters = [mpjax.master_params(one.opt_state, one.params) for one in (state, found)]
  assert bits(masters[0]) == bits(masters[1])
  assert bits((state.params, state.ema)) == bits((found.params, found.ema))


def test_one_array_for_all_parameters():
  params = jnp.asarray([1.0, 2.0, 3.0], jnp.bfloat16)
  states = {}
  for storage in STORAGES:
    tx = mpjax.master_weights(optax.sgd(1e-3), storage=storage)
    updates, state = jax.jit(tx.update)(jnp.ones(3), jax.jit(tx.init)(params), params)
    states[storage] = {"p": optax.apply_updates(params, updates), "s": state}
  for storage, other in zip(STORAGES, reversed(STORAGES), strict=True):
    found = restore_like(states[storage], states[other])
    assert bits(found) == bits(states[storage])


def test_files_with_a_17th_bit_are_refused_with_the_way_to_convert_them():
  tx = mpjax.master_weights(optax.sgd(0.1), storage="split")
  params = {"w": jnp.ones(8, jnp.bfloat16)}
  master = {"remainder": {"w": np.zeros(8, np.int16)}, "parity": {"w": np.zeros(1, np.uint8)}}
  saved = {"p": params, "s": {"master": master}}
  call = functools.partial(restore_like, {"p": params, "s": tx.init(params)}, saved)
  got, fix = "at s/master", 'a state of storage="float32", save that, and restore it here'
  check_refused(call, where=WHERE, expected="int16 remainders", got=got, fix=fix)


def test_one_master_in_the_form_of_the_other_storage_is_damage():
  for storage, dtype in zip(STORAGES, (jnp.int16, jnp.float32), strict=True):
    opt_state = mpjax.master_weights(optax.sgd(0.1), storage=storage).init(start())
    target = {"p": start(), "s": opt_state}
    master = opt_state.master | {"b": opt_state.master["b"].astype(dtype)}
    call = functools.partial(
      restore_like, target, target | {"s": opt_state._replace(master=master)}
    )
    expected, got = "leaves of the dtype and shape of target", "[16] at s/master/b"
    check_refused(
      call, where=WHERE, expected=expected, got=got, fix="Build target as the state was"
    )


def test_masters_whose_parameters_have_ties_to_even_are_split():
  """Files of the time before have such ones, and so has the user who casts masters."""
  tie = jnp.asarray([1 + 2.0**-8, 1 + 3 * 2.0**-8])
  params, tx = tie.astype(jnp.bfloat16), mpjax.master_weights(optax.identity(), storage="split")
  saved = mpjax.master_weights(optax.identity()).init(params)._replace(master=tie)
  restored = restore_like({"p": params, "s": tx.init(params)}, {"p": params, "s": saved})
  master = mpjax.master_params(restored["s"], params)
  assert master.tolist() == [1 + 2.0**-8 - 2.0**-23, 1 + 3 * 2.0**-8]


@pytest.mark.parametrize(("storage", "into"), [STORAGES, STORAGES[::-1]])
def test_masters_without_their_parameters_do_not_cross(storage, into):
  state, target = (
    mpjax.master_weights(optax.sgd(0.1), storage=which).init(start()) for which in (storage, into)
  )
  twice = {"a": start(), "b": start()}
  for beside in ({}, twice):
    trees = beside | {"s": target}, beside | {"s": state}
    call = functools.partial(restore_like, *trees)
    got = "none, or several, for the one at s/master/"
    expected, fix = "the bfloat16 parameters beside the masters", "in one tree"
    check_refused(call, where=WHERE, expected=expected, got=got, fix=fix)


@pytest.mark.case("B155")
def test_parameters_that_are_not_the_rounded_masters_raise():
  state = mpjax.master_weights(optax.sgd(0.1)).init(start())
  target = jax.jit(mpjax.master_weights(optax.sgd(0.1), storage="split").init)(start())
  params = start() | {"b": jnp.ones(16, jnp.bfloat16)}
  call = functools.partial(restore_like, {"p": params, "s": target}, {"p": params, "s": state})
  expected, got = "the parameters that belong to the masters", "at s/master/b"
  check_refused(call, where=WHERE, expected=expected, got=got, fix="cast_to_param")
