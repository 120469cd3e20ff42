"""How a module of a view is told from others and led back to the user's."""

import gc
import pickle
import weakref

import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from mpjax.nnx._spec import LINK, SPEC, Link, is_view, model_of

with_policy = mpjax.nnx.with_policy
HALF = "params=float32,compute=bfloat16"
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def linear():
  return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def test_views_are_told_by_their_class():
  view = with_policy(linear(), HALF)
  assert is_view(view)
  assert is_view(nnx.clone(view))
  assert not is_view(linear())
  assert getattr(view, SPEC).policy == mpjax.Policy.parse(HALF)


def test_equal_specs_are_one_key_and_can_be_pickled():
  first, second = (getattr(with_policy(linear(), HALF, ops="float32"), SPEC) for _ in range(2))
  assert first == second
  assert hash(first) == hash(second)
  assert pickle.loads(pickle.dumps(first)) == first
  assert first != getattr(with_policy(linear(), HALF), SPEC)


def test_links_are_equal_hold_nothing_and_lead_from_one_view_only():
  model = linear()
  view = with_policy(model, HALF)
  link = vars(view)[LINK]
  assert link.of(view) is model
  assert model_of(view) is model
  assert model_of(model) is None
  assert link.of(nnx.clone(view)) is None
  assert link == Link("elsewhere")
  assert hash(link) == hash(Link("elsewhere"))
  assert Link("").of(view) is None
  alive = weakref.ref(model)
  del model
  gc.collect()
  assert alive() is None
  assert link.of(view) is None
  assert view(X).dtype == np.dtype("bfloat16")
