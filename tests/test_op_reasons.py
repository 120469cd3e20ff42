"""The data of the operation lists: every primitive of JAX is there, once, with its reason."""

import collections

from mpjax._jaxpr import BODIES
from mpjax._op_reasons import CONDITIONS, GROUPS, PARTS

NAMES = [name for group in GROUPS for name in group.names] + [c.name for c in CONDITIONS]


def test_every_name_is_in_one_place():
  counts = collections.Counter([*NAMES, *BODIES])
  assert [name for name, count in counts.items() if count > 1] == []


def test_every_group_is_of_a_part_and_says_why():
  assert {group.part for group in GROUPS} == set(PARTS)
  for group in GROUPS:
    assert group.names, group
    assert len(group.reason) > 20, group
    assert group.reason.endswith("."), group
