"""The active state while a model runs under a policy, and what is left out of it.

JAX includes the state in the key of its caches. `mpjax.audit` adds a record to it: which module
has which policy, and `full_precision` takes it away.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, ParamSpec, Self, TypeVar

import jax

from mpjax._core.frameworks import check_no_linen_model
from mpjax._core.policy import Policy
from mpjax._core.rules import Rule
from mpjax._core.trees import half_to_float32, map_arrays
from mpjax._core.types import Class

# The one mechanism JAX has for a value that is part of every jit cache key; it is local to the
# thread and restored when its `with` block is left.
ACTIVE = jax.make_user_context(None)
"""The active state of this thread, an `Active`; None outside of every model under a policy."""


@dataclasses.dataclass(eq=False)
class ScopeToken:
  """A scope that a user has entered, in one thread, and may leave in any order."""

  before: "Active | None"  # the state that it found
  opened: contextlib.ExitStack  # what to close with it
  left: bool = False
  thread: int = dataclasses.field(default_factory=threading.get_ident)


EVERY: frozenset[Class] = frozenset({object})
"""In `Active.casting`: modules of all classes are called in their compute dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Active:
  """The active state inside a call. Equal states give equal jaxprs.

  It has few distinct values in a model, since each one costs a trace of every small jitted function
  of `jax.numpy`: neither the module nor its path is part of it. Linen's has more fields.

  Fields:
    policy: that of the module being called; None leaves it as it is.
    rule: the rule that gave it the policy, or a module around it; None if none did.
    exempt: a rule left the module being called, and all inside it, as it is.
    entered: a module has been entered: the policy began further out.
    tracing: the call is part of one that is traced and will be rewritten.
    region: what marks the operations of the module being called.
    casting: the classes of modules that are called in their compute dtype (arguments, results and
      `dtype` fields), since they raise in float32; `EVERY` inside of one.
    as_python: the paths of modules that run as Python, since they look at values.
    on: a policy is active.
    in_region: it is the state inside of `mpjax.full_precision`, where none is.
    failed: where to note the class of a module that raises.
    token: the user's scope that the state belongs to, if any.
    key: what of all this is compared.
    hash: that of the key.
  """

  policy: Policy | None = None
  rule: Rule | None = None
  exempt: bool = False
  entered: bool = False
  tracing: bool = False
  region: str = ""
  casting: frozenset[Class] = frozenset()
  as_python: frozenset[str] = frozenset()
  on: bool = True
  in_region: bool = False
  failed: list[Class] | None = dataclasses.field(default=None, compare=False)
  token: ScopeToken | None = dataclasses.field(default=None, compare=False)
  key: tuple[object, ...] = dataclasses.field(init=False, repr=False, compare=False)
  hash: int = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    # Compared and hashed at each call of a function that is jitted, jax.numpy's own included.
    key = tuple(getattr(self, name) for name in _compared(type(self)))
    object.__setattr__(self, "key", key)
    object.__setattr__(self, "hash", hash(key))

  def __eq__(self, other: object) -> bool:
    if self is other:
      return True
    return type(other) is type(self) and self.hash == other.hash and self.key == other.key

  def __hash__(self) -> int:
    return self.hash

  def outside(self) -> Self:
    """Returns the state inside of `mpjax.full_precision`."""
    return self if self.in_region else type(self)(on=False, in_region=True)


@functools.cache
def _compared(cls: type[Active]) -> tuple[str, ...]:
  return tuple(field.name for field in dataclasses.fields(cls) if field.compare)


def in_region() -> bool:
  """Whether this runs inside of `full_precision`, where no policy and no autocast begins."""
  return ACTIVE.value is not None and ACTIVE.value.in_region


def activate_scope(state: Active, opened: contextlib.ExitStack) -> ScopeToken:
  """Makes a state active for a scope that may be left in any order."""
  # A generator that yields inside a scope leaves it when it ends, which may be after another scope
  # was entered. That one stays active, and when it is left too what was before both is restored.
  # Left as a `with` block is, the scope of the generator would restore what was before it, and a
  # model called next in the other scope would run without a policy.
  token = ScopeToken(ACTIVE.value, opened)
  ACTIVE(dataclasses.replace(state, token=token)).__enter__()
  return token


def leave_scope(token: ScopeToken) -> None:
  """Leaves a scope; what was before it is restored once the scopes inside have been left."""
  token.left = True
  leave_finished()


