"""A skipped step is a deleted step, whatever optax offers, and the rest is plain optax.

Each optimizer and wrapper of `optax` and `optax.contrib` runs a few steps with bad gradients in
between, and once without these: parameters and its whole state have the same bits. The run
without is compared with plain optax, which divides by no scale and selects nothing. All are in one
compiled program.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import mpjax
from tests.errors import refused
from tests.programs import bits

SCALE = 1024.0
PARAMS = {
  "w": jnp.asarray([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0], [2.0, 0.5, 1.0]]),
  "b": jnp.asarray([0.5, -0.25, 2.0]),
}
LABELS = {"w": "a", "b": "z"}
RNG = np.random.default_rng(0)
GRADS = [
  jax.tree.map(lambda p: jnp.asarray(RNG.normal(size=p.shape), jnp.float32), PARAMS)
  for _ in range(4)
]
BAD = [GRADS[0] | {"w": GRADS[0]["w"].at[1, 1].set(bad)} for bad in (jnp.inf, jnp.nan)]

ADAM = optax.adam(0.1)
KEY = jax.random.key(0)
EVERY_OTHER = lambda step, **_: step % 2 == 0  # noqa: E731
OWN = {
  "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
  "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
  "add_noise": lambda: optax.add_noise(0.1, 0.5, KEY),
  "apply_every": lambda: optax.apply_every(2),
  "apply_if_finite": lambda: optax.apply_if_finite(ADAM, 2),
  "chain": lambda: optax.chain(optax.clip(1.0), ADAM),
  "clip": lambda: optax.clip(0.5),
  "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
  "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
  "conditionally_mask": lambda: optax.conditionally_mask(ADAM, EVERY_OTHER),
  "conditionally_transform": lambda: optax.conditionally_transform(ADAM, EVERY_OTHER),
  "differentially_private_aggregate": lambda: optax.chain(
    optax.contrib.differentially_private_aggregate(1.0, 0.1, key=KEY), optax.sgd(0.1)
  ),
  "dog": lambda: optax.contrib.dog(1.0),
  "dowg": lambda: optax.contrib.dowg(1.0),
  "ema": lambda: optax.ema(0.9),
  "flatten": lambda: optax.flatten(ADAM),
  "freeze": lambda: optax.freeze({"w": False, "b": True}),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
    optax.linear_schedule(0.1, 0.01, 4)
  ),
  "keep_params_nonnegative": lambda: optax.chain(ADAM, optax.keep_params_nonnegative()),
  "lbfgs": lambda: optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(4)),
  "lookahead": lambda: optax.lookahead(ADAM, 2, 0.5),
  "masked": lambda: optax.masked(ADAM, {"w": True, "b": False}),
  "mechanize": lambda: optax.contrib.mechanize(ADAM),
  "multi_transform": lambda: optax.multi_transform({"a": ADAM, "z": optax.sgd(0.1)}, LABELS),
  "MultiSteps": lambda: optax.MultiSteps(ADAM, 2).gradient_transformation(),
  "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("i", ADAM)),
  "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=KEY),
  "partition": lambda: optax.partition({"a": ADAM, "z": optax.sgd(0.1)}, LABELS),
  "reduce_on_plateau": lambda: optax.chain(ADAM, optax.contrib.reduce_on_plateau(patience=1)),
  "sam": lambda: optax.contrib.sam(ADAM, optax.sgd(0.05)),
  "scale": lambda: optax.scale(-0.1),
  "scale_by_backtracking_linesearch": lambda: optax.chain(
    optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5, store_grad=True)
  ),
  "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(0.1, 0.01, 4)),
  "schedule_free": lambda: optax.contrib.schedule_free(ADAM, 0.1),
  "selective_transform": lambda: optax.selective_transform(
    ADAM, freeze_mask={"w": False, "b": True}
  ),
  "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
  "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(ADAM),
  "state_dtype": lambda: mpjax.state_dtype(ADAM, mu="bfloat16"),
  "stateless": lambda: optax.stateless(lambda u, p: jax.tree.map(lambda u: -0.1 * u, u)),
  "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: -0.1 * u),
  "trace": lambda: optax.trace(0.9),
  "with_extra_args_support": lambda: optax.with_extra_args_support(ADAM),
}
"""Those that take other arguments than a learning rate, or none, and what they are tried with."""

LEFT_OUT = {
  "dpsgd": "it is made with a seed, which is deprecated",
  "inject_stateful_hyperparams": "the old form of inject_hyperparams",
  "measure_with_ema": "a measure of optax.monitor, which measures nothing by itself",
  "monitor": "refused: see below",
  "optimistic_adam": "the old form of optimistic_adam_v2",
  "scale_by_distance_over_gradients": "it promotes ranks, which the tests forbid",
  "scale_by_zoom_linesearch": "tried in lbfgs",
}


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


@pytest.mark.case("B117", "I1", "B110", "I20")
def test_a_skipped_step_is_a_deleted_step_and_the_rest_is_plain_optax():
  inner = {"the rest": together()} | {name: ALL[name]() for name in ALONE}
  scaled = {n: mpjax.loss_scaling(tx, mpjax.StaticLossScale(SCALE)) for n, tx in inner.items()}
  streams = [[*BAD, *GRADS[:2], BAD[1], *GRADS[2:]], GRADS]
  times_scale = [[jax.tree.map(lambda g: g * SCALE, g) for g in stream] for stream in streams]
  with_bad, without = runs(scaled, *times_scale)
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
  where, one = "mpjax.loss_scaling(inner).update", mpjax.StaticLossScale(1)
  monitor = optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1))
  got, fix = "an extra leaf at [0].measurements['norm']", "optax.snapshot measures in init"
  tx = mpjax.loss_scaling(monitor, one)
  with refused(ValueError, f"{where}: the state of inner", "like the old one", got, fix):
    tx.update(params, tx.init(params), params)
  got, fix = "shape [4, 2] for shape [2]", "for optax.contrib.dpsgd, which does, leave params out"
  tx = mpjax.loss_scaling(ALL[PER_EXAMPLE](), one)
  with refused(ValueError, f"{where}(updates)", "gradients with the leaves of params", got, fix):
    tx.update(jnp.ones((4, 2)), tx.init(params), params)
