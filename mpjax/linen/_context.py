"""Which policy is in force: given to a model or a scope, resolved for the module being called."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import numpy as np
from flax.core import Scope

from mpjax._adapter import Adapter
from mpjax._autocast import float32_operations
from mpjax._errors import MpjaxTypeError, message
from mpjax._op_lists import OpLists, parse_ops
from mpjax._policy import Policy, PolicyLike
from mpjax._rules import (
  Rule,
  default_rules,
  first_match,
  goes_by_place,
  parse_rules,
  parse_unmatched,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
  """What the user gave to `with_policy` or `policy_scope`, checked; hashed once."""

  policy: Policy | None
  rules: tuple[Rule, ...]
  defaults: tuple[Rule, ...]
  adapters: tuple[tuple[type[Any], Adapter], ...]
  unmatched: str
  ops: OpLists | None
  hash: int = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    # JAX hashes the value of a user context at each call of a jitted function.
    key = (self.policy, self.rules, self.defaults, self.adapters, self.unmatched, self.ops)
    object.__setattr__(self, "hash", hash(key))

  def __hash__(self) -> int:
    return self.hash

  def __reduce__(self) -> Any:
    # Another process hashes strings and classes in another way.
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
    return functools.partial(Given, **values), ()

  @property
  def by_place(self) -> bool:
    """Whether two equal modules can get different policies for where they stand."""
    return any(map(goes_by_place, (*self.rules, *self.defaults)))


class Visits:
  """The modules that one `init` passed through, and the rules that picked some of them out.

  It is part of the active context, where it is equal to nothing but itself: no function compiled
  before is reused while it is there, so that no module is missed.
  """

  def __init__(self) -> None:
    self.classes: dict[str, str] = {}
    self.matched: set[Rule] = set()


@dataclasses.dataclass
class Held:
  """A scope that a user has entered.

  Fields:
    before: the state that it found.
    interceptor: what to close when no state is left; None if that is for others to do.
    left: it has been left.
  """

  before: "Active | None"
  interceptor: contextlib.ExitStack | None
  left: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Active:
  """The state in force inside a call. Equal states give equal programs; JAX keys its caches by it.

  Fields:
    given: what the user gave; None where policies are switched off.
    policy: that of the module being called; None leaves it as it is.
    root_policy: that of the root of this `init` or `apply`.
    exempt: a rule left the module being called, and all inside it, as it is.
    entered: a module has been entered: the policy began further out.
    use_dtype: what parameters and caches are cast to when they are read; None as stored.
    own_dtype: `(dtype,)`: the `dtype` field of the module being called, as it was before it was
      set; `()` if it was not.
    loop: the place of the module whose lifted loop has a function as its body, inside that body.
    visits: where to note the modules passed, during `init`.
    root: the scope of the root; it tells a model that is applied inside from the root itself.
    held: the user's scope that this state belongs to, if any.
    in_region: it is that inside of `mpjax.full_precision`.
    met: where to note the paths of the modules met; those inside a cached program are not.
    key: what of all this is compared.
    hash: that of the key.
  """

  given: Given | None
  policy: Policy | None = None
  root_policy: Policy | None = None
  exempt: bool = False
  entered: bool = False
  use_dtype: np.dtype[Any] | None = None
  own_dtype: tuple[Any, ...] = ()
  loop: str | None = None
  visits: Visits | None = None
  # Compared, these would make every call another program.
  root: weakref.ref[Scope] | None = None
  held: "Held | None" = None
  in_region: bool = False
  met: set[str] | None = None
  key: tuple[Any, ...] = dataclasses.field(init=False, repr=False)
  hash: int = dataclasses.field(init=False, repr=False)

  def __post_init__(self) -> None:
    # Compared and hashed at each call of a function that is jitted, jax.numpy's own included.
    key = (self.given, self.policy, self.root_policy, self.exempt, self.entered)
    key += (self.use_dtype, self.own_dtype, self.loop, self.visits, self.in_region)
    object.__setattr__(self, "key", key)
    object.__setattr__(self, "hash", hash(key))

  def __eq__(self, other: object) -> bool:
    if self is other:
      return True
    return isinstance(other, Active) and self.hash == other.hash and self.key == other.key

  def __hash__(self) -> int:
    return self.hash

  @property
  def on(self) -> bool:
    """Whether a policy is in force."""
    return self.given is not None

  def region(self) -> "Active":
    """Returns the state inside of `mpjax.full_precision`."""
    return _REGION


OFF = Active(given=None)
_REGION = Active(given=None, in_region=True)


def begin(given: Given, visits: Visits | None = None, met: set[str] | None = None) -> Active:
  """Returns the state at the root of a model that `given` was given to."""
  policy = given.policy
  return Active(given=given, policy=policy, root_policy=policy, visits=visits, met=met)


def give(
  where: str,
  policy: PolicyLike | None,
  rules: Iterable[Rule],
  *,
  defaults: Iterable[Rule] | None,
  adapters: Mapping[type[nn.Module], Adapter] | None,
  ops: Any,
  unmatched: str,
) -> Given:
  """Returns the checked arguments that `with_policy` and `policy_scope` share.

  Raises:
    MpjaxTypeError: rules, adapters or operation lists of the wrong type.
    MpjaxValueError: an unknown policy or value of `unmatched`.
  """
  return Given(
    policy=None if policy is None else Policy.parse(policy),
    rules=parse_rules(rules, f"{where}(rules=...)"),
    defaults=default_rules()
    if defaults is None
    else parse_rules(defaults, f"{where}(defaults=...)"),
    adapters=_parse_adapters(adapters, f"{where}(adapters=...)"),
    unmatched=parse_unmatched(unmatched, where),
    ops=parse_ops(ops, where),
  )


def with_ops(given: Given, fun: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `fun` with its operations in float32 where the lists that were given ask for it."""
  where = "mpjax.linen.with_policy(ops=...)"
  return fun if given.ops is None else float32_operations(fun, given.ops, where)


