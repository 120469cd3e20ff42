"""Functions with one planted fault each, or with none, and what is to be said of it.

Where a fault is was decided when it was planted: the arguments are such that what comes before
stays finite, by numbers that can be checked by hand.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import mpjax

F16 = jnp.float16
MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """A function with a fault, or without one, if `operation` is None.

  Fields:
    fn: the function.
    args: its arguments.
    operation, path, direction, iteration, verdict: what the report must say.
    index: the first element that breaks, where it is asked.
    device: the device that it breaks on.
    finite_at: the largest loss scale that would do.
  """

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


FAULTS: dict[str, Fault] = {}


def fault(*args: Any, **expected: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Adds a function to the table, under its name."""

  def add(fn: Callable[..., Any]) -> Callable[..., Any]:
    FAULTS[fn.__name__.replace("_", " ").strip()] = Fault(fn=fn, args=args, **expected)
    return fn

  return add


def planted(fn: Callable[..., Any], *args: Any) -> Any:
  """Calls a function in the scope that faults are looked for in."""
  with jax.named_scope("planted"):
    return fn(*args)


def f16(*values: float) -> jax.Array:
  return jnp.asarray(values, F16)


def f32(*values: float) -> jax.Array:
  return jnp.asarray(values, jnp.float32)


# The forward pass.


@fault(jnp.full((2, 4), 200, F16), jnp.full((4, 3), 100, F16), operation="dot_general")
def a_matmul_overflows(x, w):
  return jnp.mean(jnp.tanh(planted(jnp.matmul, x, w)))


@fault(f16(1, 2, 12), operation="exp", index=(2,))
def an_exponential_overflows(x):
  return jnp.sum(1 / (1 + planted(jnp.exp, x)))


@fault(f16(1, 150), operation="integer_pow", index=(1,))
def a_gelu_at_150(x):
  return planted(jax.nn.gelu, x)


@fault(f16(1, 2, 3), f16(1, 0, 1), operation="mul", index=(0,))
def a_mask_times_a_billion(x, mask):
  return jax.nn.softmax(x + planted(lambda m: (1 - m) * -1e9, mask))


@fault(jnp.ones((2, 3)), jnp.asarray([[True] * 3, [False] * 3]), operation="sub", index=(1, 0))
def a_row_is_masked(scores, mask):
  return planted(jax.nn.softmax, jnp.where(mask, scores, -jnp.inf))


@fault({"x": f32(1, jnp.inf)}, operation="argument", path="batch['x']", index=(1,))
def an_input_is_inf(batch):
  return jnp.sum(jnp.tanh(batch["x"]))


@fault({"x": f32(1, -jnp.inf, 3)}, operation="argument", path="batch['x']", index=(1,))
def a_standardized_input_is_minus_inf(batch):
  x = batch["x"] / 255
  return jnp.sum((x - jnp.mean(x)) ** 2)


@fault(
  {"a": {"w": f32(1, 2)}, "b": {"w": f32(3, jnp.nan)}},
  f32(1, 2),
  operation="argument",
  path="params['b']['w']",
)
def a_parameter_is_nan(params, x):
  return jnp.sum(jnp.dot(params["a"]["w"], x) * params["b"]["w"])


_CLOSED_OVER = f32(1, jnp.nan)


@fault(f32(1, 2), operation="constant")
def a_constant_is_nan(x):
  return jnp.sum(planted(jnp.multiply, x, _CLOSED_OVER))


@fault(f32(1, 7e4), operation="convert_element_type", index=(1,))
def a_cast_overflows(x):
  return planted(lambda x: x.astype(F16), x).astype(jnp.float32) * 2


@fault(f32(1, 1e6), operation="convert_element_type", index=(1,))
def a_cast_to_float8_that_is_returned(x):
  return planted(lambda x: x.astype(jnp.float8_e5m2), x)


@fault(jnp.full(100, 1000, F16), operation="convert_element_type")
def a_sum_overflows(x):
  # It is added up in float32, and cast.
  return planted(jnp.sum, x)


@fault(jnp.asarray([1e38, 2e38], jnp.bfloat16), operation="mul", index=(1,))
def a_multiplication_overflows_bfloat16(x):
  return planted(lambda x: x * 2, x)


