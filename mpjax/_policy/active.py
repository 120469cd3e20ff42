"""The active state while a model runs under a policy, what an audit notes, `full_precision`."""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax

from mpjax._core.frameworks import check_function
from mpjax._core.trees import low_to_float32, map_arrays
from mpjax._core.types import Class, P
from mpjax._policy.policy import Policy
from mpjax._policy.rules import NO_POLICY, ModulePolicy, ModuleRecord, Rule

AUDIT = jax.make_user_context(None)
"""The record of the audit that traces in this thread; None outside of one."""

AUTOCAST = jax.make_user_context(None)
"""The low-precision compute dtype of the `autocast` function that is being traced; None if none."""

EVERY: frozenset[Class] = frozenset({object})
"""In `Active.casting`: modules of all classes are called in their compute dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Active:
  """The active state inside a call. Equal states give equal jaxprs. Linen's has more fields.

  It has few distinct values in a model, since each one costs a trace of every small jitted function
  of `jax.numpy`: neither the module nor its path is part of it.

  Fields:
    around: the policy of the module being called, as the modules inside inherit it.
    entered: a module has been entered: the policy began further out.
    tracing: the call is part of one that is traced and will be rewritten.
    region: what marks the operations of the module being called.
    casting: the classes of modules that raise in float32 and are called in their compute dtype;
      `EVERY` inside of one.
    keeping: names of the classes of modules whose own `dtype` has to reach a kernel.
    keeps_dtypes: no own `dtype` is replaced: the module, or one around it, is of such a class.
    as_python: the paths of modules that run as Python, since they look at values.
    in_region: it is the state inside of `mpjax.full_precision` or `mpjax.low_precision`, where no
      policy is active.
    in_low_precision: it is that of the latter.
    failed: where to note the class of a module that raises.
  """

  around: ModulePolicy = NO_POLICY
  entered: bool = False
  tracing: bool = False
  region: str = ""
  casting: frozenset[Class] = frozenset()
  keeping: frozenset[str] = frozenset()
  keeps_dtypes: bool = False
  as_python: frozenset[str] = frozenset()
  in_region: bool = False
  in_low_precision: bool = False
  failed: list[Class] | None = dataclasses.field(default=None, compare=False)
  token: "ScopeToken | None" = dataclasses.field(default=None, compare=False)

  def __hash__(self) -> int:
    return hash(self.region)  # A hash of every field takes longer.


NUMBERS = 1024
"""How many active states have a number. A function is traced again in a state that lost its own."""


class _Number(int):
  # An active state, as JAX compares it: equal states have one number. JAX looks for a compiled
  # function in a table of C++, without a lock. Python code that compares or hashes there lets
  # another thread change the table, and the process crashes: int has none.
  state: Active


class _ActiveState:
  """The active state of each thread; a `with` block of a call sets it."""

  # The one mechanism JAX has for a value that is part of every jit cache key.
  _number = jax.make_user_context(None)

  @property
  def value(self) -> Active | None:
    return getattr(self._number.value, "state", None)

  def __call__(self, state: Active | None) -> contextlib.AbstractContextManager[None]:
    if state is None:
      return self._number(None)
    rest: dict[str, Any] = {f.name: None for f in dataclasses.fields(state) if not f.compare}
    number = _Number(_number_of(dataclasses.replace(state, **rest)))
    number.state = state
    return self._number(number)


_numbers = itertools.count()
# One that is forgotten is never given again.
_number_of = functools.lru_cache(maxsize=NUMBERS)(lambda *_: next(_numbers))

ACTIVE = _ActiveState()
"""The active state of this thread, an `Active`; None outside of every model under a policy."""


def in_region() -> bool:
  return ACTIVE.value is not None and ACTIVE.value.in_region


@dataclasses.dataclass(eq=False)
class ScopeToken:
  """A scope that a user has entered, in one thread, and may leave in any order."""

  before: Active | None  # the state that it found
  opened: contextlib.ExitStack  # what to close with it
  reached: ModuleRecord | None = None  # the modules that run under it; None if it has no effect
  has_inner: bool = False  # whether another scope was entered inside
  left: bool = False
  thread: int = dataclasses.field(default_factory=threading.get_ident)


class AuditedModule(NamedTuple):
  """A module that was called under a policy, which overrules its `own_dtype`: `ModulePolicy`."""

  name: str
  policy: Policy | None
  rule: Rule | None
  own_dtype: str | None
  is_norm: bool = False
  hidden: tuple[Rule, ...] = ()


class AuditRecord:
  """What is noted while a function is traced for an audit.

  It is equal to nothing but itself, so that every jitted function is traced again, with its marks.

  Attributes:
    modules: the modules by path.
    rules: how many modules each rule picked; `hidden` those that an earlier rule picked instead.
    uses: "autocast", whose arguments take the dtype of what they meet, and "loss scale".
  """

  def __init__(self) -> None:
    self.uses: set[str] = set()
    self.modules: dict[str, AuditedModule] = {}
    self.rules, self.hidden = Counter[Rule](), Counter[Rule]()

  def note(self, path: str, module: AuditedModule) -> None:
    if path not in self.modules and module.rule is not None:
      self.rules[module.rule] += 1
      self.hidden.update(module.hidden)
      self.note_rules(module.hidden)
    self.modules[path] = module

  def note_rules(self, rules: Iterable[Rule]) -> None:
    """Notes rules that the user gave, whether they pick a module or not."""
    self.rules.update(dict.fromkeys(rules, 0))


R = TypeVar("R")

SCOPE = "mpjax.full_precision"
"""The named scope by which autocast knows the region."""


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Returns `fn` as a region that neither autocast nor a policy enters.

  Everything inside runs in the dtypes in which it is written, also where a policy or an autocast is
  given inside. Under a policy float16 and bfloat16 arguments come in as float32. The results are
  float32, and their consumers choose their own dtypes.

  Args:
    fn: any function of trees of arrays. NNX modules and variables among its arguments are passed as
      they are, and so are containers that hold nothing in 16 bits: what is written to them stays.

  Returns:
    A function with the signature of `fn`.

  Raises:
    MpjaxTypeError: `fn` is no function, or a Linen model without variables.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> @mpjax.full_precision
  ... def precise(x, w):
  ...   return x @ w
  >>> jaxpr = jax.make_jaxpr(mpjax.autocast(precise))(jnp.ones((2, 2)), jnp.ones((2, 2)))
  >>> [eqn.primitive.name for eqn in jaxpr.eqns]
  ['dot_general']
  """
  check_function(fn, "mpjax.full_precision(fn)", "Pass it: mpjax.full_precision(jnp.matmul)(x, w).")

  @functools.wraps(fn)
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    around, call = ACTIVE.value or Active(in_region=True), (args, kwargs)
    if around.in_low_precision or not around.in_region:
      call, around = map_arrays(low_to_float32, call), type(around)(in_region=True)
    with jax.named_scope(SCOPE), ACTIVE(around):
      return fn(*call[0], **call[1])

  return wrapped
