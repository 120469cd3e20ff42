"""Which result is the new version of which argument follows from names, shapes and dtypes."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._optim.find_scale import leaves_of
from mpjax._optim.new_versions import NewVersions, names_of
from tests.errors import refused

WHERE = "mpjax.check_loss_scaling(step)"
W, B, NUMBER = np.zeros((2, 3), np.float32), np.zeros(3, np.float32), np.zeros((), np.float32)
COUNT = np.zeros((), np.int32)
T = {"w": W, "b": B}


def specs(tree):
  return {path: (x.shape, x.dtype) for path, x in leaves_of(tree).items()}


def versions_of(args, results, kwargs=None):
  return NewVersions(specs((*args, kwargs or {})), specs(results), len(args))


def paired(args, results, kwargs=None):
  """Returns the new version of each array that has one, as texts."""
  versions = versions_of(args, results, kwargs)
  versions.pair_trees()
  return {"".join(x): "".join(new) for x, new in versions.pairs.items()}


def wholes(args, results, kwargs=None):
  """Returns the nodes that are paired: each text without the name of its last array."""
  pairs = paired(args, results, kwargs)
  return {
    x.removesuffix("['w']"): new.removesuffix("['w']") for x, new in pairs.items() if "w" in x
  }


PAIRS = {
  "one tree": ((T,), T, {"[0]": ""}),
  "elsewhere": ((W, T), (NUMBER, {"new": T}), {"[1]": "[1]['new']"}),
  "at their places": ((T, T), (T, T, NUMBER), {"[0]": "[0]", "[1]": "[1]"}),
  "a log of the same tree": ((T,), (T, {"grads": T}), {"[0]": "[0]"}),
  "one that is not returned": ((T, T), (T, NUMBER), {"[0]": "[0]"}),
  "a part of a dict": (({"params": T, "more": B},), (T, NUMBER), {"[0]['params']": "[0]"}),
  "another dtype": ((T,), ({"w": W.astype(np.float16), "b": B.astype(np.float16)},), {}),
  "no part of a tuple": (((W, B),), (W, NUMBER), {}),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_trees_are_paired(kind):
  args, results, expected = PAIRS[kind]
  assert wholes(args, results) == expected


def test_a_larger_tree_is_paired_first():
  # Moments have the tree of the parameters.
  state = {"mu": T, "nu": T, "count": COUNT}
  assert wholes((T, state), (NUMBER, state, T)) == {
    "[0]": "[2]",
    "[1]['mu']": "[1]['mu']",
    "[1]['nu']": "[1]['nu']",
  }


def test_a_keyword_argument_has_the_place_of_its_name():
  pairs = wholes((), {"params": T, "ema": T, "loss": NUMBER}, {"ema": T, "params": T})
  assert pairs == {"[0]['ema']": "['ema']", "[0]['params']": "['params']"}


ARRAYS = {
  "an array": ((W,), (NUMBER, W), {"[0]": "[1]"}),
  "a number at its place": ((NUMBER, W), (NUMBER, NUMBER), {"[0]": "[0]"}),
  "a number elsewhere": ((W, NUMBER), (NUMBER, T), {}),
  "a number of its name": (({"n": COUNT, "x": B},), ({"n": COUNT},), {"[0]['n']": "[0]['n']"}),
  "a number of another name": (({"n": COUNT, "x": B},), ({"m": COUNT},), {}),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_single_arrays_are_paired(kind):
  args, results, expected = ARRAYS[kind]
  assert paired(args, results) == expected


AMBIGUOUS = {
  "two results": ((T,), (NUMBER, T, T), "the arguments [0] the results [1]; [2]"),
  "two arguments": ((NUMBER, T, T), (T,), "the arguments [1]; [2] the results [0]"),
  "one left of each": ((T, T), (T, {"grads": T}), "the arguments [1] the results [1]['grads']"),
}


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_ambiguous_pairs_raise_an_error(kind):
  args, results, got = AMBIGUOUS[kind]
  with refused(ValueError, WHERE, "one result", got, "returns=(0, 1, None)"):
    paired(args, results)


def test_containers_of_two_states_are_paired_with_the_states():
  state = {"opt": {"scale": NUMBER}, "params": T, "ema": T}
  versions = versions_of((state, T), ({"grads": T}, state))
  versions.pair_around(("[0]", "['opt']"), ("[1]", "['opt']"))
  assert versions.pairs[("[0]", "['ema']", "['w']")] == ("[1]", "['ema']", "['w']")
  assert not versions.inferred


def test_places_are_as_seen_from_the_state():
  # The results have a loss more, so that there is no equal tree around.
  versions = versions_of(({"s": B, "a": T, "b": T},), {"s": B, "a": T, "b": T, "loss": NUMBER})
  versions.pair_state(("[0]", "['s']"), ("['s']",))
  versions.pair_around(("[0]", "['s']"), ("['s']",))
  versions.pair_trees()
  assert versions.pairs[("[0]", "['a']", "['w']")] == ("['a']", "['w']")
  assert ("[0]", "['a']", "['w']") in versions.inferred


def test_attributes_and_keys_have_the_same_names():
  state = mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2))
  paths = [names_of(path) for path in leaves_of({"a": [state]})]
  assert ("a", "0", "loss_scale", "dynamic", "scale") in paths
