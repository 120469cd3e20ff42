import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax._optim.scaled import scale_value_p
from tests.errors import refused
from tests.programs import assert_bit_equal, operations

SCALE = 2.0**15
CALL = "mpjax.scaled(loss_fn, opt_state)"


def plain(loss_fn):
  return loss_fn


def at_scale(loss_fn):
  return mpjax.scaled(loss_fn, SCALE)


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def mlp(params, x, *, shift=0.0):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - shift) ** 2)


PARAMS, X = {"w": normal(0, 5, 7), "v": normal(1, 7)}, normal(2, 4, 5)


def close(found, expected):
  """Asserts that two trees differ by roundings alone: sums may have another order."""
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * np.abs(y).max())


# The gradients are those of the plain loss, and a power of two changes no bit.


def squares_of_gradients(loss_fn, params):
  return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss_fn)(params, X)))


def hessian_product(loss_fn):
  return lambda p: jax.jvp(lambda p: jax.grad(loss_fn)(p, X), (p,), (PARAMS,))[1]


def along_params(loss_fn):
  return lambda p: jax.jvp(lambda p: loss_fn(p, X), (p,), (PARAMS,))[1]


def summed_by_scan(loss_fn):
  def total(params):
    return jax.lax.scan(lambda sum, x: (sum + loss_fn(params, x[None]), None), 0.0, X)[0]

  return jax.grad(total)


def summed_in_scan(loss_fn):
  def of_all(params):
    def add(grads, x):
      return jax.tree.map(jnp.add, grads, jax.grad(loss_fn)(params, x[None])), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), X)[0]

  return of_all


def of_vector(loss_fn):
  return jax.jacrev(lambda p: loss_fn(p, X))


DIFFERENTIATORS = {
  "grad": lambda f: lambda p: jax.grad(f)(p, X),
  "grad by all": lambda f: lambda p: jax.grad(f, (0, 1))(p, X),
  "value_and_grad": lambda f: lambda p: jax.value_and_grad(f)(p, X, shift=0.5),
  "vjp": lambda f: lambda p: jax.vjp(f, p, X)[1](jnp.float32(3)),
  "jvp": along_params,
  "linearize": lambda f: lambda p: jax.linearize(f, p, X)[1](PARAMS, X),
  "jacfwd": lambda f: lambda p: jax.jacfwd(f)(p, X),
  "Hessian product": hessian_product,
  "hessian": lambda f: lambda p: jax.hessian(f)(p, X),
  "reverse over reverse": lambda f: jax.grad(functools.partial(squares_of_gradients, f)),
  "reverse over forward": lambda f: jax.grad(along_params(f)),
  "third derivative": lambda f: jax.grad(lambda p: jnp.sum(hessian_product(f)(p)["v"] ** 2)),
  "remat around": lambda f: lambda p: jax.grad(jax.checkpoint(f))(p, X),
  "jit around": lambda f: lambda p: jax.grad(jax.jit(f))(p, X),
  "scan inside of grad": summed_by_scan,
  "grad inside of scan": summed_in_scan,
  "cond": lambda f: jax.grad(lambda p: jax.lax.cond(p["v"][0] > 9, lambda p, x: 0.0, f, p, X)),
  "vmap over data": lambda f: lambda p: jax.vmap(jax.grad(f), (None, 0))(p, X[:, None]),
}


@pytest.mark.slow
@pytest.mark.parametrize("differentiate", DIFFERENTIATORS.values(), ids=DIFFERENTIATORS)
def test_any_derivative_is_that_of_the_plain_loss(differentiate):
  # Outside of `jit`, XLA cannot round otherwise because operations are fused otherwise.
  assert_bit_equal(differentiate(at_scale(mlp))(PARAMS), differentiate(mlp)(PARAMS))
  compiled = jax.jit(differentiate(at_scale(mlp)))
  close(compiled(PARAMS), differentiate(mlp)(PARAMS))


def test_an_eager_derivative_may_branch_on_values():
  def fun(x):
    return jnp.sum(x**2) if x[0] > 0 else jnp.sum(x)

  grad_fn = jax.grad(at_scale(fun))
  assert grad_fn(jnp.asarray([1.0, 2.0])).tolist() == [2, 4]
  assert grad_fn(jnp.asarray([-1.0, 2.0])).tolist() == [1, 1]


@pytest.mark.parametrize("scale", [2.0**-20, 3.0, 2.0**60])
def test_the_scale_cancels(scale):
  close(jax.grad(mpjax.scaled(mlp, scale))(PARAMS, X), jax.grad(mlp)(PARAMS, X))


@pytest.mark.slow
def test_gradients_that_float16_rounds_to_zero():
  def fun(params, x):
    low = {name: p.astype(jnp.float16) for name, p in params.items()}
    return 1e-8 * mlp(low, x.astype(jnp.float16)).astype(jnp.float32)

  expected = jax.grad(lambda p: 1e-8 * mlp(p, X))(PARAMS)
  found, lost = jax.grad(at_scale(fun))(PARAMS, X), jax.grad(fun)(PARAMS, X)
  for name, grads in expected.items():
    assert np.abs(found[name] - grads).max() < 0.01 * np.abs(grads).max()
    assert np.abs(lost[name] - grads).max() > 0.05 * np.abs(grads).max()


