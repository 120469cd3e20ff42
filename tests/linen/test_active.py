"""Which policy a module of Linen has: by its maker, under lifted transforms, in nested calls."""

import copy
import functools
import os
import pickle
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import pytest

import mpjax
from tests.linen.probes import Does, Probe, X, note, noted, seen_under

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule = mpjax.Rule


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Probe(name="leaf")(note(self, x))


class Holds(nn.Module):
  """Calls modules that it did not make: a field, an argument, one in a closure."""

  held: Any = None

  @nn.compact
  def __call__(self, x, *given, fun=None):
    note(self, x)
    for module in (self.held, *given):
      x = x if module is None else module(x)
    return x if fun is None else fun(x)


def test_a_module_has_the_policy_of_where_it_was_made_not_of_who_calls_it():
  def makes(module, x):
    mine = Block(name="mine")
    x = Holds(mine, name="by_field")(x)
    x = Holds(name="by_argument")(x, mine)
    return Holds(name="by_keyword")(x, fun=lambda x: mine(x))

  callers = ("by_field", "by_argument", "by_keyword")
  for caller in callers:
    found = seen_under(Does(makes), "bfloat16", [Rule("float16", path=caller)])
    # A module passed into a constructor without a parent becomes a child of its holder; this one
    # was named by its maker first, and stays there.
    wanted = dict.fromkeys(("mine", "mine/leaf", *callers), "bfloat16")
    assert found == {**wanted, caller: "float16"}
  # This one has no other maker: it is adopted by its holder.
  found = seen_under(Holds(Block()), "bfloat16", [Rule("float16", path="held/leaf")])
  assert found == {"": "bfloat16", "held": "bfloat16", "held/leaf": "float16"}


VMAP = functools.partial(nn.vmap, variable_axes={"params": None}, split_rngs={"params": False})
LIFTED = {
  "remat": nn.remat,
  "jit": nn.jit,
  "vmap": lambda cls: nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True}),
  "map_variables": lambda cls: nn.map_variables(cls, "params", lambda x: x),
  **{
    f"method under {name}": lambda cls, lift=lift: type(
      "Lifted", (cls,), {"__call__": lift(cls.__call__)}
    )
    for name, lift in {"remat": nn.remat, "jit": nn.jit, "vmap": VMAP}.items()
  },
  "add_metadata_axis": lambda cls: nn.add_metadata_axis(cls, variable_axes={"params": 0}),
}
LIFTED_RULES = [
  # The rules, and the dtypes of the lifted module, of the leaf in it, and of another module.
  ([], ("bfloat16", "bfloat16", "bfloat16")),
  ([Rule("float16", module=Block)], ("float16", "float16", "bfloat16")),
  ([Rule("float16", path="lifted")], ("float16", "float16", "bfloat16")),
  ([Rule("float16", path="lifted/leaf")], ("bfloat16", "float16", "bfloat16")),
  (
    [Rule("float16", path="lifted"), Rule("float32", path="**/leaf")],
    ("float16", "float32", "bfloat16"),
  ),
  ([Rule("float16", path="other")], ("bfloat16", "bfloat16", "float16")),
]


@pytest.mark.parametrize("lift", LIFTED)
def test_resolution_across_lifted_transforms(lift):
  # A lifted class hides the parent of what is inside; paths and classes are as without it.
  lifted = LIFTED[lift](Block)
  lifts = Does(lambda module, x: Probe(name="other")(lifted(name="lifted")(x)))
  for rules, wanted in LIFTED_RULES:
    found = seen_under(lifts, "bfloat16", rules)
    assert found == dict(zip(("lifted", "lifted/leaf", "other"), wanted, strict=True)), rules


def test_paths_of_a_module_that_shares_a_scope():
  def shares(module, x):
    inner = Block(name="inner")
    nn.share_scope(module, inner)
    return inner(x)

  root = Does(lambda module, x: Does(shares, name="shares")(x))
  # The scopes are one, so the paths are: "inner" is where its holder is.
  found = seen_under(root, "bfloat16", [Rule("float16", path="shares/leaf")])
  assert found == {"shares": "bfloat16", "shares/leaf": "float16"}


def test_a_module_called_twice_matches_each_time():
  def twice(module, x):
    block = Block(name="block")
    return block(block(x))

  model, variables = Does(twice), {}
  wrapped = mpjax.linen.with_policy(model, "bfloat16", [Rule("float16", module=Probe)])
  once = [("block", "bfloat16"), ("block/leaf", "float16")]
  assert noted(wrapped.apply, variables, X) == [*once, *once]


class Teacher(nn.Module):
  """Applies a model of its own, with variables of its own, in its forward pass."""

  in_closure: Any = None

  @nn.compact
  def __call__(self, x):
    note(self, x)
    return Probe(name="after")(self.in_closure().apply({}, x))


