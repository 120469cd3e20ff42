"""`loss_scaling` inside and outside of what optax offers: what works, what is wrong by order."""

import contextlib
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import mpjax
from tests.errors import refused
from tests.programs import bits

STATIC = mpjax.StaticLossScale(1024)
PARAMS = {"w": jnp.asarray([1.0, -2.0]), "b": jnp.asarray([0.5])}
GRADS = {"w": jnp.asarray([0.25, 1.0]), "b": jnp.asarray([2.0])}


def scaled(grads, bad=None):
  grads = jax.tree.map(lambda g: g * 1024, grads)
  return grads if bad is None else grads | {"b": jnp.asarray([bad])}


def quadratic(params):
  return 0.5 * optax.tree.norm(params, squared=True)


def after(tx, *gradients):
  """Returns the last updates, and the state, after these gradients."""
  state = tx.init(PARAMS)
  for grads in gradients:
    updates, state = tx.update(grads, state, PARAMS)
  return updates, state


@pytest.mark.case("B106", "B146", "B105")
def test_only_what_is_inside_is_protected():
  # Momentum before the wrapper would keep a NaN for ever: refused; a clip hides an inf.
  momentum, rate = optax.trace(0.9), optax.scale(-0.1)
  stream = scaled(GRADS), scaled(GRADS, np.nan), scaled(GRADS)
  _, outside = after(optax.chain(momentum, mpjax.loss_scaling(rate, STATIC)), *stream)
  _, inside = after(mpjax.loss_scaling(optax.chain(momentum, rate), STATIC), *stream)
  assert not mpjax.all_finite(outside), "for ever"
  got, fix = "beside the state optax.TraceState", "mpjax.loss_scaling(optax.chain(...))"
  with refused(TypeError, "(opt_state)", "around the entire optimizer", got, fix):
    mpjax.loss_scaling_metrics(outside)
  assert mpjax.loss_scaling_metrics(inside)["skipped"] == 1
  assert mpjax.all_finite(inside)
  for mask, bad, applied in ((optax.clip(1.0), np.inf, -1 / 1024), (optax.zero_nans(), np.nan, 0)):
    grads, sgd = scaled(GRADS, bad), optax.sgd(1.0)
    updates, state = after(optax.chain(mask, mpjax.loss_scaling(sgd, STATIC)), grads)
    assert mpjax.loss_scaling_metrics(state[1])["finite"], "hidden"
    assert updates["b"] == applied
    assert np.any(updates["w"]), "the rest of a bad gradient was applied"
    updates, state = after(mpjax.loss_scaling(optax.chain(mask, sgd), STATIC), grads)
    assert not mpjax.loss_scaling_metrics(state)["finite"]
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
  assert "It protects only what is inside" in " ".join(mpjax.loss_scaling.__doc__.split())


class Momentum(NamedTuple):
  momentum: jax.Array


@pytest.mark.parametrize("named", [False, True])
def test_the_state_of_a_users_own_transformation_in_a_chain_is_refused(named):
  def update(grads, state, params=None):
    momentum = state.momentum + grads
    return momentum, Momentum(momentum)

  own = optax.GradientTransformation(Momentum, update)
  scaling = mpjax.loss_scaling(optax.sgd(0.1), STATIC)
  chain = optax.named_chain(("own", own), ("scaling", scaling)) if named else None
  state = (chain or optax.chain(own, scaling)).init(jnp.zeros(2))
  got, fix = "in a chain beside the state tests.Momentum", "mpjax.loss_scaling(optax.chain(...))"
  with refused(TypeError, "(opt_state)", "around the entire optimizer", got, fix):
    mpjax.loss_scaling_metrics(state)


