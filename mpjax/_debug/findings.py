"""What an audit lists: one row for the operations of a module that are alike."""

import collections
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import primitives as p

from mpjax._autocast.scopes import NOT_IN
from mpjax._core.types import DType
from mpjax._debug.arguments import moved_from
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import FLOAT8, MODULE, Direction, Source
from mpjax._policy.active import AuditRecord

Sizes = collections.Counter[str]
"""Counts by dtype."""

_LONG_SUM = 64
"""Terms: a sum of fewer loses no more than a few roundings."""

_LARGEST = 1 << 22
"""Elements: a constant with more is not looked at."""

DTYPES = ("params", "activations", "gradients")

_UNASKED = ("its policy has no float8", "it is in float32")


class Finding(NamedTuple):
  """Operations of a module that are alike; what a list does not tell apart has its default.

  Args:
    path: of the module or named scope; of a leak, where a low-precision value became float32.
    operation: the name of the primitive; with `compiled=`, of the instruction of HLO.
    direction: its pass.
    dtype: in which it runs, or what it sends; of a leak or a kernel, those of its operands.
    source: its line; None if unknown.
    reason: why it is listed: of a leak, why it is float32; of a module, the rule that decided, or
      the `dtype` that its policy overrules; "" for a matmul that is in float8.
    kind: of a leak, what its cause is: "parameter", "argument", "constant", "number" (with a dtype,
      such as `np.float32(2)`), "filled" (an array of one), "cast" (by hand), "matmul" (that has a
      `preferred_element_type`), "promotion" (by the call of a matmul), or "operation".
    cause: of a leak, the path of an argument, the shape of a constant, the name of an operation.
    fix: of a leak, what to change.
    params: of a module: the dtypes of its parameters, that of the most elements first.
    activations: of a module: those of what the forward pass computes.
    gradients: of a module: those of what the backward pass computes.
    flops: of matmuls, in all runs.
    nbytes: of float32 results, or of those of collectives on one device, in all runs.
    times: how often they run.
  """

  path: str
  operation: str = ""
  direction: Direction = "forward"
  dtype: str = ""
  source: Source | None = None
  reason: str = ""
  kind: str = ""
  cause: str = ""
  fix: str = ""
  params: tuple[str, ...] = ()
  activations: tuple[str, ...] = ()
  gradients: tuple[str, ...] = ()
  flops: int = 0
  nbytes: int = 0
  times: int = 0


def summed(rows: Iterable[Finding], *, layers: bool = False) -> tuple[Finding, ...]:
  """Returns one row for those that are alike, with the sums of their counts; the largest first."""
  # With `layers`, rows that differ in numbers in their texts alone are alike: "block_* (4)".
  groups: dict[Finding, list[Finding]] = {}
  for row in rows:
    alike = row._replace(flops=0, nbytes=0, times=0)
    if layers:
      dtypes = {name: tuple(sorted(getattr(row, name))) for name in DTYPES}
      path, reason = unnumbered(row.path), unnumbered(row.reason)
      alike = alike._replace(path=path, reason=reason, cause="", **dtypes)
    groups.setdefault(alike, []).append(row)
  sums: list[Finding] = []
  for group in groups.values():
    counts = {x: sum(getattr(row, x) for row in group) for x in ("flops", "nbytes", "times")}
    row, paths = group[0]._replace(**counts), {row.path for row in group}
    if layers:
      path = (merged([*paths]) or "(root)") + f" ({len(paths)})" * (len(paths) > 1)
      row = row._replace(path=path, reason=merged([row.reason for row in group]))
    sums.append(row)
  return tuple(sorted(sums, key=lambda row: (-row.flops, -row.nbytes, -row.times)))


def unnumbered(name: str) -> str:
  """Returns a name with "*" for each number in it."""
  return re.sub(r"\d+", "*", name)


def merged(names: Sequence[str]) -> str:
  """Returns one name for those that differ in numbers alone, with "*" where they differ."""
  parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
  return "".join(same[0] if len(set(same)) == 1 else "*" for same in parts)


