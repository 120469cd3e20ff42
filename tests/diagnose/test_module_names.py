import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.random import key

from mpjax._diagnose.call import Call
from mpjax._diagnose.module_names import in_models
from mpjax._jaxpr.graph import Graph

X = np.ones((2, 4), np.float32)


def paths_of(fn, *args):
  """Returns the paths of the matmuls."""
  found = in_models(fn, Call(args, {}))
  assert found is not None
  return [operation.where.path for operation, *_ in Graph(found.program).matmuls()]


def test_modules_of_linen():
  model = nn.Sequential([nn.Dense(4), nn.Dense(2)])
  variables = model.init(key(0), X)
  assert paths_of(model.apply, variables, X) == ["Sequential/layers_0", "Sequential/layers_1"]


def test_modules_of_nnx():
  model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
  expected = ["layers/0", "layers/1"]
  assert paths_of(lambda model, x: model(x), model, X) == expected
  assert paths_of(model, X) == expected


def test_a_function_has_no_models_and_no_marks():
  assert in_models(jnp.sin, Call((X,), {})) is None
