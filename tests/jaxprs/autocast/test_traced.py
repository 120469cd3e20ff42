"""Functions of trees that are traced and rewritten: how arguments come in, and results leave."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._jaxprs.autocast import InDtype, Interface, Settings, with_settings
from tests import programs

W, X = jnp.eye(3) + 0.25, jnp.arange(6.0).reshape(2, 3) / 4
BF16 = np.dtype(jnp.bfloat16)
HALVES = ["bfloat16", "float16"]


def settings(half="bfloat16", **fields):
  return Settings(policy=mpjax.Policy(compute_dtype=half), ops=mpjax.OpLists(), **fields)


def rewritten(fun, half="bfloat16", *, modules=False, **fields):
  return with_settings(fun, settings(half, modules=modules), "where", Interface(**fields))


def free(returned):
  return returned


def all_data(args):
  return jax.tree.leaves(args)


def product_types(fun, *args):
  return [p.dtypes for p in programs.products(jax.make_jaxpr(fun)(*args))]


# Arguments


@pytest.mark.parametrize("half", HALVES)
def test_what_decides_keeps_float32_until_a_product(half):
  def fun(w, x):
    return ((x @ w) + x) @ w, x @ w

  neutral = rewritten(fun, half, results=free)
  decides = rewritten(fun, half, results=free, data=lambda args: args[1:])
  for call, dtype in ((neutral, half), (decides, "float32")):
    program = jax.make_jaxpr(call)(W, X)
    assert programs.dtypes_of(program, "add") == {dtype}
    assert [p.dtypes for p in programs.products(program)] == [(half, half)] * 3


def test_which_leaves_decide_is_asked_of_the_positional_arguments():
  asked = []

  def data(args):
    asked.append(args)
    return [args[0]["a"]]

  def fun(tree, w):
    product = tree["a"] @ w
    return [(product + each) @ w for each in (tree["a"], tree["b"][0], w[:2])]

  tree = {"a": X, "b": (X + 0, 3)}
  # A keyword argument is neutral.
  call = rewritten(fun, data=data, results=free)
  added = programs.equations(jax.make_jaxpr(lambda tree, w: call(tree, w=w))(tree, W))
  found = [eqn.outvars[0].aval.dtype for eqn, _ in added if eqn.primitive.name == "add"]
  assert found == [np.float32, BF16, BF16]
  assert len(asked) == 1


@pytest.mark.parametrize("half", HALVES)
def test_widened_arguments_show_as_float32_and_count_as_half(half):
  seen = []

  def fun(x):
    seen.append(x.dtype)
    return x * 2, jax.lax.dynamic_update_slice(jnp.zeros((2, 3)), x, (0, 0))

  twice, buffer = rewritten(fun, half, data=all_data, results=free, modules=True)(X.astype(half))
  assert seen == [np.float32]
  assert twice.dtype == half
  np.testing.assert_array_equal(twice, X.astype(half) * 2)
  np.testing.assert_array_equal(buffer, X)
  # Without, they are what they are.
  rewritten(lambda x: seen.append(x.dtype), half)(X.astype(half))
  assert seen[1:] == [half]


def test_only_arrays_of_jax_are_traced_where_that_is_asked_for():
  seen = []
  given = (np.ones(3, np.float32), np.float32(2), np.arange(2), 3, "a", None)
  rewritten(lambda *args: seen.append(args), modules=True)(*given)
  assert all(a is b for a, b in zip(seen[0], given, strict=True))
  rewritten(lambda *args: seen.append(args))(*given)
  assert [isinstance(x, jax.core.Tracer) for x in seen[1]] == [True] * 3 + [False] * 3


def test_a_constant_of_numpy_decides_as_other_constants_do():
  grid = np.arange(6, dtype=np.float32).reshape(2, 3)
  fun = rewritten(lambda w, x, grid: ((x @ w) + grid) @ w, results=free, modules=True)
  for given, dtype in ((grid, "float32"), (0 * grid, "float32"), (jnp.asarray(grid), "bfloat16")):
    program = jax.make_jaxpr(functools.partial(fun, grid=given))(W, X)
    assert programs.dtypes_of(program, "add") == {dtype}


# Results


def test_results_have_the_dtypes_that_are_asked_for():
  def fun(x):
    return {"a": jnp.exp(x), "ids": jnp.arange(2), "n": 3, "z": x @ x.T}

  returned = []

  def results(out):
    returned.append(out)
    return {**out, "a": InDtype(out["a"], np.dtype("float16"))}

  cast = rewritten(fun, results=results)
  found = cast(X)
  assert [found[k].dtype for k in ("a", "ids", "z")] == [np.float16, np.int32, BF16]
  assert found["n"] == 3
  assert set(returned[0]) == set(found)
  np.testing.assert_array_equal(found["a"], np.asarray(jnp.exp(X)).astype("float16"))
  arrays = jax.eval_shape(lambda x: [cast(x)[k] for k in ("a", "ids", "z")], X)
  assert [x.dtype for x in arrays] == [np.float16, np.int32, BF16]
  # Else they have those that the function gives them.
  plain = rewritten(fun)(X)
  assert [plain[k].dtype for k in ("a", "ids", "z")] == [np.float32, np.int32, np.float32]


def test_float32_regions_call_the_function_itself():
  seen = []
  fun = rewritten(lambda x: seen.append(type(x)) or x @ x.T)
  assert mpjax.full_precision(fun)(X).dtype == np.float32
  assert seen == [type(X)]