@fault(f32(1, 2), f32(1, 0), operation="div", index=(1,))
def a_division_by_zero(x, y):
  return planted(jnp.divide, x, y)


@fault(f32(1, -1), operation="sqrt", index=(1,))
def a_root_of_a_negative_number(x):
  return planted(jnp.sqrt, x)


@fault(f32(0, 1), operation="log")
def a_logarithm_that_a_where_takes(x):
  return jnp.where(x < 1, planted(jnp.log, x), 0.0)


@fault(f32(1, 0), operation="rsqrt", index=(1,))
def a_norm_without_epsilon(x):
  return x * planted(jax.lax.rsqrt, x)


@fault(f32(1, 2), jnp.asarray([0, 5]), operation="gather")
def an_index_out_of_bounds(x, indices):
  return planted(lambda x: jnp.take(x, indices, mode="fill"), x)


# The backward pass.


@fault(f32(0, 1), operation="div", direction="backward", index=(0,))
@jax.grad
def the_gradient_of_a_hidden_logarithm(x):
  return jnp.sum(jnp.where(x > 0, planted(jnp.log, x), 0.0))


@fault(f32(0, 1), operation="mul", direction="backward", index=(0,))
@jax.grad
def the_gradient_of_a_hidden_root(x):
  return jnp.sum(jnp.where(x > 0, planted(jnp.sqrt, x), 0.0))


@fault(f32(0, 0), operation="div", direction="backward")
@jax.grad
def the_gradient_of_a_norm_at_zero(x):
  return planted(jnp.sqrt, jnp.sum(x * x))


@fault(jnp.ones(4, F16), jnp.full(4, 300, F16), operation="mul", direction="backward")
@jax.grad
def a_gradient_overflows(w, x):
  y = planted(jnp.multiply, w, x)
  return jnp.sum(y.astype(jnp.float32)) * 300


@jax.custom_vjp
def _with_rule(x):
  return x * 2


def _forward(x):
  return x * 2, jnp.exp(x)


def _backward(residual, g):
  with jax.named_scope("planted"):
    return (g / (1 + residual - residual - 1),)


_with_rule.defvjp(_forward, _backward)


@fault(f16(1, 2), operation="div", direction="backward")
@jax.grad
def the_backward_rule_of_a_custom_vjp(x):
  return jnp.sum(_with_rule(x).astype(jnp.float32))


@fault(f16(1, 20), operation="exp", path="rule", index=(1,))
@jax.value_and_grad
def the_forward_rule_of_a_custom_vjp(x):
  with jax.named_scope("rule"):
    return jnp.sum(_with_rule(x).astype(jnp.float32))


@jax.custom_jvp
def _with_jvp(x):
  return jnp.sin(x)


@_with_jvp.defjvp
def _jvp(primals, tangents):
  (x,), (t,) = primals, tangents
  with jax.named_scope("planted"):
    return jnp.sin(x), t / x


@fault(f32(1, 0), operation="div", direction="backward", index=(1,))
@jax.grad
def the_rule_of_a_custom_jvp(x):
  return jnp.sum(_with_jvp(x))


@fault(f32(0, 1), operation="log")
@jax.grad
def a_forward_fault_in_remat(x):
  return jnp.sum(jax.checkpoint(lambda x: jnp.sin(planted(jnp.log, x)))(x))


@fault(f32(0, 1), operation="div", direction="backward")
@jax.grad
def a_backward_fault_in_remat(x):
  return jnp.sum(jax.checkpoint(lambda x: jnp.where(x > 0, planted(jnp.log, x), 0.0) * x)(x))


# Loops and branches.


@fault(jnp.ones(10), operation="mul", iteration=4)
def the_fifth_iteration_of_a_scan(xs):
  def body(carry, x):
    return planted(jnp.multiply, carry, x), x

  return jax.lax.scan(body, jnp.asarray(1, jnp.float32), xs * 1e8)[0]


