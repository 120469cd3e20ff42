"""What Linen and NNX share is written once: no function twice, and one precedence of policies."""

import ast
import pathlib

import mpjax

LIBRARY = pathlib.Path(mpjax.__file__).parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(*folders):
  """Yields the functions in some folders of the library, nested ones too, with their names."""
  for path in sorted(path for folder in folders for path in (LIBRARY / folder).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, FUNCTIONS):
        yield f"{path.relative_to(LIBRARY)}::{node.name}", node


class Renamed(ast.NodeTransformer):
  """Gives the names that a function binds the numbers of their first uses."""

  def __init__(self, bound):
    self.bound, self.numbers = bound, {}

  def new(self, name):
    return f"_{self.numbers.setdefault(name, len(self.numbers))}" if name in self.bound else name

  def visit_Name(self, node):
    return ast.Name(self.new(node.id), node.ctx)

  def visit_arg(self, node):
    return ast.arg(self.new(node.arg))

  def visit_FunctionDef(self, node):
    node.name, node.returns = self.new(node.name), None
    return self.generic_visit(node)


def normalised(function):
  """Returns the code of a function without names of its own, annotations and docstrings."""
  function = ast.parse(ast.unparse(function)).body[0]
  for node in ast.walk(function):
    if isinstance(node, FUNCTIONS) and ast.get_docstring(node) is not None:
      node.body = node.body[1:] or [ast.Pass()]
  bound = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
  bound |= {
    node.id
    for node in ast.walk(function)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  }
  bound |= {node.name for node in ast.walk(function) if isinstance(node, FUNCTIONS)}
  return ast.dump(Renamed(bound).visit(function))


def test_no_function_is_written_twice_for_linen_and_nnx():
  first, same = {}, []
  for name, function in functions("linen", "nnx"):
    other = first.setdefault(normalised(function), name)
    if other != name:
      same.append(f"{name} is {other}")
  assert same == []


def test_what_goes_before_what_is_known_in_one_place():
  """A policy of a module's own, rules and the module around: one function reads them."""
  reads = [
    name
    for name, function in functions("_core", "linen", "nnx")
    if "first_match" in {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
  ]
  assert reads == ["_core/policy_config.py::resolve_policy"]