OVERFLOWS = {
  "in the backward pass": (2.0**10, lambda x: (x.astype(jnp.float16) * 1000).astype(jnp.float32)),
  "in the division": (2.0**-2, lambda x: x * 2e38 + x * 2e38),
}


@pytest.mark.parametrize("where", OVERFLOWS)
def test_an_overflow_arrives_as_nan(where):
  # A clip would turn an inf into a number.
  scale, fun = OVERFLOWS[where]
  found = jax.grad(mpjax.scaled(lambda x: jnp.sum(fun(x)), scale))(jnp.ones(2))
  assert np.isnan(found).all()


@pytest.mark.parametrize("exponent", [126, -126, 125, -125, 120, -120, 15])
def test_the_division_at_the_hard_limits(exponent):
  # The cotangent is scaled last, so that the scale meets the gradient itself. Complex parts alike.
  x = np.asarray([1.5, -0.75], np.float32)
  scale = np.float32(2.0) ** np.float32(exponent)
  # 0.75 at 2^126 is 1.5 * 2^-127: the one subnormal, which XLA flushes.
  expected = np.where(np.abs(x / scale) < np.finfo(np.float32).tiny, 0, x / scale)
  bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
  divided = functools.partial(scale_value_p.bind, divide=True)
  np.testing.assert_array_equal(divided(jnp.asarray(x), bits), expected)
  found = divided(jax.lax.complex(x, x[::-1]), bits)
  np.testing.assert_array_equal([found.real, found.imag], [expected, expected[::-1]])


@pytest.mark.parametrize("scale", [3.0, 1e5, 0.7])
def test_another_scale_than_a_power_of_two_is_within_one_ulp(scale):
  rng = np.random.default_rng(0)
  x = (rng.normal(size=4096) * 2.0 ** rng.integers(-30, 30, 4096)).astype(np.float32)
  found = jax.grad(mpjax.scaled(lambda w: jnp.sum(w * x), scale))(jnp.ones(4096))
  assert np.all(np.abs(found - x) <= np.spacing(np.abs(x)))


def test_float64_stays_float64(set_flag):
  set_flag("jax_enable_x64", True)
  grad = jax.grad(mpjax.scaled(jnp.sin, 3.0))(jnp.asarray(1 / 3))
  assert (grad.dtype, grad) == (jnp.float64, pytest.approx(np.cos(1 / 3), rel=1e-15))


def test_complex_arguments_and_results():
  # Beyond 2^64 the square of the scale overflows.
  scale, x = 2.0**100, jnp.asarray([1 + 2j, 3 - 1j])

  def fun(x):
    return x * x

  found = jax.vjp(mpjax.scaled(fun, scale), x)[1](x)
  assert_bit_equal(found, jax.vjp(fun, x)[1](x))


def test_every_result_is_scaled():
  def fun(p, x):
    return mlp(p, x), {"sum": jnp.sum(p["w"]), "name": "aux", "count": jnp.int32(3), "none": None}

  def weighted(fun):
    def total(p):
      loss, aux = fun(p, X)
      return loss + 3 * aux["sum"]

    return jax.grad(total)

  assert_bit_equal(weighted(at_scale(fun))(PARAMS), weighted(fun)(PARAMS))
  (loss, aux), grads = jax.value_and_grad(at_scale(fun), has_aux=True)(PARAMS, X)
  assert_bit_equal((loss, grads), jax.value_and_grad(mlp)(PARAMS, X))
  assert aux["name"] == "aux"
  assert aux["none"] is None


def test_arguments_that_are_not_traced_stay_the_same_objects():
  array, settings, seen = np.ones(3, np.float32), {"b": 1, "a": object()}, {}

  def fun(p, array, settings, *, shift, mode="a"):
    seen.update(array=array, settings=settings, mode=mode)
    return jnp.sum(p * array) * shift

  grads = jax.grad(at_scale(fun))(jnp.ones(3), array, settings, shift=jnp.float32(2), mode="b")
  assert grads.tolist() == [2, 2, 2]
  assert seen["array"] is array
  assert list(seen["settings"].items()) == list(settings.items())
  assert seen["mode"] == "b"
  # A partial's keywords are defaults to Flax, and the wrapper has the name of the loss.
  assert jax.grad(at_scale(functools.partial(mlp, shift=1.0)))(PARAMS, X)["v"].shape == (7,)
  assert at_scale(mlp).__name__ == "mlp"


# What the loss closes over.


def of_local_class(q):
  class Local:
    def __call__(self):
      return q

  return Local()


def of_class(f, cls):
  return lambda p: f(p, X * cls()())


