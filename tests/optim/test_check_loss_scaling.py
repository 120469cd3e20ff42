"""A step that scales its loss and keeps everything when it is skipped passes; others are named."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
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


def data(rows=6):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), F32)  # noqa: E731
  params = {"w": draw(4, 8) * 0.5, "b": jnp.zeros((1, 8)), "v": draw(8, 1) * 0.5, "scalar": draw()}
  return params, (draw(rows, 4), draw(rows))


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


def changed_by(change, params, opt_state, batch, loss_fn):
  loss, grads = right(params, opt_state, batch, loss_fn)
  return loss, change(grads, params)


def penalty(params):
  return 0.05 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def clipped(grads, params):
  clip = optax.clip_by_global_norm(1.0)
  return clip.update(grads, clip.init(params))[0]


replaced = functools.partial(changed_by, lambda g, p: jax.tree.map(jnp.nan_to_num, g))
clipped_outside = functools.partial(changed_by, clipped)
penalised_beside = functools.partial(
  changed_by, lambda g, p: jax.tree.map(jnp.add, g, jax.grad(penalty)(p))
)


def ends(how):
  """Asserts that a check passes (None), or names the mistake."""
  return contextlib.nullcontext() if how is None else pytest.raises(mpjax.MpjaxError, match=how)


NOT_SCALED = (
  r"skipped when the loss scale '{}' is NaN, got an applied one: gradients that were never scaled, "
  r"are all zero, or had NaN replaced\. Write {}\."
)
WRITE = r"jax\.value_and_grad\(mpjax\.scaled\(loss_fn, opt_state\)\)\(params, batch\)"
NEVER = NOT_SCALED.format("dynamic", WRITE)
CHANGED = "a step that changes nothing when it is skipped, got another .*keep_if_skipped"
OLD_STATE = "the new loss scale 'dynamic'.* got none, or the old one.* never select it"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nothing in loss_fn")
@pytest.mark.parametrize("kind", ["masters in windows", "cut and retried", "none"])
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

  # No retry helps against NaN.
  options = {"micro_batches": 2, "max_retries": 30} if kind == "cut and retried" else {}
  step = mpjax.make_train_step(model, tx, **options)
  state = mpjax.TrainState.create(params, tx)
  mpjax.check_loss_scaling(step)(state, batch=batch)
  step(state, batch)  # What was donated were copies.


linear = lambda params, batch, dtype: jnp.sum(params)  # noqa: E731
constant = lambda params, batch, dtype: F32(1)  # noqa: E731
HALF = jax.tree.map(lambda p: jnp.ones_like(p, BF16), PARAMS)
WARMUP = optax.linear_schedule(0.0, 0.1, 100)
# Its updates are the signs of gradients; the least size of one so far begins at inf.
LEAST = optax.GradientTransformation(
  lambda params: {"least": jnp.full((), jnp.inf)},
  lambda g, s, params=None: (
    jax.tree.map(jnp.sign, g),
    {"least": jnp.minimum(s["least"], jnp.max(g["w"] ** 2))},
  ),
)
RIGHT = {
  "float16": (SGD, right, F16),
  "bfloat16": (ADAM, right, BF16),
  "clipped outside": (SGD, clipped_outside),
  "a penalty beside the loss": (CLIPPED_ADAMW, penalised_beside),
  "a warmup from zero": (optax.adam(WARMUP), right),
  "from zero": (SGD, right, F32, linear, jnp.zeros(3)),
  "signs, from inf": (LEAST, right, F16),
  "lost updates": (optax.sgd(1e-9), right, F32, loss_fn, HALF),
  "static": (SGD, right, F32, loss_fn, PARAMS, mpjax.StaticLossScale(1024)),
  "skips": (SGD, right, F32, loss_fn, PARAMS, mpjax.SkipNonfinite()),
  "skips, plain": (SGD, never, F32, loss_fn, PARAMS, mpjax.SkipNonfinite()),
  "bfloat16 without": (ADAM, never, BF16, loss_fn, PARAMS, mpjax.NoLossScale()),
}


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.parametrize("kind", RIGHT)
def test_right_steps_pass(kind):
  check(*RIGHT[kind])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float32", "split"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_parameter_stays_its_rounded_master(dtype, storage):
  tx = mpjax.loss_scaling(mpjax.master_weights(MOMENTUM, storage=storage))
  params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
  opt_state = tx.init(params)

  def step(params, opt_state, batch, doubles=False):
    # Gradients of float16 parameters would underflow in their dtype.
    _, grads = right(mpjax.convert(params, "float32"), opt_state, batch, loss_fn)
    updates, opt_state = tx.update(grads, opt_state, params)
    new = mpjax.apply_updates(params, updates, opt_state)
    return (jax.tree.map(lambda p: p * 2, new) if doubles else new), opt_state

  # The masters of a trained state hold more than their parameters.
  for _ in range(2):
    params, opt_state = step(params, opt_state, BATCH)
  mpjax.check_loss_scaling(step)(params, opt_state, BATCH)
  with ends(CHANGED):
    mpjax.check_loss_scaling(functools.partial(step, doubles=True))(params, opt_state, BATCH)


UNSCALED = {
  "float16": (SGD, never, F16),
  "a warmup from zero": (optax.sgd(WARMUP), never),
  "signs": (optax.sign_sgd(0.1), never),
  "masters": (mpjax.master_weights(SGD), never, F32, loss_fn, HALF),
  "all zero": (ADAM, right, F32, constant),
  "replaced": (SGD, replaced),
  "at its minimum": (SGD, never, F32, loss_fn, PARAMS, mpjax.DynamicLossScale(min_scale=1.0)),
}


@pytest.mark.parametrize("kind", UNSCALED)
def test_gradients_that_the_scale_does_not_reach(kind):
  with ends(NEVER):
    check(*UNSCALED[kind])


@pytest.mark.parametrize("scale", [1, 1024])
def test_a_static_scale_is_found_too(scale):
  with ends(NOT_SCALED.format("static.*", WRITE)):
    check(SGD, never, F32, loss_fn, PARAMS, mpjax.StaticLossScale(scale))


@pytest.mark.parametrize("kind", ["NoLossScale", "SkipNonfinite"])
def test_float16_needs_a_loss_scale(kind):
  got = rf"the step computes in float16, .* got {kind}\(\)\. .*mpjax.DynamicLossScale\(\)"
  with ends(got):
    check(ADAM, never, F16, loss_fn, PARAMS, getattr(mpjax, kind)())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_number_scales_the_loss_of_a_trainer(scaled):
  # The number in front of an inner gradient does not scale the loss around it.
  def penalized(params, batch, dtype):
    inner = jax.grad(mpjax.scaled(lambda x: loss_fn(params, (x, batch[1]), dtype), 2.0**4))
    return loss_fn(params, batch, dtype) + jnp.mean(inner(batch[0]) ** 2)

  def gradients(params, opt_state, batch, loss_fn):
    if scaled:
      loss_fn = mpjax.scaled(loss_fn, 2.0**5)
    return jax.value_and_grad(loss_fn)(params, batch)

  how = None if scaled else r"got SkipNonfinite\(\)\. .* mpjax.scaled\(loss_fn, 2.0\*\*15\)\."
  for loss in (loss_fn, penalized):
    with ends(how):
      check(ADAM, gradients, F16, loss, PARAMS, mpjax.SkipNonfinite())


def test_a_number_that_is_too_large():
  def gradients(params, opt_state, batch, loss_fn):
    return jax.value_and_grad(mpjax.scaled(loss_fn, 2.0**24))(params, batch)

  with ends("applied at the loss scale 1, .* give mpjax.scaled a smaller number"):
    check(ADAM, gradients, F16, loss_fn, PARAMS, mpjax.SkipNonfinite())


def test_a_loss_that_is_not_scaled_beside_one_in_float16():
  scales = {"a": mpjax.SkipNonfinite(), "b": mpjax.DynamicLossScale()}
  tx = mpjax.loss_scaling(optax.sgd(0.1), scales)

  def step(params, opt_state, x):
    def loss_in(dtype):
      return lambda p: jnp.mean((p.astype(dtype) * x.astype(dtype)).astype(F32) ** 2)

    grads = {
      name: jax.grad(mpjax.scaled(loss_in(dtype), opt_state, name=name))(params)
      for name, dtype in (("a", F32), ("b", F16))
    }
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  mpjax.check_loss_scaling(step)(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("names", "how"),
  [("cg", None), ("gg", NOT_SCALED.format("c:dynamic", ".*opt_state, name='c'.*"))],
)
def test_the_name_of_another_loss(names, how):
  # With the scale of the other loss the step is skipped too. Each scale is tried alone.
  txs = {k: mpjax.loss_scaling(optax.adam(0.1), name=k) for k in "cg"}
  tx = optax.multi_transform(txs, {k: k for k in "cg"})
  params = {k: jnp.ones(3) for k in "cg"}

  def step(params, opt_state):
    square = lambda x: jnp.sum(x.astype(F16).astype(F32) ** 2)  # noqa: E731
    grad = lambda name: jax.grad(mpjax.scaled(square, opt_state, name=name))  # noqa: E731
    grads = {k: grad(name)(params[k]) for k, name in zip("cg", names, strict=True)}
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  with ends(how):
    mpjax.check_loss_scaling(step)(params, tx.init(params))


@pytest.mark.slow
@pytest.mark.parametrize(("updated", "how"), [(False, OLD_STATE), (True, CHANGED)])
def test_gradients_that_are_applied_without_the_optimizer(updated, how):
  tx = mpjax.loss_scaling(optax.sgd(0.1))

  def step(params, opt_state, batch):
    grads = right(params, opt_state, batch, loss_fn)[1]
    if updated:
      _, opt_state = tx.update(grads, opt_state, params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state

  with ends(how):
    mpjax.check_loss_scaling(step)(PARAMS, tx.init(PARAMS), BATCH)


def test_a_scale_that_is_an_argument_of_the_step():
  # NaN in the state reaches no gradient, so the arguments are NaN in turn.
  tx = mpjax.loss_scaling(optax.sgd(0.1))

  @jax.jit
  def step(params, opt_state, batch, scale):
    opt_state = mpjax.states.set_loss_scale(opt_state, scale)
    return make_step(tx, right)(params, opt_state, batch)

  mpjax.check_loss_scaling(step)(PARAMS, tx.init(PARAMS), BATCH, F32(8))


def test_the_state_of_an_optimizer_in_host_memory():
  host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  tx, here = mpjax.loss_scaling(optax.adam(0.1)), host.with_memory_kind("device")
  step = lambda p, s, batch: make_step(tx, right)(p, jax.device_put(s, here), batch)  # noqa: E731
  mpjax.check_loss_scaling(step)(PARAMS, jax.device_put(tx.init(PARAMS), host), BATCH)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "guard", "how"),
  [
    ("reset", "none", CHANGED),
    ("reset", "new flag", None),
    ("reset", "old flag", CHANGED),
    ("reset", "of the loss scale too", OLD_STATE),
    ("momentum of updates", "none", CHANGED),
    ("momentum of updates", "new flag", None),
    ("momentum of gradients", "none", CHANGED),
    ("momentum of gradients", "new flag", None),
  ],
)
def test_what_a_skipped_step_changes(kind, guard, how):
  # Momentum that is 0 at first stays 0 once. A counter is reset to the 0 that an update is, when a
  # step is skipped.
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


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_delayed_scaling_of_float8_keeps_its_histories_like_statistics(kept):
  model = linen.Dense(4, dot_general_cls=linen.Fp8DirectDotGeneralOp, dtype=F16)
  tx, owg = mpjax.loss_scaling(optax.adam(0.1)), "_overwrite_with_gradient"

  def loss_fn(variables, x):
    return jnp.mean(model.apply(variables, x).astype(F32) ** 2)

  @jax.jit
  def step(old, opt_state, x):
    grads = jax.grad(mpjax.scaled(loss_fn, opt_state))(old, x)
    updates, opt_state = tx.update(grads["params"], opt_state, old["params"])
    new = mpjax.keep_if_skipped(opt_state, grads[owg], old[owg]) if kept else grads[owg]
    return {"params": optax.apply_updates(old["params"], updates), owg: new}, opt_state

  x = jnp.ones((8, 16), F16)
  variables = model.init(jax.random.key(0), x)
  with ends(None if kept else CHANGED):
    mpjax.check_loss_scaling(step)(variables, tx.init(variables["params"]), x)


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


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("batch", ["floats", "integers"])
def test_a_step_that_skips_without_a_scale_is_checked_with_numbers_that_are_nan(batch, guarded):
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.SkipNonfinite())
  x = BATCH if batch == "floats" else jax.tree.map(lambda x: (9 * x).astype(jnp.int32), BATCH)

  def step(params, mean, old_state, batch):
    params, opt_state, _ = make_step(tx, right)(params, old_state, batch)
    new = 0.9 * mean + jnp.mean(batch[0])
    return params, mpjax.keep_if_skipped(opt_state, new, mean) if guarded else new, opt_state

  with ends(None if guarded else CHANGED):
    mpjax.check_loss_scaling(step)(PARAMS, jnp.zeros(1), tx.init(PARAMS), x)


def test_a_step_that_nothing_makes_skip():
  tx = mpjax.loss_scaling(SGD, mpjax.SkipNonfinite())
  with refused(ValueError, WHERE, "skipped when its batch", "nothing was checked", "gradients of"):
    check_args = PARAMS, tx.init(PARAMS), BATCH
    mpjax.check_loss_scaling(make_step(tx, replaced))(*check_args)


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


class Runner(NamedTuple):
  """The state of a loop of reinforcement learning."""

  params: object
  opt_state: object
  game: object
  key: object


@pytest.mark.parametrize("learns", ["from the game", "twice"])
@pytest.mark.parametrize(
  ("state", "how"),
  [
    (None, CHANGED),
    (Runner(0, 0, None, None), None),
    (Runner(0, 0, {"board": None, "turn": 0}, 0), r"another \[0\]\.game\['turn'\]"),
  ],
)
def test_a_game_moves_in_a_skipped_step_if_the_user_says_so(state, how, learns):
  tx = mpjax.loss_scaling(optax.adam(0.1))

  @jax.jit
  def step(runner):
    key, use = jax.random.split(runner.key)
    board = runner.game["board"] + jax.random.normal(use, runner.game["board"].shape)
    batch = board, board[:, 0]
    params, opt_state, loss = runner.params, runner.opt_state, None
    for _ in range(2 if learns == "twice" else 1):
      params, opt_state, loss = make_step(tx, right)(params, opt_state, batch)
    game = {"board": board, "turn": runner.game["turn"] + 1}
    return Runner(params, opt_state, game, key), loss

  game = {"board": BATCH[0], "turn": jnp.zeros((), jnp.int32)}
  runner = Runner(PARAMS, tx.init(PARAMS), game, jax.random.key(0))
  returns = None if state is None else (state, None)
  with ends(how):
    mpjax.check_loss_scaling(step, returns=returns)(runner)


@pytest.mark.parametrize(("way", "how"), [(right, None), (never, NEVER)])
@pytest.mark.parametrize("look", ["reads a number", "asserts", "refuses in its own way"])
def test_a_step_that_looks_at_values_runs_as_it_is(look, way, how):
  # Whether JAX says so, or the step and what it calls refuse tracers in their own way.
  seen = nnx.metrics.Average()

  def asserts(loss):
    assert not isinstance(loss, jax.core.Tracer)

  looks = {"reads a number": float, "asserts": asserts}
  tx = mpjax.loss_scaling(optax.adam(1e-3))

  def step(*args):
    out = make_step(tx, way, F16)(*args)
    looks.get(look, lambda loss: seen.update(values=loss))(out[2])
    return out

  with ends(how):
    mpjax.check_loss_scaling(step)(PARAMS, tx.init(PARAMS), BATCH)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_logged_may_depend_on_the_scale(frozen):
  # Gradients have the tree of the parameters, so the user says that they are a log.
  tx = mpjax.loss_scaling(optax.adam(1e-3))

  def step(*args):
    params, opt_state, batch = args[1 - frozen], *args[2:]
    loss, grads = right(params, opt_state, batch, loss_fn)
    scale = mpjax.loss_scaling_metrics(opt_state)["loss_scale"]
    updates, opt_state = tx.update(grads, opt_state, params)
    log = {"grads": grads, "updates": updates, "scale": scale, "inverse": 1 / scale}
    return log, optax.apply_updates(params, updates), opt_state, scale * loss

  networks = (FROZEN, PARAMS) if frozen == 0 else (PARAMS, FROZEN)
  args = *networks, tx.init(PARAMS), BATCH
  mpjax.check_loss_scaling(step, returns=(None, 1 - frozen, 2, None))(*args)
  results = "for the arguments [0]; [1] the results [0]['grads']; [0]['updates']; [1]"
  with refused(ValueError, WHERE, "one result", results, "returns=(0, 1, None)"):
    mpjax.check_loss_scaling(step)(*args)


def test_logged_metrics_are_not_taken_for_a_loss_scale():
  tx = mpjax.loss_scaling(SGD)

  def step(params, opt_state, batch):
    params, opt_state, _ = make_step(tx, right)(params, opt_state, batch)
    return params, opt_state, {"loss_scale": {"net": mpjax.loss_scaling_metrics(opt_state)}}

  mpjax.check_loss_scaling(step)(PARAMS, tx.init(PARAMS), BATCH)


@pytest.mark.parametrize("returns", [None, (1, 2, 3, None)])
@pytest.mark.parametrize("guarded", [True, False])
def test_an_average_is_not_taken_for_a_frozen_network(guarded, returns):
  # It begins as a copy of the parameters. A result may be any of the arguments with its tree.
  tx = mpjax.loss_scaling(optax.adam(1e-3))
  step = make_step(tx, right)

  def averaged(teacher, params, average, opt_state, batch):
    params, opt_state, _ = step(params, opt_state, batch)
    new = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
    if guarded:
      new = mpjax.keep_if_skipped(opt_state, new, average)
    return params, new, opt_state, loss_fn(teacher, batch)

  args = FROZEN, PARAMS, PARAMS, tx.init(PARAMS), BATCH
  changed = refused(ValueError, WHERE, "when it is skipped", "another [1]['b']", "keep_if_skipped")
  with contextlib.nullcontext() if guarded else changed:
    mpjax.check_loss_scaling(averaged, returns=returns)(*args)


def test_a_keyword_argument_is_stated_by_its_name():
  tx = mpjax.loss_scaling(optax.adam(1e-3))
  step = make_step(tx, right)

  def averaged(opt_state, batch, *, params, average):
    params, opt_state, _ = step(params, opt_state, batch)
    new = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
    return {"new": (params, new), "opt_state": opt_state}

  returns = {"new": ("params", "average"), "opt_state": 0}
  got = "another ['new'][1]['b']"
  with refused(ValueError, WHERE, "when it is skipped", got, "keep_if_skipped"):
    checked = mpjax.check_loss_scaling(averaged, returns=returns)
    checked(tx.init(PARAMS), BATCH, params=PARAMS, average=FROZEN)


WRONG_RETURNS = {
  "no such position": (ValueError, (3, 1, None), "names of arguments: 0, 1, 2", "3"),
  "no such name": (ValueError, ("ema", 1, None), "names of arguments", "'ema'"),
  "another tree": (ValueError, (1, 0, None), "a new version of argument 1 at 0", "no array there"),
  "no position": (TypeError, (0, 1.5), "positions and names of arguments", "1.5"),
  "a flag": (TypeError, (True, 1), "positions and names of arguments", "True"),
  "too few": (ValueError, (0, 1), "an entry for each result", "none for 2"),
}


@pytest.mark.parametrize("kind", WRONG_RETURNS)
def test_pairs_that_do_not_fit_are_refused(kind):
  builtin, returns, expected, got = WRONG_RETURNS[kind]
  tx = mpjax.loss_scaling(optax.adam(1e-3))
  with refused(builtin, "mpjax.check_loss_scaling(returns)", expected, got, "argument"):
    check = mpjax.check_loss_scaling(make_step(tx, right), returns=returns)
    check(PARAMS, tx.init(PARAMS), BATCH)


def test_arguments_that_cannot_be_checked():
  tx = mpjax.loss_scaling(SGD)
  checked = mpjax.check_loss_scaling(make_step(tx, right))
  with refused(TypeError, WHERE, "created by mpjax.loss_scaling", "in the arguments", "Wrap"):
    checked(PARAMS, PARAMS, BATCH)
  with refused(TypeError, WHERE, "concrete arguments", "traced ones", "on the host"):
    jax.jit(checked)(PARAMS, tx.init(PARAMS), BATCH)
  with refused(ValueError, WHERE, "applied at the loss scale 1", "an inf or NaN", "another batch"):
    checked(PARAMS, tx.init(PARAMS), (BATCH[0] * jnp.nan, BATCH[1]))


@pytest.mark.parametrize("wrong", ["nothing of the state", "taken apart by another optimizer"])
def test_a_step_that_does_not_return_its_state(wrong):
  step = make_step(mpjax.loss_scaling(SGD) if wrong == "nothing of the state" else SGD, right)
  returned = (lambda *args: step(*args)[0]) if wrong == "nothing of the state" else step
  with ends(OLD_STATE):
    mpjax.check_loss_scaling(returned)(PARAMS, mpjax.loss_scaling(SGD).init(PARAMS), BATCH)


def test_calls_that_are_no_checks():
  tx = mpjax.loss_scaling(SGD)
  step, opt_state = make_step(tx, right), tx.init(PARAMS)
  got, fix = "too many positional arguments", "mpjax.check_loss_scaling(step)(*args)"
  with refused(TypeError, WHERE, "arguments step", got, fix):
    mpjax.check_loss_scaling(step, PARAMS, opt_state, BATCH)
  for got, kind in ((step(PARAMS, opt_state, BATCH), "a tuple"), (tx, "a GradientTransf")):
    with refused(TypeError, WHERE, "a training step", kind, fix):
      mpjax.check_loss_scaling(got)


@pytest.mark.parametrize("way", [right, never])
def test_a_wrapper_around_the_scale_is_refused(way):
  tx = optax.MultiSteps(mpjax.loss_scaling(SGD), 2)
  expected, got = "mpjax.loss_scaling around the entire optimizer", "state optax.MultiStepsState"
  with refused(TypeError, WHERE, expected, got, "mpjax.loss_scaling(optax.chain(...))"):
    mpjax.check_loss_scaling(make_step(tx, way))(PARAMS, tx.init(PARAMS), BATCH)


NNX_NEVER = NOT_SCALED.format(
  "dynamic", r"nnx\.value_and_grad\(mpjax\.scaled\(loss_fn, optimizer\)\)\(model, batch\)"
)
DROPPED = r"the new loss scale.*optimizer\.update\(model, grads\).* by nnx\.jit: jax\.jit drops"
NNX_KINDS = {
  "right": None,
  "never scaled": NNX_NEVER,
  "unused": NNX_NEVER,
  "keeps": None,
  "no update": DROPPED,
  "jax.jit": DROPPED,
  "returns gradients": None,
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

    scaled = loss_fn if kind == "never scaled" else mpjax.scaled(loss_fn, optimizer)
    loss, grads = nnx.value_and_grad(scaled)(model)
    if kind != "no update":
      optimizer.update(model, grads)
    return grads if kind == "returns gradients" else loss

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


def check_functional(returned, scaled=mpjax.scaled):
  """Checks a step for `jax.jit`, which drops writes, as in Flax's example of Gemma."""
  model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.adam(0.1)), wrt=nnx.Param)

  @jax.jit
  def step(model, optimizer, x):
    _, grads = nnx.value_and_grad(scaled(lambda m: jnp.mean(m(x) ** 2), optimizer))(model)
    optimizer.update(model, grads)
    return returned(model, optimizer)

  mpjax.check_loss_scaling(step)(model, optimizer, jnp.ones((2, 4)))


