"""Rows of an audit that are alike are added up."""

from mpjax._diagnose.audit.findings import Finding, summed, summed_over_layers

ROWS = (
  Finding("head", "dot_general", flops=1, times=1),
  Finding("block_0", "dot_general", reason="of tables/0", params=("a", "b"), flops=2, times=1),
  Finding("block_1", "dot_general", reason="of tables/1", params=("b", "a"), flops=4, times=1),
  Finding("block_1", "dot_general", reason="of tables/1", params=("b", "a"), flops=8, times=1),
)


def test_rows_that_differ_in_their_counts_are_one_row_and_the_largest_comes_first():
  head, first, second, _ = ROWS
  assert summed(ROWS) == (second._replace(flops=12, times=2), first, head)


def test_rows_of_several_layers_are_one_row_with_their_number():
  block, head = summed_over_layers(ROWS)
  assert (block.path, block.reason) == ("block_* (2)", "of tables/*")
  assert (block.flops, block.times) == (14, 3)
  assert head == ROWS[0]


def test_layers_with_other_dtypes_or_operations_are_rows_of_their_own():
  others = (Finding("block_2", "dot_general", params=("a",)), Finding("block_3", "exp"))
  paths = [row.path for row in summed_over_layers((*ROWS, *others))]
  assert paths == ["block_* (2)", "head", "block_2", "block_3"]


def test_a_row_of_the_root_is_called_root():
  (row,) = summed_over_layers([Finding("")])
  assert row.path == "(root)"
