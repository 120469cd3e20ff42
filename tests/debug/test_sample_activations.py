import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._jaxpr.reader import walk
from tests.errors import refused

X = np.asarray([[1.0, -3.0, 0.0, 2.0**-3]], np.float32)


def scoped(name, fn=lambda x: x * 2):
  return jax.named_scope(name)(fn)


def loss_fn(x):
  return jnp.sum(scoped("layer")(x))


def sample(fn, globs, *args, every=1, wrap=jax.jit):
  """Returns the statistics of one call, as numbers."""
  tx = mpjax.monitor_activations(optax.sgd(0.1), globs, every=every)
  measure = wrap(lambda opt_state, *args: mpjax.sample_activations(fn, opt_state)(*args))
  return numbers(measure(tx.init(jnp.ones(2)), *args))


def numbers(opt_state):
  statistics = mpjax.states.activation_statistics(opt_state)
  return {glob: tuple(map(float, row)) for glob, row in statistics.items()}


def expected(*arrays):
  """Returns the statistics of some arrays, computed by NumPy."""
  wide = [np.abs(np.asarray(x).astype(np.float64)) for x in arrays]
  limits = [jnp.finfo(x.dtype) for x in arrays]
  finite = [np.max(x, where=np.isfinite(x), initial=0) for x in wide]
  with np.errstate(divide="ignore"):
    headroom = [np.float64(x.max) / y for x, y in zip(limits, finite, strict=True)]
  subnormal = [(x > 0) & (x < float(y.smallest_normal)) for x, y in zip(wide, limits, strict=True)]
  return (
    sum(x.size for x in wide),
    sum(np.sum(~np.isfinite(x)) for x in wide),
    sum(map(np.sum, subnormal)),
    max(finite),
    min(headroom) if all(np.all(np.isfinite(x)) for x in wide) else 0,
  )


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
def test_statistics_equal_those_of_numpy(dtype):
  tiny = float(jnp.finfo(dtype).smallest_normal) / 2
  x = np.asarray([1.0, -3e4, 0.0, tiny, -tiny, np.inf, np.nan, 0.1], dtype)
  found = sample(lambda x: jnp.sum(scoped("layer", jnp.negative)(x)), "layer", x)["layer"]
  np.testing.assert_allclose(found, expected(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_small_formats_have_statistics(dtype):
  x = np.asarray([1.0, -3.0, 0.0, 0.5, 2.0**-7], jnp.dtype(dtype))

  def loss_fn(x):
    return jnp.sum(scoped("layer", lambda x: (x * 2).astype(dtype) * 1)(x).astype(jnp.float32))

  found = sample(loss_fn, "layer", x.astype(np.float32))["layer"]
  assert found == pytest.approx(expected((x.astype(np.float32) * 2).astype(x.dtype)))


@pytest.mark.parametrize("wrong", [False, True])
def test_find_nonfinite_takes_no_headroom_for_the_fault(wrong):
  tx = mpjax.monitor_activations(mpjax.loss_scaling(optax.sgd(0.1)), "layer")

  def loss_fn(w, x):
    x = scoped("layer")(w * x)
    return jnp.sum(jnp.log(x) if wrong else x)

  def step(w, opt_state, x):
    opt_state = mpjax.sample_activations(loss_fn, opt_state)(w, x)
    loss, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(w, x)
    return tx.update(grads, opt_state, w), loss

  w = jnp.ones(3)
  report = mpjax.find_nonfinite(step)(w, tx.init(w), jnp.zeros(3))
  assert report.operation == ("log" if wrong else None)


def test_float64_has_the_headroom_of_its_own():
  with jax.enable_x64(True):
    x = np.asarray([1e305, -1.0])
    found = sample(lambda x: jnp.sum(scoped("layer", jnp.negative)(x)), "layer", x)["layer"]
  assert found[4] == pytest.approx(np.finfo(np.float64).max / 1e305)


def test_modules_of_one_glob_share_a_row():
  def loss_fn(x):
    for i in range(3):
      x = scoped(f"layer_{i}")(x)
    return jnp.sum(x)

  found = sample(loss_fn, ["layer_*", "layer_1"], X)
  assert found["layer_*"] == pytest.approx(expected(2 * X, 4 * X, 8 * X))
  assert found["layer_1"] == pytest.approx(expected(4 * X))


def test_values_used_inside_alone_do_not_count():
  def masked(x):
    return jnp.where(x < 0, -jnp.inf, x).max() + x

  found = sample(lambda x: jnp.sum(scoped("layer", masked)(x)), "layer", X)
  assert found["layer"] == pytest.approx(expected(X.max() + X))


def test_matmuls_inside_count():
  def attend(x):
    return nn.softmax(x @ x.T) @ x

  x = np.concatenate([X, -X])
  found = sample(lambda x: jnp.sum(scoped("layer", attend)(x)), "layer", x)
  assert found["layer"][0] == 2 * 2 + 2 * 4
  assert found["layer"][3] == np.max(x @ x.T)


def test_values_for_modules_inside_count():
  def outer(x):
    return scoped("inner")(x * 100)

  found = sample(lambda x: jnp.sum(scoped("outer", outer)(x)), ["outer", "outer/inner"], X)
  assert found["outer"] == pytest.approx(expected(100 * X, 200 * X))
  assert found["outer/inner"] == pytest.approx(expected(200 * X))


def test_the_empty_path_is_all():
  found = sample(loss_fn, ["", "layer"], X)
  assert found[""] == found["layer"]


def test_a_model_of_one_layer():
  model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
  assert sample(lambda model, x: jnp.sum(model(x)), "**", model, X)["**"][0] == 2


def test_a_view_that_the_loss_makes():
  def loss_fn(model, x):
    return jnp.mean(mpjax.with_policy(model, "mixed_float16")(x))

  model = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)))
  assert sample(loss_fn, "layers/0", model, X)["layers/0"][4] < 65504 / 0.01


