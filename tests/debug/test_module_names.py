import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import named_scope
from jax.random import key

from mpjax._debug.arguments import Call
from mpjax._debug.module_names import has_models, traced_with_modules, with_models
from mpjax._jaxpr.graph import Graph

X = np.ones((2, 4), np.float32)


def paths_of(fn, *args):
  """Returns the paths of the matmuls."""
  program = traced_with_modules(fn, Call(args, {}))
  return [operation.where.path for operation, *_ in Graph(program).matmuls()]


def test_modules_of_linen():
  model = nn.Sequential([nn.Dense(4), nn.Dense(2)])
  variables = model.init(key(0), X)
  assert paths_of(model.apply, variables, X) == ["Sequential/layers_0", "Sequential/layers_1"]


def test_modules_of_nnx():
  model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
  expected = ["layers/0", "layers/1"]
  assert paths_of(lambda model, x: model(x), model, X) == expected
  assert paths_of(model, X) == expected


def test_scopes_and_parameters_of_functions():
  def fn(params, x):
    with named_scope("first"):
      x = x @ params["a"]["w"]
    return x @ params["b"]["w"]

  params = {"a": {"w": jnp.ones((4, 4))}, "b": {"w": jnp.ones((4, 2))}}
  assert paths_of(fn, params, X) == ["first", "b"]


def test_only_models_of_flax_have_marks():
  model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
  call = Call((X,), {})
  assert has_models(call.traced(with_models(model, None))[0])
  assert not has_models(call.traced(with_models(jnp.sin, None))[0])
