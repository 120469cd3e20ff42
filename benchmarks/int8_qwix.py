"""Int8 beside Qwix: the same values, products and gradients where the definitions are the same.

  PYTHONPATH=. python benchmarks/int8_qwix.py

It needs `pip install qwix==0.1.8` beside jax. Qwix maps the largest element to 127.5 and mpjax to
127, so Qwix is told to calibrate for 127.5 / 127 of it. Its scales then differ in the last digit.
Values differ where the quotient is half way between two integers.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import qwix  # pyright: ignore[reportMissingImports]
from flax import nnx

import mpjax
from mpjax._matmul.int8 import quantise

OUT = pathlib.Path(__file__).parent / "results" / "int8" / "qwix_0.1.8.json"
ROWS, DEPTH, COLUMNS = 64, 256, 48
SCALED = f"absmax,{127.5 / 127!r}"
AXES = (((1,), (0,)), ((), ()))


class Model(nnx.Module):
  """One layer without a bias. Input [batch, features]."""

  def __init__(self) -> None:
    rngs = nnx.Rngs(0)
    self.linear = nnx.Linear(DEPTH, COLUMNS, use_bias=False, rngs=rngs, dtype=jnp.bfloat16)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.linear(x)


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns an activation, a kernel and a gradient of their product, which bfloat16 can hold."""
  rng = np.random.default_rng(0)
  shapes = (ROWS, DEPTH), (DEPTH, COLUMNS), (ROWS, COLUMNS)
  x, w, g = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
  return x, w, g


def relative_error(found: jax.Array, right: np.ndarray) -> float:
  return float(np.linalg.norm(np.asarray(found, np.float64) - right) / np.linalg.norm(right))


def of_qwix(x: jax.Array, channel: int, method: str) -> qwix.QArray:
  return qwix.quantize(x, jnp.int8, channelwise_axes=[channel], calibration_method=method)


def gradients_of_qwix(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the gradients of kernel and activation of a layer that is in int8 in Qwix."""
  rule = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8)
  model: Any = qwix.quantize_model(Model(), qwix.QtProvider([rule]), x)
  model.linear.kernel[...] = w.astype(jnp.float32)
  graphdef, state = nnx.split(model)

  def call(state: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)(x)

  _, pull = jax.vjp(call, state, x)
  of_state, of_x = pull(g)
  return of_state.linear.kernel[...], of_x


def gradients_of_mpjax(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the same gradients of a matmul that is in int8 in mpjax."""

  def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return (x @ w).astype(jnp.bfloat16)

  cast = mpjax.autocast(layer, "c=bf16,matmul=int8", data_argnums=1)
  _, pull = jax.vjp(cast, w.astype(jnp.float32), x)
  return pull(g)


def distance_from_ties(x: jax.Array, ours: Any, same: Any) -> tuple[int, float]:
  """Returns how many values differ, and how far their quotients are from ties at most."""
  differ = np.asarray(ours.values) != np.asarray(same.qvalue)
  quotients = (np.asarray(x, np.float64) / np.asarray(ours.scale, np.float64))[differ]
  distances = np.abs(np.abs(quotients) % 1 - 0.5)
  return int(np.sum(differ)), float(np.max(distances, initial=0))


def compared() -> dict[str, Any]:
  """Returns which results are the same, and the errors of both libraries."""
  x, w, g = operands()
  wide = [each.astype(jnp.float32) for each in (x, w)]
  ours = quantise(wide[0], (1,)), quantise(wide[1], (0,))
  same = of_qwix(wide[0], 0, SCALED), of_qwix(wide[1], 1, SCALED)
  plain = of_qwix(wide[0], 0, "absmax"), of_qwix(wide[1], 1, "absmax")
  product = functools.partial(qwix.dot_general, dimension_numbers=AXES)
  sums = jax.lax.dot_general(ours[0].values, ours[1].values, AXES, preferred_element_type=jnp.int32)
  found = sums.astype(jnp.float32) * ours[0].scale * ours[1].scale
  of_ours = product(*(qwix.QArray(each.values, each.scale) for each in ours))
  right = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  pairs = zip(gradients_of_qwix(x, w, g), gradients_of_mpjax(x, w, g), strict=True)
  count, distance = distance_from_ties(wide[0], ours[0], same[0])
  return {
    "values": int(x.size),
    "values that differ": count,
    "distance of these from ties": distance,
    "product of these": np.array_equal(of_ours, found),
    "gradients": [np.array_equal(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)) for a, b in pairs],
    "error of mpjax": relative_error(found, right),
    "error of Qwix": relative_error(product(*plain), right),
  }


if __name__ == "__main__":
  packages = ("jax", "jaxlib", "flax", "qwix", "numpy")
  environment = measure.environment({"mpjax": mpjax.__version__}, packages)
  results = {"environment": environment, **compared()}
  measure.write(OUT, results)
  print(json.dumps(results, indent=1))