def scan(x):
  return jax.lax.scan(lambda c, _: (scoped("layer")(c), None), x, None, length=3)[0]


def scan_of_remat(x):
  step = jax.checkpoint(scoped("layer"))
  return jax.lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]


def unrolled(x):
  for _ in range(3):
    x = scoped("other", lambda x: -x)(jax.jit(scoped("layer"))(x))
  return x


def while_loop(x):
  state = (0, x)
  return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, scoped("layer")(s[1])), state)[
    1
  ]


@pytest.mark.parametrize("fn", [scan, scan_of_remat, unrolled, while_loop])
def test_each_iteration_counts(fn):
  found = sample(lambda x: jnp.sum(fn(x)), "layer", X)
  assert found["layer"] == pytest.approx(expected(2 * X, 4 * X, 8 * X))


def test_a_while_under_vmap():
  counts = jnp.asarray([0, 2])

  def one(count, x):
    more = lambda s: s[0] < count  # noqa: E731
    return jax.lax.while_loop(more, lambda s: (s[0] + 1, scoped("layer")(s[1])), (0, x))[1]

  found = sample(lambda x: jnp.sum(jax.vmap(one, (0, None))(counts, x)), "layer", X)
  assert found["layer"][3] == 12


@pytest.mark.parametrize("taken", [True, False])
def test_the_branch_that_runs_counts(taken):
  def loss_fn(x, taken):
    return jnp.sum(jax.lax.cond(taken, scoped("layer"), lambda x: x, x))

  found = sample(loss_fn, "layer", X, taken)
  assert found["layer"] == pytest.approx(expected(2 * X) if taken else (0, 0, 0, 0, np.inf))


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x + nn.Dense(4, name="down")(nn.gelu(nn.Dense(8, name="up")(x)))


class Stack(nn.Module):
  scanned: bool = False

  @nn.compact
  def __call__(self, x):
    block = nn.remat(Block)
    if not self.scanned:
      for i in range(2):
        x = block(name=f"layer_{i}")(x)
      return nn.Dense(2, name="head")(x)
    layers = nn.scan(
      lambda block, x, _: (block(x), None),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=2,
    )
    return nn.Dense(2, name="head")(layers(block(name="layers"), x, None)[0])


@pytest.mark.parametrize("policy", [None, "mixed_float16"])
def test_paths_of_linen_begin_at_the_model(policy):
  model = Stack() if policy is None else mpjax.with_policy(Stack(), policy)
  params = model.init(jax.random.key(0), X)
  found = sample(lambda params, x: jnp.sum(model.apply(params, x)), ["*/up", "head"], params, X)
  # The results of matmuls, and their sums with biases.
  assert found["*/up"][0] == 2 * 16
  assert found["head"][0] == 2 * 2


@pytest.mark.parametrize("name", ["layer:0", "a:b/c"])
def test_names_may_have_a_colon(name):
  found = sample(lambda x: jnp.sum(scoped(name)(x)), name, X)
  assert found[name] == pytest.approx(expected(2 * X))


class Net(nnx.Module):
  def __init__(self, rngs):
    self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    for layer in self.layers:
      x = self.drop(layer(x))
    return self.norm(x)


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_nnx_writes_the_optimizer_and_nothing_else(policy):
  model = Net(nnx.Rngs(0)) if policy is None else mpjax.with_policy(Net(nnx.Rngs(0)), policy)
  tx = mpjax.monitor_activations(mpjax.loss_scaling(optax.sgd(0.1)), ["layers/*", "norm"], every=2)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def measure(model, optimizer, x):
    mpjax.sample_activations(lambda model, x: jnp.mean(model(x)), optimizer)(model, x)

  no_keys = nnx.Not(nnx.RngKey)
  before = jax.tree.map(jnp.copy, nnx.state(model, no_keys))
  measure(model, optimizer, X)
  jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model, no_keys))
  found = numbers(optimizer)
  assert found["layers/*"][0] == 2 * 8
  assert found["norm"][0] == 4
  assert numbers(nnx.state(optimizer)) == found
  measure(model, optimizer, 2 * X)
  assert numbers(optimizer) == found, "the second step is not sampled"


