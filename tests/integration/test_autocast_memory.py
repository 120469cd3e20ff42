"""What is kept for the backward pass under autocast, against the same model with dtypes by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import half_share
from tests.scripts import benchmark

MODELS = ("ResNet", "GPT, scan and remat", "BERT", "LSTM")
BOUND = 1.1
GATED = 1.25
"""The bound of an LSTM, whose gates are held in float32 for the sum that its state is."""

# Programs promote ranks as people write them.
pytestmark = pytest.mark.standard_promotion


memory = benchmark("autocast_memory", name="memory")


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_autocast_keeps_no_more_than_dtypes_by_hand(memory, half):
  found = memory.compare_models("tiny", half)
  assert tuple(found) == MODELS
  for name, kept in found.items():
    hand, cast, plain = kept["by hand"], kept["autocast"], kept["float32"]
    # Else float32 would be within the bound, and nothing be shown.
    assert plain.own > BOUND * hand.own, name
    bound = GATED if name == "LSTM" else BOUND
    assert cast.own <= bound * hand.own, name
    assert cast.all <= bound * hand.all, name


def test_with_scopes_plain_programs_keep_as_little_too(memory):
  """Those that keep more without: scopes are what tells autocast where a layer ends."""
  hard = ("mlp", "resnet", "transformer, scan and remat")
  for name, kept in memory.compare_programs(16, "bfloat16", hard).items():
    assert kept["autocast, scopes"].own <= BOUND * kept["by hand"].own, name


def test_bytes_are_those_of_the_arrays_that_vjp_keeps(memory):
  """Against the arrays themselves; each is counted once, and arguments apart."""
  x, w = jnp.ones((3, 5)), jnp.ones((5, 7))

  def loss(w):
    h = jnp.sin(x @ w)
    return jnp.sum(h * h.astype(jnp.bfloat16).astype(jnp.float32))

  arrays = {id(leaf): leaf for leaf in jax.tree.leaves(jax.vjp(loss, w)[1])}
  whole = sum(np.asarray(leaf).nbytes for leaf in arrays.values())
  found = memory.saved(loss, w)
  # The cosine, the sine and its rounded copy were made; x came in from outside.
  assert found == (3 * 3 * 7 * 4, 3 * 3 * 7 * 4 + x.nbytes)
  assert found.all == whole


def test_the_forms_by_hand_are_in_half(memory):
  """Both forms of each model have the same parameters; by hand every product is in half."""
  for name in MODELS:
    model = memory.SIZES["tiny"][name]
    (_, plain), (loss, params) = (memory.losses(model, half) for half in (None, jnp.bfloat16))
    shapes = [sorted(x.shape for x in jax.tree.leaves(tree)) for tree in (params, plain)]
    assert shapes[0] == shapes[1], name
    assert half_share(jax.make_jaxpr(jax.grad(loss))(params)) == 1, name
