"""The value that says in which precision each primitive runs: asking, editing, printing, errors."""

import copy
import dataclasses
import functools
import itertools
import operator
import pickle

import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive, primitives

import mpjax
from mpjax._jaxpr.primitives import PARTS
from tests.errors import refused

STANDARD = mpjax.OpLists()


def keep(params):
  """A predicate that can be pickled."""
  del params
  return "keep"


@dataclasses.dataclass
class WithoutHash:
  """A predicate that Python can compare, but not look up."""

  answer: str = "keep"

  def __call__(self, params):
    return self.answer


def parts_of(ops):
  return {part: getattr(ops, part) for part in PARTS}


# --- asking ---------------------------------------------------------------------------------------


def test_a_primitive_in_no_part():
  assert STANDARD.part_of("next_year", {}) is None
  assert mpjax.OpLists(half=frozenset()).part_of("dot_general", {}) is None


def test_a_predicate_sees_the_parameters():
  ops = STANDARD.replace(
    conditional={"reduce_sum": lambda params: "keep" if params["axes"] == (0,) else "float32"}
  )
  assert ops.part_of("reduce_sum", {"axes": (0,)}) == "keep"
  assert ops.part_of("reduce_sum", {"axes": (1,)}) == "float32"


# --- editing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", PARTS)
@pytest.mark.parametrize("name", ["dot_general", "exp", "add", "tanh", "cholesky", "integer_pow"])
def test_the_users_list_wins_over_ours_both_ways(name, to):
  ops = STANDARD.replace(**{to: [name]})
  assert ops.part_of(name, {}) == to
  assert [part for part, names in parts_of(ops).items() if name in names] == [to]
  others = {part: names - {name} for part, names in parts_of(ops).items()}
  assert others == {part: names - {name} for part, names in parts_of(STANDARD).items()}
  assert ops.replace(float32=[name]).replace(**{to: [name]}) == ops


def test_what_is_conditional_can_be_set_and_taken_back():
  ops = STANDARD.replace(conditional={"exp": keep})
  assert ops.part_of("exp", {}) == "keep"
  assert "exp" not in ops.float32
  assert ops.replace(float32=["exp"]) == STANDARD


def test_the_order_of_edits_does_not_matter():
  edits = [
    {"half": ["tanh"]},
    {"float32": ["dot_general", "div"]},
    {"conditional": {"exp": keep}},
    {"keep": ["sort"]},
  ]
  at_once = STANDARD.replace(**functools.reduce(operator.or_, edits))
  for order in itertools.permutations(edits):
    found = functools.reduce(lambda ops, edit: ops.replace(**edit), order, STANDARD)
    assert (found, hash(found), repr(found)) == (at_once, hash(at_once), repr(at_once))
  swapped = STANDARD.replace(half=["mul", "add"])
  assert swapped == STANDARD.replace(half=("add", "mul")) == STANDARD.replace(half={"mul", "add"})


def test_primitives_can_be_given_as_objects():
  own = Primitive("own_product")
  ops = STANDARD.replace(half=[own, primitives.tanh_p], conditional={primitives.exp_p: keep})
  assert ops == STANDARD.replace(half=[own, "tanh"], conditional={"exp": keep})
  assert ops.part_of("own_product", {}) == "half"
  # Known from then on.
  assert ops.replace(float32=["own_product"]).part_of("own_product", {}) == "float32"


# --- as a value -----------------------------------------------------------------------------------


def test_equality_and_hash():
  assert mpjax.OpLists() == STANDARD
  assert hash(STANDARD) == hash(mpjax.OpLists())
  assert STANDARD.replace() == STANDARD
  assert STANDARD.replace(half=["exp"]) != STANDARD
  assert STANDARD.replace(conditional={"exp": keep}) == STANDARD.replace(conditional={"exp": keep})
  other = STANDARD.replace(conditional={"exp": lambda params: "keep"})
  assert STANDARD.replace(conditional={"exp": keep}) != other
  pairs = ("tan", keep), ("exp", keep)
  one, same = (
    mpjax.OpLists(half=frozenset(), float32=frozenset(), conditional=x)
    for x in (pairs, pairs[::-1])
  )
  assert (one, hash(one), one.conditional) == (same, hash(same), pairs[::-1])


def test_copies_are_equal():
  ops = STANDARD.replace(half=["tanh"], conditional={"exp": keep})
  for same in (copy.copy(ops), copy.deepcopy(ops), pickle.loads(pickle.dumps(ops))):
    assert same == ops
    assert hash(same) == hash(ops)
    assert same.part_of("tanh", {}) == "half"
    assert same.part_of("exp", {}) == "keep"
  with pytest.raises(dataclasses.FrozenInstanceError):
    STANDARD.half = frozenset()


