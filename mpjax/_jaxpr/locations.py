"""The location of an equation: its module or named scope, its pass, and the user's line."""

import functools
import itertools
import os
import pathlib
import re
import traceback
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from mpjax._jaxpr.compat import Traceback, frames_of, scopes_of

PREFIX = "mpjax."
"""The prefix of the scopes that mpjax sets as marks. No path shows them."""

MODULE = PREFIX + "module="
"""A mark with the path of a module under a policy, in the jaxpr that `mpjax.audit` traces."""

RECIPE = PREFIX + "matmul="
"""A mark of a matmul in a recipe, and of the scaling of its operands: "float8:weight_grad"."""

EMULATED = PREFIX + "emulated"
"""A mark of a matmul in a recipe whose operands are dequantised before it."""

NOT_IN = {name: f"{PREFIX}not-{name}=" for name in ("format", "low")}
"""Prefixes of the reasons why a matmul is not in a precision, for `mpjax.audit`.

Of a format, the reason follows the name of the recipe and a colon.
"""


Direction: TypeAlias = Literal["forward", "backward", "recomputed"]
"""The pass that an operation belongs to; "recomputed": forward work that `remat` repeats."""

_RECOMPUTED = "rematted_computation"
# With brackets, since a test allows the names of primitives only in the table of primitives.
_BACKWARD, _DIFFERENTIATED = "transpose()", "jvp()"


class Source(NamedTuple):
  """A line of code.

  Reports write it as "train.py:12", and a line of a notebook as "cell:12", counted in its cell.

  Args:
    file: the path of the file. A cell of a notebook has the name that the notebook gave it.
    line: the number of the line, counted from 1.
    function: the name of the function around the line.
  """

  file: str
  line: int
  function: str

  def __str__(self) -> str:
    return f"{os.path.basename(shown_file(self.file))}:{self.line}"


class Location(NamedTuple):
  """The location of an equation.

  Args:
    scopes: its named scopes and marks, the outermost first.
    direction: the pass.
    source: the innermost line outside JAX, Flax and similar libraries; None if unknown.
    differentiated: whether it is in a function of which JAX computes a gradient.
  """

  scopes: tuple[str, ...] = ()
  direction: Direction = "forward"
  source: Source | None = None
  differentiated: bool = False

  @property
  def path(self) -> str:
    """The path of the module under a policy, or of the named scopes if there is none."""
    # Linen has a scope for each module, so its scopes contain the path of the module, and may go on
    # with scopes of the user. In NNX all scopes are the user's, and modules may share them.
    scopes, module = path_of(self.scopes), self.marked(MODULE)
    if module and f"/{module}/" not in f"/{scopes}/":
      return module
    return scopes

  def marked(self, mark: str) -> str | None:
    """Returns the text behind a mark in the innermost scope that begins with it, or None."""
    for scope in reversed(self.scopes):
      if scope.startswith(mark):
        return scope[len(mark) :]
    return None


@functools.lru_cache(maxsize=4096)
def path_of(scopes: tuple[str, ...]) -> str:
  """Returns the path that rules match: scopes joined by "/", beginning with a Flax model's class.

  Flax adds the method to a scope, as in "Encoder.encode", except for `__call__`. It is left out.
  """
  names: list[str] = []
  method_around = ""  # the method in the scope around, "" for none
  for scope, inside in itertools.pairwise((*scopes, "")):
    # `jnp.einsum` opens a scope with its formula, such as "ij,jk->ik".
    if scope.startswith(PREFIX) or "->" in scope:
      continue
    name, method = _module_and_method(scope, inside)
    # A module may have two scopes. A method of it calls the module ("cell.scan_fn/cell"), or a
    # lifted transform took a function of it ("MLP/MLP.body").
    is_same = names[-1:] == [name] and (method_around != "" or method != "")
    if not is_same:
      names.append(name)
    method_around = method
  # The root appears twice if a method of the model applies the model again.
  if names[1:2] == names[:1]:
    names = names[1:]
  return "/".join(names)


def _module_and_method(scope: str, inside: str) -> tuple[str, str]:
  """Returns the module and the method in a scope, "" for none; `inside` is the next scope in it."""
  name, _, method = scope.partition(".")
  # A module may have a dot in its name. Then the mark inside, which has the whole path, ends in it.
  is_module = inside.startswith(MODULE) and inside[len(MODULE) :].endswith(scope)
  if is_module or name == "" or not method.isidentifier():
    return scope, ""
  return name, method


def location(eqn: JaxprEqn, around: Location | None = None) -> Location:
  """Returns the location of an equation.

  `around` is the location of the equation that holds its jaxpr. JAX writes scopes relative to it.
  """
  around = around or Location()
  stack = scopes_of(eqn.source_info.name_stack)
  names, direction = _scopes(stack)
  return Location(
    around.scopes + names,
    direction or around.direction,
    _source(eqn.source_info.traceback) or around.source,
    around.differentiated or (_DIFFERENTIATED.removesuffix("()"), True) in stack,
  )


