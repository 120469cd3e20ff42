"""How a module of a view is told from others and led back to the user's."""

import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.nnx._outermost import LINK, SPEC, Link, is_view, model_of
from tests.errors import refused
from tests.nnx.rig import Does

with_policy = mpjax.nnx.with_policy
HALF = "params=float32,compute=bfloat16"
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def linear():
  return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def test_views_are_told_by_their_class_and_equal_specs_are_one_key():
  view, mixed, again = (
    with_policy(linear(), p) for p in (HALF, "mixed_bfloat16", "mixed_bfloat16")
  )
  assert is_view(view)
  assert is_view(nnx.clone(view))
  assert not is_view(linear())
  spec, first, second = (getattr(each, SPEC) for each in (view, mixed, again))
  assert spec.policy == mpjax.Policy.parse(HALF)
  assert first == second != spec
  assert hash(first) == hash(second)
  assert pickle.loads(pickle.dumps(first)) == first


def test_links_are_equal_hold_nothing_and_lead_from_one_view_only():
  model = linear()
  view = with_policy(model, HALF)
  link = vars(view)[LINK]
  assert model_of(view) is model
  assert model_of(model) is None
  assert model_of(nnx.clone(view)) is None
  assert link == Link("elsewhere")
  assert hash(link) == hash(Link("elsewhere"))
  alive = weakref.ref(model)
  del model
  gc.collect()
  assert alive() is None
  assert model_of(view) is None
  assert view(X).dtype == np.dtype("bfloat16")


class Drops(nnx.Module):
  def __init__(self):
    self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.norm(self.drop(self.layer(x)))


def test_a_mode_that_was_set_on_the_model_alone_is_an_error():
  model = Drops()
  view = with_policy(model, "mixed_bfloat16")
  training = view(X)
  model.eval()
  for call in (view, jax.jit(lambda x: view(x))):  # Its very call, and one inside of jit.
    with refused(
      RuntimeError,
      "drop (Dropout) of a view of mpjax.with_policy",
      "no mode of the model to change",
      "deterministic=True on the model, and deterministic=False still on the view",
      "Write view.eval() or view.train()",
    ):
      call(X)
  view.eval()
  np.testing.assert_array_equal(view(X), with_policy(model, "mixed_bfloat16")(X))
  view.train()  # What was said of the view counts.
  assert not np.array_equal(view(X), training)


def test_a_flag_that_is_no_mode_is_no_error():
  def builds(module, x):
    """Says of itself, in its first call, that it is built."""
    module.built = True
    return module.layer(x)

  model = Does(builds, built=False)
  view = with_policy(model, "mixed_bfloat16")
  model(X)
  np.testing.assert_array_equal(view(X), view(X))


def test_modes_that_belong_together_are_no_error():
  model = Drops()
  view = with_policy(model, "mixed_bfloat16")
  for mode in ("train", "eval", "train"):
    getattr(model, mode)()
    getattr(view, mode)()
    view(X)
  # A view for evaluation stays one while the model goes on training.
  view.eval()
  wanted = view(X)
  for mode in ("eval", "train"):
    getattr(model, mode)()
    np.testing.assert_array_equal(view(X), wanted)
  # The model evaluated by itself, and back in the mode in which the view was made.
  other = with_policy(model, "mixed_bfloat16")
  model.eval()
  model(X)
  model.train()
  other(X)
  # A view of its own for evaluation.
  model.eval()
  evaluation = with_policy(model, "mixed_bfloat16")
  np.testing.assert_array_equal(evaluation(X), evaluation(X))


class Lazy(nnx.Module):
  """Makes its layer when it is first called."""

  def __init__(self, ready=False):
    self.rngs = nnx.Rngs(0)
    if ready:
      self.layer = nnx.Linear(4, 4, rngs=self.rngs)

  def __call__(self, x):
    if not hasattr(self, "layer"):
      self.layer = nnx.Linear(4, 4, rngs=self.rngs)
    return self.layer(x)


def sets(view):
  view.head = nnx.Linear(4, 2, rngs=nnx.Rngs(0))


def sets_list(view):
  view.head = nnx.List([nnx.Linear(4, 2, rngs=nnx.Rngs(0))])


SETS = {
  # What sets a new module, as which attribute, and of which class.
  "set": (sets, "head", "a new Linear"),
  "in a list": (sets_list, "head", "a new List"),
  "in a call": (lambda view: view(X), "layer", "a new Linear"),
  "in nnx.jit": (lambda view: nnx.jit(lambda view: view(X))(view), "layer", "a new Linear"),
}


@pytest.mark.parametrize("case", SETS)
def test_a_new_module_with_parameters_cannot_be_set_on_a_view(case):
  do, name, got = SETS[case]
  model = Lazy()
  with refused(
    TypeError,
    f"Lazy.{name}, set on a view",
    "a module of the view",
    got,
    "with_policy(model, policy)",
  ):
    do(with_policy(model, "mixed_bfloat16"))
  assert not hasattr(model, name)


def test_what_a_view_may_be_set():
  model = Lazy(ready=True)
  view = with_policy(model, "mixed_bfloat16")
  view.again = view.layer
  view.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  view.shift = nnx.Param(jnp.ones(4))
  view.name = "a name"
  assert view.again(X).dtype == jnp.float32
  assert model.shift is view.shift