CLOSURES = {
  "function": lambda f, q: lambda p: f(p, X * q),
  "jit": lambda f, q: jax.jit(lambda p: f(p, X * q)),
  "filter_jit": lambda f, q: eqx.filter_jit(lambda p: f(p, X * q)),
  "checkpoint": lambda f, q: jax.checkpoint(lambda p: f(p, X * q)),
  "partial": lambda f, q: functools.partial(lambda p, x: f(p, x), x=X * q),
  "default": lambda f, q: lambda p, x=X * q: f(p, x),
  "class": lambda f, q: of_class(f, type(of_local_class(q))),
  "function in an argument": lambda f, q: lambda p, f=lambda p: f(p, X * q): f(p),
}


@pytest.mark.parametrize("jit", [plain, jax.jit])
@pytest.mark.parametrize("closure", CLOSURES.values(), ids=CLOSURES)
def test_the_gradient_by_a_value_that_the_loss_closes_over(closure, jit):
  def of_number(wrap):
    return jit(jax.grad(lambda q: q * wrap(closure(mlp, q))(PARAMS)))(1.5)

  close(of_number(at_scale), of_number(plain))


def test_a_closed_over_value_in_a_gradient_of_a_gradient():
  def of_number(wrap):
    def squares(q):
      return jnp.sum(jax.grad(wrap(lambda p: mlp(p, X * q)))(PARAMS)["w"] ** 2)

    return jax.grad(squares)(1.5)

  close(of_number(at_scale), of_number(plain))


class Box:
  def __init__(self, held):
    self.held = held


def of_property(q):
  class Local:
    @property
    def held(self):
      return q

  return type("Derived", (Local, Box), {"__init__": object.__init__})()


@pytest.mark.parametrize(
  "box",
  [
    Box,
    lambda q: lambda: q,
    lambda q: jax.tree_util.Partial(lambda: q),
    of_local_class,
    of_property,
  ],
)
def test_a_value_hidden_in_an_argument(box):
  def fun(p, hidden):
    return jnp.sum(p) * (hidden.held if isinstance(hidden, Box) else hidden())

  assert jax.grad(lambda q: at_scale(fun)(jnp.ones(2), box(q)))(1.5) == 2


def test_a_step_whose_loss_closes_over_its_batch():
  @functools.partial(jax.jit, static_argnums=0)
  def step(wrap, p, x):
    return jax.value_and_grad(wrap(lambda p: (mlp(p, x), {"x": x, "n": 3})), has_aux=True)(p)

  (found, aux), grads = step(at_scale, PARAMS, X)
  (expected, _), plain_grads = step(plain, PARAMS, X)
  assert_bit_equal((found, grads), (expected, plain_grads))
  assert aux["n"] == 3


def test_losses_with_scales_of_their_own():
  def both(wrap, other):
    def total(p, x):
      # The first loss has another inside of it, at another scale.
      inner = other(lambda p: mlp(p, x))
      return wrap(lambda p: mlp(p, x) + 2 * inner(p))(p) + other(lambda p: jnp.sum(p["w"] ** 2))(p)

    return jax.grad(total, (0, 1))(PARAMS, X)

  close(both(at_scale, functools.partial(mpjax.scaled, opt_state=8)), both(plain, plain))


@pytest.mark.slow
def test_a_collective_in_a_loss_that_closes_over_a_mapped_batch():
  def grads(wrap):
    mean = lambda p, x: jax.lax.pmean(mlp(p, x), "rows")  # noqa: E731
    one = lambda x: jax.grad(wrap(lambda p: mean(p, x)))(PARAMS)  # noqa: E731
    return jax.vmap(one, axis_name="rows")(X[:, None])

  close(grads(at_scale), grads(plain))


def test_a_derivative_rule_that_closes_over_a_value_of_the_loss():
  def fun(p, x):
    slope = jnp.sum(x)

    @jax.custom_jvp
    def twice(p):
      return 2 * p

    twice.defjvp(lambda primals, tangents: (twice(*primals), tangents[0] * slope))
    return jnp.sum(twice(p))

  assert_bit_equal(jax.grad(at_scale(fun))(jnp.ones(2), X), jax.grad(fun)(jnp.ones(2), X))
  # In a jaxpr JAX does not support such a rule. It says so.
  with pytest.raises(jax.errors.UnexpectedTracerError):
    jax.grad(lambda x: jax.grad(at_scale(lambda p: fun(p, x)))(jnp.ones(2)).sum())(X)


# Policies.


def forward(fun, *args):
  """Returns the operations of a function, without those of the scale."""
  ours = ("scale_cotangent", "scale_value", "bitcast_convert_type")
  return [each for each in operations(jax.make_jaxpr(fun)(*args)) if each[0] not in ours]


def gelu_mlp(params, x):
  return jnp.mean((jax.nn.gelu(x @ params["w"] + params["b"]) @ params["v"]) ** 2)


WIDE = {"w": normal(0, 16, 8), "b": jnp.ones((1, 8)), "v": normal(1, 8, 8)}
ROWS = normal(2, 16, 16)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_operations_of_the_forward_pass_under_a_policy(policy):
  cast = functools.partial(mpjax.autocast, policy=policy)
  expected = forward(cast(gelu_mlp), WIDE, ROWS)
  assert forward(cast(at_scale(gelu_mlp)), WIDE, ROWS) == expected
  assert forward(at_scale(cast(gelu_mlp)), WIDE, ROWS) == expected

  def capturing(p, x):
    return at_scale(lambda p: gelu_mlp(p, x))(p)

  assert forward(cast(capturing), WIDE, ROWS) == expected