@pytest.mark.parametrize("kind", RETURNED_STATES)
def test_a_step_under_jax_jit_may_return_the_state_of_its_modules(kind):
  check_functional(RETURNED_STATES[kind])


def test_plain_gradients_are_found_in_a_state_that_is_returned():
  with ends(NNX_NEVER):
    check_functional(RETURNED_STATES["pure dicts"], lambda loss_fn, optimizer: loss_fn)


def test_a_step_under_jax_jit_that_drops_its_optimizer():
  # Its moments have the tree of the parameters, which are returned.
  with ends(DROPPED):
    check_functional(lambda model, optimizer: nnx.state(model))


@pytest.mark.parametrize("guarded", [True, False])
def test_what_a_skipped_step_changes_in_a_state_that_is_returned(guarded):
  model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.adam(0.1)), wrt=nnx.Param)

  def update(model, optimizer, x):
    grads = nnx.grad(mpjax.scaled(lambda m: jnp.mean(m(x) ** 4), optimizer))(model)
    optimizer.update(model, grads)

  @jax.jit
  def step(model, optimizer, x):
    (mpjax.nnx.atomic_step(update) if guarded else update)(model, optimizer, x)
    return nnx.state((model, optimizer))

  moves = refused(ValueError, WHERE, "when it is skipped", "[0]['mean']", "atomic_step")
  with contextlib.nullcontext() if guarded else moves:
    mpjax.check_loss_scaling(step)(model, optimizer, BATCH[0])


