import functools
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._core.errors import kind_of
from tests.errors import refused
from tests.programs import assert_bit_equal

SCALE = 2.0**10
TX = mpjax.loss_scaling(optax.sgd(1.0), mpjax.StaticLossScale(SCALE))
STATE = TX.init(jnp.ones(3))


def mlp(params, x, *, shift=0.0):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - shift) ** 2)


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


PARAMS, X = {"w": normal(0, 5, 7), "v": normal(1, 7)}, normal(2, 4, 5)


def scaled(grads):
  return jax.tree.map(lambda g: g * SCALE, grads)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_loss_is_plain_and_gradients_are_scaled_exactly(wrap):
  loss, grads = wrap(mpjax.value_and_grad(mlp, STATE))(PARAMS, X, shift=0.5)
  expected, plain = wrap(jax.value_and_grad(mlp))(PARAMS, X, shift=0.5)
  assert_bit_equal((loss, grads), (expected, scaled(plain)))
  # What value_and_grad multiplied, update divides out again: nobody can forget one of the two.
  updates, _ = TX.update(grads, STATE, PARAMS)
  assert_bit_equal(updates, jax.tree.map(lambda g: -g, plain))


@pytest.mark.parametrize("has_aux", [False, True])
def test_same_arguments_as_jax(has_aux):
  def fun(params, x):
    loss = mlp(params, x)
    return (loss, {"n": 3, "x": x}) if has_aux else loss

  for argnums in (0, 1, (0, 1), (1,), -1):
    found = mpjax.value_and_grad(fun, STATE, argnums, has_aux)(PARAMS, X)
    expected, plain = jax.value_and_grad(fun, argnums, has_aux)(PARAMS, X)
    assert_bit_equal(found, (expected, scaled(plain)))
  assert mpjax.value_and_grad(fun, STATE).__name__ == "fun"
  assert mpjax.value_and_grad(functools.partial(mlp, shift=1.0), STATE)(PARAMS, X)[0].shape == ()


def test_a_scale_adds_two_equations_and_no_loss_scale_none():
  # The loss times the scale, and the cotangent times the scale.
  off = mpjax.loss_scaling(optax.adam(1e-3), mpjax.NoLossScale()).init(PARAMS)
  plain = jax.make_jaxpr(jax.value_and_grad(mlp))(PARAMS, X)
  assert str(jax.make_jaxpr(mpjax.value_and_grad(mlp, off))(PARAMS, X)) == str(plain)
  with_scale = jax.make_jaxpr(mpjax.value_and_grad(mlp, STATE))(PARAMS, X)
  assert len(with_scale.eqns) <= len(plain.eqns) + 2


def test_gradient_penalty():
  # The gradient inside the loss is of the plain loss; only the sum is scaled.
  def penalised(params, x):
    inner = jax.grad(mlp)(params, x)
    return mlp(params, x) + 0.5 * optax.tree.norm(inner) ** 2

  loss, grads = mpjax.value_and_grad(penalised, STATE)(PARAMS, X)
  expected = jax.value_and_grad(penalised)(PARAMS, X)
  assert_bit_equal((loss, mpjax.unscale(grads, STATE)), expected)

  # And it can itself be differentiated.
  def norm(grads):
    return lambda params: optax.tree.norm(grads(params, X), squared=True)

  found = jax.grad(norm(lambda *args: mpjax.value_and_grad(mlp, STATE)(*args)[1]))(PARAMS)
  assert_bit_equal(found, scaled(scaled(jax.grad(norm(jax.grad(mlp)))(PARAMS))))


