"""What is true of every model under a policy, read from its jaxprs: forward, and with gradients.

Each model of the catalogue is traced once in each way in which it can be run, and one test reports
all that is wrong with it. For the numbers see tests/integration/test_accuracy.py.
"""

import functools
from typing import Any

import jax
import pytest

import mpjax
from tests import programs
from tests.autocast import checks
from tests.autocast.programs import PROGRAMS
from tests.models.catalogue import LAYERS, MODELS
from tests.nnx.rig import is_float, total

# As people run them: dtypes and ranks are promoted in every other line of other libraries.
pytestmark = pytest.mark.standard_promotion

HALF = "bfloat16"
CASES = [
  pytest.param(name, way, id=f"{name}-{way}")
  for name, model in MODELS.items()
  for way in model.ways
  if way != "policy_scope"  # It makes the same operations, which is looked at with the other.
  # By autocast a layer of NNX makes those of the layer of Linen.
  if not (way == "autocast" and name.startswith("nnx/") and name.replace("nnx", "linen") in LAYERS)
]

EXACT_GELU = {"linen/bert"}
"""Models whose activation has an exponential in its derivative, by a rule of JAX's own."""


def types(tree: Any) -> Any:
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@functools.cache
def values(name: str) -> Any:
  return MODELS[name].arguments()


@functools.cache
def without_policy(name: str) -> tuple[Any, Any]:
  """Returns the jaxpr of a model without a policy, and the shapes of what it returns."""
  return jax.make_jaxpr(MODELS[name].call("plain", None), return_shape=True)(*values(name))


def gradient(name: str, call: Any) -> tuple[Any, Any]:
  """Returns a jaxpr with the gradients of all floating arguments, and what else it returns.

  The loss is the sum of the squares of all outputs, in float32.
  """
  params, rest, inputs = values(name)
  leaves, tree = jax.tree.flatten(inputs)
  moving = [i for i, x in enumerate(leaves) if is_float(x)]

  def loss(params, some):
    given = dict(zip(moving, some, strict=True))
    now = [given.get(i, x) for i, x in enumerate(leaves)]
    found = call(params, rest, jax.tree.unflatten(tree, now))
    return total(found[0])[0], found

  fun = jax.grad(loss, (0, 1), has_aux=True)
  some = [leaves[i] for i in moving]
  program, (grads, found) = jax.make_jaxpr(fun, return_shape=True)(params, some)
  assert types(grads) == types((params, some))
  return program, found


def wrong_matmuls(name: str, way: str, program: Any, own: int) -> list[str]:
  """Returns the matmuls in another dtype than they should be; `own`: beside a power iteration."""
  if name == "linen/conv_local":
    # It cuts patches out of its input by a convolution with ones: of an input and numbers.
    return [text for text in checks.halves(program, HALF) if "conv" not in text]
  if not MODELS[name].power_iteration or way == "autocast":
    return checks.halves(program, HALF)
  found = programs.products(program)
  # Those of the layer itself, and of the one before it, have the three rows of its input.
  mine = [p for p in found if any("[3," in shape for shape in p.operands)]
  assert len(mine) == own < len(found)
  return [str(p) for p in found if set(p.dtypes) != {HALF if p in mine else "float32"}]


def on_float32_list(program: Any) -> set[str]:
  return {eqn.primitive.name for eqn, _ in programs.equations(program)} & checks.FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
def test_matmuls_are_low_precision_and_sums_float32(name, way):
  model, call = MODELS[name], MODELS[name].call(way, f"mixed_{HALF}")
  plain, expected = without_policy(name)
  forward, found = jax.make_jaxpr(call, return_shape=True)(*values(name))
  assert types(found) == types(expected)
  assert bool(programs.products(forward)) is model.products
  wrong = {
    "matmuls": wrong_matmuls(name, way, forward, own=2),
    "in low precision": checks.halves_of_float32(forward),
    "lost": list(on_float32_list(plain) - on_float32_list(forward)),
    "casts": checks.wasted_casts(forward),
  }
  if "policy_scope" in model.ways and way == "with_policy" and name not in LAYERS:
    scoped = jax.make_jaxpr(model.call("policy_scope", f"mixed_{HALF}"))(*values(name))
    assert programs.operations(scoped) == programs.operations(forward)
  if model.backward:
    # Losses that call the model for one example, in a `vmap` outside of the policy: what all
    # examples share is a sum in low precision there. See docs/limits.md.
    summed = model.in_vmap and way != "autocast"
    if summed:
      with jax.allow_f16_reductions(False), pytest.raises(ValueError, match="reduce_sum on oper"):
        gradient(name, call)
    with jax.allow_f16_reductions(summed):
      backward, again = gradient(name, call)
    assert types(again) == types(expected)
    assert bool(checks.sums(backward)) is summed
    wrong["matmuls of the gradient"] = wrong_matmuls(name, way, backward, own=6)
    if not summed and name not in EXACT_GELU:
      wrong["in low precision, of the gradient"] = checks.halves_of_float32(backward)
  assert {what: texts for what, texts in wrong.items() if texts} == {}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if PROGRAMS[name].backward])
def test_autocast_of_a_gradient_has_its_sums_in_float32_too(name):
  fun, params, batch = PROGRAMS[name].make()
  fun = checks.Counted(fun)

  def both(params, batch):
    return jax.value_and_grad(fun, has_aux=True)(params, batch)

  found, shapes = jax.make_jaxpr(mpjax.autocast(both, HALF), return_shape=True)(params, batch)
  assert fun.calls == 1  # It is traced once.
  assert checks.halves(found, HALF) == []
  assert checks.halves_of_float32(found) == []
  assert types(shapes) == types(jax.eval_shape(both, params, batch))


# What a policy without an output dtype shows.


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_layers_return_the_dtype_that_they_compute(framework):
  wrong = []
  for name in [name for name in LAYERS if name.startswith(framework)]:
    way = "policy_scope" if framework == "linen" else "with_policy"
    call = LAYERS[name].call(way, mpjax.Policy(compute_dtype=HALF))
    out, _ = jax.eval_shape(call, *values(name))
    wanted = "float32" if LAYERS[name].ends_in_float32 else HALF
    if {str(x.dtype) for x in jax.tree.leaves(out)} != {wanted}:
      wrong.append(f"{name}: {out}")
  assert wrong == []
