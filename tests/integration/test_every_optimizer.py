"""A skipped step is a deleted step, whatever optax offers, and the rest is plain optax.

Each optimizer and wrapper of `optax` and `optax.contrib` runs a few steps with bad gradients in
between, and once without these: parameters and its whole state have the same bits. The run
without is compared with plain optax, which divides by no scale and selects nothing. All are in one
compiled program.
"""

import contextlib
import functools
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

pytestmark = pytest.mark.standard_promotion("dtypes")

SCALE = 1024.0
STATIC = mpjax.StaticLossScale(SCALE)
PARAMS = {
  "w": jnp.asarray([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0], [2.0, 0.5, 1.0]]),
  "b": jnp.asarray([0.5, -0.25, 2.0]),
}
RNG = np.random.default_rng(0)
GRADS = [
  jax.tree.map(lambda p: jnp.asarray(RNG.normal(size=p.shape), jnp.float32), PARAMS)
  for _ in range(4)
]
BAD = [GRADS[0] | {"w": GRADS[0]["w"].at[1, 1].set(bad)} for bad in (jnp.inf, jnp.nan)]

ADAM = optax.adam(0.1)
KEY = jax.random.key(0)
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
"""What takes an optimizer, and how it is tried: inside of a loss scale, and outside."""

LEFT_OUT = {
  "dpsgd": "it is made with a seed, which is deprecated",
  "inject_stateful_hyperparams": "the old form of inject_hyperparams",
  "measure_with_ema": "a measure of optax.monitor, which measures nothing by itself",
  "monitor": "refused: see below",
  "optimistic_adam": "the old form of optimistic_adam_v2",
  "scale_by_distance_over_gradients": "it promotes ranks, which the tests forbid",
  "scale_by_galore": "tried in galore",
  "scale_by_zoom_linesearch": "tried in lbfgs",
}

OWN = {
  **{
    name: functools.partial(wrap, ADAM) for name, wrap in WRAPPERS.items() if name not in LEFT_OUT
  },
  "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
  "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
  "add_noise": lambda: optax.add_noise(0.1, 0.5, KEY),
  "apply_every": lambda: optax.apply_every(2),
  "clip": lambda: optax.clip(0.5),
  "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
  "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
  "differentially_private_aggregate": lambda: optax.chain(
    optax.contrib.differentially_private_aggregate(1.0, 0.1, key=KEY), optax.sgd(0.1)
  ),
  "dog": lambda: optax.contrib.dog(1.0),
  "dowg": lambda: optax.contrib.dowg(1.0),
  "ema": lambda: optax.ema(0.9),
  "freeze": lambda: optax.freeze({"w": False, "b": True}),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
    optax.linear_schedule(0.1, 0.01, 4)
  ),
  "keep_params_nonnegative": lambda: optax.chain(ADAM, optax.keep_params_nonnegative()),
  "lbfgs": lambda: optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(4)),
  "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=KEY),
  "reduce_on_plateau": lambda: optax.chain(ADAM, optax.contrib.reduce_on_plateau(patience=1)),
  "scale": lambda: optax.scale(-0.1),
  "scale_by_backtracking_linesearch": lambda: optax.chain(
    optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5, store_grad=True)
  ),
  "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(0.1, 0.01, 4)),
  "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
  "state_dtype": lambda: mpjax.state_dtype(ADAM, mu="bfloat16"),
  "stateless": lambda: optax.stateless(lambda u, p: jax.tree.map(lambda u: -0.1 * u, u)),
  "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: -0.1 * u),
  "trace": lambda: optax.trace(0.9),
}
"""Those that take other arguments than a learning rate, or none, and what they are tried with."""


def makers():
  """Returns how each is made of what optax says is a transformation: a later optax adds to them."""
  found = dict(OWN)
  for module in (optax, optax.contrib):
    for name, make in vars(module).items():
      part = name.removeprefix("scale_by_")
      inside = part != name and hasattr(module, part)  # It is tried in that optimizer.
      if name in OWN or name in LEFT_OUT or inside or not name[0].islower() or not callable(make):
        continue
      signature = inspect.signature(make)
      if "GradientTransformation" in str(signature.return_annotation):
        has_rate = "learning_rate" in signature.parameters
        found[name] = functools.partial(make, **({"learning_rate": 0.1} if has_rate else {}))
  return found


ALL = makers()


def loss(params):
  return 0.5 * optax.tree.norm(params, squared=True)


def extra(name, params, grads):
  """What an optimizer needs beside the gradients."""
  if any(part in name for part in ("lbfgs", "linesearch")):
    return {"value": loss(params), "grad": grads, "value_fn": loss}
  if any(part in name for part in ("polyak", "momo", "plateau")):
    return {"value": loss(params)}
  if "sophia" in name:
    return {"obj_fn": loss}
  return {}