def test_repr_is_what_makes_it():
  assert repr(STANDARD) == "OpLists()"
  ops = STANDARD.replace(half=["tanh", "abs"], opaque=["dot_general"], conditional={"exp": keep})
  text = (
    'OpLists().replace(half=["abs", "tanh"], opaque=["dot_general"], conditional={"exp": keep})'
  )
  assert repr(ops) == text
  assert eval(text, {"OpLists": mpjax.OpLists, "keep": keep}) == ops
  assert repr(mpjax.OpLists(promote=frozenset(["add"]))).endswith('"sub", "tie"])')


def test_the_printed_table():
  text = str(STANDARD.replace(opaque=["tanh"], conditional={"exp": keep}))
  assert max(map(len, text.splitlines())) <= 100
  headings = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
  assert headings == [*PARTS, "conditional"]
  words = text.replace(",", " ").split()
  for part in ("half", "float32", "promote", "keep"):
    assert [name for name in getattr(STANDARD, part) - {"tanh", "exp"} if name not in words] == []
  assert f"tanh, {len(STANDARD.opaque)} of the standard list" in text
  assert "exp: keep; integer_pow: keep for the powers 0 to 3, float32 for others" in text
  nothing = mpjax.OpLists(half=frozenset(), conditional=())
  assert str(nothing).splitlines()[0].split() == ["half", "-"]


# --- errors ---------------------------------------------------------------------------------------


REFUSED_EDITS = [
  ({"half": "tanh"}, "half", "as a list", "'tanh'", "['tanh']", TypeError),
  ({"keep": [jnp.tanh]}, "keep", "names of primitives", "tanh", "make_jaxpr", TypeError),
  ({"float32": ["tahn"]}, "float32", "make_jaxpr prints", "'tahn'", "'tanh'", ValueError),
  (
    {"half": ["exp"], "keep": ["abs", "exp"]},
    *("keep", "in one part", "'exp', which is also given for half", "Remove it", ValueError),
  ),
  ({"half": ["scan"]}, "half", "inner jaxpr", "'scan'", "full_precision", ValueError),
  ({"half": ["pallas_call"]}, "half", "can be chosen", "'pallas_call'", "Write the", ValueError),
  ({"conditional": ["exp"]}, "conditional", "a dict", "['exp']", "lambda", TypeError),
  ({"conditional": {"exp": "keep"}}, "conditional", "function", "'keep'", "lambda", TypeError),
  (
    {"conditional": {"exp": WithoutHash()}},
    *("conditional", "a hashable function", "WithoutHash", "needs a __hash__", TypeError),
  ),
]
REFUSED_FIELDS = [
  ({"half": ["tanh"]}, "half", "a frozenset", "['tanh']", "replace", TypeError),
  ({"half": frozenset([1])}, "half", "a frozenset of names", "1", "replace", TypeError),
  ({"conditional": {"exp": keep}}, "conditional", "a tuple of pairs", "exp", "a dict", TypeError),
  ({"conditional": (("exp", "keep"),)}, "conditional", "function", "'keep'", "dict", TypeError),
  (
    {"conditional": (("exp", WithoutHash()),)},
    *("conditional", "a hashable function", "WithoutHash", "dict", TypeError),
  ),
  ({"keep": frozenset(["exp"])}, "keep", "in one part", "'exp'", 'keep=["exp"]', ValueError),
  (
    {"conditional": (("a", keep), ("a", keep))},
    *("conditional", "in one part", "'a'", "removes it from there", ValueError),
  ),
  (
    {"half": frozenset(["scan"])},
    "half",
    "inner jaxpr",
    "'scan'",
    "rewrites the jaxpr",
    ValueError,
  ),
]


@pytest.mark.parametrize(
  ("name", "call", "cases"),
  [
    ("OpLists.replace", STANDARD.replace, REFUSED_EDITS),
    ("OpLists", mpjax.OpLists, REFUSED_FIELDS),
  ],
)
def test_edits_and_fields_that_are_refused(name, call, cases):
  for given, field, expected, got, fix, builtin in cases:
    with refused(builtin, f"{name}({field}=...)", expected, got, fix):
      call(**given)


def test_a_predicate_that_names_no_part():
  where = "the function for 'exp' in OpLists.conditional"
  expected = "'half', 'float32', 'promote', 'keep', 'opaque'"
  for answer in ("bfloat16", "conditional", None, ["half"]):
    ops = STANDARD.replace(conditional={"exp": lambda params, answer=answer: answer})
    with refused(ValueError, where, expected, repr(answer), "['accuracy']"):
      ops.part_of("exp", {"accuracy": None})
