"""Complete models that know of no dtype: all products in half, errors at the level of the type."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests import programs
from tests.models.limits import MaskByProduct, NumpyScalar, OneHot, OwnState
from tests.models.papers import PAPERS, RNGS
from tests.models.values import filled, normal, shapes

# As people run them: ranks are promoted in every other line.
pytestmark = pytest.mark.standard_promotion

HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
BOTH = pytest.mark.parametrize("half", HALF)
ALL = pytest.mark.parametrize("name", PAPERS)
SCALE = {"bfloat16": 1.0, "float16": 2.0**10}


@functools.cache
def params_of(name: str) -> Any:
  model = PAPERS[name].make()
  module = getattr(model, "module", model)
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  return programs.run(lambda inputs: module.init(keys, *inputs)["params"], PAPERS[name].inputs)


def gradient(name: str, model: Any, scale: float = 1.0) -> Any:
  """Returns `params -> (loss, gradients)`: the loss scaled in float32, both unscaled again."""
  paper = PAPERS[name]

  def scaled(params, inputs):
    return paper.loss(model, params, *inputs).astype(jnp.float32) * scale

  def both(params, inputs):
    loss, grads = jax.value_and_grad(scaled)(params, inputs)
    return jax.tree.map(lambda x: x.astype(jnp.float32) / scale, (loss, grads))

  return both


@functools.cache
def policied(name: str, half: str) -> tuple[Any, Any]:
  """Returns the traced program under a scope, and what it lowers to."""
  with mpjax.linen.policy_scope(f"mixed_{half}"):
    fun = gradient(name, PAPERS[name].make(), SCALE[half])
    traced = jax.jit(fun).trace(params_of(name), PAPERS[name].inputs)
    return traced.jaxpr, traced.lower()


@functools.cache
def plain(name: str) -> Any:
  return programs.run(gradient(name, PAPERS[name].make()), params_of(name), PAPERS[name].inputs)


@pytest.mark.case("B038", "B092", "B073")
@BOTH
@ALL
def test_every_product_is_in_half(name, half):
  jaxpr, _ = policied(name, half)
  assert programs.half_share(jaxpr) == 1
  assert {dtype for p in programs.products(jaxpr) for dtype in p.dtypes} == {half}


@ALL
def test_a_wrapper_makes_the_program_that_a_scope_makes(name):
  model = PAPERS[name].make()
  wrapped = model if hasattr(model, "module") else mpjax.linen.with_policy(model, "mixed_float16")
  if wrapped is model:
    model.module = mpjax.linen.with_policy(model.module, "mixed_float16")
  fun = gradient(name, wrapped, SCALE["float16"])
  ours = jax.jit(fun).trace(params_of(name), PAPERS[name].inputs).jaxpr
  texts = [re.sub(r"0x[0-9a-f]+", "0x", str(x)) for x in (ours, policied(name, "float16")[0])]
  assert texts[0] == texts[1]


@functools.cache
def by_hand(name: str, half: str) -> Any:
  """Returns the program in which parameters and inputs are cast once, outside of the model.

  That is all that can be done to a model without a dtype of its own, short of rewriting it.
  """

  def cast(tree):
    return jax.tree.map(
      lambda x: jnp.asarray(x, HALF[half]) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )

  paper = PAPERS[name]

  def scaled(params, inputs):
    return paper.loss(paper.make(), cast(params), *cast(inputs)).astype(jnp.float32) * SCALE[half]

  def both(params, inputs):
    loss, grads = jax.value_and_grad(scaled)(params, inputs)
    return jax.tree.map(lambda x: x.astype(jnp.float32) / SCALE[half], (loss, grads))

  traced = jax.jit(both).trace(params_of(name), paper.inputs)
  return traced.jaxpr, traced.lower()


def ran(name: str, half: str) -> Any:
  _, lowered = policied(name, half)
  return programs.compiled(lowered)(params_of(name), PAPERS[name].inputs)


@pytest.mark.case("I15")
@BOTH
@ALL
def test_losses_and_gradients_are_as_near_to_float32_as_their_type_allows(name, half):
  loss, grads = ran(name, half)
  true_loss, true_grads = plain(name)
  bound = {"bfloat16": 1.6e-2, "float16": 2e-3}[half]
  assert abs(loss - true_loss) <= bound * abs(true_loss)
  found = programs.error(grads, true_grads)
  assert found <= bound * (2 if PAPERS[name].attention else 1)
  if PAPERS[name].by_hand:
    jaxpr, lowered = by_hand(name, half)
    assert programs.half_share(jaxpr) == 1
    _, hand_grads = programs.compiled(lowered)(params_of(name), PAPERS[name].inputs)
    assert found <= 1.5 * programs.error(hand_grads, true_grads)


@BOTH
@ALL
def test_a_softmax_in_a_models_own_body_is_in_float32(name, half):
  model = PAPERS[name].make()
  module = getattr(model, "module", model)
  with mpjax.linen.policy_scope(mpjax.Policy(compute_dtype=half)):
    fun = functools.partial(module.apply, rngs=RNGS, mutable=["losses"])
    jaxpr = jax.make_jaxpr(fun)({"params": params_of(name)}, *PAPERS[name].inputs)
  wanted = {"float32"} if PAPERS[name].exponentials else set()
  assert programs.dtypes_of(jaxpr, "exp") == wanted


# What took rules while a policy cast arguments.


def half_share(model: Any, policy: Any, *inputs: Any) -> float:
  """Returns the half share of the program with gradients."""
  params = shapes(model, *inputs)["params"]
  wrapped = mpjax.linen.with_policy(model, policy)

  def loss(params, *inputs):
    return jnp.sum(wrapped.apply({"params": params}, *inputs).astype(jnp.float32) ** 2)

  return programs.half_share(jax.make_jaxpr(jax.grad(loss))(params, *inputs))


@BOTH
@pytest.mark.parametrize(
  "model", [NumpyScalar(), OneHot(), OwnState()], ids=lambda m: type(m).__name__
)
def test_float32_that_a_body_makes_itself_is_multiplied_in_half(model, half):
  assert half_share(model, f"mixed_{half}", normal(2, 6, 8)) == 1


@pytest.mark.parametrize(("half", "bound"), [("bfloat16", 3.2e-2), ("float16", 4e-3)])
def test_a_mask_that_float16_cannot_hold_needs_no_rules(half, bound):
  model = MaskByProduct()
  x, mask = normal(2, 6, 8), np.ones((2, 6), np.float32)
  mask[0, 4:] = 0
  params = filled(shapes(model, x, mask))["params"]

  def gradients(policy):
    wrapped = mpjax.linen.with_policy(model, policy)

    def loss(params, *inputs):
      return jnp.mean(wrapped.apply({"params": params}, *inputs) ** 2)

    return programs.run(jax.grad(loss), params, x, mask)

  assert programs.error(gradients(f"mixed_{half}"), gradients("float32")) < bound
  assert half_share(model, f"mixed_{half}", x, mask) == 1
