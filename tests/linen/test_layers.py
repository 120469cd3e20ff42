"""Flax's own layers under a policy, one by one."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._jaxprs.traced_calls import StateKind
from mpjax.linen import _layers
from tests.linen.products import HALF, KEY, X, dtypes, operands, values_of
from tests.programs import bits, products

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, with_policy = mpjax.Rule, mpjax.linen.with_policy
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def under(model, policy="mixed_bfloat16", *args, **options):
  """Returns (variables, the policied model) with variables that are only shapes and dtypes."""
  variables = jax.eval_shape(model.init, KEY, *(args or (X,)))
  return variables, with_policy(model, policy, **options)


class MyNorm(nn.LayerNorm):
  """Somebody's own version."""


class MyCell(nn.GRUCell):
  """A cell of the user's, derived from Flax's."""


@pytest.mark.case("B081")
@pytest.mark.parametrize("half", HALF)
def test_embed_gathers_what_is_stored_and_casts_the_rows(half):
  ids = jnp.asarray([[1, 257 % 11, 1]])
  model = nn.Embed(11, 4)
  variables = model.init(KEY, ids)
  ours = with_policy(model, f"c={half},o={half}")
  out = ours.apply(variables, ids)
  assert out.dtype == jnp.dtype(half)
  wanted = np.asarray(variables["params"]["embedding"])[np.asarray(ids)].astype(jnp.dtype(half))
  np.testing.assert_array_equal(np.asarray(out), wanted)
  program = jax.make_jaxpr(ours.apply)(variables, ids)
  assert values_of(program, "gather") == {"float32"}
  # The cotangents of one token add up in float32: 300 times 1 + 2^-7 is not rounded on the way.
  many = jnp.ones((300,), jnp.int32)
  weight = jnp.full((300, 4), 1 + 2.0**-7)
  grad = jax.grad(lambda v: (ours.apply(v, many).astype("float32") * weight).sum())(variables)
  np.testing.assert_array_equal(grad["params"]["embedding"][1], np.full(4, 300 * (1 + 2.0**-7)))
  # Nothing asks for a dtype here: the rows are what is stored.
  assert bits(with_policy(model, f"c={half}").apply(variables, ids)) == bits(
    model.apply(variables, ids)
  )


@pytest.mark.case("B082")
def test_attend_computes_in_half():
  model = nn.Embed(11, 4)
  variables = jax.eval_shape(model.init, KEY, jnp.asarray([1]))
  ours = with_policy(model, "mixed_bfloat16")
  attend = functools.partial(ours.apply, method="attend")
  assert operands(attend, variables, jnp.ones((2, 4))) == [("bfloat16", "bfloat16")]
  assert jax.eval_shape(attend, variables, jnp.ones((2, 4))).dtype == F32


NORMS = {
  "LayerNorm": nn.LayerNorm(),
  "RMSNorm": nn.RMSNorm(),
  "GroupNorm": nn.GroupNorm(num_groups=3),
  "InstanceNorm": nn.InstanceNorm(),
  "BatchNorm": nn.BatchNorm(use_running_average=False),
  "running BatchNorm": nn.BatchNorm(use_running_average=True),
  "somebody's own": MyNorm(),
}


@pytest.mark.case("B083", "B084", "A81")
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("model", NORMS.values(), ids=NORMS)
def test_norms_reduce_in_float32(model, half):
  x = jnp.linspace(200.0, 400.0, 24).reshape(2, 4, 3)
  variables = model.init(KEY, x)
  ours = with_policy(model, f"c={half},o={half}")
  mutable = ["batch_stats"]
  program = jax.make_jaxpr(lambda v, x: ours.apply(v, x, mutable=mutable))(
    variables, x.astype(half)
  )
  assert values_of(program, "reduce_sum", "rsqrt") == {"float32"}
  out, changed = ours.apply(variables, x.astype(half), mutable=mutable)
  assert out.dtype == jnp.dtype(half)
  # 300² is more than float16 holds.
  assert np.all(np.isfinite(np.asarray(out, np.float32)))
  assert set(jax.tree.leaves(dtypes(changed))) <= {"float32"}
  # At the end of a model without an output dtype it is what was computed.
  assert with_policy(model, f"c={half}").apply(variables, x, mutable=mutable)[0].dtype == F32
  if changed:
    wanted = model.apply(variables, x.astype(half).astype("float32"), mutable=mutable)[1]
    assert bits(changed) == bits(wanted)


