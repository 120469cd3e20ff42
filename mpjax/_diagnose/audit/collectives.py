"""Read the collectives of a compiled program, with their bytes and modules.

XLA describes a compiled program only by its text, HLO, which is no stable interface. This module
reads it line by line. It expects what XLA writes for CPUs, GPUs and TPUs:

- A computation starts at the margin with its name and ends in "{". "ENTRY" marks the first one.
- Callees are written before their callers, and an instruction names them after `body=`, `calls=`,
  `to_apply=` or a similar word.
- An instruction is "%name = type operation(%operand, ...)", with `op_name` in its metadata.
- The number of iterations of a loop is `known_trip_count`. Without it, it is assumed to be the
  largest integer of the condition of the loop, since a TPU's loop counts from 0 to that.

A line of another form is skipped. A loop without either number counts as one iteration.
"""

import collections
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from mpjax._diagnose.audit.findings import Finding, summed
from mpjax._jaxpr.graph import Graph

# The margin tells a computation from an instruction, which is indented.
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<computation>[\w.-]+) \(.*\{$")
# A type in parentheses is a tuple, which may contain spaces. Any other type is one word.
_INSTRUCTION = re.compile(
  r"\s+(?:ROOT )?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) (?P<operation>[a-z][\w-]*)"
  r"\((?P<operands>[^)]*)\)"
)
# The name of a dtype is its kind, its bits and, for float8, its form: "f8e4m3fn".
_ARRAY = re.compile(r"\b(?P<kind>pred|[a-z]+)(?P<bits>\d*)(?P<form>\w*)\[(?P<shape>[\d,<=]*)\]")
# The condition of a loop is left out: it computes one bool.
_CALLEES = re.compile(r"(?:body|calls|to_apply|\w+_computations?)=\{?(%[\w.%, -]+)")
_NAME = re.compile(r"%([\w.-]+)")
_CONDITION = re.compile(r"condition=%(?P<computation>[\w.-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")
# JAX writes named scopes, transformations and the primitive into `op_name`, separated by slashes.
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SCOPE = re.compile(r"[^][/().:'\\]+")

_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

_KINDS = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint"}
"""The beginnings of HLO's dtypes, and the names of JAX for them. Others are the same in both."""

_Computations: TypeAlias = dict[str, list[str]]
"""The lines of each computation, by its name, in the order of the text."""


class _Array(NamedTuple):
  """The dtype of an array, as JAX calls it, and its bytes."""

  dtype: str
  nbytes: int


class _Collective(NamedTuple):
  """A collective: its operation, and the arrays that it returns on one device."""

  operation: str
  arrays: Sequence[_Array]


class _Scopes(NamedTuple):
  """The named scopes of an operation, or the parts of a parameter's name, and its module."""

  names: Sequence[str]
  path: str


def compiled_collectives(text: str, graph: Graph) -> tuple[Finding, ...]:
  """Returns the collectives of a compiled program. Those with the most bytes come first.

  Args:
    text: the HLO of the program: `jax.stages.Compiled.as_text()`, or "".
    graph: the graph of the same function, which has the paths of its modules.
  """
  computations, entries = _computations(text)
  runs = _runs(computations, entries)
  modules = _modules(graph)
  # XLA writes callees first. The reversed order begins at the entry, as the program does.
  rows: list[Finding] = []
  for name, lines in reversed(computations.items()):
    for line in lines:
      collective = _collective(line)
      if collective is not None:
        rows += _rows(collective, _module_of(line, modules), runs[name])
  return summed(rows)


def _rows(collective: _Collective, path: str, runs: int) -> Iterator[Finding]:
  """Yields one row for each dtype, since a collective may combine arrays of several dtypes."""
  # XLA's combiner merges small collectives into one with a tuple of results.
  nbytes = collections.Counter[str]()
  for array in collective.arrays:
    nbytes[array.dtype] += array.nbytes
  for dtype, n in nbytes.items():
    yield Finding(path, collective.operation, dtype=dtype, nbytes=n * runs, times=runs)


# Computations, and how often they run.


def _computations(text: str) -> tuple[_Computations, Sequence[str]]:
  """Returns the computations of a text, and the names of those where a program starts."""
  computations: _Computations = {}
  entries: list[str] = []
  lines: list[str] = []
  for line in text.splitlines():
    head = _COMPUTATION.match(line)
    # All lines up to the next head belong to the computation before.
    if head is None:
      lines.append(line)
      continue
    lines = computations.setdefault(head["computation"], [])
    # Only the entry runs without a caller.
    if head["entry"]:
      entries.append(head["computation"])
  return computations, entries


def _runs(computations: _Computations, entries: Iterable[str]) -> collections.Counter[str]:
  """Returns how often each computation runs."""
  runs = collections.Counter(entries)
  # Callers are written after their callees, so the runs of a caller are complete.
  for name, lines in reversed(computations.items()):
    for line in lines:
      for callee in _callees(line):
        runs[callee] += runs[name] * _iterations(line, computations)
  return runs


def _callees(line: str) -> Iterator[str]:
  for names in _CALLEES.findall(line):
    yield from _NAME.findall(names)


def _iterations(line: str, computations: _Computations) -> int:
  """Returns how often a line runs its callees: the iterations of a loop, and 1 for any other."""
  loop = _CONDITION.search(line)
  if loop is None:
    return 1
  # XLA writes the trip count into the line for CPUs and GPUs. A TPU program compares a counter in
  # the condition.
  numbers = _TRIP_COUNT.findall(line) or _INTEGER.findall(
    "\n".join(computations[loop["computation"]])
  )
  return max(1, *map(int, numbers))


# Instructions.


def _collective(line: str) -> _Collective | None:
  """Returns the collective of a line; None if it has none."""
  instruction = _INSTRUCTION.match(line)
  if instruction is None:
    return None
  # XLA splits an asynchronous collective into "-start" and "-done". Count the start only.
  operation = instruction["operation"].removesuffix("-start")
  if operation not in _COLLECTIVES:
    return None
  arrays = [*map(_array, _ARRAY.finditer(instruction["type"]))]
  if operation != instruction["operation"]:
    # The type of most asynchronous collectives has operands, results and tokens, in this order.
    count = instruction["operands"].count("%")
    arrays = arrays[count : 2 * count] or arrays
  return _Collective(operation, arrays)


def _array(array: re.Match[str]) -> _Array:
  """Returns an array of a type in HLO, such as "f8e4m3fn[4,<=2]"."""
  kind, bits, form = array["kind"], array["bits"], array["form"]
  suffix = f"_{form}" if form else ""
  # "<=" marks a bounded dynamic dimension. A scalar has no sizes, and its product is 1.
  dimensions = [int(size.lstrip("<=")) for size in array["shape"].split(",") if size]
  # A bool, "pred", has no bits in its name and takes a byte. Int4 takes half a byte.
  total_bits = math.prod(dimensions) * int(bits or 8)
  return _Array(_KINDS.get(kind, kind) + bits + suffix, (total_bits + 7) // 8)


# Modules.


def _modules(graph: Graph) -> Sequence[_Scopes]:
  """Returns the scopes by which `_module_of` knows the modules of a graph, the longest first."""
  paths = {operation.where.path: operation.where.path for operation in graph.computing()}
  # XLA names the gathering of a parameter after the argument. Its module is the one that uses it.
  readers = [(v.label, v.consumers[0].where.path) for v in graph.arguments if v.consumers]
  # The longest name is the innermost module, so it is tried first.
  modules = [_Scopes(name.split("/"), path) for name, path in (*paths.items(), *readers)]
  return sorted(modules, key=lambda module: (-len(module.names), module.names))


def _module_of(line: str, modules: Iterable[_Scopes]) -> str:
  """Returns the module of an instruction, as far as its `op_name` tells; "" if it does not.

  It is the longest path whose names all occur in the `op_name`, in their order: JAX writes
  transformations, loops and calls between them.
  """
  op_name = _OP_NAME.search(line)
  scopes = [] if op_name is None else _SCOPE.findall(op_name[1])
  return next((module.path for module in modules if _in_order(module.names, scopes)), "")


def _in_order(names: Iterable[str], scopes: Iterable[str]) -> bool:
  """Whether names are among scopes, in their order."""
  # Each `in` consumes the iterator up to its match, so later names are searched behind it.
  left = iter(scopes)
  return all(name in left for name in names)
