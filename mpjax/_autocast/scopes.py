"""Settings of the rewriter, marks in the named scopes of equations, and the policy of each scope.

A mark is a named scope that mpjax sets. It names the policy of a region of a jaxpr, or the end of a
layer or a policy. It passes through `jit`, `scan`, `grad` and `vmap` with the operations. Rewriting
a jaxpr removes it.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core.primitives import reduce_precision_p

from mpjax._autocast.precision import Asked
from mpjax._core.trees import mapped
from mpjax._core.types import FLOAT32, FLOATS, HALVES, DType, PyTree
from mpjax._jaxpr.compat import NameStack, scopes_of
from mpjax._jaxpr.locations import PREFIX, path_of
from mpjax._jaxpr.op_lists import OpLists
from mpjax._jaxpr.steps import body_of
from mpjax._policy.active import FULL_PRECISION, Region
from mpjax._policy.policy import Policy
from mpjax._policy.rules import (
  ModuleRecord,
  PolicyConfig,
  Rule,
  first_match,
  low_dtype_of,
  with_enclosing,
)

Scope: TypeAlias = tuple[str, ...]
"""The names of `jax.named_scope`s, from the outermost to the innermost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The settings of a rewriting; part of the cache key of the rewritten jaxpr."""

  region: Region  # of operations to which no mark of a module and no rule gives another one
  ops: OpLists  # the list of each primitive
  rules: tuple[Rule, ...] = ()  # of `autocast`, for named scopes; modules have marks instead
  in_derivative: bool = False  # in a derivative rule, where no matmul runs in float8
  # The parameter that `jax_default_matmul_precision` gives a matmul; None if it is unset.
  default_precision: Any = None
  # Whether modules of a framework are called. Their parameters are known, so other arguments and
  # closed-over arrays are inputs. In an `autocast` function these are parameters.
  modules: bool = False
  # Whether the new equations have the marks of their regions. An audit reads these, and so does a
  # rewriting around, which would otherwise write the equations by the policy there.
  keeps_marks: bool = False
  shows_roundings: bool = False  # whether each rounding is an operation, see `AuditRecord`


class ScopedSettings(NamedTuple):
  """The settings of a rewriting, and the scope around the jaxpr that is rewritten."""

  settings: Settings
  scope: Scope = ()


REGION = PREFIX + "region="
POLICY_ENDS, LAYER_ENDS = PREFIX + "policy-ends=", PREFIX + "layer-ends="
AS_GIVEN, TABLE = PREFIX + "as-given", PREFIX + "table"
OWN_DTYPE = PREFIX + "own-dtype="
"""Marks. `locations.py` has more of them.

  REGION: the region of a module, see `mark_of`.
  POLICY_ENDS: the result of a policy, and its dtype.
  LAYER_ENDS: the result of a Flax layer with a `dtype`, and the compute dtype.
  AS_GIVEN: a layer that returns the dtype of its argument, such as dropout.
  TABLE: a module whose own matmuls are in no format.
  OWN_DTYPE: the class of a module whose own low-precision `dtype` was replaced by float32.