def test_vmap_over_members_and_over_data():
  tx = mpjax.loss_scaling(optax.sgd(1.0))
  members = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), PARAMS)
  states, factors = jax.vmap(tx.init)(members), jnp.asarray([1.0, 4.0, 16.0])
  scale = states.loss_scale["dynamic"]._replace(scale=factors)
  states = states._replace(loss_scale={"dynamic": scale})
  found = jax.vmap(lambda p, s: mpjax.value_and_grad(mlp, s)(p, X))(members, states)
  losses, plain = jax.vmap(lambda p: jax.value_and_grad(mlp)(p, X))(members)
  # Powers of two: equal to the bit. (One member alone is other dots, with other roundings.)
  expected = jax.tree.map(lambda g: jax.vmap(jnp.multiply)(g, factors), plain)
  assert_bit_equal(found, (losses, expected))
  per_example = jax.vmap(mpjax.value_and_grad(mlp, STATE), in_axes=(None, 0))(PARAMS, X)
  assert per_example[0].shape == (4,)


def test_allow_int():
  params = {"w": jnp.asarray(2.0), "n": jnp.asarray(3)}
  fun = lambda p: p["w"] * p["n"]  # noqa: E731
  _, grads = mpjax.value_and_grad(fun, STATE, allow_int=True)(params)
  assert grads["n"].dtype == jax.dtypes.float0
  with pytest.raises(TypeError, match="int32"):
    mpjax.value_and_grad(fun, STATE)(params)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_a_float16_loss_takes_any_scale(dtype):
  # A step was lost at each growth beyond 2^15, for ever.
  numbers = np.asarray([1.0, 3.0, 0.0])

  def fun(params):
    return jnp.sum(params.astype(jnp.float16) ** 2 / 2**14)

  grad_fn = jax.jit(lambda p, s: mpjax.value_and_grad(fun, s)(p))
  state, params = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(3)), jnp.asarray(numbers, dtype)
  for scale in (2.0**14, 2.0**16, 2.0**24):
    loss, grads = grad_fn(params, mpjax.states.set_loss_scale(state, scale))
    assert loss.dtype == jnp.float16
    assert_bit_equal(grads, (numbers * 2 / 2**14 * scale).astype(dtype))


def test_a_zero_gradient_is_zero_at_a_scale_beyond_float16():
  # The factor beyond 2^15 would be inf in float16, and its product with 0 is NaN.
  state = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(2.0**40)).init(jnp.ones(2))
  _, grads = mpjax.value_and_grad(lambda p: jnp.sum(p * p), state)(jnp.zeros(2, jnp.float16))
  assert grads.tolist() == [0, 0]


def test_what_is_no_loss():
  p, floating = jnp.asarray(1.0), ("a floating scalar", "jnp.mean")
  pair, aux = ("a pair (loss, aux)", "Drop has_aux=True, or return (loss, aux)"), {"aux": 1}
  for out, has_aux, builtin, (expected, fix), got in (
    (jnp.ones(2), False, ValueError, floating, "shape (2,)"),
    *((x, False, TypeError, floating, kind_of(x)) for x in (None, {"loss": p}, jnp.asarray(2j))),
    *((x, True, TypeError, pair, kind_of(x)) for x in (1.0, (1.0, 2.0, 3.0))),
    ((p, aux), False, TypeError, ("a floating scalar", "Pass has_aux=True, or return"), "a tuple"),
  ):
    with refused(builtin, "mpjax.value_and_grad(fun): the loss", expected, got, fix):
      mpjax.value_and_grad(lambda p, out=out: out, STATE, has_aux=has_aux)(p)
  # The arguments of the loss in the wrong place.
  where, fix = "mpjax.value_and_grad(argnums)", "Write mpjax.value_and_grad(loss_fn, opt_state)"
  for rest, got in ((p, p), "an array float32[]"), (("params",), "'params'"):
    with refused(TypeError, where, "positions of arguments", got, fix):
      mpjax.value_and_grad(lambda p: p, STATE, *rest)


GROWING = mpjax.DynamicLossScale(init_scale=64, growth_interval=2)
DYNAMIC = mpjax.loss_scaling(optax.sgd(0.1), GROWING)
WHERE = "mpjax.value_and_grad(fun, opt_state)"
FIX = "mpjax.value_and_grad(loss_fn, opt_state)(params, batch)"


def square(p, x=1.0):
  return jnp.sum(p**2) * x


