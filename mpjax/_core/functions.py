"""Methods of one object as those of another."""

import functools
import types
from collections.abc import Mapping
from typing import Any


def rebound(value: Any, counterparts: Mapping[int, object]) -> Any:
  """Returns a method, alone or in `functools.partial`, as that of the counterpart of its object.

  `counterparts` has other objects by the identities of those that they replace; arguments of the
  partial are replaced too.
  """
  if isinstance(value, types.MethodType):
    to = counterparts.get(id(value.__self__))
    return value if to is None else getattr(to, value.__name__)
  if isinstance(value, functools.partial):
    args = [rebound(x, counterparts) for x in value.args]
    kwargs = {name: rebound(x, counterparts) for name, x in value.keywords.items()}
    return functools.partial(rebound(value.func, counterparts), *args, **kwargs)
  return counterparts.get(id(value), value)