@pytest.mark.parametrize(("way", "how"), [(right, None), (never, NEVER)])
def test_a_train_state_of_flax(way, how):
  # Its count of steps begins as a Python int.
  tx = mpjax.loss_scaling(optax.sgd(0.1))
  state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

  def step(state, batch):
    loss, grads = way(state.params, state.opt_state, batch, loss_fn)
    return state.apply_gradients(grads=grads), loss

  with ends(how):
    mpjax.check_loss_scaling(step)(state, BATCH)


def test_a_step_that_tries_again_may_count_how_often():
  tx = mpjax.loss_scaling(optax.sgd(0.1))

  def step(params, opt_state, rows):
    def attempt(carry):
      params, opt_state, tries = carry
      grads = jax.grad(mpjax.scaled(lambda params: jnp.sum(params**2), opt_state))(params)
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state, tries + 1

    again = lambda carry: ~mpjax.step_applied(carry[1]) & (carry[2] < 3)  # noqa: E731
    first = attempt((params, opt_state, jnp.zeros((), jnp.int32)))
    params, opt_state, tries = jax.lax.while_loop(again, attempt, first)
    return params, opt_state, {"tries": tries}

  mpjax.check_loss_scaling(step)(jnp.ones(2), tx.init(jnp.ones(2)), jnp.asarray(3, jnp.int32))