@fault(
  f32(1), jnp.arange(1, 6, dtype=jnp.float32), operation="mul", direction="backward", iteration=2
)
@jax.grad
def the_third_layer_of_a_backward_scan(w, xs):
  def layer(carry, x):
    # Its slope is 1e20 in the third layer alone, where the value is 0.
    slope = jnp.where(x == 3, 1e30, 1.0)
    return planted(_steep, carry, slope), None

  return jnp.sum(jax.lax.scan(layer, w, xs)[0]) * 1e10


@jax.custom_vjp
def _steep(x, slope):
  del slope
  return x


_steep.defvjp(lambda x, slope: (x, slope), lambda slope, g: (g * slope, None))


@fault(f32(1, 2, 3), f32(1, 2, 0), operation="div", iteration=(1, 2))
def a_scan_in_a_scan(xs, ys):
  def outer(carry, x):
    def inner(carry, y):
      divisor = jnp.where((x == 2) & (y == 0), 0.0, 1.0)
      return carry + planted(jnp.divide, x, divisor), None

    return jax.lax.scan(inner, carry, ys)[0], None

  return jax.lax.scan(outer, jnp.float32(0), xs)[0]


@fault(f32(1), operation="mul", iteration=38)
def the_body_of_a_while(x):
  def body(state):
    return state[0] + 1, planted(lambda x: x * 10, state[1])

  return jax.lax.while_loop(lambda state: state[0] < 50, body, (0, x))


@fault(f32(0), operation="div", iteration=3)
def the_condition_of_a_while(x):
  def goes_on(state):
    return 1.0 + planted(jnp.divide, 1.0, 3.0 - state[0]) < 100.0

  return jax.lax.while_loop(goes_on, lambda state: (state[0] + 1, state[1]), (jnp.float32(0), x))


@fault(f32(3, 0), operation="log", index=(1,))
def the_branch_of_a_cond(x):
  return jax.lax.cond(x[0] > 2, lambda x: planted(jnp.log, x), lambda x: x, x)


@fault(f32(3, 0), operation="log", iteration=2)
def a_branch_in_a_loop(x):
  def body(i, x):
    return jax.lax.cond(i == 2, lambda x: planted(jnp.log, x), lambda x: x, x)

  return jax.lax.fori_loop(0, 4, body, x)


@fault(jnp.ones((3, 2, 2), F16), f16(1, 1), operation="dot_general", iteration=1)
@jax.grad
def a_scan_over_layers_with_remat(ws, x):
  @jax.checkpoint
  def layer(x, w):
    return planted(jnp.matmul, x, w), None

  return jnp.sum(jax.lax.scan(layer, x, ws * 250)[0].astype(jnp.float32))


# Optimizers and training steps.


_ADAM = optax.adam(1e-3, eps=1e-9)


@fault(f16(1, 1), f16(1e-4, 1), _ADAM.init(f16(1, 1)), operation="div", path="", index=(0,))
def adam_in_float16(params, grads, state):
  # The square of 1e-4 is 0, and so is epsilon.
  return optax.apply_updates(params, _ADAM.update(grads, state, params)[0])


@fault(f32(1, 2), f32(3, 3), operation="sqrt")
def an_optimizer_takes_a_root(grads, mean):
  second = grads * grads
  return grads / (planted(jnp.sqrt, second - mean * mean) + 1e-8)


@fault(f16(3), F16(2**14), operation="mul", verdict="scale", finite_at=2.0**12)
def the_multiplication_by_the_scale(w, scale):
  def scaled(w):
    return planted(jnp.multiply, jnp.sum(w * 4), scale)

  loss, grads = jax.value_and_grad(scaled)(w)
  return loss, grads / scale


def _linear(params, model_state, batch, rng):
  y = planted(jnp.matmul, batch["x"].astype(F16), params.astype(F16))
  return jnp.mean(y.astype(jnp.float32)), (model_state, {})


def _step(scale: float) -> tuple[Any, Any]:
  tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.DynamicLossScale(init_scale=scale))
  return mpjax.make_train_step(_linear, tx), mpjax.TrainState.create(jnp.ones((2, 1)), tx)


_STEP, _STATE = _step(2.0**15)
_ONES = {"x": jnp.ones((4, 2))}

