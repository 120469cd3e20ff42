"""Which policy each module has: rules, fields of modules, exemption, and where a policy begins.

Each model is described once, for Linen and for NNX.
"""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.linen.probes import noted, noted_as
from tests.models import parts
from tests.models.parts import Part, module
from tests.programs import products, run

Rule = mpjax.Rule
X = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)
PATHS = ("", "one", "one/leaf", "between", "two", "two/leaf")
"""In the order in which the modules of a net run, each of which shows the dtype of its products."""

LEAF = module(lambda m, x: noted_as("", x))


def block(own=None):
  return module(lambda m, x: m.leaf(noted_as("", x)), own=own, leaf=LEAF)


BLOCK = block()


def net(of_two=None):
  """Two blocks, equal if no field is set, and a leaf between them."""
  two = BLOCK if of_two is None else block(of_two)
  call = lambda m, x: m.two(m.between(m.one(noted_as("", x))))  # noqa: E731
  return module(call, one=BLOCK, between=LEAF, two=two)


def keeping(of_block=None):
  """Keeps what its block returns: a product, which has the dtype of its policy."""

  def call(m, x):
    x = m.block(x)
    if isinstance(m, nn.Module):
      m.sow("kept", "x", x)
    else:
      m.kept = nnx.Intermediate(x)
    return x

  return module(call, block=module(lambda m, x: m.layer(x), own=of_block, layer=parts.dense(8, 3)))


def linen_call(part, policy, rules, **options):
  model = part.linen(None)
  params = model.init(jax.random.key(0), X).get("params", {})
  wrapped = mpjax.linen.with_policy(model, policy, rules, **options)
  return lambda x: wrapped.apply({"params": params}, x, mutable=["kept"])


def nnx_call(part, policy, rules, **options):
  model = part.nnx(None, nnx.Rngs(0))

  def call(x):
    view = mpjax.nnx.with_policy(nnx.clone(model), policy, rules, **options)
    out = view(x)
    return out, nnx.as_pure(nnx.pop(view, nnx.Intermediate))

  return call


LIBRARIES = {
  "linen": types.SimpleNamespace(
    call=linen_call, Block=type(BLOCK.linen(None)), Leaf=type(LEAF.linen(None))
  ),
  "nnx": types.SimpleNamespace(
    call=nnx_call, Block=type(BLOCK.nnx(None, nnx.Rngs(0))), Leaf=type(LEAF.nnx(None, nnx.Rngs(0)))
  ),
}


@pytest.fixture(params=LIBRARIES)
def lib(request):
  return LIBRARIES[request.param]


def seen(call):
  """Returns the dtype in which each module of a net computes."""
  return dict(zip(PATHS, (dtype for _, dtype in noted(call, X)), strict=True))


def everywhere(dtype, **others):
  found = dict.fromkeys(PATHS, dtype)
  return found | {path.replace("__", "/"): other for path, other in others.items()}


