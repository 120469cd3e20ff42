"""`Float8`: how the operands of float8 matmuls are scaled, and which matmuls are too small."""

import contextlib
import dataclasses
import pkgutil
import re
from typing import Any, TypeAlias

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_choice, check_flag, check_init
from mpjax._core.types import HALF_NAMES, HALVES, DType

Size: TypeAlias = int | None

MULTIPLE = 16
"""Each size of a float8 matmul is a multiple of this: the units read 16 bytes of a row at once."""

_SCALINGS = ("tensor", "row")

_WEIGHT_GRADS = ("float8", "half", *HALF_NAMES)

_TOO_SMALL: dict[str, tuple[tuple[Size, Size], ...]] = {
  "tensor": ((4096, 1024),),
  "row": ((None, 2048), (1024, None), (2048, 4096)),
}
"""Sizes at which torchao measured float8 to be slower than bfloat16 on H100, see `Float8.skip`."""


@check_init('Write mpjax.Float8() or mpjax.Float8(scaling="row").')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
  """How a policy multiplies in float8: `mpjax.Policy(compute_dtype="bfloat16", matmul=Float8())`.

  Each operand is divided by a scale and cast. The scale maps its largest element to the largest
  number of the format. There is no state. docs/float8.md lists the matmuls and formats.

  Args:
    scaling: "tensor" for one scale per operand. "row" is more exact and slower: it has one scale
      per row of the left operand and per column of the right one.
    power_of_two: round scales up to a power of two, so that the division is exact.
    weight_grad: the dtype in which gradients of weights are multiplied: "float8", or "half" (or its
      name) for the compute dtype of the policy. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype. K is the length of the sums, N
      the number of columns of the weight; None in a pair is any size. None instead of pairs takes
      the thresholds that torchao measured.

  Raises:
    MpjaxValueError: an unknown scaling or weight_grad, or a skip that is not pairs of sizes.
    MpjaxTypeError: a power_of_two that is not a bool.

  >>> import mpjax
  >>> print(mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(scaling="row")))
  params=float32,compute=bfloat16,matmul=float8:row
  >>> mpjax.Policy.parse("mixed_float8").matmul == mpjax.Float8()
  True
  """

  scaling: str = "tensor"
  power_of_two: bool = False
  weight_grad: str = "float8"
  skip: tuple[tuple[Size, Size], ...] | None = None

  def __post_init__(self) -> None:
    check_choice(self.scaling, _SCALINGS, "mpjax.Float8(scaling=...)")
    check_choice(self.weight_grad, _WEIGHT_GRADS, "mpjax.Float8(weight_grad=...)")
    check_flag(self.power_of_two, "mpjax.Float8(power_of_two=...)")
    if self.skip is not None:
      object.__setattr__(self, "skip", _parse_skip(self.skip))

  @property
  def too_small(self) -> tuple[tuple[Size, Size], ...]:
    """The sizes (K, N) up to which a matmul is left in the compute dtype."""
    return _TOO_SMALL[self.scaling] if self.skip is None else self.skip

  def __str__(self) -> str:
    parts = ["float8"]
    if self.scaling != "tensor":
      parts.append(self.scaling)
    if self.power_of_two:
      parts.append("power_of_two")
    if self.weight_grad != "float8":
      parts.append(f"weight_grad={self.weight_grad}")
    if self.skip is not None:
      sizes = "|".join(f"{_write_size(k)}x{_write_size(n)}" for k, n in self.skip)
      parts.append(f"skip={sizes or 'none'}")
    return ":".join(parts)


def _write_size(size: Size) -> str:
  return "*" if size is None else str(size)


def _read_size(text: str) -> Size:
  return None if text == "*" else int(text)


def _parse_skip(skip: Any) -> tuple[tuple[Size, Size], ...]:
  """Returns `skip` as a tuple of tuples; raises MpjaxValueError if it is not pairs of sizes."""
  if not isinstance(skip, (tuple, list)) or not all(map(_is_pair, skip)):
    raise MpjaxValueError(
      "mpjax.Float8(skip=...)",
      expected="pairs of sizes (K, N), None for any size",
      got=repr(skip),
      fix="Write skip=((4096, 1024),), or skip=() for no size that is too small.",
    )
  return tuple((k, n) for k, n in skip)


def _is_pair(pair: object) -> bool:
  if not isinstance(pair, (tuple, list)) or len(pair) != 2:
    return False
  return all(size is None or (type(size) is int and size >= 0) for size in pair)


_SIZES = r"(\d+|\*)x(\d+|\*)"

_SKIP = rf"none|{_SIZES}(\|{_SIZES})*"

_TEXT = re.compile(
  r"float8(:(?P<scaling>tensor|row))?(:(?P<power_of_two>power_of_two))?"
  rf"(:weight_grad=(?P<weight_grad>\w+))?(:skip=(?P<skip>{_SKIP}))?"
)
"""The texts of a `Float8`, see `Float8.__str__`."""


def parse_recipe(matmul: Any, compute: DType, where: str) -> Any:
  """Returns the recipe for matmuls that an argument of a policy is or names.

  Args:
    matmul: a `Float8` or its text, or another recipe or its text "package.module:NAME". The text of
      a recipe has to lead back to it, because a jaxpr holds the text.
    compute: the compute dtype of the policy.
    where: the public call and the argument, for errors.

  Raises:
    MpjaxValueError: an unknown text, or a recipe that does not fit the compute dtype.
    MpjaxTypeError: the argument is neither a recipe nor a text.
  """
  recipe = _read_recipe(str(matmul).strip())
  is_text = isinstance(matmul, str)
  if recipe is None or not (is_text or matmul == recipe):
    expected = "a mpjax.Float8, or its text such as 'float8:row', or a recipe 'package.module:NAME'"
    if is_text:
      fix = "Write what str(mpjax.Float8(...)) prints."
      raise MpjaxValueError(where, expected=expected, got=repr(matmul), fix=fix)
    fix = "Write matmul=mpjax.Float8(...), or leave it out."
    raise MpjaxTypeError(where, expected=expected, got=repr(matmul), fix=fix)
  got = f"{recipe} with compute_dtype={compute.name}"
  if compute not in HALVES:
    expected = f"a policy that computes in {' or '.join(HALF_NAMES)}"
    fix = 'Write compute_dtype="bfloat16": all that is no large matmul runs in it.'
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  if getattr(recipe, "weight_grad", None) in {*HALF_NAMES} - {compute.name}:
    expected = f"weight_grad='float8', 'half' or {compute.name!r}"
    fix = 'Write weight_grad="half" for the compute dtype.'
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return recipe


def _read_recipe(text: str) -> Any:
  """Returns the recipe that a text names, or None."""
  match = _TEXT.fullmatch(text)
  if match is not None:
    return _read_float8(match)
  if ":" in text:
    with contextlib.suppress(ImportError, AttributeError, ValueError):
      return pkgutil.resolve_name(text)
  return None


def _read_float8(match: re.Match[str]) -> Float8:
  """Returns the recipe whose text has matched `_TEXT`."""
  options: Any = {name: value for name, value in match.groupdict().items() if value}
  options["power_of_two"] = "power_of_two" in options
  if "skip" in options:
    pairs = re.findall(_SIZES, options["skip"])
    options["skip"] = [[_read_size(size) for size in pair] for pair in pairs]
  return Float8(**options)
