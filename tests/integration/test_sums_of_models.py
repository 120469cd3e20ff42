"""JAX's own check finds no sum of low-precision numbers in any model, forward and backward."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mpjax
from tests.jaxprs.autocast import checks
from tests.models import layers
from tests.models.papers import PAPERS
from tests.models.situations import SITUATIONS
from tests.models.values import filled, shapes
from tests.nnx import classics, rig, zoo
from tests.nnx import layers as nnx_layers

# As people run them: dtypes and ranks are promoted in every other line of other libraries.
pytestmark = pytest.mark.standard_promotion

RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
LINEN = {**layers.LAYERS, **layers.EXEMPT}
NNX = {**nnx_layers.LAYERS, **nnx_layers.EXEMPT}
NNX_MODELS = {**zoo.MODELS, **classics.MODELS}
POLICIES = ["mixed_bfloat16", "mixed_float16"]
WAYS = pytest.mark.parametrize("way", ["autocast", *POLICIES])
BY_POLICY = pytest.mark.parametrize("policy", POLICIES)


def squares(tree: Any) -> Any:
  floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
  return sum((x.astype(jnp.float32) ** 2).sum() for x in floats)


def check_sums(
  loss: Callable[..., Any],
  params: Any,
  inputs: tuple[Any, ...],
  state: Any = None,
  *,
  way: str = "",
  backward: bool = True,
) -> None:
  """Differentiates with respect to parameters and floating inputs, and looks for sums.

  Args:
    loss: a function of parameters, state, and the inputs.
    params: the parameters.
    inputs: the inputs.
    state: other variables.
    way: "autocast" casts the loss; else a policy does inside of it.
    backward: whether there is a gradient.
  """
  leaves, tree = jax.tree.flatten(inputs)
  moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

  def fun(params, some, state):
    given = dict(zip(moving, some, strict=True))
    now = [given.get(i, x) for i, x in enumerate(leaves)]
    return loss(params, state, *jax.tree.unflatten(tree, now))

  some = [leaves[i] for i in moving]
  cast = mpjax.autocast(fun, data_argnums=(1, 2)) if way == "autocast" else fun

  gradient = jax.grad(cast, argnums=(0, 1)) if backward else cast
  with jax.allow_f16_reductions(False):
    jaxpr = jax.make_jaxpr(gradient)(params, some, state)
  assert checks.sums(jaxpr) == []


def policied(model: Any, way: str) -> Any:
  return model if way == "autocast" else mpjax.linen.with_policy(model, way)


def check_layer(name: str, way: str, **options: Any) -> None:
  layer = LINEN[name]
  plain = layer.make()
  variables = dict(filled(shapes(plain, *layer.inputs, **layer.kwargs)))
  model = policied(plain, way)

  def loss(params, state, *inputs):
    now = {"params": params, **state}
    return squares(model.apply(now, *inputs, rngs=RNGS, mutable=list(state), **layer.kwargs)[0])

  check_sums(loss, variables.pop("params", {}), layer.inputs, variables, way=way, **options)


@WAYS
@pytest.mark.parametrize("name", LINEN)
def test_no_layer_of_flax_adds_up_in_low_precision(name, way):
  check_layer(name, way)


UNDER_VMAP = ("gradient_of_input_under_vmap", "field_by_its_hessian", "field_by_its_gradient")
"""Losses that call the model for one example, in a `vmap` outside of the policy: what all examples
share is a sum in low precision there, unless autocast is around it all. See docs/limits.md."""


def check(name: str, way: str, *args: Any, backward: bool = True) -> None:
  """Does what `check_sums` does; holds that JAX still refuses what the limits name."""
  if name in UNDER_VMAP and way != "autocast":
    check_sums(*args, way=way, backward=False)
    with pytest.raises(ValueError, match="reduce_sum on operand"):
      check_sums(*args, way=way)
  else:
    check_sums(*args, way=way, backward=backward)


@WAYS
@pytest.mark.parametrize("name", SITUATIONS)
def test_no_module_as_people_write_them_adds_up_in_low_precision(name, way):
  situation = SITUATIONS[name]
  plain = situation.make()
  variables = dict(filled(jax.eval_shape(plain.init, RNGS, *situation.inputs)))
  model = policied(plain, way)

  def loss(params, state, *inputs):
    return squares(situation.run(model, {"params": params, **state}, *inputs))

  params = variables.pop("params")
  check(name, way, loss, params, situation.inputs, variables, backward=situation.backward)


def check_paper(name: str, way: str) -> None:
  paper = PAPERS[name]
  model = paper.make()
  params = filled(shapes(getattr(model, "module", model), *paper.inputs))["params"]

  def loss(params, _, *inputs):
    if way == "autocast":
      return paper.loss(paper.make(), params, *inputs)
    with mpjax.linen.policy_scope(way):
      return paper.loss(paper.make(), params, *inputs)

  check(name, way, loss, params, paper.inputs)


@WAYS
@pytest.mark.parametrize("name", PAPERS)
def test_no_model_of_a_paper_adds_up_in_low_precision(name, way):
  check_paper(name, way)


def check_nnx(name: str, make: Any, run: Any, inputs: Any, policy: str) -> None:
  graphdef, params, rest = rig.split(make)
  forward, _ = rig.functions(graphdef, policy, run)

  def loss(params, _, *inputs):
    return squares(forward(params, rest, inputs)[0])

  check(name, policy, loss, params, inputs)


@BY_POLICY
@pytest.mark.parametrize("name", NNX)
def test_no_layer_of_nnx_adds_up_in_low_precision(name, policy):
  layer = NNX[name]
  call = functools.partial(lambda view, *inputs: view(*inputs, **layer.kwargs))
  check_nnx(name, layer.make, call, layer.inputs, policy)


@BY_POLICY
@pytest.mark.parametrize("name", NNX_MODELS)
def test_no_model_of_nnx_adds_up_in_low_precision(name, policy):
  model = NNX_MODELS[name]
  check_nnx(name, model.make, model.run, model.inputs, policy)
