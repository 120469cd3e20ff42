"""Right loops of many kinds pass, and each way to scale wrongly is named."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax
from tests.errors import refused

pytestmark = pytest.mark.standard_promotion("dtypes")

WHERE = "mpjax.check_loss_scaling(step)"
F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
SGD, ADAM = optax.sgd(1e-3), optax.adam(1e-3)
MOMENTUM = optax.sgd(1e-2, momentum=0.9, nesterov=True)
CLIPPED_ADAMW = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))


def network(params, x, dtype):
  params = jax.tree.map(lambda p: p.astype(dtype), params)
  hidden = jnp.tanh(x.astype(dtype) @ params["w"] + params["b"])
  return (hidden @ params["v"])[:, 0] + params["scalar"]


def data(rows=6, small=1.0):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), F32)  # noqa: E731
  params = {"w": draw(4, 8) * 0.5, "b": jnp.zeros((1, 8)), "v": draw(8, 1) * 0.5, "scalar": draw()}
  return params, (draw(rows, 4) * small, draw(rows))


PARAMS, BATCH = data()
FROZEN = jax.tree.map(lambda p: 2 * p + 1, PARAMS)


def loss_fn(params, batch, dtype=F32):
  x, y = batch
  return jnp.mean((network(params, x, dtype).astype(F32) - y) ** 2)


def make_step(tx, gradients, dtype=F32, loss_fn=loss_fn):
  # A loop by hand; `gradients(params, opt_state, batch, loss_fn)` is where mistakes are made.

  @jax.jit
  def step(params, opt_state, batch):
    loss, grads = gradients(params, opt_state, batch, functools.partial(loss_fn, dtype=dtype))
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step


def check(inner, gradients, dtype=F32, loss=loss_fn, params=PARAMS, *config):
  tx = mpjax.loss_scaling(inner, *config)
  mpjax.check_loss_scaling(make_step(tx, gradients, dtype, loss))(params, tx.init(params), BATCH)


def right(params, opt_state, batch, loss_fn):
  return jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params, batch)


def never(params, opt_state, batch, loss_fn):
  return jax.value_and_grad(loss_fn)(params, batch)


def twice(params, opt_state, batch, loss_fn):
  loss, grads = right(params, opt_state, batch, loss_fn)
  return loss, mpjax.unscale(grads, opt_state)


def clipped_outside(params, opt_state, batch, loss_fn, gradients=right):
  loss, grads = gradients(params, opt_state, batch, loss_fn)
  clip = optax.clip_by_global_norm(1.0)
  return loss, clip.update(grads, clip.init(params))[0]


def scaled_twice(params, opt_state, batch, loss_fn):
  scale = mpjax.loss_scaling_metrics(opt_state)["loss_scale"]

  def scaled(params, batch):
    return scale * loss_fn(params, batch)

  return jax.value_and_grad(mpjax.scaled(scaled, opt_state))(params, batch)


INCONCLUSIVE = r"check_loss_scaling\(step\): expected a step whose gradients.* change .*, got "


def ends(how):
  """Asserts that a check passes (None), warns that it found nothing out, or names the mistake."""
  if how is None:
    return contextlib.nullcontext()
  if how.startswith(INCONCLUSIVE):
    return pytest.warns(UserWarning, match=how)
  return pytest.raises(mpjax.MpjaxError, match=how)


@pytest.mark.filterwarnings("ignore:.*nothing in loss_fn")
@pytest.mark.parametrize("kind", ["masters in windows", "cut, retried and averaged", "none"])
def test_right_steps_of_make_train_step_pass(kind):
  # Donated, with metrics among which are the scale and its counters.
  params, batch = data(rows=8)
  inner = CLIPPED_ADAMW
  if kind == "masters in windows":
    params = jax.tree.map(lambda p: p.astype(BF16), params)
    inner = mpjax.accumulate_gradients(mpjax.master_weights(MOMENTUM), 2)
  config = mpjax.NoLossScale() if kind == "none" else mpjax.DynamicLossScale()
  tx = mpjax.loss_scaling(inner, config)

  def model(params, model_state, batch, rng):
    return loss_fn(params, batch, BF16 if kind == "none" else F16), (model_state, {})

  more = kind == "cut, retried and averaged"
  # Tried again until it is finite: then no scale is skipped, not even inf.
  options = {"ema_decay": 0.9, "micro_batches": 2, "max_retries": 30} if more else {}
  step = mpjax.make_train_step(model, tx, **options)
  state = mpjax.TrainState.create(params, tx, ema=more)
  mpjax.check_loss_scaling(step)(state, batch=batch)
  step(state, batch)  # What was donated were copies.


def penalty(params):
  return 0.05 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def penalised(params, opt_state, batch, loss_fn):
  return right(params, opt_state, batch, lambda p, b: loss_fn(p, b) + penalty(p))


def penalised_beside(params, opt_state, batch, loss_fn):
  """A penalty that is differentiated by itself is 2^15 times too weak."""
  loss, grads = right(params, opt_state, batch, loss_fn)
  return loss, jax.tree.map(jnp.add, grads, jax.grad(penalty)(params))


def mapped(function, params, opt_state, batch, loss_fn):
  loss, grads = right(params, opt_state, batch, loss_fn)
  return loss, jax.tree.map(function, grads)


replaced = functools.partial(mapped, jnp.nan_to_num)
clipped_by_value = functools.partial(mapped, lambda g: jnp.clip(g, -1, 1))
linear = lambda params, batch, dtype: jnp.sum(params)  # noqa: E731
small = lambda params, batch, dtype: 1e-7 * loss_fn(params, batch)  # noqa: E731
constant = lambda params, batch, dtype: F32(1)  # noqa: E731


def line(params, batch, dtype):
  return jnp.mean((params * batch[1] - 3) ** 2)


def squared(params, opt_state, batch, loss_fn):
  """A gradient penalty (WGAN-GP) whose inner gradient is of the scaled loss."""

  scale = mpjax.loss_scaling_metrics(opt_state)["loss_scale"]

  def penalised(params, batch):
    inner = lambda x: scale * loss_fn(params, (x, batch[1]))  # noqa: E731
    return loss_fn(params, batch) + jnp.mean(jax.grad(inner)(batch[0]) ** 2)

  return jax.value_and_grad(mpjax.scaled(penalised, opt_state))(params, batch)


def named(got):
  """The error of a step that depends on the loss scale, with all of its parts."""
  fix = r"mpjax.value_and_grad\(loss_fn, opt_state\), .* Clip inside of mpjax.loss_scaling"
  return f"the same at every value of the loss scale 'dynamic'.* got gradients .*{got}.*{fix}"


NEVER, TWICE, CARRY = map(named, ("that were never scaled", "that were unscaled twice", "carry it"))
BESIDE = {penalised: None, penalised_beside: named("in part never scaled")}
FOUND = {right: None, never: "never scaled"}
ANY = FOUND | {twice: "unscaled twice"}
AT_INF = dict.fromkeys((never, replaced), "scaled, clipped, all zero, or had inf and NaN replaced")
UNSCALED = r"the step computes in float16, .* got {}\(\)\. .*mpjax.DynamicLossScale\(\)"
NONE, SKIP = mpjax.NoLossScale(), mpjax.SkipNonfinite()
ONE, STATIC = mpjax.StaticLossScale(1), mpjax.StaticLossScale(1024)
NOTHING = f"{INCONCLUSIVE}.*nothing was checked.*gradients are zero, or updates are lost"
LOST = {right: NOTHING, never: "never scaled"}
WARMUP = optax.linear_schedule(0.0, 0.1, 100)
HALF = jax.tree.map(lambda p: jnp.ones_like(p, BF16), PARAMS)
# Its updates are the signs of gradients; the least size of one so far begins at inf.
LEAST = optax.GradientTransformation(
  lambda params: {"least": jnp.full((), jnp.inf)},
  lambda g, s, params=None: (
    jax.tree.map(jnp.sign, g),
    {"least": jnp.minimum(s["least"], jnp.max(g["w"] ** 2))},
  ),
)
LOOPS = {
  "float16": (
    *(SGD, F16, loss_fn, PARAMS),
    {never: NEVER, twice: TWICE, scaled_twice: CARRY, replaced: named("had inf and NaN replaced")}
    | {clipped_outside: named("clipped while scaled")}
    # As in PyTorch: unscale_, clip, step.
    | {functools.partial(clipped_outside, gradients=twice): TWICE}
    | BESIDE,
  ),
  "bfloat16": (ADAM, BF16, loss_fn, PARAMS, {never: NEVER, twice: TWICE, scaled_twice: CARRY}),
  "beside, clipped": (CLIPPED_ADAMW, F32, loss_fn, PARAMS, BESIDE),
  "a warmup with moments": (optax.adam(WARMUP), F32, loss_fn, PARAMS, FOUND),
  "from zero": (
    *(SGD, F32, linear, jnp.zeros(3)),
    {right: None, scaled_twice: "carry it twice", clipped_by_value: "never scaled, clipped"},
  ),
  "a scalar from zero": (optax.sgd(0.1), F32, line, jnp.zeros(()), ANY),
  # All gradients are alike to these, which does not hide that they were not scaled.
  "signs": (optax.sign_sgd(0.1), F16, loss_fn, PARAMS, FOUND),
  "unused parameters": (ADAM, F32, constant, PARAMS, dict.fromkeys((right, never), "all zero")),
  "lost updates": (optax.sgd(1e-9), F32, loss_fn, HALF, LOST),
  # At one scale or another these are all that is left, whatever float16 makes of the rest.
  "small, clipped": (SGD, F32, small, PARAMS, {clipped_outside: "clipped while scaled"}),
  "from inf": (LEAST, F32, loss_fn, PARAMS, {right: None, scaled_twice: CARRY}),
  "squared": (SGD, F16, loss_fn, PARAMS, {squared: "carry it twice"}),
  "a rate of 1e-8": (optax.sgd(1e-8), F32, loss_fn, PARAMS, {scaled_twice: "carry it twice"}),
  # Where a scale may be below 1 quotients are looked at: over NaN those of plain gradients are NaN.
  "below 1": (SGD, F32, loss_fn, PARAMS, AT_INF, mpjax.DynamicLossScale(min_scale=2.0**-4)),
  "static": (SGD, F32, loss_fn, PARAMS, AT_INF, STATIC),
  "always 1": (SGD, F32, loss_fn, PARAMS, {never: None, squared: None}, ONE),
  "skips, always 1": (SGD, F32, loss_fn, PARAMS, {right: None, never: None}, SKIP),
  "float16 without": (ADAM, F16, loss_fn, PARAMS, {right: UNSCALED.format("NoLossScale")}, NONE),
  "float16, skips": (ADAM, F16, loss_fn, PARAMS, {right: UNSCALED.format("SkipNonfinite")}, SKIP),
  "bfloat16 without": (ADAM, BF16, loss_fn, PARAMS, {right: None}, NONE),
}
"""An optimizer, the dtype to compute in, a loss, parameters, how each way ends, a loss scale."""


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.parametrize("name", LOOPS)
def test_how_a_check_ends(name):
  inner, dtype, loss, params, gradients, *config = LOOPS[name]
  for way, how in gradients.items():
    with ends(how):
      check(inner, way, dtype, loss, params, *config)


def test_a_loss_that_is_not_scaled_beside_one_in_float16():
  scales = {"a": mpjax.SkipNonfinite(), "b": mpjax.DynamicLossScale()}
  tx = mpjax.loss_scaling(optax.sgd(0.1), scales)

  def step(params, opt_state, x):
    def loss_in(dtype):
      return lambda p: jnp.mean((p.astype(dtype) * x.astype(dtype)).astype(jnp.float32) ** 2)

    grads = {
      name: jax.value_and_grad(mpjax.scaled(loss_in(dtype), opt_state, name=name))(params)[1]
      for name, dtype in (("a", jnp.float32), ("b", jnp.float16))
    }
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  mpjax.check_loss_scaling(step)(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_the_name_of_another_loss():
  config = mpjax.DynamicLossScale(init_scale=1024.0)
  txs = {k: mpjax.loss_scaling(optax.adam(0.1), config, name=k) for k in "cg"}
  tx = optax.multi_transform(txs, {k: k for k in "cg"})
  params = {k: jnp.ones(3) for k in "cg"}

  def step(names, params, opt_state):
    square = lambda x: jnp.sum(x.astype(F16).astype(F32) ** 2)  # noqa: E731
    grad = lambda name: jax.value_and_grad(mpjax.scaled(square, opt_state, name=name))  # noqa: E731
    grads = {k: grad(name)(params[k])[1] for k, name in names.items()}
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  mpjax.check_loss_scaling(functools.partial(step, {"c": "c", "g": "g"}))(params, tx.init(params))
  fix = "jax.value_and_grad(mpjax.scaled(loss_fn, opt_state, name='c')), "
  with refused(ValueError, WHERE, "['c'] to be the same at every", "gradients", fix):
    mpjax.check_loss_scaling(functools.partial(step, {"c": "g", "g": "g"}))(params, tx.init(params))


@pytest.mark.parametrize(
  ("updated", "expected", "got"),
  [
    (False, "returns the new loss scale", "the old one"),
    (True, "the same at every", "still carry the loss scale"),
  ],
)
def test_scaled_gradients_that_are_applied(updated, expected, got):
  tx = mpjax.loss_scaling(optax.sgd(0.1))

  def step(params, opt_state, batch):
    grads = right(params, opt_state, batch, loss_fn)[1]
    if updated:
      _, opt_state = tx.update(grads, opt_state, params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state

  with refused(ValueError, WHERE, expected, got, "update"):
    mpjax.check_loss_scaling(step)(PARAMS, tx.init(PARAMS), BATCH)


def test_the_state_of_an_optimizer_in_host_memory():
  host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  tx, here = mpjax.loss_scaling(optax.adam(0.1)), host.with_memory_kind("device")
  step = lambda p, s, batch: make_step(tx, right)(p, jax.device_put(s, here), batch)  # noqa: E731
  mpjax.check_loss_scaling(step)(PARAMS, jax.device_put(tx.init(PARAMS), host), BATCH)


CHANGED = "a step that changes nothing when it is skipped, got another .*keep_if_skipped"
OLD_STATE = "the new loss scale 'dynamic'.* got none, or the old one.* never select it"


@pytest.mark.parametrize(
  ("kind", "guard", "how"),
  [
    ("reset", "none", CHANGED),
    ("reset", "new flag", None),
    ("reset", "old flag", CHANGED),
    ("reset", "of the loss scale too", OLD_STATE),
    ("momentum of updates", "none", CHANGED),
    ("momentum of updates", "new flag", None),
    ("momentum of gradients", "new flag", CARRY),
  ],
)
def test_what_a_skipped_step_changes(kind, guard, how):
  # It was NaN after one bad batch, and stayed so. Momentum that is 0 at first stays 0 once. A
  # counter is reset to the 0 that an update is, when a step is skipped.
  tx = mpjax.loss_scaling(optax.sgd(0.1))
  decay = functools.partial(jax.tree.map, lambda v, x: 0.9 * v + x)

  def step(params, rest, old_state, batch):
    age, momentum = rest
    change = right(params, old_state, batch, loss_fn)[1]
    if kind == "momentum of gradients":
      change = momentum = decay(momentum, change)
    change, opt_state = tx.update(change, old_state, params)
    if kind == "momentum of updates":
      change = momentum = decay(momentum, change)
    elif kind == "reset":
      age = jnp.where(mpjax.step_applied(opt_state), age, 0)
    old, new = (params, rest), (optax.apply_updates(params, change), (age, momentum))
    if guard == "of the loss scale too":
      return mpjax.keep_if_skipped(opt_state, (*new, opt_state), (*old, old_state))
    if guard != "none":
      new = mpjax.keep_if_skipped(old_state if guard == "old flag" else opt_state, new, old)
    return *new, opt_state

  rest = jnp.asarray(5, jnp.int32), jax.tree.map(jnp.zeros_like, PARAMS)
  with ends(how):
    mpjax.check_loss_scaling(step)(PARAMS, rest, tx.init(PARAMS), BATCH)


def test_all_that_a_skipped_step_changes_is_listed_statistics_first():
  tx = mpjax.loss_scaling(optax.sgd(0.1))
  step = make_step(tx, right)

  def forgetful(params, rest, opt_state, batch):
    new = {"count": rest["count"] + 1, "mean": rest["mean"] + 1}
    return *step(params, opt_state, batch)[:2], new

  rest = {"count": jnp.asarray(0), "mean": jnp.ones(2)}
  got = "another [2]['mean'] (and [2]['count'])"
  with refused(ValueError, WHERE, "when it is skipped", got, "by mpjax.keep_if_skipped."):
    mpjax.check_loss_scaling(forgetful)(PARAMS, rest, tx.init(PARAMS), BATCH)


@pytest.mark.parametrize("inside", [False, True], ids=["beside the optimizer", "elsewhere"])
def test_keys_and_cursors_may_move_beside_the_state_of_the_optimizer(inside):
  # As the step counts of nnx.Optimizer and of Flax's TrainState, which nothing of ours reads.
  tx = mpjax.monitor(mpjax.loss_scaling(optax.adam(0.1)))
  moving = {"key": jax.random.key(0), "cursor": jnp.zeros((), jnp.int32)}

  @jax.jit
  def step(state, batch):
    params, opt_state = state["params"], state["opt_state"]
    updates, opt_state = tx.update(right(params, opt_state, batch, loss_fn)[1], opt_state, params)
    moved = state.get("data", state)
    moved = {"key": jax.random.split(moved["key"])[0], "cursor": moved["cursor"] + 1}
    new = {"params": optax.apply_updates(params, updates), "opt_state": opt_state}
    return new | ({"data": moved} if inside else moved)

  moving = {"data": moving} if inside else moving
  state = {"params": PARAMS, "opt_state": tx.init(PARAMS)} | moving
  fix = "A key that may move belongs beside the optimizer's state"
  changed = refused(ValueError, WHERE, "when it is skipped", "another ['data']['cursor']", fix)
  with changed if inside else contextlib.nullcontext():
    mpjax.check_loss_scaling(lambda state, batch, frozen: step(state, batch))(state, BATCH, FROZEN)


def test_a_step_that_looks_at_values_runs_as_it_is():
  # Whether JAX says so, or the step and what it calls refuse tracers in their own way.
  seen = nnx.metrics.Average()

  def asserts(loss):
    assert not isinstance(loss, jax.core.Tracer)

  tx = mpjax.loss_scaling(optax.adam(1e-3))
  for way, how in FOUND.items():
    jitted = make_step(tx, way, F16)
    for look in (float, asserts, lambda loss: seen.update(values=loss)):

      def step(*args, jitted=jitted, look=look):
        out = jitted(*args)
        look(out[2])
        return out

      with ends(how):
        mpjax.check_loss_scaling(step)(PARAMS, tx.init(PARAMS), BATCH)


def test_what_is_logged_may_depend_on_the_scale():
  # What is frozen, wherever it is among the arguments, has no new version.
  tx = mpjax.loss_scaling(optax.adam(1e-3))

  @jax.jit
  def step(params, frozen, opt_state, batch, rate):
    loss, grads = right(params, opt_state, batch, loss_fn)
    scale = mpjax.loss_scaling_metrics(opt_state)["loss_scale"]
    updates, opt_state = tx.update(grads, opt_state, params)
    log = {"grads": grads, "updates": updates, "scale": scale, "inverse": 1 / scale}
    return log, optax.apply_updates(params, updates), opt_state, scale * loss

  rest = tx.init(PARAMS), BATCH, F32(0.5)
  swapped = lambda frozen, params, *rest: step(params, frozen, *rest)  # noqa: E731
  mpjax.check_loss_scaling(step, returns=(None, 0, 2, None))(PARAMS, FROZEN, *rest)
  mpjax.check_loss_scaling(swapped, returns=(None, 1, 2, None))(FROZEN, PARAMS, *rest)


@pytest.mark.parametrize("guarded", [True, False])
def test_an_average_is_not_taken_for_a_frozen_network(guarded):
  tx = mpjax.loss_scaling(optax.adam(1e-3))
  step = make_step(tx, right)

  def averaged(teacher, params, average, opt_state, batch):
    params, opt_state, _ = step(params, opt_state, batch)
    new = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
    if guarded:
      new = mpjax.keep_if_skipped(opt_state, new, average)
    return params, new, opt_state, loss_fn(teacher, batch)

  args = FROZEN, PARAMS, PARAMS, tx.init(PARAMS), BATCH
  asks = "If the result [0]['b'] is no new version of the argument [0]['b'], state the pairs"
  with refused(ValueError, WHERE, "when it is skipped", "another [0]['b']", asks):
    mpjax.check_loss_scaling(averaged)(*args)
  changed = refused(ValueError, WHERE, "when it is skipped", "another [1]['b']", "keep_if_skipped")
  with contextlib.nullcontext() if guarded else changed:
    mpjax.check_loss_scaling(averaged, returns=(1, 2, 3, None))(*args)


def test_a_keyword_argument_is_stated_by_its_name():
  tx = mpjax.loss_scaling(optax.adam(1e-3))
  step = make_step(tx, right)

  def averaged(opt_state, batch, *, params, average):
    params, opt_state, _ = step(params, opt_state, batch)
    new = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
    return {"new": (params, new), "opt_state": opt_state}

  checked = mpjax.check_loss_scaling(averaged, returns={"new": ("params", "average")})
  with refused(
    ValueError, WHERE, "when it is skipped", "another ['new'][1]['b']", "keep_if_skipped"
  ):
    checked(tx.init(PARAMS), BATCH, params=PARAMS, average=FROZEN)


WRONG_RETURNS = {
  "no such position": (ValueError, (3, 1), "positions from 0 to 2", "got 3"),
  "no such name": (ValueError, ("ema", 1), "names of keyword arguments", "got 'ema'"),
  "another tree": (ValueError, (1, 0), "a new version of argument 1 at 0", "no array there"),
  "no position": (TypeError, (0, 1.5), "positions and names of arguments", "got 1.5"),
  "a flag": (TypeError, (True, 1), "positions and names of arguments", "got True"),
  "too few": (ValueError, (0, 1), "an entry for each result", "none for [2]"),
}


@pytest.mark.parametrize("kind", WRONG_RETURNS)
def test_pairs_that_do_not_fit_are_refused(kind):
  builtin, returns, expected, got = WRONG_RETURNS[kind]
  tx = mpjax.loss_scaling(optax.adam(1e-3))
  where = "mpjax.check_loss_scaling(returns)"
  with refused(builtin, where, expected, got.removeprefix("got "), "argument"):
    check = mpjax.check_loss_scaling(make_step(tx, right), returns=returns)
    check(PARAMS, tx.init(PARAMS), BATCH)


def test_what_cannot_be_checked():
  tx, sgd = mpjax.loss_scaling(optax.sgd(0.1)), optax.sgd(0.1)
  step, opt_state = make_step(tx, right), tx.init(PARAMS)
  checked = mpjax.check_loss_scaling(step)
  with refused(TypeError, WHERE, "created by mpjax.loss_scaling", "in the arguments", "Wrap"):
    checked(PARAMS, PARAMS, BATCH)
  with refused(TypeError, WHERE, "concrete arguments", "traced ones", "on the host"):
    jax.jit(checked)(PARAMS, opt_state, BATCH)
  with refused(ValueError, WHERE, "finite at some", f"16384, {2.0**-22:.9g}", "another batch"):
    checked(PARAMS, opt_state, (BATCH[0] * jnp.nan, BATCH[1]))
  # Nothing of the state is returned, or what the update of another optimizer has taken apart.
  for wrong in (lambda *args: step(*args)[0], make_step(sgd, right)):
    with refused(ValueError, WHERE, "returns the new loss scale", "none", "tx.update"):
      mpjax.check_loss_scaling(wrong)(PARAMS, opt_state, BATCH)
  got, fix = "too many positional arguments", "mpjax.check_loss_scaling(step)(*args)"
  with refused(TypeError, WHERE, "arguments step", got, fix):
    mpjax.check_loss_scaling(step, PARAMS, opt_state, BATCH)
  for got, kind in ((step(PARAMS, opt_state, BATCH), "a tuple"), (tx, "a GradientTransf")):
    with refused(TypeError, WHERE, "a training step", kind, fix):
      mpjax.check_loss_scaling(got)
  tx = optax.MultiSteps(tx, 2)
  expected, got = "mpjax.loss_scaling around the entire optimizer", "state optax.MultiStepsState"
  for gradients in (right, never):  # As value_and_grad refuses it.
    with refused(TypeError, WHERE, expected, got, "mpjax.loss_scaling(optax.chain(...))"):
      mpjax.check_loss_scaling(make_step(tx, gradients))(PARAMS, tx.init(PARAMS), BATCH)


TOLD = r".*mpjax\.value_and_grad\(loss_fn, optimizer\)"
NNX_KINDS = {
  "right": None,
  "never scaled": f"never scaled{TOLD}",
  "unscaled twice": f"unscaled twice{TOLD}",
  "unused": f"never scaled.* all zero{TOLD}",
  "keeps": None,
  "no update": r"the new loss scale.*optimizer\.update\(model, grads\).* by nnx\.jit",
  "jax.jit": r"the new loss scale.*optimizer\.update\(model, grads\).* by nnx\.jit: jax\.jit drops",
}


class Keeps(nnx.Linear):
  """Holds what it has computed, which is not compared: a tuple, as `sow` creates, and a number."""

  def __call__(self, inputs):
    outputs = super().__call__(inputs)
    self.kept, self.bias_norm = nnx.Intermediate((outputs,)), nnx.Variable(jnp.sum(outputs))
    return outputs


@pytest.mark.parametrize("kind", NNX_KINDS)
def test_a_step_of_nnx_that_writes_to_its_optimizer(kind):
  # Users of NNX are told the names of their functions.
  model = (Keeps if kind == "keeps" else nnx.Linear)(3, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(0.1)), wrt=nnx.Param)

  # What jax.jit compiles trains nothing, without a word of Flax.
  @(jax.jit if kind == "jax.jit" else nnx.jit)
  def step(model, optimizer, x):
    other = nnx.Linear(3, 1, rngs=nnx.Rngs(0)) if kind == "unused" else None

    def loss_fn(model):
      return jnp.mean((other or model)(x) ** 2)

    plain = kind in ("never scaled", "no update")
    scaled = nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))
    loss, grads = (nnx.value_and_grad(loss_fn) if plain else scaled)(model)
    if kind == "unscaled twice":
      grads = mpjax.unscale(grads, optimizer)
    if kind != "no update":
      optimizer.update(model, grads)
    return loss

  before = jnp.copy(model.kernel[...])
  with ends(NNX_KINDS[kind]):
    mpjax.check_loss_scaling(step)(model, optimizer, jnp.ones((2, 3)))
  assert jnp.array_equal(model.kernel[...], before)
  assert not hasattr(model, "kept")


RETURNED_STATES = {
  "one state": lambda model, optimizer: nnx.state((model, optimizer)),
  "a loss before it": lambda model, optimizer: (F32(0), nnx.state((model, optimizer))),
  "two states": lambda model, optimizer: (nnx.state(model), nnx.state(optimizer)),
  "parameters alone": lambda model, optimizer: (nnx.state(model, nnx.Param), nnx.state(optimizer)),
  "pure dicts": lambda model, optimizer: nnx.to_pure_dict(nnx.state({"m": model, "o": optimizer})),
}


def plain_gradients(loss_fn, optimizer):
  return nnx.value_and_grad(loss_fn)


def check_functional(gradients, returned):
  """Checks a step for `jax.jit`, which drops writes, as in Flax's example of Gemma."""
  model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.adam(0.1)), wrt=nnx.Param)

  @jax.jit
  def step(model, optimizer, x):
    _, grads = gradients(lambda model: jnp.mean(model(x) ** 2), optimizer)(model)
    optimizer.update(model, grads)
    return returned(model, optimizer)

  mpjax.check_loss_scaling(step)(model, optimizer, jnp.ones((2, 4)))