@pytest.mark.parametrize(("way", "how"), [(right, None), (never, NEVER)])
@pytest.mark.parametrize("scale", [mpjax.DynamicLossScale(), mpjax.StaticLossScale(8)])
def test_several_steps_in_one_call(scale, way, how):
  # The scale stays NaN, so that all of them are skipped.
  tx = mpjax.loss_scaling(optax.adam(0.1), scale)
  step = make_step(tx, way)

  def run(carry, batches):
    body = lambda carry, batch: (step(*carry, batch)[:2], None)  # noqa: E731
    return jax.lax.scan(body, carry, batches)[0]

  batches = jax.tree.map(lambda x: jnp.stack([x, x + 1]), BATCH)
  with ends(how and how.replace("dynamic", ".*")):
    mpjax.check_loss_scaling(run)((PARAMS, tx.init(PARAMS)), batches)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "how"), [(right, None), (never, NEVER)])
def test_a_state_with_an_axis_of_vmap(way, how):
  tx = mpjax.loss_scaling(optax.adam(0.1))
  params = jax.tree.map(lambda x: jnp.stack([x, x + 1]), PARAMS)
  step = jax.vmap(make_step(tx, way), in_axes=(0, 0, None))
  with ends(how):
    mpjax.check_loss_scaling(step)(params, jax.vmap(tx.init)(params), BATCH)


