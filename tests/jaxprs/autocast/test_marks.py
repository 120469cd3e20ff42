"""Marks of regions and results in a program: rewriting reads them, and takes them out."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._jaxprs.autocast import Interface, Settings, leaving, mark, region_of, with_settings
from mpjax._jaxprs.autocast.marks import policy_of
from mpjax._jaxprs.autocast.scopes import (
  as_written,
  low_dtype,
  marked,
  names_of,
  output_of,
  policy_at,
)
from tests import programs

BF16, F16, F32 = (np.dtype(jnp.dtype(name)) for name in ("bfloat16", "float16", "float32"))
HALF = Settings(policy=mpjax.Policy(compute_dtype=BF16), ops=mpjax.OpLists())
W, X = jnp.eye(3) + 0.1, jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def rewritten(fun, compute=BF16, results=None):
  """Returns a function rewritten: parameters first, then what decides."""
  interface = Interface(data=lambda args: args[1:], results=results or (lambda out: out))
  settings = Settings(policy=mpjax.Policy(compute_dtype=compute), ops=mpjax.OpLists(), modules=True)
  return with_settings(fun, settings, "test", interface)


def product_types(fun, *args):
  return [p.dtypes for p in programs.products(jax.make_jaxpr(fun)(*args))]


@pytest.mark.parametrize(
  "policy",
  [
    *("mixed_bfloat16", "p=f32,c=f16,o=f32", "float32", "mixed_float8", "c=f32,precision=highest"),
    "c=bf16,w=f32,precision=BF16_BF16_F32",
    "c=bf16,precision=high,matmul=float8:row:weight_grad=bfloat16:skip=8x*|4x8",
    None,
  ],
)
def test_a_region_names_its_policy(policy):
  given = None if policy is None else mpjax.Policy.parse(policy)
  name = region_of(given)
  assert policy_of(name) == given
  assert names_of(f"Net/{name}/head") == ("Net", name, "head")


@pytest.mark.parametrize(
  ("regions", "dtype", "stays"),
  [
    (("float16",), F16, False),
    (("bfloat16", "float16"), F16, False),
    (("float16", "float32"), None, False),
    (("float32", "bfloat16"), BF16, False),
    (("bfloat16", "c=f32,precision=highest"), None, False),
    (("float32", "c=bf16,w=f32,precision=high"), BF16, False),
    (("float16", "as-it-is"), None, True),
    ((), BF16, False),
  ],
)
def test_the_innermost_mark_decides(regions, dtype, stays):
  scope = ("Net", *(name for r in regions for name in (f"mpjax.region={r}", "layer")))
  assert marked(scope) == (regions[-1] if regions else None)
  assert low_dtype(policy_at(scope, HALF)) == dtype
  # Float32 by a policy is rounded on its way to a product elsewhere; what is left as it is, is not.
  assert as_written(scope, HALF) is stays


def test_full_precision_is_stronger_than_a_mark_and_scopes_of_the_users_are_none():
  for scope in itertools.permutations(("mpjax.full_precision", "mpjax.region=bfloat16")):
    assert policy_at(scope, HALF) is None
  for name in ("mpjax.region", "region=float16", "my mpjax.region=float16"):
    assert marked((name,)) is None
    assert output_of((name,)) is None


def two_regions(w, x):
  with mark("float16"):
    x = jnp.tanh(x @ w)
    with mark("as-it-is"):
      x = x @ w
  with mark("float32"):
    x = x @ w
  return jnp.sum(x @ w)


WAYS = {
  "plain": lambda f: f,
  "jit": jax.jit,
  "grad": lambda f: lambda w, x: jax.grad(f)(w, x).sum(),
  "remat": jax.checkpoint,
  "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[None]).sum(),
  "scan": lambda f: (
    lambda w, x: jax.lax.scan(lambda c, _: (c + f(w, x), None), 0.0, None, length=2)[0]
  ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_marks_go_through_transformations(way, outside):
  half, full, base = ("float16",) * 2, ("float32",) * 2, ("bfloat16",) * 2
  if outside:
    fun = WAYS[way](rewritten(two_regions))
  else:
    fun = rewritten(WAYS[way](two_regions))
  found = product_types(fun, W, X)
  assert found[:4] == [half, full, full, base]
  wanted = {half, full, base}
  assert set(found) == wanted
  # Each product has two of its own in a derivative, of x and of w; of the first there is no x.
  counts = {kind: found.count(kind) for kind in wanted}
  assert counts == ({half: 2, full: 6, base: 3} if way == "grad" else {half: 1, full: 2, base: 1})


@pytest.mark.parametrize("way", WAYS)
def test_a_rewritten_program_shows_no_marks(way):
  def fun(w, x):
    with jax.named_scope("mine"):
      return two_regions(w, x)

  def stacks(fun):
    found = programs.equations(jax.make_jaxpr(fun)(W, X))
    return [str(eqn.source_info.name_stack) for eqn, _ in found]

  assert any("mpjax." in stack for stack in stacks(WAYS[way](fun)))
  found = stacks(rewritten(WAYS[way](fun)))
  assert not any("mpjax." in stack for stack in found)
  assert ("mine",) in {names_of(stack) for stack in found}


# Results


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_leaving_changes_nothing_until_it_is_rewritten(dtype):
  tree = {"x": X, "ids": jnp.arange(3), "n": 3, "name": "a", "none": None}
  tree["z"] = jnp.ones(2, "complex64")
  found = leaving(tree, dtype)
  np.testing.assert_array_equal(found["x"], X)
  assert found["x"].dtype == F32
  rest = {k: v for k, v in found.items() if k != "x"}
  assert all(rest[k] is tree[k] for k in rest)
  # Its derivative is 1, also where float32 has no more digits.
  grad = jax.grad(lambda x: jnp.sum(leaving(x, dtype) * X))(X)
  np.testing.assert_array_equal(grad, X)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_a_result_leaves_in_the_dtype_that_is_asked_for(dtype):
  def fun(w, x):
    return leaving(x @ w, dtype), leaving(jnp.exp(x), dtype)

  product, exp = rewritten(fun)(W, X)
  assert product.dtype == exp.dtype == dtype
  # The product is the float32 sum where that is asked for, else what was computed, cast.
  sums = np.dot(*(np.asarray(x.astype("bfloat16"), np.float32) for x in (X, W)))
  wanted = sums if dtype == F32 else sums.astype("bfloat16").astype(dtype)
  np.testing.assert_allclose(product, wanted, rtol=1e-6 if dtype == F32 else 0)
  np.testing.assert_array_equal(exp, np.asarray(jnp.exp(X)).astype(dtype))


def test_what_reads_a_result_reads_it_rounded():
  def fun(w, x, dtype):
    with mark("float32"):
      made = jnp.exp(x)
      made = made if dtype is None else leaving(made, dtype)
    return jnp.sum(made)

  x = jnp.full((1, 4), 1.0 + 2.0**-12)
  plain, low = (rewritten(functools.partial(fun, dtype=d))(W, x) for d in (None, BF16))
  np.testing.assert_allclose(plain, 4 * np.exp(np.float64(1 + 2.0**-12)), rtol=1e-6)
  assert low == 4 * np.float32(np.exp(np.float32(1 + 2.0**-12)).astype(BF16))


def test_no_mark_is_left_where_a_policy_casts_what_it_returns():
  model = mpjax.linen.with_policy(nn.Dense(2), "mixed_bfloat16")
  x = jnp.ones((1, 3))
  variables = model.init(jax.random.key(0), x)
  program = jax.make_jaxpr(jax.grad(lambda v: model.apply(v, x).sum()))(variables)
  names = {str(eqn.source_info.name_stack) for eqn, _ in programs.equations(program)}
  assert not any("mpjax" in name for name in names)
  assert {"jvp(Dense)", "transpose(jvp(Dense))", "jvp()", "transpose(jvp())"} <= names