@pytest.mark.parametrize("kind", RETURNED_STATES)
def test_a_step_under_jax_jit_may_return_the_state_of_its_modules(kind):
  check_functional(mpjax.value_and_grad, RETURNED_STATES[kind])


def test_plain_gradients_are_found_in_a_state_that_is_returned():
  with ends(f"never scaled{TOLD}"):
    check_functional(plain_gradients, RETURNED_STATES["pure dicts"])


def test_a_step_under_jax_jit_that_drops_its_optimizer():
  # Its moments have the tree of the parameters, which are returned.
  fix = "returns nnx.state((model, optimizer))"
  with refused(ValueError, WHERE, "the new loss scale", "none, or the old one", fix):
    check_functional(mpjax.value_and_grad, lambda model, optimizer: nnx.state(model))


@pytest.mark.parametrize("guarded", [True, False])
def test_what_a_skipped_step_changes_in_a_state_that_is_returned(guarded):
  model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.adam(0.1)), wrt=nnx.Param)

  def update(model, optimizer, x):
    _, grads = nnx.value_and_grad(mpjax.scaled(lambda m: jnp.mean(m(x) ** 4), optimizer))(model)
    optimizer.update(model, grads)

  @jax.jit
  def step(model, optimizer, x):
    (mpjax.nnx.atomic_step(update) if guarded else update)(model, optimizer, x)
    return nnx.state((model, optimizer))

  moves = refused(ValueError, WHERE, "when it is skipped", "[0]['mean']", "atomic_step")
  with contextlib.nullcontext() if guarded else moves:
    mpjax.check_loss_scaling(step)(model, optimizer, BATCH[0])


