"""Models as research code writes them: every product in half, and gradients as good as by hand."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests import programs
from tests.nnx import classics, zoo
from tests.nnx.rig import functions, is_float, split, total

pytestmark = pytest.mark.standard_promotion

MODELS = {**zoo.MODELS, **classics.MODELS}


def leaves(tree: Any) -> list[Any]:
  return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


@pytest.mark.case("B073", "B082", "B087", "B092")
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_in_half(name, half):
  graphdef, params, rest = split(MODELS[name].make)
  _, both = functions(graphdef, f"mixed_{half}", MODELS[name].run)
  program, (_, grads) = jax.make_jaxpr(both, return_shape=True)(params, rest, MODELS[name].inputs)
  assert {dtype for p in programs.products(program) for dtype in p.dtypes} == {half}
  assert {x.dtype for x in leaves(grads)} == {np.dtype("float32")}


def rms(got, want):
  """The root of the mean square of all differences: one rounding of one number decides nothing."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  flat = [np.ravel(np.asarray(x, np.float64) - np.asarray(y, np.float64)) for x, y in pairs]
  return np.sqrt(np.mean(np.square(np.concatenate(flat))))


@pytest.mark.parametrize(
  ("name", "half"),
  [
    ("vit", "float16"),
    ("wavenet", "bfloat16"),
    ("graph_network", "float16"),
    ("field_by_its_gradient", "bfloat16"),
  ],
)
def test_gradients_err_no_more_than_with_all_cast_outside(name, half):
  # Of these models parameters and inputs that are cast outside bring all of it into half.
  model = MODELS[name]
  graphdef, params, rest = split(model.make)
  true, ours = (
    functions(graphdef, policy, model.run)[1] for policy in ("float32", f"mixed_{half}")
  )

  def cast(tree):
    return jax.tree.map(lambda x: x.astype(half) if is_float(x) else x, tree)

  def by_hand(params, rest, inputs):
    def loss(params, inputs):
      plain = nnx.merge(graphdef, cast(params), rest, copy=True)
      return total(model.run(plain, *cast(inputs)))[0]

    return None, jax.grad(loss, (0, 1), allow_int=True)(params, inputs)

  def every(*args):
    return [fun(*args)[1] for fun in (true, ours, by_hand)]

  exact, got, control = map(leaves, programs.run(every, params, rest, model.inputs))
  # Measured, ours to theirs: 0.98 for the transformer, 0.99 for the graphs, 1 for the others.
  assert rms(got, exact) <= rms(control, exact)
