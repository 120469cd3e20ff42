import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._core.leaves import path_text
from mpjax._diagnose.nonfinite.find_nonfinite import direction_of
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.steps import body_of
from tests.diagnose.faults import FAULTS
from tests.errors import refused
from tests.programs import bits

pytestmark = [
  pytest.mark.standard_promotion,
  # -1e9 in float16, which is the fault.
  pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_planted_fault_is_found(name):
  wanted = FAULTS[name]
  found = mpjax.find_nonfinite(wanted.fn)(*wanted.args)
  assert bool(found) == (wanted.operation is not None), found
  assert found.operation == wanted.operation
  if not found:
    return
  assert found.path == wanted.path
  assert found.direction == wanted.direction
  assert found.iteration == wanted.iteration
  assert found.verdict == wanted.verdict
  assert found.finite_at == wanted.finite_at
  if wanted.index is not None:
    assert found.index == wanted.index
  if wanted.device is not None:
    assert found.device == wanted.device


@pytest.mark.slow
def test_a_root_of_zero_behind_a_where_is_skipped_and_named():
  """The loss is finite, and the slope of what `where` does not take is 0 * inf."""

  def loss_fn(x):
    with jax.named_scope("head"):
      return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

  x = jnp.asarray([1.0, 0.0, 4.0])
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.StaticLossScale(8))
  state = tx.init(x)
  loss, grads = jax.value_and_grad(mpjax.scaled(loss_fn, state))(x)
  assert loss == 3
  assert jnp.isnan(grads).tolist() == [False, True, False]
  updates, state = tx.update(grads, state, x)
  assert mpjax.loss_scaling_metrics(state)["skipped"] == 1
  assert bits(mpjax.apply_updates(x, updates)) == bits(x)
  found = mpjax.find_nonfinite(jax.value_and_grad(loss_fn))(x)
  assert (found.operation, found.path, found.direction) == ("mul", "head", "backward")


def test_no_argument_is_deleted():
  x = jnp.asarray([0.0, 1.0])
  mpjax.find_nonfinite(jax.jit(jnp.log, donate_argnums=0))(x)
  assert not x.is_deleted()


def test_a_gradient_that_fits_at_no_scale_is_the_values_own():
  def loss_fn(params, model_state, batch, rng):
    y = (batch @ params.astype(jnp.float16)).astype(jnp.float32)
    return 2 * jnp.mean(y), (model_state, {})  # The gradient is 1.2e5.

  tx = mpjax.loss_scaling(optax.sgd(0.1))
  step = mpjax.make_train_step(loss_fn, tx, donate=False)
  state = mpjax.TrainState.create(jnp.full((1, 1), 1e-3), tx)
  found = mpjax.find_nonfinite(step)(state, jnp.full((4, 1), 6e4, jnp.float16))
  assert (found.operation, found.direction) == ("dot_general", "backward")
  assert (found.verdict, found.finite_at) == ("value", None)
  assert found.source.startswith("test_find_nonfinite.py:")


@pytest.mark.parametrize(("least", "finite_at"), [(1e4, 4096), (4e4, None)])
def test_a_scale_is_proposed_only_if_all_is_finite_there(least, finite_at):
  def step(w, opt_state):
    half = lambda w: w.astype(jnp.float16) * jnp.float16(8)  # noqa: E731
    loss = lambda w: jnp.sum(half(w).astype(jnp.float32))  # noqa: E731
    results = jax.value_and_grad(mpjax.scaled(loss, opt_state))(w)
    scale = mpjax.loss_scaling_metrics(opt_state)["loss_scale"]
    return results, jnp.log(8 * scale - least)  # NaN at small scales.

  w = jnp.ones(2)
  opt_state = mpjax.loss_scaling(optax.sgd(0.1)).init(w)
  found = mpjax.find_nonfinite(step)(w, mpjax.states.set_loss_scale(opt_state, 2.0**14))
  assert (found.operation, found.direction, found.loss_scale) == ("mul", "backward", 2**14)
  assert found.finite_at == finite_at
  assert found.verdict == ("value" if finite_at is None else "scale")
  if finite_at:
    assert found.cure.startswith(
      "opt_state = mpjax.states.set_loss_scale(opt_state, 4096)  # 2^12;"
    )
    assert not mpjax.find_nonfinite(step)(w, mpjax.states.set_loss_scale(opt_state, finite_at))


