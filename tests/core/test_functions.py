"""Methods of one object as those of another."""

import functools

from mpjax._core.functions import rebound


def test_methods_of_one_object_as_those_of_another():
  class Counter:
    def __init__(self, start):
      self.start = start

    def add(self, x, by=None):
      return self.start + x + (0 if by is None else by.start)

  old, new = Counter(1), Counter(10)
  counterparts = {id(old): new}
  assert rebound(old.add, counterparts)(1) == 11
  partial = rebound(functools.partial(functools.partial(old.add, 1), by=old), counterparts)
  assert partial() == 21
  other = Counter(3)
  assert rebound(other.add, counterparts)(0) == 3
  assert rebound(functools.partial(other.add, 2), counterparts)() == 5