PER_EXAMPLE = "differentially_private_aggregate"
ALONE = [name for name in ALL if extra(name, PARAMS, PARAMS) or name in ("lookahead", PER_EXAMPLE)]
REST = [name for name in ALL if name not in ALONE]
# Half of the program is enough, and is compiled in half the time, where nothing goes by the leaf.
START = {name: PARAMS if name in OWN else {"w": PARAMS["w"]} for name in ALL}
START["lookahead"] = optax.LookaheadParams.init_synced(PARAMS)


def together():
  """One transformation of many copies of the parameters, with an optimizer for each."""
  inner = {name: ALL[name]() for name in REST}

  def update(updates, state, params):
    found = {n: tx.update(updates[n], state[n], params[n]) for n, tx in inner.items()}
    return tuple({name: pair[i] for name, pair in found.items()} for i in (0, 1))

  return optax.GradientTransformation(
    lambda params: {name: tx.init(params[name]) for name, tx in inner.items()}, update
  )


def step(name, tx, params, state, grads):
  fast = params.fast if name == "lookahead" else params
  of_leaves = lambda params: {leaf: grads[leaf] for leaf in params}  # noqa: E731
  grads = {n: of_leaves(START[n]) for n in REST} if name == "the rest" else of_leaves(fast)
  if name == PER_EXAMPLE:
    # It wants a gradient of each example, and no parameters to compare their shapes with.
    updates, state = tx.update(jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads), state)
  else:
    updates, state = tx.update(grads, state, params, **extra(name, fast, grads))
  return optax.apply_updates(params, updates), state


def runs(txs, *streams):
  """Returns parameters and state of each transformation after each stream of gradients."""
  begins = {"the rest": {name: START[name] for name in REST}} | {n: START[n] for n in ALONE}
  start = {name: (begin, txs[name].init(begin)) for name, begin in begins.items()}

  @jax.jit
  def steps(carry, grads):
    return {name: step(name, tx, *carry[name], grads) for name, tx in txs.items()}

  return [functools.reduce(steps, stream, start) for stream in streams]


def by_optimizer(found):
  """Returns parameters and state of each optimizer; `found` has "the rest" for most of them."""
  params, state = found["the rest"]
  return {name: (params[name], state[name]) for name in REST} | {n: found[n] for n in ALONE}


@pytest.mark.slow
def test_a_skipped_step_is_a_deleted_step_and_the_rest_is_plain_optax():
  inner = {"the rest": together()} | {name: ALL[name]() for name in ALONE}
  scaled = {n: mpjax.loss_scaling(tx, STATIC) for n, tx in inner.items()}
  streams = [[*BAD, *GRADS[:2], BAD[1], *GRADS[2:]], GRADS]
  with_bad, without = runs(scaled, *streams)
  for _, state in with_bad.values():
    metrics = mpjax.loss_scaling_metrics(state)
    assert (metrics["skipped"], metrics["total"]) == (3, 7)
  plain = {name: optax.with_extra_args_support(tx) for name, tx in inner.items()}
  (expected,) = runs(plain, GRADS)
  with_bad, without = (
    by_optimizer({name: (params, state.inner_state) for name, (params, state) in found.items()})
    for found in (with_bad, without)
  )
  still = {"set_to_zero", "conditionally_transform"}
  violations = []
  for name, (wanted, _) in by_optimizer(expected).items():
    if bits(with_bad[name]) != bits(without[name]):
      violations.append(f"{name}: a skipped step leaves a trace")
    found = without[name][0]
    if name not in still and bits(found) == bits(START[name]):
      violations.append(f"{name}: it does nothing here")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
      if not np.allclose(a, b, rtol=1e-6, atol=1e-6):
        violations.append(f"{name}: not what optax does, {a} for {b}")
  assert violations == []
  assert len(without) == len(ALL) > 90


def test_what_is_refused_says_what_to_use_instead():
  params = jnp.ones(2)
  monitor = optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1))
  got, fix = "an extra leaf at [0].measurements['norm']", "optax.snapshot measures in init"
  for wrap in (mpjax.loss_scaling, lambda inner: mpjax.accumulate_gradients(inner, 2)):
    tx = wrap(monitor)
    with refused(ValueError, "update: the state of inner", "like the old one", got, fix):
      tx.update(params, tx.init(params), params)
  got, fix = "shape [4, 2] for shape [2]", "for optax.contrib.dpsgd, which does, leave params out"
  tx, where = mpjax.loss_scaling(ALL[PER_EXAMPLE]()), "mpjax.loss_scaling(inner).update(updates)"
  with refused(ValueError, where, "gradients with the leaves of params", got, fix):
    tx.update(jnp.ones((4, 2)), tx.init(params), params)


