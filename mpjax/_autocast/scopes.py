"""The named scopes of an equation: marks of ours, and what they and the rules say.

A mark names the policy of a region of a jaxpr, or the end of a layer or a policy. It passes through
`jit`, `scan`, `grad` and `vmap` with the operations. Rewriting a jaxpr takes it out.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.kinds import FLOATS
from mpjax._autocast.settings import Scope, Settings
from mpjax._core.trees import mapped
from mpjax._core.types import FLOAT32, HALVES, DType, PyTree
from mpjax._jaxpr.compat import NameStack, scopes_of
from mpjax._jaxpr.locations import PREFIX, path_of
from mpjax._jaxpr.steps import body_of
from mpjax._policy.active import SCOPE as FULL_PRECISION
from mpjax._policy.policy import Policy
from mpjax._policy.rules import ModuleRecord, PolicyConfig, Rule, around, first_match

REGION, POLICY_ENDS, LAYER_ENDS = (
  PREFIX + name for name in ("region=", "policy-ends=", "layer-ends=")
)
AS_GIVEN, TABLE = (PREFIX + name for name in ("as-given", "table"))
"""The marks, beside `FLOAT8`.

  REGION: a module with a policy, as text; `AS_IT_IS` if a rule leaves it so.
  POLICY_ENDS: the result of a module where a policy ends, and its dtype.
  LAYER_ENDS: the result of a Flax layer that has a `dtype`, and the compute dtype.
  AS_GIVEN: a layer that returns the dtype that it is given, such as a dropout.
  TABLE: a module whose own matmuls are not in float8. No dtype depends on it otherwise.
"""

AS_IT_IS = "as-it-is"

NOT_IN = {name: f"{PREFIX}not-{name}=" for name in ("float8", "low")}
"""Why a matmul is not in a precision, in the jaxpr that `mpjax.audit` traces."""


@functools.lru_cache(maxsize=1024)
def region_of(policy: Policy | None) -> str:
  """Returns the text that marks the region of a module with a policy; None leaves it as it is."""
  return AS_IT_IS if policy is None else str(policy)


@functools.lru_cache(maxsize=1024)
def policy_of(region: str) -> Policy | None:
  """Returns the policy that marks a region."""
  return None if region == AS_IT_IS else Policy.parse(region)


def end_of_policy(tree: PyTree, dtype: Any) -> PyTree:
  """Returns the results of a module where its policy ends: in `dtype` for all consumers."""

  def leaf(x: Any) -> Any:
    # Float64 is not rewritten, so it is cast here.
    if isinstance(x, jax.Array) and x.dtype == "float64":
      return x.astype(dtype)
    return _marked(x, POLICY_ENDS + dtype.name)

  return mapped(leaf, tree)


def end_of_layer(tree: PyTree, dtype: str) -> PyTree:
  """Returns the results of a layer, rounded to `dtype` unless they leave the policy in float32."""
  return mapped(lambda x: _marked(x, LAYER_ENDS + dtype), tree)


def _marked(x: Any, name: str) -> Any:
  """Returns an array, still float32, behind an operation that stands for a cast in the trace."""
  if not isinstance(x, jax.Array) or x.dtype not in FLOATS:
    return x
  with jax.named_scope(name):  # It has the bits of float32, so it rounds nothing.
    wide = x if x.dtype == FLOAT32 else x.astype(FLOAT32)
    return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=23)


def names_of(stack: NameStack) -> Scope:
  """Returns the scopes in a name stack, without the names of transformations."""
  names = (name for name, is_transform in scopes_of(stack) if not is_transform)
  return tuple(part for name in names for part in name.split("/") if part)


class Place(NamedTuple):
  """What the marks in a scope and the rules say.

  Fields:
    policy: the one that applies; None where all runs as it was traced.
    compute_dtype: that of the policy, if it is a low-precision one.
    as_written: the user asked for float32 here, so results are inputs for what follows.
    as_given: a layer that returns the dtype that it is given: no consumer widens it.
    ends: the dtype that the mark of an end says, if the innermost scope is one.
    ends_policy: that mark is the end of a policy, not of a layer.
    inside: the scope that counts for inner jaxprs; all names of it would split caches.
  """

  scope: Scope
  policy: Policy | None
  compute_dtype: DType | None
  as_written: bool
  as_given: bool
  ends: DType | None
  ends_policy: bool
  inside: Scope


@functools.lru_cache(maxsize=4096)
def place_at(scope: Scope, settings: Settings) -> Place:
  """Returns what applies in a scope."""
  region = next((name for name in reversed(scope) if name.startswith(REGION)), None)
  full = FULL_PRECISION in scope  # Also inside of a module that has a policy of its own.
  policy = None if full else _policy_at(scope, region, settings)
  low = policy is not None and policy.compute_dtype in HALVES
  own = tuple(name for name in (TABLE, AS_GIVEN, FULL_PRECISION) if name in scope)
  ends, ends_policy = _end_at(scope)
  return Place(
    scope=scope,
    policy=policy,
    compute_dtype=policy.compute_dtype if policy is not None and low else None,
    as_written=full or (not low and region in (None, REGION + AS_IT_IS)),
    as_given=AS_GIVEN in scope,
    ends=ends,
    ends_policy=ends_policy,
    inside=scope if settings.rules else own if region is None else (*own, region),
  )


def _policy_at(scope: Scope, region: str | None, settings: Settings) -> Policy | None:
  """Returns the policy of the innermost mark; else of the innermost scope that a rule matches."""
  if region is not None:
    return policy_of(region.removeprefix(REGION))
  for depth in range(len(scope), -1, -1) if settings.rules else ():
    rule = first_match(settings.rules, None, path_of(scope[:depth]))
    if rule is not None:
      return rule.policy
  return settings.policy


def _end_at(scope: Scope) -> tuple[DType | None, bool]:
  """Returns the dtype that the mark of an end says, and whether a policy ends there."""
  last = scope[-1] if scope else ""
  for mark in (POLICY_ENDS, LAYER_ENDS):
    if last.startswith(mark):
      return np.dtype(last.removeprefix(mark)), mark == POLICY_ENDS
  return None, False


def check_rules_match(program: ClosedJaxpr, rules: tuple[Rule, ...], where: str) -> None:
  """Raises UnmatchedRuleError if the path of a rule is that of no scope of a function."""
  record = ModuleRecord(PolicyConfig(policy=None, rules=rules, unmatched="raise"))
  record.note_paths(around(step.location.path for step in body_of(program).every_step()))
  record.check(f"of {where}", 1, kind="jax.named_scope")
