"""The exceptions of mpjax, the composition of their texts, and checks of arguments."""

import difflib
import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._core.types import Leaf, P

R = TypeVar("R")
T = TypeVar("T")


class MpjaxError(Exception):
  """The base of every error that mpjax raises; each is also the builtin of its name.

  Attributes:
    where: the public call, and the argument or the module or tree path.
    expected: the accepted values. `got` describes the given one.
    fix: one thing that the reader can do.

  >>> import mpjax
  >>> try:
  ...   mpjax.Policy.parse("float61")
  ... except mpjax.MpjaxError as error:
  ...   print(error.got)
  'float61'
  """

  def __init__(self, where: str, *, expected: str, got: str, fix: str) -> None:
    super().__init__(message(where, expected=expected, got=got, fix=fix))
    self.where: str = where
    self.expected: str = expected
    self.got: str = got
    self.fix: str = fix

  def __reduce__(self) -> tuple[Callable[[], Self], tuple[()], dict[str, object]]:
    # Python copies and pickles an exception by calling the class with `args`. Here `args` is the
    # text, and the class takes four parts.
    parts = {"expected": self.expected, "got": self.got, "fix": self.fix}
    return functools.partial(type(self), self.where, **parts), (), self.__dict__


class MpjaxValueError(MpjaxError, ValueError):
  """A value of the right type that mpjax cannot work with.

  >>> from mpjax.errors import MpjaxValueError
  """


class MpjaxTypeError(MpjaxError, TypeError):
  """A value of a type (or dtype) that mpjax does not take.

  >>> from mpjax.errors import MpjaxTypeError
  """


class MpjaxRuntimeError(MpjaxError, RuntimeError):
  """A situation in which mpjax cannot continue, whatever the arguments are.

  >>> from mpjax.errors import MpjaxRuntimeError
  """


class MpjaxAssertionError(MpjaxError, AssertionError):
  """A property that a test asserts, and that does not hold.

  >>> from mpjax.errors import MpjaxAssertionError
  """


class UnmatchedRuleError(MpjaxValueError):
  """A rule that matches no module of the model. Often its path is misspelt.

  >>> from mpjax.errors import UnmatchedRuleError
  """


# A traceback shows the module of the class. Users catch `mpjax.MpjaxError`, not a private name.
MpjaxError.__module__ = "mpjax"
for _error in (*MpjaxError.__subclasses__(), UnmatchedRuleError):
  _error.__module__ = "mpjax.errors"


REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The builtin errors that JAX, optax and Flax raise for an unsupported dtype, shape or tree."""


def flax_errors(*names: str) -> tuple[type[Exception], ...]:
  """Returns classes of errors of Flax, which have no builtin base, if Flax is imported."""
  # Flax is optional. Unless it is imported, it raises no errors.
  errors = sys.modules.get("flax.errors")
  return () if errors is None else tuple(getattr(errors, n) for n in names or ("FlaxError",))


LONGEST = 1900
"""The longest text of an error, in characters: it is read in a terminal."""


def message(where: str, *, expected: str, got: str, fix: str) -> str:
  """Returns the text of an error: the place, the expected and the given value, and the fix."""
  # `most` is the length that each part may have. It shrinks until all four fit, so that only the
  # longest parts lose their middle: the `repr` of a model, for example.
  parts = [where, expected, got, fix]
  most = limit = LONGEST - len(": expected , got . ")
  while sum(min(len(part), most) for part in parts) > limit:
    most -= 1
  return "{}: expected {}, got {}. {}".format(*(shortened(part, most) for part in parts))


def shortened(text: str, most: int) -> str:
  """Returns `text` with its middle left out, if it is longer than `most` characters."""
  if len(text) <= most:
    return text
  gap = f" … {len(text)} characters … "
  # The beginning says more than the end, and gets two thirds.
  head = (most - len(gap)) * 2 // 3
  return text[:head] + gap + text[len(text) - (most - len(gap) - head) :]


def in_one_line(value: object) -> str:
  """Returns `repr(value)` in at most 80 characters, since the repr of a model fills a screen."""
  return shortened(" ".join(repr(value).split()), 80)


def listed(problems: Sequence[str], *, most: int = 20) -> str:
  """Returns all problems in one line; of very many the first, and how many more there are."""
  rest = len(problems) - most
  return "; ".join(problems[:most]) + (f"; and {rest} more" if rest > 0 else "")


def nearest(name: str, valid: Iterable[str], *, count: int = 3, least: float = 0.0) -> list[str]:
  """Returns the `count` strings of `valid` most similar to `name`, from the ratio `least` on."""
  # Case is ignored: "BF16" is like "bf16".
  alike = {x: difflib.SequenceMatcher(None, name.lower(), x.lower()).ratio() for x in valid}
  # Ties are sorted by name, so that the text of an error is the same in each run.
  ranked = sorted(alike, key=lambda x: (-alike[x], x))
  return [x for x in ranked[:count] if alike[x] >= least]


def alternatives(names: Iterable[str]) -> str:
  """Returns names as a choice, for errors: "'a' or 'b'"."""
  return " or ".join(map(repr, names))


def kind_of(value: object) -> str:
  """Describes a value, for errors: "a dict", "an array float32[2, 3]", "None", "1024"."""
  # Short values are shown themselves.
  if value is None or isinstance(value, (str, int, float)):
    return repr(value)
  name = "array" if isinstance(value, (jax.Array, np.ndarray)) else type(value).__name__
  # JAX has many classes of tracers, whose names tell a user nothing.
  name = f"traced {name}" if isinstance(value, Tracer) else name
  dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
  contents = "" if dtype is None or shape is None else f" {dtype}{list(shape)}"
  return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}{contents}"


def check_call(where: str, *, fix: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Returns a decorator: a call of `where` that does not fit the signature is an error of ours."""

  def decorate(fn: Callable[P, R]) -> Callable[P, R]:
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
      try:
        # Bind before the call: a TypeError that is raised inside of `fn` is another mistake.
        signature.bind(*args, **kwargs)
      except TypeError as error:
        raise unfit_call(where, signature, kwargs, str(error), fix) from None
      return fn(*args, **kwargs)

    return checked

  return decorate


