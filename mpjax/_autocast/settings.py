"""Settings of the rewriter."""

import dataclasses
from typing import Any, TypeAlias

from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule

Scope: TypeAlias = tuple[str, ...]
"""The names of `jax.named_scope`s, from the outermost to the innermost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The settings of a rewriting; part of the cache key of the rewritten jaxpr."""

  policy: Policy  # if no rule and no mark of a module gives another one
  ops: OpLists  # the list of each primitive
  rules: tuple[Rule, ...] = ()  # of `autocast`, for named scopes; modules have marks instead
  in_derivative: bool = False  # in a derivative rule, where no matmul runs in float8
  # The parameter that `jax_default_matmul_precision` gives a matmul; None if it is unset.
  default_precision: Any = None
  # Whether modules of a framework are called. Their parameters are known, so other arguments and
  # closed-over arrays are inputs. In an `autocast` function these are parameters.
  modules: bool = False
