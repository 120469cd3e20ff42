"""`Rule`: a policy for the modules that a path, a class or a predicate picks out.

And what a module gets of all that `with_policy` or `policy_scope` was given.
"""

import dataclasses
import fnmatch
import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from mpjax._core.dtypes import HALVES
from mpjax._core.errors import (
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
  check_call,
  nearest,
)
from mpjax._core.policy import Policy, PolicyLike, parse_policy
from mpjax._core.types import Class, DType, Module


@dataclasses.dataclass(frozen=True)
class Rule:
  """A policy for the modules that exactly one selector picks out.

  The first rule that matches a module wins; a module that none matches has the policy of the
  nearest enclosing module that has one.

  Args:
    policy: a policy or its string; None leaves the module and all inside exactly as it is.
    path: a glob over the module path (`"encoder/*/attention"`; `*` stays within one level, `**`
      crosses levels and matches the root), or a compiled regular expression. It is matched in
      full against the names from the wrapped root, joined by "/".
    module: a module class, or a tuple of them; subclasses count.
    where: a predicate on the bound module. It is asked about every module of the model. Predicates
      are compared as objects, as Python compares functions: a lambda that is created in each step
      is another predicate each time, and the step is traced again. Define it once, outside of the
      step. What it reads besides the module counts as it is while the step is traced.

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
  where: Callable[[Module], bool] | None

  @check_call("mpjax.Rule(...)", fix='Write mpjax.Rule("float32", path="head").')
  def __init__(
    self,
    policy: PolicyLike | None,
    *,
    path: str | re.Pattern[str] | None = None,
    module: Class | tuple[Class, ...] | None = None,
    where: Callable[[Module], bool] | None = None,
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
    if isinstance(path, str):
      _check_glob(path)
    elif path is not None and not isinstance(path, re.Pattern):
      raise _wrong_selector("path", "a glob or a compiled regular expression", path)
    classes = module if isinstance(module, tuple) else (module,)
    if module is not None and not (classes and all(isinstance(c, type) for c in classes)):
      raise _wrong_selector("module", "a class or a non-empty tuple of classes", module)
    if where is not None and not callable(where):
      raise _wrong_selector("where", "a predicate on the bound module", where)
    parsed = None if policy is None else parse_policy(policy, "mpjax.Rule(policy)")
    object.__setattr__(self, "policy", parsed)
    for name, value in selectors.items():
      object.__setattr__(self, name, value)

  def __repr__(self) -> str:
    names = ("path", "module", "where")
    selector = next(f"{n}={getattr(self, n)!r}" for n in names if getattr(self, n) is not None)
    policy = None if self.policy is None else str(self.policy)
    return f"Rule({policy!r}, {selector})"

  def matches(self, module: Module, path: str) -> bool:
    """Whether this rule picks out a module.

    Args:
      module: the bound module.
      path: its path in the model, names joined by "/"; "" is the root.

    >>> import mpjax
    >>> mpjax.Rule(None, path="blocks_*/mlp").matches(object(), "blocks_3/mlp")
    True
    """
    if self.path is not None:
      if isinstance(self.path, str):
        return _matches_glob(_levels(self.path), _levels(path))
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


def _wrong_selector(name: str, expected: str, got: object) -> MpjaxTypeError:
  fix = "See mpjax.Rule for what each selector takes."
  return MpjaxTypeError(f"mpjax.Rule({name}=...)", expected=expected, got=repr(got), fix=fix)


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


def _levels(path: str) -> tuple[str, ...]:
  return tuple(path.split("/")) if path else ()


@functools.lru_cache(maxsize=4096)
def _matches_glob(globs: tuple[str, ...], names: tuple[str, ...]) -> bool:
  """Whether the names on a path match the levels of a glob; "**" is any number of them."""
  # What is remembered keeps it short: each "**" tried again at each position takes minutes.
  if not globs:
    return not names
  if globs[0] == "**":
    return any(_matches_glob(globs[1:], names[n:]) for n in range(len(names) + 1))
  first = bool(names) and fnmatch.fnmatchcase(names[0], globs[0])
  return first and _matches_glob(globs[1:], names[1:])


def first_match(rules: Iterable[Rule], module: Module, path: str) -> Rule | None:
  return next((rule for rule in rules if rule.matches(module, path)), None)


def parse_rules(rules: Iterable[Rule], where: str) -> tuple[Rule, ...]:
  """Returns `rules` as a tuple; anything but an iterable of `Rule` is an MpjaxTypeError."""
  many = isinstance(rules, Iterable) and not isinstance(rules, (str, Mapping))
  parsed: tuple[Any, ...] = tuple(rules) if many else (rules,)
  wrong = [rule for rule in parsed if not isinstance(rule, Rule)] if many else parsed
  if wrong:
    raise MpjaxTypeError(
      where,
      expected="a sequence of mpjax.Rule",
      got=repr(wrong[0]),
      fix='Write [mpjax.Rule("float32", path="head")].',
    )
  return parsed


def unmatched_error(
  rule: Rule,
  paths: Sequence[str],
  classes: Sequence[str],
  *,
  kind: str = "module",
  origin: str = "that init passed",
) -> UnmatchedRuleError:
  """Returns the error for a rule that picked out none of the modules at `paths`."""
  if rule.module is not None:
    near = f"The model's classes: {', '.join(sorted({*classes} - {''}))}."
  elif not any(paths):
    near = f"The only {kind} is the root, path ''."
  else:
    # What a predicate looks for is unknown: the model's own paths are the best there is to show.
    sought = rule.path.pattern if isinstance(rule.path, re.Pattern) else rule.path
    named = set(paths) - {""}
    shown = sorted(set(paths))[:3] if sought is None else nearest(sought, named)
    near = f"The nearest {kind} paths: {', '.join(repr(p) for p in shown)}."
    if any(path.endswith(f"/{sought}") for path in named):
      near += f' Paths begin at the root: "**/{sought}" is at any depth.'
  return UnmatchedRuleError(
    f"rules: {rule}",
    expected=f"a rule that picks out at least one {kind}",
    got=f"none of the {len(paths)} {kind}s {origin}",
    fix=f'{near} Fix the selector, or pass unmatched="ignore".',
  )


def is_flax_norm(module: Module) -> bool:
  """Whether `module` is one of Flax's own norms: those that normalise activations, not weights."""
  # The class that was written: a lifted transform (nn.scan, nn.remat) creates another.
  cls = next(c for c in type(module).__mro__ if c.__module__ != "flax.linen.transforms")
  return cls.__module__.split(".")[0] == "flax" and cls.__name__ in _FLAX_NORMS


