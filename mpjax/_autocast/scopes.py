"""The named scopes of an equation: marks of ours, and what they and the rules say.

A mark says in which region of a jaxpr a policy applies, or in which dtype a result leaves one. It
goes through `jit`, `scan`, `grad` and `vmap` with the operations; rewriting a jaxpr takes it out.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.values import FLOATS, Scope, Settings
from mpjax._core.trees import mapped
from mpjax._core.types import FLOAT32, HALVES, DType, PyTree
from mpjax._jaxpr.compat import NameStack, scopes_of
from mpjax._jaxpr.locations import PREFIX, path_of
from mpjax._jaxpr.steps import body_of
from mpjax._policy.active import SCOPE as FULL_PRECISION
from mpjax._policy.policy import Policy
from mpjax._policy.rules import ModuleRecord, PolicyConfig, Rule, around, first_match

REGION, OUTPUT, REST = (PREFIX + name for name in ("region=", "output=", "rest="))
AS_GIVEN, TABLE = (PREFIX + name for name in ("as-given", "table"))
"""The marks, beside `FLOAT8`.

  REGION: a module with a policy, as text; `AS_IT_IS` if a rule leaves it so.
  OUTPUT, REST: the result of a module whose policy ends, and of a layer that rounds it; the dtype.
  AS_GIVEN: a layer that returns the dtype that it is given, such as a dropout.
  TABLE: a module whose own matmuls are not in float8. No dtype depends on it otherwise.
"""

AS_IT_IS = "as-it-is"

NOT_IN = {name: f"{PREFIX}not-{name}=" for name in ("float8", "low", "float32")}
"""Why a matmul is not in a precision, in the jaxpr that `mpjax.audit` traces."""


@functools.lru_cache(maxsize=1024)
def region_of(policy: Policy | None) -> str:
  """Returns the text that marks the region of a module with a policy; None leaves it as it is."""
  return AS_IT_IS if policy is None else str(policy)


@functools.lru_cache(maxsize=1024)
def policy_of(region: str) -> Policy | None:
  """Returns the policy that marks a region."""
  return None if region == AS_IT_IS else Policy.parse(region)


def leaving(tree: PyTree, dtype: Any) -> PyTree:
  """Returns the results of a module where its policy ends: in `dtype` for all that read them."""
  # One in float64 stays as it is until here.
  wide = lambda x: isinstance(x, jax.Array) and x.dtype == "float64"  # noqa: E731
  return mapped(lambda x: x.astype(dtype) if wide(x) else _marked(x, OUTPUT + dtype.name), tree)


def at_rest(tree: PyTree, dtype: str) -> PyTree:
  """Returns the results of a layer, rounded to `dtype`, but for what leaves in float32 then."""
  return mapped(lambda x: _marked(x, REST + dtype), tree)


def _marked(x: Any, name: str) -> Any:
  """Returns an array, still float32, behind an operation that represents a cast in the trace."""
  if not isinstance(x, jax.Array) or x.dtype not in FLOATS:
    return x
  with jax.named_scope(name):  # Bits of float32, which round nothing.
    return jax.lax.reduce_precision(x.astype(FLOAT32), exponent_bits=8, mantissa_bits=23)


def names_of(stack: NameStack) -> Scope:
  """Returns the scopes in a name stack, without the names of transformations."""
  names = (name for name, is_transform in scopes_of(stack) if not is_transform)
  return tuple(part for name in names for part in name.split("/") if part)


class Place(NamedTuple):
  """What the marks in a scope and the rules say."""

  scope: Scope
  policy: Policy | None  # the one that applies; None where all stays as it was traced
  half: DType | None  # its compute dtype, if that is a low-precision one
  as_written: bool  # all is as the user wrote it: what is computed there is data
  output: DType | None  # the dtype that such a mark says, if it is the innermost scope
  rest: DType | None  # likewise
  inside: Scope  # what counts for jaxprs inside of an equation; all of it would split caches


@functools.lru_cache(maxsize=4096)
def place_at(scope: Scope, settings: Settings) -> Place:
  """Returns what applies in a scope."""
  full = FULL_PRECISION in scope  # Also inside of a module that has a policy of its own.
  region = next((name for name in reversed(scope) if name.startswith(REGION)), None)
  if full:
    policy = None
  elif region is not None:  # The innermost mark of a policy decides.
    policy = policy_of(region.removeprefix(REGION))
  else:  # Else the innermost scope that a rule matches, and there the first of the rules.
    paths = (path_of(scope[:depth]) for depth in range(len(scope), -1, -1) if settings.rules)
    rules = (first_match(settings.rules, None, path) for path in paths)
    policy = next((rule.policy for rule in rules if rule is not None), settings.policy)
  half = policy.compute_dtype if policy is not None and policy.compute_dtype in HALVES else None
  as_written = full or (half is None and region in (None, REGION + AS_IT_IS))
  own = tuple(name for name in (TABLE, AS_GIVEN, FULL_PRECISION) if name in scope)
  last = scope[-1] if scope else ""
  output, rest = (
    np.dtype(last.removeprefix(mark)) if last.startswith(mark) else None for mark in (OUTPUT, REST)
  )
  inside = scope if settings.rules else own if region is None else (*own, region)
  return Place(scope, policy, half, as_written, output, rest, inside)


def check_rules_match(program: ClosedJaxpr, rules: tuple[Rule, ...], where: str) -> None:
  """Raises UnmatchedRuleError if the path of a rule is that of no scope of a function."""
  record = ModuleRecord(PolicyConfig(policy=None, rules=rules, unmatched="raise"))
  record.note_paths(around(step.location.path for step in body_of(program).every_step()))
  record.check(f"of {where}", 1, kind="jax.named_scope")