@pytest.mark.parametrize("way", [right, never])
def test_a_train_state_of_flax(way):
  # Its count of steps begins as a Python int.
  tx = mpjax.loss_scaling(optax.sgd(0.1))
  state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

  def step(state, batch):
    loss, grads = way(state.params, state.opt_state, batch, loss_fn)
    return state.apply_gradients(grads=grads), loss

  with ends(FOUND[way]):
    mpjax.check_loss_scaling(step)(state, BATCH)


def test_a_step_that_tries_again_may_count_how_often():
  # At the scale inf it tries once more. The count is as many as an argument, when it is skipped.
  tx = mpjax.loss_scaling(optax.sgd(0.1))

  def step(params, opt_state, rows):
    def attempt(carry):
      params, opt_state, tries = carry
      grads = jax.value_and_grad(mpjax.scaled(lambda params: jnp.sum(params**2), opt_state))(
        params
      )[1]
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state, tries + 1

    again = lambda carry: ~mpjax.step_applied(carry[1]) & (carry[2] < 3)  # noqa: E731
    first = attempt((params, opt_state, jnp.zeros((), jnp.int32)))
    params, opt_state, tries = jax.lax.while_loop(again, attempt, first)
    return params, opt_state, {"tries": tries}

  mpjax.check_loss_scaling(step)(jnp.ones(2), tx.init(jnp.ones(2)), jnp.asarray(3, jnp.int32))


