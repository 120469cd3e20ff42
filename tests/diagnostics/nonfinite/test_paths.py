import jax
import jax.numpy as jnp
from flax import nnx

from mpjax._diagnostics.nonfinite.paths import path_of
from mpjax._diagnostics.nonfinite.traced import trace


def paths(fn, *args):
  traced = trace(fn, args, {})
  return {s.eqn.primitive.name: path_of(traced, s) for s in traced.body.steps}


def test_a_matmul_without_scopes_is_of_the_module_whose_parameter_it_reads():
  class Net(nnx.Module):
    def __init__(self):
      self.parts = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(0), use_bias=False)])

    def __call__(self, x):
      return self.parts[0](x)

  found = paths(lambda model, x: model(x), Net(), jnp.ones((2, 3)))
  assert found["dot_general"] == "parts/0"


def test_a_gradient_is_of_the_module_of_the_matmul_on_its_lines():
  def loss(params, x):
    return jnp.sum(x @ params["up"]["w"])

  found = paths(jax.value_and_grad(loss), {"up": {"w": jnp.ones((3, 3))}}, jnp.ones((2, 3)))
  assert found["dot_general"] == "up"


def test_the_cast_of_a_parameter_is_of_its_module():
  def fn(params, x):
    return x @ params["up"]["w"].astype(jnp.float16)

  found = paths(fn, {"up": {"w": jnp.ones((3, 3))}}, jnp.ones((2, 3), jnp.float16))
  assert found["convert_element_type"] == "up"