def _parse_adapters(adapters: Any, where: str) -> tuple[tuple[type[Any], Adapter], ...]:
  items = tuple(adapters.items()) if isinstance(adapters, Mapping) else ((adapters, None),)
  for cls, adapter in () if adapters is None else items:
    if not (isinstance(cls, type) and isinstance(adapter, Adapter)):
      raise MpjaxTypeError(
        message(
          where,
          expected="a mapping from module classes to mpjax.linen.Adapter",
          got=repr(adapters),
          fix="Write adapters={MyCell: mpjax.linen.Adapter(...)}.",
        )
      )
  return () if adapters is None else items


def module_path(module: nn.Module) -> str:
  """Returns the path that rules see: relative to the root, or the name of what is itself a root.

  A child on which `.apply` is called in a forward pass is the root of that call; it has its name.
  """
  names = module.path or ((module.name,) if module.name else ())
  return "/".join(names)


def resolve(active: Active, given: Given, module: nn.Module) -> tuple[Policy | None, bool, bool]:
  """Returns the policy of a bound module, whether it was picked for it, and whether it is exempt.

  A policy in the module's own field beats rules, the first matching rule wins, and a module that
  nothing picks has that of the nearest enclosing module. What encloses a module is its parent;
  across a lifted transform, which hides the parent, it is the module being called, and so it is for
  a model on which `.apply` is called in a forward pass.
  """
  parent = module.parent
  if isinstance(parent, nn.Module):
    enclosing, _, exempt = resolve(active, given, parent)
  elif module.path == () and not is_new_root(active, module):
    enclosing, exempt = active.root_policy, active.exempt
  else:
    enclosing, exempt = active.policy, active.exempt
  if exempt:
    return None, False, True
  own = getattr(module, "policy", None) if _has_policy_field(type(module)) else None
  if isinstance(own, Policy):
    return own, True, False
  rule = first_match((*given.rules, *given.defaults), module, module_path(module))
  if rule is not None:
    return rule.policy, True, rule.policy is None
  return enclosing, False, False


def is_new_root(active: Active, module: nn.Module) -> bool:
  """Whether a bound module is the root of a call of its own, other than the root in force.

  A scope that a lifted transform made for the root in force shows the transform in its debug path.
  """
  scope = module.scope
  if scope is None or module.path != () or scope.debug_path:
    return False
  return active.root is None or active.root() is not scope


def _has_policy_field(cls: type[Any]) -> bool:
  return "policy" in getattr(cls, "__dataclass_fields__", {})


def shown(given: Given) -> str:
  """Returns the arguments of `with_policy` that were given, those that say nothing left out."""
  parts = [repr(None if given.policy is None else str(given.policy))]
  if given.rules:
    parts.append(f"rules={list(given.rules)!r}")
  if given.defaults != default_rules():
    parts.append(f"defaults={given.defaults!r}")
  if given.adapters:
    parts.append(f"adapters={{{', '.join(f'{cls.__name__}: ...' for cls, _ in given.adapters)}}}")
  if given.ops is not None:
    ops = "float32" if given.ops == OpLists() else given.ops
    parts.append(f"ops={ops!r}")
  return ", ".join(parts)
