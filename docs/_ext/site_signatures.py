"""Signatures as the source writes them: `OptState`, where Python has resolved the alias to `Any`.

A name in a signature then leads to the page of types, or into the documentation of the library
that it comes from.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

WRITTEN = {
  "Array": "jax.Array",
  "Callable": "collections.abc.Callable",
  "Hashable": "collections.abc.Hashable",
  "Iterable": "collections.abc.Iterable",
  "Iterator": "collections.abc.Iterator",
  "Mapping": "collections.abc.Mapping",
  "Sequence": "collections.abc.Sequence",
  "contextlib.AbstractContextManager": "contextlib.AbstractContextManager",
  "Any": "typing.Any",
  "Literal": "typing.Literal",
  "np.ndarray": "numpy.ndarray",
  "np.dtype": "numpy.dtype",
  "nn.Module": "flax.linen.Module",
  "nnx.Module": "flax.nnx.Module",
  "nnx.Optimizer": "flax.nnx.optimizer.Optimizer",
  "flax.linen.module.Module": "flax.linen.Module",
  "jax.jaxlib._jax.Array": "jax.Array",
}
"""What a name means that our sources write, or that Python prints for it."""

PRIVATE = re.compile(r"^(\w+)\._src\.(?:\w+\.)*(\w+)$")
"""`optax._src.base.GradientTransformation`, which is public as `optax.GradientTransformation`."""

TYPE_VARIABLES = {"P", "R", "T", "M", "Self"}
"""They have no page to lead to."""


def write_signature(
  app: Sphinx,
  what: str,
  name: str,
  obj: Any,
  options: Any,
  signature: str | None,
  result: str | None,
) -> tuple[str | None, str | None]:
  """Replaces the annotations in a signature by those of the source."""
  if not isinstance(signature, str) or what in ("module", "exception") or signature == "()":
    return signature, result
  node = definition(obj)
  if node is None:
    return signature, result
  node = Expand(vars(sys.modules[obj.__module__])).visit(node)
  if isinstance(node, ast.FunctionDef):
    return f"({arguments(node)})", returned(node) if what != "class" else None
  return f"({fields(node, obj)})", None


def definition(obj: Any) -> ast.FunctionDef | ast.ClassDef | None:
  """Returns the syntax of a function, of a class's own `__init__`, or of a class without one."""
  if inspect.isclass(obj):
    init = vars(obj).get("__init__")
    if init is not None and not _is_generated(init):
      return definition(init)
    if not (dataclasses.is_dataclass(obj) or issubclass(obj, tuple)):
      return None
  try:
    source = inspect.getsource(inspect.unwrap(obj))
  except (OSError, TypeError):
    return None
  node = ast.parse(textwrap.dedent(source)).body[0]
  return node if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None


def _is_generated(init: Any) -> bool:
  try:
    inspect.getsource(inspect.unwrap(init))
  except (OSError, TypeError):
    return True
  return False


class Expand(ast.NodeTransformer):
  """Writes out an alias that needs no page of its own: `Direction` is `Literal["forward", ...]`."""

  def __init__(self, names: dict[str, Any]) -> None:
    self.names = names

  def visit_arg(self, node: ast.arg) -> ast.arg:
    """Takes the quotes off an annotation, which a class needs for its own name."""
    node.annotation = node.annotation and self.visit(_unquoted(node.annotation))
    return node

  def visit_Name(self, node: ast.Name) -> ast.expr:
    """Replaces the name of an alias of literals, or of a union or tuples of built-in types."""
    value = self.names.get(node.id)
    literal = typing.get_origin(value) is typing.Literal
    numbers = isinstance(value, types.UnionType) and value.__args__[0] is int
    if literal or numbers or (isinstance(value, types.GenericAlias) and _is_built_in(value)):
      return ast.parse(str(value).removeprefix("typing."), mode="eval").body
    return node


def _is_built_in(alias: Any) -> bool:
  """Returns whether an alias such as `tuple[tuple[int, int], ...]` has only built-in types."""
  if not isinstance(alias, types.GenericAlias | types.UnionType):
    return alias is ... or getattr(alias, "__module__", None) == "builtins"
  parts = typing.get_args(alias)
  return typing.get_origin(alias) in (tuple, types.UnionType) and all(map(_is_built_in, parts))


def _unquoted(annotation: ast.expr) -> ast.expr:
  """Returns what an annotation in quotes says."""
  if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
    return ast.parse(annotation.value, mode="eval").body
  return annotation


def arguments(node: ast.FunctionDef) -> str:
  """Returns the arguments of a function, without `self`."""
  args = node.args
  for positional in (args.posonlyargs, args.args):
    if positional and positional[0].arg in ("self", "cls"):
      del positional[0]
  args.defaults = [_readable(value) for value in args.defaults]
  args.kw_defaults = [value and _readable(value) for value in args.kw_defaults]
  return ast.unparse(args)


def _readable(default: ast.expr) -> ast.expr:
  """Returns `...` for a default that is computed from private names."""
  names = (node.id for node in ast.walk(default) if isinstance(node, ast.Name))
  return ast.Constant(...) if any(name.startswith("_") for name in names) else default


def returned(node: ast.FunctionDef) -> str | None:
  """Returns the annotation of what a function returns."""
  return None if node.returns is None else ast.unparse(_unquoted(node.returns))


def fields(node: ast.ClassDef, cls: type) -> str:
  """Returns the fields of a dataclass or a NamedTuple, as arguments."""
  written = [item for item in node.body if isinstance(item, ast.AnnAssign)]
  parts = [
    ast.unparse(item.target) + ": " + ast.unparse(item.annotation) + _default(item.value)
    for item in written
    if not ast.unparse(item.annotation).startswith("ClassVar")
  ]
  keyword_only = dataclasses.is_dataclass(cls) and all(f.kw_only for f in dataclasses.fields(cls))
  return ", ".join(["*", *parts] if keyword_only and parts else parts)


def _default(value: ast.expr | None) -> str:
  if value is None:
    return ""
  if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    return _default(given["default"]) if "default" in given else " = ..."
  return f" = {ast.unparse(_readable(value))}"


def find_type(
  app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Node
) -> nodes.Node | None:
  """Leads from the name of a type as it is written to what it means.

  Another library is then found by intersphinx, which is asked next.
  """
  if node.get("refdomain") != "py":
    return None
  target = node["reftarget"]
  if target.rpartition(".")[2] in TYPE_VARIABLES:
    return content
  objects = env.domains.python_domain.objects
  ends = [
    name
    for name, entry in objects.items()
    if name.rpartition(".")[2] == target and entry.objtype in ("class", "exception", "type")
  ]
  if len(ends) == 1 and node.get("refdoc"):
    entry = objects[ends[0]]
    uri = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    return nodes.reference("", "", content, internal=True, refuri=f"{uri}#{entry.node_id}")
  private = PRIVATE.match(target)
  node["reftarget"] = f"{private[1]}.{private[2]}" if private else WRITTEN.get(target, target)
  return None


def hide_private_modules(app: Sphinx, tree: nodes.document) -> None:
  """`mpjax._diagnose.audit.findings.Leak` is headed `Leak`: nobody imports it there."""
  for prefix in tree.findall(addnodes.desc_addname):
    if "._" in prefix.astext():
      prefix.clear()


def setup(app: Sphinx) -> dict[str, bool]:
  """Connects the functions."""
  app.connect("autodoc-process-signature", write_signature)
  app.connect("missing-reference", find_type, priority=400)  # before intersphinx
  app.connect("doctree-read", hide_private_modules)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