@pytest.mark.parametrize("wrong", [False, True])
def test_several_steps_in_one_call(wrong):
  # At the scale inf the first of them is skipped, and the next is applied at a lower one.
  tx = mpjax.loss_scaling(optax.adam(0.1))
  step = make_step(tx, never if wrong else right)

  def run(carry, batches):
    body = lambda carry, batch: (step(*carry, batch)[:2], None)  # noqa: E731
    return jax.lax.scan(body, carry, batches)[0]

  batches = jax.tree.map(lambda x: jnp.stack([x, x + 1]), BATCH)
  with ends("never scaled" if wrong else None):
    mpjax.check_loss_scaling(run)((PARAMS, tx.init(PARAMS)), batches)


NEVER_OF_TWO = r"\[0\]\['b'\].* every value of the loss scale '{}dynamic'.* never scaled"
UNNAMED = (None, None)


@pytest.mark.parametrize(
  ("kind", "names", "how"),
  [
    ("right", UNNAMED, None),
    ("one is updated twice", UNNAMED, None),
    ("one never scales", UNNAMED, NEVER_OF_TWO.format("")),
    ("one never scales", "ab", NEVER_OF_TWO.format("b:")),
    ("one state is dropped", UNNAMED, OLD_STATE),
    ("one state is selected", UNNAMED, OLD_STATE),
  ],
)
def test_of_two_optimizers_the_wrong_one_is_found(kind, names, how):
  # At the scale NaN the one with plain gradients is applied, while the other one is skipped.
  txs = {k: mpjax.loss_scaling(SGD, name=name) for k, name in zip("ab", names, strict=True)}
  ways = {"a": right, "b": never if kind == "one never scales" else right}

  def step(params, old, batch):
    new = {k: make_step(tx, ways[k])(params[k], old[k], batch)[:2] for k, tx in txs.items()}
    if kind == "one is updated twice":
      new["b"] = make_step(txs["b"], right)(*new["b"], batch)[:2]
    params, states = ({k: pair[i] for k, pair in new.items()} for i in (0, 1))
    if kind == "one state is dropped":
      del states["b"]
    elif kind == "one state is selected":
      states["b"] = mpjax.keep_if_skipped(states["b"], states["b"], old["b"])
    return params, states

  opt_states = {k: tx.init(PARAMS) for k, tx in txs.items()}
  if kind == "right":  # One state for both: their paths alone tell them apart.
    opt_states["b"] = opt_states["a"]
  with ends(how):
    mpjax.check_loss_scaling(step)(dict.fromkeys("ab", PARAMS), opt_states, BATCH)


