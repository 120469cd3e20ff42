import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import mpjax
from tests.debug.found_risks import kinds

pytestmark = pytest.mark.standard_promotion


def test_a_float32_matmul_on_purpose_ends_the_search():
  def fn(w, x):
    h = x @ w
    gate = mpjax.full_precision(lambda: h @ w)()
    return gate == gate.max(-1, keepdims=True), jnp.linalg.qr(gate), jnp.sin(gate)

  assert kinds(fn) == []


def on_devices(fn, check_vma):
  """Returns `fn` on two devices, each with half of the rows."""
  mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
  specs = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P("d")}
  return jax.shard_map(fn, mesh=mesh, check_vma=check_vma, **specs)


COLLECTIVES = {
  "psum": lambda h: jax.lax.psum(h, "d"),
  "pmean": lambda h: jax.lax.pmean(h, "d"),
  "pmax": lambda h: jax.lax.pmax(h, "d"),
  "pmin": lambda h: jax.lax.pmin(h, "d"),
  "psum_scatter": lambda h: jax.lax.psum_scatter(h, "d", tiled=True),
  "all_gather": lambda h: jax.lax.all_gather(h, "d"),
  "all_to_all": lambda h: jax.lax.all_to_all(h, "d", 1, 0, tiled=True),
  "ppermute": lambda h: jax.lax.ppermute(h, "d", [(0, 1), (1, 0)]),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rounding_passes_a_collective(name, check_vma):
  def of(sink):
    # A result that is the same on all devices has other rows in `out_specs`, so each adds its own.
    return on_devices(lambda w, x: sink(COLLECTIVES[name](x @ w)).sum() + 0 * x[:, 0], check_vma)

  assert kinds(of(jnp.sin)) == ["angle"]
  assert kinds(of(lambda h: h.astype(int))) == ["index"]


PLACED = {
  "a segment sum": lambda h: jax.ops.segment_sum(h, jnp.arange(len(h)) // 2, len(h)),
  "an update by a difference": lambda h: h.at[0].subtract(3.0),
  "a stack": lambda h: jnp.stack([h, h + 1]),
  "a device": lambda h: jax.device_put(h, jax.devices("cpu")[0]),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_rounding_passes_updates_and_moves(name):
  assert kinds(lambda w, x: jnp.sin(PLACED[name](x @ w))) == ["angle"]
  assert kinds(lambda w, x: PLACED[name](x @ w).astype(int)) == ["index"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_comparison_with_an_order_over_devices(check_vma):
  def winners(w, x):
    h = x @ w
    return jnp.where(h == jax.lax.pmax(h, "d"), h, 0)

  def winners_of_columns(w, x):
    h = x @ w
    return jnp.where(h == jax.lax.pmin(h.min(0), "d"), h, 0)

  assert kinds(on_devices(winners, check_vma)) == ["comparison"]
  assert kinds(on_devices(winners_of_columns, check_vma)) == ["comparison"]


def test_a_loop_is_walked_through():
  def rotated(w, x):
    step = lambda carry, _: ((jnp.sin(carry[1]), carry[0] @ w), None)  # noqa: E731
    return jax.lax.scan(step, (x, x), None, length=3)[0]

  assert kinds(rotated) == ["angle"]


def test_a_loop_that_carries_an_argument_ends():
  def carried(w, x):
    return jax.lax.fori_loop(0, 3, lambda _, c: (c[0], jnp.tanh(c[1] @ c[0])), (w, x))

  assert kinds(carried) == []
