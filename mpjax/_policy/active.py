"""The state that is active while a model runs under a policy; audit records; `full_precision`."""

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
"""The `AuditRecord` of the audit that traces in this thread; None outside of an audit."""

AUTOCAST = jax.make_user_context(None)
"""The low-precision compute dtype of the `autocast` function that is being traced; None if none."""

EVERY: frozenset[Class] = frozenset({object})
"""A value of `Active.casting`: modules of all classes are called in their compute dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Active:
  """The active state inside a call. Equal states give equal jaxprs. Linen's has more fields.

  Each distinct state costs a trace of every small jitted function of `jax.numpy`. A state
  therefore omits the called module and its path.

  Fields:
    around: the policy of the module that is called, as the modules inside inherit it.
    entered: whether a module has been entered, so that the policy began further out.
    tracing: whether the call is traced, and will be rewritten.
    region: the mark on the operations of the module that is called.
    casting: classes of modules that raise in float32, and are called in their compute dtype. Inside
      such a module it is `EVERY`.
    keeping: names of the classes of modules whose own `dtype` has to reach a kernel.
    keeps_dtypes: whether the module, or one around it, is of a class in `keeping`. Then no own
      `dtype` is replaced.
    as_python: the paths of modules that run as Python, because they look at values.
    in_region: whether the call is inside `mpjax.full_precision` or `mpjax.low_precision`, where no
      policy is active.
    in_low_precision: whether it is inside `mpjax.low_precision`.
    failed: where to note the class of a module that raises.
    token: the scope of `mpjax.policy_scope` that was entered last, or None.
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
    return hash(self.region)  # It is faster than a hash of all fields.


NUMBERS = 1024
"""How many active states have a number. In a state that has lost its number, functions are traced
again."""


class _Number(int):
  """The number of an active state. Equal states have the same."""

  # JAX has it in the keys of its cache of compiled functions, a table of C++ that has no lock. If
  # Python code compared or hashed keys, another thread could change the table meanwhile, and the
  # process would crash. An int is compared and hashed in C.
  state: Active


class _ActiveState:
  """The active state of each thread, which a `with` block sets."""

  # JAX has a user context in every key of the cache of jit, and no other value of a user.
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
# A number that was dropped from the cache is not used again.
_number_of = functools.lru_cache(maxsize=NUMBERS)(lambda *_: next(_numbers))

ACTIVE = _ActiveState()
"""The active state of this thread, an `Active`; None outside of every model under a policy."""


def in_region() -> bool:
  return ACTIVE.value is not None and ACTIVE.value.in_region


@dataclasses.dataclass(eq=False)
class ScopeToken:
  """A scope that a thread has entered. Scopes may be left in any order."""

  before: Active | None  # the state that was active before
  opened: contextlib.ExitStack  # contexts to close with the scope
  reached: ModuleRecord | None = None  # modules that run in it; None if it has no effect
  has_inner: bool = False  # whether another scope was entered inside
  left: bool = False
  thread: int = dataclasses.field(default_factory=threading.get_ident)


class AuditedModule(NamedTuple):
  """A module that was called under a policy, see `ModulePolicy`. The policy beats `own_dtype`."""

  name: str
  policy: Policy | None
  rule: Rule | None
  own_dtype: str | None
  is_norm: bool = False
  hidden: tuple[Rule, ...] = ()


class AuditRecord:
  """Notes of a function that is traced for an audit.

  A record equals only itself, so every jitted function is traced again, with its marks.

  Attributes:
    modules: the modules by path.
    rules: how many modules each rule picked.
    hidden: how many modules each rule matched that an earlier rule picked.
    uses: "autocast" and "loss scale", if the function uses them.
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
"""The named scope that marks the region for autocast."""


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Returns `fn` as a region that neither autocast nor a policy enters.

  Operations inside run in the dtypes in which they are written. A policy or an autocast inside has
  no effect. Under a policy, float16 and bfloat16 arguments are cast to float32. The results are
  float32, and their consumers choose their own dtypes.

  Args:
    fn: any function of trees of arrays. NNX modules and variables are passed as they are, and so
      are containers without 16-bit arrays. So `fn` can write to them.

  Returns:
    A function with the signature of `fn`.

  Raises:
    MpjaxTypeError: `fn` is not a function, or is a Linen model without variables.

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
