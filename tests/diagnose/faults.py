"""Functions with one planted fault each, or with none, and what is to be said of it.

Where a fault is was decided when it was planted: the arguments are such that what comes before
stays finite, by numbers that can be checked by hand.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.experimental import pallas

import mpjax
from mpjax._core.trees import all_finite

F16 = jnp.float16
MESH, EXPLICIT = (
  jax.make_mesh((8,), ("data",), axis_types=(kind,))
  for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """A function with a fault, or without one, if `operation` is None; what the report must say."""

  fn: Callable[..., Any]
  args: tuple[Any, ...]
  operation: str | None = None
  path: str = "planted"
  direction: str | None = "forward"
  iteration: int | tuple[int, ...] | None = None
  verdict: str | None = "value"
  index: tuple[int, ...] | None = None
  device: Mapping[str, int] | None = None
  finite_at: float | None = None


def at(operation: str | None, fn: Callable[..., Any], *args: Any, **expected: Any) -> Fault:
  return Fault(fn=fn, args=args, operation=operation, **expected)


def planted(fn: Callable[..., Any], *args: Any) -> Any:
  """Calls a function in the scope that faults are looked for in."""
  with jax.named_scope("planted"):
    return fn(*args)


def f16(*values: float) -> jax.Array:
  return jnp.asarray(values, F16)


def f32(*values: float) -> jax.Array:
  return jnp.asarray(values, jnp.float32)


def wide_sum(x: jax.Array) -> jax.Array:
  return jnp.sum(x.astype(jnp.float32))


_PLANTED = (jnp.log, jnp.exp, jnp.sqrt, jnp.matmul, jnp.multiply, jnp.divide)
log, exp, sqrt, matmul, multiply, divide = (functools.partial(planted, fn) for fn in _PLANTED)
to_half = functools.partial(planted, lambda x: x.astype(F16))
to_float8 = functools.partial(planted, lambda x: x.astype(jnp.float8_e5m2))
CAST = "convert_element_type"


def scan(body: Callable[..., Any], carry: Any, xs: Any, length: int | None = None) -> Any:
  """Returns what a scan carries whose body returns nothing else."""
  return jax.lax.scan(lambda carry, x: (body(carry, x), None), carry, xs, length)[0]


def standardized(batch: dict[str, jax.Array]) -> jax.Array:
  x = batch["x"] / 255
  return jnp.sum((x - jnp.mean(x)) ** 2)


def _exp_kernel(x: jax.Array) -> jax.Array:
  def kernel(x, out):
    out[...] = jnp.exp(x[...])

  return pallas.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)(x)


_CLOSED_OVER = f32(1, jnp.nan)

FORWARD = {
  "a matmul overflows": at(
    *("dot_general", lambda x, w: jnp.mean(jnp.tanh(matmul(x, w)))),
    *(jnp.full((2, 4), 200, F16), jnp.full((4, 3), 100, F16)),
  ),
  "an exponential overflows": at(
    "exp", lambda x: jnp.sum(1 / (1 + exp(x))), f16(1, 2, 12), index=(2,)
  ),
  "a gelu at 150": at("integer_pow", lambda x: planted(jax.nn.gelu, x), f16(1, 150), index=(1,)),
  "a mask times a billion": at(
    *("mul", lambda x, mask: jax.nn.softmax(x + planted(lambda m: (1 - m) * -1e9, mask))),
    *(f16(1, 2, 3), f16(1, 0, 1)),
    index=(0,),
  ),
  "a row is masked": at(
    *("sub", lambda x, mask: planted(jax.nn.softmax, jnp.where(mask, x, -jnp.inf))),
    *(jnp.ones((2, 3)), jnp.asarray([[True] * 3, [False] * 3])),
    index=(1, 0),
  ),
  "a standardized input is minus inf": at(
    "argument", standardized, {"x": f32(1, -jnp.inf, 3)}, path="batch/x", index=(1,)
  ),
  "a constant is nan": at("constant", lambda x: jnp.sum(multiply(x, _CLOSED_OVER)), f32(1, 2)),
  "a constant of an inner jit is nan": at(
    "constant", jax.jit(lambda x: multiply(x, _CLOSED_OVER)), f32(1, 2)
  ),
  "a kernel, which is not computed in float32": at(
    "pallas_call", lambda x: planted(_exp_kernel, x), f16(1, 12)
  ),
  "a cast overflows": at(
    CAST, lambda x: to_half(x).astype(jnp.float32) * 2, f32(1, 7e4), index=(1,)
  ),
  "a cast to float8 that is returned": at(CAST, to_float8, f32(1, 1e6), index=(1,)),
  # It is added up in float32, and cast.
  "a sum overflows": at(CAST, lambda x: planted(jnp.sum, x), jnp.full(100, 1000, F16)),
  "a multiplication overflows bfloat16": at(
    "mul", lambda x: multiply(x, 2), jnp.asarray([1e38, 2e38], jnp.bfloat16), index=(1,)
  ),
  "a division by zero": at("div", divide, f32(1, 2), f32(1, 0), index=(1,)),
  "a root of a negative number": at("sqrt", sqrt, f32(1, -1), index=(1,)),
  "a logarithm that a where takes": at("log", lambda x: jnp.where(x < 1, log(x), 0.0), f32(0, 1)),
  "a logarithm that is returned and hidden": at(
    "log", lambda x: (lambda y: (y, jnp.where(x > 0, y, 0.0)))(log(x)), f32(0, 1)
  ),
  "a logarithm that is summed and hidden": at(
    "log", lambda x: jnp.where(x > 0, jnp.sum(log(x)), 0.0), f32(0, 1)
  ),
  "a logarithm that is computed with and compared": at("log", lambda x: log(x) * 2 > 0, f32(0, 1)),
  "a logarithm that is computed with, moved and compared": at(
    "log", lambda x: (log(x) * 2)[::-1] > 0, f32(0, 1)
  ),
  "a matmul overflows before a relu": at(
    *("dot_general", lambda x, w: jnp.mean(jax.nn.relu(matmul(x, w)))),
    *(jnp.full((2, 4), 200, F16), jnp.full((4, 3), 100, F16)),
  ),
  "a flag of all that is no mask": at(
    "log", lambda x: (lambda y: jnp.where(jnp.all(jnp.isfinite(y)), y, 0.0))(log(x)), f32(0, 1)
  ),
  "a norm without epsilon": at(
    "rsqrt", lambda x: x * planted(jax.lax.rsqrt, x), f32(1, 0), index=(1,)
  ),
  "an index out of bounds": at(
    *("gather", lambda x, indices: planted(lambda x: jnp.take(x, indices, mode="fill"), x)),
    *(f32(1, 2), jnp.asarray([0, 5])),
  ),
}


# The backward pass.


@jax.custom_vjp
def _with_rule(x):
  return x * 2


def _backward(residual, g):
  with jax.named_scope("planted"):
    return (g / (1 + residual - residual - 1),)


_with_rule.defvjp(lambda x: (x * 2, jnp.exp(x)), _backward)


def _with_rule_in_a_scope(x):
  with jax.named_scope("rule"):
    return wide_sum(_with_rule(x))


@jax.custom_jvp
def _with_jvp(x):
  return jnp.sin(x)


@_with_jvp.defjvp
def _jvp(primals, tangents):
  (x,), (t,) = primals, tangents
  with jax.named_scope("planted"):
    return jnp.sin(x), t / x


@jax.custom_jvp
def _moved_slope(x):
  return jnp.sqrt(x)


_moved_slope.defjvp(lambda p, t: (jnp.sqrt(p[0]), t[0] * (0.5 / jnp.sqrt(p[0]))[::-1][::-1]))


BACKWARD = {
  "the gradient of a hidden logarithm": at(
    "div", lambda x: jnp.sum(jnp.where(x > 0, log(x), 0.0)), f32(0, 1), index=(0,)
  ),
  "the gradient of a hidden root": at(
    "mul", lambda x: jnp.sum(jnp.where(x > 0, sqrt(x), 0.0)), f32(0, 1), index=(0,)
  ),
  # The slope of a root of 0 is inf, times the 0 of `where` NaN, and that times an input of 0.
  "a nan that meets zeros alone": at(
    "mul",
    lambda scale, x: planted(lambda: jnp.sum(jnp.where(x > 0, jnp.sqrt(scale * x), 0.0))),
    *(jnp.ones(3), f32(1, 0, 4)),
    index=(1,),
  ),
  "a hidden slope that is moved": at(
    "mul", lambda x: jnp.sum(jnp.where(x > 0, planted(_moved_slope, x), 0.0)), f32(0, 1)
  ),
  "the gradient of a norm at zero": at("div", lambda x: sqrt(jnp.sum(x * x)), f32(0, 0)),
  "a gradient overflows": at(
    "mul", lambda w, x: wide_sum(multiply(w, x)) * 300, jnp.ones(4, F16), jnp.full(4, 300, F16)
  ),
  "the backward rule of a custom vjp": at("div", lambda x: wide_sum(_with_rule(x)), f16(1, 2)),
  "the rule of a custom jvp": at("div", lambda x: jnp.sum(_with_jvp(x)), f32(1, 0), index=(1,)),
  "a backward fault in remat": at(
    *("div", lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.where(x > 0, log(x), 0.0) * x)(x))),
    f32(0, 1),
  ),
}
BACKWARD = {
  name: dataclasses.replace(fault, fn=jax.grad(fault.fn), direction="backward")
  for name, fault in BACKWARD.items()
}
IN_GRADIENTS = {
  "the forward rule of a custom vjp": at(
    "exp", jax.value_and_grad(_with_rule_in_a_scope), f16(1, 20), path="rule", index=(1,)
  ),
  "a forward fault in remat": at(
    "log", jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(log(x)))(x))), f32(0, 1)
  ),
}


# Loops and branches.


@jax.custom_vjp
def _steep(x, slope):
  del slope
  return x


_steep.defvjp(lambda x, slope: (x, slope), lambda slope, g: (g * slope, None))


def _steep_layers(w, xs):
  # The slope is 1e20 in the third layer alone, where the value is 0.
  return jnp.sum(scan(lambda c, x: planted(_steep, c, jnp.where(x == 3, 1e30, 1.0)), w, xs)) * 1e10


def _scan_in_a_scan(xs, ys):
  def inner(x):
    return lambda c, y: c + divide(x, jnp.where((x == 2) & (y == 0), 0.0, 1.0))

  return scan(lambda carry, x: scan(inner(x), carry, ys), jnp.float32(0), xs)


def _while(x):
  def body(state):
    return state[0] + 1, multiply(state[1], 10)

  return jax.lax.while_loop(lambda state: state[0] < 50, body, (0, x))


def _condition_of_a_while(x):
  def goes_on(state):
    return 1.0 + divide(1.0, 3.0 - state[0]) < 100.0

  return jax.lax.while_loop(goes_on, lambda state: (state[0] + 1, state[1]), (jnp.float32(0), x))


def _branch_in_a_loop(x):
  def body(i, x):
    return jax.lax.cond(i == 2, log, lambda x: x, x)

  return jax.lax.fori_loop(0, 4, body, x)


def _layers_with_remat(ws, x):
  return wide_sum(scan(jax.checkpoint(matmul), x, ws * 250))


LOOPS = {
  "the fifth iteration of a scan": at(
    "mul", lambda xs: scan(multiply, jnp.float32(1), xs * 1e8), jnp.ones(10), iteration=4
  ),
  "the third layer of a backward scan": at(
    "mul",
    jax.grad(_steep_layers),
    *(f32(1), jnp.arange(1, 6, dtype=jnp.float32)),
    direction="backward",
    iteration=2,
  ),
  "a scan in a scan": at("div", _scan_in_a_scan, f32(1, 2, 3), f32(1, 2, 0), iteration=(1, 2)),
  "the body of a while": at("mul", _while, f32(1), iteration=38),
  "the condition of a while": at("div", _condition_of_a_while, f32(0), iteration=3),
  "the branch of a cond": at(
    "log", lambda x: jax.lax.cond(x[0] > 2, log, lambda x: x, x), f32(3, 0), index=(1,)
  ),
  "a branch in a loop": at("log", _branch_in_a_loop, f32(3, 0), iteration=2),
  "a scan over layers with remat": at(
    "dot_general", jax.grad(_layers_with_remat), *(jnp.ones((3, 2, 2), F16), f16(1, 1)), iteration=1
  ),
}


# Optimizers and training steps.


_ADAM = optax.adam(1e-3, eps=1e-9)


def _adam(params, grads, state):
  # The square of 1e-4 is 0, and so is epsilon.
  return optax.apply_updates(params, _ADAM.update(grads, state, params)[0])


def _takes_a_root(grads, mean):
  second = grads * grads
  return grads / (sqrt(second - mean * mean) + 1e-8)


def _scaled(w, scale):
  loss, grads = jax.value_and_grad(lambda w: multiply(jnp.sum(w * 4), scale))(w)
  return loss, grads / scale


def _linear(params, model_state, batch, rng):
  y = matmul(batch["x"].astype(F16), params.astype(F16))
  return jnp.mean(y.astype(jnp.float32)), (model_state, {})


def _skips_by_hand(params, x):
  grads = jax.grad(lambda p: jnp.sum(jnp.sqrt(p * x)))(params)
  finite = jnp.all(jnp.isfinite(grads))
  return jnp.where(finite, params - 0.1 * grads, params)


_TX = mpjax.loss_scaling(optax.sgd(0.1), mpjax.DynamicLossScale(init_scale=2.0**15))
_STEP, _STATE = mpjax.make_train_step(_linear, _TX), mpjax.TrainState.create(jnp.ones((2, 1)), _TX)
_of_scale = functools.partial(at, direction="backward", verdict="scale")

STEPS = {
  "adam in float16": at(
    "div", _adam, f16(1, 1), f16(1e-4, 1), _ADAM.init(f16(1, 1)), path="", index=(0,)
  ),
  "an optimizer takes a root": at("sqrt", _takes_a_root, f32(1, 2), f32(3, 3)),
  "the multiplication by the scale": at(
    "mul", _scaled, f16(3), F16(2**14), verdict="scale", finite_at=2.0**12
  ),
  # The gradient is 2^15 * 8, and 65504 is the largest number.
  "the scale of a training step": _of_scale(
    "dot_general", _STEP, _STATE, {"x": jnp.full((4, 2), 8.0)}, finite_at=2.0**12
  ),
  "the forward pass of a training step": at(
    "dot_general", _STEP, _STATE, {"x": jnp.full((4, 2), 4e4)}
  ),
  # The gradient itself is 6e4: 2 times that is beyond 65504.
  "a gradient that fits at scale 1 alone": _of_scale(
    *("dot_general", _STEP, _STATE._replace(params=jnp.full((2, 1), 1e-3))),
    {"x": jnp.asarray([[6e4, 0]] * 4)},
    finite_at=1.0,
  ),
  "a training step without a fault": at(None, _STEP, _STATE, {"x": jnp.ones((4, 2))}),
  "a step that is skipped by hand": at(
    "div", _skips_by_hand, f32(1, 0), f32(1, 1), path="", direction="backward"
  ),
}


# Many at once.


def on_devices(local: Callable[..., Any], out: Any, mesh: Any = MESH) -> Callable[..., Any]:
  return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=jax.P("data"), out_specs=out))


# A lane goes on until the last has ended, and its values are dropped.
def _ended_lanes(n, x):
  return jax.lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, 1 / s[0]), (n, x))[1]


MANY = {
  "a lane of vmap": at("log", jax.vmap(log), f32(1, 2, 0, 4), index=(2,)),
  "a lane of vmap in a scan": at(
    "mul",
    jax.vmap(lambda x: scan(lambda c, _: multiply(c, x), x, None, length=30)),
    f32(1, 2, 100, 4),
    iteration=18,
    index=(2,),
  ),
  "a device of shard map": at(
    "log",
    on_devices(lambda x: jax.lax.psum(jnp.sum(log(x)), "data"), jax.P()),
    jnp.ones(8).at[3].set(0),
    device={"data": 3},
  ),
  "a device of an explicit mesh": at(
    "log",
    on_devices(lambda x: jax.lax.psum(log(x), "data"), jax.P(), EXPLICIT),
    jax.device_put(jnp.ones(8).at[0].set(0), jax.NamedSharding(EXPLICIT, jax.P("data"))),
    device={"data": 0},
  ),
  "a device of shard map in a scan": at(
    "mul",
    on_devices(lambda x: scan(lambda c, _: multiply(c, x), x / x, None, 40), jax.P("data")),
    jnp.ones(8).at[5].set(10),
    device={"data": 5},
    iteration=38,
  ),
  "a device of pmap": at("log", jax.pmap(log), jnp.ones((8, 2)).at[6].set(0)),
  "a lane of a while that has ended": at(None, jax.vmap(_ended_lanes), f32(0, 1, 2), f32(0, 1, 2)),
}


# Frameworks.


class _Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(8, name="down")(nn.Dense(8, name="up")(x))


class _Block(nnx.Module):
  def __init__(self) -> None:
    self.up = nnx.Linear(8, 8, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.constant(100))
    self.down = nnx.Linear(8, 8, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.constant(100))

  def __call__(self, x):
    return self.down(self.up(x))


def _sharded(x):
  return jnp.sum(jnp.where(x < 2, log(x) * 2, 0.0))


def _written(x):
  ref = jax.new_ref(jnp.zeros(2))

  def body(i, carry):
    ref[...] += log(x) * i
    return carry

  jax.lax.fori_loop(0, 3, body, 0)
  jax.debug.callback(lambda x: None, x)
  return ref[...]


class _Rooted(nnx.Module):
  """A layer and, outside of any other module, a root whose derivative at 0 is infinite."""

  def __init__(self) -> None:
    self.inner = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.inner(x) + jnp.sqrt(0 * x)


def _nnx_gradient(model, x):
  return nnx.grad(lambda model: jnp.sum(mpjax.with_policy(model, "mixed_bfloat16")(x)))(model)


_ROOTED = nnx.Sequential(_Rooted(), _Rooted())
_NET = mpjax.linen.with_policy(_Net(), "c=f16")
_VARIABLES = {
  "params": {
    name: {"kernel": np.full((8, 8), 100, np.float32), "bias": np.zeros(8, np.float32)}
    for name in ("up", "down")
  }
}

FRAMEWORKS = {
  # 800 after the first layer, 8 * 800 * 100 after the second.
  "a Linen model under a policy": at(
    "dot_general", _NET.apply, _VARIABLES, jnp.ones((2, 8)), path="_Net/down"
  ),
  "the gradient of a Linen model": at(
    "dot_general",
    jax.grad(lambda v, x: jnp.mean(_NET.apply(v, x).astype(jnp.float32)) * 1e4),
    *(_VARIABLES, jnp.full((2, 8), 0.05)),
    path="_Net/down",
    direction="backward",
  ),
  "an NNX model under a policy": at(
    "dot_general",
    lambda model, x: model(x),
    *(mpjax.nnx.with_policy(_Block(), "c=f16"), jnp.ones((2, 8))),
    path="down",
  ),
  "a plain function under autocast": at(
    "dot_general",
    mpjax.autocast(lambda w, x: jnp.mean(matmul(x, w)), "mixed_float16"),
    *(jnp.full((8, 8), 200.0), jnp.full((2, 8), 200.0)),
  ),
  "an array that is sharded explicitly": at(
    "log",
    _sharded,
    jax.device_put(jnp.ones((8, 4)).at[3, 1].set(0), jax.NamedSharding(EXPLICIT, jax.P("data"))),
    index=(3, 1),
  ),
  "a reference that is written to": at("log", _written, f32(1, 0), iteration=0, index=(1,)),
  "an argument that is written to": at(
    "log", lambda state: state.update(w=log(state["w"])), {"w": f32(1, 0)}, index=(1,)
  ),
  "a root in a module of NNX under a policy": at(
    "div", nnx.jit(_nnx_gradient), _ROOTED, jnp.ones((2, 8)), path="layers/1", direction="backward"
  ),
}


# None of these is a fault.


def _maximum_from_minus_inf(xs):
  return jax.lax.scan(lambda carry, x: (jnp.maximum(carry, x), carry), -jnp.inf, xs)[0]


def _named(x):
  return jax.lax.stop_gradient(jax.ad_checkpoint.checkpoint_name(x, "x"))


def _gathered(x):
  return jax.lax.all_gather(x, "data")


NO_FAULT = {
  "a hidden logarithm": (lambda x: jnp.where(x > 0, jnp.log(x), 0.0), f32(0, 1)),
  "an entropy hidden later": (lambda x: jnp.sum(jnp.where(x > 0, x * jnp.log(x), 0.0)), f32(0, 1)),
  "a logarithm hidden twice": (
    jax.grad(lambda x: jnp.sum(jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0))),
    f32(0, 1),
  ),
  "a logarithm that a maximum discards": (lambda x: jnp.maximum(jnp.log(x), -9.0), f32(0, 1)),
  "a logarithm moved and hidden": (lambda x: jnp.where(x > 0, jnp.log(x)[::-1], 0.0), f32(0, 1, 0)),
  "a logarithm named, padded and hidden": (
    lambda x: jnp.where(jnp.pad(x, 1) > 0, jnp.pad(_named(jnp.log(x)), 1), 0.0),
    f32(0, 1),
  ),
  "a logarithm gathered and hidden": (
    on_devices(lambda x: jnp.where(_gathered(x) > 0, _gathered(jnp.log(x)), 0.0), jax.P("data")),
    jnp.arange(8.0),
  ),
  "a value that is its own mask": (
    lambda x: (lambda y: jnp.where(jnp.isfinite(y), y, 0.0))(jnp.log(x)),
    f32(0, 1),
  ),
  "a logarithm that one number hides": (
    lambda x: jnp.where(jnp.sum(x) > 5, jnp.log(x), 0.0),
    f32(0, 1),
  ),
  "a value that is only compared": (lambda x: jnp.log(x) > -1, f32(0, 1)),
  "a value that is only checked": (lambda x: all_finite(jnp.log(x)), f32(0, 1)),
  "a value that nan to num takes": (lambda x: jnp.nan_to_num(jnp.log(x)), f32(0, 1)),
  "attention with a causal mask": (
    jax.grad(lambda x: jnp.sum(jax.nn.dot_product_attention(x, x, x, is_causal=True))),
    jnp.ones((1, 4, 2, 3)),
  ),
  "a mask that is an argument": (
    jax.grad(lambda scores, mask: jnp.sum(jax.nn.softmax(scores + mask)[:, 0])),
    *(jnp.ones((2, 3)), jnp.asarray([[0, -jnp.inf, 0], [0, 0, -jnp.inf]])),
  ),
  "an integer division by zero": (
    lambda x, y: (x // y).astype(jnp.float32),
    *(jnp.asarray([1, 2]), jnp.asarray([1, 0])),
  ),
  "empty arrays": (
    lambda x, w: jnp.sum(x @ w) + jnp.sum(jnp.log(x)),
    *(jnp.ones((0, 3)), jnp.ones((3, 2))),
  ),
  "a best loss that starts at inf": (
    lambda best, loss: (jnp.minimum(best, loss), jnp.where(loss < best, loss, best)),
    *(jnp.asarray(jnp.inf), f32(3)),
  ),
  "a maximum that starts at minus inf": (_maximum_from_minus_inf, f32(1, 2)),
}

FAULTS = FORWARD | BACKWARD | IN_GRADIENTS | LOOPS | STEPS | MANY | FRAMEWORKS
FAULTS |= {name: at(None, fn, *args) for name, (fn, *args) in NO_FAULT.items()}
