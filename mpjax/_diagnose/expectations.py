"""Find out where a function asks for low precision, and why it does not elsewhere."""

import collections
from typing import NamedTuple

from mpjax._autocast.precision import asked_precision
from mpjax._autocast.scopes import REGION, region_in
from mpjax._core.errors import MpjaxValueError
from mpjax._core.types import DType, is_low_precision
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import MODULE, NOT_IN, RECIPE
from mpjax._jaxpr.primitives import AS_TRACED
from mpjax._policy.active import FULL_PRECISION
from mpjax._policy.audit_record import AuditRecord
from mpjax._policy.dtypes import written
from mpjax._policy.policy import Policy


class Expected(NamedTuple):
  """The low-precision dtype that is asked for; None, with the reason, for float32."""

  dtype: DType | None
  reason: str = ""


class Expectations:
  """The low-precision dtype that is asked for at each operation of a graph.

  Under policies and autocast, the marks of the operations name it. In a function without marks it
  is the low-precision dtype that the function uses most.

  Attributes:
    marked: whether a policy or autocast is active anywhere in the graph.
    neutral: the kinds of causes (`Leak.kind`) that take the dtype of the other operands, and so
      never make a value float32.
  """

  def __init__(self, graph: Graph, record: AuditRecord) -> None:
    self._record = record
    # One marked operation suffices: then unmarked operations are outside of the policy on purpose.
    self.marked = any(each.where.marked(REGION) is not None for each in graph.operations)
    self.neutral: tuple[str, ...] = ()
    if self.marked:
      # A policy names the dtype, and its models do not contain the optimizer.
      self._used = None
      self._optimizer = set[Operation]()
      # Autocast treats the arguments of a function as parameters. A model's arguments are inputs.
      is_autocast = "autocast" in record.uses and not record.modules
      kinds = ("parameter", "number", "filled")
      self.neutral = (*kinds, "argument") if is_autocast else kinds
    else:
      # Without a policy, guess the dtype from use: that of the most elements among operands.
      elements = collections.Counter[DType | None]()
      for v in (v for operation in graph.operations for v in operation.operands if v.is_low):
        elements[v.dtype] += v.size
      self._used = max(elements, key=elements.__getitem__, default=None)
      # Optimizers in float32 are not a mistake.
      self._optimizer = _after_gradients(graph)

  def of(self, operation: Operation) -> Expected:
    """Returns the low-precision dtype that is asked for at an operation, or why none is."""
    region = operation.where.marked(REGION)
    policy = None if region is None else region_in(region).policy
    reason = self._why_float32(operation, region, policy)
    if reason:
      return Expected(None, reason)
    return Expected(self._used if policy is None else policy.compute_dtype)

  def of_kernel(self, operation: Operation) -> DType | None:
    """Returns the low-precision dtype that is asked for at a kernel; None for float32."""
    region = operation.where.marked(REGION)
    # `mpjax.low_precision` and rules with `rewrite=False` run code as written, in that dtype.
    called_in = None if region is None else region_in(region).called_in
    return called_in or self.of(operation).dtype

  def _why_float32(self, operation: Operation, region: str | None, policy: Policy | None) -> str:
    """Returns why float32 is asked for at an operation; "" if it is not.

    Args:
      operation: the operation.
      region: the mark of the policy around it; None outside of every policy.
      policy: that policy; None for a region that runs as it is, and outside.
    """
    # The code at an operation overrules the policies around it.
    if FULL_PRECISION in operation.where.scopes:
      return "mpjax.full_precision"
    is_matmul = operation.facts.flops is not None
    # A recipe computes scales and casts in float32 around its matmul.
    if operation.where.marked(RECIPE) is not None and not is_matmul:
      return "the scaling of a format"
    # An operation may be nested inside of the equation that runs as traced, as in a linear solve.
    steps = (step for step in operation.step.enclosing() if step.holds in AS_TRACED)
    as_traced = next((step.eqn.primitive.name for step in steps), "")
    # A policy does not rewrite such an equation. Without a policy, the user chose its dtype.
    if as_traced and self.marked:
      return f"{as_traced}, which runs as written"
    not_low = operation.where.marked(NOT_IN["low"])
    # The mark holds the reason why the rewriter chose float32.
    if not_low is not None:
      return not_low
    # Under a policy with a precision, that is the precision of the policy.
    precision = asked_precision(operation.eqn.params.get("precision"))
    if precision and (policy is None or policy.precision is None):
      return f'precision="{precision}"'
    if operation in self._optimizer:
      return "the optimizer"
    if not self.marked and self._used is None:
      return "no low precision anywhere"
    if self.marked and region is None:
      return "outside of every policy"
    if self.marked and policy is None:
      return "a rule leaves it as it is"
    # A rule may give a module a float32 policy, perhaps with a precision.
    if policy is not None and not is_low_precision(policy.compute_dtype):
      asked = "" if policy.precision is None else f", precision={written(policy.precision)}"
      return f"a {policy.compute_dtype} policy{asked}"
    # The statistics of a norm are float32. Norms are known by the class of the module, which the
    # record keeps.
    module = self._record.modules.get(operation.where.marked(MODULE) or "")
    is_in_norm = module is not None and module.is_norm and not is_matmul
    return "a norm" if is_in_norm else ""


def check_float32(graph: Graph, where: str, kind: str) -> None:
  """Raises if a function has low precision already: compared with itself, it would have no error.

  It is traced without its gradient, since a derivative rule of its own may round.

  Args:
    graph: the operations of the function.
    where: the call.
    kind: a word for the function, such as "loss".
  """
  for value in lows_of(graph):
    path = "its arguments" if value.made_by is None else value.made_by.where.path
    raise MpjaxValueError(
      where,
      expected=f"a {kind} in float32, with arguments in float32, to compare low precision with",
      got=f"{value.dtype} in {path or 'it'}",
      fix=f"Pass the {kind} of the plain model: without with_policy or autocast, without dtype= "
      "and param_dtype=, and its parameters and data as x.astype(jnp.float32).",
    )


def lows_of(graph: Graph) -> list[Value]:
  """Returns the arguments and results of a function in low precision."""
  results = (v for operation in graph.operations for v in operation.results)
  return [v for v in (*graph.arguments, *results) if v.is_low]


def _after_gradients(graph: Graph) -> set[Operation]:
  """Returns the operations outside of backward passes that use gradients: an optimizer."""
  gradients: set[Value] = set()
  after: set[Operation] = set()
  for operation in graph.operations:
    # What uses a gradient and is in no backward pass is an optimizer.
    is_forward = operation.where.direction == "forward"
    uses_gradients = any(v in gradients for v in operation.operands)
    # A value that is computed from gradients, such as momentum, counts as one as well.
    if not is_forward or uses_gradients:
      gradients.update(operation.results)
    if is_forward and uses_gradients:
      after.add(operation)
  return after