UNNAMED = (None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "names", "how"),
  [
    ("right", UNNAMED, None),
    ("one is updated twice", UNNAMED, None),
    ("one never scales", UNNAMED, NEVER),
    ("one never scales", "ab", NOT_SCALED.format("b:dynamic", ".*opt_state, name='b'.*")),
    ("one state is selected", UNNAMED, OLD_STATE),
  ],
)
def test_of_two_optimizers_the_wrong_one_is_found(kind, names, how):
  txs = {k: mpjax.loss_scaling(SGD, name=name) for k, name in zip("ab", names, strict=True)}
  ways = {"a": right, "b": never if kind == "one never scales" else right}

  def step(params, old, batch):
    new = {k: make_step(tx, ways[k])(params[k], old[k], batch)[:2] for k, tx in txs.items()}
    if kind == "one is updated twice":
      new["b"] = make_step(txs["b"], right)(*new["b"], batch)[:2]
    params, states = ({k: pair[i] for k, pair in new.items()} for i in (0, 1))
    if kind == "one state is selected":
      states["b"] = mpjax.keep_if_skipped(states["b"], states["b"], old["b"])
    return params, states

  opt_states = {k: tx.init(PARAMS) for k, tx in txs.items()}
  if kind == "right":  # One state for both.
    opt_states["b"] = opt_states["a"]
  with ends(how):
    mpjax.check_loss_scaling(step)(dict.fromkeys("ab", PARAMS), opt_states, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
  ("way", "returned", "how"),
  [
    (right, "both states", None),
    (right, "its own state", None),
    (never, "both states", NEVER),
    (right, "both states, other averages", CHANGED),
  ],
)
def test_optimizers_that_take_turns(way, returned, how, turn):
  # The one whose turn it is not keeps its state, its scale and its network.
  tx = mpjax.loss_scaling(optax.adam(0.1))

  @jax.jit
  def step(networks, opt_states, averages, batch, turn):
    new = [make_step(tx, way)(*one, batch)[:2] for one in zip(networks, opt_states, strict=True)]
    networks, states = (
      [
        jax.tree.map(lambda x, y, i=i: jnp.where(turn == i, x, y), pair[k], old[i])
        for i, pair in enumerate(new)
      ]
      for k, old in ((0, networks), (1, opt_states))
    )
    if returned == "both states, other averages":
      averages = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, averages, networks)
    return networks, states, averages

  def one_state(*args):
    networks, states, averages = step(*args)
    return networks, states[turn], averages

  networks, opt_states = [PARAMS, FROZEN], [tx.init(PARAMS), tx.init(FROZEN)]
  skipped = step(networks, opt_states, networks, (BATCH[0] * jnp.nan, BATCH[1]), 1 - turn)[1]
  with ends(how):
    checked = mpjax.check_loss_scaling(one_state if returned == "its own state" else step)
    checked(networks, skipped, networks, BATCH, turn)


