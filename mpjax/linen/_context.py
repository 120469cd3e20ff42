"""Which policy is in force: given to a model or a scope, resolved for the module being called."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
from flax.core import Scope

from mpjax._autocast import region_of
from mpjax._full_precision import ACTIVE
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
  unmatched: str
  hash: int = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    # JAX hashes the value of a user context at each call of a jitted function.
    key = (self.policy, self.rules, self.defaults, self.unmatched)
    object.__setattr__(self, "hash", hash(key))

  def __hash__(self) -> int:
    return self.hash

  def __reduce__(self) -> Any:
    # Another process hashes strings and classes in another way.
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
    return functools.partial(Given, **values), ()

  @property
  def low(self) -> bool:
    """Whether anything that was given computes in low precision."""
    rules = (*self.rules, *self.defaults)
    policies = (self.policy, *(rule.policy for rule in rules))
    return any(p is not None and p.compute_dtype.itemsize < 4 for p in policies)

  @property
  def by_place(self) -> bool:
    """Whether two equal modules can get different policies for where they stand."""
    return any(map(goes_by_place, (*self.rules, *self.defaults)))


class Visits:
  """The modules that one `init` passed, the rules that picked some, and the root's output dtype.

  It is part of the active context, where it is equal to nothing but itself: no function compiled
  before is reused while it is there, so that no module is missed.
  """

  def __init__(self) -> None:
    self.classes: dict[str, str] = {}
    self.matched: set[Rule] = set()
    self.output_dtype: Any = None


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


@dataclasses.dataclass
class Again:
  """A method that is called once more, on a copy of its module, in order to be traced.

  Interceptors of the user's, around ours, see that call too, and have changed what it is given.

  Fields:
    call: its arguments, as they came to our interceptor.
    outputs: what it returned there; () until then.
  """

  call: Any
  outputs: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Active:
  """The state in force inside a call. Equal states give equal programs; JAX keys its caches by it.

  Fields:
    given: what the user gave; None where policies are switched off.
    policy: that of the module being called; None leaves it as it is.
    root_policy: that of the root of this `init` or `apply`.
    exempt: a rule left the module being called, and all inside it, as it is.
    entered: a module has been entered: the policy began further out.
    tracing: the call is part of one that is traced and will be rewritten.
    region: what marks the operations of the module being called.
    cast: modules are called in their compute dtype: arguments, results and `dtype` fields.
    casting: the classes of modules that are called so, since they raise in float32.
    as_python: the paths of modules that run as Python, since they look at values.
    failed: where to note the class of a module that raises.
    again: the method that is called next, if it was called before.
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
  tracing: bool = False
  region: str = ""
  cast: bool = False
  casting: frozenset[type[Any]] = frozenset()
  as_python: frozenset[str] = frozenset()
  visits: Visits | None = None
  # Compared, these would make every call another program.
  root: weakref.ref[Scope] | None = None
  held: "Held | None" = None
  in_region: bool = False
  met: set[str] | None = None
  failed: list[type[Any]] | None = None
  again: list[Again] = dataclasses.field(default_factory=list)
  key: tuple[Any, ...] = dataclasses.field(init=False, repr=False)
  hash: int = dataclasses.field(init=False, repr=False)

  def __post_init__(self) -> None:
    # Compared and hashed at each call of a function that is jitted, jax.numpy's own included.
    key = (self.given, self.policy, self.root_policy, self.exempt, self.entered)
    key += (self.tracing, self.region, self.cast, self.casting, self.as_python, self.visits)
    key += (self.in_region,)
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

  def outside(self) -> "Active":
    """Returns the state inside of `mpjax.full_precision`."""
    return _REGION


OFF = Active(given=None)
_REGION = Active(given=None, in_region=True)


def begin(given: Given, visits: Visits | None = None, met: set[str] | None = None) -> Active:
  """Returns the state at the root of a model that `given` was given to."""
  policy, around = given.policy, ACTIVE.value
  # A model inside of another that is being traced is rewritten with it.
  tracing, region = False, region_of(policy)
  if around is not None and around.tracing:
    tracing, region = True, around.region
  return Active(
    given=given,
    policy=policy,
    root_policy=policy,
    tracing=tracing,
    region=region,
    visits=visits,
    met=met,
  )


def give(
  where: str,
  policy: PolicyLike | None,
  rules: Iterable[Rule],
  *,
  defaults: Iterable[Rule] | None,
  unmatched: str,
) -> Given:
  """Returns the checked arguments that `with_policy` and `policy_scope` share.

  Raises:
    MpjaxTypeError: rules of the wrong type.
    MpjaxValueError: an unknown policy or value of `unmatched`.
  """
  return Given(
    policy=None if policy is None else Policy.parse(policy),
    rules=parse_rules(rules, f"{where}(rules=...)"),
    defaults=default_rules()
    if defaults is None
    else parse_rules(defaults, f"{where}(defaults=...)"),
    unmatched=parse_unmatched(unmatched, where),
  )


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
  return ", ".join(parts)
