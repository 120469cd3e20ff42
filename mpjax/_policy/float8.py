"""`Float8`: which matmuls of a policy multiply in float8, and how their operands are scaled."""

import contextlib
import dataclasses
import pkgutil
import re
from typing import Any, TypeAlias

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_choice, check_flag, check_init
from mpjax._core.types import HALF_NAMES, HALVES, DType

Size: TypeAlias = int | None

MULTIPLE = 16
"""The sizes of a matmul in float8 are multiples of it: its units read 16 bytes of a row at once."""

_SCALINGS = ("tensor", "row")

_WEIGHT_GRADS = ("float8", "half", *HALF_NAMES)

_TOO_SMALL: dict[str, tuple[tuple[Size, Size], ...]] = {
  "tensor": ((4096, 1024),),
  "row": ((None, 2048), (1024, None), (2048, 4096)),
}
"""What torchao measured to be slower than bfloat16 on H100, by scaling: see `Float8.skip`."""


@check_init('Write mpjax.Float8() or mpjax.Float8(scaling="row").')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
  """How a policy multiplies in float8: `mpjax.Policy(compute_dtype="bfloat16", matmul=Float8())`.

  Each operand is divided by a scale, so that its largest element becomes the largest number of the
  format, and cast. There is no state. docs/float8.md says which matmuls qualify, in which formats.

  Args:
    scaling: "tensor" is one scale for each operand, "row" one for each row of the left operand and
      each column of the right one: more exact, and slower.
    power_of_two: scales are rounded up to a power of two, by which a division is exact.
    weight_grad: "float8", or "half" for the compute dtype of the policy (or its name): gradients
      of weights are multiplied in it. Their result is float32 either way.
    skip: sizes (K, N) of matmuls that are too small to gain: K is the length of the sums, N the
      number of columns of the weight. One with at most this K and this N is in the compute dtype;
      None in a pair is any size. None takes the thresholds that torchao measured.

  Raises:
    MpjaxValueError: an unknown scaling or weight_grad, or a skip that is no pairs of sizes.
    MpjaxTypeError: a power_of_two that is no bool.

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
    sizes = ("x".join("*" if n is None else str(n) for n in pair) for pair in self.skip or ())
    differs = {
      self.scaling: self.scaling != "tensor",
      "power_of_two": self.power_of_two,
      f"weight_grad={self.weight_grad}": self.weight_grad != "float8",
      f"skip={'|'.join(sizes) or 'none'}": self.skip is not None,
    }
    return ":".join(["float8", *(text for text, shown in differs.items() if shown)])


def _parse_skip(skip: Any) -> tuple[tuple[Size, Size], ...]:
  pairs = isinstance(skip, (tuple, list)) and all(isinstance(x, (tuple, list)) for x in skip)
  sizes = [n for x in skip for n in x] if pairs else ()
  integers = all(n is None or (type(n) is int and n >= 0) for n in sizes)
  if not (pairs and integers and all(len(x) == 2 for x in skip)):
    raise MpjaxValueError(
      "mpjax.Float8(skip=...)",
      expected="pairs of sizes (K, N), None for any size",
      got=repr(skip),
      fix="Write skip=((4096, 1024),), or skip=() for no size that is too small.",
    )
  return tuple((k, n) for k, n in skip)


_SIZES = r"(\d+|\*)x(\d+|\*)"

_TEXT = re.compile(
  r"float8(:(?P<scaling>tensor|row))?(:(?P<power_of_two>power_of_two))?"
  rf"(:weight_grad=(?P<weight_grad>\w+))?(:skip=(?P<skip>none|{_SIZES}(\|{_SIZES})*))?"
)


def parse_recipe(matmul: Any, compute: DType, where: str) -> Any:
  """Returns the recipe that a text names: of a `Float8`, or "package.module:NAME" of another one.

  One that is no text is returned, if its own text leads back to it, as it has to in a jaxpr.
  """
  text, recipe = str(matmul).strip(), None
  if match := _TEXT.fullmatch(text):
    options: Any = {name: value for name, value in match.groupdict().items() if value}
    if "skip" in options:
      pairs = re.findall(_SIZES, options["skip"])
      options["skip"] = [[None if n == "*" else int(n) for n in pair] for pair in pairs]
    recipe = Float8(**{**options, "power_of_two": "power_of_two" in options})
  elif ":" in text:
    with contextlib.suppress(ImportError, AttributeError, ValueError):
      recipe = pkgutil.resolve_name(text)
  got = repr(matmul)
  if recipe is None or not (isinstance(matmul, str) or matmul == recipe):
    expected = "a mpjax.Float8, or its text such as 'float8:row', or a recipe 'package.module:NAME'"
    fix = "Write what str(mpjax.Float8(...)) prints."
    if not isinstance(matmul, str):
      fix = "Write matmul=mpjax.Float8(...), or leave it out."
      raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  elif compute not in HALVES:
    got = f"{recipe} with compute_dtype={compute.name}"
    expected = f"a policy that computes in {' or '.join(HALF_NAMES)}"
    fix = 'Write compute_dtype="bfloat16": all that is no large matmul runs in it.'
  elif getattr(recipe, "weight_grad", None) in {*HALF_NAMES} - {compute.name}:
    got = f"{recipe} with compute_dtype={compute.name}"
    expected = f"weight_grad='float8', 'half' or {compute.name!r}"
    fix = 'Write weight_grad="half" for the compute dtype.'
  else:
    return recipe
  raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