def test_a_factor_of_the_loss_and_of_its_cotangent_is_a_scale_and_a_weight_is_none():
  def step(w, scale):
    return jax.value_and_grad(lambda w: jnp.sum(w * 4) * scale.astype(w.dtype))(w)

  w = jnp.full(3, 3, jnp.float16)
  report = mpjax.find_nonfinite(step)(w, jnp.float32(2**14))
  assert (report.loss_scale, report.step, report.finite_at) == (2**14, None, 2**10)
  assert report.cure == "loss_scale = 1024  # 2^10, or mpjax.DynamicLossScale()"
  assert "Loss scale 2^14." in str(report)
  clean = mpjax.find_nonfinite(step)(w, jnp.float32(1024))
  assert (bool(clean), clean.loss_scale) == (False, 1024)
  for weight in (4, 1000, 0.5):
    assert mpjax.find_nonfinite(step)(w, jnp.float32(weight)).loss_scale is None
  assert mpjax.find_nonfinite(lambda x, y: x * y)(jnp.ones(3), jnp.float32(16)).loss_scale is None


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_damaged_loss_scale_is_the_argument_at_fault(scale):
  def step(w, opt_state):
    return jax.grad(mpjax.scaled(jnp.sum, opt_state))(w)

  w = jnp.ones(2)
  opt_state = mpjax.loss_scaling(optax.sgd(0.1)).init(w)
  (label, numbers), *_ = opt_state.loss_scale.items()
  damaged = opt_state._replace(loss_scale={label: numbers._replace(scale=jnp.float32(scale))})
  found = mpjax.find_nonfinite(step)(w, damaged)
  assert (found.operation, found.path) == ("argument", "opt_state/loss_scale/dynamic/scale")
  assert (found.verdict, found.finite_at) == ("value", None)


@pytest.mark.slow
def test_a_loss_scale_that_was_set_binds_no_shard_map_to_its_device():
  mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  tx = mpjax.loss_scaling(optax.sgd(0.1))

  def loss_fn(w, x):
    local = lambda w, x: jax.lax.pmean(jnp.mean(x * w.astype(x.dtype)), "i")  # noqa: E731
    specs = (jax.P(), jax.P("i"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())(w, x)

  def step(w, opt_state, x):
    _, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(w, x)
    return tx.update(grads, opt_state, w)

  w, x = jnp.ones(()), jnp.full(2, 256, jnp.float16)
  opt_state = mpjax.states.set_loss_scale(tx.init(w), 2.0**12)
  found = mpjax.find_nonfinite(step)(w, opt_state, x)
  assert found.verdict == "scale"
  assert found.cure.startswith(
    f"opt_state = mpjax.states.set_loss_scale(opt_state, {found.finite_at:g})"
  )


def test_a_sum_with_a_jaxpr_of_its_own_overflows():
  scattered = lambda x: jnp.zeros(2, x.dtype).at[jnp.zeros(8, int)].add(x)  # noqa: E731
  reduced = lambda x: jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))  # noqa: E731
  for fn in (reduced, scattered):
    found = mpjax.find_nonfinite(fn)(jnp.full(8, 1e4, jnp.float16))
    assert found.operation in ("reduce", "reduce_sum", "scatter-add")
    assert "in float32 the largest of these values is 8e+04" in found.cause


