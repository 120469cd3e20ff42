"""A skipped step is a deleted step, whatever optax offers, and the rest is plain optax.

Each optimizer and wrapper of `optax` and `optax.contrib` runs a few steps with two bad gradients in
between, and once without these two: parameters, updates and its whole state have the same bits. The
run without is compared with plain optax, which divides by no scale and selects nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import mpjax
from tests.errors import check_error
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
BAD = [GRADS[0] | {"b": jnp.asarray([0.0, bad, 1.0])} for bad in (jnp.inf, jnp.nan)]


def contrib(name, *args, **kwargs):
  return lambda: getattr(optax.contrib, name)(*args, **kwargs)


def plain(name, *args, **kwargs):
  return lambda: getattr(optax, name)(*args, **kwargs)


def around(inner):
  """A wrapper of optax, around an optimizer with a state."""
  return lambda: inner(optax.adam(0.1))


RATE = (
  *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan"),
  *("amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd"),
  *("optimistic_adam_v2", "optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sgd"),
  *("sign_sgd", "signum", "sm3", "yogi"),
)
RATE_CONTRIB = (
  *("acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "madgrad", "muon", "prodigy"),
  *("galore", "schedule_free_adamw", "schedule_free_sgd", "simplified_ademamix"),
)
SCALES = (
  *("scale_by_param_block_norm", "scale_by_param_block_rms", "scale_by_rss", "scale_by_sign"),
  *("scale_by_stddev", "scale_by_trust_ratio", "centralize", "identity", "zero_nans"),
  *("normalize_by_update_norm", "set_to_zero"),
)
INSIDE = {
  *(f"scale_by_{name}" for name in ("adadelta", "adam", "adamax", "adan", "amsgrad", "belief")),
  *(f"scale_by_{name}" for name in ("distance_over_gradients", "factored_rms", "lbfgs", "lion")),
  *(f"scale_by_{name}" for name in ("novograd", "optimistic_gradient", "polyak", "radam", "rms")),
  *(f"scale_by_{name}" for name in ("rprop", "sm3", "yogi", "zoom_linesearch", "acprop")),
  *(f"scale_by_{name}" for name in ("ademamix", "adopt", "cocob", "galore", "madgrad", "muon")),
  *("scale_by_simplified_ademamix", "differentially_private_aggregate"),
}
"""What an optimizer of the list is made of, and is tried in that."""

OPTAX = (
  {name: plain(name, 0.1) for name in RATE}
  | {name: plain(name) for name in SCALES}
  | {
    "adaptive_grad_clip": plain("adaptive_grad_clip", 0.1),
    "add_decayed_weights": plain("add_decayed_weights", 0.1),
    "add_noise": plain("add_noise", 0.1, 0.5, jax.random.key(0)),
    "apply_every": plain("apply_every", 2),
    "apply_if_finite": around(lambda inner: optax.apply_if_finite(inner, 2)),
    "chain": around(lambda inner: optax.chain(optax.clip(1.0), inner)),
    "clip": plain("clip", 0.5),
    "clip_by_block_rms": plain("clip_by_block_rms", 0.5),
    "clip_by_global_norm": plain("clip_by_global_norm", 0.5),
    "conditionally_mask": around(
      lambda inner: optax.conditionally_mask(inner, lambda step, **_: step % 2 == 0)
    ),
    "conditionally_transform": around(
      lambda inner: optax.conditionally_transform(inner, lambda step, **_: step % 2 == 0)
    ),
    "ema": plain("ema", 0.9),
    "flatten": around(optax.flatten),
    "freeze": plain("freeze", {"w": False, "b": True}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
      optax.linear_schedule(0.1, 0.01, 4)
    ),
    "keep_params_nonnegative": around(
      lambda inner: optax.chain(inner, optax.keep_params_nonnegative())
    ),
    "lbfgs": lambda: optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(4)),
    "lookahead": around(lambda inner: optax.lookahead(inner, 2, 0.5)),
    "noisy_sgd": plain("noisy_sgd", 0.1, key=jax.random.key(0)),
    "masked": around(lambda inner: optax.masked(inner, {"w": True, "b": False})),
    "multi_transform": around(
      lambda inner: optax.multi_transform({"a": inner, "z": optax.sgd(0.1)}, LABELS)
    ),
    "MultiSteps": around(lambda inner: optax.MultiSteps(inner, 2).gradient_transformation()),
    "named_chain": around(lambda inner: optax.named_chain(("clip", optax.clip(1.0)), ("i", inner))),
    "partition": around(lambda inner: optax.partition({"a": inner, "z": optax.sgd(0.1)}, LABELS)),
    "polyak_sgd": plain("polyak_sgd"),
    "scale": plain("scale", -0.1),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
      optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "scale_by_learning_rate": plain("scale_by_learning_rate", 0.1),
    "scale_by_schedule": plain("scale_by_schedule", optax.linear_schedule(0.1, 0.01, 4)),
    "selective_transform": lambda: optax.selective_transform(
      optax.adam(0.1), freeze_mask={"w": False, "b": True}
    ),
    "snapshot": plain("snapshot", "norm", optax.tree.norm),
    "stateless": plain("stateless", lambda u, p: jax.tree.map(lambda u: -0.1 * u, u)),
    "stateless_with_tree_map": plain("stateless_with_tree_map", lambda u, p: -0.1 * u),
    "trace": plain("trace", 0.9),
    "with_extra_args_support": around(optax.with_extra_args_support),
  }
)
CONTRIB = {name: contrib(name, 0.1) for name in RATE_CONTRIB} | {
  "dog": contrib("dog", 1.0),
  "dowg": contrib("dowg", 1.0),
  "dpsgd": lambda: optax.chain(  # as it is made, but for a seed that is deprecated
    optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0)),
    optax.sgd(0.1),
  ),
  "normalize": contrib("normalize"),
  "mechanize": around(optax.contrib.mechanize),
  "momo": contrib("momo"),
  "momo_adam": contrib("momo_adam"),
  "reduce_on_plateau": around(
    lambda inner: optax.chain(inner, optax.contrib.reduce_on_plateau(patience=1))
  ),
  "sam": around(lambda inner: optax.contrib.sam(inner, optax.sgd(0.05))),
  "schedule_free": around(lambda inner: optax.contrib.schedule_free(inner, 0.1)),
  "sophia": contrib("sophia", 0.1),
  "split_real_and_imaginary": around(optax.contrib.split_real_and_imaginary),
}

ALL = {f"optax.{name}": make for name, make in OPTAX.items()}
ALL |= {f"optax.contrib.{name}": make for name, make in CONTRIB.items()}

REFUSED = {
  "optax.monitor": "its state grows at the first update; the error names optax.snapshot",
}

NO_TRANSFORMATIONS = {
  "optax": {
    *("apply_updates", "bias_correction", "global_norm", "incremental_update", "init_empty_state"),
    "join_schedules",
    *("matrix_inverse_pth_root", "microbatch", "multi_normal", "nnls", "periodic_update"),
    *("per_example_global_norm_clip", "per_example_layer_norm_clip", "power_iteration"),
    *("safe_increment", "safe_int32_increment", "safe_norm", "safe_root_mean_squares"),
    *("scale_gradient", "skip_large_updates", "skip_not_finite", "smooth_labels"),
    *("tree_map_params", "update_infinity_moment", "update_moment"),
    *("update_moment_per_elem_norm", "value_and_grad_from_state"),
    # A measure of optax.monitor, which measures nothing by itself.
    "measure_with_ema",
    # Old forms of optimistic_adam_v2 and of inject_hyperparams.
    *("optimistic_adam", "inject_stateful_hyperparams"),
  },
  "optax.contrib": {"schedule_free_eval_params", "hutchinson_estimator_diag_hessian"},
}
"""Functions that no optimizer is made of (Hutchinson's estimate wants the loss, for sophia)."""

NO_OPTIMIZER = (
  "_schedule",
  "_entropy",
  "_loss",
  "_divergence",
  "_similarity",
  "_distance",
  "_error",
)
LOSSES = {"ctc_loss_with_forward_probs", "log_cosh", "ntxent", "safe_softmax_cross_entropy"}
LOSSES |= {"sigmoid_binary_cross_entropy", "softmax_cross_entropy_with_integer_labels"}
LOSSES |= {"cosine_decay_schedule", "exponential_decay"}


@pytest.mark.parametrize("module", [optax, optax.contrib], ids=lambda m: m.__name__)
def test_the_list_is_all_that_optax_has(module):
  """Also of a later optax: what it adds has to be listed here, as an optimizer or as none."""
  name = module.__name__
  known = {one.removeprefix(f"{name}.") for one in (*ALL, *REFUSED)} | NO_TRANSFORMATIONS[name]
  known |= INSIDE
  found = {
    one
    for one, value in vars(module).items()
    if callable(value) and one[0].islower() and not one.endswith(NO_OPTIMIZER) and one not in LOSSES
  }
  assert found - known == set(), "new in optax: skips have to be tried with it"


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


def run(name, update, state, stream, factor):
  params = PARAMS
  if "lookahead" in name:
    params = optax.LookaheadParams.init_synced(params)
  for grads in stream:
    grads = jax.tree.map(lambda g: g * factor, grads)
    params, state = update(params, state, grads)
  return params, state


def stepper(name, tx):
  per_example = name.endswith("dpsgd")

  def step(params, state, grads):
    if per_example:  # These want a gradient of each example, and no parameters to compare with.
      many = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
      updates, state = tx.update(many, state)
    else:
      fast = params.fast if "lookahead" in name else params
      updates, state = tx.update(grads, state, params, **extra(name, fast, grads))
    return optax.apply_updates(params, updates), state

  # Each is run a few times only.
  return jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.case("B117", "I1")
@pytest.mark.parametrize("name", ALL)
def test_a_skipped_step_is_a_deleted_step_and_the_rest_is_plain_optax(name):
  inner = ALL[name]()
  tx = mpjax.loss_scaling(inner, mpjax.StaticLossScale(SCALE))
  begin = optax.LookaheadParams.init_synced(PARAMS) if "lookahead" in name else PARAMS
  start, update = tx.init(begin), stepper(name, tx)
  first, second, *rest = GRADS
  with_bad = run(name, update, start, [BAD[0], first, second, BAD[1], *rest], SCALE)
  without = run(name, update, start, GRADS, SCALE)
  metrics = mpjax.loss_scaling_metrics(with_bad[1])
  assert (metrics["skipped"], metrics["total"]) == (2, 6)
  assert data((with_bad[0], with_bad[1].inner_state)) == data((without[0], without[1].inner_state))
  moved = {"optax.set_to_zero", "optax.conditionally_transform"}
  assert name in moved or data(without[0]) != data(begin), "it does nothing here"
  assert mpjax.all_finite(without[0])
  control = optax.with_extra_args_support(inner)
  expected, _ = run(name, stepper(name, control), inner.init(begin), GRADS, 1.0)
  for a, b in zip(jax.tree.leaves(without[0]), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=TOLERANCE.get(name, 1e-6), atol=1e-6)


TOLERANCE = {}


def data(tree):
  def plain_data(x):
    typed = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if typed else x

  return bits(jax.tree.map(plain_data, tree))


def test_what_is_refused_says_what_to_use_instead():
  params = jnp.ones(2)
  tx = mpjax.loss_scaling(
    optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1)), mpjax.StaticLossScale(1)
  )
  with pytest.raises(ValueError) as error:
    tx.update(params, tx.init(params), params)
  check_error(
    error,
    where="mpjax.loss_scaling(inner).update: the state of inner",
    expected="like the old one",
    got="an extra leaf at [0].measurements['norm']",
    fix="optax.snapshot measures in init",
  )
  tx = mpjax.loss_scaling(CONTRIB["dpsgd"](), mpjax.StaticLossScale(1))
  with pytest.raises(ValueError) as error:
    tx.update(jnp.ones((4, 2)), tx.init(params), params)
  check_error(
    error,
    where="mpjax.loss_scaling(inner).update(updates)",
    expected="gradients with the leaves of params",
    got="shape [4, 2] for shape [2]",
    fix="for optax.contrib.dpsgd, which does, leave params out",
  )
