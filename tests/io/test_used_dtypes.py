"""What a program rounds its inputs to, for each way in which one can be used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._io.used_dtypes import store_as_used, used_dtypes
from tests.autocast.rig import with_vjp

W, X = jnp.ones((4, 4)), jnp.ones((3, 4))
F16, BF16 = np.dtype("float16"), np.dtype("bfloat16")


def half(x):
  return x.astype(BF16)


def scanned(w, x):
  return jax.lax.scan(lambda c, row: (c, row @ half(w)), jnp.zeros(()), half(x))[1]


def over_rows(w, x):
  return jax.lax.scan(lambda c, row: (c, half(row)), jnp.zeros(()), w)[1]


def carried(w, x):
  return jax.lax.fori_loop(0, 2, lambda _, c: (half(c) @ half(c)).astype(c.dtype), w)


def looped(w, x):
  def more(c):
    return half(w)[0, 0] > 2

  return jax.lax.while_loop(more, lambda c: c @ half(w), half(x))


CASES = {
  "a product in half": (lambda w, x: half(x) @ half(w), BF16),
  "used twice": (lambda w, x: half(x) @ half(w) @ half(w).T, BF16),
  "a product in float32": (lambda w, x: x @ w, None),
  "both": (lambda w, x: half(x) @ half(w) + half((w * w)[:3]), None),
  "two half types": (lambda w, x: (half(w), w.astype(F16)), None),
  "never": (lambda w, x: x, None),
  "handed on": (lambda w, x: (w, half(w)), None),
  "gathered first": (lambda w, x: half(w[jnp.array([0, 1])]), BF16),
  "moved first": (lambda w, x: half(w.T.reshape(2, 8)[None]), BF16),
  "moved, then used": (lambda w, x: w.T.reshape(2, 8) * 2, None),
  "joined with others": (lambda w, x: half(jnp.concatenate([w, x])), None),
  "widened": (lambda w, x: w.astype(jnp.int32), None),
  "jit": (lambda w, x: jax.jit(half)(w), BF16),
  "out of jit, then rounded": (lambda w, x: half(jnp.take(w, jnp.array([0, 1]), axis=0)), BF16),
  "out of jit, then used": (lambda w, x: jnp.take(w, jnp.array([0, 1]), axis=0) + 1, None),
  "out of jit, and handed on": (lambda w, x: jax.jit(jnp.transpose)(w), None),
  "remat": (lambda w, x: jax.checkpoint(half)(w), BF16),
  "custom_vjp": (lambda w, x: with_vjp(half)(w), BF16),
  "scan, constant": (scanned, BF16),
  "scan, rows": (over_rows, BF16),
  "scan, carried": (carried, None),
  "out of a scan, then rounded": (lambda w, x: half(jax.lax.map(jnp.flip, w)), BF16),
  "out of a branch": (
    lambda w, x: half(jax.lax.cond(x[0, 0] > 0, jnp.transpose, lambda w: w * 2, w)),
    None,
  ),
  "while": (looped, BF16),
  "cond": (lambda w, x: jax.lax.cond(x[0, 0] > 0, half, lambda w: half(w) * 2, w), BF16),
  "cond, one branch": (
    lambda w, x: jax.lax.cond(x[0, 0] > 0, half, lambda w: half(w * 2), w),
    None,
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_way_of_use(name):
  fun, wanted = CASES[name]
  assert used_dtypes(fun, W, X) == [wanted]


@pytest.mark.parametrize("name", [n for n, (_, dtype) in CASES.items() if dtype])
def test_what_is_stored_so_gives_the_same_bits(name):
  fun, dtype = CASES[name]
  w = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
  wide, narrow = (jax.jit(functools.partial(fun, v))(X) for v in (w, w.astype(dtype)))
  np.testing.assert_array_equal(wide.astype(jnp.float32), narrow.astype(jnp.float32))


def test_arguments_that_are_no_arrays_are_passed_unchanged():
  def fun(w, x, names, kinds, *, scale):
    assert names == "ab"
    assert kinds.tolist() == ["c"]
    return half(x) @ half(w) * scale

  args = (jax.ShapeDtypeStruct(X.shape, X.dtype), "ab", np.asarray(["c"]))
  assert store_as_used(fun, W, args, {"scale": 2.0}, "here").dtype == BF16


def test_trees():
  def fun(tree, x):
    return half(x) @ half(tree["a"]) + half(tree["b"][0][None]).sum() * half(tree["n"])

  tree = {"a": W, "b": [jnp.ones(4), None], "n": jnp.int32(3)}
  assert used_dtypes(fun, tree, X) == [BF16, BF16, None]
