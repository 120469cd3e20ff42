import jax
import jax.numpy as jnp
from flax import nnx

from mpjax._diagnostics.nonfinite.traced import trace
from mpjax._diagnostics.parameter_paths import paths_by_parameters


def paths(fn, *args):
  traced = trace(fn, args, {})
  named = paths_by_parameters(traced.body, traced.owners())
  return {step.eqn.primitive.name: named[step.number] for step in traced.body.every_step()}


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


def test_a_matmul_in_a_loop_is_of_the_module_whose_parameter_it_closes_over():
  def fn(params, x):
    return jax.lax.scan(lambda c, _: (c @ params["up"]["w"], None), x, None, 3)[0]

  assert paths(fn, {"up": {"w": jnp.ones((3, 3))}}, jnp.ones((2, 3)))["dot_general"] == "up"
