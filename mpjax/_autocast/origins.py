"""Find the sums of an array and exactly one product, such as `x + gate * y`.

Two products may cancel, as in `a * b + c * d`, so both are computed in float32. With one product,
the sum rounds `x` anyway. A float32 product would gain nothing, but it would make the stream `x`
float32 and double its memory. There are two exceptions. In `a * h + b` with the carry `h` of a
loop, the rounding errors of the product add up over the iterations. In `x + x ** 3`, both operands
are functions of `x`, so in float32 the sum adds no rounding error to that of `x`.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import convert_element_type_p

from mpjax._autocast.scopes import ScopedSettings, ScopePolicies
from mpjax._core.types import HALVES
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.op_lists import part_of
from mpjax._jaxpr.primitives import facts_of, is_higher_order
from mpjax._jaxpr.reader import Atom, Inner, inner_jaxprs, shape_of


class Origin(NamedTuple):
  """Where a value comes from."""

  # Whether it is the result of arithmetic other than an addition, perhaps moved.
  product: bool = False
  # The values from which arithmetic and moves alone compute it, each once, in order.
  sources: tuple[Hashable, ...] = ()


Origins: TypeAlias = tuple[Origin, ...]

CARRY = "carry"
"""The source of each carry inside a loop.

Other sources are variables, or the numbers that `origins_inside` gives to sources of arguments.
"""


class Found(NamedTuple):
  """The origins in a jaxpr."""

  of: Mapping[Atom, Origin]  # of each variable
  summed: frozenset[Hashable]  # the sources of all operands of sums of two arrays


@cached_per_jaxpr
def origins_of(jaxpr: Jaxpr, ins: Origins, scoped: ScopedSettings) -> Found:
  """Returns the origins in a jaxpr; `ins` are those of the arguments, see `origins_inside`."""
  origins: dict[Atom, Origin] = {v: Origin(sources=(v,)) for v in (*jaxpr.constvars, *jaxpr.invars)}
  origins.update(zip(jaxpr.invars, ins, strict=False))
  scope_policies, summed = ScopePolicies(scoped), set[Hashable]()
  for eqn in jaxpr.eqns:
    operands = of_atoms(eqn.invars, origins)
    if is_higher_order(eqn):
      results = _of_call(eqn, operands, scope_policies, summed)
    else:
      results = [_of_operation(eqn, operands, scope_policies)] * len(eqn.outvars)
    if adds_arrays(eqn):
      summed.update(source for each in operands for source in each.sources)
    # An operation that rounds, or adds two arrays, returns a new source.
    pairs = zip(eqn.outvars, results, strict=True)
    origins.update((v, Origin(sources=(v,)) if each is None else each) for v, each in pairs)
  return Found(origins, frozenset(summed))


def of_atoms(atoms: Iterable[Atom], origins: Mapping[Atom, Origin]) -> list[Origin]:
  """Returns the origins of some variables and literals."""
  return [Origin() if isinstance(atom, Literal) else origins[atom] for atom in atoms]


def is_rounded(atom: Atom, origins: Mapping[Atom, Origin]) -> bool:
  """Whether a variable is the result of an operation that rounds, unless it is an argument."""
  return origins[atom] == Origin(sources=(atom,))


def has_one_product(operands: Sequence[Origin]) -> bool:
  """Whether one operand is a product whose sources are neither carries nor the other's sources."""
  products = [each for each in operands if each.product]
  if len(products) != 1:
    return False
  others = {source for each in operands if not each.product for source in each.sources}
  return (others | {CARRY}).isdisjoint(products[0].sources)


def deciding(eqn: JaxprEqn, origins: Mapping[Atom, Origin]) -> tuple[Atom, ...]:
  """Returns the operands of a sum that decide its dtype; a single product takes that dtype."""
  operands = of_atoms(eqn.invars, origins)
  if not has_one_product(operands):
    return tuple(eqn.invars)
  pairs = zip(eqn.invars, operands, strict=True)
  return tuple(atom for atom, origin in pairs if not origin.product)


