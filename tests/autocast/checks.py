"""What must hold of a program that went through autocast, read from its jaxpr.

Of mpjax only the graph of a jaxpr is used here, and the operations that belong in float32 are
written down from what the papers say, not taken from the lists under test. A function returns what
is wrong, as text that names it; an empty list is a pass.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from mpjax._jaxpr.graph import Graph, Operation, Value
from tests import programs

FLOAT32 = frozenset(
  {
    # exponentials and logarithms: a softmax, a loss, a gate that is written out; powers of a norm
    *("exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt"),
    # sums and products of many numbers
    *("reduce_sum", "reduce_prod", "reduce_window_sum", "scatter-add", "scatter-mul"),
    *("cumsum", "cumprod", "cumlogsumexp", "psum", "psum_invariant", "reduce_scatter"),
    # functions that a series or a sum of exponentials computes
    *("digamma", "erf_inv", "igamma", "lgamma", "polygamma", "regularized_incomplete_beta", "zeta"),
  }
)


def halves(program: ClosedJaxpr, half: str) -> list[str]:
  """Returns the matmuls that are not in low precision wholly."""
  # A matmul without a contracted axis is a multiplication, as in the gradient of `row @ kernel`.
  return [
    f"{p.primitive} of {', '.join(p.operands)}"
    for p in programs.products(program)
    if set(p.dtypes) != {half} and "'dimension_numbers', (((), ())" not in p.layout
  ]


def halves_of_float32(program: ClosedJaxpr, primitives: frozenset[str] = FLOAT32) -> list[str]:
  """Returns the operations of the float32 list that have a half operand."""
  return [
    f"{eqn.primitive.name} of {var.aval.str_short()}"
    for eqn, _ in programs.equations(program)
    if eqn.primitive.name in primitives
    for var in eqn.invars
    if str(var.aval.dtype) in programs.HALF
  ]


SUMS = frozenset(
  {
    *("reduce_sum", "reduce_window_sum", "cumsum", "cumlogsumexp", "scatter-add", "scatter-sub"),
    *("psum", "psum_invariant", "reduce_scatter"),
  }
)


def sums(program: ClosedJaxpr) -> list[str]:
  """Returns the sums of many half numbers, those that the steps of a scan add up among them."""
  found = []
  for eqn, _ in programs.equations(program):
    if eqn.primitive.name in SUMS:
      aval = eqn.invars[0].aval
      axes = eqn.params["axes"] if eqn.primitive.name == "reduce_sum" else ()
      is_one = axes and all(aval.shape[axis] == 1 for axis in axes)
      if str(aval.dtype) in programs.HALF and not is_one:
        found.append(f"{eqn.primitive.name} of {aval.str_short()}")
  for operation in Graph(program).operations:
    if operation.joins == "carry" and operation.results[0].is_low:
      # It is carried only to add something to it that does not depend on it.
      carried, last = operation.results[0], operation.operands[1].made_by
      if last is not None and last.name == "add_any" and carried.consumers == [last]:
        found.append(f"sum over the steps of a scan of {carried.aval.str_short()}")
  return found


# Casts.


def _has_no_matmul(value: Value, known: dict[Value, bool]) -> bool:
  """Whether a value is computed from arguments and constants alone, without a matmul."""
  if value not in known:
    by = value.made_by
    if by is None:
      known[value] = True
    elif by.joins:
      known[value] = by.joins == "enter" and _has_no_matmul(by.operands[0], known)
    else:
      of_operands = [_has_no_matmul(operand, known) for operand in by.operands]
      known[value] = by.name not in programs.PRODUCTS and all(of_operands)
  return known[value]


def _homes(jaxpr: Jaxpr, scan: int = 0) -> dict[int, tuple[int, int]]:
  """Returns the jaxpr and the innermost scan that each equation is in."""
  found = {}
  for eqn in jaxpr.eqns:
    found[id(eqn)] = id(jaxpr), scan
    if eqn.primitive.name not in programs.COMBINING:
      inside = id(eqn) if eqn.primitive.name == "scan" else scan
      for inner in programs.inner_jaxprs(eqn.params):
        found |= _homes(_open(inner), inside)
  return found


def wasted_casts(program: ClosedJaxpr) -> list[str]:
  """Returns casts to float32 that are rounded again, and casts to half made twice."""
  # A parameter or an input may be cast at each use: its gradients are added in float32. Of casts
  # to float32 that are the same a compiler makes one, and a norm has two by hand: one for its
  # statistics and one for the difference, so that two cotangents are rounded. Where both share one,
  # XLA finds another grouping of the sums in a norm's backward pass: a ResNet-50 moves 1.04 times
  # the bytes.
  homes, known = _homes(program.jaxpr), dict[Value, bool]()
  chains: dict[Value, tuple[str, ...]] = {}
  same: dict[tuple[Value, tuple[str, ...], int], set[int]] = collections.defaultdict(set)
  for operation in Graph(program).operations:
    source, result = operation.operands[:1], operation.results[0]
    if operation.joins == "enter" and source[0] in chains:
      chains[result] = chains[source[0]]
    elif _is_cast(operation):
      jaxpr, scan = homes[id(operation.eqn)]
      before = chains.get(source[0], ())
      by = source[0].made_by
      # A half value enters a scan in float32, and is half inside: its gradients are added so.
      if before[1:] == ("float32",) and by and _is_cast(by) and homes[id(by.eqn)][1] != scan:
        before = ()
      chains[result] = (*(before or (str(source[0].dtype),)), str(result.dtype))
      if not _has_no_matmul(source[0], known) and result.dtype != jnp.float32:
        same[source[0], chains[result], jaxpr].add(id(operation.eqn))
  texts = [" -> ".join(chain) for chain in chains.values() if chain[-1] in chain[:-1]]
  back = [f"there and back: {text}" for text in texts if not text.endswith("float32")]
  # A function that is called casts for itself: it is rewritten and compiled once for all calls.
  counts = [(len(eqns), " -> ".join(chain)) for (_, chain, _), eqns in same.items()]
  return back + [f"{count} times {text}" for count, text in counts if count > 1]


def _is_cast(operation: Operation) -> bool:
  values = (*operation.operands, *operation.results)
  return (
    operation.name == "convert_element_type"
    and all(value.is_floating for value in values)
    and values[0].dtype != values[1].dtype
  )


def _open(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
  return program.jaxpr if isinstance(program, ClosedJaxpr) else program


# Types and traces.


def changed_outputs(fun: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> list[str]:
  """Returns the outputs whose shape or dtype is not what it is without autocast."""
  ours, theirs = jax.eval_shape(fun, *args), jax.eval_shape(plain, *args)
  if jax.tree.structure(ours) != jax.tree.structure(theirs):
    return [f"{jax.tree.structure(ours)} in place of {jax.tree.structure(theirs)}"]
  pairs = zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
  return [
    f"{jax.tree_util.keystr(path)}: {got.dtype}{got.shape} in place of {want.dtype}{want.shape}"
    for (path, got), want in pairs
    if (got.dtype, got.shape) != (want.dtype, want.shape)
  ]


class Counted:
  """A function that counts how often it is traced (or run by Python)."""

  def __init__(self, fun: Callable[..., Any]) -> None:
    self.fun = fun
    self.calls = 0

  def __call__(self, *args: Any) -> Any:
    self.calls += 1
    return self.fun(*args)
