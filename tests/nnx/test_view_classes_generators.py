"""Methods whose bodies run later than the call: generators and async methods."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.nnx.rig import BF16, HALF, X
from tests.programs import half_share, products

Rule, with_policy = mpjax.Rule, mpjax.nnx.with_policy


class Steps(nnx.Module):
  """Generators: each step computes; what is sent and thrown in comes to it."""

  def __init__(self):
    self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    self.log = nnx.static([])

  def steps(self, x):
    try:
      while x is not None:
        self.log.append((str(x.dtype), str(self.layer.kernel.dtype)))
        x = yield self.layer(x)
    except KeyError:
      yield jnp.zeros(2)
    finally:
      self.log.append("closed")
    return jnp.ones(2, BF16)

  def layers(self):
    yield self.layer

  def __call__(self, x):
    for layer in self.layers():
      x = layer(x)
    return next(self.steps(x))

  def mixes(self, x):
    yield jax.lax.add(x, X.astype(BF16))

  async def waits(self, x):
    return self.layer(x)

  async def streams(self, x):
    yield self.layer(x)


def test_every_step_of_a_generator_runs_under_the_policy():
  model = Steps()
  view = with_policy(model, "mixed_bfloat16")
  steps = view.steps(X)
  outs = [next(steps), steps.send(X)]
  with pytest.raises(StopIteration) as stop:
    steps.send(None)
  # Each step runs as Python, and sees what is stored; each call inside is rewritten by itself.
  assert model.log == [("float32", "float32")] * 2 + ["closed"]
  assert {str(x.dtype) for x in (*outs, stop.value.value)} == {"float32"}
  np.testing.assert_array_equal(outs, [view.layer(X).astype(BF16).astype("float32")] * 2)
  assert half_share(jax.make_jaxpr(lambda x: next(view.steps(x)))(X)) == 1


def test_a_generator_is_closed_and_told_of_errors():
  model = Steps()
  steps = with_policy(model, HALF).steps(X)
  assert next(steps).dtype == BF16
  assert steps.throw(KeyError()).shape == (2,)
  steps.close()
  assert model.log[1:] == ["closed"]
  with pytest.raises(TypeError) as excinfo:
    next(with_policy(model, HALF).mixes(X))
  assert any("(Steps)" in note for note in excinfo.value.__notes__)


def test_a_generator_inside_a_call():
  model = Steps()
  view = with_policy(model, HALF)
  assert view(X).dtype == BF16
  assert model.log[0] == ("float32", "float32")
  program = jax.make_jaxpr(view)(X)
  assert len(products(program)) == 2
  assert half_share(program) == 1
  # Of a module without a policy.
  model = nnx.Sequential(Steps())
  view = with_policy(model, "mixed_bfloat16", [Rule(None, path="layers/0")])
  (layer,) = view.layers[0].layers()
  assert layer.kernel is model.layers[0].layer.kernel
  steps = view.layers[0].steps(X)
  assert next(steps).dtype == steps.send(X).dtype == jnp.float32
  assert model.layers[0].log == [("float32", "float32")] * 2
  assert half_share(jax.make_jaxpr(lambda x: next(view.layers[0].steps(x)))(X)) == 0


@pytest.mark.parametrize("name", ["waits", "streams"])
def test_an_async_method_is_refused_when_it_is_called(name, recwarn):
  for policy in (HALF, "float32"):
    with refused(
      TypeError,
      f"Steps.{name}, a method of a view of mpjax.with_policy",
      "a method that has run when it returns",
      "an async method, whose body would run later",
      "Write the async function around the view",
    ):
      getattr(with_policy(Steps(), policy), name)(X)
  gc.collect(1)  # What was just made is young.
  assert not recwarn.list  # such as that a coroutine was never awaited
