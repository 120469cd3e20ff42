"""Where an equation is: its module or named scope, its pass, and the line of the user's code."""

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
"""What the scopes of this library begin with: marks in a name stack, which no path shows."""

MODULE = PREFIX + "module="
"""The path of a module under a policy, in the jaxpr that `mpjax.audit` traces."""

RECIPE = PREFIX + "matmul="
"""The recipe and the product of a matmul, "float8:weight_grad", with the scaling of operands."""

EMULATED = PREFIX + "emulated"
"""A matmul of a recipe whose operands are dequantised before it."""

INNER_GRAD = "mpjax_inner_grad"
"""The scope of `mpjax.inner_grad`. Without `PREFIX`, so that rewriting keeps it."""

Direction: TypeAlias = Literal["forward", "backward", "recomputed"]
"""The pass that an operation belongs to; "recomputed": forward work that `remat` repeats."""

_RECOMPUTED = "rematted_computation"
# With brackets: without, it is the name of a primitive, which only the table has.
_BACKWARD, _DIFFERENTIATED = "transpose()", "jvp()"


class Source(NamedTuple):
  """A line of code.

  Reports write it as "train.py:12", and a line of a notebook as "cell:12", counted in its cell.

  Args:
    file: the path of the file; of a cell of a notebook, the name that the notebook gave it.
    line: counted from 1.
    function: in which the line is.
  """

  file: str
  line: int
  function: str

  def __str__(self) -> str:
    return f"{os.path.basename(shown_file(self.file))}:{self.line}"


class Location(NamedTuple):
  """Where an equation is.

  Args:
    scopes: its named scopes, the outermost first, with the marks of policies among them.
    direction: the pass.
    source: the innermost line that is not of JAX, Flax or another such library; None if unknown.
  """

  scopes: tuple[str, ...] = ()
  direction: Direction = "forward"
  source: Source | None = None

  @property
  def path(self) -> str:
    """That of the module under a policy, or else of the named scopes.

    Linen has a scope for each module, so there the scopes contain the path of the module. In NNX a
    scope is the user's, and may be the same in several modules.
    """
    scopes, module = path_of(self.scopes), self.marked(MODULE)
    if module and f"/{module}/" not in f"/{scopes}/":
      return module
    return scopes

  def marked(self, mark: str) -> str | None:
    """Returns what the innermost scope says that begins with a mark; None if there is none."""
    for scope in reversed(self.scopes):
      if scope.startswith(mark):
        return scope[len(mark) :]
    return None


@functools.lru_cache(maxsize=4096)
def path_of(scopes: tuple[str, ...]) -> str:
  """Returns the path that rules match: scopes joined by "/", a Flax model's class first.

  The method in "Encoder.encode", which Flax adds for all but `__call__`, does not count.
  """
  names: list[str] = []
  method_around = ""
  for scope, inside in itertools.pairwise((*scopes, "")):
    # The formula of an einsum is no module.
    if scope.startswith(PREFIX) or scope == INNER_GRAD or "->" in scope:
      continue
    name, method = _module_and_method(scope, inside)
    # Two cases are one module: a method that calls it ("cell.scan_fn/cell"), and the function that
    # a lifted transform took ("MLP/MLP.body").
    is_same = names[-1:] == [name] and (method_around != "" or method != "")
    if not is_same:
      names.append(name)
    method_around = method
  if names[1:2] == names[:1]:
    names = names[1:]  # The root of a model that a scope applied once more.
  return "/".join(names)


def _module_and_method(scope: str, inside: str) -> tuple[str, str]:
  """Returns the module and the method in a scope, "" for none; `inside` is the next scope in it."""
  name, _, method = scope.partition(".")
  # A mark tells a module that has a dot in its name from a method.
  is_module = inside.startswith(MODULE) and inside[len(MODULE) :].endswith(scope)
  if is_module or name == "" or not method.isidentifier():
    return scope, ""
  return name, method


def location(eqn: JaxprEqn, around: Location | None = None) -> Location:
  """Returns where an equation is; JAX writes its scopes relative to the equation `around` it."""
  around = around or Location()
  names, direction = _scopes(scopes_of(eqn.source_info.name_stack))
  source = _source(eqn.source_info.traceback) or around.source
  return Location(around.scopes + names, direction or around.direction, source)


@functools.lru_cache(maxsize=4096)
def _scopes(stack: tuple[tuple[str, bool], ...]) -> tuple[tuple[str, ...], Direction | None]:
  """Returns the names in a name stack, and the pass, if it says one.

  `remat` in a backward pass is at "transpose(jvp(Net))/jvp(Net)": what follows a transformation
  may begin at the root again.
  """
  names: tuple[str, ...] = ()
  since: tuple[str, ...] = ()
  direction: Direction | None = None
  for name, is_transform in stack:
    if not is_transform and name != _RECOMPUTED:
      since += (name,)
      continue
    names, since = _joined(names, since), ()
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
  return more if more[: len(names)] == names else names + more


def call_of(*eqns: JaxprEqn) -> tuple[Source, ...]:
  """Returns which call wrote an equation: the user's line, and what that called of a library.

  It is that of the first of `eqns` of which both are known: an equation, then what it is in; or ().
  """
  return next(filter(None, (_call(eqn.source_info.traceback) for eqn in eqns)), ())


@functools.lru_cache(maxsize=4096)
def _call(traceback: Traceback) -> tuple[Source, ...]:
  frames = tuple(Source(*frame) for frame in frames_of(traceback))
  own = next((i for i, frame in enumerate(frames) if not is_library(frame.file)), 0)
  return frames[own - 1 : own + 1] if own else ()


@functools.lru_cache(maxsize=4096)
def _source(traceback: Traceback) -> Source | None:
  """Returns the innermost line outside of libraries; None if unknown."""
  frames = (Source(*frame) for frame in frames_of(traceback))
  return next((frame for frame in frames if not is_library(frame.file)), None)


def line_of_user(error: BaseException) -> str:
  """Returns the file and line of the user's code that an error came from, with what it says."""
  frames = traceback.extract_tb(error.__traceback__)
  frame = ([f for f in frames if not is_library(f.filename)] or frames)[-1]
  return f"{shown_file(frame.filename)}:{frame.lineno}: {frame.line}"


# Jupyter: /tmp/ipykernel_17/2194308582.py; IPython and Colab: <ipython-input-3-a5b1f>
_CELL = re.compile(
  r"[/\\]ipykernel_\d+[/\\]\d+\.py$|(?:^<|[/\\])ipython-input-(?:(?P<number>\d+)-)?\w+(?:>|\.py)$"
)


def shown_file(file: str) -> str:
  """Returns how reports and errors write the file of a line: its path, or "cell" in a notebook."""
  # The file of a cell is named by a hash of its text, which no reader could look up.
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
  """Whether a file is of mpjax, of what it depends on, or of Python itself."""
  # A user's model may be an installed package, and a checkout may be called anything.
  standard = file.startswith(_STANDARD) and not _INSTALLED.search(file)
  ours = file.startswith((_PACKAGE + os.sep, "<frozen"))
  return ours or standard or bool(_BELOW.search(file))