RULES = {
  # The rules, given the library, and the dtype in which each module computes.
  "none": (lambda lib: [], everywhere("bfloat16")),
  # An inner policy overrides the outer, for all that it encloses, and is undone after it.
  "path": (
    lambda lib: [Rule("float16", path="one")],
    everywhere("bfloat16", one="float16", one__leaf="float16"),
  ),
  "inner and outer": (
    lambda lib: [Rule("float16", path="one"), Rule("float32", path="one/leaf")],
    everywhere("bfloat16", one="float16", one__leaf="float32"),
  ),
  "root": (lambda lib: [Rule("float16", path="")], everywhere("float16")),
  "children": (lambda lib: [Rule("float16", path="*")], everywhere("float16") | {"": "bfloat16"}),
  "class": (
    lambda lib: [Rule("float16", module=lib.Block)],
    everywhere("float16", between="bfloat16") | {"": "bfloat16"},
  ),
  # The first rule that matches a module wins; one on the module beats one on what encloses it.
  "first": (
    lambda lib: [
      Rule("float16", path="one/*"),
      Rule("float32", path="**/leaf"),
      Rule("float16", path="two"),
    ],
    everywhere("bfloat16", one__leaf="float16", two="float16", two__leaf="float32"),
  ),
  "first by class": (
    lambda lib: [
      Rule("float32", where=lambda m: isinstance(m, lib.Leaf)),
      Rule("float16", module=lib.Block),
      Rule("float32", module=(lib.Block, dict)),
    ],
    everywhere("float32", one="float16", two="float16") | {"": "bfloat16"},
  ),
  "exempt": (
    lambda lib: [Rule(None, path="one"), Rule("float16", path="one/leaf")],
    everywhere("bfloat16", one="float32", one__leaf="float32"),
  ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(lib, name):
  rules, wanted = RULES[name]
  call = lib.call(net(), "bfloat16", rules(lib), unmatched="ignore")
  assert seen(call) == wanted


AROUND = {
  "low precision": {"policy": "float16"},
  "a low-precision rule": {"policy": "float32", "rules": [Rule("float16", path="**")]},
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("name", RULES)
def test_a_model_keeps_its_policies_in_an_autocast_function(lib, name, around):
  rules, wanted = RULES[name]
  call = lib.call(net(), "bfloat16", rules(lib), unmatched="ignore")
  assert seen(mpjax.autocast(call, **around)) == wanted


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("policy", ["float32", None])
def test_a_model_that_is_not_rewritten_stays_so_in_an_autocast_function(lib, policy, around):
  call = mpjax.autocast(lib.call(net(), policy, ()), **around)
  assert seen(call) == everywhere("float32")
  assert "mpjax." not in jax.jit(call).lower(X).as_text(debug_info=True)


@pytest.mark.parametrize("rules", [[], [Rule("mixed_bfloat16", path="one")]], ids=["none", "one"])
def test_a_rule_for_another_module_changes_nothing_for_a_module_without_a_policy(lib, rules):
  part = module(lambda m, x: (m.one(x), x + 1)[1], one=parts.dense(8, 8))
  call = lib.call(part, None, rules)

  def fn(x):
    result, _ = call(x)
    return (result * (x @ jnp.ones((8, 8)))).astype(jnp.bfloat16)

  # What such a module returns is an input of the function around, and decides its dtypes.
  eqns = jax.make_jaxpr(mpjax.autocast(fn))(X).eqns
  (product,) = (eqn for eqn in eqns if eqn.primitive.name == "mul")
  assert product.outvars[0].aval.dtype == "float32"


def test_an_autocast_function_keeps_its_policies_in_a_model(lib):
  def product(x):
    with jax.named_scope("head"):
      return x @ x.T

  for policy, rules, wanted in (
    ("float16", [], "float16"),
    ("float16", [Rule("float32", path="**/head")], "float32"),
  ):
    fn = mpjax.autocast(product, policy, rules=rules)
    for around in ("bfloat16", "float32", None):
      net = module(lambda m, x, fn=fn: fn(m.layer(x)), layer=parts.dense(8, 8))
      _, found = products(jax.make_jaxpr(lib.call(net, around, ()))(X))
      assert found.dtypes == (wanted, wanted), (policy, around)


def test_none_leaves_all_but_what_rules_pick_out(lib):
  rules = [Rule("mixed_float16", path="one")]
  wanted = everywhere("float32", one="float16", one__leaf="float16")
  assert seen(lib.call(net(), None, rules)) == wanted


ALMOST_ONE = 1 + 2.0**-12
"""1 in both half types."""


class Reader(nn.Module):
  other: nn.Module

  def __call__(self, x):
    return x @ self.other.w


class NnxReader(nnx.Module):
  def __init__(self, other):
    self.other = other

  def __call__(self, x):
    return x @ self.other.w


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("order", ["half full read", "full read half", "read half full"])
def test_a_weight_is_read_in_low_and_in_full_precision(lib, half, order):
  # By its layer, by the same in full precision, and by a module that a rule keeps in float32.
  def call(m, x):
    calls = {"half": m.owner, "full": mpjax.full_precision(m.owner), "read": m.reader}
    found = {name: calls[name](x) for name in order.split()}
    return found["half"], found["full"], found["read"]

  weight = {"w": (lambda key, shape: jnp.full(shape, ALMOST_ONE), (8, 4))}
  owner = module(lambda m, x: x @ m.w, weight)
  reader = Part(lambda around: Reader(around.owner), lambda around, rngs: NnxReader(around.owner))
  model = module(call, owner=owner, reader=reader)
  under = lib.call(model, f"mixed_{half}", [Rule("float32", path="reader")])
  low, full, read = run(under, jnp.ones((2, 8)))[0]
  np.testing.assert_array_equal(low, np.full((2, 4), 8))
  np.testing.assert_array_equal(full, np.full((2, 4), np.float32(8 * ALMOST_ONE)))
  np.testing.assert_array_equal(read, full)


def test_a_policy_in_the_modules_own_field_beats_rules(lib):
  own = mpjax.Policy(compute_dtype="float16")
  # Only a field that holds a Policy is one: a string may mean anything in somebody's model.
  for policy, inside in (
    (own, "float16"),
    (None, "float32"),
    ("float16", "float32"),
    (7, "float32"),
  ):
    found = seen(lib.call(net(policy), "bfloat16", [Rule("float32", path="two")]))
    assert found == everywhere("bfloat16", two=inside, two__leaf=inside), policy
  # But inside of an exempt module it is exempt.
  found = seen(lib.call(net(own), "bfloat16", [Rule(None, path="")]))
  assert found == everywhere("float32")


BEGINS = [
  # Policy of the root and of its block (by a rule), dtype of the block's product, of what the
  # block returns, and of what the root returns.
  # The matmul returns its float32 sum, which is the result.
  ("mixed_bfloat16", None, "bfloat16", "float32", "float32"),
  ("c=f16", None, "float16", "float16", "float16"),
  ("c=bf16,o=f16", None, "bfloat16", "bfloat16", "float16"),
  # A module that a rule picks returns its own output dtype, or else what it computed.
  ("mixed_bfloat16", "c=f32", "float32", "float32", "float32"),
  ("mixed_bfloat16", "float32", "float32", "float32", "float32"),
  ("mixed_bfloat16", "float16", "float16", "float16", "float32"),
  ("mixed_bfloat16", "c=f16", "float16", "float32", "float32"),
  ("mixed_bfloat16", "mixed_float16", "float16", "float32", "float32"),
  ("float16", "c=bf16", "bfloat16", "bfloat16", "float16"),
  ("c=bf16", "c=bf16,o=f32", "bfloat16", "float32", "float32"),
  ("c=bf16", "float32", "float32", "float32", "float32"),
  ("c=bf16", "c=f32", "float32", "float32", "float32"),
  # None surrounds it.
  (None, "c=f16", "float16", "float16", "float16"),
  (None, "mixed_float16", "float16", "float32", "float32"),
]


def test_output_dtypes_are_for_where_a_policy_begins(lib):
  def dtypes(policy, rules, own=None):
    call = lib.call(keeping(own), policy, rules)
    program, (out, kept) = jax.make_jaxpr(call, return_shape=True)(X)
    (product,), (inner,) = products(program), jax.tree.leaves(kept)
    assert product.dtypes[0] == product.dtypes[1]
    return product.dtypes[0], str(inner.dtype), str(out.dtype)

  for root, rule, *wanted in BEGINS:
    rules = [] if rule is None else [Rule(rule, path="block")]
    assert dtypes(root, rules) == tuple(wanted), (root, rule)
  # A rule for the root is another policy for the same begin.
  rules = [Rule("c=f16", path="**")]
  assert dtypes("mixed_bfloat16", rules) == ("float16", "float32", "float32")
  # A rule that picks a module and one inside of it begins once, with the first.
  rules = [Rule("c=bf16,o=f16", path="**")]
  assert dtypes("mixed_float16", rules) == ("bfloat16", "bfloat16", "float16")
  # A policy in a field begins like a rule.
  for own, inner in (("c=f16,o=f32", "float32"), ("c=f16", "float16")):
    found = dtypes("c=bf16", [], mpjax.Policy.parse(own))
    assert found == ("float16", inner, inner)
  # One that equals the policy around does not begin.
  own = mpjax.Policy.parse("c=bf16,o=f16")
  assert dtypes(own, [], own) == ("bfloat16", "bfloat16", "float16")