@functools.lru_cache(maxsize=4096)
def _scopes(stack: tuple[tuple[str, bool], ...]) -> tuple[tuple[str, ...], Direction | None]:
  """Returns the named scopes in a name stack, and the pass; None if the stack does not say it."""
  # `remat` in a backward pass has the stack "transpose(jvp(Net))/jvp(Net)". The names behind a
  # transformation may begin at the root again, so each section is joined to those before it.
  names: tuple[str, ...] = ()
  since: tuple[str, ...] = ()  # the names since the last transformation
  direction: Direction | None = None
  for name, is_transform in stack:
    if not is_transform and name != _RECOMPUTED:
      since += (name,)
      continue
    names, since = _joined(names, since), ()
    # What `remat` repeats is forward work inside the backward pass, so this name wins.
    if name == _RECOMPUTED:
      direction = "recomputed"
    elif f"{name}()" == _BACKWARD and direction is None:
      direction = "backward"
  return _joined(names, since), direction


def is_of_inner_gradient(stack: Sequence[tuple[str, bool]]) -> bool:
  """Whether a name stack is of the backward pass of a gradient inside a differentiated loss."""
  transforms = [f"{name}()" for name, is_transform in stack if is_transform and name != "vmap"]
  # In the backward pass of the loss itself the transposition is the outermost one.
  return transforms[:1] == [_DIFFERENTIATED] and _BACKWARD in transforms


def _joined(names: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
  """Returns names followed by `more`, which may repeat them from the root on."""
  return more if more[: len(names)] == names else names + more


def lines_of_call(*eqns: JaxprEqn) -> tuple[Source, ...]:
  """Returns the call that wrote an equation: the library's line and the user's line around it.

  `eqns` are an equation and the equations around it. The first with both lines counts. The result
  is () if none has them.
  """
  return next(filter(None, (_call(eqn.source_info.traceback) for eqn in eqns)), ())


@functools.lru_cache(maxsize=4096)
def _call(traceback: Traceback) -> tuple[Source, ...]:
  """Returns the outermost frame of the library that was called, and the user's frame around it."""
  frames = tuple(Source(*frame) for frame in frames_of(traceback))
  # The innermost frame comes first, so the frame before the user's is the one that it called.
  own = next((i for i, frame in enumerate(frames) if not is_library(frame.file)), 0)
  return frames[own - 1 : own + 1] if own else ()


@functools.lru_cache(maxsize=4096)
def _source(traceback: Traceback) -> Source | None:
  """Returns the innermost line outside libraries; None if unknown."""
  frames = (Source(*frame) for frame in frames_of(traceback))
  return next((frame for frame in frames if not is_library(frame.file)), None)


def line_of_user(error: BaseException) -> str:
  """Returns the file, the line and the code of the user's line that raised an error."""
  # An error inside a library without a user's line has the innermost frame.
  frames = traceback.extract_tb(error.__traceback__)
  frame = ([f for f in frames if not is_library(f.filename)] or frames)[-1]
  return f"{shown_file(frame.filename)}:{frame.lineno}: {frame.line}"


# Jupyter: /tmp/ipykernel_17/2194308582.py; IPython and Colab: <ipython-input-3-a5b1f>
_CELL = re.compile(
  r"[/\\]ipykernel_\d+[/\\]\d+\.py$|(?:^<|[/\\])ipython-input-(?:(?P<number>\d+)-)?\w+(?:>|\.py)$"
)


def shown_file(file: str) -> str:
  """Returns the file of a line as reports write it: its path, or "cell" in a notebook."""
  # A notebook names the file of a cell by a hash of its text, which no reader can look up.
  cell = _CELL.search(file)
  if cell is None:
    return file
  return f"cell {cell['number']}" if cell["number"] else "cell"


_PACKAGE = str(pathlib.Path(__file__).parents[1])
_STANDARD = str(pathlib.Path(os.__file__).parent)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_LIBRARIES = "chex|einops|equinox|flax|haiku|jax|jaxlib|jaxtyping|numpy|optax"
_BELOW = re.compile(_INSTALLED.pattern + rf"({_LIBRARIES})[/\\]")


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
  """Whether a file belongs to mpjax, to a library that it works with, or to Python itself."""
  # A user's model may be an installed package too, so only libraries in the list count. A checkout
  # of mpjax may have any name, so its own path counts.
  standard = file.startswith(_STANDARD) and not _INSTALLED.search(file)
  ours = file.startswith((_PACKAGE + os.sep, "<frozen"))
  return ours or standard or bool(_BELOW.search(file))
