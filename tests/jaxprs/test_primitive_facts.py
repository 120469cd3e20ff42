"""The columns of the table of primitives, on a table of its own."""

from mpjax._jaxprs.primitive_facts import Row, family


def test_a_family():
  made = family("keep", "They do.", "tanh abs", Row("neg", exact=True))
  assert made.names == ("abs", "neg", "tanh")
  assert [(row.names, row.exact) for row in made.rows] == [("tanh abs", False), ("neg", True)]
  assert (made.part, made.fixed, made.decides) == ("keep", False, "")