def find_modules(
  graph: Graph, record: AuditRecord, parameters: Collection[str]
) -> tuple[Finding, ...]:
  """Returns the modules with matmuls, those of the most FLOPs first."""
  # Where no argument is known to be one of `parameters`, all may be.
  counts = collections.defaultdict[tuple[str, str], Sizes](Sizes)  # by path and column
  deciders, read = dict[str, str](), dict[tuple[str, Value], None]()
  for operation in graph.computing():
    where, path = operation.where, operation.where.path
    module = record.modules.get(where.marked(MODULE) or "")
    rule, own_dtype = (None, None) if module is None else (module.rule, module.own_dtype)
    decider = repr(rule) if rule else f"the policy over dtype={own_dtype}" if own_dtype else ""
    deciders[path] = deciders.get(path) or decider
    forward = where.direction == "forward"
    if FLOAT8 not in where.scopes or operation.facts.flops:  # Its scaling is not shown.
      counts[path, "activations" if forward else "gradients"] += sizes_of(operation.results)
    read |= {(path, moved_from(v)): None for v in operation.operands if forward}
  for path, v in read:
    if v.kind == "argument" and (v.label in parameters or not parameters):
      counts[path, "params"] += sizes_of([v])
  for operation, dtype, flops in graph.matmuls():
    counts[operation.where.path, "flops"][str(dtype)] += flops
  rows: list[Finding] = []
  for path, decider in deciders.items():
    dtypes = {column: tuple(dict(counts[path, column].most_common())) for column in DTYPES}
    flops = counts[path, "flops"]
    row = Finding(path, dtype=" ".join(flops), reason=decider, flops=flops.total())
    rows.append(row._replace(**dtypes))
  # What has no matmul of its own is a detail of a module around it.
  return summed(row for row in rows if row.flops)


def sizes_of(values: Iterable[Value]) -> Sizes:
  """Returns how many elements of each floating dtype values have."""
  sizes = Sizes()
  for v in values:
    if v.dtype is not None and jnp.issubdtype(v.dtype, jnp.inexact):
      sizes[v.dtype.name] += v.size
  return sizes


def find_float8(graph: Graph) -> tuple[Finding, ...]:
  """Returns the matmuls by why they are not in float8; () if nothing asks for float8."""
  rows: list[Finding] = []
  for operation, _, flops in graph.matmuls():
    where, operands = operation.where, operation.operands[:2]
    unasked = _UNASKED[any(v.is_wide for v in operands)]
    other = 'weight_grad="half"' if FLOAT8 in where.scopes else unasked
    is_float8 = all(v.dtype is not None and v.dtype.itemsize == 1 for v in operands)
    reason = "" if is_float8 else where.marked(NOT_IN["float8"]) or other
    rows.append(Finding(where.path, reason=reason, flops=flops))
  return summed(rows) if any(row.reason not in _UNASKED for row in rows) else ()


def residuals(graph: Graph) -> Mapping[str, int]:
  """Returns the bytes that the forward pass computes and the backward pass takes, by dtype."""
  nbytes = Sizes()
  for operation in graph.operations:
    for v in operation.results if operation.where.direction == "forward" else ():
      if any(each.where.direction != "forward" for each in v.consumers):
        nbytes[str(v.dtype)] += v.nbytes * operation.times
  return dict(nbytes.most_common())


def find_lossy(graph: Graph) -> tuple[Finding, ...]:
  """Returns what runs in low precision and would be safer in float32, in the order it runs."""
  return summed(
    Finding(x.where.path, x.name, x.where.direction, str(dtype), x.where.source, reason)
    for x in graph.computing()
    for dtype, reason in (_lossy(x) if x.results else ())
  )


def _lossy(operation: Operation) -> Iterator[tuple[DType | None, str]]:
  """Yields the dtypes in which numbers of an operation are lost, and how."""
  operands, eqn, result = operation.operands, operation.eqn, operation.results[0]
  low = next((v for v in operands if v.is_low), None)
  narrow = result if result.is_low else low
  if narrow is None:
    return
  # Integers that are counted, or cast to and from what is too coarse for them.
  most = 2 ** (jnp.finfo(narrow.dtype).nmant + 1)
  dtypes = [v.dtype for v in (result, *operands[:1]) if operation.casts and v.dtype is not None]
  integer = [dtype.itemsize > 1 and jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes]
  length = result.aval.shape[eqn.params["dimension"]] if eqn.primitive is p.iota_p else 0
  if low is not None and any(integer):
    yield low.dtype, f"integers above {most} were rounded before this cast"
  elif result.is_low and (length > most + 1 or any(integer)):
    yield result.dtype, f"integers above {most} are rounded"
  elif result.is_low and operation.casts and operands[0].is_wide:
    lost = _lost_number(operands[0], result)
    yield from [(result.dtype, lost)] if lost else []
  if low is None:
    return
  # What the float32 list computes. JAX shows no accumulator: a sum whose result is low is added up
  # in low precision. An add of two gradients rounds once, as any other.
  if result.is_low and operation.part == "float32" and eqn.primitive is not p.add_jaxvals_p:
    terms = low.size // max(result.size, 1)
    if low.aval.shape == result.aval.shape:
      yield low.dtype, "less exact than in float32"
    elif terms >= _LONG_SUM:
      yield low.dtype, f"{terms:,} terms are added in low precision"
  # Numbers in the code, which were cast before the function was traced.
  for v in (v for v in operands if v.kind == "literal" and v.is_low):
    number = float(v.label)
    # What is compared with inf is inf in the source, as in the derivative of `jax.nn.softplus`,
    # and a maximum that starts at -inf, as that of `jax.nn.softmax` does, lost nothing.
    starts = eqn.primitive is (p.max_p if number < 0 else p.min_p)
    if math.isinf(number) and not (operation.moves or operation.facts.tests or starts):
      yield low.dtype, "a number became inf in low precision"
    # An epsilon is added in the forward pass, or is the maximum with what is divided by.
    added = operation.facts.gradient == "added" and v in operands[1:]
    epsilon = added and not operation.moves and operation.where.direction == "forward"
    divides = eqn.primitive is p.max_p and any(
      each.eqn.primitive in (p.log_p, p.rsqrt_p)
      or (each.eqn.primitive is p.div_p and each.operands[1] is result)
      for each in result.consumers
    )
    if number == 0 and (epsilon or divides):
      yield low.dtype, "a number may have become 0 in low precision"