"""

_AS_IT_IS = "as-it-is"
_AS_IT_IS_IN = f"{_AS_IT_IS}-in="


@functools.lru_cache(maxsize=1024)
def mark_of(region: Region) -> str:
  """Returns the mark of a region, which `region_in` reads."""
  if region.called_in is not None:
    return REGION + _AS_IT_IS_IN + region.called_in.name
  return REGION + (_AS_IT_IS if region.policy is None else str(region.policy))


@functools.lru_cache(maxsize=1024)
def region_in(text: str) -> Region:
  """Returns the region that a mark names; `text` is the mark behind `REGION`."""
  if text.startswith(_AS_IT_IS_IN):
    return Region(None, np.dtype(text.removeprefix(_AS_IT_IS_IN)))
  return Region(None if text == _AS_IT_IS else Policy.parse(text))


def end_of_policy(tree: PyTree, dtype: Any) -> PyTree:
  """Marks the results of a policy, which the rewriter casts to `dtype`."""

  def leaf(x: Any) -> Any:
    # The rewriter leaves float64 alone, so it is cast here.
    if isinstance(x, jax.Array) and x.dtype == "float64":
      return x.astype(dtype)
    return _marked(x, POLICY_ENDS + dtype.name)

  return mapped(leaf, tree)


def end_of_layer(tree: PyTree, dtype: str) -> PyTree:
  """Marks the results of a layer, which the rewriter rounds to `dtype`."""

  def leaf(x: Any) -> Any:
    # A layer that keeps its own `dtype` has rounded its result.
    is_low = isinstance(x, jax.Array) and x.dtype in HALVES
    return x if is_low else _marked(x, LAYER_ENDS + dtype)

  return mapped(leaf, tree)


def _marked(x: Any, name: str) -> Any:
  """Returns a float32 array behind an operation that marks a cast in the trace."""
  if not isinstance(x, jax.Array) or x.dtype not in FLOATS:
    return x
  # The mark needs an operation that JAX keeps in the jaxpr and that changes no value. A
  # `reduce_precision` to the 8 and 23 bits of float32 rounds nothing.
  with jax.named_scope(name):
    wide = x if x.dtype == FLOAT32 else x.astype(FLOAT32)
    return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=23)


def scope_of(stack: NameStack) -> Scope:
  """Returns the scopes in a name stack, without the names of transformations."""
  # Names of transformations, such as "jvp" and "transpose", say nothing about the place in a model.
  names = (name for name, is_transform in scopes_of(stack) if not is_transform)
  return tuple(part for name in names for part in name.split("/") if part)


class End(NamedTuple):
  """The end of a policy or of a layer, which `_marked` marks."""

  dtype: DType
  of_policy: bool


class ScopePolicy(NamedTuple):
  """A scope, with the policy that marks and rules give it."""

  scope: Scope  # the names
  region: Region  # its policy, which is None if operations run as they were traced
  low_dtype: DType | None  # the compute dtype of the policy, if it is low precision
  as_written: bool  # whether the user asked for float32 here, so that results are inputs
  asked: Asked  # the precision of matmuls for which the code names none
  end: End | None  # if the innermost name is its mark
  # The names that matter for inner jaxprs. Other names would split caches.
  inside: Scope


@functools.lru_cache(maxsize=4096)
def policy_at(scoped: ScopedSettings) -> ScopePolicy:
  """Returns the policy of a scope."""
  settings, scope = scoped
  mark = next((name for name in reversed(scope) if name.startswith(REGION)), None)
  region = settings.region
  if mark is not None:
    region = region_in(mark.removeprefix(REGION))
  else:
    # From the whole scope outwards, so that the innermost scope that matches a rule decides.
    for depth in range(len(scope), -1, -1) if settings.rules else ():
      rule = first_match(settings.rules, None, path_of(scope[:depth]))
      if rule is not None:
        region = Region(rule.policy)
        break
  full = FULL_PRECISION in scope  # This also overrules the policy of an inner module.
  around = region.policy
  low_dtype = low_dtype_of(around)
  # GPUs and TPUs multiply float32 in TF32 or bfloat16 by default. A low-precision policy keeps a
  # matmul in float32 to protect it, so it asks for the highest precision, unlike a float32 policy.
  # Its own `precision` also applies inside `full_precision`; that of a float32 policy does not.
  named = around if low_dtype is not None or not full else None
  precision = None if named is None else named.precision
  asked = Asked(precision, settings.default_precision, exact=low_dtype is not None)
  # A rule with None exempts a module, and `autocast` has no regions. There the user asked for
  # float32. A module with a float32 policy does not count.
  is_exempt = mark is None or around is None
  # `_marked` opens the scope directly around its operation, so its mark is the innermost name.
  last, end = scope[-1] if scope else "", None
  if last.startswith((POLICY_ENDS, LAYER_ENDS)):
    end = End(np.dtype(last.partition("=")[2]), last.startswith(POLICY_ENDS))
  # Rules match all names of a scope. Without rules only the marks decide, and inner jaxprs in
  # several modules of one policy share their rewriting.
  marks = tuple(name for name in (TABLE, AS_GIVEN, FULL_PRECISION) if name in scope)
  if settings.rules:
    inside = scope
  else:
    inside = marks if mark is None else (*marks, mark)
  return ScopePolicy(
    scope=scope,
    region=Region(None) if full else region,
    low_dtype=None if full else low_dtype,
    as_written=full or (low_dtype is None and is_exempt),
    asked=asked,
    end=end,
    inside=inside,
  )


@dataclasses.dataclass(eq=False)
class ScopePolicies:
  """The policy of each equation of a jaxpr, by its scope below the scope of the jaxpr."""

  scoped: ScopedSettings
  # By the id of a name stack. The stack is kept as well, so that no other one gets its id.
  _by_stack: dict[int, tuple[NameStack, ScopePolicy]] = dataclasses.field(default_factory=dict)

  def __call__(self, eqn: JaxprEqn) -> ScopePolicy:
    """Returns the scope of an equation with its policy."""
    stack = eqn.source_info.name_stack
    if id(stack) not in self._by_stack:
      below = self.scoped._replace(scope=self.scoped.scope + scope_of(stack))
      self._by_stack[id(stack)] = stack, policy_at(below)
    return self._by_stack[id(stack)][1]

  def end(self, eqn: JaxprEqn) -> End | None:
    """Returns the end that an equation marks; None if it is no mark."""
    return self(eqn).end if eqn.primitive is reduce_precision_p else None

  def inside(self, eqn: JaxprEqn) -> ScopedSettings:
    """Returns the settings and the scope for the jaxprs inside an equation."""
    return self.scoped._replace(scope=self(eqn).inside)


def check_rules_match(program: ClosedJaxpr, rules: tuple[Rule, ...], where: str) -> None:
  """Raises UnmatchedRuleError if the path of a rule matches no scope of a function."""
  record = ModuleRecord(PolicyConfig(policy=None, rules=rules, unmatched="raise"))
  # A rule may also match a scope that holds only other scopes, such as "Net" around "Net/up".
  record.note_paths(with_enclosing(step.location.path for step in body_of(program).every_step()))
  record.check(f"of {where}", 1, kind="jax.named_scope")