FAULTS["the scale of a training step"] = Fault(
  # The gradient is 2^15 * 8, and 65504 is the largest number.
  fn=_STEP,
  args=(_STATE, {"x": jnp.full((4, 2), 8.0)}),
  operation="dot_general",
  direction="backward",
  verdict="scale",
  finite_at=2.0**12,
)
FAULTS["the forward pass of a training step"] = Fault(
  fn=_STEP, args=(_STATE, {"x": jnp.full((4, 2), 4e4)}), operation="dot_general"
)
FAULTS["a gradient that fits at scale 1 alone"] = Fault(
  # The gradient itself is 6e4: 2 times that is beyond 65504.
  fn=_step(2.0**15)[0],
  args=(
    _STATE._replace(params=jnp.full((2, 1), 1e-3)),
    {"x": jnp.asarray([[6e4, 0], [6e4, 0], [6e4, 0], [6e4, 0]])},
  ),
  operation="dot_general",
  direction="backward",
  verdict="scale",
  finite_at=1.0,
)
FAULTS["a training step without a fault"] = Fault(fn=_STEP, args=(_STATE, _ONES))


def _skips_by_hand(params, x):
  grads = jax.grad(lambda p: jnp.sum(jnp.sqrt(p * x)))(params)
  finite = jnp.all(jnp.isfinite(grads))
  return jnp.where(finite, params - 0.1 * grads, params)


FAULTS["a step that is skipped by hand"] = Fault(
  fn=_skips_by_hand,
  args=(f32(1, 0), f32(1, 1)),
  operation="div",
  path="",
  direction="backward",
)

# Many at once.


@fault(f32(1, 2, 0, 4), operation="log", index=(2,))
@jax.vmap
def a_lane_of_vmap(x):
  return planted(jnp.log, x)


@fault(f32(1, 2, 100, 4), operation="mul", iteration=18, index=(2,))
@jax.vmap
def a_lane_of_vmap_in_a_scan(x):
  return jax.lax.scan(lambda c, _: (planted(jnp.multiply, c, x), None), x, None, length=30)[0]


@fault(jnp.ones(8).at[3].set(0), operation="log", device={"data": 3})
@jax.jit
def a_device_of_shard_map(x):
  def local(x):
    return jax.lax.psum(jnp.sum(planted(jnp.log, x)), "data")

  return jax.shard_map(local, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P())(x)


@fault(jnp.ones(8).at[5].set(10), operation="mul", device={"data": 5}, iteration=38)
@jax.jit
def a_device_of_shard_map_in_a_scan(x):
  def local(x):
    return jax.lax.scan(lambda c, _: (planted(lambda c: c * x, c), None), x / x, None, length=40)[0]

  return jax.shard_map(local, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P("data"))(x)


@fault(jnp.ones((8, 2)).at[6].set(0), operation="log")
@jax.pmap
def a_device_of_pmap(x):
  return planted(jnp.log, x)


@fault(f32(0, 1, 2), f32(0, 1, 2))
@jax.vmap
def a_lane_of_a_while_that_has_ended(n, x):
  # A lane goes on until the last has ended, and its values are dropped.
  return jax.lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, 1 / s[0]), (n, x))[1]


# Frameworks.


class _Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(4, name="up", kernel_init=nn.initializers.constant(100))(x)
    return nn.Dense(4, name="down", kernel_init=nn.initializers.constant(100))(x)


_NET = mpjax.linen.with_policy(_Net(), "mixed_float16")
_VARIABLES = _NET.init(jax.random.key(0), jnp.ones((2, 3)))
FAULTS["a Linen model under a policy"] = Fault(
  # 300 after the first layer, 4 * 300 * 100 after the second.
  fn=_NET.apply,
  args=(_VARIABLES, jnp.ones((2, 3))),
  operation="dot_general",
  path="_Net/down",
)
FAULTS["the gradient of a Linen model"] = Fault(
  fn=jax.grad(lambda v, x: jnp.mean(_NET.apply(v, x).astype(jnp.float32)) * 1e4),
  args=(_VARIABLES, jnp.full((2, 3), 0.1)),
  operation="dot_general",
  path="_Net/down",
  direction="backward",
)


