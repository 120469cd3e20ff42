"""Settings of the rewriter."""

import dataclasses

from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule

Scope = tuple[str, ...]
"""The names of `jax.named_scope`s, from the outermost to the innermost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The settings of a rewriting; part of the cache key of the rewritten jaxpr.

  In a call of `modules` the parameters are known. Other arguments and closed-over arrays are
  inputs. In an `autocast` function they are parameters.
  """

  policy: Policy  # if no rule and no mark of a module gives another one
  ops: OpLists
  rules: tuple[Rule, ...] = ()
  in_derivative: bool = False  # in a derivative rule, where no matmul runs in float8
  modules: bool = False