@pytest.mark.parametrize("config", [mpjax.DynamicLossScale(), mpjax.StaticLossScale(8)])
def test_a_state_that_was_donated_is_refused(config):
  tx, params = mpjax.loss_scaling(optax.sgd(0.1), config), jnp.ones(1)
  state = tx.init(params)
  grad_fn = mpjax.value_and_grad(square, state)
  _, grads = grad_fn(params)
  jax.jit(lambda s: tx.update(grads, s, params)[1], donate_argnums=0)(state)
  got = "a state that was donated"
  with refused(RuntimeError, WHERE, "the state that this step updates", got, FIX):
    grad_fn(params)


def test_a_function_goes_on_reading_the_scale_of_its_state(collect):
  # Whether or not somebody keeps the old state, and whether or not the collector has run.
  params, state = jnp.ones(1), DYNAMIC.init(jnp.ones(1))
  grad_fn = mpjax.value_and_grad(square, state)
  for _ in range(3):
    assert grad_fn(params)[1] == 128
    state = mpjax.states.set_loss_scale(state, 8)
    collect()


def test_built_outside_of_a_compiled_step_is_refused():
  # There the scale of the first step would be a constant of the program.
  opt_state = DYNAMIC.init(jnp.ones(1))
  grad_fn = mpjax.value_and_grad(square, opt_state)
  for call in (
    lambda: jax.jit(jax.vmap(grad_fn))(jnp.ones((2, 1))),
    lambda: jax.lax.scan(lambda p, x: (p, grad_fn(p, x)[1]), jnp.ones(1), jnp.ones(2)),
    lambda: jax.eval_shape(grad_fn, jnp.ones(1)),
    lambda: jax.checkpoint(grad_fn)(jnp.ones(1)),
  ):
    expected, got = "the loss scale of the state", "outside of the function that is being traced"
    with refused(RuntimeError, WHERE, expected, got, "as an argument to jit"):
      call()


@pytest.mark.parametrize(
  ("name", "use"),
  {
    "unscale": lambda p, s: mpjax.unscale(p, s),
    "states.set_loss_scale": lambda p, s: mpjax.states.set_loss_scale(s, p[0]),
    "loss_scaling_metrics": lambda p, s: mpjax.loss_scaling_metrics(s),
    "step_applied": lambda p, s: mpjax.step_applied(s),
  }.items(),
)
def test_a_state_from_outside_of_a_compiled_function_is_refused(name, use):
  # The scale of the first step would stay for ever: steps shrank to a half, a quarter, ...
  params, state = jnp.ones(1), DYNAMIC.init(jnp.ones(1))
  got, fix = "outside of the function that is being traced", "inside of the step"
  with refused(RuntimeError, f"mpjax.{name}(opt_state)", "of the state", got, fix):
    jax.jit(lambda p: use(p, state))(params)
  use(params, state)
  jax.jit(use)(params, state)


def test_built_in_the_step_is_never_refused():
  # In eager code, in jit, over micro-batches in a scan, under vmap and grad, of a new state.
  params = jnp.asarray([1.0, 2.0])

  def step(params, opt_state):
    grad_fn = mpjax.value_and_grad(square, opt_state)
    body = lambda total, x: (total + grad_fn(params, x)[1], None)  # noqa: E731
    grads, _ = jax.lax.scan(body, jnp.zeros(2), jnp.asarray([0.25, 0.75]))
    updates, opt_state = DYNAMIC.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def run(step):
    p, state = params, DYNAMIC.init(params)
    for _ in range(5):
      p, state = step(p, state)
    return p

  for wrap in (lambda f: f, jax.jit):
    np.testing.assert_allclose(run(wrap(step)), params * 0.8**5, rtol=1e-6)
  once = jax.jit(lambda p: step(p, DYNAMIC.init(p))[0])(params)
  np.testing.assert_allclose(once, params * 0.8, rtol=1e-6)
  state = DYNAMIC.init(params)
  grad_fn = mpjax.value_and_grad(square, state)
  assert jax.vmap(grad_fn)(params)[1].tolist() == [128, 256]
  assert jax.grad(lambda p: grad_fn(p)[0])(params).tolist() == [2, 4]
  # With the state as an argument, where a constant one is refused.
  of_both = lambda p, s: mpjax.value_and_grad(square, s)(p)[1]  # noqa: E731
  assert jax.eval_shape(of_both, params, state).shape == (2,)
  assert jax.checkpoint(of_both)(params, state).tolist() == [128, 256]
  loop = lambda i, carry: (of_both(*carry) / 64, carry[1])  # noqa: E731
  assert jax.lax.fori_loop(0, 2, loop, (params, state))[0].tolist() == [4, 8]
  # A state that nobody keeps, to look at gradients: the first call may come after it.
  look = mpjax.value_and_grad(square, DYNAMIC.init(params))
  assert look(params)[1].tolist() == look(params + 0)[1].tolist() == [128, 256]


