"""What the wrappers of optimizers refuse, all alike."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._core.errors import kind_of
from tests.errors import refused
from tests.optim import wrapped
from tests.programs import assert_bit_equal

PARAMS = {"layer": {"w": jnp.ones(2), "b": jnp.ones(1)}, "head": jnp.ones(1)}
WRAPPERS = {
  "mpjax.loss_scaling(inner)": mpjax.loss_scaling,
  "mpjax.master_weights(inner)": mpjax.master_weights,
  "mpjax.accumulate_gradients(inner)": lambda inner: mpjax.accumulate_gradients(inner, 2),
}
GROWING = mpjax.DynamicLossScale(init_scale=8, growth_interval=1)
EXTRA = optax.GradientTransformationExtraArgs
ALL = pytest.mark.parametrize("name", WRAPPERS)
OWN_TREES = pytest.mark.parametrize("name", list(WRAPPERS)[1:])


def test_every_wrapper_is_tried_where_all_are_alike():
  # A wrapper is a public function whose first argument is the inner optimizer.
  public = {name: getattr(mpjax, name) for name in mpjax.__all__}
  functions = {name: x for name, x in public.items() if inspect.isfunction(x)}
  found = {
    x for x, f in functions.items() if next(iter(inspect.signature(f).parameters)) == "inner"
  }
  assert "loss_scaling" in found
  assert found <= set(wrapped.WRAPPERS)


@ALL
def test_what_is_no_optimizer(name):
  for inner in (optax.sgd, optax.MultiSteps(optax.sgd(0.1), 2)):
    expected, got = "an optax.GradientTransformation", kind_of(inner)
    with refused(TypeError, name, expected, got, "optax.adamw(1e-3), or MultiSteps(...)"):
      WRAPPERS[name](inner)


@ALL
def test_a_state_of_another_transformation(name):
  other = next(wrap for wrap in WRAPPERS if wrap != name)
  own = optax.sgd(0.1)
  tx = WRAPPERS[name](own)
  for state in (WRAPPERS[other](own).init(PARAMS), own.init(PARAMS)):
    expected, got = "the state that init created", kind_of(state)
    fix = "the opt_state of this very transformation"
    with refused(TypeError, f"{name}.update(state)", expected, got, fix):
      tx.update(PARAMS, state, PARAMS)

  # JAX's own error was that a tuple or dict has no attribute mu.
  tx = WRAPPERS[name](optax.adam(0.1))
  for other in (own, optax.sgd(0.1, momentum=0.9)):
    state = tx.init(PARAMS)._replace(inner_state=other.init(PARAMS))
    expected = "the state that init of this very transformation created"
    where, got = f"{name}.update(state)", "or of other parameters: nothing at [0].count; nothing at"
    with refused(TypeError, where, expected, got, "Pass the tx that made"):
      tx.update(PARAMS, state, PARAMS)


@ALL
def test_gradients_that_do_not_match_the_parameters(name):
  params = {"w": jnp.ones(2), "b": jnp.ones(1)}
  tx = WRAPPERS[name](optax.sgd(0.1))
  state, both = tx.init(params), "nothing at ['w']; an extra leaf at ['v']"
  shapes = "shape [] for shape [1] at ['b']; shape [3] for shape [2] at ['w']"
  for grads, got in (
    ({"v": jnp.ones(2), "b": jnp.ones(1)}, both),
    ({"w": jnp.ones(3), "b": jnp.ones(())}, shapes),
    (jnp.ones(2), "an extra leaf at the root"),
    ({"w": jnp.arange(2), "b": jnp.ones(1)}, "int32 for float32 at ['w']"),
  ):
    fix = "the very tree that is passed as params"
    with refused(ValueError, f"{name}.update(updates)", "the leaves of params", got, fix):
      tx.update(grads, state, params)


@OWN_TREES
def test_parameters_that_cannot_be_trained(name):
  for params, got in (
    ({"w": jnp.ones(1), "table": jnp.arange(3)}, "int32 at ['table']"),
    ({"key": jax.random.key(0), "step": 3}, "key<fry> at ['key']; int32 at ['step']"),
  ):
    with refused(TypeError, f"{name}.init(params)", "floating parameters", got, "in model_state"):
      WRAPPERS[name](optax.sgd(0.1)).init(params)
  params = {"h": jnp.ones(1, jnp.float16), "z": jnp.ones(1, jnp.complex64), "none": None}
  params |= {"numpy": np.ones(1, np.float32), "masked": optax.MaskedNode()}
  WRAPPERS[name](optax.sgd(0.1)).init(params)


def labels_of(params):
  """By the name of a leaf; there is no transformation for "typo"."""
  names = {"w": "a", "b": "typo", "head": "b"}
  return jax.tree_util.tree_map_with_path(lambda path, _: names[path[-1].key], params)


def branches(labels):
  return optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, labels)


@ALL
def test_an_unknown_label_is_named_with_its_path(name):
  with pytest.raises(ValueError) as plain:
    branches(labels_of).init(PARAMS)
  assert "['layer']['b']" not in str(plain.value), "optax says the path itself now"
  for inner in (branches(labels_of), optax.chain(optax.clip(1.0), branches(labels_of))):
    got = "Parameter labels: ['a', 'b', 'typo'] Transforms keys: ['a', 'b'] (for ['layer']['b'])"
    fix = "Give each label of optax.multi_transform a transformation"
    with refused(ValueError, f"{name}.init(params)", "parameters that inner takes", got, fix):
      WRAPPERS[name](inner).init(PARAMS)
  # Of a fixed tree optax gives the labels to nobody; they are wrong whatever the parameters are.
  fixed = labels_of(PARAMS)
  for labels in (fixed, lambda _: fixed):
    got = "['a', 'b', 'typo'] Transforms keys: ['a', 'b'] (for all of them together)"
    fix = "In a fixed tree of labels, search for them"
    with refused(ValueError, f"{name}.init(params)", "parameters that inner takes", got, fix):
      WRAPPERS[name](branches(labels)).init(PARAMS)


def test_only_what_fails_by_itself_is_named():
  # A label that is wrong for several leaves, and an init that is wrong for their number alone.
  both = optax.multi_transform({"a": optax.sgd(0.1)}, labels_of)
  with pytest.raises(ValueError, match=r"\(for \['head'\], \['layer'\]\['b'\]\)"):
    mpjax.loss_scaling(both, mpjax.NoLossScale()).init(PARAMS)

  def init(params):
    if len(jax.tree.leaves(params)) > 1:
      raise ValueError("too many")
    return optax.EmptyState()

  inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
  with pytest.raises(ValueError, match=r"got too many \(for all of them together\)"):
    mpjax.loss_scaling(inner).init(PARAMS)
  with pytest.raises(ValueError, match=r"\(for the root\)"):
    mpjax.loss_scaling(branches(lambda p: jax.tree.map(lambda _: "typo", p))).init(jnp.ones(1))


@ALL
def test_other_errors_come_through_as_they_are(name):
  def fail(*args):
    raise args[0]("of its own")

  def empty(params):
    return optax.EmptyState()

  for error in (TypeError, KeyError, RuntimeError, ValueError):
    raising = functools.partial(fail, error)
    if error is not ValueError:
      with pytest.raises(error, match="of its own") as found:
        WRAPPERS[name](optax.GradientTransformation(raising, optax.sgd(0.1).update)).init(PARAMS)
      assert not isinstance(found.value, mpjax.MpjaxError)
    inner = optax.GradientTransformation(empty, raising)
    half = jax.tree.map(jnp.bfloat16, PARAMS)
    masters = (mpjax.master_weights(inner, storage=storage) for storage in ("float32", "split"))
    for params, inside in ((PARAMS, inner), *((half, optax.chain(one)) for one in masters)):
      tx = WRAPPERS[name](inside)
      with pytest.raises(error, match="of its own"):
        tx.update(PARAMS, tx.init(params), params)
  inner = mpjax.accumulate_gradients(branches(labels_of), 2)
  where = r"^mpjax.accumulate_gradients\(inner\).init\(params\): expected"
  with pytest.raises(ValueError, match=where):
    mpjax.loss_scaling(inner).init(PARAMS)


@pytest.mark.parametrize("kind", [optax.GradientTransformation, EXTRA])
@pytest.mark.parametrize("scale", [GROWING, mpjax.NoLossScale()])
def test_extra_arguments_reach_an_update_that_names_them_through_all_wrappers(scale, kind):
  # A plain transformation may take any too: MultiSteps does.
  seen, params = {}, jnp.ones(2)

  def names(updates, state, params=None, *, value, loss):
    seen.update(value=float(value), loss=loss)
    return updates, state

  def takes_any(updates, state, params=None, *, other, **extra_args):
    return names(updates, state, **extra_args | {"loss": other})

  for update, loss in ((names, 2.0), (takes_any, "other")):
    inner = mpjax.master_weights(kind(optax.trace(0.9).init, update))
    inner = mpjax.accumulate_gradients(mpjax.state_dtype(inner, mu="bfloat16"), 1)
    tx = mpjax.monitor(mpjax.loss_scaling(optax.chain(optax.identity(), inner), scale))
    tx.update(params, tx.init(params), params, value=3.0, loss=2.0, other="other")
    assert list(seen.values()) == [3.0, loss]


SAM = {
  "alone": lambda sam: sam,
  "in a chain": lambda sam: optax.chain(optax.clip_by_global_norm(1.0), sam),
  "masked": lambda sam: optax.masked(sam, True),
  "in a window": lambda sam: mpjax.accumulate_gradients(sam, 1),
}


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("scale", [GROWING, mpjax.NoLossScale()])
@pytest.mark.parametrize("around", SAM)
def test_nothing_is_added_to_the_arguments(around, scale):
  # SAM names its arguments, and so takes no other, wherever it is.
  adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
  inner = SAM[around](optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2))
  tx = mpjax.loss_scaling(inner, scale)
  state, control = tx.init(PARAMS), inner.init(PARAMS)
  for _ in range(2):
    updates, state = tx.update(PARAMS, state, PARAMS)
    expected, control = inner.update(PARAMS, control, PARAMS)
    assert_bit_equal(updates, expected)


@ALL
def test_python_numbers_in_the_state_of_inner_are_strong_from_the_start(name):
  inner = optax.GradientTransformation(
    lambda params: {"rate": 0.5, "count": 0, "np": np.float32(2)},
    lambda u, s, p=None: (u, s | {"count": s["count"] + jnp.int32(1)}),
  )
  tx = WRAPPERS[name](inner)
  state = tx.init(PARAMS)
  _, new = jax.eval_shape(tx.update, PARAMS, state, PARAMS)
  assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
