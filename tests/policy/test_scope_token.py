"""Scopes that may be left in any order."""

import contextlib
import itertools

import pytest

from mpjax._policy.active import ACTIVE, Active
from mpjax._policy.scope_token import enter_scope, leave_scopes

ORDERS = [*itertools.permutations(range(3))]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
def test_the_innermost_scope_that_is_not_left_is_active(order):
  states, closed, tokens = [Active(region=name) for name in "abc"], [], []
  for number, state in enumerate(states):
    opened = contextlib.ExitStack()
    opened.callback(closed.append, number)
    tokens.append(enter_scope(state, opened, None))
  assert [token.has_inner for token in tokens] == [True, True, False]
  entered = {0, 1, 2}
  for number in order:
    leave_scopes(tokens[number])
    entered.remove(number)
    innermost = max(entered, default=None)
    assert ACTIVE.value == (None if innermost is None else states[innermost])
  # What a scope has opened is closed when the scopes inside of it have been left too.
  assert closed == [2, 1, 0]
  leave_scopes()
  assert ACTIVE.value is None
