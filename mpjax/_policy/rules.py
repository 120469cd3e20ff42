"""`Rule`, and the policy that each module of a model gets from rules."""

import dataclasses
import fnmatch
import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from mpjax._core.errors import (
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
  check_call,
  check_choice,
  in_one_line,
  nearest,
)
from mpjax._core.types import HALVES, Class, DType, Module
from mpjax._policy.policy import Policy, PolicyLike, parse_policy, shortest_text


@dataclasses.dataclass(frozen=True, init=False)
class Rule:
  """A policy for the modules that a selector matches. The first matching rule wins.

  Args:
    policy: a policy or its string. None leaves the module, and all modules inside, unchanged.
    path: a glob or a compiled regular expression that matches the whole module path. In a glob such
      as `"encoder/*/attention"`, `*` stays within one level; `**` crosses levels and matches the
      root.
    module: a module class, or a tuple of them; subclasses count.
    where: a predicate that is called with every bound module of the model. Define it once, outside
      of the step. A lambda that is created in each step is a new predicate, and the step is traced
      again.
    rewrite: whether operations are rewritten. With False, floating arguments and the `dtype` of the
      module are cast to the compute dtype, and its code runs unchanged.

  Raises:
    MpjaxValueError: no selector or several, or a malformed glob.
    MpjaxTypeError: a selector of the wrong type.

  >>> import mpjax
  >>> mpjax.Rule("float32", path="**/head").path
  '**/head'
  """

  policy: Policy | None
  # Exactly one of these three is set.
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
    expected = None
    if isinstance(path, str):
      check_glob(path, "mpjax.Rule(path=...)", "For anything else pass re.compile(...).")
    elif path is not None and not isinstance(path, re.Pattern):
      expected = "a glob or a compiled regular expression"
    elif module is not None:
      classes = module if isinstance(module, tuple) else (module,)
      if not classes or not all(isinstance(x, type) for x in classes):
        expected = "a class or a non-empty tuple of classes"
    elif where is not None and not callable(where):
      expected = "a predicate on the bound module"
    if expected is not None:
      raise MpjaxTypeError(
        f"mpjax.Rule({names[0]}=...)",
        expected=expected,
        got=in_one_line(selectors[names[0]]),
        fix="See mpjax.Rule for what each selector takes, such as module=nn.Dense. To select one "
        "instance, write its path.",
      )
    example = 'The policy comes first: Rule("float32", path="head").'
    parsed = None if policy is None else parse_policy(policy, "mpjax.Rule(policy)", example)
    if not isinstance(rewrite, bool):
      raise MpjaxTypeError(
        "mpjax.Rule(rewrite=...)",
        expected="True or False",
        got=repr(rewrite),
        fix="Write rewrite=False for a module with a kernel.",
      )
    if not rewrite and not computes_in_half(parsed):
      raise MpjaxValueError(
        "mpjax.Rule(rewrite=False)",
        expected="a policy that computes in float16 or bfloat16",
        got=policy_text(parsed),
        fix="Leave out rewrite=. In float32 nothing is rewritten.",
      )
    # The class is frozen, so that a rule can be part of cache keys.
    vars(self).update(selectors, policy=parsed, rewrite=rewrite)

  def __repr__(self) -> str:
    """Returns the rule as Python code, in which classes and predicates are names."""
    name = next(x for x in _SELECTORS if getattr(self, x) is not None)
    policy = "None" if self.policy is None else quoted(shortest_text(self.policy))
    rewrite = "" if self.rewrite else ", rewrite=False"
    return f"mpjax.Rule({policy}, {name}={_selector_code(getattr(self, name))}{rewrite})"

  def matches(self, module: Module, path: str) -> bool:
    """Whether this rule picks out a module.

    Args:
      module: the bound module.
      path: its path in the model, names joined by "/"; "" is the root.
    """
    if self.path is not None:
      if isinstance(self.path, str):
        return matches_glob(self.path, path)
      return self.path.fullmatch(path) is not None
    if self.module is not None:
      return isinstance(module, self.module)
    if self.where is None:
      return False
    # A predicate often reads an attribute that only some modules have. The note says why it was
    # called with another module.
    try:
      return bool(self.where(module))
    except (AttributeError, TypeError) as error:
      error.add_note(
        f"mpjax: raised by the predicate of {self} for the module {path or 'at the root'!r} "
        f"({type(module).__name__}). It is asked about every module; the root has no name."
      )
      raise


_SELECTORS = ("path", "module", "where")
"""The fields of a rule that pick out modules. The others are its effect on them."""


def _effect(rule: Rule) -> dict[str, object]:
  """Returns the fields of a rule that say what it does to its modules."""
  return {name: value for name, value in vars(rule).items() if name not in _SELECTORS}


