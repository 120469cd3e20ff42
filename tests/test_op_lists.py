"""The value that says in which precision each primitive runs."""

import mpjax


def test_the_standard_lists():
  ops = mpjax.OpLists()
  assert ops.part_of("dot_general", {}) == "half"
  assert ops.part_of("exp", {}) == "float32"
  assert ops.part_of("add", {}) == "promote"
  assert ops.part_of("tanh", {}) == "keep"
  assert ops.part_of("cholesky", {}) == "opaque"
  assert ops.part_of("no such primitive", {}) is None
