import jax
import jax.numpy as jnp
import pytest

from mpjax._optim.wrappers import leaf_codes
from mpjax._optim.wrappers.leaf_codes import LeafCode, LeafKind


def path_of(name):
  return (jax.tree_util.DictKey(name),)


@pytest.mark.parametrize("kind", LeafKind)
def test_a_code_says_what_was_written(kind):
  checksum = leaf_codes.checksum_of(path_of("w"))
  for position in (0, 1, 1000, 2**13 - 4):
    code = leaf_codes.write_code(kind, position, path_of("w"))
    assert 2**16 <= code < leaf_codes.NO_LEAF
    assert leaf_codes.read_code(code) == LeafCode(kind, position, checksum)


def test_codes_beyond_the_largest_position_are_alike_and_have_no_name():
  codes = [leaf_codes.write_code(LeafKind.GRADIENT, 9000 + i, path_of(f"w{i}")) for i in range(9)]
  assert len(set(codes)) == 1
  code = leaf_codes.read_code(codes[0])
  assert (code.kind, code.position_text) == (LeafKind.GRADIENT, "8189 or later")
  names = [(path_of(f"w{i}"), f"w{i}") for i in range(9)]
  assert leaf_codes.find_leaf(code, names) is None


@pytest.mark.parametrize("leaves", [0, 1, 1000])
def test_a_number_of_leaves_is_no_code(leaves):
  # States of before the codes, and steps in which all was finite, have that.
  assert leaf_codes.read_code(leaves) is None


def test_codes_are_in_the_order_of_the_leaves():
  numbers = [
    leaf_codes.write_code(kind, position, path_of(name))
    for kind in LeafKind
    for position, name in enumerate("zyxw")
  ]
  assert numbers == sorted(numbers)
  assert leaf_codes.write_code(LeafKind.UPDATE, 10**6, path_of("w")) < leaf_codes.NO_LEAF


def test_a_path_counts_by_its_names_whatever_has_them():
  ((dict_path, _),) = jax.tree_util.tree_leaves_with_path({"a": [1.0]})
  field = (jax.tree_util.GetAttrKey("a"), jax.tree_util.SequenceKey(0))
  assert leaf_codes.checksum_of(dict_path) == leaf_codes.checksum_of(field)
  assert leaf_codes.checksum_of(dict_path) != leaf_codes.checksum_of(path_of("a"))


def test_floating_leaves_are_those_that_may_be_infinite():
  tree = {"f": jnp.tanh, "i": jnp.int32(0), "k": jax.random.key(0), "n": None, "w": 1.0, "z": 1j}
  assert [path for path, _ in leaf_codes.floating_leaves(tree)] == [path_of("w"), path_of("z")]


def alike():
  """Returns two names with the same checksum."""
  seen = {}
  for i in range(2**17):
    checksum = leaf_codes.checksum_of(path_of(str(i)))
    if checksum in seen:
      return seen[checksum], str(i)
    seen[checksum] = str(i)
  raise AssertionError


@pytest.mark.parametrize(
  ("position", "found"), [(0, "first"), (2, "second"), (1, "first or second")]
)
def test_of_leaves_with_one_checksum_the_position_tells(position, found):
  first, second = alike()
  code = leaf_codes.read_code(leaf_codes.write_code(LeafKind.GRADIENT, position, path_of(first)))
  named = [(path_of(first), "first"), (path_of("w"), "w"), (path_of(second), "second")]
  assert leaf_codes.find_leaf(code, named) == found


def test_a_leaf_that_is_not_there_has_no_name():
  code = leaf_codes.read_code(leaf_codes.write_code(LeafKind.GRADIENT, 0, path_of("w")))
  assert leaf_codes.find_leaf(code, [(path_of("x"), "x")]) is None
