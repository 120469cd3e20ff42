"""Named scopes: the marks of regions and results, where an equation is, and what the rules say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._autocast.scopes import (
  AS_GIVEN,
  LAYER_ENDS,
  POLICY_ENDS,
  REGION,
  TABLE,
  End,
  ScopedSettings,
  Settings,
  end_of_layer,
  end_of_policy,
  mark_of,
  policy_at,
  region_in,
  scope_of,
)
from mpjax._policy.active import Region
from tests import programs
from tests.autocast.rig import matmuls, rewritten
from tests.errors import refused

BF16, F16, F32 = (np.dtype(jnp.dtype(name)) for name in ("bfloat16", "float16", "float32"))
HALF = Settings(region=Region(mpjax.Policy(compute_dtype=BF16)), ops=mpjax.OpLists())


def mark(region):
  return jax.named_scope(REGION + region)


W, X = jnp.eye(8) + 0.1, jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
of_modules = functools.partial(
  rewritten, modules=True, data=lambda args: args[1:], results=lambda out: out
)


NAMED = (
  *("mixed_bfloat16", "p=f32,c=f16,o=f32", "float32", "mixed_float8", "c=f32,precision=highest"),
  "c=bf16,w=f32,precision=BF16_BF16_F32",
  "c=bf16,precision=high,matmul=float8:row:weight_grad=bfloat16:skip=8x*|4x8",
)


@pytest.mark.parametrize(
  "region",
  [*(Region(mpjax.Policy.parse(name)) for name in NAMED), Region(None), Region(None, BF16)],
  ids=[*NAMED, "none", "called in bfloat16"],
)
def test_a_mark_names_its_region(region):
  name = mark_of(region)
  assert region_in(name.removeprefix(REGION)) == region
  scoped = jax.named_scope("Net")(jax.named_scope(name)(jnp.sin))
  (eqn,) = jax.make_jaxpr(scoped)(1.0).eqns
  assert scope_of(eqn.source_info.name_stack) == ("Net", name)


EXACT, FLOAT32 = "mpjax.full_precision", "mpjax.region=float32"


@pytest.mark.parametrize(
  ("marks", "dtype", "as_written"),
  [
    (("mpjax.region=float16",), F16, False),
    (("mpjax.region=bfloat16", "mpjax.region=float16"), F16, False),
    # Float32 by a policy is rounded on its way to a product elsewhere.
    (("mpjax.region=float16", FLOAT32), None, False),
    ((FLOAT32, "mpjax.region=bfloat16"), BF16, False),
    (("mpjax.region=bfloat16", "mpjax.region=c=f32,precision=highest"), None, False),
    ((FLOAT32, "mpjax.region=c=bf16,w=f32,precision=high"), BF16, False),
    # What is left as it is, is not, nor what full_precision returns, which no mark changes.
    (("mpjax.region=float16", "mpjax.region=as-it-is"), None, True),
    ((EXACT,), None, True),
    (("mpjax.region=float16", EXACT), None, True),
    ((FLOAT32, EXACT), None, True),
    ((EXACT, "mpjax.region=bfloat16"), None, True),
    # Scopes of the user's are no marks.
    ((), BF16, False),
    (("mpjax.region", "region=float16", "my mpjax.region=float16"), BF16, False),
  ],
)
def test_the_innermost_mark_decides(marks, dtype, as_written):
  scope = ("Net", *(name for mark in marks for name in (mark, "layer")))
  scope_policy = policy_at(ScopedSettings(HALF, scope))
  assert (scope_policy.low_dtype, scope_policy.as_written) == (dtype, as_written)


@pytest.mark.parametrize("mark", [TABLE, AS_GIVEN, EXACT, "mpjax.region=float16"])
def test_an_inner_jaxpr_is_in_the_marked_scopes_of_its_equation(mark):
  scope_policy = policy_at(ScopedSettings(HALF, ("Net", mark, "layer")))
  inside = policy_at(ScopedSettings(HALF, scope_policy.inside))
  assert scope_policy.inside == (mark,)
  assert inside._replace(scope=()) == scope_policy._replace(scope=())


def test_full_precision_overrules_the_marks_in_it():
  region = mark_of(Region(None, BF16))
  assert policy_at(ScopedSettings(HALF, (region,))).region == Region(None, BF16)
  assert policy_at(ScopedSettings(HALF, (region, EXACT))).region == Region(None)
  # The precision of a float32 policy is not for what `full_precision` keeps as it is.
  highest = jax.lax.Precision.HIGHEST
  for name, wanted in (("c=f32,precision=highest", None), ("c=bf16,precision=highest", highest)):
    marked = policy_at(ScopedSettings(HALF, (f"mpjax.region={name}", EXACT)))
    assert marked.asked.policy == wanted


def two_regions(w, x):
  with mark("float16"):
    x = jnp.tanh(x @ w)
    with mark("as-it-is"):
      x = x @ w
  with mark("float32"):
    x = x @ w
  with jax.named_scope("Net/blocks(0)"), jax.named_scope("jvp(head)"):
    return jnp.sum(jnp.tanh(x @ w))


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
  fun = WAYS[way](of_modules(two_regions)) if outside else of_modules(WAYS[way](two_regions))
  found = matmuls(fun, W, X)
  assert found[:4] == [half, full, full, base]
  wanted = {half, full, base}
  assert set(found) == wanted
  # Each product has two of its own in a derivative, of x and of w; of the first there is no x.
  counts = {kind: found.count(kind) for kind in wanted}
  assert counts == ({half: 2, full: 6, base: 3} if way == "grad" else {half: 1, full: 2, base: 1})
  # Marks are gone then, and scopes of the user are not, whatever they are.
  equations = programs.equations(jax.make_jaxpr(fun)(W, X))
  stacks = [eqn.source_info.name_stack for eqn, _ in equations]
  assert not any("mpjax." in str(stack) for stack in stacks)
  assert {scope_of(stack) for stack in stacks} == {(), ("Net", "blocks(0)", "jvp(head)")}


# Ends of policies and layers


@pytest.mark.parametrize(
  ("scope", "end"),
  [
    ((POLICY_ENDS + "float32",), End(F32, of_policy=True)),
    ((POLICY_ENDS + "float16",), End(F16, of_policy=True)),
    ((LAYER_ENDS + "bfloat16",), End(BF16, of_policy=False)),
    # It is the innermost scope of the one operation that it marks.
    ((LAYER_ENDS + "bfloat16", POLICY_ENDS + "float32"), End(F32, of_policy=True)),
    ((POLICY_ENDS + "float32", "Dense_0"), None),
    (("policy-ends=float32",), None),
    ((), None),
  ],
)
def test_the_innermost_scope_may_mark_an_end(scope, end):
  assert policy_at(ScopedSettings(HALF, ("Net", *scope))).end == end


ENDS = {
  "policy in float32": functools.partial(end_of_policy, dtype=F32),
  "policy in float16": functools.partial(end_of_policy, dtype=F16),
  "layer in bfloat16": functools.partial(end_of_layer, dtype="bfloat16"),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_mark_of_an_end_changes_nothing_until_it_is_rewritten(end):
  tree = {"x": X, "ids": jnp.arange(3), "n": 3, "name": "a", "none": None}
  tree["z"] = jnp.ones(2, "complex64")
  found = end(tree)
  np.testing.assert_array_equal(found["x"], X)
  assert found["x"].dtype == F32
  rest = {k: v for k, v in found.items() if k != "x"}
  assert all(rest[k] is tree[k] for k in rest)
  # Its derivative is 1, also where float32 has no more digits.
  grad = jax.grad(lambda x: jnp.sum(end(x) * X))(X)
  np.testing.assert_array_equal(grad, X)


def test_a_function_without_scopes_is_told_that_there_are_none():
  fun = mpjax.autocast(lambda w, x: x @ w, rules=[mpjax.Rule("float32", path="a/b")])
  scopes = "at least one jax.named_scope", "none of the 1 jax.named_scopes of mpjax.autocast(fn)"
  with refused(ValueError, "rules: mpjax.Rule(", *scopes, "The only jax.named_scope is the root"):
    fun(W, X)