SGD = optax.sgd(0.1, momentum=0.9)
MASK = {"w": True, "b": False}
WRAPPERS = {
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
  "chain": lambda tx: optax.chain(tx, optax.identity()),
  "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda n: n < 3),
  "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda n: n < 3),
  "flatten": optax.flatten,
  "galore": lambda tx: optax.contrib.galore(0.1, rank=1, base_optimizer=tx),
  "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda lr: tx)(lr=0.5),
  "inject_stateful_hyperparams": lambda tx: optax.inject_stateful_hyperparams(lambda lr: tx)(lr=1),
  "lbfgs": lambda tx: optax.lbfgs(0.1, linesearch=tx),
  "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
  "masked": lambda tx: optax.chain(
    optax.masked(tx, MASK), optax.masked(optax.set_to_zero(), {"w": False, "b": True})
  ),
  "mechanize": optax.contrib.mechanize,
  "multi_transform": lambda tx: optax.multi_transform({True: tx, False: optax.set_to_zero()}, MASK),
  "named_chain": lambda tx: optax.named_chain(("first", tx), ("second", optax.identity())),
  "partition": lambda tx: optax.partition({True: tx, False: optax.set_to_zero()}, MASK),
  "sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.05)),
  "scale_by_galore": lambda tx: optax.contrib.scale_by_galore(rank=1, base_optimizer=tx),
  "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
  "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask=MASK),
  "split_real_and_imaginary": optax.contrib.split_real_and_imaginary,
  "with_extra_args_support": optax.with_extra_args_support,
}
HARMLESS = {
  *("chain", "flatten", "masked", "multi_transform", "named_chain", "partition"),
  *("selective_transform", "split_real_and_imaginary", "with_extra_args_support"),
}


def test_every_wrapper_of_optax_is_in_the_table():
  # A new one has to be tried outside of a loss scale, and inside.
  of_optax = set()
  for name, function in {**vars(optax), **vars(optax.contrib)}.items():
    if callable(function) and not name.startswith("_"):
      with contextlib.suppress(TypeError, ValueError):
        taken = inspect.signature(function).parameters.values()
        if any("GradientTransformation" in str(one.annotation) for one in taken):
          of_optax.add(name)
  take_something_else = {"monitor", "sophia"}
  assert of_optax - take_something_else <= set(WRAPPERS)


def trained(tx, batches, lookahead):
  """Returns parameters and the state, but for the loss scale, after these batches."""
  params = optax.LookaheadParams.init_synced(PARAMS) if lookahead else PARAMS
  state = tx.init(params)
  for batch in batches:
    loss = lambda p, batch=batch: quadratic(jax.tree.map(lambda x: x * batch, p))  # noqa: E731
    _, grads = mpjax.value_and_grad(loss, state)(params.fast if lookahead else params)
    if lookahead:
      grads = optax.LookaheadParams(grads, jax.tree.map(jnp.zeros_like, grads))
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  is_scaling = lambda x: isinstance(x, mpjax.states.LossScalingState)  # noqa: E731
  plain = jax.tree.map(lambda x: x.inner_state if is_scaling(x) else x, state, is_leaf=is_scaling)
  return params, plain


@pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams is deprecated")
@pytest.mark.case("B146", "B107", "B108")
@pytest.mark.parametrize("name", WRAPPERS)
def test_n2_outside_of_a_scale_a_wrapper_is_refused_or_exact_and_inside_it_is_exact(name):
  # A skipped step equals a deleted one, bit for bit, or nothing is read at all.
  wrap, lookahead = WRAPPERS[name], name == "lookahead"
  good, with_bad = (1.0, 0.5, 1.0), (1.0, np.inf, np.inf, 0.5, 1.0)
  inside, outside = mpjax.loss_scaling(wrap(SGD), STATIC), wrap(mpjax.loss_scaling(SGD, STATIC))
  assert bits(trained(inside, with_bad, lookahead)) == bits(trained(inside, good, lookahead))
  if name in HARMLESS:
    assert bits(trained(outside, with_bad, lookahead)) == bits(trained(outside, good, lookahead))
    return
  fix = "mpjax.loss_scaling(optax.chain(...)), once"
  with refused(TypeError, "(opt_state)", "around the entire optimizer", "state optax.", fix):
    trained(outside, good, lookahead)
  # Without a scale there is nothing to see, and nothing to count.
  trained(wrap(mpjax.loss_scaling(SGD, mpjax.NoLossScale())), good, lookahead)