@pytest.mark.slow
@pytest.mark.parametrize("order", ["grad(autocast)", "grad(scaled(autocast))", "autocast(grad)"])
def test_small_gradients_under_a_policy(order):
  cast = functools.partial(mpjax.autocast, policy="mixed_float16")

  def small(params, x):
    return 1e-7 * gelu_mlp(params, x)

  def grads(wrap):
    orders = {
      "grad(autocast)": lambda: jax.grad(cast(wrap(small))),
      "grad(scaled(autocast))": lambda: jax.grad(wrap(cast(small))),
      "autocast(grad)": lambda: cast(jax.grad(wrap(small))),
    }
    return jax.jit(orders[order]())(WIDE, ROWS)

  expected = jax.grad(small)(WIDE, ROWS)
  for name, g in expected.items():
    assert np.abs(grads(at_scale)[name] - g).max() < 2e-3 * np.abs(g).max()
    assert np.abs(grads(plain)[name] - g).max() > 0.1 * np.abs(g).max()


def test_weight_gradients_are_float32_sums_before_they_are_divided():
  # The division is in the function that autocast rewrites.
  grad_fn = mpjax.autocast(jax.grad(at_scale(gelu_mlp)), "mixed_bfloat16")
  dots = [each for each in forward(grad_fn, WIDE, ROWS) if each[0] == "dot_general"]
  assert [each[3].split("[")[0] for each in dots[-3:]].count("float32") == 2


# Transformations.


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [("params",), ("scale",), ("params", "scale"), ("scale", "x")])
def test_vmap_over_members_and_scales(mapped):
  members = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)
  args = {
    "params": members if "params" in mapped else PARAMS,
    "scale": jnp.asarray([4.0, 1024.0]) if "scale" in mapped else jnp.float32(4),
    "x": X[:2, None] if "x" in mapped else X,
  }
  axes = [0 if name in mapped else None for name in args]
  found = jax.vmap(lambda p, s, x: jax.grad(mpjax.scaled(mlp, s))(p, x), axes)(*args.values())
  # Without a mapped loss the plain gradient would be of another shape.
  args["params"] = (
    members if "params" in mapped else jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
  )
  args["x"] = args["x"] if "x" in mapped else jnp.stack([X, X])
  close(found, jax.vmap(jax.grad(mlp))(args["params"], args["x"]))


@pytest.mark.slow
def test_vmap_of_vmap_over_scales():
  scales = jnp.asarray([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
  one = lambda s, p: jax.grad(mpjax.scaled(mlp, s))(p, X)  # noqa: E731
  members = jax.tree.map(lambda p: jnp.stack([p, -p, 2 * p], axis=-1), PARAMS)
  found = jax.vmap(jax.vmap(one, (0, -1), out_axes=-1), (0, None))(scales, members)
  expected = jax.vmap(lambda p: jax.grad(mlp)(p, X), in_axes=-1, out_axes=-1)(members)
  close(found, jax.tree.map(lambda g: jnp.stack([g, g]), expected))


def over_devices(loss_of, scales, check_vma):
  """Returns gradients of a mean over devices; `loss_of(x, scale)` returns the loss of one."""
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  rows, whole = PartitionSpec("data"), PartitionSpec()

  def on_device(p, x, scale):
    loss_fn = loss_of(x, scale[0])
    # With `check_vma` the transpose of the mean sums over devices.
    if check_vma:
      return jax.grad(lambda p: jax.lax.pmean(loss_fn(p), "data"))(p)
    return jax.lax.pmean(jax.grad(loss_fn)(p), "data")

  specs = (whole, rows, whole if len(scales) == 1 else rows)
  mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=check_vma)
  return jax.jit(mapped)(PARAMS, X, scales)


def captured(x, scale):
  return mpjax.scaled(lambda p: mlp(p, x), scale)


def given(x, scale):
  return lambda p: mpjax.scaled(mlp, scale)(p, x)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
  ("loss_of", "scales"),
  [(given, [SCALE]), (captured, [SCALE]), (given, [2.0, 4.0, 8.0, 1024.0])],
  ids=["argument", "closed over", "own scales"],
)
def test_shard_map(loss_of, scales, check_vma):
  expected = over_devices(lambda x, _: lambda p: mlp(p, x), jnp.asarray(scales), check_vma)
  close(over_devices(loss_of, jnp.asarray(scales), check_vma), expected)


def test_scales_of_devices_and_a_closed_over_array_that_is_the_same_on_all():
  expected, got = "whose traced values are arguments", "the same on all devices"
  with refused(TypeError, CALL, expected, got, "as arguments"):
    over_devices(
      lambda x, scale: lambda p: mpjax.scaled(lambda x: mlp(p, x), scale)(x),
      *(jnp.asarray([2.0, 4.0, 8.0, 16.0]), True),
    )