def unfit_call(
  where: str, signature: inspect.Signature, keywords: Iterable[str], reason: str, fix: str
) -> MpjaxTypeError:
  """Returns the error for a call that does not fit a signature, for the `reason` that Python gives.

  It names the parameters that are most like keywords that do not exist.
  """
  # The user does not write `self` and `cls`.
  names = [name for name in signature.parameters if name not in ("self", "cls")]
  unknown = [keyword for keyword in keywords if keyword not in names]
  meant = [name for keyword in unknown for name in nearest(keyword, names, count=1, least=0.5)]
  if meant:
    fix = f"Did you mean {' and '.join(f'{name}=' for name in meant)}? {fix}"
  return MpjaxTypeError(
    where,
    expected=f"arguments {', '.join(names)}" if names else "no arguments",
    got=reason.removeprefix("got ").replace("missing a required", "no"),
    fix=fix,
  )


def check_init(fix: str) -> Callable[[type[R]], type[R]]:
  """Returns a decorator of classes: `check_call` for the generated `__init__` of a dataclass."""

  def decorate(cls: Any) -> Any:
    cls.__init__ = check_call(f"mpjax.{cls.__name__}(...)", fix=fix)(cls.__init__)
    return cls

  return decorate


def wrong_type(value: object, where: str, *, expected: str, fix: str) -> MpjaxTypeError:
  """Returns the error for a value of another type, which shows the value too."""
  got = f"{value!r} of type {type(value).__name__}"
  return MpjaxTypeError(where, expected=expected, got=got, fix=fix)


# Each raises unless its argument is allowed: MpjaxTypeError for the type, else MpjaxValueError.


def check_type(value: object, kind: type[T], where: str, *, expected: str, fix: str) -> T:
  if not isinstance(value, kind):
    raise MpjaxTypeError(where, expected=expected, got=kind_of(value), fix=fix)
  return value


def check_callable(value: object, where: str, *, expected: str, fix: str) -> None:
  if not callable(value):
    raise MpjaxTypeError(where, expected=expected, got=kind_of(value), fix=fix)


def check_flag(value: object, where: str) -> None:
  if not isinstance(value, bool):
    raise wrong_type(value, where, expected="a bool", fix="Pass True or False.")


def check_int(
  value: object,
  where: str,
  *,
  least: int,
  most: int | None = None,
  expected: str | None = None,
  fix: str,
  fix_type: str = "Pass a Python int.",
) -> int:
  """Raises unless `value` is an integer of Python or NumPy (a bool is none) in the limits.

  `fix` is for an integer out of range, `fix_type` for another type.
  """
  upto = "" if most is None else f" and at most {most}"
  expected = expected or f"an integer, at least {least}{upto}"
  # A bool is an int to Python. As a count it is a mistake.
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise wrong_type(value, where, expected=expected, fix=fix_type)
  number = int(value)
  in_range = number >= least and (most is None or number <= most)
  check_value(number, in_range, where, expected=expected, fix=fix)
  return number


def check_value(value: object, allowed: bool, where: str, *, expected: str, fix: str) -> None:
  if not allowed:
    raise MpjaxValueError(where, expected=expected, got=repr(value), fix=fix)


def check_choice(value: object, choices: Sequence[str], where: str) -> None:
  """Raises unless `value` is one of `choices`, and names those most like it."""
  if value not in choices:
    fix = f"Did you mean {alternatives(nearest(str(value), choices))}?"
    raise MpjaxValueError(where, expected=alternatives(choices), got=repr(value), fix=fix)


def check_scalar(x: Leaf, where: str, *, expected: str, fix: str) -> None:
  """Raises unless `x`, an array or a Python number, has the shape ()."""
  if jnp.shape(x) != ():
    got = f"an array of shape {jnp.shape(x)}"
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
