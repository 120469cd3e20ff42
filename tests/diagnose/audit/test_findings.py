"""Rows of an audit that are alike are added up."""

import pytest

from mpjax._diagnose.audit import findings
from mpjax._diagnose.audit.findings import (
  Format,
  Leak,
  Module,
  OnPurpose,
  Primitive,
  summed,
  summed_over_layers,
)

HEAD = OnPurpose("head", "a rule", flops=1)
BLOCKS = [
  OnPurpose(f"block_{i}", f"mpjax.Rule(None, path='block_{i}')", flops=flops)
  for i, flops in ((0, 2), (1, 4), (1, 8))
]


def test_rows_that_differ_in_their_counts_are_one_row_and_the_largest_comes_first():
  first, second, _ = BLOCKS
  assert summed([HEAD, *BLOCKS]) == (second._replace(flops=12), first, HEAD)


def test_rows_without_flops_are_ordered_by_their_bytes_and_then_by_their_runs():
  tanh, add, sub = (
    Primitive(name, "float32", 4, n) for n, name in enumerate(("tanh", "add", "sub"))
  )
  assert summed([tanh, add, sub, tanh]) == (tanh._replace(nbytes=8), sub, add)


def test_rows_of_several_layers_are_one_row_with_their_number():
  block, head = summed_over_layers([HEAD, *BLOCKS])
  assert block == OnPurpose("block_* (2)", "mpjax.Rule(None, path='block_*')", flops=14)
  assert head == HEAD


def test_layers_whose_dtypes_differ_in_their_order_are_one_row():
  rows = [
    Module(f"block_{i}", "float32", "", dtypes, (), (), flops=1)
    for i, dtypes in enumerate([("a", "b"), ("b", "a"), ("a",)])
  ]
  merged = rows[0]._replace(path="block_* (2)", flops=2)
  assert summed_over_layers(rows) == (merged, rows[2])


def test_leaks_of_layers_whose_parameters_are_the_causes_are_one_row():
  leaks = [
    Leak(f"block_{i}", "add", "forward", "", None, "", "parameter", f"tables/{i}", "", 0, 8, 1)
    for i in range(2)
  ]
  (row,) = summed_over_layers(leaks)
  assert (row.path, row.nbytes, row.times) == ("block_* (2)", 16, 2)


def test_layers_with_other_formats_are_rows_of_their_own():
  rows = [Format("block_0", "float8", "", 1), Format("block_1", "int8", "", 1)]
  assert summed_over_layers(rows) == (*rows,)


def test_a_row_of_the_root_is_called_root():
  (row,) = summed_over_layers([OnPurpose("", "", 1)])
  assert row.path == "(root)"


@pytest.mark.parametrize("name", ["Leak", "Kernel", "OnPurpose", "Module", "Format", "Primitive"])
def test_every_count_of_a_row_is_added_up(name):
  # A count that `summed` does not know would be that of the first of several rows.
  row = getattr(findings, name)
  counts = {field for field, kind in row.__annotations__.items() if kind is int}
  assert counts <= {*findings._COUNTS}
  assert counts
