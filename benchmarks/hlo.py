"""What the text of a compiled program says: kernels, the bytes they move, dtypes of products.

A fusion, a call of a library, a copy: whatever stands in the entry computation and is more than
another name for bytes that are there is launched by itself, reads its operands from memory and
writes its result there.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

FREE = frozenset(
  ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
)
"""Operations that no kernel is launched for."""

COLLECTIVES = frozenset(
  ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
)

PRODUCTS = frozenset(("dot", "convolution", "scaled-dot", "ragged-dot"))
RAGGED_KERNEL = re.compile("ragged-dot-(?!metadata)")
"""Names of XLA's kernels for `ragged_dot` on TPUs: their last two operands are multiplied."""

LIBRARY_PRODUCTS = re.compile(
  r"cublas|cudnn\$(?:conv|fmha|blockScaledDot)|onednn|matmul|gemm", re.IGNORECASE
)

_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w-]+)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_RESULT = re.compile(r"\b\w+\[[\d,<=]*\](?:\{[^{}]*\})?")
_ON_CHIP = re.compile(r"\w+\[[\d,<=]*\]\{[^{}]*S\([1-9]\d*\)\}$")
_LAUNCHES = re.compile(r"(?:body|to_apply|branch_computations)=\{?%([\w.-]+)")
_CALLERS = frozenset(("while", "call", "conditional"))
_CALLS = re.compile(r"calls=%([\w.-]+)")
_HIGHEST = re.compile(r'operand_precision(=\{highest,highest|":\["HIGHEST","HIGHEST)')
_OPERAND = re.compile(r"%([\w.-]+)")
_BITS = re.compile(r"[a-z]+(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
  """One line of a computation.

  Fields:
    name: without the percent sign.
    type: as it is written, a tuple in parentheses.
    opcode: such as "fusion".
    operands: names of instructions.
    value: what a constant or parameter has in the place of operands.
    attributes: what follows the operands.
  """

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  value: str
  attributes: str

  @property
  def bytes(self) -> int:
    """Bytes of the result, all parts of a tuple together."""
    return type_bytes(self.type)

  @property
  def target(self) -> str:
    """The function that a custom call calls; empty for everything else."""
    return _attribute(r'custom_call_target="([^"]*)"', self.attributes)

  @property
  def source(self) -> str:
    """The name stack of the JAX operation that it was made of; empty if XLA made it up."""
    return _attribute(r'op_name="([^"]*)"', self.attributes)


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
  """A compiled program.

  Fields:
    entry: what runs, in the order of the text: the schedule, where there is one.
    computations: every computation by name, the entry and the bodies of fusions included.
  """

  entry: Computation
  computations: Mapping[str, Computation]

  def kernels(self, name: str = "") -> Iterator[Instruction]:
    """Yields what is launched by itself; the end of something asynchronous is not.

    Of a loop it is what one iteration launches, once: how often it runs is not looked for.

    Args:
      name: of a computation; empty for the entry.
    """
    for each in (self.computations[name] if name else self.entry).values():
      if each.opcode == "while":
        yield from self.kernels(_attribute(r"body=%([\w.-]+)", each.attributes))
      elif each.opcode not in FREE and not each.opcode.endswith("-done"):
        yield each

  def moved(self, kernel: Instruction) -> int:
    """Returns the bytes of operands and results; an operand that is given twice is read once."""
    home = next(found for found in self.computations.values() if kernel.name in found)
    return kernel.bytes + sum(home[name].bytes for name in dict.fromkeys(kernel.operands))

  def is_product(self, kernel: Instruction) -> bool:
    """Whether a kernel multiplies matrices, or convolves: a library's, or a fusion with one."""
    inside = self.computations.get(_attribute(r"calls=%([\w.-]+)", kernel.attributes), {})
    found = (kernel, *inside.values())
    return any(map(_multiplies, found))

  def count(self, opcode: str) -> int:
    """Returns how many operations of one kind there are, in all computations."""
    found = (each for computation in self.computations.values() for each in computation.values())
    return sum(each.opcode == opcode for each in found)

  def products(self, *, highest: bool = False) -> collections.Counter[str]:
    """Returns how many products there are of each pair of operand dtypes, fusions' included.

    With `highest`, only products count that ask for the highest precision of a GPU or a TPU.
    """
    found: collections.Counter[str] = collections.Counter()
    for computation in self.computations.values():
      for each in computation.values():
        if _multiplies(each) and (not highest or _HIGHEST.search(each.attributes)):
          kinds = [dtype(computation[name].type) for name in _factors(each)]
          found[kinds[0] if len(set(kinds)) == 1 else " x ".join(kinds)] += 1
    return found

  def results_of_products(self) -> collections.Counter[str]:
    """Returns how many products there are of each dtype of the result, fusions' included."""
    instructions = (each for inside in self.computations.values() for each in inside.values())
    return collections.Counter(dtype(each.type) for each in instructions if _multiplies(each))

  def repeats(self) -> collections.Counter[str]:
    """Returns how often each computation runs that launches kernels: bodies of loops, say.

    A loop whose number of iterations the text does not show counts as one iteration.
    """
    found: collections.Counter[str] = collections.Counter()
    todo = [(name, 1) for name, each in self.computations.items() if each is self.entry]
    while todo:
      name, times = todo.pop()
      found[name] += times
      callers = (x for x in self.computations[name].values() if x.opcode in _CALLERS)
      for each in callers:
        again = self._trips(each) if each.opcode == "while" else 1
        todo += [(inner, times * again) for inner in _LAUNCHES.findall(each.attributes)]
    return found

  def collectives(self) -> dict[str, tuple[int, int]]:
    """Returns how often each collective runs, and the bytes that it returns on one chip.

    The keys are its name and its dtype as JAX calls it: "all-reduce float32". XLA may join small
    collectives of several dtypes into one, which then counts once for each dtype.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, times in self.repeats().items():
      for each in self._with_called(self.computations[name]):
        # An asynchronous collective has a "-start" and a "-done". Only the first counts.
        operation = each.opcode.removesuffix("-start")
        kinds = collections.Counter[str]()
        for x in _results(each) if operation in COLLECTIVES else ():
          kinds[_name_in_jax(dtype(x))] += type_bytes(x)
        for kind, nbytes in kinds.items():
          runs, sent = found.get(key := f"{operation} {kind}", (0, 0))
          found[key] = runs + times, sent + times * nbytes
    return found

  def _with_called(self, home: Computation) -> Iterator[Instruction]:
    """Yields instructions, and those of the fusions and asynchronous calls among them."""
    for each in home.values():
      yield each
      for name in _CALLS.findall(each.attributes):
        yield from self._with_called(self.computations[name])

  def _trips(self, loop: Instruction) -> int:
    known = _attribute(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    condition = self.computations[_attribute(r"condition=%([\w.-]+)", loop.attributes)]
    limits = [int(each.value) for each in condition.values() if each.value.isdigit()]
    return int(known) if known else max((x for x in limits if x), default=1)

  def traffic(self) -> int:
    """Returns the bytes between the main memory and the chip in one run, loops' as they repeat.

    Of an array of which a slice is read or overwritten, it is the slice that counts; what the
    compiler holds in memory of the chip does not.
    """
    return sum(
      times * self._traffic(each, self.computations[name])
      for name, times in self.repeats().items()
      for each in self.computations[name].values()
      if each.opcode not in FREE | _CALLERS and not each.opcode.endswith("-done")
    )

  def _traffic(self, each: Instruction, home: Computation) -> int:
    read = 0
    for name in dict.fromkeys(each.operands):
      if not _ON_CHIP.match(home[name].type):
        read += self._read(name, home[name].bytes, {each.name: each})
    results = _results(each)
    if each.opcode.endswith("-start"):
      written = [*map(type_bytes, results)]
      read = min(read, sum(written)) if each.opcode == "slice-start" else read
    else:
      written = self._written(each, home)
    stored = zip(results, written, strict=False)
    return read + sum(size for x, size in stored if not _ON_CHIP.match(x))

  def _read(self, name: str, size: int, users: Computation) -> int:
    """Returns how many of the bytes of an array, `size` in all, its users read."""
    total = 0
    for each in users.values():
      for place in (i for i, operand in enumerate(each.operands) if operand == name):
        if each.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
          total += each.bytes
        elif each.opcode == "bitcast":
          total += self._read(each.name, size, users)
        elif each.opcode == "fusion":
          inner = self._fused(each)
          inside = (x.name for x in inner.values() if x.opcode == "parameter")
          found = next(x for x in inside if inner[x].value == str(place))
          total += self._read(found, size, inner)
        elif each.opcode != "dynamic-update-slice" or place != 0:
          return size
    return min(total, size)

  def _written(self, each: Instruction, home: Computation) -> list[int]:
    """Returns the bytes that are written of each result; those of an update, where there is one."""
    if each.opcode == "tuple":
      return [sum(self._written(home[name], home)) for name in each.operands]
    if each.opcode == "dynamic-update-slice":
      return [home[each.operands[1]].bytes]
    if each.opcode == "bitcast":
      return self._written(home[each.operands[0]], home)
    if each.opcode == "fusion":
      inner = self._fused(each)
      return self._written(next(reversed(inner.values())), inner)
    return [type_bytes(x) for x in _RESULT.findall(each.type)]

  def _fused(self, fusion: Instruction) -> Computation:
    return self.computations[_attribute(r"calls=%([\w.-]+)", fusion.attributes)]


def _results(each: Instruction) -> list[str]:
  """Returns the types of the arrays that an operation makes."""
  found = _RESULT.findall(each.type)
  if each.opcode == "copy-start":  # The new one, the old one, and a token.
    return found[:1]
  if each.opcode.endswith("-start"):  # Of most the operands come first, and tokens last.
    return found[len(each.operands) : 2 * len(each.operands)] or found
  return found


def _multiplies(each: Instruction) -> bool:
  of_library = LIBRARY_PRODUCTS.search(each.target) is not None
  return each.opcode in PRODUCTS or of_library or _is_ragged_kernel(each)


def _is_ragged_kernel(each: Instruction) -> bool:
  return each.opcode == "custom-call" and RAGGED_KERNEL.match(each.name) is not None


def _factors(product: Instruction) -> tuple[str, ...]:
  """Returns the operands that a product multiplies."""
  return product.operands[-2:] if _is_ragged_kernel(product) else product.operands[:2]


def _attribute(pattern: str, text: str) -> str:
  found = re.search(pattern, text)
  return found[1] if found else ""


def parse(text: str) -> Module:
  """Returns the computations of an HLO module, as `compiled.as_text()` writes them."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry = ""
  current: dict[str, Instruction] = {}
  for line in text.splitlines():
    if head := _COMPUTATION.match(line):
      current = computations.setdefault(head["name"], {})
      entry = head["name"] if head["entry"] else entry
    elif found := _INSTRUCTION.match(line):
      operands, attributes = _split(found["rest"])
      current[found["name"]] = Instruction(
        name=found["name"],
        type=found["type"],
        opcode=found["opcode"],
        operands=tuple(_OPERAND.findall(operands)),
        value=operands if found["opcode"] in ("constant", "parameter") else "",
        attributes=attributes,
      )
  if not entry:
    raise ValueError("this is no text of an HLO module: it has no entry computation")
  return Module(entry=computations[entry], computations=computations)


def _split(rest: str) -> tuple[str, str]:
  """Returns what is inside of the parentheses that are open, and what follows them."""
  depth = 1
  for place, character in enumerate(rest):
    depth += (character == "(") - (character == ")")
    if depth == 0:
      return rest[:place], rest[place + 1 :]
  return rest, ""


def type_bytes(text: str) -> int:
  """Returns the bytes of a type as HLO writes it: an array, or a tuple of arrays."""
  total = 0
  for kind, sizes in _ARRAY.findall(text):
    count = math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size)
    total += (count * _bits(kind) + 7) // 8
  return total


