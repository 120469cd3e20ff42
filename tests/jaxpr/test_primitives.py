"""The data of the operation lists: every primitive of JAX is there, once, with its reason."""

import ast
import collections
import inspect
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.extend.core import Primitive

import mpjax
from mpjax._jaxpr.primitives import (
  FACTS,
  FAMILIES,
  HIGHER_ORDER,
  PARTS,
  UNCOUNTED,
  Holds,
  integer_pow_part,
)
from tests import op_lists_page, registered_primitives
from tests.autocast import samples
from tests.programs import equations

NAMES = [name for family in FAMILIES for name in family.names if family.part is not None]

SAMPLES = samples.HALF | samples.FLOAT32 | samples.PROMOTE | samples.KEEP | samples.CONDITIONAL
NOT_IN_EVERY_JAX = {
  # Newer than the oldest that is supported.
  *("log2", "mulhi", "one_minus_square", "pbroadcast_dynamic", "philox2x32", "philox4x32"),
  *("polynomial", "reduced_vary_cast", "relayout", "stack", "stage", "threefry4x32"),
  *("unreduced_pmax", "unreduced_pmin", "unstack", "vary_unreduced_cast"),
  # Gone from 0.12.
  *("box_get", "box_set", "core_map", "log_extend", "log_read", "new_box", "new_log"),
  *("pbroadcast_done", "pbroadcast_start", "psum_start", "reduced_vary_cast_p", "shard_alike"),
  *("unreduced_psum_start", "unreduced_reduce_scatter_start", "vary_unreduced_cast_p"),
}
"""Primitives that some supported version of JAX lacks."""


@pytest.fixture(scope="module")
def registered():
  """The names of all primitives of JAX, from a process in which no test has made any."""
  command = [sys.executable, "-m", "tests.registered_primitives"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return [set(names) for names in json.loads(done.stdout)]


FIXED = {name for family in FAMILIES if family.fixed for name in family.names}
OPAQUE = {name for family in FAMILIES if family.part == "opaque" for name in family.names}


def unlisted(names):
  """Returns the primitives that nobody has thought about."""
  return sorted(set(names) - {*NAMES, *HIGHER_ORDER})


@pytest.mark.slow
def test_every_primitive_of_jax_is_listed(registered):
  everywhere, _ = registered
  assert len(everywhere) > 300, "the primitives were not found"
  assert unlisted(everywhere) == []


def test_a_new_primitive_would_be_noticed():
  new = Primitive("a_primitive_of_next_year")
  assert new.name in unlisted(registered_primitives.alive())


def test_every_name_is_in_one_place():
  counts = collections.Counter([*NAMES, *HIGHER_ORDER])
  assert [name for name, count in counts.items() if count > 1] == []


def named(source):
  """Yields the primitives that string literals name: one, or a list of them in a string."""
  tree = ast.parse(source)
  pieces = {
    id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values
  }
  prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
  # A type of an option: masters that are split are no primitive.
  types = (
    node.slice
    for node in ast.walk(tree)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
  )
  prose |= {id(each) for found in types for each in ast.walk(found)}
  calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
  prose |= {id(call.args[0]) for call in calls if ast.unparse(call.func) == "Primitive"}
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
      words = node.value.split(" ")
      if id(node) not in pieces | prose and FACTS.keys() >= set(words):
        yield from words


@pytest.mark.slow
def test_a_primitive_is_named_in_the_table_and_nowhere_else():
  # So one row says all about it: to add a primitive, or a fact, is to change that row.
  table = pathlib.Path(inspect.getfile(integer_pow_part))
  files = set(pathlib.Path(mpjax.__file__).parent.rglob("*.py"))
  assert set(named(table.read_text(encoding="utf-8"))) == FACTS.keys()
  for file in files - {table}:
    assert list(named(file.read_text(encoding="utf-8"))) == [], file


def test_every_row_with_a_fact_of_first_order_has_a_sample():
  for row in {row for row in FACTS.values() if row != type(row)(row.names)}:
    names = {row.names} if isinstance(row.names, str) else {*row.names}
    # What is opaque runs as it was traced: see test_rewriter.py.
    if names & {*HIGHER_ORDER, *OPAQUE} or names <= {*samples.NO_SAMPLE}:
      continue
    if names - NOT_IN_EVERY_JAX:
      assert names & {*SAMPLES}, row


def of_sample(name):
  """Returns the equation of a primitive in its sample, whose inputs are those of the equation."""
  fun, args, _ = SAMPLES[name]
  return next(e for e, _ in equations(jax.make_jaxpr(fun)(*args)) if e.primitive.name == name)


SUMS = {name: row.terms for name, row in FACTS.items() if row.terms and name in SAMPLES}
COUNTED = {"add_any", "conv_general_dilated", "cumsum", "dot_general", "reduce_sum"}


@pytest.mark.parametrize("name", sorted(SUMS))
def test_a_sum_of_ones_is_at_most_its_number_of_terms(name):
  assert COUNTED | {"scatter-add", "psum"} <= SUMS.keys()
  fun, args, _ = SAMPLES[name]
  eqn, ones = of_sample(name), [np.ones_like(x) if x.dtype == "float32" else x for x in args]
  terms = SUMS[name]([v.aval.shape for v in eqn.invars], eqn.params)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(jax.jit(fun)(*ones)))
  assert 1 <= largest <= terms
  # The indices decide how many updates meet, and the mesh how many devices there are.
  assert largest == terms or name not in COUNTED
  axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
  assert (terms == UNCOUNTED) == any(isinstance(axis, str) for axis in axes)


