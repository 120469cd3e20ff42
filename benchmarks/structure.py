"""Measure what a reader of the source has to read: functions, and the way of a call through them.

  PYTHONPATH=. python benchmarks/structure.py                  # mpjax, optax and equinox
  PYTHONPATH=. python benchmarks/structure.py mpjax optax qwix
  PYTHONPATH=. python benchmarks/structure.py mpjax --list autocast

The first table reads the source. Lines of code are lines with code: no comments, no docstrings. A
function is *used once* if the package names it in one place beside its definition, imports left
out. Depth is the longest chain of imports between modules of the package.

The second table makes calls, and counts the functions and files of the package that they enter:
how many places one reads to follow the call. Functions in a function, lambdas and comprehensions
count with the function around them. Caches of JAX are emptied before each call.
"""

import argparse
import ast
import collections
import functools
import graphlib
import importlib.util
import io
import pathlib
import sys
import tokenize
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from rich.console import Console
from rich.table import Table

import mpjax

PACKAGES = ("mpjax", "optax", "equinox")


class Size(NamedTuple):
  """What the source of a package holds; `mean` and `used_once` are of functions."""

  files: int
  lines: int
  functions: int
  mean: float
  used_once: float
  depth: int


def sources(package: str) -> dict[str, str]:
  """Returns the text of each module of an installed package by its dotted name, without tests."""
  spec = importlib.util.find_spec(package)
  if spec is None or spec.origin is None:
    raise ModuleNotFoundError(f"benchmarks/structure.py reads {package}, which is not installed")
  folder = pathlib.Path(spec.origin).parent
  found = {}
  for file in sorted(folder.rglob("*.py")):
    if not file.name.startswith("test_") and not file.name.endswith("_test.py"):
      parts = file.relative_to(folder.parent).with_suffix("").parts
      name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
      found[name] = file.read_text(encoding="utf-8")
  return found


def size_of(package: str) -> Size:
  """Reads a package."""
  texts = sources(package)
  trees = {name: ast.parse(text) for name, text in texts.items()}
  code = {name: lines_of_code(texts[name], trees[name]) for name in texts}
  functions = [
    (node.name, len([x for x in code[name] if node.lineno <= x <= (node.end_lineno or 0)]))
    for name, tree in trees.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
  ]
  uses = collections.Counter(
    node.id if isinstance(node, ast.Name) else node.attr
    for tree in trees.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.Name | ast.Attribute)
  )
  # Python itself calls methods such as __init__, and what is public is called by users.
  named = [name for name, _ in functions if not name.startswith("__")]
  return Size(
    files=len(texts),
    lines=sum(map(len, code.values())),
    functions=len(functions),
    mean=sum(lines for _, lines in functions) / len(functions),
    used_once=sum(uses[name] == 1 for name in named) / len(functions),
    depth=depth_of(trees),
  )


def lines_of_code(text: str, tree: ast.Module) -> set[int]:
  """Returns the numbers of the lines with code."""
  skipped = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
  }
  lines: set[int] = set()
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type not in skipped:
      lines.update(range(token.start[0], token.end[0] + 1))
  # A string that stands alone is a docstring, of whatever it follows.
  for node in ast.walk(tree):
    match node:
      case ast.Expr(value=ast.Constant(value=str())):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
  return lines


def depth_of(trees: dict[str, ast.Module]) -> int:
  """Returns the number of modules in the longest chain of imports, cycles cut where they close."""
  graph = {name: set(imported(name, tree, trees)) - {name} for name, tree in trees.items()}
  while True:
    try:
      order = list(graphlib.TopologicalSorter(graph).static_order())
      break
    except graphlib.CycleError as error:
      before, after = error.args[1][:2]
      graph[after].discard(before)
  depths: dict[str, int] = {}
  for name in order:
    depths[name] = 1 + max((depths[each] for each in graph[name]), default=0)
  return max(depths.values())


def imported(name: str, tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
  """Yields the modules of the package that a module imports when it is imported."""
  is_package = any(other.startswith(f"{name}.") for other in known)
  for node in tree.body:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
      pieces = name.split(".") if is_package else name.split(".")[:-1]
      base = pieces[: len(pieces) - node.level + 1] if node.level else []
      module = ".".join([*base, *([node.module] if node.module else [])])
      for alias in node.names:
        inner = f"{module}.{alias.name}"
        # Naming a submodule runs the package's __init__ too, but reads nothing from it.
        if inner in known or module in known:
          yield inner if inner in known else module


class Way(NamedTuple):
  """A call, and the package whose functions it enters."""

  package: str
  what: str
  prepare: Callable[[], Callable[[], object]]


def autocast_matmul() -> Callable[[], object]:
  x = jnp.ones((8, 8))
  fn = mpjax.autocast(jnp.matmul)
  return lambda: fn(x, x)


def nnx_call() -> Callable[[], object]:
  model = mpjax.with_policy(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "mixed_bfloat16")
  x = jnp.ones((8, 8))
  return lambda: model(x)


def linen_call() -> Callable[[], object]:
  model = mpjax.with_policy(nn.Dense(8), "mixed_bfloat16")
  x = jnp.ones((8, 8))
  variables = model.init(jax.random.key(0), x)
  return lambda: model.apply(variables, x)


def update_of(wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]):
  params = {"w": jnp.ones(3)}
  tx = wrap(optax.sgd(0.1))
  state = tx.init(params)
  return lambda: tx.update(params, state, params)


