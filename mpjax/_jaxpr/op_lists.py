"""`OpLists`: the precision of each primitive under autocast, which users can edit."""

import dataclasses
import functools
import textwrap
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Primitive

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, nearest
from mpjax._jaxpr.primitives import (
  FAMILIES,
  HIGHER_ORDER,
  PARTS,
  EqnParams,
  Part,
  Predicate,
  facts_of,
)

Ops: TypeAlias = Iterable[str | Primitive]
"""Primitives, by name or as objects."""

_Parts: TypeAlias = Mapping[str, Part | Predicate]
"""From a primitive to its part, or to the function that decides it."""

_STANDARD: _Parts = {
  name: family.part for family in FAMILIES if family.part is not None for name in family.names
}

# Primitives that cannot be moved, since their dtypes are fixed when they are traced.
_FIXED = frozenset(name for family in FAMILIES if family.fixed for name in family.names)

# What each function of the standard decides, in words.
_DECIDES = {family.part: family.decides for family in FAMILIES if family.decides}


def _names(parts: _Parts, part: Part) -> frozenset[str]:
  """Returns the primitives that are always in a part."""
  return frozenset(name for name, where in parts.items() if where == part)


def _pairs(parts: _Parts) -> tuple[tuple[str, Predicate], ...]:
  """Returns the primitives whose part a function decides, and the functions."""
  return tuple((name, part) for name, part in sorted(parts.items()) if not isinstance(part, str))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OpLists:
  """The precision of each primitive of JAX under `mpjax.autocast`.

  `OpLists()` has the standard lists. `replace` returns a copy in which primitives are in other
  parts. A primitive in no part runs like an opaque one. docs/op_lists.md has the five parts, the
  standard lists and the reason for each entry. The lists follow MXNet's AMP, PyTorch's autocast and
  TensorFlow's automatic mixed precision, which agree on most primitives.

  Args:
    half: primitives that run in the compute dtype and return it.
    float32: primitives that run in float32 and return it.
    promote: primitives that run in the widest dtype of their operands.
    keep: primitives that run in the dtype of their operand.
    opaque: primitives that run in the dtypes of the traced jaxpr.
    conditional: pairs of a primitive and a function, sorted by primitive. The function maps the
      parameters of an equation to the name of a part. Lists with different function objects are
      unequal, so define each function once, at the top of a module.

  Raises:
    MpjaxValueError: a primitive is in two parts, or holds a jaxpr, as `scan` does.
    MpjaxTypeError: a part is not a frozenset of strings.

  >>> import mpjax
  >>> ops = mpjax.OpLists()
  >>> ops.part_of("dot_general", {}), ops.part_of("exp", {}), ops.part_of("add", {})
  ('half', 'float32', 'promote')
  >>> ops.replace(half=["add", "mul"])
  OpLists().replace(half=["add", "mul"])
  """

  half: frozenset[str] = _names(_STANDARD, "half")
  float32: frozenset[str] = _names(_STANDARD, "float32")
  promote: frozenset[str] = _names(_STANDARD, "promote")
  keep: frozenset[str] = _names(_STANDARD, "keep")
  opaque: frozenset[str] = _names(_STANDARD, "opaque")
  conditional: tuple[tuple[str, Predicate], ...] = _pairs(_STANDARD)

  def __post_init__(self) -> None:
    for part in PARTS:
      names = getattr(self, part)
      if not (isinstance(names, frozenset) and all(isinstance(name, str) for name in names)):
        raise MpjaxTypeError(
          f"OpLists({part}=...)",
          expected="a frozenset of names",
          got=repr(names),
          fix="Use OpLists().replace(...): it takes any sequence, and moves names out of other "
          "parts.",
        )
    if not (isinstance(self.conditional, tuple) and all(map(_is_pair, self.conditional))):
      raise MpjaxTypeError(
        "OpLists(conditional=...)",
        expected="a tuple of pairs of a name and a hashable function",
        got=repr(self.conditional),
        fix="OpLists().replace(conditional={...}) takes a dict.",
      )
    fields = {part: sorted(getattr(self, part)) for part in PARTS}
    seen: set[str] = set()
    for field, names in (*fields.items(), ("conditional", [name for name, _ in self.conditional])):
      where = f"OpLists({field}=...)"
      for name in names:
        if name in HIGHER_ORDER:
          raise _higher_order(where, name)
        if name in seen:
          raise MpjaxValueError(
            where,
            expected="every primitive in one part",
            got=f"{name!r}, which is also in another part",
            fix=f'Write OpLists().replace({field}=["{name}"]), which removes it from there.',
          )
        seen.add(name)
    # Sorted, so that lists with another order of the pairs are equal. The class is frozen.
    object.__setattr__(self, "conditional", _pairs(dict(self.conditional)))

  @functools.cached_property
  def _parts(self) -> _Parts:
    """From each primitive to its part."""
    return {
      **{name: part for part in PARTS for name in getattr(self, part)},
      **dict(self.conditional),
    }

  def part_of(self, name: str, params: EqnParams) -> str | None:
    """Return the part of an equation.

    Args:
      name: the name of its primitive.
      params: the parameters of the equation. Only conditional primitives need them.

    Returns:
      "half", "float32", "promote", "keep" or "opaque"; None for a primitive in no part.

    Raises:
      MpjaxValueError: the function of a conditional primitive returned another value.

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
    """Return a copy in which the given primitives are in the given parts only.

    mpjax does not know the names of your own primitives. Pass the `Primitive` objects.

    Args:
      half: primitives to run in the compute dtype.
      float32: primitives to run in float32.
      promote: primitives to run in the widest dtype of their operands.
      keep: primitives to run in the dtype of their operand.
      opaque: primitives to run as without autocast.
      conditional: a dict from a primitive to a function. The function maps the parameters of an
        equation to the name of a part.

    Raises:
      MpjaxValueError: a name is not a primitive, cannot be moved, or is given for two parts.
      MpjaxTypeError: a part is one string, or holds objects that are not names or primitives.

    >>> import mpjax
    >>> ops = mpjax.OpLists().replace(half=["tanh", "logistic"], float32=["div"])
    >>> ops.part_of("tanh", {}), ops.part_of("div", {})
    ('half', 'float32')
    >>> ops = ops.replace(conditional={"sort": lambda params: "keep"})
    >>> ops.part_of("sort", {"dimension": 0})
    'keep'
    """
    decisions = {} if conditional is None else conditional
    if not (isinstance(decisions, Mapping) and all(map(_is_predicate, decisions.values()))):
      raise MpjaxTypeError(
        "OpLists.replace(conditional=...)",
        expected="a dict from a primitive to a hashable function of the parameters of its equation",
        got=repr(decisions),
        fix='conditional={"integer_pow": lambda params: "keep"}, for example. A class that defines '
        "__eq__ needs a __hash__ too: the lists are part of the key of jit.",
      )
    by_field: dict[str, Ops] = {
      "half": half,
      "float32": float32,
      "promote": promote,
      "keep": keep,
      "opaque": opaque,
      "conditional": decisions,
    }
    moved: dict[str, Any] = {}  # from a primitive to its new part, or to the function
    fields: dict[str, str] = {}  # from a primitive to the argument that names it
    for field, ops in by_field.items():
      where = f"OpLists.replace({field}=...)"
      # A string is iterable too: "add" would be the primitives "a", "d" and "d".
      if isinstance(ops, (str, Primitive)):
        raise MpjaxTypeError(
          where,
          expected="several primitives, as a list",
          got=repr(ops),
          fix=f"Write [{ops!r}]." if isinstance(ops, str) else "Put it in a list.",
        )
      # `_movable` refuses an argument of any other type.
      for op in ops if isinstance(ops, Iterable) else [ops]:
        name = self._movable(where, op)
        if fields.setdefault(name, field) != field:
          raise MpjaxValueError(
            where,
            expected="every primitive in one part",
            got=f"{name!r}, which is also given for {fields[name]}",
            fix="Remove it from one of the two.",
          )
        moved[name] = decisions[op] if field == "conditional" else field
    parts = {**self._parts, **moved}
    lists: dict[str, Any] = {part: _names(parts, part) for part in PARTS}
    return OpLists(**lists, conditional=_pairs(parts))

  def _movable(self, where: str, op: str | Primitive) -> str:
    """Returns the name of a primitive; raises an error if it cannot be moved."""
    if not isinstance(op, (str, Primitive)):
      raise MpjaxTypeError(
        where,
        expected="names of primitives, or Primitive objects",
        got=repr(op),
        fix="jax.make_jaxpr(f)(x) prints the names of the primitives that a function f uses.",
      )
    name = op.name if isinstance(op, Primitive) else op
    if name in HIGHER_ORDER:
      raise _higher_order(where, name)
    if name in _FIXED:
      raise MpjaxValueError(
        where,
        expected="a primitive whose dtypes can be chosen",
        got=f"{name!r}, which holds a jaxpr or memory with fixed dtypes",
        fix="Write the function inside it in the dtypes that you want.",
      )
    if isinstance(op, str) and name not in self._parts:
      raise MpjaxValueError(
        where,
        expected="primitives as jax.make_jaxpr prints them",
        got=f"{name!r}, which is not a primitive of JAX",
        fix="The nearest are "
        + ", ".join(map(repr, nearest(name, self._parts)))
        + ". For your own primitive, pass the Primitive object.",
      )
    return name

  def __repr__(self) -> str:
    """The changes of the standard lists; `dropped` are standard primitives in no part here."""
    moved: _Parts = dict(self._parts.items() - _STANDARD.items())
    edits = {part: _names(moved, part) for part in PARTS}
    arguments = [f"{part}={_quoted(names)}" for part, names in edits.items() if names]
    if chosen := _pairs(moved):
      texts = (f'"{name}": {_name(f)}' for name, f in chosen)
      arguments.append("conditional={" + ", ".join(texts) + "}")
    if dropped := _STANDARD.keys() - self._parts.keys():
      arguments.append(f"dropped={_quoted(dropped)}")
    return f"OpLists().replace({', '.join(arguments)})" if arguments else "OpLists()"

  def __str__(self) -> str:
    """The primitives of each part, and the decisions on conditional primitives."""
    # The standard opaque list has hundreds of names, so only their number is written.
    rows = {part: ", ".join(sorted(_names(self._parts, part))) for part in PARTS}
    standard = _names(_STANDARD, "opaque")
    added = sorted(self.opaque - standard)
    rows["opaque"] = ", ".join([*added, f"{len(self.opaque & standard)} of the standard list"])
    decisions = [f"{name}: {_DECIDES.get(f) or _name(f)}" for name, f in self.conditional]
    wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * 13
    rows["conditional"] = "; ".join(decisions)
    return "\n".join(wrapper.fill(f"{part:<13}{text or '-'}") for part, text in rows.items())


def _name(predicate: Predicate) -> str:
  """Returns the name of a function, or its repr: a `functools.partial` has no name."""
  return getattr(predicate, "__name__", repr(predicate))


def _is_pair(pair: object) -> bool:
  """Whether an item of `conditional` is a name and a function."""
  if not isinstance(pair, tuple) or len(pair) != 2:
    return False
  return isinstance(pair[0], str) and _is_predicate(pair[1])


def _is_predicate(x: object) -> bool:
  """Whether a value is a function that can be part of a cache key."""
  return callable(x) and isinstance(x, Hashable)


def _quoted(names: Iterable[str]) -> str:
  """Returns names as the Python code of a list."""
  return "[" + ", ".join(f'"{name}"' for name in sorted(names)) + "]"


def _higher_order(where: str, name: str) -> MpjaxValueError:
  """Returns the error for a primitive that holds a jaxpr."""
  return MpjaxValueError(
    where,
    expected="a primitive without an inner jaxpr",
    got=f"{name!r}, which holds a jaxpr",
    fix="mpjax rewrites the jaxpr inside. Move the primitives that are used there, or wrap the "
    "function in mpjax.full_precision.",
  )


def part_of(eqn: JaxprEqn, ops: OpLists) -> str | None:
  """Returns the part of an equation."""
  part = ops.part_of(eqn.primitive.name, eqn.params)
  # The axes of a `dot_general` tell whether it is a matmul, a multiplication or a sum.
  return (facts_of(eqn).instead_of_half or part) if part == "half" else part