# Outside of a wrapper, and beside one.

SMALL = {"w": jnp.asarray([1.0, -2.0]), "b": jnp.asarray([0.5])}
SMALL_GRADS = {"w": jnp.asarray([0.25, 1.0]), "b": jnp.asarray([2.0])}


class Momentum(NamedTuple):
  momentum: jax.Array


def test_the_state_of_a_users_own_transformation_in_a_chain_is_refused():
  def update(grads, state, params=None):
    momentum = state.momentum + grads
    return momentum, Momentum(momentum)

  own = optax.GradientTransformation(Momentum, update)
  scaling = mpjax.loss_scaling(optax.sgd(0.1), STATIC)
  state = optax.named_chain(("own", own), ("scaling", scaling)).init(jnp.zeros(2))
  got, fix = "in a chain beside the state tests.Momentum", "mpjax.loss_scaling(optax.chain(...))"
  with refused(TypeError, "(opt_state)", "around the entire optimizer", got, fix):
    mpjax.loss_scaling_metrics(state)


SGD = optax.sgd(0.1, momentum=0.9)
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
  params = optax.LookaheadParams.init_synced(SMALL) if lookahead else SMALL
  state = tx.init(params)
  for batch in batches:
    of_batch = lambda p, batch=batch: loss(jax.tree.map(lambda x: x * batch, p))  # noqa: E731
    _, grads = jax.value_and_grad(mpjax.scaled(of_batch, state))(
      params.fast if lookahead else params
    )
    if lookahead:
      grads = optax.LookaheadParams(grads, jax.tree.map(jnp.zeros_like, grads))
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  is_scaling = lambda x: isinstance(x, mpjax.states.LossScalingState)  # noqa: E731
  plain = jax.tree.map(lambda x: x.inner_state if is_scaling(x) else x, state, is_leaf=is_scaling)
  return params, plain


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams is deprecated")
@pytest.mark.parametrize("name", WRAPPERS)
def test_outside_of_a_scale_a_wrapper_is_refused_or_exact(name):
  # A skipped step equals a deleted one, bit for bit, or nothing is read at all.
  wrap, lookahead = WRAPPERS[name], name == "lookahead"
  good, with_bad = (1.0, 0.5, 1.0), (1.0, np.inf, np.inf, 0.5, 1.0)
  outside = wrap(mpjax.loss_scaling(SGD, STATIC))
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
def test_two_scales_in_one_chain_are_refused(chain):
  # The second would not see that the first has skipped a step.
  clip, sgd = (mpjax.loss_scaling(*args) for args in ((optax.clip(10.0), STATIC), (SGD, STATIC)))
  state = chain(clip, sgd).init(SMALL)
  got, fix = "a chain of 2, each of which skips steps by itself", "optax.chain(...)), once"
  with refused(TypeError, "mpjax.scaled(opt_state)", "around the entire", got, fix):
    mpjax.scaled(loss, state, name="a")
  masks = (optax.masked(clip, MASK), optax.masked(sgd, {"w": False, "b": True}))
  with pytest.raises(TypeError, match="one with 2, named"):  # Each sees parameters of its own.
    mpjax.scaled(loss, optax.chain(*masks).init(SMALL))
  # A tuple that no chain has created is of a step: a state beside a pair of its own.
  beside = (masks[0].init(SMALL), (jnp.zeros(2), jnp.ones(2)))
  assert int(mpjax.loss_scaling_metrics(beside)["total"]) == 0


def test_growing_the_tree_in_the_middle_of_a_run():
  tx = mpjax.loss_scaling(optax.adam(0.1))
  _, state = tx.update(SMALL_GRADS | {"b": jnp.asarray([np.inf])}, tx.init(SMALL), SMALL)
  grown = SMALL | {"new": jnp.ones(2)}
  with pytest.raises(mpjax.errors.MpjaxValueError, match=r"nothing at \['new'\]"):
    tx.update(SMALL_GRADS, state, grown)
  fresh = tx.init(grown)
  assert mpjax.loss_scaling_metrics(fresh)["loss_scale"] == 2.0**15, "nothing is carried silently"
  scale = float(mpjax.loss_scaling_metrics(state)["loss_scale"])
  carried = mpjax.states.set_loss_scale(fresh, scale)
  assert mpjax.loss_scaling_metrics(carried)["loss_scale"] == 2.0**14
