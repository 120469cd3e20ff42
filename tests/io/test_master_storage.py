"""Masters saved in one storage and restored into the other: the same numbers, or an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.io.test_checkpoints_restore import npz, orbax_path
from tests.programs import bits

pytestmark = pytest.mark.standard_promotion  # optax adds float32 to what is stored in half.
STORAGES = ("float32", "split")
restore_like = mpjax.checkpoints.restore_like
WHERE = "mpjax.checkpoints.restore_like(target, restored)"
ADAM = mpjax.state_dtype(optax.adam(1e-2), mu="bfloat16")  # Moments that could be parameters.


def start():
  rng = np.random.default_rng(0)
  return {
    "layer": {"w": jnp.asarray(rng.normal(size=(8, 16)), jnp.bfloat16)},
    "deep": {"layer": {"w": jnp.ones((8, 16), jnp.bfloat16)}},
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
  masters = mpjax.master_weights(ADAM, storage=storage)
  tx = mpjax.loss_scaling(optax.chain(optax.clip(1.0), masters))

  @jax.jit
  def step(params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    return mpjax.apply_updates(params, updates, opt_state), opt_state

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
  return mpjax.states.master_params(opt_state, params)


def without_empty(tree):
  """Returns what Orbax can save of a tree."""
  is_params = lambda x: isinstance(x, dict) and "empty" in x  # noqa: E731
  drop = lambda x: {k: v for k, v in x.items() if k != "empty"} if is_params(x) else x  # noqa: E731
  return jax.tree.map(drop, tree, is_leaf=is_params)


@pytest.mark.slow
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
  assert bits(restore_like(target, npz(state, tmp_path / "file"))) == bits(found)
  path = orbax_path(without_empty(state), tmp_path / "orbax")
  assert bits(restore_like(without_empty(target), path)) == bits(without_empty(found))


@pytest.mark.parametrize("storage", STORAGES)
def test_what_crosses_is_placed_as_in_target(storage, devices):
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
  where = jax.NamedSharding(mesh, jax.P("data"))
  # Under a mask, with the path of what has a master inside of what is frozen.
  sgd, mask, w = optax.sgd(0.1), {"w": True, "frozen": False}, start()["layer"]["w"]
  params = jax.device_put({"w": w, "frozen": {"w": 2 * w}}, where)
  masters = (mpjax.master_weights(sgd, storage=one) for one in (storage, *STORAGES))
  txs = (optax.masked(tx, mask) for tx in masters)
  state, *targets = ((params, tx.init(params)) for tx in txs)
  for target in targets:
    found = restore_like(target, state)
    assert found[1].inner_state.master["w"].sharding == where
    assert bits(masters_of(found)) == bits(masters_of(state))


def begun_with_nnx(storage):
  rngs = nnx.Rngs(0)
  model = nnx.List(
    [nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=rngs), nnx.LayerNorm(4, rngs=rngs)]
  )
  tx = mpjax.loss_scaling(mpjax.master_weights(ADAM, storage=storage))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def pure(objects):
  return nnx.to_pure_dict(nnx.state(objects))


@pytest.mark.slow
@pytest.mark.parametrize("form", [nnx.state, pure])
@pytest.mark.parametrize("storage", STORAGES)
def test_masters_of_nnx_cross_without_their_classes(storage, form):
  (into,) = {*STORAGES} - {storage}
  trained, restored = begun_with_nnx(storage), begun_with_nnx(into)
  model, optimizer = trained
  for _ in range(2):
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
  saved = mpjax.checkpoints.to_arrays(form(trained))
  nnx.update(restored, nnx.State(restore_like(form(restored), saved)))
  found = [
    mpjax.states.master_params(optimizer, nnx.as_pure(nnx.state(model, nnx.Param)))
    for model, optimizer in (trained, restored)
  ]
  assert bits(found[0]) == bits(found[1])
  assert bits(pure(trained[0])) == bits(pure(restored[0]))


def test_one_array_for_all_parameters():
  states = []
  for storage in STORAGES:
    # In a chain after a copy of the parameters, which are an array: no path tells them apart.
    copy, params = optax.trace(0.9, accumulator_dtype=jnp.bfloat16), jnp.ones(3, jnp.bfloat16)
    tx = optax.chain(copy, mpjax.master_weights(optax.sgd(1e-3), storage=storage))
    updates, state = tx.update(jnp.ones(3), tx.init(params), params)
    states.append({"p": optax.apply_updates(params, updates), "s": state})
  for target, saved in (states, states[::-1]):
    assert bits(restore_like(target, saved)) == bits(target)


def test_masters_whose_parameters_have_ties_to_even_are_split():
  # Files of the time before have such ones, and so has the user who casts masters.
  tie = jnp.asarray([1 + 2.0**-8, 1 + 3 * 2.0**-8])
  params, tx = tie.astype(jnp.bfloat16), mpjax.master_weights(optax.identity(), storage="split")
  saved = mpjax.master_weights(optax.identity()).init(params)._replace(master=tie)
  restored = restore_like({"p": params, "s": tx.init(params)}, {"p": params, "s": saved})
  master = mpjax.states.master_params(restored["s"], params)
  assert master.tolist() == [1 + 2.0**-8 - 2.0**-23, 1 + 3 * 2.0**-8]


def begun(storage):
  """Returns a state before the first step, beside its parameters."""
  return {"p": start(), "s": mpjax.master_weights(ADAM, storage=storage).init(start())}


def other_form(target):
  old = target["s"].master["b"]
  form = old.astype(jnp.float32 if old.dtype == jnp.int16 else jnp.int16)
  return target | {"s": target["s"]._replace(master=target["s"].master | {"b": form})}


SPLIT, WIDE = begun("split"), begun("float32")
BITS_17 = {"remainder": {"w": np.zeros(8, np.int16)}, "parity": {"w": np.zeros(1, np.uint8)}}
OLD = SPLIT | {"s": {"master": BITS_17}}
TWICE = {"a": start(), "b": start()}
DAMAGED = WIDE | {"p": start() | {"b": jnp.ones(16, jnp.bfloat16)}}
CONVERT = 'a state of storage="float32", save that, and restore it here'
FITS = "leaves of the dtype and shape of target", "[16] at s/master/b", "Build target as the state"
BESIDE = "one tree of bfloat16 parameters beside the split masters"
ALONE, SEVERAL = (
  (BESIDE, f"{x} for the masters at s/master", "in one tree") for x in ("none", "a; b")
)
ROUNDED = "the parameters that belong to the split masters", "at s/master/b", "cast_to_param"
REFUSED = {
  "a 17th bit in files of old": (SPLIT, OLD, "int16 remainders", "s/master", CONVERT),
  "one split master in the form of float32": (SPLIT, other_form(SPLIT), *FITS),
  "one float32 master in the form of split": (WIDE, other_form(WIDE), *FITS),
  "to float32 without the parameters": ({"s": WIDE["s"]}, {"s": SPLIT["s"]}, *ALONE),
  "to split without the parameters": ({"s": SPLIT["s"]}, {"s": WIDE["s"]}, *ALONE),
  "with the parameters twice": (TWICE | {"s": SPLIT["s"]}, TWICE | {"s": WIDE["s"]}, *SEVERAL),
  "parameters that are not the rounded masters": (SPLIT, DAMAGED, *ROUNDED),
}
"""What is restored into what, and what the error says."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_cross_is_refused(name):
  target, saved, expected, got, fix = REFUSED[name]
  with refused(ValueError, WHERE, expected, got, fix):
    restore_like(target, saved)