@pytest.mark.parametrize("closes_over_batch", [True, False])
def test_a_mesh_with_explicit_axes(closes_over_batch):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
  with jax.set_mesh(mesh):
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    params, x = jax.tree.map(place, PARAMS), place(X, "data")

    def grads(wrap):
      def step(p, x):
        return (
          jax.grad(wrap(lambda p: mlp(p, x)))(p) if closes_over_batch else jax.grad(wrap(mlp))(p, x)
        )

      return jax.jit(step)(params, x)

    found, expected = grads(at_scale), grads(plain)
    assert_bit_equal(found, expected)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)


def test_pmap():
  def grads(wrap):
    mean = lambda p, x: jax.lax.pmean(jax.grad(wrap(mlp))(p, x), "devices")  # noqa: E731
    return jax.pmap(mean, "devices", in_axes=(None, 0))(PARAMS, X.reshape(4, 1, 5))

  assert_bit_equal(grads(at_scale), grads(plain))


def test_export():
  exported = jax.export.export(jax.jit(jax.grad(at_scale(mlp))))(PARAMS, X)
  assert_bit_equal(exported.call(PARAMS, X), jax.jit(jax.grad(mlp))(PARAMS, X))
  exported = jax.export.export(jax.jit(at_scale(mlp)))(PARAMS, X)
  assert_bit_equal(jax.grad(exported.call)(PARAMS, X), jax.grad(jax.jit(mlp))(PARAMS, X))


# Models.


