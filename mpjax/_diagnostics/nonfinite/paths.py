"""The path of a step: its scopes, and without any the module whose parameters it reads."""

import os
from typing import TypeAlias

import jax
from jax.extend.core import JaxprEqn

from mpjax._core.paths import key_names
from mpjax._core.types import KeyPath
from mpjax._diagnostics.nonfinite.traced import Traced
from mpjax._diagnostics.nonfinite.uses import is_cast, is_move
from mpjax._diagnostics.steps import Body, Step
from mpjax._jaxprs.compat import frames_of
from mpjax._jaxprs.primitives import facts_of

_JAX = os.path.dirname(jax.__file__) + os.sep

Lines: TypeAlias = tuple[tuple[str, int], ...]
"""Files and lines that led to an equation, those of JAX left out."""


def path_of(traced: Traced, step: Step) -> str:
  """Returns the path of a step.

  NNX has no named scopes: there a matmul or a cast has the path of the module whose parameter it
  reads, and a matmul of the backward pass that of the matmul on the same lines, if there is only
  one.
  """
  path = step.location.path
  if path:
    return path
  owners = _owners(traced)
  own = {owners[slot] for slot in step.reads if slot in owners}
  reads_one = len(own) == 1 and step in traced.body.steps
  if reads_one and (_is_matmul(step) or is_cast(step)):
    return own.pop()
  lines = _lines(step.eqn)
  same = [each for each in traced.body.steps if _is_matmul(each) and _lines(each.eqn) == lines]
  found = {owners[slot] for each in same for slot in each.reads if slot in owners}
  return found.pop() if lines and len(found) == 1 else ""


def _is_matmul(step: Step) -> bool:
  return facts_of(step.eqn).flops is not None


def _lines(eqn: JaxprEqn) -> Lines:
  traceback = eqn.source_info.traceback
  frames = () if traceback is None else frames_of(traceback)
  return tuple((f.file, f.line) for f in frames if not f.file.startswith(_JAX))


def _owners(traced: Traced) -> dict[int, str]:
  """Returns the paths of modules, by the values that their parameters are moved and cast to."""
  body: Body = traced.body
  named = zip(body.inputs, map(_module, traced.paths), strict=True)
  found = {slot: name for slot, name in named if name}
  for step in body.steps:
    if (is_move(step) or is_cast(step)) and len(step.reads) == 1 and step.reads[0] in found:
      found.update(dict.fromkeys(step.outs, found[step.reads[0]]))
  return found


def _module(path: KeyPath) -> str:
  """Returns the path in the tree of an argument, without the names of the parameter."""
  names = [*key_names(path[2:])]
  if names and names[-1] == "value":
    names.pop()
  return "/".join(names[:-1])