def check_of_a_step() -> Callable[[], object]:
  tx = mpjax.loss_scaling(optax.sgd(0.1))
  params = {"w": jnp.ones(3)}
  state = tx.init(params)

  def step(params, state, x):
    def loss_fn(params):
      return jnp.sum(params["w"] * x)

    grads = jax.grad(mpjax.scaled(loss_fn, state))(params)
    updates, state = tx.update(grads, state, params)
    return mpjax.apply_updates(params, updates), state

  return lambda: mpjax.check_loss_scaling(step)(params, state, jnp.ones(3))


def quantized_call() -> Callable[[], object]:
  import qwix  # pyright: ignore[reportMissingImports]  # not one of our extras

  rules = [qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
  model = qwix.quantize_model(nn.Dense(8), qwix.QtProvider(rules))
  x = jnp.ones((4, 8))  # a weight is known by its shape there
  variables = model.init(jax.random.key(0), x)
  return lambda: model.apply(variables, x)


def filtered_call() -> Callable[[], object]:
  import equinox as eqx

  fn = eqx.filter_jit(eqx.filter_value_and_grad(lambda w, x: jnp.sum(w @ x)))
  x = jnp.ones((8, 8))
  return lambda: fn(x, x)


WAYS = (
  Way("mpjax", "autocast: a matmul", autocast_matmul),
  Way("mpjax", "with_policy: a call of an NNX Linear", nnx_call),
  Way("mpjax", "with_policy: apply of a Linen Dense", linen_call),
  Way("mpjax", "loss_scaling: update", functools.partial(update_of, mpjax.loss_scaling)),
  Way("mpjax", "check_loss_scaling of a step", check_of_a_step),
  Way("qwix", "a quantized call of a Dense", quantized_call),
  Way(
    "optax",
    "apply_if_finite: update",
    functools.partial(update_of, lambda tx: optax.apply_if_finite(tx, 5)),
  ),
  Way("equinox", "filter_jit of filter_value_and_grad", filtered_call),
)


def passed(way: Way) -> set[tuple[str, str]]:
  """Returns (file, function) of each function of the package that a call enters."""
  call = way.prepare()
  call()  # Imports on first use are not a part of the way.
  jax.clear_caches()
  (folder,) = importlib.import_module(way.package).__path__
  entered: set[tuple[str, str]] = set()

  def note(frame, event: str, _: object) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(f"{folder}/"):
      entered.add((code.co_filename, code.co_qualname.split(".<locals>")[0]))

  sys.setprofile(note)
  try:
    call()
  finally:
    sys.setprofile(None)
  return {(file, name) for file, name in entered if not name.startswith("<")}


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("packages", nargs="*", default=PACKAGES, help="names of packages")
  parser.add_argument("--list", metavar="TEXT", help="list the functions of the ways with TEXT")
  options = parser.parse_args()
  console = Console()
  installed = [each for each in options.packages if importlib.util.find_spec(each)]
  for each in set(options.packages) - set(installed):
    console.print(f"{each} is not installed, and left out")
  table = Table("package", title="Source")
  for column in ("files", "lines of code", "functions", "mean lines", "used once", "depth"):
    table.add_column(column, justify="right")
  for each in installed:
    size = size_of(each)
    numbers = (size.files, size.lines, size.functions)
    shares = (f"{size.mean:.1f}", f"{size.used_once:.0%}", str(size.depth))
    table.add_row(each, *(f"{number:,}" for number in numbers), *shares)
  console.print(table)
  table = Table("package", "call", title="Ways")
  for column in ("functions", "files"):
    table.add_column(column, justify="right")
  for way in WAYS:
    if way.package in installed:
      names = passed(way)
      table.add_row(way.package, way.what, str(len(names)), str(len({file for file, _ in names})))
      if options.list and options.list in way.what:
        for file, name in sorted(names):
          console.print(f"{pathlib.Path(file).name}: {name}", highlight=False)
  console.print(table)


if __name__ == "__main__":
  main()