def test_a_variable_that_holds_no_array_after_the_step():
  tx = mpjax.loss_scaling(SGD)

  def step(params, opt_state, batch, kept):
    kept.set_raw_value((batch[0],))
    return make_step(tx, right)(params, opt_state, batch)

  args = PARAMS, tx.init(PARAMS), BATCH, nnx.Intermediate(jnp.ones(2))
  mpjax.check_loss_scaling(step)(*args)


def test_arguments_that_are_no_arrays_reach_the_step_as_they_are():
  tx = mpjax.loss_scaling(SGD)

  def step(params, opt_state, batch, seed, *, name, rate):
    assert (seed, name, rate) == (2**40, "a", 0.5)
    return *make_step(tx, right)(params, opt_state, batch), seed + 1

  mpjax.check_loss_scaling(step)(PARAMS, tx.init(PARAMS), BATCH, 2**40, name="a", rate=0.5)


def test_a_turn_of_an_optimizer_without_a_scale():
  # Nothing is skipped, so that there is nothing to check.
  scaled, plain = mpjax.loss_scaling(SGD), mpjax.loss_scaling(SGD, mpjax.NoLossScale())

  def step(params, opt_states, batch):
    params, state, _ = make_step(plain, never)(params, opt_states["plain"], batch)
    return params, opt_states | {"plain": state}

  opt_states = {"scaled": scaled.init(PARAMS), "plain": plain.init(PARAMS)}
  mpjax.check_loss_scaling(step)(PARAMS, opt_states, BATCH)


