"""Formats of matmuls on a mesh with explicit axes: the types and numbers of a plain matmul."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from tests.format_oracle import normal

FORMATS = {
  "float8": mpjax.Float8(skip=()),
  "float8 row": mpjax.Float8(scaling="row", skip=()),
  "float8 block": mpjax.Float8(scaling="block", skip=()),
  "mxfp8": mpjax.MXFP8(),
  "nvfp4": mpjax.NVFP4(),
  "int8": mpjax.Int8(input_grad="int8", weight_grad="int8"),
}
formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


class Place(NamedTuple):
  """A matmul of sharded operands; a `batch` is mapped over."""

  weight: P
  batch: P
  formula: str = "mk,kn->mn"
  weight_shape: tuple[int, ...] = (128, 256)
  batch_shape: tuple[int, ...] = (64, 128)
  out: P | None = None
  axes: tuple[int | None, int] | None = None


PLACES = {
  "sums of the weight": Place(P("d", None), P(None, None)),
  "sums of the batch": Place(P(None, None), P(None, "m")),
  "both axes of the weight": Place(P("d", "m"), P("d", None), out=P("d", "m")),
  "sums of both": Place(P("m", None), P("d", "m"), out=P("d", None)),
  # 72 rows are padded to whole blocks in the gradient of the weight.
  "rows": Place(P(None, None), P("d", None), batch_shape=(72, 128)),
  # A block has the columns of several heads.
  "heads": Place(P(None, "m", None), P("d", None), "mk,khe->mhe", (128, 4, 32)),
  "vmap": Place(P(None, "m"), P("d", None, None), batch_shape=(2, 64, 128), axes=(None, 0)),
}


def gradients(place, policy):
  """Returns a function of a weight and a batch: the result and both gradients."""
  mesh = jax.sharding.get_abstract_mesh()
  sharding = None if place.out is None or mesh.empty else NamedSharding(mesh, place.out)
  multiply = functools.partial(jnp.einsum, place.formula, out_sharding=sharding)
  fun = mpjax.autocast(lambda w, x: multiply(x, w), policy, data_argnums=1)
  mapped = fun if place.axes is None else jax.vmap(fun, place.axes)

  def call(w, x, cotangent=None):
    result, pull = jax.vjp(mapped, w, x)
    return result, *pull(result if cotangent is None else cotangent)

  return call


def policy_of(format):
  return mpjax.Policy(compute_dtype="bfloat16", matmul=format)


def mesh_of_two_axes():
  return jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.slow
@formats
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_results_and_gradients_are_sharded_as_those_of_jax(format, place):
  mesh = mesh_of_two_axes()
  with jax.set_mesh(mesh):
    args = [
      jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
      for shape, spec in (
        (place.weight_shape, place.weight),
        (place.batch_shape, place.batch),
      )
    ]
    found = jax.eval_shape(gradients(place, policy_of(format)), *args)
    wanted = jax.eval_shape(gradients(place, "mixed_bfloat16"), *args)
  for one, other in zip(found, wanted, strict=True):
    assert (one.shape, one.sharding) == (other.shape, other.sharding)


@pytest.mark.slow
@formats
def test_shards_have_the_numbers_of_whole_arrays(format):
  place = Place(P("d", "m"), P("d", None), batch_shape=(72, 128), out=P("d", "m"))
  args = normal(1, place.weight_shape), normal(0, place.batch_shape), normal(2, (72, 256))
  wanted = jax.jit(gradients(place, policy_of(format)))(*args)
  mesh = mesh_of_two_axes()
  with jax.set_mesh(mesh):
    shards = [
      jax.device_put(x, NamedSharding(mesh, spec))
      for x, spec in zip(args, (place.weight, place.batch, place.out), strict=True)
    ]
    found = jax.jit(gradients(place, policy_of(format)))(*shards)
  for one, other in zip(found, wanted, strict=True):
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    np.testing.assert_allclose(one, other, rtol=2**-6, atol=2**-7 * np.max(np.abs(other)))
