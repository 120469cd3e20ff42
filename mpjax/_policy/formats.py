"""The formats of matmuls: `Float8`, `MXFP8`, `NVFP4` and `Int8`, and the texts of their options.

A text is the name of a format and its options, separated by colons: "float8:row:skip=none". The
fields of a dataclass declare the names, defaults and choices of its options. All code here derives
from them.
"""

import contextlib
import dataclasses
import pkgutil
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from mpjax._core.errors import (
  MpjaxTypeError,
  MpjaxValueError,
  alternatives,
  check_choice,
  check_flag,
  check_init,
  check_int,
  nearest,
)
from mpjax._core.types import HALF_NAMES, HALVES, DType

Size: TypeAlias = int | None
Sizes: TypeAlias = tuple[tuple[Size, Size], ...]

MULTIPLE = 16
"""The number that each size of a matmul in a format must be a multiple of.

Tensor Cores read 16 bytes at once.
"""

# Random bits are made of uint32 numbers.
_LARGEST_SEED = 2**32 - 1

_TOO_SMALL: dict[str, Sizes] = {
  "tensor": ((4096, 1024),),
  "row": ((None, 2048), (1024, None), (2048, 4096)),
  "block": ((None, 2048), (1024, None), (2048, 4096)),
}
"""Sizes (K, N) up to which torchao measured float8 to be slower than bfloat16 on H100.

See `Float8.skip`.
"""


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


@check_init('Write mpjax.Float8() or mpjax.Float8(scaling="row").')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8(Format):
  """Multiply in float8: `mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8())`.

  Each operand is divided by a scale and cast: to e4m3, gradients to e5m2. The scale maps the
  largest element to the largest number of the format. There is no state. docs/float8.md lists the
  matmuls.

  Args:
    scaling: "tensor" for one scale per operand. "row" is more exact and slower: it has one scale
      per row of the left operand and per column of the right one. "block" has one scale per 128
      elements of a row, and per 128 x 128 elements of a weight, as DeepSeek-V3; these scales are
      powers of two.
    power_of_two: round scales up to a power of two, so that the division is exact.
    input_grad: the format in which gradients of activations are multiplied: "float8", or "half" (or
      its name) for the compute dtype of the policy.
    weight_grad: the same for gradients of weights. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype. K is the length of the sums, N
      the number of columns of the weight; None in a pair is any size. None instead of pairs takes
      the thresholds that torchao measured; "block" takes those of "row".

  Raises:
    MpjaxValueError: an unknown scaling or format of gradients, or a skip that is not pairs of
      sizes.
    MpjaxTypeError: a power_of_two that is not a bool.

  >>> import mpjax
  >>> print(mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(scaling="row")))
  params=float32,compute=bfloat16,matmul=float8:row
  >>> mpjax.Policy.parse("mixed_float8").matmul == mpjax.Float8()
  True
  """

  scaling: Literal["tensor", "row", "block"] = "tensor"
  power_of_two: bool = False
  input_grad: Literal["float8", "half", "bfloat16", "float16"] = "float8"
  weight_grad: Literal["float8", "half", "bfloat16", "float16"] = "float8"
  skip: Sizes | None = None