@pytest.mark.case("B083")
def test_statistics_are_never_read_rounded():
  model = nn.BatchNorm(use_running_average=True, use_bias=False, use_scale=False, epsilon=0.0)
  # A mean that bfloat16 would read as 256; the input, 258, is exact in it.
  variables = {"batch_stats": {"mean": jnp.full(1, 257.0), "var": jnp.ones(1)}}
  ours = with_policy(model, "mixed_bfloat16")
  out = ours.apply(variables, jnp.full((1, 1), 258.0))
  assert float(out[0, 0]) == 1.0


CELLS = {
  "SimpleCell": nn.SimpleCell(3),
  "LSTMCell": nn.LSTMCell(3),
  "OptimizedLSTMCell": nn.OptimizedLSTMCell(3),
  "GRUCell": nn.GRUCell(3),
  "MGUCell": nn.MGUCell(3),
  "MyCell": MyCell(3),
}


@pytest.mark.case("B085", "B086", "A80", "A74")
@pytest.mark.parametrize("carry", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_cells_multiply_in_half_and_add_up_in_the_dtype_of_their_carry(cell, carry):
  start = jax.tree.map(lambda c: jnp.zeros(c.shape, carry), cell.initialize_carry(KEY, (2, 3)))
  variables = jax.eval_shape(cell.init, KEY, start, X)
  ours = with_policy(cell, "c=bf16")
  new, out = jax.eval_shape(ours.apply, variables, start, X)
  # Of a simple cell the next carry is a product alone; the others gate what they carry.
  wanted = "bfloat16" if isinstance(cell, nn.SimpleCell) else carry
  assert {str(out.dtype), *jax.tree.leaves(dtypes(new))} == {wanted}
  assert set(operands(ours.apply, variables, start, X)) == {("bfloat16", "bfloat16")}
  # The policy's output dtype is that of all results, the carry among them.
  mixed = with_policy(cell, "mixed_bfloat16")
  results = jax.eval_shape(mixed.apply, variables, start, X)
  assert set(jax.tree.leaves(dtypes(results))) == {"float32"}
  for dtype in ("float32", "bfloat16"):
    grad = jax.eval_shape(
      jax.grad(lambda x: ours.apply(variables_like(variables), start, x)[1].sum()), X.astype(dtype)
    )
    assert grad.dtype == dtype


def variables_like(shapes):
  return jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)


@pytest.mark.case("B085", "B086")
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_cells_over_time(cell):
  xs = jnp.stack([X] * 4, axis=1)
  for model in (
    nn.RNN(cell.clone()),
    nn.RNN(cell.clone(), return_carry=True, reverse=True, keep_order=True),
    nn.Bidirectional(nn.RNN(cell.clone()), nn.RNN(cell.clone())),
  ):
    variables, ours = under(model, "c=bf16", xs)
    found = jax.eval_shape(ours.apply, variables, xs)
    if getattr(model, "return_carry", False):
      carry, found = found
      # `initialize_carry` makes float32: the carry stays so, and is exact.
      assert set(jax.tree.leaves(dtypes(carry))) == {"float32"}
    assert found.dtype == (BF16 if isinstance(cell, nn.SimpleCell) else F32)
    assert set(operands(ours.apply, variables, xs)) == {("bfloat16", "bfloat16")}
    assert set(jax.tree.leaves(dtypes(jax.eval_shape(ours.init, KEY, xs)))) == {"float32"}


@pytest.mark.parametrize("way", ["init", "lazy_init", "tabulate", "scope"])
def test_what_is_told_of_a_cell_over_time_before_it_runs(way):
  """To tell the dtypes of caches modules are called in half there, and a loop starts in float32."""

  class Model(nn.Module):
    @nn.compact
    def __call__(self, xs):
      xs = self.perturb("bump", nn.Dense(3)(xs))
      return nn.RNN(nn.LSTMCell(3))(xs)

  model, xs = Model(), jnp.stack([X] * 4, axis=1)
  ours, plain = with_policy(model, "mixed_bfloat16"), model.init(KEY, xs)
  if way == "tabulate":
    assert "LSTMCell" in ours.tabulate(KEY, xs)
    return
  if way == "scope":
    with mpjax.linen.policy_scope("mixed_bfloat16"):
      found = model.init(KEY, xs)
  else:
    found = getattr(ours, way)(KEY, xs)
  assert bits(found) == bits(plain)


