"""Write changes of the user's code: float32 for an operation, or low precision for a matmul."""

import ast
import linecache
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpjax._autocast.scopes import LAYER_ENDS
from mpjax._debug.paths import is_within
from mpjax._debug.selectors import glob_of_layers, layers_of
from mpjax._jaxpr.compat import frames_of
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
    code: the change, to be pasted: a `Rule`, or a statement inside `mpjax.full_precision`.
    covers: whether it makes an operation float32.
    path: the path of the first module that a rule selects; None for other changes.
  """

  code: str
  covers: Callable[[Step], bool]
  path: str | None = None


def cure_of(step: Step) -> Cure:
  """Returns the change that runs an operation in float32.

  It is a rule for the module of a Flax layer, whose code the user cannot edit. For other code, it
  is the statement at its line, with its expression inside `mpjax.full_precision`.

  Args:
    step: the operation that rounds.

  >>> from mpjax._jaxpr.locations import Source
  >>> wrapped_in_full_precision(Source("unknown.py", 3, "distance"))
  'distance = mpjax.full_precision(distance)'
  """
  path, source = module_of(step), step.location.source
  if path is not None and (source is None or _is_in_layer(step)):
    return _rule_for((path,))
  code = wrapped_in_full_precision(source)
  if source is None:
    return Cure(code, lambda other: other is step)
  if code == _wrapped_function(source):
    return Cure(code, lambda other: _function_of(other) == (source.file, source.function))
  statements = _statements(source)
  first = min((x.lineno for x in statements), default=source.line)
  last = max((x.end_lineno or x.lineno for x in statements), default=source.line)

  def covers(other: Step) -> bool:
    line = other.location.source
    return line is not None and line.file == source.file and first <= line.line <= last

  return Cure(code, covers)


def joined(cures: Sequence[Cure], steps: Sequence[Step]) -> list[Cure]:
  """Returns the fewest cures that do what some do.

  One rule is for all layers of a kind, if at least half of them need it. Layers of a kind differ in
  the numbers of their paths alone, and have the same lines.

  Args:
    cures: the cures.
    steps: the operations of the program.
  """
  lines: dict[str, set[Source | None]] = {}
  for step in steps:
    if (path := module_of(step)) is not None:
      lines.setdefault(path, set()).add(step.location.source)
  kinds: dict[frozenset[Source | None], list[str]] = {}
  for path, of_path in lines.items():
    kinds.setdefault(frozenset(of_path), []).append(path)
  rules: dict[str, Cure] = {each.path: each for each in cures if each.path is not None}
  for alike in kinds.values():
    for paths in layers_of(alike, lines.keys() - {*alike}):
      needed = [path for path in paths if path in rules]
      if len(paths) > 1 and 2 * len(needed) >= len(paths):
        rule = _rule_for(paths)
        rules.update(dict.fromkeys(needed, rule))
  # A rule stands where that of its first layer stood.
  every = [*dict.fromkeys(each if each.path is None else rules[each.path] for each in cures)]
  # A line may be part of a module, or call one.
  covered = {each: {step.number for step in steps if each.covers(step)} for each in every}
  for each in (*every,):
    others = (covered[other] for other in every if other is not each)
    if covered[each] <= set[int]().union(*others):
      every.remove(each)
  return every


def _rule_for(paths: tuple[str, ...]) -> Cure:
  """Returns the rule that runs modules in float32."""

  def covers(step: Step) -> bool:
    inner = module_of(step)
    return inner is not None and any(is_within(inner, path) for path in paths)

  return Cure(repr(Rule(EXACT_FLOAT32, path=glob_of_layers(paths) or "**")), covers, paths[0])


def _function_of(step: Step) -> tuple[str, str] | None:
  """Returns the file and the name of the user's function of an operation."""
  source = step.location.source
  return None if source is None else (source.file, source.function)


def _last(name: str) -> str:
  return name.rpartition(".")[2]


def wrapped_in_full_precision(source: Source | None) -> str:
  """Returns the statement at a line, with its expression inside `mpjax.full_precision`."""
  if source is None:
    return "mpjax.full_precision(fn)(...)"
  statements = _statements(source)
  # A lambda has no statement of its own. Wrap the lambda instead.
  if _last(source.function) == "<lambda>":
    return _wrapped_lambda(statements, source)
  wrapped = [_wrapped_statement(each) or ast.unparse(each) for each in statements[:_MOST]]
  # If no statement of the line can be wrapped, or there are too many, wrap the function around it.
  is_alike = wrapped == [ast.unparse(each) for each in statements]
  return _wrapped_function(source) if is_alike else "; ".join(wrapped)


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
  for frame in frames_of(step.eqn.source_info.traceback):
    file = frame[0]
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


def _wrapped_statement(statement: ast.stmt) -> str | None:
  """Returns a statement with its value in `full_precision`; None if its meaning would change."""
  # `return` without a value has nothing to wrap. Other statements are not a single expression.
  if not isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) or statement.value is None:
    return None
  # In a lambda, `:=`, `await` and `yield` would no longer act on the function around it.
  bound = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
  if any(isinstance(node, bound) for node in ast.walk(statement.value)):
    return None
  call = f"mpjax.full_precision(lambda: {ast.unparse(statement.value)})()"
  if isinstance(statement, ast.Return):
    return f"return {call}"
  # `a = b = value` has two targets. An expression statement has none.
  targets = statement.targets if isinstance(statement, ast.Assign) else []
  return "".join(f"{ast.unparse(target)} = " for target in targets) + call


def _wrapped_lambda(statements: list[ast.stmt], source: Source) -> str:
  nodes = [node for each in statements for node in ast.walk(each)]
  lambdas = [x for x in nodes if isinstance(x, ast.Lambda) and _has_line(x, source.line)]
  # A lambda with a name is wrapped by that name.
  for each in statements:
    if isinstance(each, ast.Assign) and lambdas[:1] == [each.value]:
      name = ast.unparse(each.targets[0])
      return f"{name} = mpjax.full_precision({name})"
  # Of several lambdas on a line, the traceback does not say which one ran.
  if len(lambdas) == 1:
    return f"mpjax.full_precision({ast.unparse(lambdas[0])})"
  return _wrapped_function(source)


def _wrapped_function(source: Source) -> str:
  name = _last(source.function)
  # A name such as "<listcomp>" or "<module>" is no function that can be wrapped.
  name = name if name.isidentifier() else "fn"
  return f"{name} = mpjax.full_precision({name})"
