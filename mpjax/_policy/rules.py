"""`Rule`: a policy for the modules that it picks out; and which policy a module has."""

import dataclasses
import fnmatch
import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Self

from mpjax._core.errors import (
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
  check_call,
  check_choice,
  nearest,
)
from mpjax._core.types import HALVES, Class, DType, Module
from mpjax._policy.policy import Policy, PolicyLike, parse_policy


@dataclasses.dataclass(frozen=True)
class Rule:
  """A policy for the modules that one selector picks out; of several rules the first one wins.

  Args:
    policy: a policy or its string; None leaves the module and all inside exactly as it is.
    path: a glob over the module path (`"encoder/*/attention"`; `*` stays within one level, `**`
      crosses levels and matches the root), or a compiled regular expression; matched in full.
    module: a module class, or a tuple of them; subclasses count.
    where: a predicate on the bound module, asked about every module of the model. Define it once,
      outside of the step: a lambda that is created in each step is another predicate to Python,
      and the step is traced again.
    rewrite: whether operations are rewritten. With False the module runs in the compute dtype as a
      whole: its floating arguments and its `dtype` are in it, and its code runs as it is written.

  Raises:
    MpjaxValueError: no selector or several, or a malformed glob.
    MpjaxTypeError: a selector of the wrong type.

  >>> import mpjax
  >>> mpjax.Rule("float32", path="**/head").path
  '**/head'
  """

  policy: Policy | None
  path: str | re.Pattern[str] | None
  module: Class | tuple[Class, ...] | None
  where: Callable[[Module], bool] | None = dataclasses.field(hash=False)  # It may have no hash.
  rewrite: bool

  @check_call("mpjax.Rule(...)", fix='Write mpjax.Rule("float32", path="head").')
  def __init__(
    self,
    policy: PolicyLike | None,
    *,
    path: str | re.Pattern[str] | None = None,
    module: Class | tuple[Class, ...] | None = None,
    where: Callable[[Module], bool] | None = None,
    rewrite: bool = True,
  ) -> None:
    selectors = {"path": path, "module": module, "where": where}
    names = [name for name, value in selectors.items() if value is not None]
    if len(names) != 1:
      raise MpjaxValueError(
        "mpjax.Rule(...)",
        expected="exactly one of path=, module= and where=",
        got=" and ".join(f"{name}=" for name in names) or "none of them",
        fix="Write one rule for each selector; where= can combine conditions.",
      )
    classes = module if isinstance(module, tuple) else (module,)
    expected, (name,) = "", names
    if isinstance(path, str):
      _check_glob(path)
    elif path is not None and not isinstance(path, re.Pattern):
      expected = "a glob or a compiled regular expression"
    elif module is not None and not (classes and all(isinstance(x, type) for x in classes)):
      expected = "a class or a non-empty tuple of classes"
    elif where is not None and not callable(where):
      expected = "a predicate on the bound module"
    if expected:
      call, got = f"mpjax.Rule({name}=...)", repr(selectors[name])
      fix = "See mpjax.Rule for what each selector takes, such as module=nn.Dense."
      raise MpjaxTypeError(call, expected=expected, got=got, fix=fix)
    example = 'The policy comes first: Rule("float32", path="head").'
    parsed = None if policy is None else parse_policy(policy, "mpjax.Rule(policy)", example)
    _check_rewrite(rewrite, parsed)
    for name, value in {"policy": parsed, **selectors, "rewrite": rewrite}.items():
      object.__setattr__(self, name, value)

  def __repr__(self) -> str:
    name = next(x for x in ("path", "module", "where") if getattr(self, x) is not None)
    selector = getattr(self, name)
    # Of a predicate the name, and not the address.
    text = getattr(selector, "__name__", None) if name == "where" else None
    unchanged = "" if self.rewrite else ", rewrite=False"
    return f"Rule({shown(self.policy)}, {name}={text or repr(selector)}{unchanged})"

  def matches(self, module: Module, path: str) -> bool:
    """Whether this rule picks out a module.

    Args:
      module: the bound module.
      path: its path in the model, names joined by "/"; "" is the root.
    """
    if self.path is not None:
      if isinstance(self.path, str):
        return _matches_glob(self.path, path)
      return self.path.fullmatch(path) is not None
    if self.module is not None:
      return isinstance(module, self.module)
    if self.where is None:
      return False
    try:
      return bool(self.where(module))
    except (AttributeError, TypeError) as error:
      error.add_note(
        f"mpjax: raised by the predicate of {self} for the module {path or 'at the root'!r} "
        f"({type(module).__name__}). It is asked about every module; the root has no name."
      )
      raise


def _check_rewrite(rewrite: object, policy: Policy | None) -> None:
  """Raises an error unless `rewrite` is a bool that means something for a policy."""
  if not isinstance(rewrite, bool):
    raise MpjaxTypeError(
      "mpjax.Rule(rewrite=...)",
      expected="True or False",
      got=repr(rewrite),
      fix="Write rewrite=False for a module with a kernel.",
    )
  if not rewrite and not is_low(policy):
    raise MpjaxValueError(
      "mpjax.Rule(rewrite=False)",
      expected="a policy that computes in float16 or bfloat16",
      got=shown(policy),
      fix="Leave out rewrite=. In float32 nothing is rewritten.",
    )


