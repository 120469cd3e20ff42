"""The modules of a loss that have matmuls, what these cost, and rules for some of them."""

import itertools
from collections.abc import Collection
from typing import NamedTuple

from mpjax._core.policy import Policy
from mpjax._core.rules import Rule
from mpjax._diagnostics.selectors import named_scopes, prefixes, selector
from mpjax._jaxprs.count import flops_of
from mpjax._jaxprs.locations import Location
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.steps import Body


class Modules(NamedTuple):
  """The modules of a gradient function that compute something of their own."""

  paths: tuple[str, ...]  # their named scopes, joined by "/"
  flops: tuple[int, ...]  # of each in matmuls and convolutions, forward and backward
  matmuls: dict[int, int]  # the position of the module of each matmul, by the number of the step
  others: dict[int, int]  # that of every other operation of the forward pass
  scopes: frozenset[str]  # all paths in the function


def module_of(here: Location) -> str:
  """Returns the module of an operation: "bqhd,bkhd->bhqk", which `jnp.einsum` writes, is none."""
  return "/".join(itertools.takewhile(lambda name: "->" not in name, named_scopes(here)))


def modules_of(body: Body) -> Modules:
  """Returns the modules of a gradient function, in the order of the function."""
  flops: dict[str, int] = {}
  matmuls: dict[int, str] = {}
  others: dict[int, str] = {}
  scopes = {""}
  for step in body.every_step():
    path, operations = module_of(step.location), flops_of(step.eqn)
    scopes |= prefixes(named_scopes(step.location))
    if operations is not None:
      flops[path] = flops.get(path, 0) + operations * step.times
      matmuls[step.number] = path
    elif step.location.direction == "forward" and not (step.bodies or facts_of(step.eqn).moves):
      flops.setdefault(path, 0)
      others[step.number] = path
  position = {path: i for i, path in enumerate(flops)}
  return Modules(
    paths=tuple(flops),
    flops=tuple(flops.values()),
    matmuls={number: position[path] for number, path in matmuls.items()},
    others={number: position[path] for number, path in others.items()},
    scopes=frozenset(scopes),
  )


def rules_for(
  chosen: Collection[str], others: Collection[str], scopes: Collection[str], policy: Policy
) -> tuple[Rule, ...]:
  """Returns rules by which chosen modules compute in float32, and others as the policy says."""
  # In Linen a model of one module has no name that selects it.
  if not others:
    return (Rule("float32", path="**"),)
  every = {**dict.fromkeys(others, False), **dict.fromkeys(chosen, True)}

  def is_around_wide(path: str) -> bool:
    """Whether what is around a module is in float32: it has the rule of the nearest one."""
    outside = [other for other in every if is_inside(path, other)]
    return every[max(outside, key=len)] if outside else False

  wide = [path for path in chosen if not is_around_wide(path)]
  narrow = [path for path in others if is_around_wide(path)]
  return (
    *(Rule("float32", path=selector(path, scopes)) for path in wide),
    *(Rule(policy, path=selector(path, scopes)) for path in narrow),
  )


def is_inside(path: str, other: str) -> bool:
  """Whether a module is inside of another one."""
  return path != other and (not other or path.startswith(f"{other}/"))