class Net(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(5, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.gain = jnp.ones((1, 4))  # an array without a variable
    self.calls = 0

  def __call__(self, x):
    self.calls += 1
    return self.dropout(self.norm(self.dense(x))) * self.gain


def net():
  return Net(nnx.Rngs(0))


def loss_of_net(model, x):
  return jnp.mean(model(x).astype(jnp.float32) ** 2)


def contents(model):
  """Returns the arrays of a model, with the data of keys."""
  keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
  return jax.tree.map(lambda x: jax.random.key_data(x) if keys(x) else x, nnx.state(model))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
@pytest.mark.parametrize("jit", [plain, nnx.jit])
@pytest.mark.parametrize("closes_over_batch", [True, False])
def test_a_loss_of_an_nnx_model_writes_to_the_model(closes_over_batch, jit, policy):
  def step(wrap):
    def differentiate(model, x):
      view = model if policy is None else mpjax.with_policy(model, policy)
      if closes_over_batch:
        return nnx.value_and_grad(wrap(lambda m: loss_of_net(m, x)))(view)
      return nnx.value_and_grad(wrap(loss_of_net))(view, x)

    model = net()
    return jit(differentiate)(model, X), contents(model), model.calls

  found, expected = step(at_scale), step(plain)
  assert_bit_equal(found, expected)
  assert found[1]["dropout"]["rngs"]["count"][...] == 1
  assert not np.array_equal(found[1]["norm"]["mean"][...], contents(net())["norm"]["mean"][...])


@pytest.mark.parametrize("jit", [plain, nnx.jit])
def test_without_a_gradient_the_model_is_written_too(jit):
  def of(wrap):
    model = net()
    losses = jit(lambda m, x: (wrap(loss_of_net)(m, x), wrap(lambda m: loss_of_net(m, x))(m)))
    return losses(model, X), contents(model), model.calls

  assert_bit_equal(of(at_scale), of(plain))


@pytest.mark.slow
@pytest.mark.parametrize("jit", [plain, nnx.jit])
def test_an_nnx_loss_that_closes_over_the_parameter_of_an_outer_gradient(jit):
  def of(wrap):
    def total(q, model):
      return q * wrap(lambda m: loss_of_net(m, X * q))(model)

    model = net()
    return jit(nnx.value_and_grad(total))(1.5, model), contents(model)

  found, expected = of(at_scale), of(plain)
  assert_bit_equal(found[1], expected[1])
  close(found[0], expected[0])


@pytest.mark.parametrize("jit", [plain, nnx.jit])
def test_a_loss_that_closes_over_a_differentiated_model(jit):
  def of(wrap):
    def total(model):
      return 3 * wrap(lambda q: jnp.mean((model.dense(X) * q) ** 2))(2.0)

    return jit(nnx.grad(total))(net())

  close(of(at_scale), of(plain))


@pytest.mark.slow
def test_variables_that_the_loss_does_not_write_hold_the_same_arrays():
  same = []

  def total(model):
    before = [model.dense.kernel.get_raw_value(), model.gain]
    loss = at_scale(lambda m: loss_of_net(m, X))(model)
    same.extend(
      x is y for x, y in zip(before, (model.dense.kernel.get_raw_value(), model.gain), strict=True)
    )
    return loss

  nnx.grad(total)(net())
  assert same == [True, True]


def test_after_an_exception_a_model_is_as_before():
  same = []

  def fails(model):
    loss_of_net(model, X)
    model.extra = nnx.Param(model.dense.kernel[...])
    raise KeyError

  def total(model):
    before = [model.dense.kernel.get_raw_value(), model.norm.mean.get_raw_value()]
    with pytest.raises(KeyError):
      at_scale(fails)(model)
    after = [model.dense.kernel.get_raw_value(), model.norm.mean.get_raw_value()]
    same.extend(x is y for x, y in zip(before, after, strict=True))
    same.append(model.calls == 0 and not hasattr(model, "extra"))
    return jnp.sum(model.dense.bias[...])

  nnx.grad(total)(net())
  assert same == [True, True, True]


@pytest.mark.parametrize("closes_over_batch", [True, False])
def test_what_an_nnx_loss_returns_beside_its_loss(closes_over_batch):
  def of(wrap):
    def fun(m, x):
      return loss_of_net(m, x), {"logits": m.dense(x), "model": m, "name": "aux"}

    def step(model, x):
      if closes_over_batch:
        return nnx.value_and_grad(wrap(lambda m: fun(m, x)), has_aux=True)(model)
      return nnx.value_and_grad(wrap(fun), has_aux=True)(model, x)

    model = net()
    (loss, aux), grads = step(model, X)
    assert aux.pop("model") is model
    assert aux.pop("name") == "aux"
    return loss, aux, grads

  assert_bit_equal(of(at_scale), of(plain))


@pytest.mark.parametrize("differentiated", ["number", "model"])
def test_a_model_from_outside_of_the_trace_as_an_argument(differentiated):
  # It can be read there, and not be written.
  def of(wrap):
    def by_number(model, q):
      return jax.grad(lambda q: wrap(lambda m, q: jnp.mean(m.dense(X) * q))(model, q))(q)

    if differentiated == "number":
      return nnx.jit(by_number)(net(), 2.0)
    return nnx.jit(nnx.grad(lambda model: by_number(model, 2.0)))(net())

  close(of(at_scale), of(plain))


def test_a_loss_that_writes_to_a_model_that_it_closes_over():
  def step(model, x):
    return jax.grad(at_scale(lambda p: loss_of_net(model, x) * p))(2.0)

  expected, got = "whose traced values are arguments", "one that writes to flax.nnx variables"
  with refused(TypeError, CALL, expected, got, "Pass the model to the loss as an argument"):
    nnx.jit(step)(net(), X)


def test_parameters_in_an_nnx_state():
  graphdef, params, rest = nnx.split(net(), nnx.Param, ...)

  def fun(params, x):
    return loss_of_net(nnx.merge(graphdef, params, rest, copy=True), x)

  def step(wrap):
    return jax.jit(lambda p, x: (jax.grad(wrap(fun))(p, x), jax.grad(wrap(lambda p: fun(p, x)))(p)))

  assert_bit_equal(step(at_scale)(params, X), step(plain)(params, X))


class Regression(eqx.Module):
  mlp: eqx.nn.MLP
  name: str = eqx.field(static=True, default="regression")

  def loss(self, x):
    return jnp.mean(jax.vmap(self.mlp)(x) ** 2)


@pytest.mark.slow
def test_equinox():
  model = Regression(eqx.nn.MLP(5, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0)))
  expected = eqx.filter_value_and_grad(Regression.loss)(model, X)
  assert_bit_equal(eqx.filter_value_and_grad(at_scale(Regression.loss))(model, X), expected)
  # A method closes over its module.
  found = eqx.filter_value_and_grad(lambda model, x: at_scale(model.loss)(x))(model, X)
  close(found, expected)


@pytest.mark.slow
@pytest.mark.standard_promotion("dtypes")
def test_haiku():
  def model(x):
    return hk.BatchNorm(True, True, 0.9)(hk.dropout(hk.next_rng_key(), 0.5, hk.Linear(4)(x)), True)

  net = hk.transform_with_state(model)
  params, state = net.init(jax.random.key(0), X)

  def fun(params, state, x):
    y, state = net.apply(params, state, jax.random.key(1), x)
    return jnp.mean(y**2), state

  found = jax.value_and_grad(at_scale(fun), has_aux=True)(params, state, X)
  assert_bit_equal(found, jax.value_and_grad(fun, has_aux=True)(params, state, X))


def loss_inside_of_haiku(wrap, factor):
  def total(x):
    linear = hk.Linear(3)
    return jnp.sum(linear(x)) + wrap(lambda q: jnp.mean((linear(x) * q) ** 2) * factor())(2.0)

  return hk.transform(total)


@pytest.mark.slow
def test_a_loss_inside_of_a_haiku_transform():
  def grads(wrap):
    apply = loss_inside_of_haiku(wrap, lambda: 1).apply
    return jax.grad(lambda p: apply(p, None, X))(params)

  params = loss_inside_of_haiku(at_scale, lambda: 1).init(jax.random.key(0), X)
  close(grads(at_scale), grads(plain))
  draws = loss_inside_of_haiku(at_scale, lambda: jax.random.uniform(hk.next_rng_key()))
  expected, got = "no side effects", "draws a key, inside hk.transform"
  with refused(TypeError, CALL, expected, got, "mpjax.scaled(hk.transform(loss_fn).apply"):
    jax.grad(lambda p: draws.apply(p, jax.random.key(0), X))(params)


class LinenNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
    return nn.Dropout(0.5, deterministic=False)(x)


@pytest.mark.slow
@pytest.mark.parametrize("closes_over_batch", [True, False])
def test_linen_under_a_policy(closes_over_batch):
  model = mpjax.with_policy(LinenNet(), "mixed_float16")
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  variables = model.init(keys, X)

  def fun(params, stats, x):
    variables = {"params": params, "batch_stats": stats}
    y, new = model.apply(variables, x, mutable=["batch_stats"], rngs={"dropout": keys["dropout"]})
    return jnp.mean(y.astype(jnp.float32) ** 2), new

  def step(wrap):
    def grads(params, stats, x):
      if closes_over_batch:
        return jax.value_and_grad(wrap(lambda p: fun(p, stats, x)), has_aux=True)(params)
      return jax.value_and_grad(wrap(fun), has_aux=True)(params, stats, x)

    return jax.jit(grads)(variables["params"], variables["batch_stats"], X)

  assert_bit_equal(step(at_scale), step(plain))


# Dtypes.


@pytest.mark.parametrize("scale", [2.0**14, 2.0**24])
@pytest.mark.parametrize("closes_over_batch", [True, False])
@pytest.mark.parametrize("has_aux", [True, False])
def test_a_float16_loss_takes_any_scale(scale, closes_over_batch, has_aux):
  def fun(p, x):
    loss = jnp.sum((p * x).astype(jnp.float16))
    return (loss, x) if has_aux else loss

  def step(p, x, scale):
    if closes_over_batch:
      loss_fn = lambda p: fun(p, x)  # noqa: E731
      return jax.value_and_grad(mpjax.scaled(loss_fn, scale), has_aux=has_aux)(p)
    return jax.value_and_grad(mpjax.scaled(fun, scale), has_aux=has_aux)(p, x)

  for loss, grads in (
    step(jnp.ones(2), 2 * jnp.ones(2), scale),
    jax.jit(step)(jnp.ones(2), 2 * jnp.ones(2), scale),
  ):
    loss = loss[0] if has_aux else loss
    assert loss.dtype == jnp.float32
    assert loss == 4
    assert grads.tolist() == [2, 2]


def test_a_model_is_written_once_if_its_loss_is_float16():
  def fun(model, x):
    return loss_of_net(model, x).astype(jnp.float16)

  model, expected = net(), net()
  grads = nnx.grad(mpjax.scaled(fun, 2.0**20))(model, X)
  assert_bit_equal(grads, nnx.grad(fun)(expected, X))
  assert_bit_equal(contents(model), contents(expected))
  assert model.calls == 1


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_parameters_in_float16_or_float8_are_refused(dtype):
  def fun(p, x):
    return jnp.sum(p.astype(jnp.float32) * x.astype(jnp.float32))

  grad_fn = jax.grad(at_scale(fun), argnums=(0, 1))
  low, wide = jnp.ones(2, dtype), jnp.ones(2)
  for args in ((low, wide), (wide, low)):
    where, expected = f"the gradient of {CALL}", "parameters in float32 or bfloat16"
    with refused(TypeError, where, expected, f"{dtype}[2]", 'mpjax.convert(params, "float32")'):
      jax.jit(grad_fn)(*args)
  # Data may have any dtype, and nothing is divided in forward mode.
  assert jax.grad(at_scale(fun))(wide, low).tolist() == [1, 1]
  assert jax.jvp(lambda p: at_scale(fun)(p, wide), (low,), (low,))[1] == 2


def test_the_float32_view_that_the_error_names():
  params = {"w": jnp.full(2, 2.0**-13, jnp.float16)}

  def fun(params, x):
    return jnp.sum(params["w"].astype(jnp.float16) * x * x).astype(jnp.float32)

  grads = jax.grad(at_scale(fun))(mpjax.convert(params, "float32"), params["w"])
  assert_bit_equal(grads["w"], jnp.full(2, 2.0**-26))


@pytest.mark.slow
def test_bfloat16_parameters_need_no_view():
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  x = X.astype(jnp.bfloat16)
  assert_bit_equal(jax.grad(at_scale(mlp))(params, x), jax.grad(mlp)(params, x))


# The scale.


def state_with(config, **kwargs):
  return mpjax.loss_scaling(optax.adam(0.1), config, **kwargs).init(PARAMS)


DYNAMIC = state_with(mpjax.DynamicLossScale())


@pytest.mark.parametrize(
  "scale",
  {
    "state": DYNAMIC,
    "static": state_with(mpjax.StaticLossScale(8)),
    "two named": {name: state_with(mpjax.DynamicLossScale(), name=name) for name in ("a", "b")},
    "number": 8,
    "NumPy": np.float32(8),
    "array": jnp.asarray(8.0),
  }.items(),
  ids=lambda item: item[0],
)
def test_where_the_scale_comes_from(scale):
  key, scale = scale
  name = "b" if key == "two named" else None
  values = []

  @jax.custom_vjp
  def spy(x):
    return x

  spy.defvjp(lambda x: (x, None), lambda _, cotangent: (values.append(cotangent) or cotangent,))
  jax.grad(mpjax.scaled(lambda p: spy(jnp.sum(p)), scale, name=name))(jnp.ones(2))
  assert values == [8 if key in ("static", "number", "NumPy", "array") else 2.0**15]


def test_states_of_other_libraries():
  model = net()
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(0.1)), wrt=nnx.Param)
  state = mpjax.TrainState.create(PARAMS, mpjax.loss_scaling(optax.sgd(0.1)))

  @nnx.jit
  def step(model, optimizer, x):
    return nnx.grad(mpjax.scaled(lambda m: loss_of_net(m, x), optimizer))(model)

  assert_bit_equal(step(model, optimizer, X), nnx.jit(nnx.grad(loss_of_net))(net(), X))
  for each in (nnx.state(optimizer), state):
    found = jax.jit(lambda p, s: jax.grad(mpjax.scaled(mlp, s))(p, X))(PARAMS, each)
    assert_bit_equal(found, jax.jit(jax.grad(mlp))(PARAMS, X))