def _selector_code(selector: Any) -> str:
  """Returns a selector as Python code."""
  if isinstance(selector, str):
    return quoted(selector)
  if isinstance(selector, re.Pattern):  # Its own repr has only the first 200 characters.
    flags = re.RegexFlag(selector.flags) & ~re.UNICODE
    return f"re.compile({quoted(selector.pattern)}{f', {flags!r}' if flags else ''})"
  if isinstance(selector, tuple):
    names = ", ".join(map(_name_of, selector))
    return f"({names},)" if len(selector) == 1 else f"({names})"
  return _name_of(selector)


def _name_of(selector: Any) -> str:
  """Returns the name of a class or a function, without the function that defines it."""
  # A `functools.partial` and other callable objects have no name.
  return getattr(selector, "__qualname__", repr(selector)).rpartition("<locals>.")[2]


def quoted(text: str) -> str:
  """Returns a string as Python code, in double quotes if it contains none."""
  # `repr` prefers single quotes.
  code = repr(text)
  return code if '"' in text else f'"{code[1:-1]}"'


_NOT_IN_GLOBS = frozenset(r".\()|+^${}")
"""The separator of Python's paths, and characters of regular expressions."""


def check_glob(glob: str, where: str, otherwise: str = "") -> None:
  """Raises MpjaxValueError for a glob that can match no module path.

  `otherwise` is a sentence about other arguments that the call accepts.
  """
  # The root has the path "", so an empty glob is valid.
  has_empty_level = bool(glob) and "" in glob.split("/")
  # A character in brackets stands for itself, as in "layer[(]1[)]".
  outside = re.sub(r"\[[^/][^]/]*\]", "", glob)
  if has_empty_level or set(outside) & (_NOT_IN_GLOBS | {*"[]"}):
    raise MpjaxValueError(
      where,
      expected="a glob of module names joined by single slashes, such as 'encoder/*/attention'",
      got=repr(glob),
      fix="Remove leading, trailing and double slashes, dots and signs of a regular expression. "
      f"Close brackets. {otherwise}".rstrip(),
    )


def glob_of(path: str) -> str:
  """Returns the glob that matches a module path alone.

  >>> glob_of("decoder/layer(1)")
  'decoder/layer[(]1[)]'
  """
  special = _NOT_IN_GLOBS | {*"[]*?"}
  return "".join(f"[{x}]" if x in special else x for x in path)


@functools.lru_cache(maxsize=4096)
def matches_glob(glob: str, path: str) -> bool:
  """Whether the names on a path match the levels of a glob; "**" is any number of them."""
  # Without the cache, globs with several "**" would try each of them at each position, which takes
  # minutes.
  (level, _, levels), (name, _, names) = glob.partition("/"), path.partition("/")
  if not glob:
    return not path
  if level == "**":  # It matches no level, or one level and then any number.
    return matches_glob(levels, path) or (bool(path) and matches_glob(glob, names))
  return bool(path) and fnmatch.fnmatchcase(name, level) and matches_glob(levels, names)


def first_match(rules: Iterable[Rule], module: Module, path: str) -> Rule | None:
  """Returns the first rule that matches a module, or None."""
  return next((rule for rule in rules if rule.matches(module, path)), None)


def parse_rules(rules: Iterable[Rule], where: str) -> tuple[Rule, ...]:
  """Returns `rules` as a tuple; raises MpjaxTypeError unless it is an iterable of `Rule`."""
  # A string and a dict are iterable, but their items are characters and keys.
  many = isinstance(rules, Iterable) and not isinstance(rules, (str, Mapping))
  parsed: tuple[Any, ...] = tuple(rules) if many else (rules,)
  # A single rule, without a list around it, is wrong too.
  wrong = [rule for rule in parsed if not isinstance(rule, Rule)] if many else parsed
  if wrong:
    expected, fix = "a sequence of mpjax.Rule", 'Write [mpjax.Rule("float32", path="head")].'
    raise MpjaxTypeError(where, expected=expected, got=in_one_line(wrong[0]), fix=fix)
  return parsed


def is_flax_norm(module: Module) -> bool:
  """Whether `module` is a norm of Flax that normalises activations."""
  # A lifted transform (nn.scan, nn.remat) creates a subclass in `flax.linen.transforms`. The user's
  # class is the next in the order of methods.
  cls = next(c for c in type(module).__mro__ if c.__module__ != "flax.linen.transforms")
  return cls.__module__.split(".")[0] == "flax" and cls.__name__ in _FLAX_NORMS