def test_an_initial_carry_that_is_given_keeps_its_dtype():
  xs = jnp.stack([X] * 4, axis=1)
  cell = nn.LSTMCell(3)
  model = nn.RNN(cell, return_carry=True)
  variables, ours = under(model, "c=bf16", xs)
  for dtype in ("float32", "bfloat16"):
    start = jax.tree.map(lambda c, d=dtype: c.astype(d), cell.initialize_carry(KEY, (2, 3)))
    carry, out = jax.eval_shape(
      lambda v, x, s: ours.apply(v, x, initial_carry=s), variables, xs, start
    )
    assert dtypes(carry) == dtypes(start)
    assert out.dtype == dtype


ATTENTION = {
  "self": (nn.SelfAttention(2), ()),
  "multi head": (nn.MultiHeadDotProductAttention(2), ()),
  "cross": (nn.MultiHeadDotProductAttention(2), (jnp.ones((1, 5, 4)),)),
  "precision": (nn.MultiHeadDotProductAttention(2, precision="highest"), ()),
  "hard coded": (nn.MultiHeadDotProductAttention(2, dtype=jnp.float32), ()),
}


@pytest.mark.case("B088")
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize(("model", "others"), ATTENTION.values(), ids=ATTENTION)
def test_attention_takes_its_softmax_in_float32(model, others, half):
  args = (jnp.ones((1, 3, 4)), *others)
  variables, ours = under(model, f"mixed_{half}", *args)
  program = jax.make_jaxpr(ours.apply)(variables, *args)
  assert values_of(program, "exp") == {"float32"}
  found = [p.dtypes for p in products(program)]
  # What asks for the highest precision keeps it: the projections and both products of attention.
  wanted = half if model.precision is None else "float32"
  assert found == [(wanted, wanted)] * len(found)
  assert len(found) == 6


@pytest.mark.case("B088")
@pytest.mark.parametrize("half", HALF)
def test_a_fully_masked_row_stays_finite(half):
  model = nn.MultiHeadDotProductAttention(2)
  x = jax.random.normal(KEY, (1, 3, 4))
  mask = jnp.asarray([[[[True, False, False], [True, True, False], [False, False, False]]]])
  variables = model.init(KEY, x)
  ours = with_policy(model, f"mixed_{half}")

  def loss(v):
    return ours.apply(v, x, mask=mask).sum()

  out, grads = jax.jit(jax.value_and_grad(loss))(variables)
  wanted = jax.jit(lambda v: model.apply(v, x, mask=mask).sum())(variables)
  np.testing.assert_allclose(out, wanted, atol=0.05)
  assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("half", HALF)
def test_attention_with_a_function_of_the_users_own(half):
  def attention(query, key, value, **kwargs):
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", query, key))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)

  model = nn.MultiHeadDotProductAttention(2, attention_fn=attention)
  x = jnp.ones((1, 3, 4))
  variables, ours = under(model, f"mixed_{half}", x)
  program = jax.make_jaxpr(ours.apply)(variables, x)
  assert [p.dtypes for p in products(program)] == [(half, half)] * 6
  assert values_of(program, "exp") == {"float32"}


@pytest.mark.case("B094")
@pytest.mark.parametrize("half", HALF)
def test_spectral_norm_keeps_its_vectors_and_sigma_in_float32(half):
  class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.SpectralNorm(nn.Dense(4), n_steps=2)(x, update_stats=True)

  variables = Spectral().init(KEY, X)
  ours = with_policy(Spectral(), f"mixed_{half}")
  params = {"params": variables["params"]}
  changed, wanted = variables["batch_stats"], variables["batch_stats"]
  step, exact = (
    jax.jit(functools.partial(m.apply, mutable=["batch_stats"])) for m in (ours, Spectral())
  )
  for _ in range(3):
    out, new = step({**params, "batch_stats": changed}, X)
    changed = new["batch_stats"]
    wanted = exact({**params, "batch_stats": wanted}, X)[1]["batch_stats"]
  assert out.dtype == F32
  # Bit-equal to the float32 iteration: it never sees a rounded weight, so nothing drifts.
  assert bits(changed) == bits(wanted)
  assert set(jax.tree.leaves(dtypes(changed))) == {"float32"}
  program = jax.make_jaxpr(lambda v: ours.apply(v, X, mutable=["batch_stats"])[0])(variables)
  found = [p.dtypes for p in products(program)]
  # The layer itself is in half.
  assert found[-1] == (half, half)
  assert dtypes(ours.init(KEY, X)) == dtypes(variables)