@pytest.mark.parametrize("tool", [mpjax.find_nonfinite, mpjax.ranges])
def test_a_function_is_expected_and_its_arguments_must_be_concrete(tool):
  x = jnp.ones(2)
  name = f"mpjax.{tool.__name__}"
  with refused(TypeError, f"{name}(fn)", "a function", "an array", f"{name}(step)"):
    tool(x)
  got = r"expected concrete arrays, got a traced array float32\[2\]"
  with pytest.raises(mpjax.errors.MpjaxTypeError, match=got):
    jax.jit(lambda x: len(str(tool(jnp.sin)(x))))(x)
  with pytest.raises(mpjax.errors.MpjaxTypeError, match=r"got a ShapeDtypeStruct float32\[2\]"):
    tool(jnp.sin)(jax.ShapeDtypeStruct((2,), jnp.float32))


def check_argument(name, fn, *args, **kwargs):
  found = mpjax.find_nonfinite(fn)(*args, **kwargs)
  assert (found.operation, found.path) == ("argument", name)


@pytest.mark.slow
def test_arguments_have_names():
  def fn(params, *rest, flag=True):
    return jnp.sum(params["w"] * rest[1]) if flag else None

  bad, good = jnp.asarray([jnp.nan, 1]), jnp.ones(2)
  for each in (fn, functools.partial(fn, flag=True)):
    check_argument("params/w", each, {"w": np.asarray([np.inf, 1])}, 1.0, good)
    check_argument("rest[1]", each, {"w": good}, 1.0, bad)
  found = mpjax.find_nonfinite(lambda p, b: p["w"] + 1 / b["net"]["x"])
  assert not found({"w": good}, {"net": {"x": 0 * good}}).path  # The tree of a batch is no module.
  check_argument("x", lambda **kwargs: jnp.sum(kwargs["x"]), x=bad)
  check_argument("n", lambda x, n: x * n, jnp.ones(2), np.inf)  # A number is static otherwise.


@pytest.mark.slow
def test_the_element_of_an_argument_is_its_fault_and_no_mask():
  mask = jnp.asarray([-jnp.inf, 0.0, jnp.nan, jnp.nan])
  found = mpjax.find_nonfinite(lambda mask, x: jax.nn.softmax(x + mask))(mask, jnp.ones(4))
  assert (found.operation, found.path, found.index) == ("argument", "mask", (2,))


@jax.custom_vjp
def root(x):
  return jnp.sqrt(x)


def root_forward(x):
  root = jax.lax.sqrt(x)
  kept = 0.5 / root
  return root, kept


root.defvjp(root_forward, lambda kept, g: (g * kept,))


def discards(x):
  above = jax.lax.nextafter(*[jax.lax.stop_gradient(x)] * 2)
  return jnp.sin(jnp.where((x > 0) & (x < above), x, jax.lax.sqrt(x)))


SLOPE = {("sqrt", "forward"), ("div", "backward")}
DIRECTIONS = {
  # Of the gradient alone nothing in the forward pass reads the exponential, its own slope.
  "a value that is its own slope": (jax.grad(jnp.exp), 1.0, {("exp", "forward")}),
  "one in a call": (jax.grad(jax.jit(jnp.exp)), 1.0, {("exp", "forward")}),
  "a root": (jax.grad(jnp.sqrt), 1.0, {("sqrt", "forward")}),
  "a slope": (jax.grad(jax.lax.sqrt), 1.0, SLOPE),
  "a slope in a call": (jax.grad(jax.jit(jax.lax.sqrt)), 1.0, SLOPE),
  "a slope under remat": (jax.grad(jax.checkpoint(lambda x: jnp.sqrt(x))), 1.0, SLOPE),
  "a slope that leaves a scan": (
    jax.grad(lambda xs: jax.lax.scan(lambda c, x: (c + jnp.sqrt(x), None), 0.0, xs)[0]),
    np.ones(3, np.float32),
    SLOPE,
  ),
  "comparisons and what has no derivative": (jax.grad(discards), 2.0, {("div", "backward")}),
  # It is what the derivative of a root is, on a line of its own.
  "what a forward rule keeps": (jax.grad(root), 2.0, {("div", "forward")}),
  "more operations than Python recurses": (
    jax.grad(lambda x: functools.reduce(lambda y, _: jnp.sin(y), range(1100), jnp.exp(x))),
    *(1.0, {("exp", "forward")}),
  ),
  "no gradient": (lambda x: 0.5 / jnp.sqrt(x), 1.0, {("sqrt", "forward"), ("div", "forward")}),
}


