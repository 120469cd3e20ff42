"""One call of each primitive that autocast has an opinion of, by the name that jaxprs print.

A call is a function of float32 arrays, made with what JAX exports. Values are such that nothing
overflows or is undefined, before and after rounding to half.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding

from mpjax._matmul.matmul import first_order_p
from mpjax._optim.scaled import scale_cotangent_p, scale_value_p


class Sample(NamedTuple):
  """One call."""

  fun: Callable[..., Any]  # a function of `args`, in any one floating type
  args: tuple[Any, ...]  # float32 arrays
  smooth: tuple[int, ...] | None = None  # those that JAX can differentiate; None for all


def unit(*shape: int, seed: int = 0) -> Any:
  """Returns float32 numbers between 0.1 and 0.9, nearly all of which a half type must round."""
  return np.random.default_rng(seed).uniform(0.1, 0.9, shape).astype(np.float32)


def _elementwise(fun: Callable[..., Any], *offsets: float, smooth: Any = None) -> Sample:
  offsets = offsets or (0.0,)
  args = tuple(unit(3, 4, seed=i) + np.float32(offset) for i, offset in enumerate(offsets))
  return Sample(fun, args, smooth)


def _on_two_devices(fun: Any, ins: Any, outs: Any, **options: Any) -> Any:
  def both(*args):
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=devices)
    return jax.shard_map(fun, mesh=mesh, in_specs=ins, out_specs=outs, **options)(*args)

  return both


_ROWS, _ALL = jax.P("data"), jax.P()

# Half.


def _convolve(x: Any, kernel: Any) -> Any:
  return lax.conv_general_dilated(
    x, kernel, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


def _ragged(x: Any, w: Any) -> Any:
  return lax.ragged_dot(x, w, jnp.asarray([2, 0, 3], jnp.int32))


HALF: dict[str, Sample] = {
  "dot_general": Sample(
    lambda x, y: lax.dot_general(x, y, (((1,), (2,)), ((0,), (0,)))), (unit(2, 9, 8), unit(2, 8, 9))
  ),
  "conv_general_dilated": Sample(_convolve, (unit(2, 5, 6, 3), unit(3, 2, 3, 4, seed=1))),
  "ragged_dot_general": Sample(_ragged, (unit(5, 4), unit(3, 4, 2, seed=1))),
}

# Float32.


def _scatter(kind: str) -> Sample:
  places = jnp.asarray([[1], [3], [1]], jnp.int32)
  numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))

  def fun(buffer, updates):
    unique = {"unique_indices": True} if kind == "scatter_mul" else {}
    at = places[:2] if unique else places
    return getattr(lax, kind)(buffer, at, updates[: len(at)], numbers, **unique)

  return Sample(fun, (unit(4, 3), unit(3, 3, seed=1)))


def _max_pool_gradient(grads: Any, x: Any) -> Any:
  def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")

  return jax.vjp(pool, x)[1](grads)[0]


def _sum_of_gradients(a: Any, b: Any) -> Any:
  return jax.vjp(lambda x: (x, x), jnp.zeros_like(a))[1]((a, b))[0]


def _unreduced_sum(x: Any) -> Any:
  _, pull = jax.vjp(lambda w: lax.pcast(w, "data", to="reduced"), jnp.zeros(x.shape, x.dtype))
  return pull(lax.pcast(x, "data", to="unreduced"))[0]


def _unreduced_scatter(x: Any) -> Any:
  def gather(w):
    return lax.all_gather(w, "data", tiled=True, to="reduced")

  half = lax.pcast(jnp.zeros((x.shape[0] // 2, *x.shape[1:]), x.dtype), "data", to="varying")
  return jax.vjp(gather, half)[1](lax.pcast(x, "data", to="unreduced"))[0]


def _named(names: str, *offsets: float, smooth: Any = None) -> dict[str, Sample]:
  """Returns the samples of primitives whose functions in `jax.lax` are called as they are."""
  return {name: _elementwise(getattr(lax, name), *offsets, smooth=smooth) for name in names.split()}


_BITS_OF_2 = np.float32(2).view(np.int32)

FLOAT32: dict[str, Sample] = {
  **_named("acos asin atanh bessel_i0e bessel_i1e cos cosh erf_inv exp exp2 expm1 log log1p"),
  **_named("rsqrt sin sinh tan"),
  **_named("acosh digamma lgamma", 1.0),
  **_named("igamma igammac", 1.0, 0.0),
  "add_any": _elementwise(_sum_of_gradients, 0.0, 0.0),
  "cumlogsumexp": _elementwise(lambda x: lax.cumlogsumexp(x, 1)),
  "cumprod": _elementwise(lambda x: lax.cumprod(x, 1)),
  "cumsum": _elementwise(lambda x: lax.cumsum(x, 1, reverse=True)),
  "igamma_grad_a": _elementwise(lax.igamma_grad_a, 1.0, 0.0, smooth=()),
  "polygamma": Sample(lax.polygamma, (np.ones((3, 4), np.float32), 1 + unit(3, 4)), smooth=(1,)),
  "pow": _elementwise(lax.pow, 0.0, 1.0),
  "psum": Sample(
    _on_two_devices(lambda x: lax.psum(x, "data"), _ROWS, _ALL, check_vma=False), (unit(4, 3),)
  ),
  "psum_invariant": Sample(
    _on_two_devices(lambda x: lax.psum(x, "data"), _ROWS, _ALL), (unit(4, 3),)
  ),
  "reduce_prod": _elementwise(lambda x: lax.reduce_prod(x, (1,))),
  "reduce_scatter": Sample(
    _on_two_devices(lambda x: lax.psum_scatter(x, "data", tiled=True), _ROWS, _ROWS), (unit(4, 3),)
  ),
  "reduce_sum": _elementwise(lambda x: lax.reduce_sum(x, (0,))),
  "reduce_window_sum": _elementwise(
    lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME")
  ),
  "regularized_incomplete_beta": _elementwise(lax.betainc, 1.0, 1.0, 0.0, smooth=(2,)),
  "scale_value": _elementwise(lambda x: scale_value_p.bind(x, _BITS_OF_2, divide=False)),
  "scatter-add": _scatter("scatter_add"),
  "scatter-mul": _scatter("scatter_mul"),
  "scatter-sub": _scatter("scatter_sub"),
  "select_and_scatter_add": Sample(
    _max_pool_gradient, (unit(2, 3), unit(4, 6, seed=1)), smooth=(0,)
  ),
  "unreduced_psum": Sample(_on_two_devices(_unreduced_sum, _ROWS, _ALL), (unit(4, 3),), smooth=()),
  "unreduced_reduce_scatter": Sample(
    _on_two_devices(_unreduced_scatter, _ROWS, _ROWS), (unit(4, 3),), smooth=()
  ),
  "zeta": _elementwise(lax.zeta, 2.0, 1.0, smooth=()),
}

if hasattr(lax, "polynomial"):  # From jax 0.12 on.
  FLOAT32 |= {
    "log2": _elementwise(lax.log2),
    "polynomial": _elementwise(lambda x: lax.polynomial(x, [0.25, 1.5, -2.0])),
  }

# Promote: two operands or more.


def _primitive(name: str) -> Any:
  return getattr(jax.extend.core.primitives, f"{name}_p").bind


PROMOTE: dict[str, Sample] = {
  **_named("add atan2 div max min mul sub", 0.0, 0.0),
  **_named("eq ge gt le lt ne", 0.0, 0.0, smooth=()),
  **{
    name: _elementwise(_primitive(name), 0.0, 0.0, smooth=())
    for name in ("eq_to", "le_to", "lt_to")
  },
  "clamp": _elementwise(lax.clamp, 0.0, 0.2, 0.4),
  "concatenate": _elementwise(lambda x, y: lax.concatenate([x, y], 1), 0.0, 0.0),
  "device_put": _elementwise(lambda x, y: jax.device_put((x, y)), 0.0, 0.0),
  "optimization_barrier": _elementwise(lambda x, y: lax.optimization_barrier((x, y)), 0.0, 0.0),
  "pad": Sample(lambda x, fill: lax.pad(x, fill, ((1, 1, 0), (0, 2, 1))), (unit(3, 4), unit())),
  "rem": _elementwise(lax.rem, 1.0, 0.0),
  "select_n": _elementwise(
    lambda x, y: lax.select_n(jnp.asarray(np.eye(3, 4, dtype=bool)), x, y), 0.0, 0.0
  ),
  "sort": _elementwise(lambda x, y: lax.sort((x, y), num_keys=1), 0.0, 0.0),
  "stack": _elementwise(lambda x, y: lax.stack([x, y]), 0.0, 0.0),
}

try:  # Until jax 0.11.
  shard_alike = importlib.import_module("jax.experimental.shard_alike").shard_alike
  PROMOTE["shard_alike"] = _elementwise(lambda x, y: shard_alike(x, y), 0.0, 0.0)
except ImportError:
  pass

# Keep: the first operand decides.


def _reduce_window(kind: str) -> Any:
  start, combine = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min)}[kind]
  return lambda x: lax.reduce_window(x, start, combine, (2, 2), (1, 1), "SAME")


def _gather(x: Any) -> Any:
  numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
  return lax.gather(x, jnp.asarray([[2], [0]], jnp.int32), numbers, (1, x.shape[1]))


def _sharding(kind: AxisType) -> NamedSharding:
  # On the devices of the others, so that all may be in one program.
  return NamedSharding(jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2]), _ALL)


def _over_devices(fun: Any, ins: Any, outs: Any, smooth: Any = None) -> Sample:
  return Sample(_on_two_devices(fun, ins, outs), (unit(4, 4),), smooth=smooth)


def _gathered_the_same(x: Any) -> Any:
  if hasattr(lax, "all_gather_invariant"):
    return lax.all_gather_invariant(x, "data", tiled=True)
  return lax.all_gather(x, "data", tiled=True, to="invarying")


KEEP: dict[str, Sample] = {
  **_named("abs asinh atan cbrt ceil erf erfc floor logistic neg round sign sqrt square"),
  **_named("stop_gradient tanh"),
  **_named("is_finite", smooth=()),
  "all_gather": _over_devices(lambda x: lax.all_gather(x, "data", tiled=True), _ROWS, _ROWS),
  "all_gather_invariant": _over_devices(_gathered_the_same, _ROWS, _ALL),
  "all_to_all": _over_devices(lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), _ROWS, _ROWS),
  "approx_top_k": _elementwise(lambda x: lax.approx_max_k(x, 2)[0]),
  "argmax": _elementwise(lambda x: lax.argmax(x, 1, jnp.int32), smooth=()),
  "argmin": _elementwise(lambda x: lax.argmin(x, 1, jnp.int32), smooth=()),
  "broadcast_in_dim": _elementwise(lambda x: lax.broadcast(x, (2,))),
  "copy": _elementwise(jnp.copy),
  "cummax": _elementwise(lambda x: lax.cummax(x, 1)),
  "cummin": _elementwise(lambda x: lax.cummin(x, 1)),
  "dynamic_slice": _elementwise(lambda x: lax.dynamic_slice(x, (1, 0), (2, 2))),
  "dynamic_update_slice": Sample(
    lambda x, update: lax.dynamic_update_slice(x, update, (1, 0)), (unit(3, 4), unit(2, 2))
  ),
  "first_order": _elementwise(lambda x: first_order_p.bind(x, rule=None), smooth=()),
  "gather": _elementwise(_gather),
  "layout_constraint": _elementwise(lambda x: with_layout_constraint(x, Layout((0, 1)))),
  "name": _elementwise(lambda x: checkpoint_name(x, "kept")),
  "pmax": _over_devices(lambda x: lax.pmax(x, "data"), _ROWS, _ALL, smooth=()),
  "pmin": _over_devices(lambda x: lax.pmin(x, "data"), _ROWS, _ALL, smooth=()),
  "ppermute": _over_devices(lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), _ROWS, _ROWS),
  "pvary": _over_devices(lambda x: lax.pcast(x, "data", to="varying"), _ALL, _ROWS),
  "reduce_max": _elementwise(lambda x: lax.reduce_max(x, (1,))),
  "reduce_min": _elementwise(lambda x: lax.reduce_min(x, (1,))),
  "reduce_window_max": _elementwise(_reduce_window("max")),
  "reduce_window_min": _elementwise(_reduce_window("min")),
  "reshard": _elementwise(
    lambda x: jax.jit(lambda x: jax.sharding.reshard(x, _sharding(AxisType.Explicit)))(x)
  ),
  "reshape": _elementwise(lambda x: lax.reshape(x, (2, 6))),
  "rev": _elementwise(lambda x: lax.rev(x, (0,))),
  "scale_cotangent": _elementwise(lambda x: scale_cotangent_p.bind(x, _BITS_OF_2, divide=False)),
  "scatter": _scatter("scatter"),
  "scatter-max": _scatter("scatter_max"),
  "scatter-min": _scatter("scatter_min"),
  "sharding_constraint": _elementwise(
    lambda x: lax.with_sharding_constraint(x, _sharding(AxisType.Auto))
  ),
  "slice": _elementwise(lambda x: lax.slice(x, (1, 0), (3, 2))),
  "split": _elementwise(lambda x: lax.split(x, (1, 3), 1)),
  "squeeze": _elementwise(lambda x: lax.squeeze(lax.slice(x, (0, 0), (1, 4)), (0,))),
  "tile": _elementwise(lambda x: lax.tile(x, (2, 1))),
  "top_k": _elementwise(lambda x: lax.top_k(x, 2)[0]),
  "transpose": _elementwise(lambda x: lax.transpose(x, (1, 0))),
  "unstack": _elementwise(lambda x: jnp.unstack(x)),
}

if hasattr(jax.extend.core.primitives, "one_minus_square_p"):  # From jax 0.12 on.
  KEEP["one_minus_square"] = _elementwise(_primitive("one_minus_square"))

CONDITIONAL: dict[str, Sample] = {"integer_pow": _elementwise(lambda x: lax.integer_pow(x, 3))}

_BY_JAX = "is made by no function that JAX exports"
_EXPLICIT = "needs a mesh of devices with explicit axes"

NO_SAMPLE = {
  "ragged_all_to_all": "has no implementation on CPU devices",
  "convert_element_type": "is a cast, which test_operations.py is about",
  **dict.fromkeys(("broadcast_to", "pbroadcast", "pbroadcast_dynamic", "stage", "tie"), _BY_JAX),
  "xla_metadata_value": _BY_JAX,
  **dict.fromkeys(("relayout", "with_memory_space_constraint"), "is about memory of a device"),
  **dict.fromkeys(("all_gather_reduced", "preduced"), _EXPLICIT),
  **dict.fromkeys(("reduced_vary_cast", "reduced_vary_cast_p"), _EXPLICIT),
  **dict.fromkeys(("vary_unreduced_cast", "vary_unreduced_cast_p"), _EXPLICIT),
  **dict.fromkeys(("unreduced_pmax", "unreduced_pmin"), _EXPLICIT),
}
"""Primitives of these parts that cannot be called here, and why."""

PASSED_ON = [
  name for name in PROMOTE if name in ("device_put", "optimization_barrier", "shard_alike", "sort")
]
"""Primitives that promote nothing, since each operand comes out as itself."""
