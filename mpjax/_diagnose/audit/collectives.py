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
from collections.abc import Sequence

from mpjax._diagnose.audit.findings import Collective, summed
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


def compiled_collectives(text: str, graph: Graph) -> tuple[Collective, ...]:
  """Returns the collectives of a compiled program. Those with the most bytes come first.

  Args:
    text: the HLO of the program: `jax.stages.Compiled.as_text()`, or "".
    graph: the graph of the same function, which has the paths of its modules.
  """
  computations, runs = _computations(text)
  modules = _modules(graph)
  rows: list[Collective] = []
  # XLA writes callees first. The reversed order begins at the entry, as the program does.
  for name, lines in reversed(computations.items()):
    for line in lines:
      operation, nbytes = _collective(line)
      # A row for each dtype, since XLA's combiner merges small collectives into one.
      for dtype, n in nbytes.items():
        path, times = _module_of(line, modules), runs[name]
        rows.append(Collective(path, operation, dtype, nbytes=n * times, times=times))
  return summed(rows)


def _computations(text: str) -> tuple[dict[str, list[str]], collections.Counter[str]]:
  """Returns the lines of each computation, in the order of the text, and how often each runs."""
  computations: dict[str, list[str]] = {}
  runs = collections.Counter[str]()
  lines: list[str] = []
  for line in text.splitlines():
    head = _COMPUTATION.match(line)
    # All lines up to the next head belong to the computation before.
    if head is None:
      lines.append(line)
      continue
    lines = computations.setdefault(head["computation"], [])
    # Only the entry runs without a caller.
    runs[head["computation"]] += head["entry"] is not None
  # Callers are written after their callees, so the runs of a caller are complete.
  for name, lines in reversed(computations.items()):
    for line in lines:
      times, loop = runs[name], _CONDITION.search(line)
      if loop is not None:
        # XLA writes the trip count into the line for CPUs and GPUs. A TPU program compares a
        # counter in the condition.
        numbers = _TRIP_COUNT.findall(line) or _INTEGER.findall(
          "\n".join(computations[loop["computation"]])
        )
        times *= max(1, *map(int, numbers))
      for callees in _CALLEES.findall(line):
        for callee in _NAME.findall(callees):
          runs[callee] += times
  return computations, runs


def _collective(line: str) -> tuple[str, collections.Counter[str]]:
  """Returns the name of the collective of a line, and the bytes that it returns on one device.

  The bytes are by the dtype as JAX calls it. There are none if a line has no collective.
  """
  nbytes = collections.Counter[str]()
  instruction = _INSTRUCTION.match(line)
  if instruction is None:
    return "", nbytes
  # XLA splits an asynchronous collective into "-start" and "-done". Count the start only.
  operation = instruction["operation"].removesuffix("-start")
  if operation not in _COLLECTIVES:
    return "", nbytes
  arrays = [*_ARRAY.finditer(instruction["type"])]
  if operation != instruction["operation"]:
    # The type of most asynchronous collectives has operands, results and tokens, in this order.
    count = instruction["operands"].count("%")
    arrays = arrays[count : 2 * count] or arrays
  for array in arrays:
    kind, bits, form = array["kind"], array["bits"], array["form"]
    dtype = _KINDS.get(kind, kind) + bits + (f"_{form}" if form else "")
    # "<=" marks a bounded dynamic dimension. A scalar has no sizes, and its product is 1.
    dimensions = [int(size.lstrip("<=")) for size in array["shape"].split(",") if size]
    # A bool, "pred", has no bits in its name and takes a byte. Int4 takes half a byte.
    nbytes[dtype] += (math.prod(dimensions) * int(bits or 8) + 7) // 8
  return operation, nbytes


def _modules(graph: Graph) -> Sequence[tuple[Sequence[str], str]]:
  """Returns the scopes or the parts of a parameter's name, and the module that they tell."""
  paths = {operation.where.path: operation.where.path for operation in graph.computing()}
  # XLA names the gathering of a parameter after the argument. Its module is the one that uses it.
  readers = [(v.label, v.consumers[0].where.path) for v in graph.arguments if v.consumers]
  # The longest name is the innermost module, so it is tried first.
  modules = [(name.split("/"), path) for name, path in (*paths.items(), *readers)]
  return sorted(modules, key=lambda module: (-len(module[0]), module[0]))


def _module_of(line: str, modules: Sequence[tuple[Sequence[str], str]]) -> str:
  """Returns the module of an instruction, as far as its `op_name` tells; "" if it does not.

  It is the longest path whose names all occur in the `op_name`, in their order: JAX writes
  transformations, loops and calls between them.
  """
  op_name = _OP_NAME.search(line)
  for names, path in modules:
    # Each `in` consumes the iterator up to its match, so later names are searched behind it.
    left = iter(() if op_name is None else _SCOPE.findall(op_name[1]))
    if all(name in left for name in names):
      return path
  return ""
