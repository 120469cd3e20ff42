"""Which primitives run in which precision under autocast, as a value that can be edited."""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from jax.extend.core import Primitive

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, nearest
from mpjax._jaxprs.inner_jaxprs import HIGHER_ORDER
from mpjax._jaxprs.primitives import CONDITIONS, GROUPS, PARTS, Predicate

Ops: TypeAlias = Iterable[str | Primitive]
"""Primitives, by name or as objects."""

_FIXED = frozenset(name for group in GROUPS if group.fixed for name in group.names)


def _standard(part: str) -> frozenset[str]:
  return frozenset(name for group in GROUPS if group.part == part for name in group.names)


def _standard_conditional() -> tuple[tuple[str, Predicate], ...]:
  return tuple(sorted((c.name, c.part_of) for c in CONDITIONS))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OpLists:
  """In which precision each primitive operation of JAX runs under `mpjax.autocast`.

  `OpLists()` is the standard, and `replace` moves primitives from there. A primitive that is in no
  part runs as one that is opaque. The five parts, the standard lists and the reason for each entry
  are in docs/op_lists.md; the sources are the lists of MXNet's AMP, PyTorch's autocast and
  TensorFlow's automatic mixed precision, which agree on most.

  Args:
    half: primitives whose operands are cast to the half type, and that give half.
    float32: primitives whose operands are cast to float32, and that give float32.
    promote: primitives that run in the widest type among their operands.
    keep: primitives that run in the type of their operand.
    opaque: primitives that run in the types in which the program was written.
    conditional: pairs of a primitive and a function from the parameters of its equation to the
      name of one of the five parts, sorted by primitive. Two of these are equal if the functions
      are the same objects, so define them once, at the top of a module.

  Raises:
    MpjaxValueError: a primitive is in two parts at once, or is a higher-order one, whose body is
      entered.
    MpjaxTypeError: a part is not a frozenset of strings.

  >>> import mpjax
  >>> ops = mpjax.OpLists()
  >>> ops.part_of("dot_general", {}), ops.part_of("exp", {}), ops.part_of("add", {})
  ('half', 'float32', 'promote')
  >>> ops.replace(half=["add", "mul"])
  OpLists().replace(half=["add", "mul"])
  """

  half: frozenset[str] = _standard("half")
  float32: frozenset[str] = _standard("float32")
  promote: frozenset[str] = _standard("promote")
  keep: frozenset[str] = _standard("keep")
  opaque: frozenset[str] = _standard("opaque")
  conditional: tuple[tuple[str, Predicate], ...] = _standard_conditional()
  _parts: dict[str, str | Predicate] = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    parts: dict[str, str | Predicate] = {}
    for part, entries in self._entries().items():
      where = f"OpLists({part}=...)"
      for name, entry in entries:
        if name in HIGHER_ORDER:
          raise _higher_order(where, name)
        if name in parts:
          raise MpjaxValueError(
            where,
            expected="every primitive in one place",
            got=f"{name!r}, which is in another one too",
            fix=f'Write OpLists().replace({part}=["{name}"]), which takes it out of there.',
          )
        parts[name] = entry
    object.__setattr__(self, "_parts", parts)

  def _entries(self) -> dict[str, list[tuple[str, str | Predicate]]]:
    """Returns the names in each field, and what `_parts` holds for them."""
    for part in PARTS:
      names = getattr(self, part)
      if not isinstance(names, frozenset) or not all(isinstance(n, str) for n in names):
        raise MpjaxTypeError(
          f"OpLists({part}=...)",
          expected="a frozenset of names",
          got=repr(names),
          fix="OpLists().replace(...) takes any sequence, and moves names out of other parts.",
        )
    if not isinstance(self.conditional, tuple) or not all(map(_is_pair, self.conditional)):
      raise MpjaxTypeError(
        "OpLists(conditional=...)",
        expected="a tuple of pairs of a name and a function",
        got=repr(self.conditional),
        fix="OpLists().replace(conditional={...}) takes a dict.",
      )
    found: dict[str, list[tuple[str, str | Predicate]]] = {}
    for part in PARTS:
      found[part] = [(name, part) for name in sorted(getattr(self, part))]
    return {**found, "conditional": list(self.conditional)}

  def part_of(self, name: str, params: Mapping[str, Any]) -> str | None:
    """Returns the part that an equation is in.

    Args:
      name: the name of its primitive.
      params: the parameters of the equation; only conditional primitives need them.

    Returns:
      "half", "float32", "promote", "keep", "opaque", or None for a primitive in no part.

    Raises:
      MpjaxValueError: the function of a conditional primitive returned anything else.

    >>> import mpjax
    >>> ops = mpjax.OpLists()
    >>> ops.part_of("integer_pow", {"y": 3}), ops.part_of("integer_pow", {"y": -1})
    ('keep', 'float32')
    """
    part = self._parts.get(name)
    if part is None or isinstance(part, str):
      return part
    chosen = part(params)
    if not isinstance(chosen, str) or chosen not in PARTS:
      raise MpjaxValueError(
        f"the function for {name!r} in OpLists.conditional",
        expected="one of " + ", ".join(map(repr, PARTS)),
        got=repr(chosen),
        fix=f"Let it return one of these for the parameters {sorted(params)}.",
      )
    return chosen

  def replace(
    self,
    *,
    half: Ops = (),
    float32: Ops = (),
    promote: Ops = (),
    keep: Ops = (),
    opaque: Ops = (),
    conditional: Mapping[str | Primitive, Predicate] | None = None,
  ) -> "OpLists":
    """Returns a copy in which the given primitives are in the given parts, and in no others.

    A primitive of your own is not known by name: pass the `Primitive` object itself.

    Args:
      half: primitives to run in the half type.
      float32: primitives to run in float32.
      promote: primitives to run in the widest type of their operands.
      keep: primitives to run in the type of their operand.
      opaque: primitives to run as without autocast.
      conditional: functions by primitive, from the parameters of an equation to the name of one of
        the parts above.

    Raises:
      MpjaxValueError: a name is no primitive, one that cannot be moved, or given for two parts.
      MpjaxTypeError: a part is given as one string, or holds neither names nor primitives.

    >>> import mpjax
    >>> ops = mpjax.OpLists().replace(half=["tanh", "logistic"], float32=["div"])
    >>> ops.part_of("tanh", {}), ops.part_of("div", {})
    ('half', 'float32')
    >>> ops = ops.replace(conditional={"sort": lambda params: "keep"})
    >>> ops.part_of("sort", {"dimension": 0})
    'keep'
    """
    given = {"half": half, "float32": float32, "promote": promote, "keep": keep, "opaque": opaque}
    moved: dict[str, str] = {}
    chosen: dict[str, Predicate] = {}
    conditional = {} if conditional is None else conditional
    for part, ops in (*given.items(), ("conditional", conditional)):
      where = f"OpLists.replace({part}=...)"
      if part == "conditional" and not _is_table(ops):
        raise MpjaxTypeError(
          where,
          expected="a dict from a primitive to a function of the parameters of its equation",
          got=repr(ops),
          fix='conditional={"integer_pow": lambda params: "keep"}, for example.',
        )
      for op in _listed(where, ops):
        name = self._known(where, op)
        if moved.setdefault(name, part) != part:
          raise MpjaxValueError(
            where,
            expected="every primitive in one part",
            got=f"{name!r}, which is given for {moved[name]} too",
            fix="Take it out of one of the two.",
          )
        if part == "conditional":
          chosen[name] = conditional[op]
    parts = {
      part: frozenset(
        {name for name in getattr(self, part) if name not in moved}
        | {name for name, to in moved.items() if to == part}
      )
      for part in PARTS
    }
    kept = {name: predicate for name, predicate in self.conditional if name not in moved}
    pairs = tuple(sorted({**kept, **chosen}.items(), key=lambda pair: pair[0]))
    return OpLists(conditional=pairs, **parts)

  def _known(self, where: str, op: str | Primitive) -> str:
    """Returns the name of a primitive that may be moved."""
    name = op.name if isinstance(op, Primitive) else op
    if name in HIGHER_ORDER:
      raise _higher_order(where, name)
    if name in _FIXED:
      raise MpjaxValueError(
        where,
        expected="a primitive whose types can be chosen",
        got=f"{name!r}, which holds a program or memory in types of its own",
        fix="Write the program in it in the types that you want.",
      )
    if isinstance(op, str) and name not in self._parts:
      raise MpjaxValueError(
        where,
        expected="primitives as jax.make_jaxpr prints them",
        got=f"{name!r}, which is none",
        fix="The nearest are "
        + ", ".join(map(repr, nearest(name, self._parts)))
        + ". Of a primitive of your own pass the Primitive object.",
      )
    return name

  def __repr__(self) -> str:
    """What differs from the standard; `dropped` are its primitives that are in no part here."""
    standard = OpLists()
    moved = {part: getattr(self, part) - getattr(standard, part) for part in PARTS}
    given = [f"{part}={_quoted(names)}" for part, names in moved.items() if names]
    chosen = [pair for pair in self.conditional if pair not in standard.conditional]
    if chosen:
      texts = (f'"{name}": {getattr(f, "__name__", repr(f))}' for name, f in chosen)
      given.append("conditional={" + ", ".join(texts) + "}")
    if dropped := standard._parts.keys() - self._parts.keys():
      given.append(f"dropped={_quoted(dropped)}")
    return f"OpLists().replace({', '.join(given)})" if given else "OpLists()"

  def __str__(self) -> str:
    """The primitives of each part, and what decides on those that are conditional."""
    rows = {part: ", ".join(sorted(getattr(self, part))) for part in PARTS}
    standard = _standard("opaque")
    added = sorted(self.opaque - standard)
    rows["opaque"] = ", ".join([*added, f"{len(self.opaque & standard)} of the standard list"])
    rows["conditional"] = "; ".join(f"{name}: {_decision(f)}" for name, f in self.conditional)
    return "\n".join(_row(heading, text) for heading, text in rows.items())


