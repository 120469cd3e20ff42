"""The tables of an audit: modules, formats, and what the backward pass uses."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._diagnose.audit.findings import Format
from mpjax._diagnose.matmul_formats import flops_by_format
from mpjax._jaxpr.graph import Graph

HALF = jax.ShapeDtypeStruct((8, 8), "bfloat16")
WIDE = jax.ShapeDtypeStruct((8, 8), "float32")


def stack(w, x):
  for number in range(3):
    with jax.named_scope(f"layer_{number}"):
      x = jnp.tanh(x @ w)
  with jax.named_scope("head"):
    return x @ w


def test_modules_that_differ_in_their_number_are_one_row_of_the_page():
  audit = mpjax.audit(stack)(HALF, HALF)
  assert [row.path for row in audit.modules] == ["layer_0", "layer_1", "layer_2", "head"]
  assert {(row.dtype, row.flops) for row in audit.modules} == {("bfloat16", 2 * 8**3)}
  assert {row.activations for row in audit.modules} == {("bfloat16",)}
  assert {row.params for row in audit.modules} == {("bfloat16",)}
  text = str(audit)
  assert "layer_* (3)" in text
  assert "75.0 %" in text


def test_one_that_has_another_dtype_is_not():
  def fn(w, x):
    with jax.named_scope("layer_3"):
      x = jnp.matmul(x.astype("float32"), w.astype("float32"), precision="highest").astype(x.dtype)
    return stack(w, x)

  audit = mpjax.audit(fn)(HALF, HALF)
  (row,) = [row for row in audit.modules if row.path == "layer_3"]
  assert (row.dtype, row.flops) == ("float32", 2 * 8**3)
  text = str(audit)
  assert "layer_* (3)" in text
  assert "layer_3" in text


def test_an_input_is_no_parameter_and_what_has_no_matmul_is_no_row():
  def fn(params, x):
    with jax.named_scope("norm"):
      x = x * 2
    with jax.named_scope("dense"):
      return jnp.exp((x @ params["kernel"].astype(x.dtype)).astype("float32"))

  (row,) = mpjax.audit(fn)({"kernel": WIDE}, HALF).modules
  assert (row.path, row.params) == ("dense", ("float32",))
  assert set(row.activations) == {"bfloat16", "float32"}


def test_gradients_are_of_the_backward_pass():
  def loss(w, x):
    return stack(w, x).astype("float32").sum()

  rows = {row.path: row for row in mpjax.audit(jax.value_and_grad(loss))(HALF, HALF).modules}
  assert rows["head"].gradients[0] == "bfloat16"
  assert sum(row.flops for row in rows.values()) == (4 + 4 + 3) * 2 * 8**3


ALL = mpjax.Policy(
  compute_dtype="bfloat16", output_dtype="float32", matmul=mpjax.Float8(skip=((16, 32),))
)
IDS = jax.ShapeDtypeStruct((2, 16), "int32")


class Model(nn.Module):
  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(64, 32, name="embed")
    x = embed(ids)
    for i in range(2):
      x = x + nn.MultiHeadDotProductAttention(num_heads=2, name=f"attention_{i}")(x, x)
    x = nn.Dense(16, name="small")(nn.Dense(16, name="narrow")(x))
    x = nn.Dense(20, name="odd")(nn.Dense(32, name="wide")(x))
    x = nn.Dense(32, name="head")(nn.Conv(32, (3,), name="conv")(x))
    return embed.attend(x)


@functools.cache
def audited(policy=ALL, rules=(), fn=jnp.sum):
  model = mpjax.linen.with_policy(Model(), policy, rules)
  variables = jax.eval_shape(Model().init, jax.random.key(0), IDS)
  return mpjax.audit(jax.value_and_grad(lambda v, ids: fn(model.apply(v, ids))))(variables, IDS)


HEAD = mpjax.Rule("mixed_bfloat16", path="head")


def test_each_module_is_listed_with_its_reason():
  found = {x.path.removeprefix("Model/"): x for x in audited(rules=(HEAD,)).formats}
  attention = "no operand is a parameter"
  wanted = {
    **{f"attention_{i}/{name}": "" for i in (0, 1) for name in ("query", "key", "value", "out")},
    **{f"attention_{i}": attention for i in (0, 1)},
    "narrow": "",
    "small": "too small to gain: K=16, N=16",
    "wide": "too small to gain: K=16, N=32",
    "odd": "N=20 is no multiple of 16",
    "conv": "it is no dot_general",
    "head": "its policy has no format",
    "embed": "it is an embedding",
  }
  assert {path: x.reason for path, x in found.items()} == wanted
  assert found["narrow"] == Format("Model/narrow", "float8", "", flops=3 * 2 * 32 * 16 * 32)
  audit = audited(rules=(HEAD,))
  assert f"{100 * audit.format_share:.1f} % of the matmuls' FLOPs in float8" in str(audit)
  assert "it is an embedding" in str(audit)
  rows = json.loads(audit.to_json())["formats"]
  assert [(row["path"], row["flops"]) for row in rows] == [(x.path, x.flops) for x in audit.formats]
  assert rows[0]["flops"] == max(x.flops for x in audit.formats)


@pytest.mark.parametrize("name", ["float8", "mxfp8", "nvfp4", "int8"])
@pytest.mark.parametrize("width", [8, 64])
def test_the_report_names_the_format_of_the_recipe(name, width):
  policy = mpjax.Policy.parse(f"c=bf16,matmul={name}:skip=none")
  fun = mpjax.autocast(lambda w, x: x @ w, policy, data_argnums=1)
  audit = mpjax.audit(fun)(s(width, 32, dtype="float32"), s(16, width, dtype="float32"))
  emulated = ", emulated" if width == 64 and name in ("mxfp8", "nvfp4") else ""
  share = 100.0 if width == 64 else 0.0
  assert f"{share} % of the matmuls' FLOPs in {name}{emulated}\n" in str(audit)
  assert (audit.recipes, audit.format_share) == ((name,), share / 100)


@pytest.mark.parametrize("name", ["float8", "float8:block", "mxfp8", "nvfp4", "int8"])
def test_tune_and_the_audit_share_the_names_of_formats(name):
  """Of experts too, which have other operands in formats with blocks."""
  policy = mpjax.Policy.parse(f"c=bf16,matmul={name}:skip=none")

  def loss(w, x, sizes):
    return jnp.sum(jax.lax.ragged_dot(x @ w[0], w, sizes) ** 2)

  fun = jax.grad(mpjax.autocast(loss, policy, data_argnums=(1, 2)))
  args = s(2, 128, 128, dtype="float32"), s(128, 128, dtype="float32"), s(2, dtype="int32")
  audit = mpjax.audit(fun)(*args)
  names = {row.dtype.removesuffix(", emulated") for row in audit.formats if not row.reason}
  assert names == {name.partition(":")[0]}
  (flops,) = flops_by_format(Graph(jax.make_jaxpr(fun)(*args))).values()
  assert flops.keys() - {"bfloat16"} == names
  share = sum(n for format, n in flops.items() if format in names) / flops.total()
  assert share == audit.format_share


def test_float32_and_weight_gradients_in_half_are_reasons():
  rules = mpjax.Rule("float32", path="wide"), mpjax.Rule(None, path="head")
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(skip=(), weight_grad="half"))
  found = {(x.path.removeprefix("Model/"), x.reason): x for x in audited(policy, rules).formats}
  assert ("wide", "it is in float32") in found
  assert ("head", "it is in float32") in found
  half = found["narrow", "weight_grad=half"]
  assert half.flops == 2 * 32 * 16 * 32
  assert found["narrow", ""].flops == 2 * half.flops


def test_leaks_and_losses_are_those_without_float8():
  """Neither the scaling, in float32, nor what is too small is where low precision was lost."""

  def loss(x):
    return jnp.mean(jax.nn.log_softmax(x))

  float8, half = audited(fn=loss), audited("mixed_bfloat16", fn=loss)
  assert (float8.leaks, float8.lossy, float8.on_purpose) == ((), (), half.on_purpose)
  assert half.formats == ()
  assert "in float8\n" not in str(half)
  assert float8.half_share == half.half_share == 1.0
  assert float8.format_share > half.format_share == 0
  assert sum(float8.flops.values()) == sum(half.flops.values())


def test_what_is_kept_is_float8():
  kept = audited().residual_bytes
  assert kept["float8_e4m3fn"] > 0
  assert kept["bfloat16"] < audited("mixed_bfloat16").residual_bytes["bfloat16"]


BF16 = jnp.bfloat16


def s(*shape, dtype=BF16):
  return jax.ShapeDtypeStruct(shape, dtype)


def test_residuals_by_dtype():
  def loss(w, x):
    h = x.astype(BF16) @ w.astype(BF16)
    return jnp.sum(jnp.sin(h.astype(jnp.float32)))

  audit = mpjax.audit(jax.grad(loss))(s(8, 8, dtype="float32"), s(4, 8, dtype="float32"))
  # x in bfloat16 for the gradient of w, and the cosine of h.
  assert audit.residual_bytes == {"float32": 4 * 8 * 4, "bfloat16": 4 * 8 * 2}
  assert mpjax.audit(loss)(s(8, 8, dtype="float32"), s(4, 8, dtype="float32")).residual_bytes == {}


def test_operations_by_primitive_and_dtype_with_their_runs_and_bytes():
  def fn(x, ids):
    def step(carry, _):
      return jnp.tanh(carry), None

    unused = jnp.exp(x)
    del unused
    x, _ = jax.lax.scan(step, x, None, length=3)
    return x.astype("bfloat16") @ x.astype("bfloat16"), ids + 1, jnp.arange(4.0)

  args = s(8, 8, dtype="float32"), s(8, dtype="int32")
  rows = mpjax.audit(fn)(*args).operations
  assert {(row.operation, row.dtype): (row.times, row.nbytes) for row in rows} == {
    ("tanh", "float32"): (3, 3 * 8 * 8 * 4),
    ("convert_element_type", "float32"): (2, 2 * 8 * 8 * 2),
    ("dot_general", "bfloat16"): (1, 8 * 8 * 2),
    ("iota", "float32"): (1, 4 * 4),
  }
  assert rows[0].operation == "tanh"


def test_a_matmul_with_one_float32_operand_and_complex_numbers():
  def fn(half, wide, waves):
    return jax.lax.dot(half, wide), waves * 2

  rows = mpjax.audit(fn)(HALF, WIDE, s(8, dtype="complex64")).operations
  assert [(row.operation, row.dtype) for row in rows] == [
    ("dot_general", "float32"),
    ("mul", "complex64"),
  ]