@pytest.mark.parametrize("config", [mpjax.NoLossScale(), mpjax.SkipNonfinite()])
def test_without_a_scale_it_is_the_loss_itself(config):
  assert mpjax.scaled(mlp, state_with(config)) is mlp


def test_a_dynamic_scale_from_outside_of_a_compiled_function_is_refused():
  grad_fn = jax.grad(mpjax.scaled(mlp, DYNAMIC))
  closing = lambda x: mpjax.scaled(lambda: mlp(PARAMS, x), DYNAMIC)()  # noqa: E731
  for call in (
    lambda: jax.jit(grad_fn)(PARAMS, X),
    lambda: jax.jit(closing)(X),
    lambda: jax.eval_shape(grad_fn, PARAMS, X),
    lambda: nnx.jit(lambda m: mpjax.scaled(loss_of_net, DYNAMIC)(m, np.ones((4, 5), np.float32)))(
      net()
    ),
  ):
    expected, got = "the loss scale of the state", "outside of the function that is being traced"
    with refused(RuntimeError, CALL, expected, got, "inside of the step"):
      call()
  close(grad_fn(PARAMS, X), jax.grad(mlp)(PARAMS, X))
  compiled = jax.jit(lambda s, p, x: jax.grad(mpjax.scaled(mlp, s))(p, x))
  close(compiled(DYNAMIC, PARAMS, X), jax.grad(mlp)(PARAMS, X))