@check_init("Write mpjax.MXFP8() or mpjax.MXFP8(skip=((4096, 1024),)).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(Format):
  """Multiply in MXFP8: `mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.MXFP8())`.

  Each 32 elements along the summed axis share a scale, which is a power of two. Elements are e4m3,
  those of gradients too. Blackwell GPUs multiply the format; elsewhere it is emulated.

  Args:
    input_grad: the format in which gradients of activations are multiplied: "mxfp8", or "half" (or
      its name) for the compute dtype of the policy.
    weight_grad: the same for gradients of weights. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype, as for `mpjax.Float8`. By
      default no size is too small.

  Raises:
    MpjaxValueError: an unknown format of gradients, or a skip that is not pairs of sizes.

  >>> import mpjax
  >>> print(mpjax.MXFP8(weight_grad="half"))
  mxfp8:weight_grad=half
  >>> mpjax.Policy.parse("mixed_mxfp8").matmul == mpjax.MXFP8()
  True
  """

  input_grad: Literal["mxfp8", "half", "bfloat16", "float16"] = "mxfp8"
  weight_grad: Literal["mxfp8", "half", "bfloat16", "float16"] = "mxfp8"
  skip: Sizes = ()


@check_init("Write mpjax.NVFP4() or mpjax.NVFP4(hadamard=False).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(Format):
  """Multiply in NVFP4: `mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.NVFP4())`.

  Each 16 elements along the summed axis share an e4m3 scale, and all share a float32 scale.
  Elements are e2m1. Blackwell GPUs multiply the format; elsewhere it is emulated. The defaults
  follow NVIDIA's recipe for pretraining (arXiv:2509.25149). It also keeps about 15 % of the layers
  in bfloat16, the last ones among them: give these a rule.

  Args:
    stochastic_rounding: round gradients up or down at random, so that they are right on average.
      Activations and weights are rounded to nearest.
    square_weights: let 16 x 16 elements of a weight share an e4m3 scale. The forward pass and the
      gradient of the activations then multiply by the same numbers.
    hadamard: multiply both operands of the gradient of a weight by one random 16 x 16 Hadamard
      matrix, block by block along the summed axis. It spreads outliers and leaves the product as it
      is.
    seed: the seed of the random signs and of the random rounding. The bits of a gradient are
      derived from the seed and from the gradient itself. So a step is a pure function, and needs no
      key.
    input_grad: the format in which gradients of activations are multiplied: "nvfp4", or "half" (or
      its name) for the compute dtype of the policy.
    weight_grad: the same for gradients of weights. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype, as for `mpjax.Float8`. By
      default no size is too small.

  Raises:
    MpjaxValueError: an unknown format of gradients, a seed out of range, or a skip that is not
      pairs of sizes.
    MpjaxTypeError: a stochastic_rounding, square_weights or hadamard that is not a bool, or a seed
      that is not an int.

  >>> import mpjax
  >>> print(mpjax.NVFP4(hadamard=False, seed=7))
  nvfp4:hadamard=false:seed=7
  >>> mpjax.Policy.parse("mixed_nvfp4").matmul == mpjax.NVFP4()
  True
  """

  stochastic_rounding: bool = True
  square_weights: bool = True
  hadamard: bool = True
  seed: int = 0
  input_grad: Literal["nvfp4", "half", "bfloat16", "float16"] = "nvfp4"
  weight_grad: Literal["nvfp4", "half", "bfloat16", "float16"] = "nvfp4"
  skip: Sizes = ()


@check_init('Write mpjax.Int8() or mpjax.Int8(scaling="tensor").')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Format):
  """Multiply in int8: `mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Int8())`.

  Each operand is divided by a scale, which maps its largest element to 127, and rounded to nearest.
  Sums are exact, in int32. TPUs multiply int8 since v5e, GPUs since Turing. By default only the
  forward pass is in int8: gradients are those of a matmul in the compute dtype, of operands that
  are not quantised.

  Args:
    scaling: "row" for one scale per row of the left operand and per column of the right one.
      "tensor" for one scale per operand.
    input_grad: the format in which gradients of activations are multiplied: "half" (or its name)
      for the compute dtype of the policy, or "int8".
    weight_grad: the same for gradients of weights. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype, as for `mpjax.Float8`. By
      default no size is too small.

  Raises:
    MpjaxValueError: an unknown scaling or format of gradients, or a skip that is not pairs of
      sizes.

  >>> import mpjax
  >>> print(mpjax.Int8(scaling="tensor", input_grad="int8"))
  int8:tensor:input_grad=int8
  >>> mpjax.Policy.parse("mixed_int8").matmul == mpjax.Int8()
  True
  """

  scaling: Literal["row", "tensor"] = "row"
  input_grad: Literal["int8", "half", "bfloat16", "float16"] = "half"
  weight_grad: Literal["int8", "half", "bfloat16", "float16"] = "half"
  skip: Sizes = ()


# Questions of the recipes about the options of any format.


def format_name(cls: type[Format]) -> str:
  """Returns the name of a format. Its texts begin with it."""
  return cls.__name__.lower()


_FORMATS = {format_name(cls): cls for cls in (Float8, MXFP8, NVFP4, Int8)}


def why_not_gradient(options: Any, *, of_weight: bool) -> str | None:
  """Returns the option that keeps a gradient in the compute dtype; None if it is in the format."""
  option = "weight_grad" if of_weight else "input_grad"
  return None if getattr(options, option) == format_name(type(options)) else f"{option}=half"


def why_not(options: Any, depth: int, columns: int, *, multiple: int = MULTIPLE) -> str | None:
  """Returns why a matmul of these sizes stays in the compute dtype; None if it does not.

  Args:
    options: the options of a format.
    depth: K, the length of the sums.
    columns: N, the number of columns of the weight.
    multiple: the number that both sizes must be multiples of.
  """
  for name, size in (("K", depth), ("N", columns)):
    if size % multiple:
      return f"{name}={size} is no multiple of {multiple}"
  # A matmul is too small if it is within both sizes of a pair. None in a pair is any size.
  skip = _TOO_SMALL[options.scaling] if options.skip is None else options.skip
  for most in skip:
    if all(n is None or size <= n for size, n in zip((depth, columns), most, strict=True)):
      return f"too small to gain: K={depth}, N={columns}"
  return None


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
    return check_int(value, where, least=0, most=_LARGEST_SEED, fix="Write seed=0.")
  if value is None and field.default is None:
    return None
  return _checked_sizes(value, where)


def _checked_sizes(skip: Any, where: str) -> Sizes:
  """Returns pairs of sizes as tuples, so that they can be hashed."""
  if not isinstance(skip, (tuple, list)) or not all(map(_is_pair, skip)):
    raise MpjaxValueError(
      where,
      expected="pairs of sizes (K, N), None for any size",
      got=repr(skip),
      fix="Write skip=((4096, 1024),), or skip=() for no size that is too small.",
    )
  return tuple((k, n) for k, n in skip)


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
  return tuple(tuple(map(_read_size, pair.split("x"))) for pair in text.split("|"))


def _read_size(text: str) -> Size:
  """Returns a size of a pair; None for any size."""
  return None if text == "*" else int(text)


def _read_options(cls: type[Format], items: Sequence[str], where: str, text: str) -> Format:
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
    if name not in fields or name in options:
      raise _unknown_option(cls, item, where, text)
    options[name] = value
  return cls(**options)


def _unknown_option(cls: type[Format], item: str, where: str, text: str) -> MpjaxValueError:
  """Returns the error for an item of a text that is not an option, or is given twice."""
  items = [*_words(cls), *(f"{field.name}=" for field in _fields(cls))]
  return MpjaxValueError(
    where,
    expected=f"the text of a mpjax.{cls.__name__}, each option once",
    got=f"{item!r} in {text!r}",
    fix=f"Did you mean {alternatives(nearest(item, items))}?",
  )


# The argument of a policy.


def parse_recipe(matmul: Any, compute: DType, where: str) -> Any:
  """Returns the recipe for matmuls of an argument of a policy.

  Args:
    matmul: the options of a format or their text, or another recipe or its text
      "package.module:NAME". The text of a recipe must lead back to it, because a jaxpr holds the
      text.
    compute: the compute dtype of the policy.
    where: the public call and the argument, for errors.

  Raises:
    MpjaxValueError: an unknown text, or a recipe that does not fit the compute dtype.
    MpjaxTypeError: the argument is neither a recipe nor a text.
  """
  # An object goes through its text too, which shows that the text leads back to it.
  recipe = _read_recipe(str(matmul).strip(), where)
  is_text = isinstance(matmul, str)
  if recipe is None or not (is_text or matmul == recipe):
    _refuse(matmul, where)
  got = f"{recipe} with compute_dtype={compute.name}"
  if compute not in HALVES:
    expected = f"a policy that computes in {' or '.join(HALF_NAMES)}"
    fix = 'Write compute_dtype="bfloat16". Other operations and small matmuls run in it.'
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  # "bfloat16" in place of "half" must be the compute dtype. User recipes may lack both options.
  for name in ("input_grad", "weight_grad"):
    if getattr(recipe, name, None) in {*HALF_NAMES} - {compute.name}:
      expected = f"{name}={format_name(type(recipe))!r}, 'half' or {compute.name!r}"
      fix = f'Write {name}="half" for the compute dtype.'
      raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return recipe


def _read_recipe(text: str, where: str) -> Any:
  """Returns the recipe that a text names, or None."""
  name, *items = text.split(":")
  if name in _FORMATS:
    return _read_options(_FORMATS[name], items, where, text)
  if items:  # Without a colon, `resolve_name` would import any module.
    with contextlib.suppress(ImportError, AttributeError, ValueError):
      return pkgutil.resolve_name(text)
  return None


def _refuse(matmul: Any, where: str) -> NoReturn:
  """Raises the error for an argument that is not a recipe or the text of one."""
  names = [f"mpjax.{cls.__name__}" for cls in _FORMATS.values()]
  expected = f"{', '.join(names)}, its text such as 'float8:row', or a recipe 'package.module:NAME'"
  if not isinstance(matmul, str):
    fix = "Write matmul=mpjax.Float8(...), or a recipe that its str() imports."
    raise MpjaxTypeError(where, expected=expected, got=repr(matmul), fix=fix)
  near = nearest(matmul.strip().partition(":")[0], _FORMATS, count=2)
  fix = f"Did you mean {alternatives(near)}? Write what str(mpjax.Float8(...)) prints."
  raise MpjaxValueError(where, expected=expected, got=repr(matmul), fix=fix)