class _Block(nnx.Module):
  def __init__(self) -> None:
    self.up = nnx.Linear(3, 4, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.constant(100))
    self.down = nnx.Linear(4, 4, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.constant(100))

  def __call__(self, x):
    return self.down(self.up(x))


FAULTS["an NNX model under a policy"] = Fault(
  fn=lambda model, x: model(x),
  args=(mpjax.nnx.with_policy(_Block(), "mixed_float16"), jnp.ones((2, 3))),
  operation="dot_general",
  path="down",
)


def _plain(w, x):
  return jnp.mean(planted(jnp.matmul, x, w))


FAULTS["a plain function under autocast"] = Fault(
  fn=mpjax.autocast(_plain, "mixed_float16"),
  args=(jnp.full((4, 4), 200.0), jnp.full((2, 4), 200.0)),
  operation="dot_general",
)
FAULTS["donated arguments"] = Fault(
  fn=jax.jit(lambda x: planted(jnp.log, x), donate_argnums=0), args=(f32(0, 1),), operation="log"
)

_EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))


def _sharded(x):
  return jnp.sum(jnp.where(x < 2, planted(jnp.log, x) * 2, 0.0))


FAULTS["an array that is sharded explicitly"] = Fault(
  fn=_sharded,
  args=(
    jax.device_put(jnp.ones((8, 4)).at[3, 1].set(0), jax.NamedSharding(_EXPLICIT, jax.P("data"))),
  ),
  operation="log",
  index=(3, 1),
)


def _written(x):
  ref = jax.new_ref(jnp.zeros(2))

  def body(i, carry):
    ref[...] += planted(jnp.log, x) * i
    return carry

  jax.lax.fori_loop(0, 3, body, 0)
  jax.debug.callback(lambda x: None, x)
  return ref[...]


FAULTS["a reference that is written to"] = Fault(
  fn=_written, args=(f32(1, 0),), operation="log", iteration=0, index=(1,)
)

# None of these is a fault.


@fault(f32(0, 1))
def a_hidden_logarithm(x):
  return jnp.where(x > 0, jnp.log(x), 0.0)


@fault(f32(0, 1))
def an_entropy_hidden_later(x):
  return jnp.sum(jnp.where(x > 0, x * jnp.log(x), 0.0))


@fault(f32(0, 1))
@jax.grad
def a_logarithm_hidden_twice(x):
  return jnp.sum(jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0))


@fault(f32(0, 1))
def a_value_that_is_only_compared(x):
  return jnp.log(x) > -1


@fault(f32(0, 1))
def a_value_that_is_only_checked(x):
  return mpjax.all_finite(jnp.log(x))


@fault(f32(0, 1))
def a_value_that_nan_to_num_takes(x):
  return jnp.nan_to_num(jnp.log(x))


@fault(jnp.ones((1, 4, 2, 3)))
@jax.grad
def attention_with_a_causal_mask(x):
  return jnp.sum(jax.nn.dot_product_attention(x, x, x, is_causal=True))


@fault(jnp.ones((2, 3)), jnp.asarray([[0, -jnp.inf, 0], [0, 0, -jnp.inf]]))
@jax.grad
def a_mask_that_is_an_argument(scores, mask):
  return jnp.sum(jax.nn.softmax(scores + mask)[:, 0])


@fault(jnp.asarray([1, 2]), jnp.asarray([1, 0]))
def an_integer_division_by_zero(x, y):
  return (x // y).astype(jnp.float32)


@fault(jnp.ones((0, 3)), jnp.ones((3, 2)))
def empty_arrays(x, w):
  return jnp.sum(x @ w) + jnp.sum(jnp.log(x))


@fault(jnp.asarray(jnp.inf), f32(3))
def a_best_loss_that_starts_at_inf(best, loss):
  return jnp.minimum(best, loss), jnp.where(loss < best, loss, best)


@fault(f32(1, 2))
def a_maximum_that_starts_at_minus_inf(xs):
  def body(carry, x):
    return jnp.maximum(carry, x), carry

  return jax.lax.scan(body, -jnp.inf, xs)[0]