@pytest.mark.parametrize("way", [right, never])
def test_a_state_of_nnx_that_is_returned_is_compared(way):
  # Its leaves are variables, to which nothing is written.
  model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model)
  tx = mpjax.loss_scaling(optax.sgd(0.1))

  def loss(params, batch, dtype):
    return jnp.mean((nnx.merge(graph, params)(batch[0])[:, 0] - batch[1]) ** 2)

  with ends(FOUND[way]):
    step = make_step(tx, way, loss_fn=loss)
    mpjax.check_loss_scaling(step)(params, tx.init(params), BATCH)


def test_a_step_from_a_state_of_nnx_to_the_next():
  model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.adam(0.1)), wrt=nnx.Param)
  graph, state = nnx.split((model, optimizer))

  def step(state, clip=False):
    model, optimizer = nnx.merge(graph, state, copy=True)
    grad_fn = nnx.value_and_grad(
      mpjax.scaled(lambda m: jnp.mean(m(jnp.ones((2, 4))) ** 2), optimizer)
    )
    _, grads = grad_fn(model)
    grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads) if clip else grads
    optimizer.update(model, grads)
    return nnx.as_pure(nnx.state((model, optimizer)))

  mpjax.check_loss_scaling(step)(nnx.as_pure(state))
  expected = "to be the same at every value of the loss scale 'dynamic'"
  with refused(ValueError, WHERE, expected, "clipped", "Clip inside of mpjax.loss_scaling"):
    mpjax.check_loss_scaling(functools.partial(step, clip=True))(nnx.as_pure(state))
  with refused(ValueError, WHERE, "a step that returns the new loss scale", "none", "Return"):
    mpjax.check_loss_scaling(lambda state: state)(nnx.as_pure(state))


