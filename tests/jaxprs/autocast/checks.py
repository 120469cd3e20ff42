"""What must hold of a program that went through autocast, read from its jaxpr.

Nothing of mpjax is used here, and the operations that belong in float32 are written down from what
the issue and the papers say, not taken from the lists under test. A function returns what is wrong,
as text that names it; an empty list is a pass.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

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
  """Returns the products that are not in half wholly."""
  return [
    f"{p.primitive} of {', '.join(p.operands)}"
    for p in programs.products(program)
    if set(p.dtypes) != {half}
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
  return found + [text for jaxpr in _scans(program.jaxpr) for text in _running_sums(*jaxpr)]


def _scans(jaxpr: Jaxpr) -> Iterator[tuple[Jaxpr, int, int]]:
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "scan":
      yield _open(eqn.params["jaxpr"]), *programs.parts_of_scan(eqn)
    if eqn.primitive.name not in programs.COMBINING:
      for inner in programs.inner_jaxprs(eqn.params):
        yield from _scans(_open(inner))


def _running_sums(body: Jaxpr, first: int, count: int) -> Iterator[str]:
  """Yields what a scan carries only to add something to it that does not depend on it."""
  made = {var: eqn for eqn in body.eqns for var in eqn.outvars}
  for carried, result in zip(body.invars[first : first + count], body.outvars, strict=False):
    if str(getattr(carried.aval, "dtype", None)) not in programs.HALF:
      continue
    last = None if isinstance(result, Literal) else made.get(result)
    if last is not None and last.primitive.name == "add_any" and carried in last.invars:
      uses = [eqn for eqn in body.eqns if carried in eqn.invars]
      if uses == [last]:
        yield f"sum over the steps of a scan of {carried.aval.str_short()}"


# Casts. A value that crosses into a function called by `jit` is the same value inside. But such a
# function is a program of its own, rewritten and compiled once for all who call it: what it casts
# for itself is not made twice because a caller does so too.

_ONE_TO_ONE = {
  "jit": "jaxpr",
  "closed_call": "call_jaxpr",
  "custom_jvp_call": "call_jaxpr",
  "custom_vjp_call": "call_jaxpr",
  "checkpoint": "jaxpr",
  "remat2": "jaxpr",
  "shard_map": "jaxpr",
}


@dataclasses.dataclass(eq=False)
class Value:
  """A value of a program.

  Fields:
    given: whether it was made of inputs and constants alone, by moving numbers: a parameter.
    dtypes: if it is a cast, those from that of the first value on.
  """

  given: bool
  dtypes: tuple[str, ...] = ()


class Cast(NamedTuple):
  """One cast between floating types: of what, to what, and in which body."""

  source: Value
  result: Value
  body: object


_MOVING = frozenset(
  {
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice", "gather"),
    *("concatenate", "rev", "split", "expand_dims", "pvary", "copy", "stop_gradient", "pad"),
  }
)


def casts(program: ClosedJaxpr) -> list[Cast]:
  """Returns the casts of a program between floating types, once each, however often they run."""
  found: list[Cast] = []
  _collect(program.jaxpr, [Value(given=True) for _ in program.jaxpr.invars], found)
  return found


def _collect(jaxpr: Jaxpr, args: list[Value], found: list[Cast]) -> list[Value]:
  """Adds the casts of one body to `found`, and returns its results."""
  known: dict[Any, Value] = {var: Value(given=True) for var in jaxpr.constvars}
  known.update(zip(jaxpr.invars, args, strict=True))
  body = object()

  def value(atom: Any) -> Value:
    return Value(given=True) if isinstance(atom, Literal) else known[atom]

  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    operands = [value(atom) for atom in eqn.invars]
    inner = [] if name in programs.COMBINING else list(programs.inner_jaxprs(eqn.params))
    made = name in _MOVING and all(x.given for x in operands)
    results = [Value(given=made) for _ in eqn.outvars]
    if name in _ONE_TO_ONE:
      sub = _open(eqn.params[_ONE_TO_ONE[name]])
      results = _collect(sub, operands, found)
    elif inner:
      for program, inputs in _bodies(eqn, operands):
        _collect(program, inputs, found)
    elif name == "convert_element_type" and _changes_float(eqn):
      (source,), (result,) = operands, results
      before = source.dtypes or (str(eqn.invars[0].aval.dtype),)
      result.dtypes = (*before, str(eqn.outvars[0].aval.dtype))
      found.append(Cast(source, result, body))
    known.update(zip(eqn.outvars, results, strict=True))
  return [value(atom) for atom in jaxpr.outvars]


def _bodies(eqn: Any, operands: list[Value]) -> Iterator[tuple[Jaxpr, list[Value]]]:
  """Yields the bodies of a loop or a branch, with what comes in; what is carried is new there."""
  name, params = eqn.primitive.name, eqn.params
  if name == "scan":
    first, count = programs.parts_of_scan(eqn)
    end = first + count
    carry = [Value(given=False) for _ in operands[first:end]]
    consts = [_read_by_all(x) for x in operands[:first]]
    yield _open(params["jaxpr"]), [*consts, *carry, *operands[end:]]
  elif name == "while":
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    carry = [Value(given=False) for _ in operands[of_test + of_body :]]
    yield _open(params["cond_jaxpr"]), [*operands[:of_test], *carry]
    yield _open(params["body_jaxpr"]), [*operands[of_test : of_test + of_body], *carry]
  elif name == "cond":
    for branch in params["branches"]:
      yield _open(branch), operands[1:]
  else:
    for program in programs.inner_jaxprs(params):
      yield _open(program), [Value(given=False) for _ in _open(program).invars]


def _read_by_all(source: Value) -> Value:
  """A half value enters a scan in float32, and is half inside: its gradients are added so."""
  widened = len(source.dtypes) == 2 and source.dtypes[1] == "float32"
  return Value(given=False) if widened else source


def _open(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
  return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def _changes_float(eqn: Any) -> bool:
  old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
  return old != new and jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)


def wasted_casts(program: ClosedJaxpr) -> list[str]:
  """Returns casts to float32 that are rounded again, and casts to half made twice.

  A parameter may be cast at each of its uses: then its gradients are added in float32. Of casts to
  float32 that are the same a compiler makes one, and a norm has two by hand: one for its statistics
  and one for the difference, so that two cotangents are rounded. Where both share one, XLA finds
  another grouping of the sums in a norm's backward pass: a ResNet-50 moves 1.04 times the bytes.
  """
  found = casts(program)
  chains = [c.result.dtypes for c in found if c.result.dtypes[-1] != "float32"]
  back = [f"there and back: {' -> '.join(chain)}" for chain in chains if chain[-1] in chain[:-1]]
  same = collections.Counter((c.source, c.result.dtypes, c.body) for c in found)
  twice = [
    f"{count} times {' -> '.join(chain)}"
    for (source, chain, _), count in same.items()
    if count > 1 and not source.given and chain[-1] != "float32"
  ]
  return back + twice


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
