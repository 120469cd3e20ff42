"""The paths of steps that are in no named scope: those of the modules whose parameters they take.

Flax NNX and plain functions write no scopes. There a step on `params["layer_1"]["kernel"]` is in
"layer_1".
"""

from collections.abc import Mapping

from jax.extend.core.primitives import convert_element_type_p

from mpjax._jaxprs.locations import Source
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.steps import Body


def paths_by_parameters(top: Body, owners: Mapping[int, str]) -> dict[int, str]:
  """Returns the paths of the steps of a function, by their numbers.

  A step of the backward pass without one has that of the matmul on its line, if there is one only.

  Args:
    top: the function.
    owners: the paths of the modules whose parameters its arguments are.
  """
  paths: dict[int, str] = {}
  lines: dict[Source | None, set[str]] = {}
  _note(top, dict(owners), paths, lines)
  for step in top.every_step():
    source, backward = step.location.source, step.location.direction == "backward"
    on_line = lines.get(source, set()) if backward and source else set[str]()
    if not paths[step.number] and len(on_line) == 1:
      (paths[step.number],) = on_line
  return paths


def _note(
  body: Body, owners: dict[int, str], paths: dict[int, str], lines: dict[Source | None, set[str]]
) -> None:
  for step in body.steps:
    own = {owners[slot] for slot in step.reads if owners.get(slot)}
    (path,) = own if len(own) == 1 else ("",)
    paths[step.number] = step.location.path or path
    facts = facts_of(step.eqn)
    if path and (facts.moves or step.eqn.primitive is convert_element_type_p):
      owners.update(dict.fromkeys(step.outs, path))
    if path and facts.flops is not None and step.location.direction != "backward":
      lines.setdefault(step.location.source, set()).add(path)
    for inner, inside in zip(step.inner, step.bodies, strict=True):
      operands = [step.ins[i] for i in inner.operands or ()]
      pairs = zip(inside.inputs, operands, strict=False)
      owners.update((slot, owners[x]) for slot, x in pairs if isinstance(x, int) and x in owners)
      _note(inside, owners, paths, lines)