@pytest.mark.case("B094")
@pytest.mark.parametrize("half", HALF)
def test_weight_norm_computes_in_half_from_the_stored_weight(half):
  class Weight(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.WeightNorm(nn.Dense(4))(x)

  variables = Weight().init(KEY, X)
  ours = with_policy(Weight(), f"mixed_{half}")
  assert operands(ours.apply, variables, X) == [(half, half)]
  program = jax.make_jaxpr(ours.apply)(variables, X)
  assert values_of(program, "rsqrt", "sqrt", "reduce_sum") <= {"float32"}
  _, changed = ours.apply(variables, X, mutable=["params"])
  assert bits(changed["params"]) == bits(variables["params"])
  assert bits(ours.init(KEY, X)) == bits(variables)
  grads = jax.eval_shape(jax.grad(lambda v: ours.apply(v, X).sum()), variables)
  assert dtypes(grads) == dtypes(variables)
  np.testing.assert_allclose(
    ours.apply(variables, X), Weight().apply(variables, X), rtol=0.02, atol=0.02
  )


LAYERS = {
  "Dense": (nn.Dense(2), (2, 3)),
  "DenseGeneral": (nn.DenseGeneral((2, 2), axis=(-2, -1)), (2, 3, 4)),
  "Einsum": (nn.Einsum((3, 2), "ab,bc->ac"), (2, 3)),
  "Conv": (nn.Conv(2, (3,)), (1, 4, 3)),
  "ConvTranspose": (nn.ConvTranspose(2, (3,)), (1, 4, 3)),
  "ConvLocal": (nn.ConvLocal(2, (3,)), (1, 4, 3)),
}


@pytest.mark.case("B038", "B089", "A91")
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("model", "shape"), LAYERS.values(), ids=LAYERS)
def test_products_have_both_operands_in_half(model, shape, x_dtype):
  x = jnp.ones(shape, x_dtype)
  variables, ours = under(model, "c=bf16", x)
  assert set(operands(ours.apply, variables, x)) == {("bfloat16", "bfloat16")}
  assert jax.eval_shape(ours.apply, variables, x).dtype == BF16
  grads = jax.make_jaxpr(jax.grad(lambda v: ours.apply(v, x).sum().astype("float32")))(variables)
  assert {p.dtypes for p in products(grads)} == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize("rate", [np.float64(0.5), np.float32(0.5), 0.5])
def test_a_dropout_rate_of_numpy_promotes_nothing(rate):
  model = nn.Dropout(rate, deterministic=False)
  x = jnp.ones((4, 8))
  plain = model.apply({}, x, rngs={"dropout": KEY})
  half = with_policy(model, "bfloat16").apply({}, x, rngs={"dropout": KEY})
  assert half.dtype == BF16
  assert bits(half.astype(F32)) == bits(plain)  # The same mask; 1 / 0.5 is exact.


class RunningMax(nn.Module):
  """Divides by the largest number so far, which it keeps, as a layer in float8 would."""

  @nn.compact
  def __call__(self, x):
    largest = self.variable("amax", "largest", lambda: jnp.ones(()))
    out = x / largest.value
    largest.value = jnp.maximum(largest.value, jnp.max(jnp.abs(x)))
    return out @ jnp.eye(x.shape[-1], dtype=x.dtype)


def test_a_layer_with_state_of_its_own_is_one_row(monkeypatch):
  x = jnp.full((2, 3), 2, BF16)
  model = RunningMax()

  def found():
    ours = with_policy(model, "params=bfloat16,compute=bfloat16")
    variables = ours.init(KEY, x)
    program = jax.make_jaxpr(lambda v: ours.apply(v, x, mutable=["amax"]))(variables)
    _, changed = ours.apply(variables, x, mutable=["amax"])
    stored = variables["amax"]["largest"]
    assert changed["amax"]["largest"] == 2
    assert changed["amax"]["largest"].dtype == stored.dtype
    return stored.dtype, values_of(program, "div"), products(program)[0].dtypes[0]

  # State that nobody knows decides the dtype of what it meets, and is what the code declares.
  assert found() == (F32, {"float32"}, "bfloat16")
  row = StateKind(neutral=True, stored="param_dtype")
  monkeypatch.setattr(_layers, "STATE", {**_layers.STATE, "amax": row})
  assert found() == (BF16, {"bfloat16"}, "bfloat16")
  # One that starts each step from its own last result computes in float32.
  monkeypatch.setattr(_layers, "ITERATES", (*_layers.ITERATES, RunningMax))
  assert found() == (BF16, {"float32"}, "float32")
