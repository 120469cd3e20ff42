"""Rounding of half parameters: from a master, to nearest, stochastically, and how fair that is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

HALF = ["float16", "bfloat16"]

BOTH = pytest.mark.parametrize("half", HALF)


def same(found, expected):
  """Bit-equal, but for the payload of a NaN."""
  found, expected = np.asarray(found), np.asarray(expected)
  assert found.dtype == expected.dtype
  nan = np.isnan(expected.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
  assert found[~nan].tobytes() == expected[~nan].tobytes()


def nearest(exact, half):
  """Rounded by NumPy, to nearest with ties to even."""
  with np.errstate(over="ignore"):
    return exact.astype(half)


def samples(half):
  """Float32 numbers over the whole range of a half type, its smallest and largest included."""
  rng = np.random.default_rng(0)
  low, high = (-26, 16) if half == "float16" else (-126, 128)
  exponents = rng.uniform(low, high, 20_000)
  found = rng.choice([-1.0, 1.0], 20_000) * 2.0**exponents
  largest = float(jnp.finfo(half).max)
  ends = [largest, largest * (1 + 2.0**-14), 65519.0 if half == "float16" else 3.3961e38]
  ends += [2.0**-14, 2.0**-14 - 2.0**-30, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 1e-30]
  found = np.concatenate([found, ends, [-x for x in ends]])
  return found[np.abs(found) < 3.4028e38].astype(np.float32)


def zeros(like, half):
  return np.zeros(like.shape, jnp.dtype(half))


@BOTH
@pytest.mark.parametrize("compiled", [True, False])
def test_from_a_master_is_its_rounding_whatever_the_update(half, compiled):
  def from_master(params, updates, master):
    return mpjax.apply_updates(params, updates, master=master)

  apply = jax.jit(from_master) if compiled else from_master
  master = np.concatenate([samples(half), np.asarray([0.0, -0.0, 1e-30, -1e-30], np.float32)])
  for update in (np.nan, 0.0, 1e30):
    updates = np.full(master.shape, update, np.float32)
    same(apply(zeros(master, half) + 7, updates, master), nearest(master, half))


def test_from_a_master_with_holes():
  """A leaf without a master is added to, also where one None stands for a subtree."""
  params = {"w": jnp.ones(2, "bfloat16"), "rest": {"b": jnp.ones(2), "h": jnp.ones(2, "float16")}}
  updates = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), params)
  for rest in (None, {"b": None, "h": None}):
    master = {"w": jnp.full(2, 3.001), "rest": rest}
    found = mpjax.apply_updates(params, updates, master=master)
    assert found["w"].tolist() == [3.0, 3.0]
    same(found["rest"]["b"], np.float32([1 + 1e-3] * 2))
    same(found["rest"]["h"], np.asarray([1 + 1e-3] * 2, np.float16))
  # What is float32 is its own master.
  own = mpjax.apply_updates(jnp.ones(2), jnp.ones(2), master=jnp.full(2, 9.0))
  assert own.tolist() == [2, 2]