def origins_inside(operands: Sequence[Origin], inner: Inner, scoped: ScopedSettings) -> Origins:
  """Returns the origins of the arguments of a jaxpr inside an equation, from those of its operands.

  Sources are numbered in order, so that equal calls have equal origins. A jaxpr is rewritten again
  for other origins, so the result is () if they make no difference to the sums inside.
  """
  alone = origins_of(inner.jaxpr, (), scoped)
  numbers: dict[Hashable, Hashable] = {CARRY: CARRY}
  origins: list[Origin] = []
  for i, (var, n) in enumerate(zip(inner.jaxpr.invars, inner.operands or (), strict=False)):
    each = Origin(sources=(CARRY,)) if i in inner.carry else operands[n]
    if var not in alone.summed:
      each = Origin(sources=(var,))
    sources = tuple(numbers.setdefault(source, len(numbers)) for source in each.sources)
    origins.append(Origin(each.product, sources))
  count = sum(len(each.sources) for each in origins)
  is_plain = count == len(numbers) - 1 and not any(each.product for each in origins)
  return () if is_plain else tuple(origins)


def adds_arrays(eqn: JaxprEqn) -> bool:
  """Whether an operation adds two arrays, as in a residual sum; a bias is not an array."""
  return facts_of(eqn).adds and all(map(is_array, eqn.invars))


def is_array(atom: Atom) -> bool:
  """Whether more than one axis is longer than 1."""
  # `!=` also works for the symbolic sizes of an exported function.
  return sum(size != 1 for size in shape_of(atom)) > 1


def _of_operation(
  eqn: JaxprEqn, operands: Sequence[Origin], scope_policies: ScopePolicies
) -> Origin | None:
  """Returns the origin of the results of an operation; None if they are new sources."""
  facts, ops = facts_of(eqn), scope_policies.scoped.settings.ops
  is_matmul = part_of(eqn, ops) == "half"
  is_end = scope_policies.end(eqn) is not None
  is_cast = eqn.primitive is convert_element_type_p
  if is_matmul or is_end or (is_cast and eqn.params["new_dtype"] in HALVES):
    return None
  joined = _joined(operands)
  if adds_arrays(eqn):
    # A new source, because the sources of a residual stream would grow with each layer.
    return Origin(sources=(CARRY,)) if CARRY in joined.sources else None
  if facts.arithmetic and not facts.adds:
    return joined._replace(product=True)
  passes = facts.adds or is_cast or facts.moves or facts.exact
  return joined if passes else joined._replace(product=False)


def _of_call(
  eqn: JaxprEqn,
  operands: Sequence[Origin],
  scope_policies: ScopePolicies,
  summed: set[Hashable],
) -> list[Origin | None]:
  """Returns the origin of each result of an equation with inner jaxprs; None for new sources.

  Adds the sources of sums inside to `summed`.
  """
  each: list[list[Origin]] = [[] for _ in eqn.outvars]
  for inner in inner_jaxprs(eqn) or ():
    if inner.operands is None:
      continue
    scoped = scope_policies.inside(eqn)
    ins = origins_inside(operands, inner, scoped)
    inside = origins_of(inner.jaxpr, ins, scoped)
    # The sources outside, by those inside: variables, or the numbers of `origins_inside`.
    outside = dict[Hashable, list[Hashable]]()
    for var, n in zip(inner.jaxpr.invars, inner.operands, strict=True):
      for source in inside.of[var].sources:
        outside.setdefault(source, []).extend(operands[n].sources)
    summed.update(source for one in inside.summed for source in outside.get(one, ()))
    if not inner.returns:
      continue
    returned = of_atoms(inner.jaxpr.outvars, inside.of)
    # After a loop its carry is a value like any other.
    for i, (origin, var) in enumerate(zip(returned, eqn.outvars, strict=True)):
      if i >= len(inner.carry):
        sources = (x for source in origin.sources for x in outside.get(source, [var]))
        each[i].append(Origin(origin.product, tuple(dict.fromkeys(sources))))
  return [_joined(some) if some else None for some in each]


def _joined(operands: Sequence[Origin]) -> Origin:
  """Returns the origin of a value that is computed from values of these origins."""
  sources = dict.fromkeys(source for each in operands for source in each.sources)
  return Origin(any(each.product for each in operands), tuple(sources))
