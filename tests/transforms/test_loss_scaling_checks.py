"""What `loss_scaling` may be called with where there are several losses; nesting; names."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.transforms._labels import label_configs
from tests.errors import check_error

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}
DYNAMIC, STATIC, OFF = mpjax.DynamicLossScale(), mpjax.StaticLossScale(4), mpjax.NoLossScale()
SEVERAL = {"scaled": {"a": DYNAMIC, "b": STATIC}, "unscaled": {"a": OFF, "b": OFF}}
EITHER = pytest.mark.parametrize("several", SEVERAL.values(), ids=list(SEVERAL))


NOT_BY_NAME = [
  (PARAMS, "one with ['b', 'w']"),
  ({"a": PARAMS}, "one with ['a']"),
  ({"a": PARAMS, "b": PARAMS, "c": PARAMS}, "one with ['a', 'b', 'c']"),
  ({"a": PARAMS, 1: PARAMS}, "one with ['1', 'a']"),
  ([PARAMS, PARAMS], "list"),
  (jnp.ones(2), "Array"),
  (None, "NoneType"),
]


def check_refused(several, argument, tree, got):
  tx = mpjax.loss_scaling(optax.sgd(0.1), several)
  given = {"updates": {"a": PARAMS, "b": PARAMS}, argument: tree}
  with pytest.raises(ValueError) as error:
    tx.update(given.pop("updates"), tx.init(PARAMS), PARAMS, **given)
  check_error(
    error,
    where=f"mpjax.loss_scaling(inner).update({argument})",
    expected="a dict with one entry for each loss, ['a', 'b']",
    got=got,
    fix="{name: gradients, ...}",
    builtin=ValueError,
  )


@EITHER
@pytest.mark.parametrize(("tree", "got"), NOT_BY_NAME)
@pytest.mark.parametrize("argument", ["updates", "grad"])
def test_gradients_come_by_name(several, tree, got, argument):
  check_refused(several, argument, tree, got)


@pytest.mark.parametrize(("tree", "got"), NOT_BY_NAME[:-1])  # None is none at all.
def test_losses_come_by_name_where_somebody_looks_at_them(tree, got):
  check_refused(SEVERAL["scaled"], "loss", tree, got)
  tx = mpjax.loss_scaling(optax.sgd(0.1), SEVERAL["unscaled"])
  tx.update({"a": PARAMS, "b": PARAMS}, tx.init(PARAMS), PARAMS, loss=tree)


@EITHER
def test_gradients_of_another_tree_in_one_of_the_losses(several):
  tx = mpjax.loss_scaling(optax.sgd(0.1), several)
  for update in (tx.update, jax.jit(tx.update)):
    with pytest.raises(ValueError) as error:
      update({"a": PARAMS, "b": {"w": jnp.ones(3), "b": jnp.ones(1)}}, tx.init(PARAMS), PARAMS)
    check_error(
      error,
      where="mpjax.loss_scaling(inner).update(updates)",
      expected="the leaves of params",
      got="shape [3] for shape [2] at ['w']",
      fix="the very tree that is passed as params",
      builtin=ValueError,
    )


@pytest.mark.parametrize("key", ["", "a:b", "a/b", 3, None, ("a",)])
def test_names_of_losses_that_cannot_be_keys(key):
  with pytest.raises(ValueError) as error:
    mpjax.loss_scaling(optax.sgd(0.1), {"fine": DYNAMIC, key: DYNAMIC})
  check_error(
    error,
    where=f"mpjax.loss_scaling(loss_scale) with the key {key!r}",
    expected="a non-empty string without ':' and '/'",
    got=repr(key),
    fix="'generator'",
    builtin=ValueError,
  )


@pytest.mark.parametrize("wrong", [128, None, "dynamic", mpjax.DynamicLossScale, {"b": STATIC}])
def test_one_of_several_is_no_configuration(wrong):
  with pytest.raises(TypeError) as error:
    mpjax.loss_scaling(optax.sgd(0.1), {"a": DYNAMIC, "b": wrong})
  check_error(
    error,
    where="mpjax.loss_scaling(loss_scale)",
    expected="a NoLossScale, StaticLossScale or DynamicLossScale",
    got=repr(wrong),
    fix="mpjax.StaticLossScale(1024)",
    builtin=TypeError,
  )


@pytest.mark.parametrize(
  ("loss_scale", "name"),
  [({}, None), ({"a": DYNAMIC, "b": OFF}, None), ({"a": DYNAMIC}, "x"), ({"a": OFF}, "x")],
)
def test_several_scales_that_contradict_each_other(loss_scale, name):
  with pytest.raises(ValueError) as error:
    mpjax.loss_scaling(optax.sgd(0.1), loss_scale, name=name)
  check_error(
    error,
    where="mpjax.loss_scaling(loss_scale)",
    expected="one scale for each loss, without name=, and either all or none NoLossScale()",
    got=f"{loss_scale!r} and name={name!r}",
    fix="StaticLossScale(1) leaves one of several losses unscaled",
    builtin=ValueError,
  )


def test_looking_at_updates_needs_scales_that_look():
  with pytest.raises(ValueError) as error:
    mpjax.loss_scaling(optax.sgd(0.1), SEVERAL["unscaled"], check_updates=True)
  check_error(
    error,
    where="mpjax.loss_scaling(check_updates)",
    expected="False with NoLossScale()",
    got="True",
    fix="StaticLossScale(1)",
    builtin=ValueError,
  )


@pytest.mark.parametrize("loss_scale", [{"a": DYNAMIC}, {"a": DYNAMIC, "c": STATIC}, DYNAMIC])
def test_a_state_made_for_other_losses(loss_scale):
  tx = mpjax.loss_scaling(optax.sgd(0.1), SEVERAL["scaled"])
  state = mpjax.loss_scaling(optax.sgd(0.1), loss_scale).init(PARAMS)
  with pytest.raises(ValueError) as error:
    tx.update({"a": PARAMS, "b": PARAMS}, state, PARAMS)
  check_error(
    error,
    where="mpjax.loss_scaling(inner).update(state)",
    expected="the configuration 'a:dynamic', 'b:static(scale=4)'",
    got=f"one created with {', '.join(map(repr, label_configs(loss_scale, None)))}",
    fix="Build the optimizer as it was",
    builtin=ValueError,
  )


@EITHER
def test_scales_inside_of_scales(several):
  inner = optax.multi_transform(
    {"x": mpjax.loss_scaling(optax.sgd(0.1), name="x"), "y": optax.sgd(0.1)}, {"w": "x", "b": "y"}
  )
  for outer in (several, DYNAMIC, OFF):
    with pytest.raises(TypeError) as error:
      mpjax.loss_scaling(mpjax.master_weights(inner), outer).init(PARAMS)
    check_error(
      error,
      where="mpjax.loss_scaling(inner)",
      expected="an optimizer without a loss scale",
      got="one that holds another mpjax.loss_scaling",
      fix="Wrap once, outermost",
      builtin=TypeError,
    )


def test_unknown_keywords_are_refused_with_several_scales_too():
  with pytest.raises(TypeError) as error:
    mpjax.loss_scaling(optax.sgd(0.1), SEVERAL["scaled"], names=("a", "b"))
  check_error(
    error,
    where="mpjax.loss_scaling(names=)",
    expected="loss_scale, axis_name, check_updates, monitor or name",
    got="'names'",
    fix="are set on inner",
    builtin=TypeError,
  )