@pytest.mark.parametrize(("fn", "x", "expected"), DIRECTIONS.values(), ids=DIRECTIONS)
def test_a_slope_belongs_to_the_backward_pass_and_nothing_else_does(fn, x, expected):
  graph = Graph(body_of(jax.make_jaxpr(fn)(x), compiled=True))
  asked = [each for each in graph.computing() if each.name in dict(expected)]
  found = {(each.name, direction_of(graph, each)) for each in asked}
  assert expected <= found
  assert not {(op, "backward") for op, way in expected if way == "forward"} & found


def test_a_slope_under_remat_is_not_what_was_computed_of_the_same_numbers():
  # 1 - x^2 is what no operation before it was, `atanh(x)` is of the same number.
  fn = jax.value_and_grad(jax.checkpoint(lambda x: jnp.arctanh(x)))
  graph = Graph(body_of(jax.make_jaxpr(fn)(0.5), compiled=True))
  again = [each for each in graph.computing() if each.where.direction == "recomputed"]
  assert {direction_of(graph, each) for each in again} == {"backward"}


class Named(nn.Module):
  """A layer that a method of another name calls."""

  def setup(self):
    self.up = nn.Dense(8)
    self.head = nn.Dense(8)

  def encode(self, x):
    return self.up(x)

  def __call__(self, x):
    return self.head(nn.tanh(self.encode(x)))


def large(params):
  """Returns parameters of which those of one layer make its matmul overflow float16."""

  def fill(path, x):
    names = path_text(path).split("/")
    return np.full(x.shape, 3e4 if {"up", "hi"}.intersection(names) else 0.5, x.dtype)

  return jax.tree_util.tree_map_with_path(fill, params)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("model", "shape", "path"),
  [(Named(), (2, 8), "**/up"), (nn.RNN(nn.LSTMCell(8), name="rnn"), (2, 5, 8), "hi")],
)
def test_the_cure_is_a_rule_of_linen_that_cures(model, shape, path):
  x = jnp.full(shape, 3.0)
  params = large(jax.eval_shape(model.init, jax.random.key(0), x))

  def found(*rules):
    policied = mpjax.linen.with_policy(model, "mixed_float16", rules)
    return mpjax.find_nonfinite(policied.apply)(params, x)

  line = found().cure.partition("  #")[0]
  rule = eval(line, {"mpjax": mpjax, "re": re})
  assert path in line
  assert rule.policy == mpjax.Policy.parse("float32_highest")
  assert not found(rule)


class Looks(nn.Module):
  """A table whose rows are rounded at its end, and a layer."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(8, name="last")(nn.Embed(4, 8, name="table")(x))


class LooksNnx(nnx.Module):
  def __init__(self):
    self.table = nnx.Embed(4, 8, rngs=nnx.Rngs(0))
    self.last = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.last(self.table(x))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_the_cure_of_a_layer_whose_result_overflows_is_a_rule_for_it(framework):
  ids = jnp.arange(2)
  variables = Looks().init(jax.random.key(0), ids)
  variables["params"]["table"]["embedding"] = jnp.full((4, 8), 1e6)
  model = LooksNnx()
  model.table.embedding[...] = jnp.full((4, 8), 1e6)

  def found(*rules):
    if framework == "nnx":
      return mpjax.find_nonfinite(mpjax.with_policy(model, "mixed_float16", rules))(ids)
    policied = mpjax.with_policy(Looks(), "mixed_float16", rules)
    return mpjax.find_nonfinite(policied.apply)(variables, ids)

  rules = []
  for layer in ("table", "last"):  # The next layer casts the large result that the table returns.
    line = found(*rules).cure.partition("  #")[0]
    assert line == f'mpjax.Rule("float32_highest", path="**/{layer}")'
    rules.append(eval(line, {"mpjax": mpjax}))
  assert not found(*rules)
