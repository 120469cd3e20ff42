"""The rules by which modules have the policies that `tune` chooses."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from mpjax._diagnose.matmul_formats import FLOAT32_POLICY
from mpjax._diagnose.paths import layers_of, selector
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule, with_enclosing


def rules_for(
  formats: Mapping[str, Policy], rule_paths: Mapping[str, str], policy: Policy
) -> tuple[Rule, ...]:
  """Returns rules by which some paths have some policies, and the rest of the program `policy`."""
  # All modules have one other policy, for example float32.
  others = set(formats.values()) - {policy}
  # In Linen a model of one module has no name that selects it.
  if len(others) == 1 and policy not in formats.values():
    return (Rule(*others, path="**"),)
  chosen: dict[tuple[Policy, bool], list[str]] = {}
  for path, policy_of_path in formats.items():
    # A module has the rule of the nearest one around it.
    outside = [other for other in with_enclosing([path]) & formats.keys() if other != path]
    # The longest path around a module is the nearest.
    inherited = formats[max(outside, key=len)] if outside else policy
    if policy_of_path != inherited:
      key = _inside(policy_of_path, inherited), policy_of_path == policy
      chosen.setdefault(key, []).append(path)
  every = with_enclosing(rule_paths.values()) | formats.keys()
  upgrades, kept = list[Rule](), list[Rule]()
  for (policy_of_paths, is_kept), paths in chosen.items():
    rules = [
      Rule(policy_of_paths, path=selector(layers, rule_paths))
      for layers in layers_of(paths, every - {*paths})
    ]
    # A rule with the base policy exempts a module from the rule around it.
    (kept if is_kept else upgrades).extend(rules)
  # No two rules select the same path, so that their order is free: upgrades are read first.
  return (*upgrades, *kept)


def _inside(policy: Policy, outer: Policy) -> Policy:
  """Returns the policy of a module inside a module with another policy.

  In low precision its results stay as they were computed. With an output dtype, a query and a key
  in float16 would be cast to float32, and their product would be a matmul of float32 inputs. A
  module in float32 runs as it was written, so that it must be given float32.
  """
  if policy == FLOAT32_POLICY:
    return policy
  output = jnp.float32 if outer == FLOAT32_POLICY else None
  return dataclasses.replace(policy, output_dtype=output)
