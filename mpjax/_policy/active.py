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
from mpjax._core.types import Class, DType, P
from mpjax._core.wrappers import wraps
from mpjax._policy.policy import Policy
from mpjax._policy.rules import NO_POLICY, ModulePolicy, ModuleRecord, Rule

AUDIT = jax.make_user_context(None)
"""The `AuditRecord` of the audit that traces in this thread; None outside of an audit."""

AUTOCAST = jax.make_user_context(None)
"""The low-precision compute dtype of the `autocast` function that is being traced; None if none."""

EVERY: frozenset[Class] = frozenset({object})
"""A value of `Active.casting`: modules of all classes are called in their compute dtype."""


class Region(NamedTuple):
  """Some code, by its policy. In a jaxpr, a mark names the region: see `_autocast/scopes.py`."""

  policy: Policy | None  # None if its operations stay as they are
  called_in: DType | None = None  # without a policy, the dtype in which the code is called


@dataclasses.dataclass(frozen=True, kw_only=True)
class Active:
  """The active state inside a call. Equal states give equal jaxprs. Linen's has more fields.

  Each distinct state costs a trace of every small jitted function of `jax.numpy`. A state
  therefore omits the called module and its path.
  """

  # The policy of the module that is called. The modules inside inherit it.
  around: ModulePolicy = NO_POLICY
  entered: bool = False  # whether a module has been entered, so that the policy began further out
  tracing: bool = False  # whether the call is traced, and will be rewritten
  region: Region | None = None  # the region of the module that is called
  # Classes of modules that raise in float32, and are called in their compute dtype. Inside such a
  # module it is `EVERY`.
  casting: frozenset[Class] = frozenset()
  # Names of the classes of modules whose own `dtype` must reach a kernel.
  keeping: frozenset[str] = frozenset()
  # Whether the module, or one around it, is of a class in `keeping`. Then no own `dtype` is
  # replaced.
  keeps_dtypes: bool = False
  as_python: frozenset[str] = frozenset()  # paths of modules that run as Python: they read values
  # Whether the call is inside `mpjax.full_precision` or `mpjax.low_precision`, where no policy is
  # active.
  outside_policies: bool = False
  in_low_precision: bool = False  # whether it is inside `mpjax.low_precision`
  # These two are mutable, so they take no part in comparisons.
  failed: list[Class] | None = dataclasses.field(default=None, compare=False)  # see `attempts`
  # The scope of `mpjax.policy_scope` that was entered last, or None.
  token: "ScopeToken | None" = dataclasses.field(default=None, compare=False)

  def __hash__(self) -> int:
    return hash(self.region)  # It is faster than a hash of all fields.


NUMBERS = 1024
"""The number of active states that keep their `_Number`. A state without one is traced again."""


class _Number(int):
  """The number of an active state. Equal states have the same."""

  # JAX has it in the keys of its cache of compiled functions, a C++ table without a lock. If Python
  # code compared or hashed keys, another thread could change the table meanwhile, and the process
  # would crash. An int is compared and hashed in C.
  state: Active


class _ActiveState:
  """The active state of each thread, which a `with` block sets."""

  # A user context is the only value of a user that JAX puts into every key of the cache of jit.
  _number = jax.make_user_context(None)

  @property
  def value(self) -> Active | None:
    """The active state of this thread, or None."""
    return getattr(self._number.value, "state", None)

  def __call__(self, state: Active | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a state is active."""
    if state is None:
      return self._number(None)
    # States that differ in `failed` or `token` alone have one number. The cache of numbers must not
    # keep these objects alive.
    rest: dict[str, Any] = {f.name: None for f in dataclasses.fields(state) if not f.compare}
    number = _Number(_number_of(dataclasses.replace(state, **rest)))
    number.state = state
    return self._number(number)


_numbers = itertools.count()
# A counter, so that a number that the cache has dropped is never given to another state.
_number_of = functools.lru_cache(maxsize=NUMBERS)(lambda *_: next(_numbers))

ACTIVE = _ActiveState()
"""The active state of this thread, an `Active`; None outside of every model under a policy."""


def outside_policies() -> bool:
  """Whether the caller is inside `full_precision` or `low_precision`, where no policy is active."""
  return ACTIVE.value is not None and ACTIVE.value.outside_policies


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

  name: str  # its class
  policy: Policy | None
  rule: Rule | None  # the rule that gives the policy
  own_dtype: str | None  # its attribute `dtype`
  is_norm: bool = False  # whether it is a norm of Flax
  hidden: tuple[Rule, ...] = ()  # later rules that match it too


class AuditRecord:
  """Notes of a function that is traced for an audit.

  A record equals only itself, so every jitted function is traced again, with its marks.

  Attributes:
    modules: the modules by path.
    rules: how many modules each rule picked.
    hidden: how many modules each rule matched that an earlier rule picked.
    uses: "autocast" and "loss scale", if the function uses them.
    shows_roundings: whether each rounding is an operation of the jaxpr. A number that low
      precision rounds has a cast, and an operand that a recipe quantises a `format_rounding`.
      Otherwise the rewriter writes the rounded number, and the steps of the recipe.
  """

  def __init__(self, *, shows_roundings: bool = False) -> None:
    self.shows_roundings = shows_roundings
    self.uses: set[str] = set()
    self.modules: dict[str, AuditedModule] = {}
    self.rules, self.hidden = Counter[Rule](), Counter[Rule]()

  def note(self, path: str, module: AuditedModule) -> None:
    """Notes a module that is called. Only its first call counts for the rules."""
    if path not in self.modules and module.rule is not None:
      self.rules[module.rule] += 1
      self.hidden.update(module.hidden)
      self.note_rules(module.hidden)
    self.modules[path] = module

  def note_rules(self, rules: Iterable[Rule]) -> None:
    """Notes rules that the user gave, whether they pick a module or not."""
    self.rules.update(dict.fromkeys(rules, 0))


R = TypeVar("R")

FULL_PRECISION = "mpjax.full_precision"
"""The named scope that marks the region for autocast."""


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Keep autocast and policies out of a function.

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

  @wraps(fn)
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    around = ACTIVE.value or Active(outside_policies=True)
    # Without a policy, or inside another `full_precision`, arguments stay in their dtypes.
    if around.in_low_precision or not around.outside_policies:
      args, kwargs = map_arrays(low_to_float32, (args, kwargs))
      # The class of the state is that of Linen in a call of a Linen model.
      around = type(around)(outside_policies=True)
    with jax.named_scope(FULL_PRECISION), ACTIVE(around):
      return fn(*args, **kwargs)

  return wrapped