_NOT_IN_GLOBS = frozenset(r".\()|+^${}")
"""Python's path separator, and what shows that a regular expression was meant."""


def _check_glob(glob: str) -> None:
  """Raises MpjaxValueError for a glob that no module path can match as it was meant."""
  slashes = bool(glob) and "" in glob.split("/")
  if slashes or glob.count("[") != glob.count("]") or set(glob) & _NOT_IN_GLOBS:
    raise MpjaxValueError(
      "mpjax.Rule(path=...)",
      expected="a glob of module names joined by single slashes, such as 'encoder/*/attention'",
      got=repr(glob),
      fix="No leading, trailing or double slash, no dots, brackets closed, no signs of a regular "
      "expression; for anything else pass re.compile(...).",
    )


@functools.lru_cache(maxsize=4096)
def _matches_glob(glob: str, path: str) -> bool:
  """Whether the names on a path match the levels of a glob; "**" is any number of them."""
  # What is remembered keeps it short: each "**" tried again at each position takes minutes.
  (level, _, levels), (name, _, names) = glob.partition("/"), path.partition("/")
  if not glob:
    return not path
  if level == "**":
    return _matches_glob(levels, path) or (bool(path) and _matches_glob(glob, names))
  return bool(path) and fnmatch.fnmatchcase(name, level) and _matches_glob(levels, names)


def first_match(rules: Iterable[Rule], module: Module, path: str) -> Rule | None:
  return next((rule for rule in rules if rule.matches(module, path)), None)


def parse_rules(rules: Iterable[Rule], where: str) -> tuple[Rule, ...]:
  """Returns `rules` as a tuple; anything but an iterable of `Rule` is an MpjaxTypeError."""
  many = isinstance(rules, Iterable) and not isinstance(rules, (str, Mapping))
  parsed: tuple[Any, ...] = tuple(rules) if many else (rules,)
  wrong = [rule for rule in parsed if not isinstance(rule, Rule)] if many else parsed
  if wrong:
    expected, fix = "a sequence of mpjax.Rule", 'Write [mpjax.Rule("float32", path="head")].'
    raise MpjaxTypeError(where, expected=expected, got=repr(wrong[0]), fix=fix)
  return parsed


def is_flax_norm(module: Module) -> bool:
  """Whether `module` is one of Flax's own norms: those that normalise activations, not weights."""
  # The class that was written: a lifted transform (nn.scan, nn.remat) creates another.
  cls = next(c for c in type(module).__mro__ if c.__module__ != "flax.linen.transforms")
  return cls.__module__.split(".")[0] == "flax" and cls.__name__ in _FLAX_NORMS


_FLAX_NORMS = ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """The arguments of `with_policy` or `policy_scope`, checked.

  Fields:
    of_scope: they are those of `policy_scope`, which notes the modules that run. It is compared, so
      that JAX reuses no trace of a wrapped model there, which would hide modules.
  """

  policy: Policy | None
  rules: tuple[Rule, ...]
  unmatched: str
  of_scope: bool = False

  def __str__(self) -> str:
    rules = f", rules={list(self.rules)!r}" if self.rules else ""
    return f"{shown(self.policy)}{rules}"

  @property
  def rewrites(self) -> bool:
    """Whether anything that was given changes the operations of a module, see `rewrites`."""
    return any(map(rewrites, (self.policy, *(rule.policy for rule in self.rules))))

  @property
  def by_path(self) -> bool:
    """Whether two equal modules can get different policies because of their paths."""
    # A predicate can look at the name of a module. Ours looks at its class.
    return any(rule.module is None and rule.where is not is_flax_norm for rule in self.rules)


def parse_config(
  where: str, policy: PolicyLike | None, rules: Iterable[Rule], *, unmatched: str
) -> PolicyConfig:
  """Returns the arguments of `with_policy` and `policy_scope`, checked."""
  parsed = None if policy is None else parse_policy(policy, f"{where}(policy)")
  several = parse_rules(rules, f"{where}(rules=...)")
  check_choice(unmatched, ("raise", "warn", "ignore"), f"{where}(unmatched=...)")
  return PolicyConfig(policy=parsed, rules=several, unmatched=unmatched)


def shown(policy: Policy | None) -> str:
  """Returns a policy as code that takes one is written."""
  return repr(None if policy is None else str(policy))


def is_low(policy: Policy | None) -> bool:
  """Whether operations under a policy run in low precision."""
  return policy is not None and policy.compute_dtype in HALVES


def rewrites(policy: Policy | None) -> bool:
  """Whether operations under a policy change: it has low precision, or says how to multiply."""
  return policy is not None and (is_low(policy) or policy.precision is not None)