def penalised_by(grad):
  # Returns a loss with the gradient of a critic in it.

  def loss_fn(params, batch, dtype):
    critic = jax.jit(lambda x: jnp.sum(network(params, x, dtype)))
    return jnp.mean((jnp.linalg.norm(grad(critic)(batch[0]), axis=-1) - 1) ** 2)

  return loss_fn


def per_example(params, opt_state, batch, loss_fn):
  loss_and_grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))
  losses, grads = jax.vmap(lambda x: loss_and_grads(params, (x[None], None)))(batch[0])
  return jnp.mean(losses), jax.tree.map(lambda g: jnp.mean(g, 0), grads)


PLAIN, SCALED = map(penalised_by, (jax.grad, mpjax.inner_grad))


@pytest.mark.parametrize(
  ("loss", "dtype", "gradients", "is_found"),
  {
    "float16": (PLAIN, F16, right, True),
    "float16 under vmap": (PLAIN, F16, per_example, True),
    "float16 by autocast": (mpjax.autocast(PLAIN, "mixed_float16"), F32, right, True),
    "float16, scaled": (SCALED, F16, right, False),
    "float16 by autocast, scaled": (mpjax.autocast(SCALED, "mixed_float16"), F32, right, False),
    "bfloat16": (PLAIN, BF16, right, False),
    "float32": (PLAIN, F32, right, False),
  }.values(),
)
def test_a_float16_gradient_inside_of_the_loss_is_found(loss, dtype, gradients, is_found):
  text = r"gradients inside of the loss.*mpjax\.inner_grad\(fun\)"
  found = pytest.warns(UserWarning, match=text)
  with found if is_found else contextlib.nullcontext():
    check(SGD, gradients, dtype, loss)