@pytest.mark.parametrize("config", [mpjax.StaticLossScale(8), mpjax.NoLossScale()])
def test_a_scale_that_never_moves_may_be_built_in_once(config):
  tx = mpjax.loss_scaling(optax.sgd(0.1), config)
  params = jnp.asarray([1.0])
  state = tx.init(params)
  grad_fn = mpjax.value_and_grad(square, state)
  for call in (jax.jit(grad_fn), grad_fn):
    for _ in range(3):
      updates, state = tx.update(call(params)[1], state, params)
      np.testing.assert_allclose(updates, -0.2 * params, rtol=1e-6)
      params = optax.apply_updates(params, updates)


def test_the_function_keeps_no_moments_alive(collect):
  state = mpjax.loss_scaling(optax.adam(0.1)).init(PARAMS)
  moment = weakref.ref(state.inner_state[0].mu["w"])
  grad_fn = mpjax.value_and_grad(mlp, state)
  del state
  collect()
  assert moment() is None
  assert grad_fn(PARAMS, X)[1]["w"].shape == PARAMS["w"].shape


def mlp_of_equinox():
  """Returns a model with a function among its leaves."""
  return eqx.nn.MLP(5, 5, 7, 1, activation=jnp.tanh, key=jax.random.key(0))


def mean_square(model, x):
  return jnp.mean(jax.vmap(model)(x) ** 2)


def test_equinox_differentiates_an_equinox_model():
  model = mlp_of_equinox()
  fun = lambda m, x: (mean_square(m, x), "aux")  # noqa: E731
  differentiator = eqx.filter_value_and_grad
  grad_fn = mpjax.value_and_grad(fun, STATE, has_aux=True, differentiator=differentiator)
  found, grads = eqx.filter_jit(grad_fn)(model, X)
  expected, plain = eqx.filter_jit(differentiator(fun, has_aux=True))(model, X)
  assert found == expected
  assert grads.activation is None
  assert_bit_equal(grads, scaled(plain))


def test_a_model_is_told_who_differentiates_it():
  fix = "differentiator=equinox.filter_value_and_grad"
  with refused(TypeError, f"{WHERE}(params)", "floating arrays", "an equinox.Module (MLP)", fix):
    mpjax.value_and_grad(mean_square, STATE)(mlp_of_equinox(), X)


def test_a_call_with_arguments_missing_unknown_or_swapped():
  for call, expected, got in (
    (lambda: mpjax.value_and_grad(mlp), "arguments fun, opt_state", "'opt_state'"),
    (lambda: mpjax.value_and_grad(mlp, STATE, aux=True), "has_aux", "'aux'"),
    (lambda: mpjax.value_and_grad(STATE, mlp), "first argument", "a LossScalingState"),
    (lambda: mpjax.value_and_grad(TX, STATE), "first argument", kind_of(TX)),
  ):
    fix = "mpjax.value_and_grad(loss_fn, opt_state)("
    with refused(TypeError, "mpjax.value_and_grad(fun", expected, got, fix):
      call()
  where, got = "mpjax.value_and_grad(opt_state)", "a GradientTransformationExtraArgs"
  with refused(TypeError, where, "state", got, "tx.init(params)"):
    mpjax.value_and_grad(mlp, TX)
