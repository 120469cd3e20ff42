"""What users stumbled over while modules cast their arguments: by default it is right.

Each test runs in both half types, for Linen by `with_policy` and inside of `policy_scope`, and for
NNX. No rules, lists or adapters are given unless the test is about rules.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import Policy, Rule
from tests import programs
from tests.integration.stumbles_rig import (
  Linen,
  LinenScope,
  Nnx,
  assert_close,
  leaf,
  value_and_grads,
)
from tests.models import stumbles
from tests.models.stumbles import ALMOST_ONE, EPS
from tests.models.values import normal


@pytest.fixture(params=["bfloat16", "float16"])
def half(request):
  return request.param


@pytest.fixture(params=[Linen, LinenScope, Nnx], ids=["linen", "linen_scope", "nnx"])
def way(request):
  return request.param


RAYS = normal(256, 3), normal(256, 3, seed=1), np.linspace(0, 4, 256, dtype=np.float32)
TIMES = np.linspace(0, 999, 1024, dtype=np.float32)
PLACES = np.arange(stumbles.SIZE, dtype=np.float32)

REACHED = [
  (("Rotary", "helper"), (normal(4, 16),)),
  (("Denoiser",), (normal(1024, 4), TIMES)),
  (("Nerf",), RAYS),
  (("Deformable", "np.arange"), (stumbles.FEATURES, PLACES)),
  (("Detector", "np"), (stumbles.FEATURES, stumbles.ANCHORS)),
  (("Ends", "by hand"), (normal(2, 8),)),
  (("Masked", -1e9, "where"), (normal(2, 4, 8), stumbles.mask_argument(-1e9, "where"))),
  (("Normed",), (normal(2, 16),)),
  (("Stacked",), (normal(2, 16),)),
  (("Activated", "gelu by hand"), (normal(2, 4),)),
  (("Trained", "module"), (normal(6, 4), stumbles.LABELS[:6])),
]


@pytest.mark.parametrize(("model", "args"), REACHED, ids=[model[0] for model, _ in REACHED])
def test_products_are_in_half(model, args, half, way):
  """Without this a policy that did nothing would pass most of what follows."""
  variables = way.variables(*model, args=args)
  program = jax.make_jaxpr(value_and_grads(way.under(half, *model)))(variables, *args)
  assert programs.half_share(program) == 1


# Positions, times, coordinates.


@pytest.mark.parametrize("place", ["helper", "module"])
def test_positions_given_to_a(place, half, way):
  x = normal(2048, 16)
  variables = way.variables("Rotary", place, args=(x,))
  want = programs.run(way.plain("Rotary", "inline"), variables, x)
  inline, moved = (
    stumbles.error(programs.run(way.under(half, "Rotary", p), variables, x), want)
    for p in ("inline", place)
  )
  assert 0 < inline < 2 * EPS[half]
  assert moved <= 1.2 * inline


@pytest.mark.parametrize(
  ("name", "args"),
  [
    ("Denoiser", (normal(1024, 4), TIMES)),
    ("Denoiser", (normal(1024, 4), TIMES.astype(np.int32))),
    ("Nerf", RAYS),
  ],
  ids=["float_timesteps", "integer_timesteps", "coordinates"],
)
def test_what_submodules_make_of(name, args, half, way):
  variables = way.variables(name, args=args)
  want = programs.run(way.plain(name), variables, *args)
  by_hand = stumbles.error(programs.run(way.plain(name, half), variables, *args), want)
  assert 0 < by_hand < 4 * EPS[half]
  got = programs.run(way.under(half, name), variables, *args)
  assert stumbles.error(got, want) <= 1.2 * by_hand


def test_calls_that_are_not_compiled_are_the_same(half, way):
  variables = way.variables("Nerf", args=RAYS)
  want = programs.run(way.plain("Nerf"), variables, *RAYS)
  by_hand = stumbles.error(way.plain("Nerf", half)(variables, *RAYS), want)
  assert stumbles.error(way.under(half, "Nerf")(variables, *RAYS), want) <= 1.2 * by_hand


@pytest.mark.parametrize(
  ("name", "grid"),
  [
    *[("Deformable", grid) for grid in (*stumbles.GRIDS, "argument")],
    *[("Detector", grid) for grid in (*stumbles.ANCHORS_BY, "argument")],
  ],
)
def test_grids_moved_by_a_prediction(name, grid, half, way):
  args = (stumbles.FEATURES, PLACES if name == "Deformable" else stumbles.ANCHORS)
  variables = way.variables(name, grid, args=args)
  want = programs.run(way.plain(name, grid), variables, *args)
  assert_close(programs.run(way.under(half, name, grid), variables, *args), want, 0.01)


# Probabilities, masks, norms, losses.


@pytest.mark.parametrize(
  "end", ["by hand", "by hand in a helper", "by hand in a module", "of JAX", "log_softmax"]
)
def test_probabilities_sum_to_one_by_softmax(end, half, way):
  model = ("EndsInLog",) if end == "log_softmax" else ("Ends", end)
  x = normal(64, 8)
  variables = way.variables(*model, args=(x,))
  got, want = (
    np.asarray(programs.run(fun, variables, x), np.float64)
    for fun in (way.under(half, *model), way.plain(*model))
  )
  assert np.mean(got == got.astype(jnp.dtype(half))) < 0.1, "computed or rounded in half"
  assert stumbles.error(got, want) < 4 * EPS[half]
  probabilities = np.exp(got) if end == "log_softmax" else got
  np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=0, atol=1e-6)


def test_the_actor_of_a_ppo_loop_acts(half, way):
  frames = np.random.default_rng(0).integers(0, 255, (16, 16, 16, 4), np.uint8)
  variables = way.variables("ActorCritic", args=(frames,))
  fun = way.under(half, "ActorCritic")
  log_probs, values = jax.device_get(programs.run(fun, variables, frames))
  probs = np.exp(np.array(log_probs))
  np.testing.assert_allclose(probs.sum(-1, dtype=np.float64), 1, rtol=0, atol=1e-6)
  # NumPy refuses probabilities that do not sum to one.
  rng = np.random.RandomState(0)
  assert {rng.choice(4, p=row) for row in probs} <= set(range(4))
  assert values.shape == (16, 1)
  assert programs.half_share(jax.make_jaxpr(fun)(variables, frames)) == 1


@pytest.mark.parametrize("style", ["where", "product", "bias"])
@pytest.mark.parametrize("big", stumbles.BIG)
def test_masks_with_padded_rows(big, style, half, way):
  model = ("Masked", stumbles.BIG[big], style)
  args = normal(2, 4, 8), stumbles.mask_argument(stumbles.BIG[big], style)
  variables = way.variables(*model, args=args)
  ours, true = (
    programs.run(value_and_grads(fun), variables, *args)
    for fun in (way.under(half, *model), way.plain(*model))
  )
  # But for the gradient by the mask itself: sums of what cancels, times -1e9.
  assert_close((ours[0], ours[1][:2]), (true[0], true[1][:2]), 8 * EPS[half])


def test_a_segment_of_many_ones_is_their_number(half, way):
  """A sum in bfloat16 ends at 256, one in float16 at 2,048."""
  args = np.ones((2600, 1), np.float32), np.repeat([0, 1], [2500, 100])
  variables = way.variables("Graph", args=args, kernel=1)
  for total in programs.run(way.under(half, "Graph"), variables, *args):
    np.testing.assert_array_equal(total, [[2500], [100]])


@pytest.mark.parametrize("name", ["Normed", "Stacked"])
def test_norms_by_any_name_of_inputs_whose_squares_overflow(name, half, way):
  x = normal(8, 16) * 300
  variables = way.variables(name, args=(x,))
  want = programs.run(way.plain(name), variables, x)
  assert_close(programs.run(way.under(half, name), variables, x), want, 4 * EPS[half])


@pytest.mark.parametrize("name", stumbles.ACTIVATIONS)
def test_activations_of_a_thousand(name, half, way):
  variables = way.variables("Activated", name, args=(stumbles.LOUD,), kernel=np.eye(4))
  ours, true = (
    programs.run(value_and_grads(fun), variables, stumbles.LOUD)
    for fun in (way.under(half, "Activated", name), way.plain("Activated", name))
  )
  for got, want in zip((ours[0], ours[1][1]), (true[0], true[1][1]), strict=True):
    np.testing.assert_allclose(got, want, rtol=4 * EPS[half], atol=2 * EPS[half])


@pytest.mark.parametrize("place", ["helper", "module"])
def test_a_loss_of_many_rows_in_a(place, half, way):
  args = normal(stumbles.ROWS, 4) * 3, stumbles.LABELS
  # Weights that both half types hold: rounding them would be an error of every row, and add up.
  kernel = np.round(8 * normal(4, 10)) / 8
  variables = way.variables("Trained", place, args=args, kernel=kernel)
  want = programs.run(way.plain("Trained", place), variables, *args)
  assert want > np.finfo(np.float16).max
  got = programs.run(way.under(half, "Trained", place), variables, *args)
  assert stumbles.error(got, want) < EPS[half] / 50


# Sums over many rows.


def test_the_gradient_of_a_hand_written_embedding_counts(half, way):
  variables = way.variables("Embedded", args=(stumbles.TOKENS,), kernel=np.eye(4))
  fun = value_and_grads(way.under(half, "Embedded"))
  _, (grads,) = programs.run(fun, variables, stumbles.TOKENS)
  expected = np.repeat([[10], [3590], [0], [0]], 4, 1)
  np.testing.assert_array_equal(leaf(grads, "table"), expected)


@pytest.mark.parametrize("how", ["embedding.T", "attend"])
def test_tied_embeddings_by(how, half, way):
  ids = stumbles.TOKENS[:600] % 16 * 3
  ids[::7] = 5
  variables = way.variables("Tied", how, args=(ids,))
  ours, true = (
    value_and_grads(fun) for fun in (way.under(half, "Tied", how), way.plain("Tied", how))
  )
  found = programs.products(jax.make_jaxpr(ours)(variables, ids))
  assert len(found) == 6  # Two layers, and the two derivatives of each.
  assert all(product.is_low_precision for product in found)
  want = programs.run(true, variables, ids)
  assert_close(programs.run(ours, variables, ids), want, 4 * EPS[half])


def test_the_gradient_of_a_parameter_used_often_counts(half, way):
  """In any order: 4096 + 39 is no number of either half type."""
  x = np.asarray([[4096.0]] + [[1]] * 39, np.float32)
  variables = way.variables("Shared", args=(x,), kernel=1, w=1)
  _, grads = programs.run(value_and_grads(way.under(half, "Shared")), variables, x)
  np.testing.assert_array_equal(leaf(grads[0], "w'"), 4096 + 39)


def test_gradients_of_biases_and_scales_are_float32_sums(half, way):
  """Numbers that both half types hold, and whose sums float32 holds: any rounding would show."""
  x = np.tile(np.asarray([[1, 2, 1, 2]], np.float32), (4096, 1))
  variables = way.variables("Biased", args=(x,), kernel=np.eye(4), bias=0, scale=1, shift=0)
  fun = way.under(half, "Biased")
  grads = programs.run(
    jax.grad(lambda v, x, c: jnp.sum(fun(v, x) * c)), variables, x, stumbles.WEIGHTS
  )
  sums = stumbles.WEIGHTS.sum(0, dtype=np.float64)
  for name, factor in (("bias", 1), ("shift", 1), ("scale", x[0])):
    np.testing.assert_array_equal(leaf(grads, name), sums * factor, err_msg=name)


# Where products must stay in float32, or must not.


@pytest.mark.parametrize("order", ["half full read", "full read half", "read half full"])
def test_a_layer_called_in_half_and_in_full_precision(order, half, way):
  """Its weights are 1 in half only; a module that a rule keeps in float32 reads them as well."""
  x = np.ones((2, 16), np.float32)
  variables = way.variables("Precisely", order, args=(x,), w=ALMOST_ONE)
  fun = way.under(half, "Precisely", order, rules=[Rule("float32", path="reader")])
  in_half, in_full, read = programs.run(fun, variables, x)
  np.testing.assert_array_equal(in_half, 16)
  np.testing.assert_array_equal(in_full, 16 * ALMOST_ONE)
  np.testing.assert_array_equal(read, 16 * ALMOST_ONE)


@pytest.mark.parametrize(
  ("rules", "fields"),
  [
    ([Rule("float32", path="head")], ()),
    ([Rule(None, path="head")], ()),
    ([Rule(Policy(), path="head")], ()),
    ((), ("highest",)),
  ],
  ids=["float32", "None", "Policy()", "precision=highest"],
)
def test_a_head_keeps_its_products_in_float32_by(rules, fields, half, way):
  x = normal(3, 8)
  variables = way.variables("Headed", *fields, args=(x,))
  fun = value_and_grads(way.under(half, "Headed", *fields, rules=rules))
  found = programs.products(jax.make_jaxpr(fun)(variables, x))
  # Five features are those of the head, and eight those of the body.
  head = {p.dtypes for p in found if any("5" in s.partition("[")[2] for s in p.operands)}
  body = {p.dtypes for p in found if any("8" in s.partition("[")[2] for s in p.operands)}
  assert len(found) == 6
  assert head == {("float32", "float32")}
  assert body == {(half, half)}


@pytest.mark.parametrize("kernel", ["half_attention", "cudnn_attention"])
def test_kernels_that_take_nothing_but_half(kernel, half, way, monkeypatch):
  """For CUDA as far as one comes without it: traced and lowered, as the model by hand is."""
  stumbles.pretend_cudnn(monkeypatch)
  x = normal(2, 64, 16)
  variables = way.variables("FusedBlock", "any_attention", args=(x,))
  with pytest.raises(NotImplementedError, match="must be fp16/bf16"):
    jax.make_jaxpr(way.plain("FusedBlock", kernel))(variables, x)
  ours, by_hand = (
    jax.jit(value_and_grads(fun)).trace(variables, x)
    for fun in (way.under(half, "FusedBlock", kernel), way.plain("FusedBlock", kernel, half))
  )
  assert all(product.is_low_precision for product in programs.products(ours.jaxpr))
  calls = [
    traced.lower(lowering_platforms=("cuda",)).as_text().count("@__cudnn$fmha")
    for traced in (ours, by_hand)
  ]
  assert calls == [2, 2] if kernel == "cudnn_attention" else calls == [0, 0]
  if kernel == "half_attention":
    got, want = (
      programs.run(fun, variables, x)
      for fun in (way.under(half, "FusedBlock", kernel), way.plain("FusedBlock", "any_attention"))
    )
    assert stumbles.error(got, want) < 4 * EPS[half]


def test_a_model_whose_python_looks_at_values(half, way):
  """What can be traced of it, each layer, runs in half; where it cannot be, one warning says so."""
  x = np.full((2, 4), ALMOST_ONE)
  # Of the same tree, since shapes are found by tracing.
  variables = way.variables("Activated", "cube", args=(x,), kernel=ALMOST_ONE)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hidden, out = way.under(half, "Looking")(variables, x)
  assert len(caught) == 1
  assert "stumbles_" in f"{caught[0].message} {caught[0].filename}"  # The line is named.
  assert hidden.dtype == out.dtype == jnp.float32
  np.testing.assert_array_equal(hidden, np.full((2, 4), 8))
  np.testing.assert_array_equal(out, np.full((2, 4), 32))