def leave_finished() -> None:
  """Restores what was before the innermost scopes, where they have been left."""
  active = ACTIVE.value
  while active is not None and active.token is not None and active.token.left:
    token, active = active.token, active.token.before
    ACTIVE(active).__enter__()
    token.opened.close()


class AuditedModule(NamedTuple):
  """A module that was called under a policy.

  Fields:
    name: its class.
    policy: None leaves it as it is.
    rule: the one that gave it the policy, or gave it to a module around it; None if no rule did.
    own_dtype: the value of its field `dtype`, which the policy overrules; None for none.
    is_norm: it is a norm of Flax's, which computes in float32 by itself.
    hidden: rules that match it too, and come later.
  """

  name: str
  policy: Policy | None
  rule: Rule | None
  own_dtype: str | None
  is_norm: bool = False
  hidden: tuple[Rule, ...] = ()


class AuditRecord:
  """What is noted while a function is traced for an audit.

  It is equal to nothing but itself: as a value of a user context of JAX, it makes every jitted
  function be traced again, with the marks of policies in its jaxpr.

  Attributes:
    modules: the modules by path.
    rules: how many modules each rule picked.
    hidden: how many modules each rule matches that an earlier rule picked.
    autocast: `mpjax.autocast` was called, whose arguments take the dtype of what they meet.
    scaled: a loss was multiplied by a loss scale.
  """

  def __init__(self) -> None:
    self.autocast = self.scaled = False
    self.modules: dict[str, AuditedModule] = {}
    self.rules: dict[Rule, int] = {}
    self.hidden: dict[Rule, int] = {}

  def note_autocast(self) -> None:
    self.autocast = True

  def note_scaled(self) -> None:
    self.scaled = True

  def note(self, path: str, module: AuditedModule) -> None:
    if path not in self.modules and module.rule is not None:
      self.rules[module.rule] = self.rules.get(module.rule, 0) + 1
      for rule in module.hidden:
        self.rules.setdefault(rule, 0)
        self.hidden[rule] = self.hidden.get(rule, 0) + 1
    self.modules[path] = module

  def note_rules(self, rules: Iterable[Rule]) -> None:
    """Notes rules that the user gave, whether they pick a module or not."""
    for rule in rules:
      self.rules.setdefault(rule, 0)


AUDIT = jax.make_user_context(None)
"""The record of the audit that traces in this thread; None outside of one."""


P = ParamSpec("P")
R = TypeVar("R")

SCOPE = "mpjax.full_precision"
"""The named scope by which autocast knows the region."""


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Returns `fn` as a region that neither autocast nor a policy enters.

  Under `mpjax.autocast` everything inside runs in the dtypes in which it is written. Under a policy
  the modules called inside run without it, and float16 and bfloat16 arguments come in as float32.
  A policy or an autocast that is given inside does not begin either: `full_precision(view)(x)` and
  `full_precision(autocast(f))(x)` run as the model and `f` do. The results are float32, and their
  consumers choose their own dtypes. It does what PyTorch's
  `custom_fwd(cast_inputs=torch.float32)` is for.

  NNX modules and variables among the arguments are passed as they are, and so are containers that
  hold nothing in 16 bits: what `fn` writes to them stays.

  Args:
    fn: any function of trees of arrays.

  Returns:
    A function with the signature of `fn`.

  Raises:
    MpjaxTypeError: `fn` is a Linen model without variables.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> @mpjax.full_precision
  ... def precise(x, w):
  ...   return x @ w
  >>> fn = mpjax.autocast(lambda x, w: precise(jnp.tanh(x @ w), w))
  >>> jaxpr = jax.make_jaxpr(fn)(jnp.ones((2, 2)), jnp.ones((2, 2)))
  >>> [str(e.outvars[0].aval.dtype) for e in jaxpr.eqns if e.primitive.name == "dot_general"]
  ['bfloat16', 'float32']
  """
  check_no_linen_model(fn, "mpjax.full_precision(fn)")
  call: Callable[..., R] = fn

  @functools.wraps(fn)
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    around = ACTIVE.value
    positional, named = (args, kwargs)
    if around is not None and around.on:
      positional = tuple(map_arrays(half_to_float32, x) for x in args)
      named = {name: map_arrays(half_to_float32, x) for name, x in kwargs.items()}
    with jax.named_scope(SCOPE), ACTIVE((around or Active()).outside()):
      return call(*positional, **named)

  return wrapped
