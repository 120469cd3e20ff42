"""In which dtype a matmul runs: the compute dtype, float32 or float8, also in transformations."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import mpjax
from tests.autocast.rig import matmuls, with_jvp, with_vjp
from tests.format_oracle import E4M3, normal, quantised
from tests.programs import bits, equations, mesh_of, products, s

# The compute dtype or float32.

LOW, WIDE = "bfloat16", "float32"


def dtypes(fun, *args, given="c=bf16"):
  """Returns the dtypes of the operands and the result of each matmul; the last argument is data."""
  cast = mpjax.autocast(fun, given, data_argnums=len(args) - 1)
  found = products(jax.make_jaxpr(cast)(*args))
  return [(*p.dtypes, p.result.partition("[")[0]) for p in found]


def test_a_size_that_is_a_symbol_counts_as_8_products_or_more():
  (n,) = jax.export.symbolic_shape("n,")
  cast = jax.jit(mpjax.autocast(lambda w, x: x @ w, data_argnums=1))
  exported = jax.export.export(cast)(s(n, 4), s(3, n))
  assert "bf16" in exported.mlir_module()


RETURNED = {
  # name: a result of the policy, of a matmul and an array; whether the matmul returns its sum
  "as it is": (lambda y, h: y, True),
  "moved": (lambda y, h: y.T[::-1], True),
  "with a bias": (lambda y, h: y + h[:1], True),
  "added to an array": (lambda y, h: y + h, False),
  "a function of it": (lambda y, h: jnp.tanh(y), False),
}


@pytest.mark.parametrize(("result", "is_sum"), RETURNED.values(), ids=RETURNED)
def test_a_matmul_returns_its_float32_sum_to_a_float32_result_of_the_policy(result, is_sum):
  # Also if another matmul uses it.
  def fun(w, x):
    y = x @ w
    return result(y, w), y @ w

  w, x = s(16, 16), s(16, 16)
  wide = mpjax.Policy(compute_dtype=LOW, output_dtype=WIDE)
  assert dtypes(fun, w, x, given=wide)[0] == (LOW, LOW, WIDE if is_sum else LOW)
  assert dtypes(fun, w, x, given=mpjax.Policy(compute_dtype=LOW))[0] == (LOW, LOW, LOW)


# Float8.

ALL = mpjax.Float8(skip=())
EXACT = mpjax.Float8(skip=(), power_of_two=True)


def policy(recipe=ALL, half="bfloat16"):
  return mpjax.Policy(compute_dtype=half, matmul=recipe)


def reasons(fun, *args, recipe=ALL):
  # What an audit says of each matmul: nothing of those that have operands in float8.
  cast = mpjax.autocast(fun, policy(recipe))
  found = [x.reason for x in mpjax.audit(cast)(*args).formats]
  assert {left.startswith("float8") for left, _ in matmuls(cast, *args)} == {not x for x in found}
  return found


def by(x):
  return x.astype(jnp.bfloat16)


def by_hand(x, w):
  return by(x) @ by(w)


QUALIFIES = {
  "matmul": (jnp.matmul, s(8, 32), s(32, 16)),
  "one parameter": (lambda x, w: jnp.sin(x) @ w, s(8, 32), s(32, 16)),
  "two rows": (jnp.matmul, s(2, 32), s(32, 16)),
  "rows that are no multiple": (jnp.matmul, s(7, 32), s(32, 16)),
  "transposed": (lambda x, w: jnp.sin(x) @ w.T, s(8, 32), s(16, 32)),
  "moved": (lambda x, w: jnp.sin(x) @ w.reshape(32, 16)[::-1], s(8, 32), s(4, 8, 16)),
  "weight first": (lambda x, w: w @ jnp.sin(x), s(32, 8), s(16, 32)),
  "experts": (lambda x, w: jnp.einsum("ebk,ekn->ebn", jnp.sin(x), w), s(3, 8, 32), s(3, 32, 16)),
  "heads": (lambda x, w: jnp.einsum("bthd,hdn->btn", jnp.sin(x), w), s(2, 3, 4, 8), s(4, 8, 16)),
  "by hand": (by_hand, s(8, 32), s(32, 16)),
  "by hand, moved": (lambda x, w: by_hand(x, w.T), s(8, 32), s(16, 32)),
  "by hand, moved after": (lambda x, w: by(jnp.sin(x)) @ by(w).T, s(8, 32), s(16, 32)),
  "by hand, jitted": (lambda x, w: jax.jit(jnp.matmul)(by(x), by(w)), s(8, 32), s(32, 16)),
  "stored in bfloat16": (jnp.matmul, s(8, 32, dtype="bfloat16"), s(32, 16, dtype="bfloat16")),
  "jitted": (jax.jit(jnp.matmul), s(8, 32), s(32, 16)),
  "vmap": (jax.vmap(jnp.matmul, in_axes=(0, None)), s(3, 8, 32), s(32, 16)),
}
NO_PARAMETER, PRECISION = "no operand is a parameter", "the code asks for its precision"
LEFT_OUT = {
  "K": (jnp.matmul, s(8, 24), s(24, 16), "K=24 is no multiple of 16"),
  "N": (jnp.matmul, s(8, 32), s(32, 10), "N=10 is no multiple of 16"),
  "one row": (jnp.matmul, s(32), s(32, 16), "it has one row or column"),
  "no rows": (jnp.matmul, s(0, 32), s(32, 16), "it has one row or column"),
  "attention's own": (lambda x, w: jnp.sin(x) @ jnp.sin(w), s(16, 32), s(32, 16), NO_PARAMETER),
  "computed by hand": (
    lambda x, w: by(jnp.sin(x)) @ by(jnp.sin(w)),
    *(s(16, 32), s(32, 16), NO_PARAMETER),
  ),
  "convolution": (
    lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "SAME"),
    *(s(8, 16, 32), s(16, 16, 32), "it is no dot_general"),
  ),
  "precision": (
    functools.partial(jnp.matmul, precision="highest"),
    *(s(8, 32), s(32, 16), PRECISION),
  ),
  "result": (
    lambda x, w: jnp.matmul(by(x), by(w), preferred_element_type="float32"),
    *(s(8, 32), s(32, 16), PRECISION),
  ),
}


@pytest.mark.parametrize(("fun", "x", "w"), QUALIFIES.values(), ids=QUALIFIES)
def test_a_matmul_in_float8(fun, x, w):
  assert reasons(fun, x, w) == [""]


@pytest.mark.parametrize(("fun", "x", "w", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_matmul_that_is_not_in_float8_and_why(fun, x, w, reason):
  assert reasons(fun, x, w) == [reason]
  # It is what it would be without float8.
  audit, without = (mpjax.audit(mpjax.autocast(fun, p))(x, w) for p in (policy(), "mixed_bfloat16"))
  assert (audit.flops, audit.leaks) == (without.flops, without.leaks)
  assert not audit.format_share > 0


@pytest.mark.parametrize(
  ("recipe", "k", "n", "taken"),
  [
    (mpjax.Float8(), 4096, 1024, False),
    (mpjax.Float8(), 4096, 1040, True),
    (mpjax.Float8(), 4112, 16, True),
    (mpjax.Float8(scaling="row"), 4096, 2048, False),
    (mpjax.Float8(scaling="row"), 1024, 8192, False),
    (mpjax.Float8(scaling="row"), 2048, 4096, False),
    (mpjax.Float8(scaling="row"), 2048, 4112, True),
    (mpjax.Float8(scaling="row"), 1040, 4112, True),
    (mpjax.Float8(skip=[[64, None]]), 64, 1040, False),
    (mpjax.Float8(skip=[[64, None]]), 80, 16, True),
  ],
)
def test_sizes_decide(recipe, k, n, taken):
  # K is the length of the sums and N the columns of the weight, however it is stored.
  for fun, *args in (
    (jnp.matmul, s(16, k), s(k, n)),
    (lambda x, w: jnp.sin(x) @ w.T, s(16, k), s(n, k)),
    (lambda x, w: w @ jnp.sin(x), s(k, 16), s(n, k)),
  ):
    reason = "" if taken else f"too small to gain: K={k}, N={n}"
    assert reasons(fun, *args, recipe=recipe) == [reason]


def test_a_data_argument_is_no_weight():
  # Autocast cannot tell it from one by itself, and the docs say so.
  def fun(w, x):
    return x @ (w + w[:, :4] @ w[:4])

  args = s(32, 32), s(16, 32)
  assert reasons(fun, *args)[0] == ""
  named = mpjax.audit(mpjax.autocast(fun, policy(), data_argnums=1))(*args)
  assert named.formats[0].reason == "no operand is a parameter"
  assert not named.format_share > 0
  layer = mpjax.autocast(lambda w, x: jnp.tanh(x @ w) @ w, policy(), data_argnums=1)
  assert mpjax.audit(layer)(*args).format_share == 1


def test_a_gradient_taken_inside_is_left_in_low_precision():
  # Which of its operands is a gradient, and wants e5m2, is no longer known there.
  def with_gradient(x, w):
    return jax.grad(lambda w: jnp.sum(jnp.sin(jnp.sin(x) @ w)))(w)

  assert reasons(with_gradient, s(8, 32), s(32, 16)) == ["", "its gradient is taken inside"]


def test_a_weight_that_the_code_casts_is_cast_once():
  # From float32 to float8, with no stop in bfloat16, and its gradient has none either.
  w, x = normal(0, (32, 16), 1 / 4), normal(1, (8, 32), 1 / 4)

  def loss(fun):
    return lambda w: jnp.sum(mpjax.autocast(fun, policy())(x, w).astype(jnp.float32))

  one, other = (
    jax.jit(jax.grad(loss(fun)))(w)
    for fun in (lambda x, w: jnp.sin(x) @ w, lambda x, w: by(jnp.sin(x)) @ by(w))
  )
  assert one.dtype == other.dtype == jnp.float32
  np.testing.assert_array_equal(one, other)


def test_rules_take_it_away_and_give_it():
  def fun(w, x):
    with jax.named_scope("body"):
      x = jnp.sin(x @ w)
    with jax.named_scope("head"):
      return jnp.sin(x) @ w

  def found(given, *rules):
    return [d[0] for d in matmuls(mpjax.autocast(fun, given, rules=rules), s(16, 16), s(8, 16))]

  float8, half = "float8_e4m3fn", "bfloat16"
  taken, given = policy(), mpjax.Rule("mixed_bfloat16", path="**/head")
  assert found(taken) == [float8, float8]
  exact = mpjax.autocast(mpjax.full_precision(fun), taken)
  assert set(matmuls(exact, s(16, 16), s(8, 16))) == {("float32", "float32")}
  assert found(taken, given) == [float8, half]
  assert found(taken, mpjax.Rule("float32", path="head")) == [float8, "float32"]
  assert found(taken, mpjax.Rule(None, path="head")) == [float8, "float32"]
  assert found("mixed_bfloat16", mpjax.Rule(taken, path="head")) == [half, float8]
  assert found("float32", mpjax.Rule(taken, path="head")) == ["float32", float8]
  audit = mpjax.audit(mpjax.autocast(fun, taken, rules=[given]))(s(16, 16), s(8, 16))
  assert {x.path: x.reason for x in audit.formats} == {
    "body": "",
    "head": "its policy has no format",
  }


def test_a_jaxpr_has_no_mark_without_an_audit():
  fun = mpjax.autocast(lambda x, w: jnp.sin(x) @ w, policy())
  for sizes in ((8, 32, 16), (8, 24, 16)):
    m, k, n = sizes
    program = jax.make_jaxpr(fun)(s(m, k), s(k, n))
    stacks = {str(eqn.source_info.name_stack) for eqn, _ in equations(program)}
    assert not any("not-float8" in stack for stack in stacks)


# Under transformations.


def layers(ws, x, around=lambda f: f):
  def layer(w, x):
    return jnp.sin(x @ w)

  for w in ws:
    x = around(layer)(w, x)
  return jnp.sum(x**2)


WS, X = (normal(0, (32, 32), 1 / 4), normal(1, (32, 32), 1 / 4)), normal(2, (16, 32), 1 / 4)


def scanned(ws, x, around=lambda f: f):
  def step(x, w):
    return jnp.sin(x @ w), None

  return jnp.sum(jax.lax.scan(around(step), x, jnp.stack(ws))[0] ** 2)


def around(wrap):
  return functools.partial(layers, around=wrap)


SAVED = jax.checkpoint_policies.save_only_these_names("float8")
SAME = {
  "jit": around(jax.jit),
  "remat": around(jax.checkpoint),
  "named": around(functools.partial(jax.checkpoint, policy=SAVED)),
  "scan": scanned,
  "scan of remat": functools.partial(scanned, around=jax.checkpoint),
}


@pytest.mark.slow
@pytest.mark.not_with("JAX_SCAN3", "JAX does not differentiate such a scan")
def test_other_ways_to_write_it_give_the_same_numbers():
  gradients = {
    name: jax.value_and_grad(mpjax.autocast(fun, policy(EXACT)), (0, 1))
    for name, fun in {"plain": layers, **SAME}.items()
  }
  for name, gradient in gradients.items():
    found = matmuls(gradient, WS, X)
    assert all(right == "float8_e4m3fn" for _, right in found), name
    assert {left for left, _ in found} == {"float8_e4m3fn", "float8_e5m2"}, name
  made = jax.jit(lambda ws, x: {name: fun(ws, x) for name, fun in gradients.items()})(WS, X)
  # A scan keeps its state in float32: what is rounded differs in the last digit of bfloat16.
  for name, found in made.items():
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(made["plain"]), strict=True):
      assert np.linalg.norm(one - other) < 0.1 * np.linalg.norm(other), name


def saved(fun, *args):
  # The dtypes and sizes of what is kept for the backward pass.

  def kept(*args):
    return jax.tree.leaves(jax.vjp(fun, *args)[1])

  jaxpr = jax.make_jaxpr(kept)(*args).jaxpr
  found = {id(v): v.aval for v in jaxpr.outvars if v not in (*jaxpr.invars, *jaxpr.constvars)}
  return sorted((a.dtype.name, a.size) for a in found.values() if a.ndim > 1)


def test_residuals_are_the_operands_in_float8():
  def linear(ws, x):
    for w in ws:
      x = x @ w
    return x

  ws = (*WS, normal(3, (32, 32), 1 / 4))
  # Three weights, and the input of each layer.
  kept = saved(mpjax.autocast(linear, policy()), ws, X)
  assert kept == [("float8_e4m3fn", 512)] * 3 + [("float8_e4m3fn", 1024)] * 3
  recipe = mpjax.Float8(skip=(), weight_grad="half")
  half = saved(mpjax.autocast(linear, policy(recipe), data_argnums=1), ws, X)
  assert half == [("bfloat16", 512)] * 3 + [("float8_e4m3fn", 1024)] * 3


@pytest.mark.not_with("JAX_REMAT3", "JAX sees no names in derivative rules there")
def test_remat_can_keep_them_by_name():
  # The names are public: `jax.checkpoint_policies.save_only_these_names("float8")`.
  named, plain = (mpjax.autocast(SAME[name], policy()) for name in ("named", "remat"))
  assert ("float8_e4m3fn", 1024) in saved(named, WS, X)
  assert not any(dtype.startswith("float8") for dtype, _ in saved(plain, WS, X))
  # What it computes again is no matmul of the forward pass, and no cast.
  again = [
    eqn
    for eqn, _ in equations(jax.make_jaxpr(jax.grad(named))(WS, X))
    if "rematted_computation" in str(eqn.source_info.name_stack)
  ]
  assert len([eqn for eqn in again if eqn.primitive.name == "reduce_max"]) <= 4


@pytest.mark.not_with("JAX_SCAN3", "JAX does not differentiate such a scan")
def test_a_weight_that_a_scan_uses_again_is_kept_once():
  def fun(w, x):
    return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=7)[0])

  kept = saved(mpjax.autocast(fun, policy()), WS[0], X)
  assert ("float8_e4m3fn", 32 * 32) in kept
  assert ("float8_e4m3fn", 7 * 16 * 32) in kept
  assert ("float8_e4m3fn", 7 * 32 * 32) not in kept


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(devices, check_vma):
  spec = PartitionSpec("data")

  def fun(ws, x):
    def local(ws, x):
      return jax.lax.psum(layers(ws, x), "data")

    mapped = functools.partial(jax.shard_map, check_vma=check_vma, mesh=mesh_of(devices[:2]))
    return mapped(local, in_specs=(PartitionSpec(), spec), out_specs=PartitionSpec())(ws, x)

  # The same rows on both devices: the scales of both are those of one.
  x = np.concatenate([X, X])
  found = jax.jit(jax.grad(mpjax.autocast(fun, policy(EXACT))))(WS, x)
  wanted = jax.jit(jax.grad(mpjax.autocast(layers, policy(EXACT))))(WS, X)
  for one, other in zip(found, wanted, strict=True):
    assert np.linalg.norm(one - 2 * other) < 2e-2 * np.linalg.norm(other)
  assert all(d.startswith("float8") for d, _ in matmuls(mpjax.autocast(fun, policy()), WS, x))


RECIPES = [{}, {"scaling": "row"}, {"power_of_two": True}, {"weight_grad": "half"}]


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_mxfp8", "mixed_nvfp4", "mixed_int8"])
def test_a_matmul_in_float64_stays_there(name):
  w, x = np.ones((64, 32), np.float32), np.full((16, 64), 1 + 2.0**-40)
  with jax.enable_x64(True):
    layer = mpjax.autocast(lambda w, x: x @ w.astype(x.dtype), name, data_argnums=1)
    found = layer(w, x)
  assert found.dtype == np.float64
  np.testing.assert_array_equal(found, x @ w)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_process_with_float64_runs_float32_models_in_float8(recipe):
  # Numbers of ours, which are float64 there by themselves, do not widen what they bound.
  w = jnp.asarray(normal(0, (64, 32), 1 / 4))
  x = jnp.asarray(normal(1, (16, 64), 1 / 4))
  recipe = mpjax.Float8(skip=(), **recipe)
  loss = mpjax.autocast(lambda w, x: jnp.mean((x @ w) ** 2), policy(recipe), data_argnums=(1,))
  step = jax.value_and_grad(loss)
  with jax.enable_x64(True):  # First: what is traced is remembered.
    assert any("float8_e4m3fn" in each for each in matmuls(step, w, x))
    wide = jax.jit(step)(w, x)
  assert bits(wide) == bits(jax.jit(step)(w, x))


# Functions with derivative rules of their own.

IN_RULE = "it is in a derivative rule"
by_jvp, by_vjp = with_jvp(lambda w, x: x @ w), with_vjp(lambda w, x: x @ w)


def between(rule):
  # Returns a loss in which a function with a rule is between two other matmuls.
  return lambda w, x: jnp.sum(jnp.sin(rule(w, jnp.sin(x @ w)) @ w))


def closing_over(w, x):
  @jax.custom_jvp
  def layer(x):
    return x @ w

  layer.defjvp(lambda primals, tangents: (primals[0] @ w, tangents[0] @ w))
  return jnp.sum(jnp.sin(layer(x)))


def reasons_of(fun, *args):
  return {each.reason for each in mpjax.audit(fun)(*args).formats}


def test_operands_linear_in_a_tangent_are_not_rounded():
  # JAX transposes it, and cannot transpose an operand divided by its largest element.
  with_float8, without = (mpjax.autocast(by_jvp, p) for p in (policy(), "mixed_bfloat16"))
  # Without a gradient the rule does not count.
  assert matmuls(with_float8, WS[0], X) == [("float8_e4m3fn", "float8_e4m3fn")]

  def pulled(fun):
    return jax.jit(lambda w, x: jax.vjp(fun, w, x)[1](X))(WS[0], X)

  for one, other in zip(pulled(with_float8), pulled(without), strict=True):
    np.testing.assert_array_equal(one, other)
  found = reasons_of(jax.grad(lambda *args: with_float8(*args).sum(), (0, 1)), WS[0], X)
  assert found == {IN_RULE}


@pytest.mark.slow
def test_matmuls_around_a_rule_are_in_float8():
  fun = jax.grad(mpjax.autocast(between(by_jvp), policy()), (0, 1))
  assert {"", IN_RULE} == reasons_of(fun, WS[0], X)
  left = [each for each, _ in matmuls(fun, WS[0], X)]
  assert left.count("float8_e4m3fn") == 2
  assert left.count("float8_e5m2") == 4
  assert left.count("bfloat16") == 3
  for mode in (jax.jacfwd, jax.jacrev):
    assert jnp.all(jnp.isfinite(mode(mpjax.autocast(between(by_jvp), policy()))(WS[0], X)))


def test_a_rule_that_closes_over_an_array():
  # Such a function is differentiated at once, and the derivative is rewritten.
  fun = jax.grad(mpjax.autocast(closing_over, policy()), 1)
  without = jax.grad(mpjax.autocast(closing_over), 1)
  # The value that the cosine takes is that of float8, and nothing else differs from low precision.
  w = np.asarray(WS[0])
  value = quantised(X, E4M3, None, False) @ quantised(w, E4M3, None, False)
  want = np.cos(value) @ w.astype(np.float64).T
  apart, apart_without = (
    np.linalg.norm(np.asarray(each(WS[0], X), np.float64) - want) / np.linalg.norm(want)
    for each in (fun, without)
  )
  assert apart < 2**-8 < apart_without
  # The backward pass is in the trace, so that its matmuls are no transposes of those in float8.
  assert reasons_of(fun, WS[0], X) == {"", "its gradient is taken inside"}


def test_a_backward_rule_is_left_in_low_precision():
  fun = jax.grad(lambda *args: jnp.sum(mpjax.autocast(by_vjp, policy())(*args) ** 2), (0, 1))
  found = {each.reason: each.flops for each in mpjax.audit(fun)(WS[0], X).formats}
  flops = 2 * 16 * 32 * 32
  assert found == {"": flops, IN_RULE: 2 * flops}


def precise(policy):
  return mpjax.Policy(compute_dtype=policy, precision="highest")


POLICIES = {
  "float8": (policy(), ()),
  "float8 by a rule": ("mixed_bfloat16", [mpjax.Rule(policy(), path="part")]),
  "no float8 by a rule": (policy(), [mpjax.Rule("mixed_bfloat16", path="part")]),
  "no policy by a rule": (policy(), [mpjax.Rule(None, path="part")]),
  "precision": (precise("bfloat16"), [mpjax.Rule(precise("float32"), path="part")]),
}


@pytest.mark.parametrize("rule", [by_jvp, by_vjp], ids=["jvp", "vjp"])
@pytest.mark.parametrize(("chosen", "rules"), POLICIES.values(), ids=POLICIES)
def test_an_audit_says_what_runs(rule, chosen, rules):
  # A rule is traced in the midst of the marks that the audit reads, and heeds none of them.
  def loss(w, x):
    with jax.named_scope("part"):
      return between(rule)(w, x)

  fun = jax.value_and_grad(mpjax.autocast(loss, chosen, rules=rules), (0, 1))
  counts = collections.Counter()
  for each in products(jax.make_jaxpr(fun)(WS[0], X)):
    counts[each.dtypes[0]] += each.flops
  audited = collections.Counter()
  for (_, dtype), flops in mpjax.audit(fun)(WS[0], X).flops.items():
    audited[dtype] += flops
  assert audited == counts


def test_an_audit_reports_neither_scaling_nor_matmuls_without_float8_as_leaks():
  def fun(w, v, x):
    return jnp.sum(jnp.sin(jnp.sin(jnp.sin(x) @ w) @ v) ** 2)

  args = s(64, 512), s(512, 8), s(256, 64)
  audit = mpjax.audit(jax.value_and_grad(mpjax.autocast(fun, policy()), (0, 1, 2)))(*args)
  audit.assert_no_leaks()
  assert audit.half_share == 1
  assert audit.lossy == ()
  assert [x.reason for x in audit.formats] == ["", "N=8 is no multiple of 16"]
  assert audit.formats[0].flops == 3 * 2 * 256 * 512 * 64
  assert audit.format_share == 64 / 72
  assert "no multiple of 16" in str(audit)
  assert '"formats": [' in audit.to_json()
  assert mpjax.audit(mpjax.autocast(fun))(*args).formats == ()
