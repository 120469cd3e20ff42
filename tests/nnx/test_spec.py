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
from mpjax.nnx._spec import LINK, SPEC, Link, is_view, model_of
from tests.errors import check_error

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
  first, second = (getattr(with_policy(linear(), "mixed_bfloat16"), SPEC) for _ in range(2))
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


class Drops(nnx.Module):
  def __init__(self):
    self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.norm(self.drop(self.layer(x)))


def test_a_mode_that_was_set_on_the_model_alone_is_an_error():
  model = Drops()
  view = mpjax.nnx.with_policy(model, "mixed_bfloat16")
  training = view(X)
  model.eval()
  for call in (view, jax.jit(lambda x: view(x))):  # Its very call, and one inside of jit.
    with pytest.raises(mpjax.MpjaxRuntimeError) as excinfo:
      call(X)
    check_error(
      excinfo,
      where="drop (Dropout) of a view of mpjax.nnx.with_policy",
      expected="no mode of the model to change",
      got="deterministic=True on the model, and deterministic=False still on the view",
      fix="Write view.eval() or view.train()",
      builtin=RuntimeError,
    )
  view.eval()
  np.testing.assert_array_equal(view(X), mpjax.nnx.with_policy(model, "mixed_bfloat16")(X))
  view.train()  # What was said of the view counts.
  assert not np.array_equal(view(X), training)


class Builds(nnx.Module):
  """Says of itself, in its first call, that it is built."""

  def __init__(self):
    self.built, self.layer = False, nnx.Linear(4, 4, rngs=nnx.Rngs(0))

  def __call__(self, x):
    self.built = True
    return self.layer(x)


def test_a_flag_that_is_no_mode_is_no_error():
  model = Builds()
  view = mpjax.nnx.with_policy(model, "mixed_bfloat16")
  model(X)
  np.testing.assert_array_equal(view(X), view(X))


def test_modes_that_belong_together_are_no_error():
  model = Drops()
  view = mpjax.nnx.with_policy(model, "mixed_bfloat16")
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
  other = mpjax.nnx.with_policy(model, "mixed_bfloat16")
  model.eval()
  model(X)
  model.train()
  other(X)
  # A view of its own for evaluation.
  model.eval()
  evaluation = mpjax.nnx.with_policy(model, "mixed_bfloat16")
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


@pytest.mark.parametrize(
  ("do", "name", "got"),
  [
    (sets, "head", "a new Linear"),
    (sets_list, "head", "a new List"),
    (lambda view: view(X), "layer", "a new Linear"),
    (lambda view: nnx.jit(lambda view: view(X))(view), "layer", "a new Linear"),
  ],
  ids=["set", "in a list", "in a call", "in nnx.jit"],
)
def test_a_new_module_with_parameters_cannot_be_set_on_a_view(do, name, got):
  model = Lazy()
  view = mpjax.nnx.with_policy(model, "mixed_bfloat16")
  with pytest.raises(TypeError) as excinfo:
    do(view)
  check_error(
    excinfo,
    where=f"Lazy.{name}, set on a view",
    expected="a module of the view",
    got=got,
    fix="with_policy(model, policy)",
    builtin=TypeError,
  )
  assert not hasattr(model, name)


def test_what_a_view_may_be_set():
  model = Lazy(ready=True)
  view = mpjax.nnx.with_policy(model, "mixed_bfloat16")
  view.again = view.layer
  view.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
  view.shift = nnx.Param(jnp.ones(4))
  view.name = "a name"
  assert view.again(X).dtype == jnp.float32
  assert model.shift is view.shift