@pytest.mark.parametrize(("way", "how"), [(right, None), (never, NEVER)])
def test_a_state_of_nnx_that_is_returned_is_compared(way, how):
  # Its leaves are variables, to which nothing is written.
  model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model)
  tx = mpjax.loss_scaling(optax.sgd(0.1))

  def loss(params, batch, dtype):
    return jnp.mean((nnx.merge(graph, params)(batch[0])[:, 0] - batch[1]) ** 2)

  with ends(how):
    step = make_step(tx, way, loss_fn=loss)
    mpjax.check_loss_scaling(step)(params, tx.init(params), BATCH)


@pytest.mark.slow
def test_a_step_from_a_state_of_nnx_to_the_next():
  model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.adam(0.1)), wrt=nnx.Param)
  graph, state = nnx.split((model, optimizer))

  def step(state, replace=False):
    model, optimizer = nnx.merge(graph, state, copy=True)
    loss_fn = lambda m: jnp.mean(m(jnp.ones((2, 4))) ** 2)  # noqa: E731
    grads = nnx.grad(mpjax.scaled(loss_fn, optimizer))(model)
    optimizer.update(model, jax.tree.map(jnp.nan_to_num, grads) if replace else grads)
    return nnx.as_pure(nnx.state((model, optimizer)))

  mpjax.check_loss_scaling(step)(nnx.as_pure(state))
  with ends(NEVER):
    mpjax.check_loss_scaling(functools.partial(step, replace=True))(nnx.as_pure(state))
  with ends(OLD_STATE):
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


