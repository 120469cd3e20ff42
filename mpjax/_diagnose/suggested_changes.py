"""Write changes of the user's code: float32 for an operation, or low precision for a matmul."""

import ast
import itertools
import keyword
import linecache
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from mpjax._autocast.scopes import LAYER_ENDS
from mpjax._diagnose.paths import glob_of_layers, is_within, layers_of
from mpjax._jaxpr.compat import Span, Traceback, frames_of, spans_of
from mpjax._jaxpr.graph import Operation
from mpjax._jaxpr.locations import MODULE, PREFIX, Source, is_library
from mpjax._jaxpr.steps import Step
from mpjax._policy.policy import EXACT_FLOAT32
from mpjax._policy.rules import Rule

_LAYERS = ("/flax/linen/", "/flax/nnx/")
"""Files of layers. Their operations have no line of the user, so the cure is a rule."""

_MOST = 3
"""The most statements of a line. For more, the cure wraps the function."""


class Cure(NamedTuple):
  """A change of the code that makes operations float32.

  Fields:
    code: the change, to be pasted: a `Rule`, or a statement with `mpjax.full_precision`.
    covers: whether it makes an operation float32.
  """

  code: str
  covers: Callable[[Step], bool]


def cures_of(culprits: Sequence[Step], steps: Sequence[Step]) -> list[Cure]:
  """Returns the fewest changes that run some operations in float32.

  The operations of a Flax layer, whose code the user cannot edit, get a rule for its module. One
  rule is for all layers of a kind, if at least half of them need it: layers that differ in the
  numbers of their paths alone, and have the same lines. Other operations get the statement at their
  line, with its expression inside `mpjax.full_precision`. Calls of other code are left outside of
  it, unless one of these operations is computed on the way to them.

  Args:
    culprits: the operations that round.
    steps: all operations of the program.
  """
  found: list[Cure] = []
  rules: list[str] = []
  lines: dict[Source, list[Step]] = {}
  for step in culprits:
    path, source = module_of(step), step.location.source
    if path is not None and (source is None or _is_in_layer(step)):
      rules.append(path)
    elif source is not None:
      lines.setdefault(source, []).append(step)
    else:
      found.append(Cure("mpjax.full_precision(fn)(...)", lambda other, own=step: other is own))
  found += map(_rule_for, _layers_to_cure(rules, steps))
  # Lines of the same statements have one change. A file that cannot be read has no statements.
  statements: dict[object, tuple[Source, list[Step]]] = {}
  for source, of_line in lines.items():
    spans = tuple((x.lineno, x.end_lineno) for x in _statements(source))
    key = (source.file, spans) if spans else source
    statements.setdefault(key, (source, []))[1].extend(of_line)
  found += (_change_of(source, of_statement, steps) for source, of_statement in statements.values())
  # A line may be part of a module, or call one.
  covered = {each: {step.number for step in steps if each.covers(step)} for each in found}
  for each in (*found,):
    others = (covered[other] for other in found if other is not each)
    if covered[each] <= set[int]().union(*others):
      found.remove(each)
  return found


def _layers_to_cure(paths: Sequence[str], steps: Sequence[Step]) -> list[tuple[str, ...]]:
  """Returns the modules that need a rule, in groups that share one."""
  lines: dict[str, set[Source | None]] = {}
  for step in steps:
    if (path := module_of(step)) is not None:
      lines.setdefault(path, set()).add(step.location.source)
  kinds: dict[frozenset[Source | None], list[str]] = {}
  for path, of_path in lines.items():
    kinds.setdefault(frozenset(of_path), []).append(path)
  # By the path of a module: the modules of its rule.
  groups: dict[str, tuple[str, ...]] = {path: (path,) for path in paths}
  for alike in kinds.values():
    for layers in layers_of(alike, lines.keys() - {*alike}):
      needed = [path for path in layers if path in groups]
      if 2 * len(needed) >= len(layers) > 1:
        groups.update(dict.fromkeys(needed, layers))
  return [*dict.fromkeys(groups.values())]


def _rule_for(paths: tuple[str, ...]) -> Cure:
  """Returns the rule that runs modules in float32."""

  def covers(step: Step) -> bool:
    inner = module_of(step)
    return inner is not None and any(is_within(inner, path) for path in paths)

  return Cure(repr(Rule(EXACT_FLOAT32, path=glob_of_layers(paths) or "**")), covers)