def _row(heading: str, text: str) -> str:
  lines = textwrap.wrap(text or "-", 87, break_long_words=False, break_on_hyphens=False)
  return "\n".join([f"{heading:<13}{lines[0]}", *(" " * 13 + line for line in lines[1:])])


def _decision(predicate: Predicate) -> str:
  """Returns in words what a predicate decides: what we say of ours, the name of a user's."""
  ours = {condition.part_of: condition.text for condition in CONDITIONS}
  return ours.get(predicate) or getattr(predicate, "__name__", repr(predicate))


def _is_pair(pair: Any) -> bool:
  return (
    isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and callable(pair[1])
  )


def _quoted(names: Iterable[str]) -> str:
  return "[" + ", ".join(f'"{name}"' for name in sorted(names)) + "]"


def _is_table(ops: Any) -> bool:
  return isinstance(ops, Mapping) and all(callable(value) for value in ops.values())


def _listed(where: str, ops: Any) -> list[str | Primitive]:
  """Returns what was given for a part, if it is primitives."""
  if isinstance(ops, (str, Primitive)):
    raise MpjaxTypeError(
      where,
      expected="several primitives, as a list",
      got=repr(ops),
      fix=f"Write [{ops!r}]." if isinstance(ops, str) else "Put it in a list.",
    )
  found = list(ops) if isinstance(ops, Iterable) else [ops]
  for op in found:
    if not isinstance(op, (str, Primitive)):
      raise MpjaxTypeError(
        where,
        expected="names of primitives, or Primitive objects",
        got=repr(op),
        fix="jax.make_jaxpr(f)(x) prints the names of the primitives that a function f uses.",
      )
  return found


def _higher_order(where: str, name: str) -> MpjaxValueError:
  return MpjaxValueError(
    where,
    expected="a first-order primitive",
    got=f"{name!r}, which holds a program",
    fix="The program in it is entered: move the primitives that are used there, or mark the "
    "function with mpjax.full_precision.",
  )
