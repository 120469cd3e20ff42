"""The columns of the table of primitives, on a table of its own."""

import jax

from mpjax._jaxprs.primitive_facts import Row, family


def test_a_family():
  made = family("keep", "They do.", "tanh abs", Row("neg", exact=True))
  assert made.names == ("abs", "neg", "tanh")
  assert [(row.names, row.exact) for row in made.rows] == [("tanh abs", False), ("neg", True)]
  assert (made.part, made.fixed, made.decides) == ("keep", False, "")


def test_degrees_compose():
  # Row by row, as for 0.1 * x * x.
  mul = Row("mul", degree=lambda d, _: d[0] + d[1])
  assert mul.degree is not None
  assert mul.degree([mul.degree([0, 1], {}), 1], {}) == 2
  assert jax.tree.leaves(mul)[0] == "mul"