def _change_of(source: Source, culprits: Sequence[Step], steps: Sequence[Step]) -> Cure:
  """Returns the statement at a line with what computes some operations in float32."""
  statements = _statements(source)
  first = min((x.lineno for x in statements), default=source.line)
  last = max((x.end_lineno or x.lineno for x in statements), default=source.line)

  def spans(step: Step) -> list[Span]:
    """Returns the code of the statement in which an operation runs, the innermost first."""
    every = (frame for each in _tracebacks(step) for frame in spans_of(each))
    return [span for file, span in every if file == source.file and first <= span[0] <= last]

  # Code of libraries other than layers, such as `jnp.sin`, has no line of a user or module inside.
  elsewhere = {
    span
    for step in steps
    if (found := spans(step))
    for span in found
    if _is_in_layer(step)
    or step.location.source is None
    or not first <= step.location.source.line <= last
    or step.location.source.file != source.file
  }
  needed = {span for step in culprits for span in spans(step)[:1]}
  if _last(source.function) == "<lambda>":
    return Cure(_wrapped_lambda(statements, source), lambda step: bool(spans(step)))
  wrapper = _Wrapper(elsewhere - needed, needed)
  written = [*map(wrapper.statement, statements)]
  if wrapper.inside and len(statements) <= _MOST:
    codes = [code or ast.unparse(each) for code, each in zip(written, statements, strict=True)]
    return Cure("; ".join(codes), lambda step: wrapper.covers(spans(step)))
  # If no statement of the line can be wrapped, or there are too many, wrap the function around it.

  def covers(step: Step) -> bool:
    frames = (frame for each in _tracebacks(step) for frame in frames_of(each))
    return any((file, name) == (source.file, source.function) for file, _, name in frames)

  return Cure(_wrapped_function(source), covers)


def _tracebacks(step: Step) -> Iterator[Traceback]:
  """Yields the tracebacks of an operation and of the calls around it, the innermost first."""
  # Those of operations in a jitted function may begin at that function.
  return (each.eqn.source_info.traceback for each in step.enclosing())


def _last(name: str) -> str:
  return name.rpartition(".")[2]


def module_of(operation: Step | Operation) -> str | None:
  """Returns the path of the module of an operation; None without modules."""
  where = operation.location if isinstance(operation, Step) else operation.where
  scopes, path = where.scopes, where.marked(MODULE)
  if path is None or not any(scope.startswith(LAYER_ENDS) for scope in scopes):
    return path
  # The result of a layer is rounded outside the mark of the layer.
  behind = scopes[scopes.index(MODULE + path) + 1 :]
  inside = [name for name in behind if not name.startswith(PREFIX)]
  return "/".join(filter(None, (path, *inside)))


def _is_in_layer(step: Step) -> bool:
  """Whether an operation comes from the code of a Flax layer."""
  # The innermost frame comes first. A frame of the user before any layer means the user's own code.
  for file, *_ in (frame for each in _tracebacks(step) for frame in frames_of(each)):
    if not is_library(file):
      return False
    if any(layers in file for layers in _LAYERS):
      return True
  return False


def _statements(source: Source) -> list[ast.stmt]:
  """Returns the innermost statements of a line; none if the file cannot be read."""
  try:
    # `linecache` also knows the cells of a notebook.
    tree = ast.parse("".join(linecache.getlines(source.file)))
  except SyntaxError:  # Such as a cell of a notebook with a magic command.
    return []
  walk = ast.walk(tree)
  statements = [x for x in walk if isinstance(x, ast.stmt) and _has_line(x, source.line)]
  # A line inside of a `for` or `def` is also a line of that block. Keep the innermost statements.
  blocks = {
    id(x) for x in statements if any(isinstance(y, ast.stmt) for y in ast.iter_child_nodes(x))
  }
  return [x for x in statements if id(x) not in blocks]


def _has_line(node: ast.stmt | ast.expr, line: int) -> bool:
  return node.lineno <= line <= (node.end_lineno or node.lineno)


