"""What computes what in a jaxpr: calls are inlined, loops and branches are entered.

Nothing of mpjax is used here.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from tests import programs

WIDTHS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}

CASTS = ("convert_element_type", "reduce_precision")

IDENTITIES = ("optimization_barrier", "first_order", "copy", "name", "layout_constraint", "tie")
"""Operations that return their operand."""

MOVES = (
  *("reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "rev", "concatenate", "gather"),
  *("dynamic_slice", "pad", "split", "expand_dims", "stop_gradient", "stack", "unstack", "tile"),
  *("branch", "slice of loop", "stack of loop"),
)
"""Operations that place elements without changing them."""

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")

_OPAQUE = ("custom_linear_solve", *programs.COMBINING)
"""Operations whose jaxprs are part of what they compute."""


@dataclasses.dataclass(eq=False, repr=False)
class Value:
  """One result of an operation, an argument, a constant or a literal."""

  name: str  # of the primitive; else what it is
  operands: list["Value"]
  aval: Any
  params: dict[str, Any]
  number: int = 0  # which of the results it is
  consumers: list["Value"] = dataclasses.field(default_factory=list)

  def __repr__(self) -> str:
    return f"{self.name} {self.aval.str_short()}"

  @property
  def dtype(self) -> str:
    return str(self.aval.dtype)

  @property
  def is_floating(self) -> bool:
    return self.dtype in WIDTHS

  @property
  def is_matmul(self) -> bool:
    """Whether it is a sum of products that has axes to share an operand among."""
    if self.name != "dot_general":
      return self.name in MATMULS
    contracted, batch = self.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in self.operands]
    free = [r - len(c) - len(b) for r, c, b in zip(ranks, contracted, batch, strict=True)]
    return len(contracted[0]) > 0 and any(free)

  @property
  def width(self) -> int:
    """The bits of the narrowest floating number that takes part in it."""
    taking_part = [v for v in (self, *self.operands) if v.name != "literal"]
    return min((WIDTHS.get(v.dtype, 64) for v in taking_part), default=64)

  @property
  def moves(self) -> bool:
    return self.name in (*CASTS, *IDENTITIES, *MOVES)


@dataclasses.dataclass
class Flow:
  """The values of a jaxpr in the order in which they are computed."""

  values: list[Value]
  arguments: list[Value]
  constants: list[Value]
  outputs: list[Value]

  def matmuls(self) -> list[Value]:
    """Returns the matmuls of floating numbers."""
    return [v for v in self.values if v.is_matmul and v.operands[0].is_floating]

  def live(self) -> list[Value]:
    """Returns the values that an output needs."""
    found = behind(self.outputs, lambda _: True)
    return [v for v in self.values if v in found]


def flow(program: ClosedJaxpr) -> Flow:
  """Returns what computes what in a program."""
  reader = _Reader()
  jaxpr = program.jaxpr
  constants = [reader.add("constant", [], v.aval) for v in jaxpr.constvars]
  arguments = [reader.add("argument", [], v.aval) for v in jaxpr.invars]
  outputs = reader.read(jaxpr, [*constants, *arguments])
  for value in reader.values:
    for operand in value.operands:
      operand.consumers.append(value)
  return Flow(reader.values, arguments, constants, outputs)


def behind(values: Iterable[Value], passes: Callable[[Value], bool]) -> set[Value]:
  """Returns the values and what computes them, as far back as `passes` says."""
  return _reached(values, lambda v: v.operands if passes(v) else ())


def ahead(values: Iterable[Value], passes: Callable[[Value], bool]) -> set[Value]:
  """Returns the values and what uses them, as far as `passes` says."""
  return _reached(values, lambda v: [c for c in v.consumers if passes(c)])


def _reached(values: Iterable[Value], following: Callable[[Value], Iterable[Value]]) -> set[Value]:
  found, left = set[Value](), list(values)
  while left:
    value = left.pop()
    if value not in found:
      found.add(value)
      left += following(value)
  return found


class _Reader:
  """Turns jaxprs into values."""

  def __init__(self) -> None:
    self.values: list[Value] = []

  def add(self, name: str, operands: Sequence[Value], aval: Any, params: Any = None) -> Value:
    self.values.append(Value(name, list(operands), aval, params or {}))
    return self.values[-1]

  def read(self, jaxpr: Any, operands: Sequence[Value]) -> list[Value]:
    """Adds the values of a jaxpr, and returns those of its results."""
    jaxpr, env = getattr(jaxpr, "jaxpr", jaxpr), {}
    # A ClosedJaxpr inside of a program has its constants as first variables.
    env.update(zip([*jaxpr.constvars, *jaxpr.invars], operands, strict=True))

    def atom(v: Any) -> Value:
      return self.add("literal", [], v.aval) if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
      env.update(zip(eqn.outvars, self.equation(eqn, [*map(atom, eqn.invars)]), strict=True))
    return [atom(v) for v in jaxpr.outvars]

  def equation(self, eqn: Any, operands: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    if name in _LOOPS:
      return _LOOPS[name](self, eqn, operands)
    inner = [] if name in _OPAQUE else [*programs.inner_jaxprs(eqn.params)]
    if inner:
      return self.closed(inner[0], operands)
    results = [self.add(name, operands, v.aval, eqn.params) for v in eqn.outvars]
    for number, value in enumerate(results):
      value.number = number
      if name == "optimization_barrier":  # Each result is one operand.
        value.operands = [operands[number]]
    return results

  def closed(self, jaxpr: Any, operands: Sequence[Value]) -> list[Value]:
    consts = [self.add("constant", [], jax.typeof(c)) for c in getattr(jaxpr, "consts", ())]
    return self.read(jaxpr, [*consts, *operands])

  def scan(self, eqn: Any, operands: list[Value]) -> list[Value]:
    first, count = programs.parts_of_scan(eqn)
    body = eqn.params["jaxpr"]
    inside = [v.aval for v in body.jaxpr.invars]
    carry = [
      self.add("carry", [v], a) for v, a in zip(operands[first:], inside[first:], strict=True)
    ]
    for row in carry[count:]:
      row.name = "slice of loop"
    results = self.closed(body, [*operands[:first], *carry])
    for state, result in zip(carry[:count], results[:count], strict=True):
      state.operands.append(result)
    named = ["carry"] * count + ["stack of loop"] * (len(results) - count)
    outs = zip(named, results, eqn.outvars, strict=True)
    return [self.add(name, [result], v.aval) for name, result, v in outs]

  def loop(self, eqn: Any, operands: list[Value]) -> list[Value]:
    tests, first = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    state = operands[tests + first :]
    carry = [self.add("carry", [v], v.aval) for v in state]
    self.closed(eqn.params["cond_jaxpr"], [*operands[:tests], *carry])
    results = self.closed(eqn.params["body_jaxpr"], [*operands[tests : tests + first], *carry])
    for value, result in zip(carry, results, strict=True):
      value.operands.append(result)
    return [self.add("carry", [v], out.aval) for v, out in zip(carry, eqn.outvars, strict=True)]

  def cond(self, eqn: Any, operands: list[Value]) -> list[Value]:
    each = [self.closed(branch, operands[1:]) for branch in eqn.params["branches"]]
    joined = zip(*each, strict=True)
    return [self.add("branch", vs, out.aval) for vs, out in zip(joined, eqn.outvars, strict=True)]


_LOOPS: dict[str, Callable[..., list[Value]]] = {
  "scan": _Reader.scan,
  "while": _Reader.loop,
  "cond": _Reader.cond,
}


# The same value in two programs.


def keys(found: Flow) -> dict[Value, Any]:
  """Returns for each value how it is computed from the arguments, whatever the dtypes.

  Two programs may be compared by these: casts are left out.
  """
  of: dict[Value, Any] = {}
  for place, value in enumerate(found.arguments):
    of[value] = ("argument", place)
  for value in found.values:
    if value not in of:
      of[value] = _key(value, of)
  return of


def _key(value: Value, of: dict[Value, Any]) -> Any:
  if value.name in (*CASTS, *IDENTITIES) and value.is_floating and value.operands[0].is_floating:
    return of[value.operands[0]]
  if value.name == "literal":
    return ("literal", value.aval.shape)
  params = {k: v for k, v in value.params.items() if k not in _OF_DTYPES}
  # The result of a loop's body is computed later than its carry.
  operands = tuple(of[v] for v in value.operands if v in of)
  key = (value.name, value.number, str(sorted(params.items())), value.aval.shape, operands)
  # A number instead of a tree that doubles with each use.
  return _KEYS.setdefault(key, len(_KEYS))


_KEYS: dict[Any, int] = {}
"""A number for each way to compute a value, in common for all programs."""

_OF_DTYPES = (
  *("preferred_element_type", "out_sharding", "dtype", "new_dtype", "weak_type", "sharding"),
  *("jaxpr", "const_lengths", "jaxprs", "fill_value"),
)


def widths(found: Flow) -> dict[Any, int]:
  """Returns the bits in which each value is computed, by its key."""
  bits: dict[Any, int] = collections.defaultdict(int)
  for value, key in keys(found).items():
    # A move may be written twice, in float32 and in low precision.
    if not value.name.startswith(("literal", "argument", "constant")) and value.name not in CASTS:
      bits[key] = max(bits[key], value.width)
  return bits


def computed_width(value: Value) -> int:
  """Returns the bits that are left of a value at its end: casts and moves are followed back."""
  path = behind([value], lambda v: v.moves)
  return min(v.width for v in path if v.is_floating)


def operations(found: Flow) -> collections.Counter[Any]:
  """Returns each operation that an output needs with its types, calls inlined, and how often."""
  return collections.Counter(
    (v.name, *(str(o.aval) for o in v.operands), str(v.aval))
    for v in found.live()
    if v.name not in ("argument", "constant", "literal")
  )


# What a value is.

NUMBER, PARAMETER, INPUT, ACTIVATION = range(4)


def kinds(found: Flow, inputs: Iterable[Value]) -> dict[Value, int]:
  """Returns what each value of a rewritten program is, given which arguments are inputs."""
  of = dict.fromkeys(found.values, NUMBER)
  of |= dict.fromkeys([*found.arguments, *found.constants], PARAMETER)
  of |= dict.fromkeys(inputs, INPUT)
  given = {v for v in found.values if v.name in ("argument", "constant", "literal")}
  before = None
  while before != of:  # A loop passes its results on to its next iteration.
    before = dict(of)
    of |= {v: _kind(v, of) for v in found.values if v not in given}
  return of


def _kind(value: Value, of: dict[Value, int]) -> int:
  operands = value.operands
  if not value.is_floating or not operands:
    return NUMBER
  if not any(v.is_floating for v in operands):
    return NUMBER if _is_random_or_mask(operands) else INPUT
  floats = [of[v] for v in operands if v.is_floating]
  if value.is_matmul:
    learned = PARAMETER in floats or ACTIVATION in floats
    return ACTIVATION if learned else max(floats)
  return max(floats)


def _is_random_or_mask(operands: Sequence[Value]) -> bool:
  return any(v.dtype == "bool" or v.dtype.startswith("uint") for v in operands)


# Evaluation.


def evaluate(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
  """Evaluates a program operation by operation, so that no compiler joins two of them."""
  return _evaluate(program, args)


def _evaluate(program: Any, args: Sequence[Any]) -> list[Any]:
  jaxpr = getattr(program, "jaxpr", program)
  env = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
  env.update(zip(jaxpr.invars, args, strict=True))

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]

  for eqn in jaxpr.eqns:
    results = _results(eqn, [read(atom) for atom in eqn.invars])
    env.update(zip(eqn.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _results(eqn: Any, operands: list[Any]) -> Sequence[Any]:
  name = eqn.primitive.name
  if name in _EVALUATED:
    return _EVALUATED[name](eqn, operands)
  inner = [] if name in _OPAQUE else [*programs.inner_jaxprs(eqn.params)]
  if inner:
    return _evaluate(inner[0], operands)
  results = eqn.primitive.bind(*operands, **eqn.params)
  return results if eqn.primitive.multiple_results else [results]


def _scan(eqn: Any, operands: list[Any]) -> list[Any]:
  first, count = programs.parts_of_scan(eqn)
  state, rows = operands[first : first + count], operands[first + count :]
  steps = range(eqn.params["length"])
  stacked = []
  for i in reversed(steps) if eqn.params["reverse"] else steps:
    new = _evaluate(eqn.params["jaxpr"], [*operands[:first], *state, *(row[i] for row in rows)])
    state = new[:count]
    stacked.append(new[count:])
  if eqn.params["reverse"]:
    stacked.reverse()
  return [*state, *(jnp.stack(column) for column in zip(*stacked, strict=True))]


def _while(eqn: Any, operands: list[Any]) -> list[Any]:
  tests, first = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
  state = operands[tests + first :]
  while np.asarray(_evaluate(eqn.params["cond_jaxpr"], [*operands[:tests], *state])[0]):
    state = _evaluate(eqn.params["body_jaxpr"], [*operands[tests : tests + first], *state])
  return state


def _cond(eqn: Any, operands: list[Any]) -> list[Any]:
  chosen = min(max(int(operands[0]), 0), len(eqn.params["branches"]) - 1)
  return _evaluate(eqn.params["branches"][chosen], operands[1:])


_EVALUATED = {"scan": _scan, "while": _while, "cond": _cond}


def is_bias(value: Value) -> bool:
  """Whether at most one axis of what a value was before it was broadcast is longer than 1."""
  source = behind([value], lambda v: v.name in (*CASTS, "broadcast_in_dim", "reshape"))
  return any(sum(n > 1 for n in v.aval.shape) <= 1 for v in source)
