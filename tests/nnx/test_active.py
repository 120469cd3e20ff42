"""The state in force inside a call."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._full_precision import ACTIVE
from mpjax.nnx._active import Active, current

BF16 = np.dtype("bfloat16")
X = jnp.ones((2, 4))


def test_equal_states_are_one_key():
  states = [Active(policy=mpjax.Policy(compute_dtype="f16"), use_dtype=BF16) for _ in range(2)]
  assert states[0] == states[1]
  assert hash(states[0]) == hash(states[1])
  assert states[0] != Active(use_dtype=BF16)


def test_a_region_inside_a_region_is_the_same_state():
  region = Active().region()
  assert (Active().on, region.on, region.in_region) == (True, False, True)
  assert region.region() is region


def test_current_is_what_is_in_force_here_and_nothing_elsewhere():
  assert current() is None
  with ACTIVE(Active()):
    assert current() == Active()
  with mpjax.linen.policy_scope("float16"):
    assert current() is None


class Precise(nnx.Module):
  """A part of it is to run as it was written."""

  def __init__(self):
    self.a, self.b = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))
    self.w = nnx.Param(jnp.ones((4, 4)))
    self.seen = nnx.static([])

  def precise(self, x):
    self.seen += [str(t.dtype) for t in (x, self.b(x), self.w[...], self.b.kernel[...])]
    return self.b(x) @ self.w

  def __call__(self, x):
    return mpjax.full_precision(self.precise)(self.a(x))


@pytest.mark.case("A73")
def test_full_precision_switches_a_view_off():
  model = Precise()
  # Nothing is rounded where the root's policy names no output dtype.
  assert mpjax.nnx.with_policy(model, "c=bf16")(X).dtype == jnp.float32
  # The method itself is one of the view's; inside, half arguments have come back as float32.
  assert model.seen == ["float32"] * 4


def test_a_linen_model_inside_has_a_policy_of_its_own():
  linen = mpjax.linen.with_policy(nn.Dense(3), "c=f16")
  params = nn.Dense(3).init(nnx.Rngs(0).params(), X)

  class Bridge(nnx.Module):
    def __call__(self, x):
      return linen.apply(params, x)

  assert mpjax.nnx.with_policy(Bridge(), None)(X).dtype == jnp.float16
  assert mpjax.nnx.with_policy(Bridge(), "c=bf16")(X).dtype == jnp.float16


def test_an_nnx_view_inside_a_linen_scope_has_its_own_policy():
  view = mpjax.nnx.with_policy(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "c=bf16")
  with mpjax.linen.policy_scope("float16"):
    assert view(X).dtype == BF16