class ModulePolicy(NamedTuple):
  """Which policy a module runs under, None for as it is, and the rule that it has it by.

  Fields:
    exempt: a rule leaves it as it is, and all inside it.
    begins: the policy begins here: it is another one, or by another rule, than around the module.
    output_dtype: that of its results where it is the outermost module that is called.
    hidden: rules of the user that match it too, where all that match were asked for.
  """

  policy: Policy | None
  rule: Rule | None = None
  exempt: bool = False
  begins: bool = False
  output_dtype: DType | None = None
  hidden: tuple[Rule, ...] = ()

  def inherited(self) -> Self:
    """Returns what the modules inside inherit, which is the same for many modules."""
    return self._replace(begins=False, output_dtype=None, hidden=())


NO_POLICY = ModulePolicy(None)


def resolve_policy(
  config: PolicyConfig,
  module: Module,
  path: str,
  own: object,
  around: ModulePolicy,
  *,
  all_matches: bool = False,
) -> ModulePolicy:
  """Returns the policy of a module at `path`: the only place that defines precedence.

  A rule that exempts a module beats all that is inside. Then a policy in the module's `own` field
  beats rules, and the first matching rule wins. A module that nothing picks has the policy `around`
  it. `all_matches` also finds the rules that an earlier one hides.
  """
  resolved, rule, hidden = around.inherited(), None, ()
  if isinstance(own, Policy) and not around.exempt:
    resolved = ModulePolicy(own, begins=own != around.policy)
  elif not around.exempt:
    rule = first_match(config.rules, module, path)
  if rule is not None:
    begins = rule.policy != around.policy or rule != around.rule
    others = (each for each in config.rules if all_matches and each is not rule)
    hidden = tuple(each for each in others if each.matches(module, path))
    resolved = ModulePolicy(rule.policy, rule, rule.policy is None, begins, hidden=hidden)
  dtypes = (policy.output_dtype for policy in (resolved.policy, config.policy) if policy)
  return resolved._replace(output_dtype=next(filter(None, dtypes), None))


def around(paths: Iterable[str]) -> set[str]:
  """Returns paths and those around them: of "Net/up" it is "", "Net" and "Net/up"."""
  return {"/".join(x[:n]) for x in (path.split("/") for path in paths) for n in range(len(x) + 1)}


class ModuleRecord:
  """The classes of a model's modules by path, and the rules that match one, the first or not."""

  def __init__(self, config: PolicyConfig) -> None:
    self.config = config
    self.classes: dict[str, str] = {}
    self.matched: set[Rule] = set()

  def note(self, module: Module, path: str) -> None:
    self.classes[path] = type(module).__name__
    self.matched |= {rule for rule in self.config.rules if rule.matches(module, path)}

  def note_paths(self, paths: Collection[str]) -> None:
    """Notes the paths of modules that no call has met; only rules with a path can match those."""
    self.classes = {**dict.fromkeys(paths, ""), **self.classes}
    rules = [rule for rule in self.config.rules if rule.path is not None]
    self.matched |= {rule for rule in rules if any(rule.matches(None, path) for path in paths)}

  def check(self, origin: str, stacklevel: int, *, kind: str = "module", note: str = "") -> None:
    """Raises UnmatchedRuleError, or warns with a `note`, if a rule matched nothing of `origin`."""
    for rule in self.config.rules if self.config.unmatched != "ignore" else ():
      if rule not in self.matched:
        error = self.unmatched(rule, origin, kind)
        if self.config.unmatched == "raise":
          raise error
        warnings.warn(f"{error} {note}".rstrip(), stacklevel=stacklevel + 1)

  def unmatched(self, rule: Rule, origin: str, kind: str = "module") -> UnmatchedRuleError:
    """Returns the error for a rule that picked out none of the modules."""
    sought = rule.path.pattern if isinstance(rule.path, re.Pattern) else rule.path
    paths = sorted({*self.classes} - {""})
    if rule.module is not None:
      near = f"The model's classes: {', '.join(sorted({*self.classes.values()} - {''}))}."
    elif not paths:
      near = f"The only {kind} is the root, path ''."
    else:
      # What a predicate looks for is unknown: the model's own paths are the best there is to show.
      close = sorted(self.classes)[:3] if sought is None else nearest(sought, paths)
      near = f"The nearest {kind} paths: {', '.join(map(repr, close))}."
      if any(path.endswith(f"/{sought}") for path in paths):
        near += f' Paths begin at the root: "**/{sought}" is at any depth.'
    # Flax names the root in profiles and reports, by its own name or by its class.
    first, _, below = (sought or "").partition("/")
    if below and first in next((item for item in self.classes.items() if item[1]), ()):
      near += f" The name of the root, {first!r}, is no part of paths: write {below!r}."
    ignore = ', or pass unmatched="ignore"' * (kind != "jax.named_scope")
    return UnmatchedRuleError(
      f"rules: {rule}",
      expected=f"a rule that picks out at least one {kind}",
      got=f"none of the {len(self.classes)} {kind}s {origin}",
      fix=f"{near} Fix the selector{ignore}.",
    )