def test_a_donated_state_is_refused():
  state = state_with(mpjax.DynamicLossScale())
  grad_fn = jax.grad(mpjax.scaled(mlp, state))
  jax.jit(lambda s: s, donate_argnums=0)(state)
  expected, got = "the loss scale of the state", "donated"
  with refused(RuntimeError, CALL, expected, got, "inside of the step"):
    grad_fn(PARAMS, X)


def test_arguments_that_are_no_loss_or_no_scale():
  of_state, two = (
    "mpjax.scaled(opt_state)",
    {name: state_with(mpjax.DynamicLossScale(), name=name) for name in "ab"},
  )
  for call, builtin, where, expected, got, fix in (
    (lambda: mpjax.scaled(mlp), TypeError, CALL, "loss_fn, opt_state", "'opt_state'", "Write"),
    (
      lambda: mpjax.scaled(DYNAMIC, mlp),
      TypeError,
      "(loss_fn)",
      "first",
      "LossScalingState",
      "Write",
    ),
    (
      lambda: mpjax.scaled(net().__call__, 8),
      TypeError,
      CALL,
      "given the model",
      "Net.__call__",
      "lambda",
    ),
    (
      lambda: mpjax.scaled(mlp, PARAMS),
      TypeError,
      of_state,
      "mpjax.loss_scaling",
      "a dict",
      "Wrap",
    ),
    (lambda: mpjax.scaled(mlp, two), TypeError, of_state, "one loss scale", "2", "name="),
    (lambda: mpjax.scaled(mlp, two, name="c"), ValueError, of_state, "name", "2", "name="),
    (lambda: mpjax.scaled(mlp, 0), ValueError, of_state, "a positive number", "0", "power of two"),
    (lambda: mpjax.scaled(mlp, True), TypeError, of_state, "number", "True", "If it is"),
    (
      lambda: jax.vmap(lambda s: mpjax.scaled(mlp, s)(PARAMS, X))(jnp.ones((2, 1))),
      *(TypeError, of_state, "a floating scale of shape ()", "float32[1]", "Pass one number"),
    ),
  ):
    with refused(builtin, where, expected, got, fix):
      call()


def test_an_audit_sees_the_scale():
  def text(wrap):
    return str(mpjax.audit(jax.grad(mpjax.autocast(wrap(gelu_mlp), "mixed_float16")))(WIDE, ROWS))

  assert "without a loss scale" in text(plain)
  assert "without a loss scale" not in text(at_scale)
