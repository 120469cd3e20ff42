"""Where a scale is found, by which name, and which states are refused."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxState

import mpjax
from mpjax._core.errors import kind_of
from mpjax._optim.find_scale import find_scale, scales_in
from mpjax._optim.states import LossScaleState
from tests.errors import refused
from tests.optim.scales import PARAMS, SCALED, of_nnx

OFF = mpjax.NoLossScale()


def cotangent_at(state, **name):
  """Returns the cotangent of a loss, seen from the inside of its backward pass."""
  seen = []
  loss = jax.custom_vjp(lambda w: w)
  loss.defvjp(
    lambda w: (w, None), lambda _, cotangent: (seen.append(float(cotangent)), cotangent)[1:]
  )
  jax.grad(mpjax.scaled(loss, state, **name))(1.0)
  return seen[0]


LABELS, IDENTITY = {"w": "a", "b": "b"}, optax.identity()
# Every place in which optax can put a state.
PLACES = {
  "alone": SCALED,
  "chain": optax.chain(IDENTITY, optax.chain(SCALED, IDENTITY)),
  "named_chain": optax.named_chain(("one", IDENTITY), ("two", SCALED)),
  "masked": optax.masked(SCALED, {"w": True, "b": False}),
  "partition": optax.partition({"a": SCALED, "b": optax.set_to_zero()}, LABELS),
  "flatten": optax.flatten(SCALED),
}


@pytest.mark.parametrize("place", [*PLACES, "state of Flax"])
def test_the_scale_is_found_wherever_it_sits(place):
  if place in PLACES:
    state = PLACES[place].init(PARAMS)
  else:
    state = FlaxState.create(apply_fn=None, params=PARAMS, tx=SCALED)
  assert mpjax.loss_scaling_metrics(state)["loss_scale"] == 8
  moved = mpjax.states.set_loss_scale(state, 4)
  assert jax.tree.structure(moved) == jax.tree.structure(state)
  assert mpjax.loss_scaling_metrics(moved)["loss_scale"] == 4
  assert mpjax.loss_scaling_metrics(state)["loss_scale"] == 8, "the old state is as it was"


FORMS = {
  "nnx.State": lambda: nnx.state(of_nnx()),
  "nnx.State of one": lambda: nnx.state(of_nnx()[1]),
  "nnx.State of arrays": lambda: nnx.as_pure(nnx.state(of_nnx())),
  "pure dict": lambda: nnx.to_pure_dict(nnx.state(of_nnx())),
  "nnx.split": lambda: nnx.split(of_nnx()),
  "nnx.split by type": lambda: nnx.split(of_nnx(), nnx.Param, ...),
  "state dict of Flax": lambda: flax.serialization.to_state_dict(
    mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale()).init(PARAMS)
  ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_scale_is_read_and_set_where_mappings_stand_for_classes(form):
  state = FORMS[form]()
  before = jax.tree.map(np.asarray, state)
  assert mpjax.step_applied(state)
  mpjax.check_skipped_steps(state)
  assert cotangent_at(state) == 2**15
  moved = mpjax.states.set_loss_scale(state, 4)
  # The oracle is the leaf at the path of the scale.
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
  changed = [
    path
    for path, x, y in zip(paths, jax.tree.leaves(before), jax.tree.leaves(moved), strict=True)
    if np.any(x != y)
  ]
  assert [path.removesuffix(".value")[-9:] for path in changed] == ["['scale']"]
  assert mpjax.loss_scaling_metrics(moved)["loss_scale"] == 4
  assert jax.tree.structure(moved) == jax.tree.structure(state)
  assert mpjax.loss_scaling_metrics(state)["loss_scale"] == 2**15, "the old state is as it was"


def test_a_state_of_nnx_with_two_scales_is_read_by_name():
  tx = {
    name: mpjax.loss_scaling(optax.sgd(0.1), config, name=name)
    for name, config in {"actor": mpjax.StaticLossScale(8), "critic": OFF}.items()
  }
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  state = nnx.state({name: nnx.Optimizer(model, one, wrt=nnx.Param) for name, one in tx.items()})
  assert mpjax.loss_scaling_metrics(state, name="actor")["loss_scale"] == 8
  critic = mpjax.loss_scaling_metrics(state, name="critic")
  assert (critic["loss_scale"], critic["total"]) == (1, 0)


NUMBERS = dict.fromkeys(LossScaleState._fields, 0)


@pytest.mark.parametrize(
  ("mapping", "labels"),
  [
    ({"loss_scale": 8.0}, []),
    ({"loss_scale": {}}, []),
    ({"loss_scale": {"dynamic": 8.0}}, []),
    ({"loss_scale": {"growing": NUMBERS}}, []),
    ({"loss_scale": {0: NUMBERS}}, []),
    ({"loss_scale": {"dynamic": {"scale": 8.0}}}, []),
    ({"scale": {"dynamic": NUMBERS}}, []),
    ({"loss_scale": {"a:dynamic": NUMBERS}}, ["a:dynamic"]),
  ],
)
def test_a_mapping_is_a_loss_scale_by_its_labels_and_fields(mapping, labels):
  assert [one.label for one in scales_in(mapping)] == labels


CALLS = {
  "states.set_loss_scale": lambda state, **kw: mpjax.states.set_loss_scale(state, 4, **kw),
  "loss_scaling_metrics": mpjax.loss_scaling_metrics,
  "check_skipped_steps": mpjax.check_skipped_steps,
  "scaled": lambda state, **kw: mpjax.scaled(jnp.sum, state, **kw),
}


def test_states_without_a_scale_and_with_two():
  pair = {"actor": SCALED.init(PARAMS), "critic": SCALED.init(PARAMS)}
  none = optax.adam(1e-3).init(PARAMS), PARAMS, None, ()
  made, wrap = "created by mpjax.loss_scaling", "mpjax.SkipNonfinite()) in bfloat16"
  for state, expected, got, fix in (
    (pair, "one loss scale", "one with 2, named [None, None]", "by name="),
    *((x, made, f"{kind_of(x)} without a loss scale", wrap) for x in none),
    (SCALED, made, f"{kind_of(SCALED)} without a loss scale", "opt_state = tx.init(params)"),
  ):
    for name, call in CALLS.items():
      with refused(TypeError, f"mpjax.{name}(opt_state)", expected, got, fix):
        call(state)


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
  moved = mpjax.states.set_loss_scale(state, 16, name="critic")
  scales = [mpjax.loss_scaling_metrics(moved, name=n)["loss_scale"] for n in ("actor", "critic")]
  assert scales == [2, 16]
  assert cotangent_at(moved, name="critic") == 16


@pytest.mark.standard_promotion
def test_a_tuple_is_taken_for_a_chain():
  # What is in a chain may see scaled gradients and skipped steps; parameters are no state.
  tx = {name: mpjax.loss_scaling(optax.adam(0.1), name=name) for name in "gd"}
  trace, adam = optax.trace(0.9), optax.adam(0.1)
  beside = adam, mpjax.accumulate_gradients(adam, 2), optax.chain(trace), tx["d"]
  states = {name: one.init(PARAMS) for name, one in tx.items()}
  for read in (mpjax.loss_scaling_metrics, mpjax.step_applied, mpjax.check_skipped_steps):
    for name in tx:
      read(states, name=name)
      read((PARAMS, states[name]), name=name)
    for other in beside:
      state = optax.chain(optax.clip(1.0), tx["g"], other).init(PARAMS)
      _, state = optax.chain(optax.clip(1.0), tx["g"], other).update(PARAMS, state, PARAMS)
      for in_a_chain in (state, (states["g"], other.init(PARAMS))):
        with pytest.raises(mpjax.MpjaxError, match=r"entire optimizer, got .* in a dict\."):
          read(in_a_chain, name="g")