def _lost_number(value: Value, result: Value) -> str:
  """Returns what a cast makes of a number that is known before the function runs: inf or 0."""
  seen, pending = set[Value](), [value]
  while pending:
    each = pending.pop()
    if each in seen or not each.is_floating:
      continue
    seen.add(each)
    made_by, data = each.made_by, each.data
    is_readable = not isinstance(data, Tracer) and getattr(data, "is_fully_addressable", True)
    if data is not None and is_readable and 0 < each.size <= _LARGEST:
      # Of a constant it is the largest number, regardless of its sign.
      array = np.asarray(data, np.float64)
      number = array.flat[np.argmax(np.abs(array))]
      with np.errstate(over="ignore", under="ignore"):
        cast = float(number.astype(result.dtype))
      if (math.isfinite(number) and not math.isfinite(cast)) or (number != 0 and cast == 0):
        return f"{number:.4g} becomes {cast if cast else 0}"
    # A cast of a weakly typed number moves it too.
    elif made_by is not None and (made_by.facts.moves or (made_by.casts and each.is_wide)):
      pending += made_by.operands
  return ""


_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<computation>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
  r"\s+(?:ROOT )?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\((?P<operands>[^)]*)\)"
)
_ARRAY = re.compile(r"\b(?P<kind>pred|[a-z]+)(?P<bits>\d*)(?P<form>\w*)\[(?P<shape>[\d,<=]*)\]")
_INNER = re.compile(r"(?:body|calls|to_apply|\w+_computations?)=\{?(%[\w.%, -]+)")
_LOOP = re.compile(r"condition=%(?P<condition>[\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LIMIT = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_KINDS = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint"}
"""The dtypes of HLO, without their sizes, as JAX names them; what is not here keeps its name."""


def compiled_collectives(text: str, graph: Graph) -> tuple[Finding, ...]:
  """Returns the collectives in HLO, by the modules of its graph, those of the most bytes first."""
  # A loop whose number of iterations the text does not show counts as one iteration.
  computations, times = dict[str, list[str]](), collections.Counter[str]()
  lines: list[str] = []
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      lines = computations.setdefault(head["computation"], [])
      times[head["computation"]] += head["entry"] is not None
    else:
      lines.append(line)
  # A parameter that is gathered as it is stored has its own name: its module is the one that reads.
  paths = {(each.where.path, each.where.path) for each in graph.computing()}
  readers = ((v.label, each.where.path) for v in graph.arguments for each in v.consumers[:1])
  modules = [(name.split("/"), path) for name, path in (*paths, *readers)]
  modules.sort(key=lambda module: (-len(module[0]), module[0]))
  rows: list[Finding] = []
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
      if instruction is None or instruction["op"].removesuffix("-start") not in _COLLECTIVES:
        continue
      operation, arrays = instruction["op"], list(_ARRAY.finditer(instruction["type"]))
      if operation.endswith("-start"):  # Of most the operands come first, and tokens last.
        count = instruction["operands"].count("%")
        arrays = arrays[count : 2 * count] or arrays
      source = _SOURCE.search(line)
      scopes = [] if source is None else re.findall(r"[^][/().:'\\]+", source[1])
      path = next((path for names, path in modules if _in_order(names, scopes)), "")
      sizes = Sizes()
      for array in arrays:  # Several, of several dtypes, may travel at once.
        shape = (int(size.lstrip("<=")) for size in array["shape"].split(",") if size)
        kind, bits, form = array["kind"], array["bits"], array["form"]
        dtype = _KINDS.get(kind, kind) + bits + (form and f"_{form}")
        sizes[dtype] += (math.prod(shape) * int(bits or 8) + 7) // 8
      for dtype, nbytes in sizes.items():
        row = Finding(path, operation.removesuffix("-start"), dtype=dtype, times=times[name])
        rows.append(row._replace(nbytes=nbytes * times[name]))
  return summed(rows)


def _in_order(names: Iterable[str], scopes: Iterable[str]) -> bool:
  """Whether names are among scopes, in their order: JAX writes its loops and calls between them."""
  left = iter(scopes)
  return all(name in left for name in names)
