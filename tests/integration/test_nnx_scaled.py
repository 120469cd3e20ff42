"""`mpjax.scaled` losses of NNX modules: float16 in three lines, the rest as NNX does it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused

SCALE = 2.0**10
TX = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(SCALE))


class Net(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(4, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.drop = nnx.Dropout(0.2, rngs=rngs)
    self.head = nnx.Linear(8, 3, rngs=rngs)

  def __call__(self, x):
    return self.head(self.drop(nnx.relu(self.norm(self.first(x)))))

  def loss(self, x):
    return jnp.mean(self(x) ** 2)


X = jax.random.normal(jax.random.key(1), (8, 4))


def loss_fn(model, x, power=2):
  return jnp.mean(model(x) ** power)


def loss_and_aux(model, x):
  out = model(x)
  return jnp.mean(out**2), {"out": out}


def numbers(tree):
  state = nnx.state(tree, nnx.Not(nnx.RngKey))
  return [np.asarray(x) for x in jax.tree.leaves(nnx.to_pure_dict(state))]


def assert_equal(found, expected):
  assert len(found) == len(expected) > 0
  for a, b in zip(found, expected, strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


HEAD = nnx.PathContains("head")
PARTIAL = jax.tree_util.Partial(loss_fn, power=2)  # Flax reads no signature of one.
SCALED = {
  # What is differentiated, options, what is done to the call, which parameters the optimizer has,
  # what is given of it.
  "a partial": (PARTIAL, {}, lambda call: call, nnx.Param, lambda optimizer: optimizer),
  "with aux, in jit": (loss_and_aux, {"has_aux": True}, nnx.jit, nnx.Param, lambda o: o),
  "some": (loss_fn, {"argnums": nnx.DiffState(0, HEAD)}, lambda call: call, HEAD, lambda o: o),
  "pure state": (loss_fn, {}, nnx.jit, nnx.Param, lambda o: nnx.as_pure(o.opt_state)),
  "state of optax": (loss_fn, {}, nnx.jit, nnx.Param, lambda o: TX.init({"w": jnp.ones(2)})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALED)
def test_it_is_the_plain_loss_to_nnx_value_and_grad(name):
  # Loss, aux, gradients, batch statistics and random counters, all equal to the bit.
  fun, options, wrap, wrt, given = SCALED[name]
  ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(ours, TX, wrt=wrt)
  call = wrap(lambda m, o, x: nnx.value_and_grad(mpjax.scaled(fun, given(o)), **options)(m, x))
  found, grads = call(ours, optimizer, X)
  expected, plain = wrap(lambda m, x: nnx.value_and_grad(fun, **options)(m, x))(theirs, X)
  assert_equal(jax.tree.leaves(found), jax.tree.leaves(expected))
  assert isinstance(grads, nnx.State)
  assert jax.tree.structure(grads) == jax.tree.structure(plain)
  assert_equal(jax.tree.leaves(grads), jax.tree.leaves(plain))
  assert_equal(numbers(ours), numbers(theirs))
  assert int(ours.drop.rngs.count[...]) == 1
  assert np.any(np.asarray(ours.norm.mean[...]))
  optimizer.update(ours, grads)


def test_a_split_model_has_the_gradients_of_the_model():
  # `jax.value_and_grad` differentiates the parameters of a functional step.
  model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  loss, grads = nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))(model, X)
  graphdef, params = nnx.split(model, nnx.Param)
  of_params = lambda params: loss_fn(nnx.merge(graphdef, params), X)  # noqa: E731
  for state in (TX.init(params), optimizer):
    again, of_split = jax.value_and_grad(mpjax.scaled(of_params, state))(params)
    assert float(again) == float(loss)
    assert_equal(jax.tree.leaves(of_split), jax.tree.leaves(grads))


@pytest.mark.slow
def test_a_module_that_is_not_differentiated_keeps_what_the_function_writes():
  ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(ours, TX, wrt=nnx.Param)
  of_input = lambda x, model: (loss_fn(model, x), "aux")  # noqa: E731
  (loss, aux), grads = nnx.value_and_grad(mpjax.scaled(of_input, optimizer), has_aux=True)(X, ours)
  (expected, _), plain = nnx.value_and_grad(of_input, has_aux=True)(X, theirs)
  assert (float(loss), aux) == (float(expected), "aux")
  assert_equal([grads], [plain])
  assert_equal(numbers(ours), numbers(theirs))


def test_writes_to_variables_outside_of_a_module_are_kept():
  model = {"w": nnx.Param(jnp.ones(2)), "seen": nnx.BatchStat(jnp.zeros(()))}

  def counted(model):
    model["seen"][...] += 1.0
    return jnp.sum(model["w"][...] ** 2)

  step = nnx.jit(lambda model, state: nnx.value_and_grad(mpjax.scaled(counted, state))(model)[0])
  step(model, TX.init(jnp.ones(2)))
  assert model["seen"][...] == 1


def test_a_state_beside_the_parameters_may_be_written_to():
  ours, theirs = (nnx.BatchNorm(4, rngs=nnx.Rngs(0)) for _ in range(2))
  optimizer = nnx.Optimizer(ours, TX, wrt=nnx.Param)

  def step(norm, differentiate):
    graphdef, params, rest = nnx.split(norm, nnx.Param, ...)
    of_parts = lambda params, rest: loss_fn(nnx.merge(graphdef, params, rest), X)  # noqa: E731
    return differentiate(of_parts)(params, rest)[0]

  loss = nnx.jit(lambda m, o: step(m, lambda f: nnx.value_and_grad(mpjax.scaled(f, o))))(
    ours, optimizer
  )
  assert float(loss) == float(nnx.jit(lambda m: step(m, nnx.value_and_grad))(theirs))
  assert_equal(numbers(ours), numbers(theirs))


def test_modules_in_a_dict_are_modules():
  models = {"a": nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "b": nnx.Linear(4, 4, rngs=nnx.Rngs(1))}
  state = TX.init(nnx.state(models, nnx.Param))
  both = lambda models, x: loss_fn(models["a"], models["b"](x))  # noqa: E731
  loss, grads = nnx.value_and_grad(mpjax.scaled(both, state))(models, X)
  expected, plain = nnx.value_and_grad(both)(models, X)
  assert float(loss) == float(expected)
  assert_equal(jax.tree.leaves(grads), jax.tree.leaves(plain))


@pytest.mark.slow
def test_a_view_is_differentiated_like_its_model():
  # The one-line way: a view before everything, the optimizer and the gradients of it.
  view = mpjax.nnx.with_policy(Net(nnx.Rngs(0)), "mixed_float16")
  optimizer = nnx.Optimizer(view, TX, wrt=nnx.Param)
  model = Net(nnx.Rngs(0))
  inside = lambda m, x: loss_fn(mpjax.nnx.with_policy(m, "mixed_float16"), x)  # noqa: E731
  loss, grads = nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))(view, X)
  expected, plain = nnx.value_and_grad(mpjax.scaled(inside, optimizer))(model, X)
  assert loss == expected
  assert jax.tree.structure(grads) == jax.tree.structure(plain)
  assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype("float32")}
  assert_equal(jax.tree.leaves(grads), jax.tree.leaves(plain))
  assert_equal([np.asarray(view.norm.mean[...])], [np.asarray(model.norm.mean[...])])
  optimizer.update(view, grads)


@pytest.mark.slow
def test_the_scale_of_an_optimizer_is_read_at_each_call_and_can_be_set():
  # Built once, outside of the loop, it follows the scale: 4, 4, 8, 8, 16, and then 64.
  tx = mpjax.loss_scaling(optax.sgd(0.5), mpjax.DynamicLossScale(init_scale=4, growth_interval=2))
  model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  seen = []
  watched = jax.custom_vjp(lambda x: x)
  watched.defvjp(lambda x: (x, None), lambda _, ct: (seen.append(float(ct)), ct)[1:])
  total = lambda model: watched(jnp.sum(model(jnp.ones((1, 2)))))  # noqa: E731
  grad_fn = nnx.value_and_grad(mpjax.scaled(total, optimizer))
  for scale in (4, 4, 8, 8, 16, 64):
    if scale == 64:
      assert mpjax.states.set_loss_scale(optimizer, scale) is optimizer
    _, grads = grad_fn(model)
    assert grads["kernel"][...].tolist() == [[1], [1]]
    before = model.kernel[...]
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.kernel[...], before - 0.5, rtol=1e-6)
  assert seen == [4, 4, 8, 8, 16, 64]
  # The optimizer itself says so, in arrays.
  metrics = mpjax.loss_scaling_metrics(optimizer)
  assert all(isinstance(x, jax.Array) for x in metrics.values())
  assert metrics["total"] == 6
  mpjax.check_skipped_steps(optimizer, 1)


# Mistakes

CALL, NO_SCALE = "mpjax.scaled(loss_fn, opt_state)", "without a loss scale"
PASS = "Pass an nnx.Optimizer(model, mpjax.loss_scaling(tx), wrt=nnx.Param)"
MISTAKES = {
  # What is called with a model and its optimizer, where, what was expected, what came, what to do.
  "method": (
    lambda m, o: nnx.value_and_grad(mpjax.scaled(m.loss, o)),
    *(CALL, "given the model as an argument", "a method of the model (Net.loss)"),
    "lambda model, x: model.loss(x)",
  ),
  "the model as the loss": (
    lambda m, o: mpjax.scaled(m, o),
    *(CALL, "given the model as an argument", "a flax.nnx.Module (Net)"),
    "lambda model, x: loss(model(x))",
  ),
  "no optimizer": (
    lambda m, o: mpjax.scaled(loss_fn),
    *(CALL, "arguments loss_fn, opt_state", "'opt_state'"),
    "jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params, batch)",
  ),
  "no scale": (
    lambda m, o: jax.value_and_grad(
      mpjax.scaled(loss_fn, nnx.Optimizer(m, optax.sgd(1), wrt=nnx.Param))
    ),
    *("mpjax.scaled(opt_state)", "mpjax.loss_scaling"),
    *(f"an Optimizer {NO_SCALE}", PASS),
  ),
  "the model": (
    lambda m, o: jax.value_and_grad(mpjax.scaled(loss_fn, m)),
    *("mpjax.scaled(opt_state)", "mpjax.loss_scaling", f"a Net {NO_SCALE}", PASS),
  ),
  "swapped": (
    lambda m, o: jax.value_and_grad(mpjax.scaled(o, loss_fn)),
    *("mpjax.scaled(loss_fn)", "as the first argument", "an Optimizer"),
    "jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params, batch)",
  ),
  "from outside of a compiled step": (
    lambda m, o: nnx.jit(nnx.value_and_grad(mpjax.scaled(loss_fn, o)))(m, X),
    *(CALL, "the state that this step updates"),
    *("outside of the function that is being traced", "inside of the step"),
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
  call, where, expected, got, fix = MISTAKES[name]
  builtin = RuntimeError if "outside" in name else TypeError
  model = Net(nnx.Rngs(0))
  tx = mpjax.loss_scaling(optax.sgd(0.1)) if "outside" in name else TX
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  with refused(builtin, where, expected, got, fix):
    call(model, optimizer)
