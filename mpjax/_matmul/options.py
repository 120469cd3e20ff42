"""The options of formats, and their texts.

A text is the name of a format and its options, separated by colons: "float8:row:skip=none". The
fields of a dataclass declare the names, defaults and choices of its options. All code here derives
from them.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from mpjax._core.errors import (
  MpjaxValueError,
  alternatives,
  check_choice,
  check_flag,
  check_int,
  check_type,
  nearest,
)

Size: TypeAlias = int | None
Sizes: TypeAlias = tuple[tuple[Size, Size], ...]

MULTIPLE = 16
"""The number that each size of a matmul in a format must be a multiple of.

Tensor Cores read 16 bytes at once.
"""

# Seeds are hashed as uint32 numbers.
_LARGEST_INT = 2**32 - 1


class Format:
  """The options of a format. Each subclass is a frozen dataclass, named by its lower-case name.

  The type of a field says how its values are checked, written and read: a `Literal`, a `bool`, an
  `int`, or `Sizes`.
  """

  def __post_init__(self) -> None:
    for field in _fields(type(self)):
      where = f"mpjax.{type(self).__name__}({field.name}=...)"
      value = _checked(field, getattr(self, field.name), where)
      object.__setattr__(self, field.name, value)  # The subclasses are frozen.

  def __str__(self) -> str:
    # Words without a name come first, then "name=value". Defaults are left out, so that equal
    # options have one text and a new option changes no text.
    words, pairs = [format_name(type(self))], []
    names = {option: word for word, option in _words(type(self)).items()}
    for field in _fields(type(self)):
      value = getattr(self, field.name)
      if value == field.default:
        continue
      if (field.name, value) in names:
        words.append(names[field.name, value])
      else:
        pairs.append(f"{field.name}={_written(value)}")
    return ":".join([*words, *pairs])


def format_name(cls: type[Any]) -> str:
  """Returns the name of a format. Its texts begin with it."""
  return cls.__name__.lower()


@runtime_checkable
class FormatOptions(Protocol):
  """The options that every format has, because the recipes of all formats read them."""

  # The name of the format if gradients of inputs, or of weights, are multiplied in it. Any other
  # value is the compute dtype.
  @property
  def input_grad(self) -> str: ...
  @property
  def weight_grad(self) -> str: ...

  # Sizes (K, N) up to which a matmul stays in the compute dtype. None stands for the sizes that
  # were measured, see `FormatRecipe.measured_skip`.
  @property
  def skip(self) -> Sizes | None: ...


@dataclasses.dataclass(frozen=True)
class FormatRecipe:
  """Parts of `Recipe` that the recipes of all formats share.

  A recipe declares the formats that it takes as the type of its field `options`.
  """

  options: FormatOptions

  def __post_init__(self) -> None:
    recipe, declared = type(self).__name__, type(self).__dataclass_fields__["options"].type
    names = [f"mpjax.{cls.__name__}" for cls in typing.get_args(declared) or (declared,)]
    expected, fix = f"a {' or '.join(names)}", f"Write {recipe}({names[0]}())."
    check_type(self.options, declared, f"{recipe}(options)", expected=expected, fix=fix)

  @property
  def name(self) -> str:
    return format_name(type(self.options))

  @property
  def block(self) -> int | None:
    return None

  @property
  def measured_skip(self) -> Sizes:
    """The `skip` that None stands for."""
    return ()

  def why_not(self, depth: int, columns: int) -> str | None:
    multiple = self.block or MULTIPLE
    for name, size in (("K", depth), ("N", columns)):
      if size % multiple:
        return f"{name}={size} is no multiple of {multiple}"
    # A matmul is too small if it is within both sizes of a pair. None in a pair is any size.
    skip = self.options.skip
    for most in self.measured_skip if skip is None else skip:
      if all(n is None or size <= n for size, n in zip((depth, columns), most, strict=True)):
        return f"too small to gain: K={depth}, N={columns}"
    return None

  def why_not_gradient(self, depth: int, *, of_weight: bool) -> str | None:
    if of_weight:
      option, chosen = "weight_grad", self.options.weight_grad
    else:
      option, chosen = "input_grad", self.options.input_grad
    return None if chosen == self.name else f"{option}=half"


# Values of options: checked, written and read by the type of their field.


class _Field(NamedTuple):
  """A field of a format, as its dataclass declares it."""

  name: str
  type: Any  # a `Literal`, `bool`, `int` or `Sizes`
  default: Any

  @property
  def choices(self) -> tuple[str, ...]:
    """The values of a `Literal`; none for other types."""
    is_choice = typing.get_origin(self.type) is Literal
    return typing.get_args(self.type) if is_choice else ()


def _fields(cls: type[Format]) -> Iterator[_Field]:
  """Yields the fields of a format in the order of the class."""
  for field in dataclasses.fields(typing.cast("Any", cls)):
    yield _Field(field.name, field.type, field.default)


def _words(cls: type[Format]) -> dict[str, tuple[str, Any]]:
  """Returns the words that set an option without its name: the option and the value of each.

  Such a word is the name of a flag, or a choice that only one option has.
  """
  # "half" is a choice of two options, so it needs a name. "row" is a choice of `scaling` alone.
  fields = list(_fields(cls))
  choices = [choice for field in fields for choice in field.choices]
  words: dict[str, tuple[str, Any]] = {}
  for field in fields:
    if field.type is bool:
      words[field.name] = (field.name, True)
    for choice in field.choices:
      if choices.count(choice) == 1:
        words[choice] = (field.name, choice)
  return words


def _checked(field: _Field, value: Any, where: str) -> Any:
  """Returns the value of an option in its stored form; raises an error unless it is allowed."""
  if field.choices:
    check_choice(value, field.choices, where)
    return value
  if field.type is bool:
    check_flag(value, where)
    return value
  if field.type is int:
    fix = f"Write {field.name}={field.default}."
    return check_int(value, where, least=0, most=_LARGEST_INT, fix=fix)
  if value is None and field.default is None:
    return None
  if not isinstance(value, (tuple, list)) or not all(map(_is_pair, value)):
    raise MpjaxValueError(
      where,
      expected="pairs of sizes (K, N), None for any size",
      got=repr(value),
      fix="Write skip=((4096, 1024),), or skip=() for no size that is too small.",
    )
  # Tuples can be hashed.
  return tuple((k, n) for k, n in value)


def _is_pair(pair: object) -> bool:
  """Whether a value is a pair of sizes; a bool is not a size."""
  if not isinstance(pair, (tuple, list)) or len(pair) != 2:
    return False
  return all(size is None or (type(size) is int and size >= 0) for size in pair)


def _written(value: Any) -> str:
  """Returns the text of a value, which `_read` reads."""
  if isinstance(value, bool):
    return str(value).lower()
  if not isinstance(value, tuple):
    return str(value)
  # Sizes, such as "4096x1024|*x512". A comma would end the item of a policy.
  pairs = ["x".join("*" if size is None else str(size) for size in pair) for pair in value]
  return "|".join(pairs) or "none"


def _read(field: _Field, text: str) -> Any:
  """Returns the value of an option from its text; raises ValueError for a malformed one."""
  # An unknown choice or flag is returned as text. `_checked` refuses it.
  if field.choices:
    return text
  if field.type is bool:
    return {"true": True, "false": False}.get(text, text)
  if field.type is int:
    return int(text)
  if text == "none":
    return ()
  pairs = [pair.split("x") for pair in text.split("|")]
  return tuple(tuple(None if size == "*" else int(size) for size in pair) for pair in pairs)


def read_options(cls: type[Format], items: Sequence[str], where: str, text: str) -> Format:
  """Returns a format with the options that the items of a text set."""
  words, fields = _words(cls), {field.name: field for field in _fields(cls)}
  options: dict[str, Any] = {}
  for item in items:
    name, equals, value = item.partition("=")
    if item in words:
      name, value = words[item]
    elif equals and name in fields:
      with contextlib.suppress(ValueError):  # `_checked` then refuses the text itself.
        value = _read(fields[name], value)
    if name not in fields or name in options:  # It is unknown, or given twice.
      known = [*words, *(f"{field}=" for field in fields)]
      raise MpjaxValueError(
        where,
        expected=f"the text of a mpjax.{cls.__name__}, each option once",
        got=f"{item!r} in {text!r}",
        fix=f"Did you mean {alternatives(nearest(item, known))}?",
      )
    options[name] = value
  return cls(**options)
