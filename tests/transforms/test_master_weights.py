"""The float32 copy of half parameters: its rule, where it is found, how it is set, refusals."""

import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.transforms._master_weights import MasterWeightsState, adopt_masters
from tests.errors import check_error


def refusing_trees(half):
  return {"w": jnp.ones(2, half), "b": jnp.ones(1)}


@pytest.mark.parametrize("wrap", [mpjax.loss_scaling, lambda inner: mpjax.accumulate(inner, 2)])
def test_what_reshapes_the_tree_cannot_be_around_masters(wrap):
  inner = optax.flatten(mpjax.master_weights(optax.sgd(0.1)))
  with pytest.raises(TypeError) as error:
    wrap(inner).init(refusing_trees("float16"))
  check_error(
    error,
    where="(inner)",
    expected="master_weights to see the tree of the parameters",
    got="one array for PyTreeDef({'b': *, 'w': *})",
    fix="Put master_weights around what reshapes the tree",
    builtin=TypeError,
  )


def test_masters_of_another_structure_are_not_adopted():
  opt_state = MasterWeightsState({"w": None, "v": None}, ())
  with pytest.raises(TypeError) as error:
    adopt_masters(refusing_trees("float16"), opt_state, "test")
  check_error(
    error,
    where="test",
    expected="master_weights to see",
    got="another structure",
    fix="optax.flatten",
    builtin=TypeError,
  )