KEPT = [name for name, row in FACTS.items() if row.keeps_numbers and name in SAMPLES]


@pytest.mark.parametrize("name", KEPT)
def test_each_number_of_a_result_is_one_of_an_operand(name):
  fun, args, _ = SAMPLES[name]
  given = np.concatenate([np.ravel(x) for x in args])
  results = [x for x in jax.tree.leaves(jax.jit(fun)(*args)) if x.dtype == "float32"]
  assert results
  for result in results:
    assert np.isin(result, given).all()


FOLDED = {
  name: row.folds for name, row in FACTS.items() if row.folds and not row.terms and name in SAMPLES
}


@pytest.mark.parametrize("name", sorted(FOLDED))
def test_the_result_of_numbers_is_that_of_the_primitive(name):
  assert {"add", "sub", "mul", "div", "neg", "abs"} <= FOLDED.keys()
  fun, args, _ = SAMPLES[name]
  np.testing.assert_array_equal(jax.jit(fun)(*args), FOLDED[name](*args))


@pytest.mark.slow
def test_what_is_elementwise_reads_its_own_position_alone():
  # Of what computes one array from others of its shape: one element of each becomes NaN.
  plain, one = {}, jax.ShapeDtypeStruct((3, 4), "float32")
  for name, (fun, args, _) in SAMPLES.items():
    if name not in FACTS or FACTS[name].moves or {*map(np.shape, args)} != {(3, 4)}:
      continue
    if jax.tree.leaves(jax.eval_shape(fun, *args)) == [one]:
      plain[name] = args
  compute = jax.jit(lambda given: {name: SAMPLES[name].fun(*args) for name, args in given.items()})
  hole = np.zeros((3, 4), np.float32)
  hole[1, 2] = np.nan
  results, changed = compute(plain), compute(jax.tree.map(lambda x: x + hole, plain))
  for name, args in plain.items():
    (before,), (after,) = jax.tree.leaves(results[name]), jax.tree.leaves(changed[name])
    own = np.argwhere(np.asarray(before) != np.asarray(after)).tolist() == [[1, 2]]
    assert FACTS[name].elementwise == own or any(np.array_equal(before, x) for x in args), name


@pytest.mark.slow
def test_every_name_is_a_primitive(registered):
  _, with_pallas = registered
  assert sorted(set(NAMES) - with_pallas - NOT_IN_EVERY_JAX) == []


def test_every_part_has_a_group():
  assert {family.part for family in FAMILIES} == {*PARTS, integer_pow_part, None}


def test_what_holds_a_program_is_entered_or_left_alone_on_purpose():
  assert {"jit", "closed_call", "custom_vjp_call"} <= HIGHER_ORDER
  assert {"while", "scan", "cond", "shard_map"} <= HIGHER_ORDER
  assert {"ffi_call", "pallas_call", "custom_partitioning", "call_exported", "core_map"} <= OPAQUE
  kernels = {name for name, row in FACTS.items() if row.holds is Holds.KERNEL}
  assert kernels <= FIXED <= OPAQUE


@pytest.mark.parametrize(
  ("power", "part"),
  [(-2, "float32"), (-1, "float32"), (0, "keep"), (1, "keep"), (3, "keep"), (4, "float32")],
)
def test_powers(power, part):
  equations = jax.make_jaxpr(lambda x: jax.lax.integer_pow(x, power))(2.0).eqns
  params = equations[0].params if equations else {"y": power}  # Powers 0 and 1 are no operation.
  assert integer_pow_part(params) == part


def test_the_page_shows_the_lists():
  page = op_lists_page.PAGE.read_text(encoding="utf-8")
  command = "write it anew: python -m tests.op_lists_page"
  assert page == op_lists_page.with_tables(page), command
  changed = page.replace("| `pow` |", "| `pow`, `pov` |")
  assert changed != page
  assert op_lists_page.with_tables(changed) == page
  for name in (*NAMES, *HIGHER_ORDER):
    assert f"`{name}`" in page, command
