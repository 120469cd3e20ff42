"""JAX's own check finds no sum of low-precision numbers in any model, forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mpjax
from tests.autocast import checks
from tests.models.layers import EXEMPT, LAYERS
from tests.models.papers import PAPERS
from tests.models.situations import SITUATIONS
from tests.models.values import filled, shapes

# As people run them: dtypes and ranks are promoted in every other line of other libraries.
pytestmark = pytest.mark.standard_promotion

RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def squares(tree: Any) -> Any:
  return sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(tree))


def check_sums(loss: Any, variables: Any, inputs: tuple[Any, ...], backward: bool = True) -> None:
  """Differentiates with respect to parameters and floating inputs, and looks for sums."""
  params = {"params": variables.pop("params", {})}
  leaves, tree = jax.tree.flatten(inputs)
  moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

  def fun(params, some, state):
    given = dict(zip(moving, some, strict=True))
    now = [given.get(i, x) for i, x in enumerate(leaves)]
    return loss({**params, **state}, *jax.tree.unflatten(tree, now))

  cast = mpjax.autocast(fun, data_argnums=(1, 2))
  gradient = jax.grad(cast, argnums=(0, 1)) if backward else cast
  with jax.allow_f16_reductions(False):
    jaxpr = jax.make_jaxpr(gradient)(params, [leaves[i] for i in moving], variables)
  assert checks.sums(jaxpr) == []


@pytest.mark.parametrize("name", [*LAYERS, *EXEMPT])
def test_no_layer_of_flax_adds_up_in_low_precision(name):
  layer = {**LAYERS, **EXEMPT}[name]
  model = layer.make()
  variables = filled(shapes(model, *layer.inputs, **layer.kwargs))
  state = [collection for collection in variables if collection != "params"]

  def loss(variables, *inputs):
    out = model.apply(variables, *inputs, rngs=RNGS, mutable=state, **layer.kwargs)
    return squares(out[0])

  check_sums(loss, dict(variables), layer.inputs)


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_module_as_people_write_them_adds_up_in_low_precision(name):
  situation = SITUATIONS[name]
  model = situation.make()
  variables = filled(jax.eval_shape(model.init, RNGS, *situation.inputs))

  def loss(variables, *inputs):
    return squares(situation.run(model, variables, *inputs))

  check_sums(loss, dict(variables), situation.inputs, situation.backward)


@pytest.mark.parametrize("name", PAPERS)
def test_no_model_of_a_paper_adds_up_in_low_precision(name):
  paper = PAPERS[name]
  model = paper.make()
  params = filled(shapes(getattr(model, "module", model), *paper.inputs))["params"]

  def loss(variables, *inputs):
    return paper.loss(paper.make(), variables["params"], *inputs)

  check_sums(loss, {"params": params}, paper.inputs)
