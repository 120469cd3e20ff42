"""The layers of NNX under a policy, one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._jaxprs.traced_calls import StateKind
from mpjax.nnx import _layers
from tests.models.values import integers, normal
from tests.nnx import rig
from tests.programs import converts, dtypes_of, error, half_share, products, run

with_policy = mpjax.nnx.with_policy
BF16 = np.dtype("bfloat16")
BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


def half_of(half, output=None):
  return mpjax.Policy(compute_dtype=half, output_dtype=output)


@pytest.mark.case("B081")
@pytest.mark.parametrize(("half", "off"), [("bfloat16", 0.2), ("float16", 0.005)])
def test_embed_gathers_what_is_stored_and_casts_the_rows(half, off):
  rng = np.random.default_rng(0)
  ids = np.minimum(rng.zipf(1.3, 4096) - 1, 49).astype(np.int32)
  rows = jnp.asarray(1 + 0.3 * rng.normal(size=(4096, 8)), half)
  exact = np.zeros((50, 8))
  np.add.at(exact, ids, np.asarray(rows, np.float64))

  def gradient(make, policy):
    graphdef, params, rest = rig.split(make)

    def loss(params):
      view = rig.under(nnx.merge(graphdef, params, rest), policy)
      out = view(ids)
      assert out.dtype == half
      return jnp.sum((out * rows).astype(jnp.float32))

    return run(jax.grad(loss), params)["embedding"][...]

  ours = gradient(lambda rngs: nnx.Embed(50, 8, rngs=rngs), half_of(half, half))
  assert error(ours, exact) < 1e-6
  by_flax = gradient(lambda rngs: nnx.Embed(50, 8, dtype=jnp.dtype(half), rngs=rngs), None)
  assert error(by_flax, exact) > off


@BOTH
def test_attend_computes_in_half(half):
  view = with_policy(nnx.Embed(5, 4, rngs=nnx.Rngs(0)), half_of(half))
  (product,) = products(jax.make_jaxpr(view.attend)(X))
  assert product.dtypes == (half, half)


NORMS = {
  "layer": lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)),
  "rms": lambda: nnx.RMSNorm(4, rngs=nnx.Rngs(0)),
  "group": lambda: nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0)),
  "batch": lambda: nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0)),
}


@pytest.mark.case("B083")
@BOTH
@pytest.mark.parametrize("name", NORMS)
def test_norms_use_scale_bias_and_statistics_as_they_are_stored(name, half):
  model = NORMS[name]()
  # 1 + 2^-12 is 1 in both half types; times 4096 the difference is seen in float32 alone.
  model.scale[...] = jnp.asarray(np.full(4, 4096 * (1 + 2**-12), np.float32))
  if name == "batch":
    model.mean[...] = jnp.asarray(np.full(4, 1 + 2**-12, np.float32))
  x = jnp.asarray(X, half)
  ours = with_policy(model, half_of(half, half))(x)
  # Both compute in float32, from the same half input, and round once.
  np.testing.assert_array_equal(ours, model(x.astype(jnp.float32)).astype(half))


def test_running_statistics_are_those_of_float32():
  models = [nnx.BatchNorm(4, rngs=nnx.Rngs(0)) for _ in range(2)]
  x = X.astype("bfloat16")
  with_policy(models[0], "c=bf16")(x)
  models[1](x.astype(jnp.float32))
  np.testing.assert_array_equal(models[0].mean[...], models[1].mean[...])
  np.testing.assert_array_equal(models[0].var[...], models[1].var[...])


@pytest.mark.case("A74", "A80")
@BOTH
@pytest.mark.parametrize("cell", [nnx.SimpleCell, nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell])
def test_cells_multiply_in_half_and_add_up_in_the_dtype_of_their_carry(cell, half):
  view = with_policy(cell(4, 4, rngs=nnx.Rngs(0)), half_of(half))
  start = view.initialize_carry((3, 4), nnx.Rngs(0))
  assert {str(x.dtype) for x in jax.tree.leaves(start)} == {"float32"}
  for dtype in ("float32", half):
    carry = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), start)
    for x in (X, X.astype(half)):
      # Of a simple cell the next carry is a product alone; the others gate what they carry.
      wanted = half if cell is nnx.SimpleCell else dtype
      program, found = jax.make_jaxpr(view, return_shape=True)(carry, x)
      assert {str(x.dtype) for x in jax.tree.leaves(found)} == {wanted}
      assert {p.dtypes for p in products(program)} == {(half, half)}


class Learned(nnx.RNNCellBase):
  """Starts in a learned state; its weights are raw parameters."""

  def __init__(self):
    self.start, self.w = nnx.Param(jnp.zeros((1, 4))), nnx.Param(jnp.eye(4))

  def initialize_carry(self, input_shape, rngs=None, carry_init=None):
    assert self.start[...].dtype == jnp.float32
    return jnp.broadcast_to(self.start[...], (*input_shape[:-1], 4))

  def __call__(self, carry, inputs):
    carry = jnp.tanh(inputs @ self.w + carry.astype(inputs.dtype) @ self.w)
    return carry, carry

  @property
  def num_feature_axes(self):
    return 1


@pytest.mark.case("B092")
def test_a_learned_start_is_read_as_it_is_stored():
  model = nnx.RNN(Learned(), return_carry=True)
  graphdef, state = nnx.split(model)

  def forward(state, x, **options):
    return with_policy(nnx.merge(graphdef, state, copy=True), "c=bf16")(x, **options)

  program = jax.make_jaxpr(forward)(state, X[None])
  assert half_share(program) == 1
  carry, out = jax.eval_shape(forward, state, X[None])
  assert (carry.dtype, out.dtype) == (jnp.float32, BF16)
  start = jnp.zeros((1, 4), jnp.float32)
  carry, out = jax.eval_shape(lambda s, x, c: forward(s, x, initial_carry=c), state, X[None], start)
  assert (carry.dtype, out.dtype) == (jnp.float32, BF16)
  out = jax.eval_shape(lambda s, x: forward(s, x, return_carry=False), state, X[None])
  assert out.dtype == BF16


@pytest.mark.case("B090", "I11")
@BOTH
def test_a_dropout_mask_does_not_depend_on_the_policy(half):
  out = [
    rig.under(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), policy)(jnp.ones(64, dtype))
    for policy, dtype in ((None, "float32"), (half_of(half), "float32"), (half_of(half), half))
  ]
  np.testing.assert_array_equal(out[0], out[1])
  np.testing.assert_array_equal(out[0] == 0, out[2] == 0)
  assert [str(x.dtype) for x in out] == ["float32", "float32", half]


def test_a_dropout_rate_of_numpy_promotes_nothing():
  model = nnx.Dropout(np.linspace(0, 0.5, 3)[1], rngs=nnx.Rngs(0))
  assert with_policy(model, "c=bf16")(X.astype(BF16)).dtype == BF16


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_a_computed_weight_is_stored_in_float32_and_used_in_half(wrapper):
  def made(policy):
    rngs = nnx.Rngs(0)
    model = wrapper(nnx.Linear(4, 5, rngs=rngs), rngs=rngs)
    return model, rig.under(model, policy)(X)

  model, out = made("c=bf16")
  plain, _ = made(None)
  assert out.dtype == BF16
  np.testing.assert_array_equal(model.layer_instance.kernel[...], plain.layer_instance.kernel[...])
  assert model.layer_instance.kernel.dtype == jnp.float32


@BOTH
def test_attention_with_a_function_of_the_users_own(half):
  def own(query, key, value, **options):
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", query, key))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)

  model = nnx.MultiHeadAttention(2, 4, attention_fn=own, decode=False, rngs=nnx.Rngs(0))
  program = jax.make_jaxpr(with_policy(model, half_of(half)))(X)
  assert [p.dtypes for p in products(program)] == [(half, half)] * 6
  assert dtypes_of(program, "exp") == {"float32"}


MASK = np.random.default_rng(0).random((2, 1, 5, 5)) < 0.6
MASK[..., 0] = True
ATTENTION = {
  "plain": ({}, {}),
  "masked": ({}, {"mask": MASK}),
  "causal": ({}, {"is_causal": True}),
  "grouped": ({"num_kv_heads": 2}, {"mask": MASK}),
  "sown": ({}, {"mask": MASK, "sow_weights": True}),
  "dropped out": ({"dropout_rate": 0.4, "broadcast_dropout": False}, {}),
}


@pytest.mark.case("B088")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of `sow`, without `nnx.capture`.
@pytest.mark.parametrize("name", ATTENTION)
@BOTH
def test_attention_multiplies_in_half_and_takes_its_softmax_in_float32(half, name):
  """Forward and backward, near to what it is in float32, with the same random numbers."""
  own, options = ATTENTION[name]
  x = normal(2, 5, 8)
  graphdef, state = nnx.split(
    nnx.MultiHeadAttention(4, 8, deterministic=False, decode=False, rngs=nnx.Rngs(0), **own)
  )

  def loss(policy, x):
    out = rig.under(nnx.merge(graphdef, state, copy=True), policy)(x, **options)
    return jnp.sum(out.astype("float32") ** 2), out

  def both(policy):
    return jax.value_and_grad(functools.partial(loss, policy), has_aux=True)

  program = jax.make_jaxpr(both(half_of(half)))(x)
  assert {p.dtypes for p in products(program)} == {(half, half)}
  assert dtypes_of(program, "exp") == {"float32"}
  ours, plain = (run(both(policy), x) for policy in (half_of(half), None))
  assert ours[0][1].dtype == half
  assert error(ours, plain) < {"bfloat16": 0.02, "float16": 0.002}[half]


@BOTH
def test_a_row_of_attention_that_sees_nothing_is_finite(half):
  model = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
  view = with_policy(model, half_of(half))
  assert np.isfinite(view(X, mask=np.zeros((1, 3, 3), bool)).astype("float32")).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_attention_weights_that_are_sown():
  graphdef, state = nnx.split(nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0)))

  def forward(state, x):
    view = with_policy(nnx.merge(graphdef, state), "c=bf16")
    _, seen = nnx.capture(view, nnx.Intermediate)(x, sow_weights=True)
    return seen["attention_weights"].get_value()[0]

  assert dtypes_of(jax.make_jaxpr(forward)(state, X), "exp") == {"float32"}
  weights = forward(state, X)
  assert weights.dtype == jnp.float32  # as they are computed
  np.testing.assert_allclose(weights.sum(-1), np.ones((2, 3)), rtol=1e-6)


@pytest.mark.case("B087")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_decode_cache_keeps_its_dtype(stored):
  model = rig.model(lambda rngs: nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs))
  view = with_policy(model, "c=bf16")
  view.init_cache((1, 3, 4), dtype=jnp.dtype(stored))
  assert model.cached_key is view.cached_key
  wanted = nnx.jit(lambda m, x: m(x, is_causal=True, decode=False))(model, X[None])
  step = nnx.jit(lambda view, x: view(x))
  steps = [step(view, X[None, i : i + 1]) for i in range(3)]
  assert model.cached_key.dtype == model.cached_value.dtype == stored
  assert int(nnx.state(model)["cache_index"][...]) == 3
  assert {x.dtype for x in steps} == {BF16}
  assert error(np.concatenate(steps, axis=1), wanted) < 0.02


@BOTH
def test_a_masked_convolution(half):
  mask = jnp.asarray(integers(3, 4, 5, below=2))
  model = nnx.Conv(4, 5, (3,), mask=mask, rngs=nnx.Rngs(0))
  program = jax.make_jaxpr(with_policy(model, half_of(half)))(normal(2, 6, 4))
  assert half_share(program) == 1
  assert converts(program)[f"{half}->float32"] == 0


def test_lora_around_a_layer_of_the_view():
  rngs = nnx.Rngs(0)
  model = nnx.LoRA(4, 2, 5, base_module=nnx.Linear(4, 5, rngs=rngs), rngs=rngs)
  view = with_policy(model, "c=bf16", [mpjax.Rule("c=f32", path="base_module")])
  found = products(jax.make_jaxpr(view)(X))
  assert sorted({p.dtypes[0] for p in found}) == ["bfloat16", "float32"]
  # What the layer in float32 returns is not rounded before the rest is added.
  assert view(X).dtype == jnp.float32


class Amax(nnx.Variable):
  """The largest number so far."""


class RunningMax(nnx.Module):
  """Divides by the largest number so far, which it keeps, as a layer in float8 would."""

  def __init__(self):
    self.largest = Amax(jnp.ones(()))

  def __call__(self, x):
    if not hasattr(self, "first"):
      self.first = Amax(jnp.exp(x[0, 0]))
    out = x / self.largest[...]
    self.largest[...] = jnp.maximum(self.largest[...], jnp.max(jnp.abs(x)))
    return out @ jnp.eye(x.shape[-1], dtype=x.dtype)


def test_a_layer_with_state_of_its_own_is_one_row(monkeypatch):
  x = jnp.full((2, 3), 2, BF16)

  def found():
    model = RunningMax()
    view = with_policy(model, "params=bfloat16,compute=bfloat16")
    view(x)
    assert model.largest[...] == 2
    program = jax.make_jaxpr(lambda: nnx.clone(view)(x))()
    assert model.largest.dtype == "float32"
    return model.first.dtype, dtypes_of(program, "div"), products(program)[0].dtypes[0]

  # State that nobody knows decides the dtype of what it meets, and is what it was created in.
  assert found() == ("float32", {"float32"}, "bfloat16")
  row = StateKind(neutral=True, stored="param_dtype")
  monkeypatch.setattr(_layers, "STATE", {**_layers.STATE, Amax: row})
  assert found() == ("bfloat16", {"bfloat16"}, "bfloat16")
  # One that starts each step from its own last result computes in float32.
  monkeypatch.setattr(_layers, "ITERATES", (*_layers.ITERATES, RunningMax))
  assert found() == ("bfloat16", {"float32"}, "float32")
