"""Which results may be new versions of which arguments follows from names, shapes and dtypes."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._optim.check_loss_scaling import groups_as_stated, groups_by_tree, leaves_of
from tests.errors import refused

W, B, NUMBER = np.zeros((2, 3), np.float32), np.zeros(3, np.float32), np.zeros((), np.float32)
COUNT = np.zeros((), np.int32)
T = {"w": W, "b": B}
MOMENTS = {"mu": T, "nu": T, "count": COUNT}


def specs(tree):
  return {names: (x.shape, x.dtype) for names, _, x in leaves_of(tree)}


def roots_of(args, kwargs):
  return {i: (str(i),) for i in range(len(args))} | {k: (str(len(args)), k) for k in kwargs}


def as_text(groups):
  return {" ".join(map("/".join, x)): " ".join(map("/".join, y)) for x, y in groups}


GROUPS = {
  "one tree": ((T,), {}, T, {"0": ""}),
  "elsewhere": ((W, T), {}, (NUMBER, {"new": T}), {"1": "1/new"}),
  "two of two": ((T, T), {}, (T, T, NUMBER), {"0 1": "0 1"}),
  "a log of the same tree": ((T,), {}, (T, {"grads": T}), {"0": "0 1/grads"}),
  "one that is not returned": ((T, T), {}, (T, NUMBER), {"0 1": "0"}),
  "a part of a dict": (({"params": T, "more": B},), {}, (T, NUMBER), {"0/params": "0"}),
  "a part of a tuple": (((B, T),), {}, (T, NUMBER), {"0/1": "0"}),
  "a part of a state": (({"opt": MOMENTS, "p": B},), {}, {"opt": MOMENTS}, {"0/opt": "opt"}),
  "another dtype": ((T,), {}, {"w": W.astype(np.float16), "b": B.astype(np.float16)}, {}),
  "no array of a batch": (((W, B),), {}, (W, NUMBER), {}),
  # Moments have the tree of the parameters.
  "the largest first": ((T, MOMENTS), {}, (NUMBER, MOMENTS, T), {"1": "1", "0": "2"}),
  "moments alone": ((T, MOMENTS), {}, (NUMBER, T), {"0 1/mu 1/nu": "1"}),
  "keywords": ((), {"p": T, "ema": T}, {"p": T, "ema": T, "loss": NUMBER}, {"0/p 0/ema": "ema p"}),
  "an array": ((W,), {}, (NUMBER, W), {"0": "1"}),
  "a number at its place": ((NUMBER, W), {}, (NUMBER, NUMBER), {"0": "0"}),
  "a number elsewhere": ((W, NUMBER), {}, (NUMBER, T), {}),
  "a number of its name": (({"n": COUNT, "x": B},), {}, ({"n": COUNT},), {"0/n": "0/n"}),
  "a number of another name": (({"n": COUNT, "x": B},), {}, ({"m": COUNT},), {}),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_trees_are_grouped(kind):
  args, kwargs, results, expected = GROUPS[kind]
  roots = roots_of(args, kwargs).values()
  assert as_text(groups_by_tree(specs((*args, kwargs)), specs(results), roots)) == expected


STATE = {"opt": MOMENTS, "params": T, "key": COUNT}
STATED = {
  "arguments": ((T, MOMENTS), (T, MOMENTS, NUMBER), (0, 1, None), {"0": "0", "1": "1"}),
  "a list": (([W, B],), ([W, B],), (0,), {"0": "0"}),
  "a list that is a result": (([W, B],), [W, B], (0, 0), {"0/0": "0", "0/1": "1"}),
  "parts": (
    *((STATE,), (STATE, NUMBER), ({"opt": 0, "params": 0, "key": None}, None)),
    {"0/opt": "0/opt", "0/params": "0/params"},
  ),
  "parts elsewhere": ((STATE, T), {"params": T, "new": T}, {"params": 0, "new": 1}, None),
  "fewer arrays": ((STATE,), {"opt": MOMENTS}, 0, {"0": ""}),
  "no arrays": ((T, {}), (T, {}, NUMBER), (0, 1, None), {"0": "0"}),
}


@pytest.mark.parametrize("kind", STATED)
def test_stated_pairs(kind):
  args, results, returns, expected = STATED[kind]
  stated = {names: x for names, _, x in leaves_of(returns, is_leaf=lambda x: x is None)}
  groups = groups_as_stated(stated, specs((*args, {})), specs(results), roots_of(args, {}))
  assert as_text(groups) == (expected or {"0/params": "params", "1": "new"})


@pytest.mark.parametrize(
  ("stated", "expected", "got"),
  [
    ({("0",): 3, ("1",): None}, "names of arguments: 0, 1, 2", "3"),
    ({("0",): "ema", ("1",): None}, "names of arguments: 0, 1, 2", "'ema'"),
    ({("0",): 1, ("1",): None}, "a new version of argument 1 at 0", "no array there"),
    ({("0", "x"): 0, ("1",): None}, "a new version of argument 0 at 0/x", "no array there"),
    ({("0",): 0}, "an entry for each result", "none for 1"),
    ({("0",): 2, ("1",): None}, "a new version of argument 2 at 0", "no array there"),
    ({("2",): 0}, "a new version of argument 0 at 2", "no array there"),
  ],
)
def test_pairs_that_do_not_fit_are_refused(stated, expected, got):
  args, results = (T, W, {}), (T, NUMBER, {})
  with refused(ValueError, "mpjax.check_loss_scaling(returns)", expected, got, "position"):
    groups_as_stated(stated, specs((*args, {})), specs(results), roots_of(args, {}))


def test_attributes_and_keys_have_the_same_names():
  state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  paths = [names for names, _, _ in leaves_of({"a": [state]})]
  assert ("a", "0", "loss_scale", "dynamic", "scale") in paths