def step_of(tx, sampled):
  def loss_fn(params, x):
    return jnp.mean(scoped("layer")(x @ params) ** 2)

  @jax.jit
  def step(params, opt_state, x):
    if sampled:
      opt_state = mpjax.sample_activations(loss_fn, opt_state)(params, x)
    loss, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return mpjax.apply_updates(params, updates, opt_state), opt_state, loss

  return step


def test_training_is_the_same_to_the_bit():
  tx = mpjax.monitor_activations(mpjax.loss_scaling(optax.sgd(0.1, momentum=0.9)), "layer", every=2)
  results = []
  for sampled in (True, False):
    params = jnp.full((4, 2), 0.5)
    opt_state = tx.init(params)
    step = step_of(tx, sampled)
    for x in (X, np.full_like(X, np.inf), 2 * X):
      params, opt_state, loss = step(params, opt_state, x)
    results.append((params, opt_state.inner_state, loss))
  jax.tree.map(np.testing.assert_array_equal, *results)
  assert opt_state.calls == 0


def test_a_skipped_step_is_sampled():
  tx = mpjax.monitor_activations(mpjax.loss_scaling(optax.sgd(0.1)), "layer")
  params = jnp.ones((4, 2))
  _, opt_state, _ = step_of(tx, True)(params, tx.init(params), np.full((1, 4), np.inf, np.float32))
  assert not mpjax.step_applied(opt_state)
  assert numbers(opt_state)["layer"][:2] == (2, 2)


@pytest.mark.parametrize("every", [1, 3])
def test_one_of_so_many_steps_is_sampled(every):
  tx = mpjax.monitor_activations(optax.sgd(0.1), "layer", every=every)
  opt_state, seen = tx.init(jnp.ones(2)), []
  measure = jax.jit(
    lambda opt_state, x: mpjax.sample_activations(lambda x: jnp.sum(scoped("layer")(x)), opt_state)(
      x
    )
  )
  for i in range(5):
    opt_state = measure(opt_state, jnp.float32(i))
    seen.append(numbers(opt_state)["layer"][3])
  assert seen == [2.0 * (i - i % every) for i in range(5)]


