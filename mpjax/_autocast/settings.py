"""What was asked of a rewriting."""

import dataclasses

from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule

Scope = tuple[str, ...]
"""The names of `jax.named_scope`s, the outermost first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What was asked for; part of the key under which a rewritten jaxpr is kept.

  In a call of `modules` the parameters are known. All other arguments, and the arrays that the call
  closes over, are inputs. In an `autocast` function they are parameters.
  """

  policy: Policy  # where no rule and no mark of a module says something else
  ops: OpLists
  rules: tuple[Rule, ...] = ()
  in_derivative: bool = False  # of a rule, linear in some arguments: no matmul is in float8
  modules: bool = False
