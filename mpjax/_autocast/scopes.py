"""Marks in the named scopes of equations, and the policy of each scope.

A mark is a named scope that mpjax sets. It names the policy of a region of a jaxpr, or the end of a
layer or a policy. It passes through `jit`, `scan`, `grad` and `vmap` with the operations. Rewriting
a jaxpr removes it.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mpjax._autocast.kinds import FLOATS
from mpjax._autocast.precision import Asked
from mpjax._autocast.settings import Scope, Settings
from mpjax._core.trees import mapped
from mpjax._core.types import FLOAT32, HALVES, DType, PyTree
from mpjax._jaxpr.compat import NameStack, scopes_of
from mpjax._jaxpr.locations import PREFIX, path_of
from mpjax._jaxpr.steps import body_of
from mpjax._policy.full_precision import FULL_PRECISION
from mpjax._policy.policy import Policy
from mpjax._policy.rules import ModuleRecord, PolicyConfig, Rule, first_match, with_enclosing

REGION, POLICY_ENDS, LAYER_ENDS = (
  PREFIX + name for name in ("region=", "policy-ends=", "layer-ends=")
)
AS_GIVEN, TABLE = (PREFIX + name for name in ("as-given", "table"))
OWN_DTYPE = PREFIX + "own-dtype="
"""Marks. `locations.py` has more of them.

  REGION: a module and its policy as text, or `AS_IT_IS` if a rule exempts it.
  POLICY_ENDS: the result of a policy, and its dtype.
  LAYER_ENDS: the result of a Flax layer with a `dtype`, and the compute dtype.
  AS_GIVEN: a layer that returns the dtype of its argument, such as dropout.
  TABLE: a module whose own matmuls are in no format.
  OWN_DTYPE: the class of a module whose own low-precision `dtype` was replaced by float32.
"""

AS_IT_IS = "as-it-is"

AS_IT_IS_IN = f"{AS_IT_IS}-in="
"""Begins the text of a region that is called in a dtype and not rewritten."""


@functools.lru_cache(maxsize=1024)
def region_of(policy: Policy | None) -> str:
  """Returns the text that marks the region of a policy; None exempts it."""
  return AS_IT_IS if policy is None else str(policy)


@functools.lru_cache(maxsize=1024)
def policy_of(region: str) -> Policy | None:
  """Returns the policy of the text that marks a region."""
  return None if region.startswith(AS_IT_IS) else Policy.parse(region)


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


class ScopePolicy(NamedTuple):
  """A scope, with the policy that marks and rules give it."""

  scope: Scope  # the names
  policy: Policy | None  # the policy; None if operations run as they were traced
  compute_dtype: DType | None  # the compute dtype of the policy, if it is low precision
  as_written: bool  # whether the user asked for float32 here, so that results are inputs
  as_given: bool  # whether this is a layer such as dropout, which no consumer widens
  asked: Asked  # the precision of matmuls for which the code names none
  ends: DType | None  # the dtype in the mark of an end, if the innermost scope is one
  ends_policy: bool  # whether that mark is the end of a policy, not of a layer
  # The names that matter for inner jaxprs. Other names would split caches.
  inside: Scope


@functools.lru_cache(maxsize=4096)
def policy_at(scope: Scope, settings: Settings) -> ScopePolicy:
  """Returns the policy of a scope."""
  region = next((name for name in reversed(scope) if name.startswith(REGION)), None)
  around = _innermost_policy(scope, region, settings)
  full = FULL_PRECISION in scope  # This also overrules the policy of an inner module.
  policy = None if full else around
  is_mixed = around is not None and around.compute_dtype in HALVES
  low = is_mixed and not full
  # GPUs and TPUs multiply float32 in TF32 or bfloat16 by default. A low-precision policy keeps a
  # matmul in float32 to protect it, so it asks for the highest precision, unlike a float32 policy.
  # Its own `precision` also applies inside `full_precision`; that of a float32 policy does not.
  named = around if is_mixed else policy
  asked = Asked(None if named is None else named.precision, settings.default_precision, is_mixed)
  # A rule with None exempts a module, and `autocast` has no regions. There the user asked for
  # float32. A module with a float32 policy does not count.
  is_exempt = region is None or region.startswith(REGION + AS_IT_IS)
  ends, ends_policy = _end_at(scope)
  # Rules match all names of a scope. Without rules only the marks decide, and inner jaxprs in
  # several modules of one policy share their rewriting.
  marks = tuple(name for name in (TABLE, AS_GIVEN, FULL_PRECISION) if name in scope)
  if settings.rules:
    inside = scope
  elif region is None:
    inside = marks
  else:
    inside = (*marks, region)
  return ScopePolicy(
    scope=scope,
    policy=policy,
    compute_dtype=policy.compute_dtype if policy is not None and low else None,
    as_written=full or (not low and is_exempt),
    as_given=AS_GIVEN in scope,
    asked=asked,
    ends=ends,
    ends_policy=ends_policy,
    inside=inside,
  )


class ScopePolicies:
  """The scope of each equation of a jaxpr, below the scope of the jaxpr."""

  def __init__(self, settings: Settings, scope: Scope) -> None:
    self.settings, self.scope = settings, scope
    self._by_stack: dict[int, tuple[NameStack, ScopePolicy]] = {}

  def __call__(self, eqn: JaxprEqn) -> ScopePolicy:
    """Returns the scope of an equation with its policy."""
    stack = eqn.source_info.name_stack  # It is kept, so its id stays unique.
    if id(stack) not in self._by_stack:
      self._by_stack[id(stack)] = stack, policy_at(self.scope + scope_of(stack), self.settings)
    return self._by_stack[id(stack)][1]


def shown_region(scope_policy: ScopePolicy) -> str:
  """Returns the text of a region, as an audit reads it."""
  innermost = next((name for name in reversed(scope_policy.scope) if name.startswith(REGION)), "")
  text = innermost.removeprefix(REGION)
  # Such a region has no policy, but its dtype is known.
  is_called_in_low = text.startswith(AS_IT_IS_IN) and FULL_PRECISION not in scope_policy.scope
  return text if is_called_in_low else region_of(scope_policy.policy)


def _innermost_policy(scope: Scope, region: str | None, settings: Settings) -> Policy | None:
  """Returns the policy of the innermost mark, or of the innermost scope that matches a rule."""
  if region is not None:
    return policy_of(region.removeprefix(REGION))
  # From the whole scope outwards, so that the innermost scope that matches decides.
  for depth in range(len(scope), -1, -1) if settings.rules else ():
    rule = first_match(settings.rules, None, path_of(scope[:depth]))
    if rule is not None:
      return rule.policy
  return settings.policy


def _end_at(scope: Scope) -> tuple[DType | None, bool]:
  """Returns the dtype in the mark of an end, and whether it is the end of a policy."""
  # `_marked` opens the scope directly around its operation, so the mark is the innermost name.
  last = scope[-1] if scope else ""
  for mark in (POLICY_ENDS, LAYER_ENDS):
    if last.startswith(mark):
      return np.dtype(last.removeprefix(mark)), mark == POLICY_ENDS
  return None, False


def check_rules_match(program: ClosedJaxpr, rules: tuple[Rule, ...], where: str) -> None:
  """Raises UnmatchedRuleError if the path of a rule matches no scope of a function."""
  record = ModuleRecord(PolicyConfig(policy=None, rules=rules, unmatched="raise"))
  # A rule may also match a scope that holds only other scopes, such as "Net" around "Net/up".
  record.note_paths(with_enclosing(step.location.path for step in body_of(program).every_step()))
  record.check(f"of {where}", 1, kind="jax.named_scope")