def test_other_steps_only_count():
  # All that reduces is in one branch, and the other returns what the state held.
  tx = mpjax.monitor_activations(optax.sgd(0.1), "layer")
  jaxpr = jax.make_jaxpr(lambda s, x: mpjax.sample_activations(loss_fn, s)(x))(
    tx.init(jnp.ones(2)), X
  )
  assert not any(eqn.primitive.name.startswith("reduce") for eqn in jaxpr.eqns)
  (cond,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
  kept, measured = cond.params["branches"]
  assert not kept.eqns
  assert any(eqn.primitive.name == "reduce_max" for eqn in walk(measured))


def test_the_update_waits_for_the_branch():
  # Else XLA for a GPU copies the donated parameters that the branch reads.
  tx = mpjax.monitor_activations(optax.trace(0.9), "layer")
  state = tx.init(jnp.ones(3))
  jaxpr = jax.make_jaxpr(lambda s, x: mpjax.sample_activations(loss_fn, s)(x))(state, X).jaxpr
  (cond,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
  (barrier,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
  (trace,) = [v for v in jaxpr.invars if v.aval.shape == (3,)]
  assert {*cond.outvars, trace} <= {*barrier.invars}


def test_modules_of_two_models_share_a_path():
  first, second = (nn.Sequential([nn.Dense(n)]) for n in (2, 3))
  variables = [model.init(jax.random.key(0), X) for model in (first, second)]

  def loss_fn(variables, x):
    with jax.named_scope("second"):
      y = jnp.sum(second.apply(variables[1], x))
    return jnp.sum(first.apply(variables[0], x)) + y

  # The results of both matmuls, and their sums with biases.
  assert sample(loss_fn, "layers_0", variables, X)["layers_0"][0] == 2 * 2 + 2 * 3


def test_gradients_do_not_pass():
  tx = mpjax.monitor_activations(optax.sgd(0.1), "layer", every=1)
  opt_state = tx.init(jnp.ones(2))

  def total(x):
    sampled = mpjax.sample_activations(loss_fn, opt_state)(x)
    return sampled.activations["layer"][3] + jnp.sum(x)

  assert np.all(np.asarray(jax.grad(total)(jnp.asarray(X))) == 1)


def test_each_device_may_have_a_state_of_its_own():
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
  def measure(states, x):
    own = jax.tree.map(lambda leaf: leaf[0], states)
    return jax.tree.map(lambda leaf: leaf[None], mpjax.sample_activations(loss_fn, own)(x))

  tx = mpjax.monitor_activations(optax.sgd(0.1), "layer")
  states = jax.jit(measure)(jax.vmap(tx.init)(jnp.ones((2, 3))), np.concatenate([X, 5 * X]))
  assert mpjax.states.activation_statistics(states)["layer"].largest.tolist() == [30, 30]


def scaled(opt_state, factor):
  """Samples a function that closes over all that it takes."""
  layer = scoped("layer", lambda: X * factor)
  return mpjax.sample_activations(lambda: jnp.sum(layer()), opt_state)()


@pytest.mark.parametrize("wrap", [jax.jit, jax.grad])
def test_a_function_closes_over_traced_values(wrap):
  opt_state = mpjax.monitor_activations(optax.sgd(0.1), "layer").init(jnp.ones(2))

  def largest(factor):
    return scaled(opt_state, factor).activations["layer"][3] + factor

  assert wrap(largest)(2.0) == (1 if wrap is jax.grad else 3 * 2 + 2)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("fn", [scoped("layer"), scan])
def test_devices_of_a_shard_map_agree(fn, check_vma):
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  data, same = jax.P("data"), jax.P()

  def mapped(measure):
    return jax.jit(
      jax.shard_map(measure, mesh=mesh, in_specs=(same, data), out_specs=same, check_vma=check_vma)
    )

  x = np.concatenate([X, 5 * X])
  found = sample(lambda x: jnp.sum(fn(x)), "layer", x, wrap=mapped)
  assert found == sample(lambda x: jnp.sum(fn(x)), "layer", x)


LAYER = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
UNMATCHED = {
  "another name": (loss_fn, "layr", "1 path", "The nearest are 'layer'."),
  "no modules": (jnp.sum, "**", "0 paths", "jax.named_scope"),
  "a captured model": (
    lambda x: jnp.sum(LAYER(x)),
    *("layr", "0 paths", "Pass an NNX model as an argument."),
  ),
}


@pytest.mark.parametrize(("fn", "glob", "got", "fix"), UNMATCHED.values(), ids=UNMATCHED)
def test_a_glob_that_matches_no_module_is_refused(fn, glob, got, fix):
  opt_state = mpjax.monitor_activations(optax.sgd(0.1), [glob]).init(jnp.ones(2))
  where = f"mpjax.monitor_activations(modules): {glob!r}"
  expected = "a glob that matches a module which the function calls"
  with refused(mpjax.errors.UnmatchedRuleError, where, expected, got, fix):
    mpjax.sample_activations(fn, opt_state)(X)


def test_wrong_arguments():
  tx = mpjax.monitor_activations(optax.sgd(0.1), "layer")
  optimizer = nnx.Optimizer(LAYER, tx, wrt=nnx.Param)
  state = "mpjax.sample_activations(opt_state)"
  with refused(TypeError, state, "one monitor of activations", "0", "init"):
    mpjax.sample_activations(loss_fn, optax.sgd(0.1).init(jnp.ones(2)))
  with refused(TypeError, state, "an nnx.Optimizer", "State", "Merge"):
    mpjax.sample_activations(loss_fn, nnx.state(optimizer))
  with refused(TypeError, "mpjax.sample_activations(fun)", "a function", "1.0", "loss_fn"):
    mpjax.sample_activations(1.0, tx.init(jnp.ones(2)))


def test_members_of_an_ensemble_have_statistics_of_values_of_their_own():
  tx = mpjax.monitor_activations(optax.sgd(0.1), "layer")
  states = jax.vmap(tx.init)(jnp.ones((2, 3)))
  states = jax.jit(jax.vmap(scaled))(states, np.asarray([2.0, 5.0], np.float32))
  assert mpjax.states.activation_statistics(states)["layer"].largest.tolist() == [6, 15]


def test_layers_of_a_scan_equal_those_in_a_row():
  model = mpjax.with_policy(Stack(scanned=True), "mixed_float16")
  params = model.init(jax.random.key(0), X)["params"]
  layers = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(2)}
  unrolled = mpjax.with_policy(Stack(), "mixed_float16")

  def loss_of(model):
    return lambda params, x: jnp.sum(model.apply({"params": params}, x))

  one = sample(loss_of(model), "**/down", params, X)
  other = sample(loss_of(unrolled), "**/down", {**layers, "head": params["head"]}, X)
  assert one == other