class _Wrapper:
  """Puts the parts of a statement that compute something needed into `full_precision`.

  Calls of other code are left outside: `x + self.mlp(jnp.sin(y))` becomes
  `full_precision(lambda mlp: x + mlp)(self.mlp(full_precision(lambda: jnp.sin(y))()))` if the sum
  and the sine are needed.

  Attributes:
    elsewhere: where the program calls other code, and computes nothing that is needed itself.
    needed: what has to be in float32.
    inside: by the code of an expression, whether it runs inside of `full_precision`. Other code is
      where the smallest of these expressions around it is.
    names: the names in the statement.
  """

  def __init__(self, elsewhere: Collection[Span], needed: Collection[Span]) -> None:
    self.elsewhere, self.needed = elsewhere, needed
    self.inside: dict[Span, bool] = {}
    self.names: set[str] = set()

  def statement(self, statement: ast.stmt) -> str | None:
    """Returns a statement with parts in `full_precision`; None if its meaning would change."""
    # `return` without a value has nothing to wrap. Other statements are not a single expression.
    kinds = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)
    if not isinstance(statement, kinds) or statement.value is None:
      return None
    # In a lambda, `:=`, `await` and `yield` would no longer act on the function around it.
    bound = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    if any(isinstance(node, bound) for node in ast.walk(statement.value)):
      return None
    # An expression statement has no target, and `a = b = value` has two.
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    value = statement.value
    if isinstance(statement, ast.AugAssign):
      if not isinstance(statement.target, ast.Name):
        return None
      targets = [statement.target]
      value = ast.copy_location(ast.BinOp(statement.target, statement.op, value), statement)
    self.names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    text = ast.unparse(self.wrapped(value))
    prefix = "return " if isinstance(statement, ast.Return) else ""
    return prefix + "".join(f"{ast.unparse(target)} = " for target in targets) + text

  def wrapped(self, node: ast.expr) -> ast.expr:
    """Returns an expression in which what is needed is computed in `full_precision`."""
    span = _span(node)
    calls: list[ast.Call] = []
    self.with_calls(node, lambda call: calls.append(call) or call)
    needed = [each for each in self.needed if _is_inside(each, span)]
    # The arguments of a call of other code are wrapped on their own.
    if all(any(_is_inside(each, _span(call)) for call in calls) for each in needed):
      return self.with_calls(node, self.call) if needed else node
    self.inside[span] = True
    arguments: dict[str, str] = {}

    def named(call: ast.Call) -> ast.expr:
      last = _last(ast.unparse(call.func).partition("(")[0]).lower()
      name = last if last.isidentifier() and not keyword.iskeyword(last) else "value"
      numbered = (f"{name}_{i}" for i in itertools.count(2))
      name = next(each for each in itertools.chain([name], numbered) if each not in self.names)
      self.names.add(name)
      arguments[name] = ast.unparse(self.call(call))
      return ast.Name(name)

    body = ast.unparse(self.with_calls(node, named))
    parameters = f" {', '.join(arguments)}" if arguments else ""
    text = f"mpjax.full_precision(lambda{parameters}: {body})({', '.join(arguments.values())})"
    return ast.parse(text, mode="eval").body

  def call(self, node: ast.Call) -> ast.Call:
    """Returns a call of other code, with the arguments in `full_precision` that need it."""
    self.inside[_span(node)] = False
    keywords = [ast.keyword(each.arg, self.wrapped(each.value)) for each in node.keywords]
    return ast.Call(node.func, [*map(self.wrapped, node.args)], keywords)

  def with_calls(self, node: Any, change: Callable[[ast.Call], ast.expr]) -> Any:
    """Returns an expression with another one in place of each call of other code."""
    if isinstance(node, list):
      return [self.with_calls(each, change) for each in node]
    if not isinstance(node, ast.AST) or isinstance(node, _CONDITIONAL):
      return node
    if isinstance(node, ast.Call) and _span(node) in self.elsewhere:
      return change(node)
    parts = {name: self.with_calls(x, change) for name, x in ast.iter_fields(node)}
    return type(node)(**parts)

  def covers(self, spans: Sequence[Span]) -> bool:
    """Whether an operation that runs in some code is inside of `full_precision`."""
    for span in spans:
      around = [each for each in self.inside if _is_inside(span, each)]
      # The smallest expression around starts last, and of those it ends first.
      if around and self.inside[max(around, key=lambda each: (each[:2], -each[2], -each[3]))]:
        return True
    return False


_CONDITIONAL = (
  *(ast.Lambda, ast.IfExp, ast.BoolOp),
  *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
"""Expressions that run parts of them never, or several times."""


def _span(node: ast.expr) -> Span:
  return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _is_inside(span: Span, outer: Span) -> bool:
  return outer[:2] <= span[:2] and span[2:] <= outer[2:]


def _wrapped_lambda(statements: list[ast.stmt], source: Source) -> str:
  nodes = [node for each in statements for node in ast.walk(each)]
  lambdas = [x for x in nodes if isinstance(x, ast.Lambda) and _has_line(x, source.line)]
  # The definition of a lambda with a name is a statement.
  for each in statements:
    if isinstance(each, ast.Assign) and lambdas[:1] == [each.value]:
      return f"{ast.unparse(each.targets[0])} = mpjax.full_precision({ast.unparse(each.value)})"
  # Of several lambdas on a line, the traceback does not say which one ran.
  if len(lambdas) == 1:
    return f"mpjax.full_precision({ast.unparse(lambdas[0])})"
  return _wrapped_function(source)


def _wrapped_function(source: Source) -> str:
  name = _last(source.function)
  # A name such as "<listcomp>" or "<module>" is no function that can be wrapped.
  name = name if name.isidentifier() else "fn"
  return f"{name} = mpjax.full_precision({name})  # behind its definition"
