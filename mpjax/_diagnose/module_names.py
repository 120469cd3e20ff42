"""Jaxprs of functions whose operations are in modules, whichever library the modules are of."""

from typing import NamedTuple

from jax.extend.core import ClosedJaxpr

from mpjax._core.types import Function, PyTree
from mpjax._diagnose.call import Call
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.locations import MODULE
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule
from mpjax.linen import policy_scope
from mpjax.nnx._with_policy import views_of


def with_models_under(fn: Function, policy: Policy | None, rules: tuple[Rule, ...]) -> Function:
  """Returns a function whose models of Flax run under a policy, as `mpjax.with_policy` has them."""

  def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
    # NNX models in the arguments become views. Linen models are reached by the scope.
    args, kwargs = views_of((args, kwargs), policy, rules)
    # A rule may be for another of several models.
    with policy_scope(policy, rules, unmatched="ignore"):
      return fn(*args, **kwargs)

  return run


def with_models(fn: Function, policy: Policy | None) -> Function:
  """Returns a function whose models run under a policy: it may be an NNX model itself."""
  # The function itself may be a model, and models may be among its arguments.
  return with_models_under(views_of(fn, policy, ()), policy, ())


class InModules(NamedTuple):
  """A function whose operations are in modules, and its jaxpr."""

  function: Function
  program: ClosedJaxpr


def in_models(fn: Function, call: Call) -> InModules | None:
  """Returns a function whose operations are in the modules of its models; None without models."""
  # Try the function as it is: a model that it puts under a policy itself takes no other one.
  for candidate in (fn, with_models(fn, None)):
    program = call.traced(candidate).program
    # A policy marks the modules of a model of Flax. A policy of None changes nothing else.
    if any(scope.startswith(MODULE) for x in Graph(program).operations for scope in x.where.scopes):
      return InModules(candidate, program)
  return None