PLAIN, SCALED = penalised_by(jax.grad), penalised_by(lambda f: jax.grad(mpjax.scaled(f, 2.0**12)))


@pytest.mark.parametrize(
  ("loss", "dtype", "gradients", "is_found"),
  {
    "float16": (PLAIN, F16, right, True),
    "float16 under vmap": (PLAIN, F16, per_example, True),
    "float16 by autocast": (mpjax.autocast(PLAIN, "mixed_float16"), F32, right, True),
    "float16, scaled": (SCALED, F16, right, False),
    "float16 under vmap, scaled": (SCALED, F16, per_example, False),
    "float16 by autocast, scaled": (mpjax.autocast(SCALED, "mixed_float16"), F32, right, False),
    "no gradient inside": (loss_fn, F16, right, False),
    "bfloat16": (PLAIN, BF16, right, False),
    "float32": (PLAIN, F32, right, False),
  }.values(),
)
def test_a_float16_gradient_inside_of_the_loss_is_found(loss, dtype, gradients, is_found):
  text = r"gradients inside of the loss.*mpjax\.scaled\(fun, 2\.0\*\*12\)"
  found = pytest.warns(UserWarning, match=text)
  with found if is_found else contextlib.nullcontext() as caught:
    check(SGD, gradients, dtype, loss)
  assert not is_found or [one.filename for one in caught or ()] == [__file__]


@pytest.mark.parametrize(("way", "how"), [(right, None), (never, NEVER)])
def test_parameters_may_be_called_loss_scale(way, how):
  def loss(params, batch, dtype):
    return loss_fn(params["loss_scale"]["net"], batch, dtype)

  tx = mpjax.loss_scaling(optax.sgd(0.1))
  params = {"loss_scale": {"net": PARAMS}}
  with ends(how):
    mpjax.check_loss_scaling(make_step(tx, way, loss_fn=loss))(params, tx.init(params), BATCH)


@pytest.mark.parametrize(
  ("dropout", "atomic", "moves"), [(0.0, False, False), (0.5, True, False), (0.5, False, True)]
)
def test_tied_variables_of_nnx_and_counts_of_random_numbers(dropout, atomic, moves):
  def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(mpjax.scaled(lambda m: jnp.mean(m(x) ** 2), optimizer))(model)
    optimizer.update(model, grads)
    return loss

  rngs = nnx.Rngs(0)
  layers = [nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)]
  model = nnx.Sequential(*layers, nnx.Dropout(dropout, rngs=rngs))
  model.layers[1].kernel = model.layers[0].kernel
  kernels = optax.masked(ADAM, lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(kernels), wrt=nnx.Param)
  expected, got = "changes nothing when it is skipped", "rngs.count"
  found = refused(ValueError, WHERE, expected, got, "@mpjax.nnx.atomic_step")
  with found if moves else contextlib.nullcontext():
    step = nnx.jit(mpjax.nnx.atomic_step(step) if atomic else step)
    mpjax.check_loss_scaling(step)(model, optimizer, jnp.ones((2, 4)))


def test_a_right_step_passes_while_jax_looks_for_nans():
  with jax.debug_nans(True), jax.disable_jit():
    check(SGD, right)