def test_parameters_may_be_called_loss_scale():
  names = lambda params: {"loss_scale": {"net": params}}  # noqa: E731

  def loss(params, batch, dtype):
    return loss_fn(params["loss_scale"]["net"], batch, dtype)

  tx = mpjax.loss_scaling(optax.sgd(0.1))
  params = names(PARAMS)
  mpjax.check_loss_scaling(make_step(tx, right, loss_fn=loss))(params, tx.init(params), BATCH)
  with ends(FOUND[never]):
    mpjax.check_loss_scaling(make_step(tx, never, loss_fn=loss))(params, tx.init(params), BATCH)


def test_tied_variables_of_nnx_and_counts_of_random_numbers():
  def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(mpjax.scaled(lambda m: jnp.mean(m(x) ** 2), optimizer))(model)
    optimizer.update(model, grads)
    return loss

  for dropout, wrap in ((0.0, lambda f: f), (0.5, mpjax.nnx.atomic_step), (0.5, lambda f: f)):
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)]
    model = nnx.Sequential(*layers, nnx.Dropout(dropout, rngs=rngs))
    model.layers[1].kernel = model.layers[0].kernel
    kernels = optax.masked(ADAM, lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    optimizer = nnx.Optimizer(model, mpjax.loss_scaling(kernels), wrt=nnx.Param)
    expected, got = "changes nothing when it is skipped", "rngs.count"
    moves = refused(ValueError, WHERE, expected, got, "@mpjax.nnx.atomic_step")
    with moves if dropout and wrap is not mpjax.nnx.atomic_step else contextlib.nullcontext():
      mpjax.check_loss_scaling(nnx.jit(wrap(step)))(model, optimizer, jnp.ones((2, 4)))


def test_a_warmup_from_zero_is_inconclusive_at_its_first_step_and_found_after_it():
  # Plain SGD with a learning rate of zero returns the same for any gradients.
  tx = mpjax.loss_scaling(optax.sgd(WARMUP))
  params, batch, opt_state = PARAMS, BATCH, tx.init(PARAMS)
  step, forgetful = (make_step(tx, way, F16) for way in (right, never))
  told = f"{INCONCLUSIVE}.*applied step and from a skipped one.*after a step or two"
  with pytest.warns(UserWarning, match=told) as caught:
    assert mpjax.check_loss_scaling(step)(params, opt_state, batch) is None
  assert [one.filename for one in caught] == [__file__]
  with ends("never scaled"):  # At the scale NaN it is applied.
    mpjax.check_loss_scaling(forgetful)(params, opt_state, batch)

  def with_statistics(params, mean, opt_state, batch):
    # Those of a batch move in each step that is applied, whatever the gradients are.
    params, opt_state, _ = step(params, opt_state, batch)
    new = 0.9 * mean + jnp.mean(batch[0], axis=0)
    return params, mpjax.keep_if_skipped(opt_state, new, mean), opt_state

  with pytest.warns(UserWarning, match=told):
    mpjax.check_loss_scaling(with_statistics)(params, jnp.ones(4), opt_state, batch)
  for _ in range(3):  # In float16 the first may overflow: a skipped step does not warm up.
    params, opt_state, _ = step(params, opt_state, batch)
  mpjax.check_loss_scaling(step)(params, opt_state, batch)
  with ends("never scaled"):
    mpjax.check_loss_scaling(forgetful)(params, opt_state, batch)


def test_a_right_step_passes_while_jax_looks_for_nans():
  with jax.debug_nans(True), jax.disable_jit():
    check(SGD, right, F32, line, jnp.ones(()))


def test_of_two_optimizers_the_step_may_update_one():
  params, batch, tx = PARAMS, BATCH, mpjax.loss_scaling(optax.sgd(0.1))
  step = make_step(tx, right)

  def one_of_two(params, opt_states, batch):
    new_params, mine, _ = step(params, opt_states[0], batch)
    return new_params, (mine, opt_states[1])

  opt_states = tx.init(params), tx.init(params)
  mpjax.check_loss_scaling(one_of_two)(params, opt_states, batch)
  alone = lambda *args: (one_of_two(*args)[0], one_of_two(*args)[1][0])  # noqa: E731
  mpjax.check_loss_scaling(alone)(params, opt_states, batch)
  skipped = step(params, opt_states[1], (batch[0] * jnp.nan, batch[1]))[1]
  mpjax.check_loss_scaling(one_of_two)(params, (opt_states[0], skipped), batch)
