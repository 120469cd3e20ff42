"""The data of the operation lists: every primitive of JAX is there, once, with its reason."""

import collections
import json
import subprocess
import sys

import jax
import pytest
from jax.extend.core import Primitive, primitives

from mpjax._jaxprs.inner_jaxprs import HIGHER_ORDER
from mpjax._jaxprs.inner_jaxprs import OPAQUE as NOT_ENTERED
from mpjax._jaxprs.primitives import CONDITIONS, GROUPS, PARTS, integer_pow_part
from tests import op_lists_page, registered_primitives

NAMES = [name for group in GROUPS for name in group.names] + [c.name for c in CONDITIONS]

NOT_IN_EVERY_JAX = {
  # Newer than 0.10.0, the oldest that is supported.
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


def unlisted(names):
  """Returns the primitives that nobody has thought about."""
  return sorted(set(names) - {*NAMES, *HIGHER_ORDER})


@pytest.mark.case("A82", "I14")
def test_every_primitive_of_jax_is_listed(registered):
  everywhere, _ = registered
  assert len(everywhere) > 300, "the primitives were not found"
  assert unlisted(everywhere) == []


@pytest.mark.case("I14")
@pytest.mark.parametrize(
  ("module", "at_least"), [(primitives, 170), (jax.lax, 150)], ids=["extend", "lax"]
)
def test_every_exported_primitive_is_listed(module, at_least):
  exported = [p.name for p in vars(module).values() if isinstance(p, Primitive)]
  assert len(exported) > at_least, "the primitives were not found"
  assert unlisted(exported) == []


@pytest.mark.case("A82", "I14")
def test_a_new_primitive_would_be_noticed():
  new = Primitive("a_primitive_of_next_year")
  assert new.name in unlisted(registered_primitives.alive())


@pytest.mark.case("A82", "I14")
def test_every_name_is_in_one_place():
  counts = collections.Counter([*NAMES, *HIGHER_ORDER])
  assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.case("A82")
def test_every_name_is_a_primitive(registered):
  _, with_pallas = registered
  assert sorted(set(NAMES) - with_pallas - NOT_IN_EVERY_JAX) == []


def test_every_group_is_of_a_part_and_says_why():
  assert {group.part for group in GROUPS} == set(PARTS)
  for entry in (*GROUPS, *CONDITIONS):
    assert entry.reason[0].isupper(), entry
    assert entry.reason.endswith("."), entry
    assert len(entry.reason) > 15, entry


@pytest.mark.case("B075")
def test_what_holds_a_program_is_entered_or_left_alone_on_purpose():
  opaque = {name for group in GROUPS if group.part == "opaque" for name in group.names}
  for name in ("jit", "closed_call", "while", "scan", "cond", "shard_map", "custom_vjp_call"):
    assert name in HIGHER_ORDER
  for name in ("ffi_call", "pallas_call", "custom_partitioning", "call_exported", "core_map"):
    assert name in opaque
  # The operation of a scatter on two numbers follows the dtype of the buffer; all else is opaque.
  held = {name for name in NOT_ENTERED if not name.startswith("scatter")}
  fixed = {name for group in GROUPS if group.fixed for name in group.names}
  assert held <= fixed <= opaque


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


def test_a_page_without_the_marks_is_refused():
  with pytest.raises(ValueError, match="lacks"):
    op_lists_page.with_tables("# Operation lists")
