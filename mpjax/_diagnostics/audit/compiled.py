"""What devices send to one another, and the kernels and collectives of a compiled function."""

import collections
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from mpjax._diagnostics.audit.modules import summed
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.primitives import Holds
from mpjax._jaxprs.reader import inner_jaxprs

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<computation>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
  r"\s+(?:ROOT )?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\((?P<operands>[^)]*)\)"
)
_ARRAY = re.compile(r"\b(?P<kind>pred|[a-z]+)(?P<bits>\d*)(?P<form>\w*)\[(?P<shape>[\d,<=]*)\]")
_INNER = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?(%[\w.%, -]+)")
_LOOP = re.compile(r"condition=%(?P<condition>[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LIMIT = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')
_KERNELS = frozenset({"dot", "convolution", "convert", "custom-call"})
_COLLECTIVES = frozenset(
  {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
)
_KINDS = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint"}
"""The dtypes of HLO, without their sizes, as JAX names them; what is not here keeps its name."""


class Kernel(NamedTuple):
  """Instructions of a compiled function that are alike.

  Args:
    name: of the operation, or of the library's kernel, such as "__cublas$lt$matmul$f8".
    dtype: of its result.
    times: how many there are.
  """

  name: str
  dtype: str
  times: int


class Collective(NamedTuple):
  """What a module sends between devices, by operation and dtype.

  Fields:
    path: of the module or named scope.
    operation: the name of the primitive; with `compiled=`, of the instruction of HLO.
    dtype: that of what is sent.
    nbytes: of the results on one device, in all.
    times: how often.
  """

  path: str
  operation: str
  dtype: str
  nbytes: int
  times: int


def find_collectives(graph: Graph) -> tuple[Collective, ...]:
  """Returns the collectives of a graph, those of the most bytes first."""
  rows: list[Collective] = []
  for operation in graph.computing():
    maps = (x.eqn for x in operation.step.enclosing() if x.holds is Holds.SHARD_MAP)
    devices = math.prod(inner.times or 1 for eqn in maps for inner in inner_jaxprs(eqn) or ())
    times = operation.times // devices
    for v in operation.results if operation.facts.collective else ():
      path, dtype = operation.where.path, str(v.dtype)
      rows.append(Collective(path, operation.name, dtype, v.nbytes * times, times))
  return summed(rows, "nbytes", "times")


def compiled_collectives(text: str, graph: Graph) -> tuple[Collective, ...]:
  """Returns the collectives in HLO by the modules of its graph, those of the most bytes first.

  A loop whose number of iterations the text does not show counts as one iteration.
  """
  computations: dict[str, list[str]] = {}
  times: collections.Counter[str] = collections.Counter()
  lines: list[str] = []
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      lines = computations.setdefault(head["computation"], [])
      times[head["computation"]] += head["entry"] is not None
    else:
      lines.append(line)
  # A parameter that is gathered as it is stored has its own name: its module is the one that reads.
  modules = [(path.split("/"), path) for path in {each.where.path for each in graph.computing()}]
  modules += [
    (v.label.split("/"), each.where.path) for v in graph.arguments for each in v.consumers[:1]
  ]
  modules.sort(key=lambda module: (-len(module[0]), module[0]))
  rows: list[Collective] = []
  # HLO writes a computation before those that call it.
  for name, lines in reversed(computations.items()):
    for line in lines:
      trips = [1]
      if loop := _LOOP.search(line):  # A TPU's says its limit in its condition alone.
        condition = "\n".join(computations[loop["condition"]])
        trips += map(int, _TRIPS.findall(line) or _LIMIT.findall(condition))
      for inner in (x for names in _INNER.findall(line) for x in re.findall(r"%([\w.-]+)", names)):
        times[inner] += times[name] * max(trips)
      instruction = _INSTRUCTION.match(line)
      operation = "" if instruction is None else instruction["op"].removesuffix("-start")
      if instruction is None or operation not in _COLLECTIVES:
        continue
      arrays = list(_ARRAY.finditer(instruction["type"]))
      if operation != instruction["op"]:  # Of most the operands come first, and tokens last.
        count = instruction["operands"].count("%")
        arrays = arrays[count : 2 * count] or arrays
      source = _SOURCE.search(line)
      scopes = [] if source is None else re.findall(r"[^][/().:'\\]+", source[1])
      path = next((path for names, path in modules if _in_order(names, scopes)), "")
      nbytes: collections.Counter[str] = collections.Counter()
      for array in arrays:  # Several, of several dtypes, may travel at once.
        kind, bits, form = array["kind"], array["bits"], array["form"]
        dtype = f"{_KINDS.get(kind, kind)}{bits}" + "_" * bool(form) + form
        sizes = (int(size.lstrip("<=")) for size in array["shape"].split(",") if size)
        nbytes[dtype] += (math.prod(sizes) * int(bits or 8) + 7) // 8
      for dtype, n in nbytes.items():
        rows.append(Collective(path, operation, dtype, n * times[name], times[name]))
  return summed(rows, "nbytes", "times")


def _in_order(names: Iterable[str], scopes: Iterable[str]) -> bool:
  """Whether names are among scopes, in their order: JAX writes its loops and calls between them."""
  left = iter(scopes)
  return all(name in left for name in names)


def kernels(text: str) -> tuple[Kernel, ...]:
  """Returns the matmuls, convolutions, casts and library calls in HLO; those in fusions count."""
  counts: collections.Counter[tuple[str, str]] = collections.Counter()
  for line in text.splitlines():
    instruction = _INSTRUCTION.match(line)
    if instruction is not None and instruction["op"] in _KERNELS:
      target, array = _TARGET.search(line), _ARRAY.search(instruction["type"])
      name = instruction["op"] if target is None else target[1]
      counts[name, "" if array is None else array[0].partition("[")[0]] += 1
  return tuple(Kernel(*key, n) for key, n in counts.most_common())