_FLAX_NORMS = ("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """The arguments of `with_policy` or `policy_scope`, checked."""

  policy: Policy | None  # the policy of the model
  rules: tuple[Rule, ...]  # The first match wins.
  unmatched: str  # "raise", "warn" or "ignore", for rules that match nothing
  # Whether they are arguments of `policy_scope`, which notes the modules that run. It makes two
  # configurations unequal. Otherwise JAX would reuse the trace of a wrapped model, in which the
  # scope sees no modules.
  of_scope: bool = False

  def __str__(self) -> str:
    rules = f", rules={list(self.rules)!r}" if self.rules else ""
    return f"{policy_text(self.policy)}{rules}"

  @property
  def rewrites(self) -> bool:
    """Whether the policy of the model or of a rule changes operations, see `rewrites`."""
    return any(map(rewrites, (self.policy, *(rule.policy for rule in self.rules))))

  @property
  def by_path(self) -> bool:
    """Whether two equal modules can get different policies because of their paths."""
    # A predicate may read the name of a module.
    return any(rule.module is None for rule in self.rules)


def parse_config(
  where: str, policy: PolicyLike | None, rules: Iterable[Rule], *, unmatched: str
) -> PolicyConfig:
  """Returns the arguments of `with_policy` and `policy_scope`, checked."""
  parsed = None if policy is None else parse_policy(policy, f"{where}(policy)")
  several = parse_rules(rules, f"{where}(rules=...)")
  check_choice(unmatched, ("raise", "warn", "ignore"), f"{where}(unmatched=...)")
  if unmatched != "ignore":
    _report_hidden(several, unmatched)
  return PolicyConfig(policy=parsed, rules=several, unmatched=unmatched)


def _report_hidden(rules: Sequence[Rule], unmatched: str) -> None:
  """Raises UnmatchedRuleError, or warns, if an earlier rule matches all modules of a later one."""
  for position, rule in enumerate(rules):
    earlier = next((x for x in rules[:position] if _covers(x, rule)), None)
    # A hidden rule with the same effect is harmless.
    if earlier is None or _effect(earlier) == _effect(rule):
      continue
    error = UnmatchedRuleError(
      f"rules: {rule}",
      expected="a rule that can apply",
      got=f"one after {earlier}, which matches all of its modules",
      fix="The first match wins: put the special rule first, or drop this one.",
    )
    if unmatched == "raise":
      raise error
    warnings.warn(str(error), stacklevel=4)


def _covers(first: Rule, other: Rule) -> bool:
  """Whether two selectors alone show that the first rule matches all modules of the other."""
  # Only three cases are decided: equal selectors or "**", subclasses, and a path without wildcards.
  are_equal = all(getattr(first, name) == getattr(other, name) for name in _SELECTORS)
  if are_equal or first.path == "**":
    return True
  if first.module is not None and other.module is not None:
    classes = other.module if isinstance(other.module, tuple) else (other.module,)
    return all(issubclass(x, first.module) for x in classes)
  if first.path is None or not isinstance(other.path, str) or set(other.path) & set("*?["):
    return False
  return first.matches(None, other.path)


def policy_text(policy: Policy | None) -> str:
  """Returns a policy as Python code: its string in quotes, or None."""
  return repr(None if policy is None else str(policy))


def low_dtype_of(policy: Policy | None) -> DType | None:
  """Returns the compute dtype of a policy if it is low precision; None without one."""
  return policy.compute_dtype if policy is not None and policy.compute_dtype in HALVES else None


def computes_in_half(policy: Policy | None) -> bool:
  """Whether operations under a policy run in low precision."""
  return low_dtype_of(policy) is not None


def rewrites(policy: Policy | None) -> bool:
  """Whether a policy changes operations: it computes in low precision, or sets a `precision`."""
  return policy is not None and (computes_in_half(policy) or policy.precision is not None)


class ModulePolicy(NamedTuple):
  """The policy of one module."""

  policy: Policy | None  # None if the module is unchanged
  rule: Rule | None = None  # the rule that gives the policy
  begins: bool = False  # whether the policy or the rule differs from those of the module around
  # The dtype of the results if this is the outermost module that is called.
  output_dtype: DType | None = None
  hidden: tuple[Rule, ...] = ()  # later rules that match the module too, if they were asked for

  def inherited(self) -> Self:
    """Returns the part that the modules inside inherit. It is the same for many modules."""
    return self._replace(begins=False, output_dtype=None, hidden=())


NO_POLICY = ModulePolicy(None)


def resolve_policy(
  config: PolicyConfig,
  module: Module,
  path: str,
  own: object,
  outer: ModulePolicy,
  *,
  all_matches: bool = False,
) -> ModulePolicy:
  """Returns the policy of a module. This function alone defines which policy wins.

  Precedence: a rule that exempts an outer module, the policy in the module's own field, the first
  matching rule, the policy of the outer module.

  Args:
    config: the policy and the rules of the model.
    module: the module, and `path` where it is in the model.
    path: names joined by "/"; "" is the root.
    own: the value of the module's field for its own policy.
    outer: the policy of the module around.
    all_matches: whether to find the rules that an earlier match hides, which audits list. A call
      of a Linen module does so in an audit, and NNX when it makes a view.
  """
  inherited = outer.inherited()
  # The order of the branches is the precedence. A rule with None leaves a module, and all modules
  # inside, unchanged.
  if outer.rule is not None and outer.policy is None:
    resolved = inherited
  elif isinstance(own, Policy):
    resolved = ModulePolicy(own, begins=own != outer.policy)
  else:
    rule = first_match(config.rules, module, path)
    resolved = inherited
    if rule is not None:
      resolved = ModulePolicy(rule.policy, rule, begins=rule != outer.rule)
      # Not in each call, since a predicate of the user is called once more for each module.
      if all_matches:
        others = (each for each in config.rules if each is not rule)
        resolved = resolved._replace(hidden=tuple(x for x in others if x.matches(module, path)))
  # The output dtype is that of the first of these policies that has one.
  dtypes = [p.output_dtype for p in (resolved.policy, config.policy) if p is not None]
  return resolved._replace(output_dtype=next((x for x in dtypes if x is not None), None))


def with_enclosing(paths: Iterable[str]) -> set[str]:
  """Returns paths with those of the modules around: "", "Net" and "Net/up" for "Net/up"."""
  levels = [path.split("/") for path in paths]
  return {"/".join(names[:n]) for names in levels for n in range(len(names) + 1)}


class ModuleRecord:
  """The classes of the modules of a model by path, and the rules that match a module."""

  def __init__(self, config: PolicyConfig) -> None:
    self.config = config
    self.classes: dict[str, str] = {}  # names of classes by path; "" if only the path is known
    self.matched: set[Rule] = set()  # rules that match a module

  def note(self, module: Module, path: str) -> None:
    """Notes a module that is called, and the rules that match it."""
    self.classes[path] = type(module).__name__
    self.matched |= {rule for rule in self.config.rules if rule.matches(module, path)}

  def note_paths(self, paths: Collection[str]) -> None:
    """Notes the paths of modules that were not called, which only rules with a path can match."""
    # A class that is known already stays.
    self.classes = {**dict.fromkeys(paths, ""), **self.classes}
    rules = [rule for rule in self.config.rules if rule.path is not None]
    self.matched |= {rule for rule in rules if any(rule.matches(None, path) for path in paths)}

  def check(self, origin: str, stacklevel: int, *, kind: str = "module", note: str = "") -> None:
    """Raises UnmatchedRuleError if a rule matches no module, or warns and adds a `note`.

    Args:
      origin: the origin of the modules, for the text, such as "of the model".
      stacklevel: as for `warnings.warn`, from the caller.
      kind: the name of the things that have paths.
      note: a sentence at the end of a warning.
    """
    if self.config.unmatched == "ignore":
      return
    # `autocast` has no argument `unmatched`.
    may_ignore = kind != "jax.named_scope"
    ignore = ', or pass unmatched="ignore"' if may_ignore else ", or add that scope"
    for rule in self.config.rules:
      if rule in self.matched:
        continue
      error = UnmatchedRuleError(
        f"rules: {rule}",
        expected=f"a rule that picks out at least one {kind}",
        got=f"none of the {len(self.classes)} {kind}s {origin}",
        fix=f"{self._near(rule, kind)} Fix the selector{ignore}.",
      )
      if self.config.unmatched == "raise":
        raise error
      warnings.warn(f"{error} {note}".rstrip(), stacklevel=stacklevel + 1)

  def _near(self, rule: Rule, kind: str) -> str:
    """Returns sentences with the classes of the model, or with its paths nearest to the rule's."""
    sought = rule.path.pattern if isinstance(rule.path, re.Pattern) else rule.path
    paths = sorted({*self.classes} - {""})
    if rule.module is not None:
      text = f"The model's classes: {', '.join(sorted({*self.classes.values()} - {''}))}."
    elif not paths:
      text = f"The only {kind} is the root, path ''."
    else:
      # A predicate has no path to compare with. The text then has the first paths of the model.
      close = sorted(self.classes)[:3] if sought is None else nearest(sought, paths)
      text = f"The nearest {kind} paths: {', '.join(map(repr, close))}."
      if kind == "module" and sought is not None:
        text += " Rules select modules, not parameters: a float32 matmul of a parameter `w` is "
        text += "mpjax.full_precision(jnp.matmul)(x, w)."
      if any(path.endswith(f"/{sought}") for path in paths):
        text += f' Paths begin at the root: "**/{sought}" is at any depth.'
    # Profiles and reports of Flax begin paths with the name or the class of the root. Users copy
    # them into rules.
    first, _, below = (sought or "").partition("/")
    root = next((item for item in self.classes.items() if item[1]), ())
    if below and first in root:
      text += f" The name of the root, {first!r}, is no part of paths: write {below!r}."
    return text