_FLAX_NORMS = ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """What the user gave to `with_policy` or `policy_scope`, checked; hashed once."""

  policy: Policy | None
  rules: tuple[Rule, ...]
  unmatched: str
  hash: int = dataclasses.field(init=False, repr=False, compare=False)

  def __post_init__(self) -> None:
    # JAX hashes the value of a user context at each call of a jitted function.
    key = (self.policy, self.rules, self.unmatched)
    object.__setattr__(self, "hash", hash(key))

  def __hash__(self) -> int:
    return self.hash

  def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
    # Another process hashes strings and classes in another way.
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
    return functools.partial(type(self), **values), ()

  def __str__(self) -> str:
    """Returns the arguments of `with_policy` that were given, without those that say nothing."""
    parts = [repr(None if self.policy is None else str(self.policy))]
    if self.rules:
      parts.append(f"rules={list(self.rules)!r}")
    return ", ".join(parts)

  @property
  def rewrites(self) -> bool:
    """Whether anything that was given changes the operations of a module, see `rewrites`."""
    return any(map(rewrites, (self.policy, *(rule.policy for rule in self.rules))))

  @property
  def by_path(self) -> bool:
    """Whether two equal modules can get different policies because of their paths."""
    # A predicate can look at the name of a module. Ours looks at its class.
    return any(rule.module is None and rule.where is not is_flax_norm for rule in self.rules)

  @property
  def output_dtype(self) -> DType | None:
    """The dtype of results where a policy begins that names none itself."""
    return None if self.policy is None else self.policy.output_dtype


def parse_config(
  where: str,
  policy: PolicyLike | None,
  rules: Iterable[Rule],
  *,
  unmatched: str,
) -> PolicyConfig:
  """Returns the arguments of `with_policy` and `policy_scope`, checked."""
  parsed = None if policy is None else parse_policy(policy, f"{where}(policy)")
  several = parse_rules(rules, f"{where}(rules=...)")
  if unmatched not in ("raise", "warn", "ignore"):
    where, expected = f"{where}(unmatched=...)", "'raise', 'warn' or 'ignore'"
    fix = "It says what to do about a rule that picks out no module."
    raise MpjaxValueError(where, expected=expected, got=repr(unmatched), fix=fix)
  return PolicyConfig(policy=parsed, rules=several, unmatched=unmatched)


def is_low(policy: Policy | None) -> bool:
  """Whether operations under a policy run in low precision."""
  return policy is not None and policy.compute_dtype in HALVES


def rewrites(policy: Policy | None) -> bool:
  """Whether operations under a policy change: it has low precision, or says how to multiply."""
  return policy is not None and (is_low(policy) or policy.precision is not None)


class ModulePolicy(NamedTuple):
  """Which policy a module runs under, and why.

  Fields:
    policy: None leaves the module as it is.
    picked: a rule or a field of its own gave it the policy, not a module around it.
    exempt: a rule leaves it as it is, and all inside it.
    output_dtype: that of results where a policy begins that names none.
    rule: the rule that picked it, or a module around it; None if none did.
    hidden: rules of the user that match it too, where all that match were asked for.
  """

  policy: Policy | None
  picked: bool = False
  exempt: bool = False
  output_dtype: DType | None = None
  rule: Rule | None = None
  hidden: tuple[Rule, ...] = ()


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
  it. `all_matches` also finds the rules that match and that an earlier one hides.
  """
  run = ModulePolicy(around.policy, output_dtype=config.output_dtype, rule=around.rule)
  if around.exempt:
    return run._replace(policy=None, exempt=True)
  if isinstance(own, Policy):
    return run._replace(policy=own, picked=True, rule=None)
  rule = first_match(config.rules, module, path)
  if rule is None:
    return run
  later = [each for each in config.rules if each is not rule] if all_matches else []
  hidden = tuple(each for each in later if each.matches(module, path))
  exempt = rule.policy is None
  return run._replace(policy=rule.policy, picked=True, exempt=exempt, rule=rule, hidden=hidden)


class ModuleRecord:
  """The modules of a model by path, and the rules that picked some of them.

  Attributes:
    classes: the names of the modules' classes by path.
    matched: the rules that match one of them, the first that does or not.
  """

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
    """Raises UnmatchedRuleError, or warns with a `note`, if a rule matched nothing.

    `origin` says which modules these are, and `stacklevel` is that of the warning for the caller.
    """
    paths, classes = tuple(self.classes), tuple(self.classes.values())
    for rule in self.config.rules if self.config.unmatched != "ignore" else ():
      if rule not in self.matched:
        error = unmatched_error(rule, paths, classes, kind=kind, origin=origin)
        if self.config.unmatched == "raise":
          raise error
        warnings.warn(f"{error} {note}".rstrip(), stacklevel=stacklevel + 1)