def test_apply_inside_a_forward_pass_inherits():
  # The child is a root of its own; what it runs under is what surrounds the call.
  wanted = {"": "bfloat16", "leaf": "bfloat16", "after": "bfloat16"}
  assert seen_under(Teacher(in_closure=Block), "bfloat16") == wanted
  # It is that of the module that makes the call, not that of the outer root.
  model = mpjax.linen.with_policy(
    Holds(Teacher(in_closure=Block)), "bfloat16", [Rule("float16", path="held")]
  )
  assert noted(model.apply, {}, X) == [
    ("", "bfloat16"),
    ("held", "float16"),
    ("", "float16"),
    ("leaf", "float16"),
    ("held/after", "float16"),
  ]
  # And inside of an exempt module it is exempt.
  found = seen_under(Teacher(in_closure=Block), "bfloat16", [Rule(None, path="")])
  assert found == {"": "float32", "leaf": "float32", "after": "float32"}


def test_apply_of_a_named_child_is_at_its_name():
  def parent(module, x):
    return Probe(name="child").clone(parent=None).apply({}, x)

  for rules, wanted in (([], "bfloat16"), ([Rule("float16", path="child")], "float16")):
    model = mpjax.linen.with_policy(Does(parent), "bfloat16", rules, unmatched="ignore")
    # Its path is that of a root; it is the rule that knows its name.
    assert noted(model.apply, {}, X) == [("", wanted)]


def test_a_wrapper_inside_a_forward_pass_wins_and_is_undone():
  def mixed(module, x):
    note(module, x)
    inner = mpjax.linen.with_policy(Block(parent=None), "float16", [Rule("float32", path="leaf")])
    x = inner.apply({}, x)
    module.sow("returned", "by the inner", x)
    return Probe(name="after")(x)

  # The rules of the outer do not reach into the inner: the innermost given policy wins.
  model = mpjax.linen.with_policy(Does(mixed), "bfloat16", [Rule("float32", module=Block)])
  assert noted(model.apply, {}, X) == [
    ("", "bfloat16"),
    ("", "float16"),
    ("leaf", "float32"),
    ("after", "bfloat16"),
  ]
  _, state = jax.eval_shape(lambda: model.apply({}, X, mutable=["returned"]))
  assert [str(x.dtype) for x in jax.tree.leaves(state)] == ["float16"]


def test_the_innermost_given_policy_wins_whole():
  scope, wrapped = mpjax.linen.policy_scope, mpjax.linen.with_policy

  def found(model, dtype="float32"):
    # Returns the dtypes in which two modules and their parent compute, and of the result.
    x = X.astype(dtype)
    out = jax.eval_shape(model.apply, {}, x).dtype
    return [*(dtype for _, dtype in noted(model.apply, {}, x)), str(out)]

  def parent(module, x):
    return note(module, Probe(name="two")(Probe(name="one")(x)))

  model, rules = Does(parent), [Rule("float32", path="one")]
  by_rule, half, float16 = ["float32", *["bfloat16"] * 3], ["bfloat16"] * 4, ["float16"] * 4
  with scope("bfloat16", rules):
    assert found(model) == by_rule
    with scope("float16"):
      assert found(model) == float16
      assert found(wrapped(model, "bfloat16")) == half
      assert found(wrapped(model, None)) == ["float32"] * 4
      assert found(model) == float16
    assert found(wrapped(model, "float16")) == float16
    assert found(model) == by_rule
  assert found(model) == ["float32"] * 4
  with scope("mixed_bfloat16"):
    assert found(model, "float16") == [*["bfloat16"] * 3, "float32"]
    assert found(wrapped(model, "float16"), "float16") == float16
    assert found(wrapped(model, "c=f16")) == [*float16[:3], "float32"]


@pytest.mark.slow
def test_what_was_given_is_hashed_anew_where_it_is_unpickled():
  model = mpjax.linen.with_policy(nn.Dropout(0.5), "bfloat16", [Rule(None, path="a")])
  program = (
    "import pickle, sys, flax.linen as nn, mpjax\n"
    "there = pickle.load(sys.stdin.buffer)\n"
    "rules = [mpjax.Rule(None, path='a')]\n"
    "here = mpjax.with_policy(nn.Dropout(0.5), 'bfloat16', rules)\n"
    "assert there == here\n"
    "assert hash(type(there)) == hash(type(here)), 'equal, with two hashes'\n"
  )
  environment = {**os.environ, "PYTHONHASHSEED": "12345"}
  run = subprocess.run(
    [sys.executable, "-c", program],
    input=pickle.dumps(model),
    env=environment,
    capture_output=True,
    check=False,
  )
  assert run.returncode == 0, run.stderr.decode()
  assert hash(copy.deepcopy(model)) == hash(model)
