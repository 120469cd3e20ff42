"""What `loss_scaling` may be called with where there are several losses.

Nesting and states of other configurations are in test_loss_scaling.py.
"""

import itertools

import jax.numpy as jnp
import optax

import mpjax
from tests.errors import refused

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}
DYNAMIC, STATIC, OFF = mpjax.DynamicLossScale(), mpjax.StaticLossScale(4), mpjax.NoLossScale()
SEVERAL = {"scaled": {"a": DYNAMIC, "b": STATIC}, "unscaled": {"a": OFF, "b": OFF}}
NOT_BY_NAME = [
  (PARAMS, "one with ['b', 'w']"),
  ({"a": PARAMS}, "one with ['a']"),
  ({"a": PARAMS, "b": PARAMS, "c": PARAMS}, "one with ['a', 'b', 'c']"),
  ({"a": PARAMS, 1: PARAMS}, "one with ['1', 'a']"),
  ([PARAMS, PARAMS], "list"),
  (jnp.ones(2), "Array"),
  (None, "NoneType"),
]
WHERE, SGD = "mpjax.loss_scaling(inner)", optax.sgd(0.1)


def test_gradients_and_losses_come_by_name():
  # Losses where somebody looks at them; None is none at all.
  both = itertools.product(SEVERAL.values(), ("updates", "grad"))
  for several, argument in [*both, (SEVERAL["scaled"], "loss")]:
    tx = mpjax.loss_scaling(SGD, several)
    for tree, got in NOT_BY_NAME[: -1 if argument == "loss" else None]:
      given = {"updates": {"a": PARAMS, "b": PARAMS}, argument: tree}
      expected, fix = "a dict with one entry for each loss, ['a', 'b']", "{name: gradients, ...}"
      with refused(ValueError, f"{WHERE}.update({argument})", expected, got, fix):
        tx.update(state=tx.init(PARAMS), params=PARAMS, **given)
  tx = mpjax.loss_scaling(SGD, SEVERAL["unscaled"])
  for tree, _ in NOT_BY_NAME:
    tx.update({"a": PARAMS, "b": PARAMS}, tx.init(PARAMS), PARAMS, loss=tree)


def test_configurations_of_several_losses():
  for key in ("", "a:b", "a/b", 3, None, ("a",)):
    where = f"mpjax.loss_scaling(loss_scale) with the key {key!r}"
    expected = "a non-empty string without ':' and '/'"
    with refused(ValueError, where, expected, repr(key), "'generator'"):
      mpjax.loss_scaling(SGD, {"fine": DYNAMIC, key: DYNAMIC})
  for wrong in (128, None, "dynamic", mpjax.DynamicLossScale, {"b": STATIC}):
    where, fix = "mpjax.loss_scaling(loss_scale)", "mpjax.StaticLossScale(1024)"
    expected = "a NoLossScale, StaticLossScale or DynamicLossScale"
    with refused(TypeError, where, expected, repr(wrong), fix):
      mpjax.loss_scaling(SGD, {"a": DYNAMIC, "b": wrong})
  mixed = {"a": DYNAMIC, "b": OFF}
  for loss_scale, name in (({}, None), (mixed, None), ({"a": DYNAMIC}, "x"), ({"a": OFF}, "x")):
    expected = "one scale for each loss, without name=, and either all or none NoLossScale()"
    got = f"{loss_scale!r} and name={name!r}"
    fix = "StaticLossScale(1) leaves one of several losses unscaled"
    with refused(ValueError, "mpjax.loss_scaling(loss_scale)", expected, got, fix):
      mpjax.loss_scaling(SGD, loss_scale, name=name)
