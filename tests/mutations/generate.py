"""Generates mutants of a module from its syntax tree.

Each condition is negated, each comparison and each boolean operator is swapped, and each row of a
table at module level is dropped, one at a time. Annotations, `__all__` and what only type checkers
run are left out.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

PAIRS = (
  *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
  *((ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or)),
)
SWAPS = {old: new for pair in PAIRS for old, new in (pair, pair[::-1])}

DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
  """One change of a module."""

  name: str  # the file, the function and the change: it stays the same when lines move
  file: str  # path of the module, relative to the project
  lines: tuple[int, int]  # first and last one of the changed code
  runs_on_import: bool  # whether that is at module level


class _Edit(NamedTuple):
  """Another value for fields of one node of the syntax tree."""

  function: str
  at: ast.expr
  text: str
  node: ast.AST
  fields: Mapping[str, object]


def mutants(file: str, source: str) -> list[Mutant]:
  """Returns all mutants of a module, whose code is `source`, in the order of that."""
  return [
    Mutant(name, file, (edit.at.lineno, edit.at.end_lineno or edit.at.lineno), not edit.function)
    for name, edit in _named_edits(file, ast.parse(source))
  ]


def mutated(mutant: Mutant, source: str) -> str:
  """Returns the code of the module with the change applied, without comments."""
  tree = ast.parse(source)
  for name, edit in _named_edits(mutant.file, tree):
    if name == mutant.name:
      for field, value in edit.fields.items():
        setattr(edit.node, field, value)
      return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
  raise ValueError(f"no mutant is called {mutant.name}")


def _named_edits(file: str, tree: ast.Module) -> Iterator[tuple[str, _Edit]]:
  """Yields each edit with a name of its own: equal texts in one function are numbered."""
  numbers: dict[str, int] = {}
  for edit in _edits(tree, ""):
    name = f"{file}::{edit.function}: {edit.text}"
    number = numbers[name] = numbers.get(name, 0) + 1
    yield (name if number == 1 else f"{name} #{number}"), edit


def _edits(node: ast.AST, function: str) -> Iterator[_Edit]:
  """Yields the edits of a node and of all inside it."""
  # Conditions: of `if`, `while`, `a if b else c`, and of comprehensions.
  # A comparison that its own swap negates is left to that.
  if isinstance(node, ast.If | ast.While | ast.IfExp) and not _is_negated_by_swap(node.test):
    negated = {"test": _negated(node.test)}
    yield _Edit(function, node.test, f"if {_text(node.test)}, negated", node, negated)
  if isinstance(node, ast.comprehension):
    for number, test in enumerate(node.ifs):
      if not _is_negated_by_swap(test):
        negated = {"ifs": _with(node.ifs, number, _negated(test))}
        yield _Edit(function, test, f"if {_text(test)}, negated", node, negated)

  # Operators: of `a < b < c` one after the other, of `a and b and c` both at once.
  if isinstance(node, ast.Compare):
    for number, operator in enumerate(node.ops):
      swapped = SWAPS[type(operator)]
      text = f"{_text(node)}, {swapped.__name__} for {type(operator).__name__}"
      yield _Edit(function, node, text, node, {"ops": _with(node.ops, number, swapped())})
  if isinstance(node, ast.BoolOp):
    swapped = SWAPS[type(node.op)]
    text = f"{_text(node)}, {swapped.__name__} for {type(node.op).__name__}"
    yield _Edit(function, node, text, node, {"op": swapped()})

  # Rows of a table at module level, nested ones too. A single row is no table.
  if not function and isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
    columns = ("keys", "values") if isinstance(node, ast.Dict) else ("elts",)
    rows = getattr(node, columns[-1])
    for number, row in enumerate(rows if len(rows) > 1 else ()):
      left = {name: _with(getattr(node, name), number) for name in columns}
      key = node.keys[number] if isinstance(node, ast.Dict) else None
      yield _Edit(function, row, f"without the row {_text(key or row)}", node, left)

  for name, value in ast.iter_fields(node):
    in_type = isinstance(node, ast.Subscript) and name == "slice" and not function
    if name in ("annotation", "returns", "type_params") or in_type:
      continue
    for child in value if isinstance(value, list) else [value]:
      if isinstance(child, ast.AST) and not _is_for_type_checkers(child):
        inner = f"{function}.{child.name}" if isinstance(child, DEFINITIONS) else function
        yield from _edits(child, inner.lstrip("."))


def _is_for_type_checkers(node: ast.AST) -> bool:
  if isinstance(node, ast.If):
    return _text(node.test).endswith("TYPE_CHECKING")
  return isinstance(node, ast.Assign) and _text(node.targets[0]) == "__all__"


def _is_negated_by_swap(test: ast.expr) -> bool:
  orders = ast.Lt | ast.LtE | ast.Gt | ast.GtE
  return (
    isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(test.ops[0], orders)
  )


def _negated(test: ast.expr) -> ast.expr:
  if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
    return test.operand
  return ast.UnaryOp(op=ast.Not(), operand=test)


def _with(items: list[Any], number: int, *new: object) -> list[Any]:
  """Returns `items` with `new` in place of the one with that number."""
  return [*items[:number], *new, *items[number + 1 :]]


def _text(node: ast.AST) -> str:
  """Returns the code of a node in one line."""
  text = " ".join(ast.unparse(node).split())
  return text if len(text) <= 70 else f"{text[:67]}..."
