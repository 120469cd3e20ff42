import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.nonfinite.traced import trace


def test_arguments_have_names():
  def fn(params, *rest, flag=True):
    return params["w"] * rest[1] if flag else None

  args = ({"w": np.ones(2, np.float32)}, 1.0, jnp.ones(2))
  assert trace(fn, args, {}).names == ["params['w']", "rest[1]"]
  assert trace(lambda **k: k["x"], (), {"x": jnp.ones(2)}).names == ["x"]
  partial = functools.partial(fn, flag=True)
  assert trace(partial, args, {}).names == ["params['w']", "rest[1]"]


def test_numbers_are_static_unless_they_are_not_finite():
  assert len(trace(lambda x, n: x * n, (jnp.ones(2), 3), {}).leaves) == 1
  assert len(trace(lambda x, n: x * n, (jnp.ones(2), np.inf), {}).leaves) == 2


def test_what_a_function_writes_to_its_arguments_is_a_result():
  def fn(state):
    state["w"] = jnp.log(state["w"])

  traced = trace(fn, ({"w": jnp.ones(2)},), {})
  assert [s.eqn.primitive.name for s in traced.body.steps] == ["log"]


def test_constants_of_inner_jits_are_those_of_the_function():
  table = np.arange(3.0, dtype=np.float32)
  traced = trace(jax.jit(lambda x: x + table), (jnp.ones(3),), {})
  assert len(traced.body.consts) == 1
  assert traced.body.steps[0].number == 0


def test_flatten_takes_other_arguments_of_the_same_structure():
  traced = trace(lambda x, n: x * n, (jnp.ones(2), 3), {})
  (found,) = traced.flatten(((jnp.zeros(2), 3), {}))
  assert not jax.device_get(found).any()
