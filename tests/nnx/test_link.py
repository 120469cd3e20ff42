"""The link from a view's module to the user's, and modes that were set on one of them alone."""

import weakref

import jax
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.nnx._link import model_of
from tests.errors import refused
from tests.nnx.rig import HALF, Does, X, linear

with_policy = mpjax.nnx.with_policy


def test_a_view_does_not_keep_its_model_alive(collect):
  model = linear()
  view = with_policy(model, HALF)
  assert model_of(view) is model
  assert model_of(nnx.clone(view)) is None
  alive = weakref.ref(model)
  del model
  collect()
  assert alive() is None
  assert model_of(view) is None
  assert view(X).dtype == np.dtype("bfloat16")


def drops():
  parts = {"drop": nnx.Dropout(0.5, rngs=nnx.Rngs(1)), "norm": nnx.BatchNorm(8, rngs=nnx.Rngs(0))}
  return Does(lambda module, x: module.norm(module.drop(module.layer(x))), **parts)


@pytest.mark.slow
def test_a_mode_that_was_set_on_the_model_alone_is_an_error():
  model = drops()
  view = with_policy(model, "mixed_bfloat16")
  training = view(X)
  # Transforms call a copy of the view, and have traced it before.
  jitted, of_trees = (nnx.jit(lambda view, x: view(x), graph=graph) for graph in (True, False))
  given = [
    lambda x: jitted(view, x),
    lambda x: of_trees(view, x),
    lambda x: nnx.grad(lambda view: view(x).sum())(view),
  ]
  for call in given:
    call(X)
  model.eval()
  for call in (view, jax.jit(lambda x: view(x)), *given):
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


def test_a_mode_of_the_model_alone_is_an_error_also_if_that_of_the_view_was_set_before():
  model = drops()
  view = with_policy(model, "mixed_bfloat16")
  call = nnx.jit(lambda view, x: view(x))
  view.eval()
  view.train()
  call(view, X)
  model.eval()
  for each in (view, lambda x: call(view, x)):
    with refused(RuntimeError, "drop (Dropout)", "no mode", "still on the view", "view.eval()"):
      each(X)


@pytest.mark.slow
def test_a_copy_of_a_view_is_a_model_of_its_own():
  model = drops()
  view = with_policy(model, "mixed_bfloat16")
  copies = [nnx.clone(view), nnx.merge(*nnx.split(view))]
  evaluates = nnx.jit(lambda view, x: (view.eval(), view(x))[1])
  model.eval()
  for copy in copies:
    copy(X)
  # A mode that is set inside of the transform counts: no mask is drawn.
  view.eval()
  np.testing.assert_allclose(evaluates(view, X), view(X), rtol=1e-5)  # XLA fuses what it jits.
  view.train()
  copy = nnx.clone(view)
  np.testing.assert_array_equal(evaluates(copy, X), evaluates(copy, X))


def test_another_view_of_the_model_is_not_traced_again():
  model, traces = drops(), []

  def call(view, x):
    traces.append(1)
    return view(x)

  for transform in (nnx.jit, jax.jit):
    jitted = transform(call)
    for _ in range(2):
      jitted(with_policy(model, "mixed_bfloat16"), X)
  assert len(traces) == 2


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
  model = drops()
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