def _bits(kind: str) -> int:
  if kind == "pred":
    return 8
  found = _BITS.match(kind)
  return int(found[1]) if found else 0  # a token has no bytes


def dtype(text: str) -> str:
  """Returns the dtype of an array type, of the first array in a tuple."""
  found = _ARRAY.search(text)
  return found[1] if found else text


_KINDS = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint"}


def _name_in_jax(kind: str) -> str:
  """Returns the name that JAX has for a dtype of HLO: "float8_e4m3fn" for "f8e4m3fn"."""
  name, bits, form = re.fullmatch(r"([a-z]+)(\d*)(\w*)", kind).groups()
  return _KINDS.get(name, name) + bits + (f"_{form}" if form else "")


_INDEX = re.compile(r"_\d+")


def by_source(module: Module) -> dict[str, tuple[int, int]]:
  """Returns kernels and bytes moved by what they were made of, layers of a kind together."""
  found: dict[str, tuple[int, int]] = {}
  for each in module.kernels():
    key = _INDEX.sub("", each.source) or f"({each.opcode} {each.target})".replace(" )", ")")
    kernels, moved = found.get(key, (0, 0))
    found[key] = kernels + 1, moved + module.moved(each)
  return found


def differences(
  one: Mapping[str, tuple[int, int]], other: Mapping[str, tuple[int, int]]
) -> list[tuple[str, tuple[int, int]]]:
  """Returns how many more kernels and bytes `one` has of each source; most bytes first."""
  found = {}
  for source in dict.fromkeys((*one, *other)):
    kernels, moved = one.get(source, (0, 0))
    less_kernels, less_moved = other.get(source, (0, 0))
    found[source] = kernels - less_kernels, moved - less_moved
  changed = (each for each in found.items() if any(each[1]))
  return sorted(changed, key=lambda each: abs(each[1][1]), reverse=True)
