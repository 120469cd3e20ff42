"""The table of cases and the ids that tests carry agree."""

import pytest

from tests import uncovered_cases

FINISHED = ("policy", "linen", "scaling", "training", "autocast", "nnx")
"""Parts that the library has. A part is added here with the work that builds it."""

ROW = "| A01 | scaling | text with a | in it |"


def test_tests_carry_the_ids_of_the_table_and_finished_parts_leave_none_out():
  table = uncovered_cases.read_table(uncovered_cases.TABLE.read_text(encoding="utf-8"))
  wanted = [f"A{i:02}" for i in range(1, 119)]
  wanted += [f"B{i:03}" for i in range(1, 159)]
  wanted += [f"I{i}" for i in range(1, 24)]
  assert sorted(table) == sorted(wanted)
  carried = uncovered_cases.carried_by_tests()
  assert {id_: files for id_, files in carried.items() if id_ not in table} == {}
  left = uncovered_cases.uncovered()
  assert [id_ for id_, case in left.items() if case.part in FINISHED] == []


def test_read_table_finds_rows_and_refuses_bad_ones():
  assert uncovered_cases.read_table(f"| id | part | x |\n{ROW}\n") == {
    "A01": ("scaling", "text with a | in it")
  }
  with pytest.raises(ValueError, match="A01 stands twice"):
    uncovered_cases.read_table(f"{ROW}\n{ROW}")
  with pytest.raises(ValueError, match="A01: no part is called 'scalling'"):
    uncovered_cases.read_table(ROW.replace("scaling", "scalling"))


def test_ids_are_found_wherever_a_mark_is_and_must_be_written_out():
  source = """
import pytest
pytestmark = [pytest.mark.case("A01")]
@pytest.mark.case("A02", "B003")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.case("B004"))])
def test_f(x): "A99"
"""
  assert sorted(uncovered_cases.carried_ids(source)) == ["A01", "A02", "B003", "B004"]
  with pytest.raises(ValueError, match="line 2: write the id out, not id_"):
    uncovered_cases.carried_ids("import pytest\npytest.mark.case(id_)")