@pytest.mark.parametrize(
  "chain", [optax.chain, lambda a, b: optax.named_chain(("first", a), ("second", b))]
)
def test_n8_two_scales_in_one_chain_are_refused(chain):
  # Updates were 64 times too small.
  clip, sgd = (mpjax.loss_scaling(*args) for args in ((optax.clip(10.0), STATIC), (SGD, STATIC)))
  state = chain(clip, sgd).init(PARAMS)
  got, fix = "a chain of 2, each of which divides the gradients again", "optax.chain(...)), once"
  with refused(TypeError, "mpjax.value_and_grad(opt_state)", "around the entire", got, fix):
    mpjax.value_and_grad(quadratic, state, name="a")
  masks = (optax.masked(clip, MASK), optax.masked(sgd, {"w": False, "b": True}))
  with pytest.raises(TypeError, match="one with 2, named"):  # Each sees parameters of its own.
    mpjax.value_and_grad(quadratic, optax.chain(*masks).init(PARAMS))
  # A tuple that no chain has created is of a step: a state beside a pair of its own.
  beside = (masks[0].init(PARAMS), (jnp.zeros(2), jnp.ones(2)))
  assert int(mpjax.loss_scaling_metrics(beside)["total"]) == 0


@pytest.mark.case("B113")
@pytest.mark.parametrize("where", ["mask inside", "mask outside", "partition inside"])
def test_frozen_leaves(where):
  trained = {"w": True, "b": False}
  sgd = optax.sgd(1.0)
  freeze = optax.partition({"t": sgd, "f": optax.set_to_zero()}, {"w": "t", "b": "f"})
  tx = {
    "mask inside": mpjax.loss_scaling(optax.masked(sgd, trained), STATIC),
    "mask outside": optax.masked(mpjax.loss_scaling(sgd, STATIC), trained),
    "partition inside": mpjax.loss_scaling(freeze, STATIC),
  }[where]
  updates, state = tx.update(scaled(GRADS), tx.init(PARAMS), PARAMS)
  # masked hands the gradient itself on; partition with set_to_zero is what freezes.
  assert updates["b"] == {"mask inside": 2, "mask outside": 2048, "partition inside": 0}[where]
  bad, state = tx.update(scaled(GRADS, np.nan), state, PARAMS)
  finite = mpjax.loss_scaling_metrics(state)["finite"]
  if where == "mask outside":
    assert finite, "the frozen leaf is outside of the check"
    assert np.isnan(bad["b"])
  else:
    assert not finite
    assert bad["b"] == 0


@pytest.mark.case("A68")
def test_growing_the_tree_in_the_middle_of_a_run():
  tx = mpjax.loss_scaling(optax.adam(0.1))
  _, state = tx.update(scaled(GRADS, np.inf), tx.init(PARAMS), PARAMS)
  grown = PARAMS | {"new": jnp.ones(2)}
  with pytest.raises(mpjax.errors.MpjaxValueError, match=r"nothing at \['new'\]"):
    tx.update(GRADS, state, grown)
  fresh = tx.init(grown)
  assert mpjax.loss_scaling_metrics(fresh)["loss_scale"] == 2.0**15, "nothing is carried silently"
  scale = float(mpjax.loss_scaling_metrics(state)["loss_scale"])
  carried = mpjax.set_loss_scale(fresh, scale)
  assert mpjax.loss_scaling_metrics(carried)["loss_scale"] == 2.0**14
  start = mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale(init_scale=2.0**14)).init(
    grown
  )
  assert jax.tree.structure(carried) == jax.tree.structure(start)
  assert bits(carried) == bits(start), "the rest equals a run that starts there"
  assert "set it in the state that `init` makes" in " ".join(mpjax.set_loss_scale.__doc__.split())
