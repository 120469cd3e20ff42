"""The public names, as a reviewed list, and that each says what it does."""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import mpjax
from tests import strict_user

PUBLIC = {
  "mpjax": [
    *("DynamicLossScale", "Float8", "Int8", "MXFP8", "MpjaxError", "NVFP4", "NoLossScale"),
    *("OpLists", "Policy", "Rule"),
    *("SkipNonfinite", "StaticLossScale", "TrainState", "accumulate_gradients", "apply_updates"),
    *("audit", "autocast", "check_loss_scaling", "check_skipped_steps", "compare"),
    *("convert", "find_nonfinite", "full_precision", "keep_if_skipped"),
    "loss_scaling",
    *("loss_scaling_metrics", "low_precision", "make_train_step", "master_weights", "monitor"),
    *("policy_scope", "ranges", "scaled"),
    *("sensitivity", "state_dtype", "step_applied", "tune", "with_policy"),
  ],
  "mpjax.checkpoints": ["restore_like", "to_arrays"],
  "mpjax.errors": [
    *("MpjaxAssertionError", "MpjaxRuntimeError", "MpjaxTypeError", "MpjaxValueError"),
    "UnmatchedRuleError",
  ],
  "mpjax.linen": ["PolicyModule", "policy_scope", "with_policy"],
  "mpjax.nnx": ["atomic_step", "convert", "with_policy"],
  "mpjax.reports": [
    *("AuditReport", "CompareReport", "GroupRanges", "NonfiniteReport", "RangesReport"),
    "SensitivityReport",
    "TuneReport",
  ],
  "mpjax.states": [
    *("AccumulationState", "LossScalingState", "MasterWeightsState", "MonitorState"),
    *("inner_state", "master_params", "monitor_counts", "set_loss_scale", "set_master_params"),
  ],
}
"""A name is added here on purpose: from then on it cannot change without a deprecation."""


def resolve(name: str) -> Any:
  found: Any = mpjax
  for piece in name.split(".")[1:]:
    found = getattr(found, piece)
  return found


MODULES = [module for module in PUBLIC if module != "mpjax"]
NAMES = MODULES + [f"{module}.{name}" for module, names in PUBLIC.items() for name in names]


def members(name: str) -> dict[str, Callable[..., Any]]:
  """Returns the documented callables behind a public name: itself, and a class's methods."""
  thing = resolve(name)
  if isinstance(thing, types.ModuleType):
    return {}
  if not isinstance(thing, type):
    return {name: thing}
  found = {name: thing}
  for key, value in vars(thing).items():
    value = getattr(value, "__func__", value)
    own = inspect.isfunction(value) and value.__qualname__.startswith(thing.__qualname__ + ".")
    if own and not key.startswith("_"):  # not a function that is the default of a field
      found[f"{name}.{key}"] = value
  return found


def parameters(thing: Callable[..., Any]) -> list[inspect.Parameter]:
  if isinstance(thing, type) and issubclass(thing, BaseException):
    return []
  found = inspect.signature(thing).parameters.values()
  return [p for p in found if p.name not in ("self", "cls")]


def raises(thing: Callable[..., Any]) -> bool:
  if isinstance(thing, type) and issubclass(thing, BaseException):
    # Its module is the public one, in which `inspect` would look for the source.
    return "__init__" in vars(thing) and raises(vars(thing)["__init__"])
  tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
  if isinstance(thing, type):
    # Of a class, what its construction raises; methods document their own.
    bodies = [n for n in ast.walk(tree) if getattr(n, "name", "") in ("__init__", "__post_init__")]
  else:
    bodies = [tree]
  return any(isinstance(node, ast.Raise) and node.exc for b in bodies for node in ast.walk(b))


def faults(name: str, thing: Callable[..., Any]) -> list[str]:
  """Returns what the docstring of `thing` lacks; annotations are pyright's."""
  doc = inspect.getdoc(thing) or ""
  found = []
  if not re.match(r"\S.*[.:]\n?", doc):
    found.append("a summary line")
  if parameters(thing):
    section = re.search(r"^Args:\n((?: .*\n|\n)+)", doc + "\n", re.MULTILINE)
    listed = re.findall(r"^  \*{0,2}(\w+)", section[1], re.MULTILINE) if section else []
    missing = [p.name for p in parameters(thing) if p.name not in listed]
    if missing:
      found.append(f"Args: {missing}")
  if raises(thing) and "\nRaises:\n" not in doc:
    found.append("Raises:")
  returns = not isinstance(thing, type) and inspect.signature(thing).return_annotation is not None
  if returns and not re.search(r"^(Returns?|Whether)\b", doc, re.MULTILINE):
    found.append("Returns:")
  return [f"{name} lacks {fault}" for fault in found]


def test_all_and_dir_are_the_reviewed_list():
  for module, names in PUBLIC.items():
    thing = resolve(module)
    assert sorted(thing.__all__) == sorted(names)
    assert set(thing.__all__) <= set(dir(thing))
  modules = [module.partition(".")[2] for module in MODULES]
  assert dir(mpjax) == sorted([*PUBLIC["mpjax"], *modules, "__version__"])


def test_public_names_are_ours_and_documented_with_an_example():
  found = []
  for name in NAMES:
    thing = resolve(name)
    if not isinstance(thing, types.ModuleType) and thing.__module__.split(".")[0] != "mpjax":
      found.append(f"{name} is of another project")
    if ">>> " not in (inspect.getdoc(thing) or ""):
      found.append(f"{name} lacks an example")
    found += [fault for key, each in members(name).items() for fault in faults(key, each)]
  assert found == []


def test_the_check_can_fail():
  def bare(x, y: int) -> int:
    raise ValueError(x, y)

  assert faults("bare", bare) == [
    "bare lacks a summary line",
    "bare lacks Args: ['x', 'y']",
    "bare lacks Raises:",
    "bare lacks Returns:",
  ]


def test_the_script_trains_and_reads_errors():
  batch = jnp.ones((3, 4)), jnp.zeros((3, 2))
  assert strict_user.train_linen(batch) > 2**10
  assert strict_user.train_step(batch).step == 1
  assert strict_user.train_nnx(batch).head.kernel.dtype == jnp.float32
  assert "1.0" in strict_user.functions(batch)
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    mpjax.Policy.parse("float61")
  assert "float61" in strict_user.part_of(excinfo.value)
