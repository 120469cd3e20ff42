"""Who may import whom, and the other rules of the house that a program can check.

Each check takes sources (a path under the project, and its text) and returns what is wrong. The
last test feeds every check something wrong: a check that cannot fail checks nothing.
"""

import ast
import builtins
import functools
import graphlib
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax

ROOT = pathlib.Path(__file__).parents[2]
Sources = Mapping[str, str]
Check = Callable[[Sources], list[str]]
Rule = Callable[..., Iterator[str]]

RANKS = {
  "_core": 0,  # nothing of ours: errors, trees, leaves, types
  "_jaxpr": 1,  # reading jaxprs, running them, and the table of primitives
  "_matmul": 2,  # matmuls with derivative rules, and formats with their recipes
  "_policy": 3,  # policies, rules, dtypes, and which policy is active
  "_autocast": 4,  # the rewriter that casts
  "_optim": 5,  # the adapter to optax, and the training step
  "_io": 6,  # what goes to files, or is made for inference
  "linen": 7,  # adapters, each to one framework for models, neither of which imports the other
  "nnx": 7,
  "_diagnose": 8,  # what a function does with numbers: a folder for each report, and checks
  "_with_policy": 9,
  "__init__": 10,  # and the other public modules
  "__main__": 11,  # the command line
}
"""The folders of the library, by what may import what: only from a lower rank."""

ONLY_IN = {
  "optax": {"_optim", "_diagnose"},
  "flax.linen": {"linen"},
  "flax.nnx": {"nnx"},
  "flax": {"linen", "nnx"},
  "orbax": {"_io"},
  "importlib": {"__init__", "_diagnose", "_with_policy"},
}
"""Who may import what is not ours; the longest prefix decides."""

OPTIONAL_DEPENDENCIES = ("sklearn", "matplotlib", "hypothesis", "pytest")

WITHOUT_TESTS = {
  *("mpjax/checkpoints.py", "mpjax/errors.py", "mpjax/reports.py", "mpjax/states.py"),
  *("mpjax/_core/types.py", "mpjax/_optim/states.py"),
  "mpjax/_policy/layers.py",
}
"""Re-exports, and names for types: there is no behaviour to test."""

TESTS_OF_THE_WHOLE = {"tests/test_import.py"}
"""Files of `tests/` itself that test no single module."""


def library() -> dict[str, str]:
  return read("mpjax")


def read(folder: str) -> dict[str, str]:
  files = sorted((ROOT / folder).rglob("*.py"))
  return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


@functools.cache
def parsed(source: str) -> ast.Module:
  """Returns the syntax tree of a text, which many checks walk."""
  return ast.parse(source)


def nodes(source: str) -> Iterator[tuple[int, ast.AST]]:
  """Yields (line, node) for each node of a text."""
  for node in ast.walk(parsed(source)):
    yield getattr(node, "lineno", 0), node


def part(path: str) -> str:
  """Returns the key of `RANKS`: a folder or a module of `mpjax/`. Public modules are one face."""
  name = path.split("/")[1].removesuffix(".py")
  return name if name.startswith("_") or path.count("/") > 1 else "__init__"


def module_name(path: str) -> str:
  return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str) -> Iterator[tuple[int, str, str]]:
  """Yields (line, module, name) for each import; the name is "" in `import module`."""
  for node in ast.walk(parsed(source)):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      module = "." * node.level + (node.module or "")
      yield from ((node.lineno, module, alias.name) for alias in node.names)


def imported_modules(path: str, sources: Sources) -> Iterator[tuple[int, str]]:
  """Yields (line, module) for each module of ours that a file imports."""
  known = {module_name(p) for p in sources}
  for line, module, name in imports(sources[path]):
    if module in known or module == "mpjax" or module.startswith(("mpjax.", ".")):
      full = f"{module}.{name}"
      yield line, full if full in known else module


@functools.cache
def aliases(source: str) -> dict[str, str]:
  """Returns what each imported name stands for: {"nn": "flax.linen", "jnp": "jax.numpy"}."""
  found: dict[str, str] = {}
  for node in ast.walk(parsed(source)):
    if isinstance(node, ast.Import):
      for alias in node.names:
        root = alias.name.split(".")[0]
        found[alias.asname or root] = alias.name if alias.asname else root
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
  return found


def dotted(node: ast.AST) -> list[str]:
  """Returns ["a", "b", "c"] for the expression `a.b.c`, and [] for anything else."""
  names: list[str] = []
  while isinstance(node, ast.Attribute):
    names.append(node.attr)
    node = node.value
  return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def check_import_direction(sources: Sources) -> list[str]:
  wrong = []
  for path in sources:
    here = part(path)
    if here not in RANKS:
      wrong.append(f"{path}: '{here}' has no rank; give it one in RANKS")
      continue
    for line, module in imported_modules(path, sources):
      place = f"{path}:{line}"
      if module == "mpjax":
        if path != "mpjax/__init__.py":
          wrong.append(f"{place}: imports the root; import the module that defines the name")
      else:
        file = f"mpjax/{module.split('.')[1]}.py"
        there = part(file if file in sources else file.replace(".py", "/"))
        inside = here == there and (path.count("/") > 1 or here == "__init__")
        if not inside and RANKS.get(there, 99) >= RANKS[here]:
          wrong.append(f"{place}: {here} (rank {RANKS[here]}) imports {there}, not below it")
  return wrong


def check_no_cycles(sources: Sources) -> list[str]:
  graph = {
    module_name(path): {module for _, module in imported_modules(path, sources)} - {"mpjax"}
    for path in sources
  }
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    return [" -> ".join(error.args[1])]
  return []


def full_names(source: str) -> Iterator[tuple[int, str]]:
  """Yields (line, full name) for each import."""
  for line, module, name in imports(source):
    yield line, f"{module}.{name}" if name else module


def for_each(items: Callable[[str], Iterator[tuple[int, Any]]]) -> Callable[[Rule], Check]:
  """Makes `rule(path, item, aliases)`, which yields faults, a check of `items` of all sources."""

  def decorated(rule: Rule) -> Check:
    @functools.wraps(rule)
    def check(sources: Sources) -> list[str]:
      return [
        f"{path}:{line}: {fault}"
        for path, source in sources.items()
        for line, item in items(source)
        for fault in rule(path, item, aliases(source))
      ]

    return check

  return decorated


@for_each(full_names)
def check_frameworks(path: str, full: str, _: object) -> Iterator[str]:
  if full.split(".")[0] in OPTIONAL_DEPENDENCIES:
    yield f"{full} is not a dependency of the library"
  prefixes = [p for p in ONLY_IN if full == p or full.startswith(p + ".")]
  if prefixes:
    allowed = ONLY_IN[max(prefixes, key=len)]
    if part(path) not in allowed:
      yield f"imports {full}; only {sorted(allowed)} may"


@for_each(full_names)
def check_no_private_imports(path: str, full: str, _: object) -> Iterator[str]:
  if not full.startswith("mpjax") and any(piece.startswith("_") for piece in full.split(".")):
    yield f"{full} is private to another project"


@for_each(nodes)
def check_versions_in_compat(path: str, node: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
  if path == "mpjax/_jaxpr/compat.py":
    return
  if isinstance(node, ast.Attribute) and node.attr in ("__version__", "__version_info__"):
    yield "a version is read outside of compat.py"
  if isinstance(node, ast.Call) and dotted(node.func) == ["hasattr"]:
    target = dotted(node.args[0])
    if target and target[0] in names:
      yield f"hasattr({'.'.join(target)}) outside of compat.py"


@for_each(nodes)
def check_no_tricks(path: str, node: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
  """Yields uses of frames, and assignments to attributes of imported things."""
  if isinstance(node, ast.Attribute) and node.attr in ("currentframe", "_getframe"):
    yield "looks at frames"
  if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
    for target in [node.target] if isinstance(node, ast.AugAssign) else node.targets:
      if isinstance(target, ast.Attribute) and (dotted(target) or [""])[0] in names:
        yield f"assigns to an attribute of {names[dotted(target)[0]]}"


@for_each(nodes)
def check_errors_are_ours(path: str, node: ast.AST, _: object) -> Iterator[str]:
  """Yields builtin errors, which lack the four parts, and what calls back to raise one."""
  if isinstance(node, ast.Call) and (dotted(node.func) or [""])[-1] in BUILTIN_ERRORS:
    yield f"makes a {dotted(node.func)[-1]}; raise one of mpjax/_core/errors.py"
  if isinstance(node, ast.Attribute) and node.attr in CALLBACKS:
    yield "calls back from a compiled program"


@for_each(nodes)
def check_no_none_among_objects(path: str, node: ast.AST, _: object) -> Iterator[str]:
  """Yields `x in (None, y)` where y is no constant: NumPy's dtype of float64 equals None."""
  if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
    group = node.comparators[0]
    each = group.elts if isinstance(group, ast.Tuple | ast.List | ast.Set) else []
    nothing = [x for x in each if isinstance(x, ast.Constant) and x.value is None]
    if nothing and not all(isinstance(x, ast.Constant) for x in each):
      yield "compares with None and an object; write `x is None or x == y`"


BUILTIN_ERRORS = {
  name
  for name, value in vars(builtins).items()
  if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, Warning)
} - {"AttributeError"}  # `__getattr__` raises it, as Python asks.
CALLBACKS = {"checkify", "pure_callback", "io_callback"}


def check_tests_mirror(sources: Sources) -> list[str]:
  """Returns the modules without a test file of their name, and the test files without a module.

  `test_module.py` and `test_module_topic.py` are of a module. Modules of the same name in linen/
  and nnx/ may have one for both, in tests/integration.
  """
  wanted = {}
  for path in sources:
    folder, _, name = path.removeprefix("mpjax/").removesuffix(".py").rpartition("/")
    if path.startswith("mpjax/") and name != "__init__" and path not in WITHOUT_TESTS:
      names = [piece.lstrip("_") for piece in folder.split("/") if piece]
      wanted["/".join(["tests", *names, f"test_{name.strip('_')}.py"])] = path
  folders = {test.rpartition("/")[0] for test in wanted} | {"tests"}
  present = {
    path
    for path in sources
    if path.rpartition("/")[0] in folders and path.rpartition("/")[2].startswith("test_")
  }
  missing = [
    f"{wanted[test]}: write {test}"
    for test in sorted(wanted.keys() - present)
    if re.sub("^tests/(linen|nnx)/", "tests/integration/", test) not in sources.keys() - wanted
  ]
  beginnings = tuple(test.replace(".py", "_") for test in wanted)
  stray = [
    f"{test}: no module of this name; tests of several go to tests/integration"
    for test in sorted(present - wanted.keys() - TESTS_OF_THE_WHOLE)
    if not test.startswith(beginnings)
  ]
  return missing + stray


CHECKS: dict[Check, dict[str, Sources | str]] = {
  check_import_direction: {
    "upwards": "from mpjax._policy.policy import Policy",
    "between adapters": {"mpjax/linen/_x.py": "from mpjax.nnx._y import f"},
    "the root": "from mpjax import Policy",
    "no rank": {"mpjax/_new.py": ""},
  },
  check_no_cycles: {
    "inside a folder": {
      "mpjax/linen/_x.py": "from mpjax.linen._y import f",
      "mpjax/linen/_y.py": "from mpjax.linen import _x",
    },
    "between scripts": {"one.py": "import other", "other.py": "from one import f"},
  },
  check_frameworks: {
    "linen in nnx": {"mpjax/nnx/_x.py": "from flax import linen as nn"},
    "an extra": "import matplotlib.pyplot as plt",
  },
  check_versions_in_compat: {
    "version": "import jax\nif jax.__version__ > '0.10': pass",
    "hasattr": "import jax.numpy as jnp\nhasattr(jnp, 'float8')",
  },
  check_no_private_imports: {
    "name": {"mpjax/linen/_x.py": "from flax.linen.module import _context"},
    "internals of jax": "from jax import " + "_src",
  },
  check_no_tricks: {
    "frames": "import inspect\ninspect.currentframe()",
    "patching": {"mpjax/linen/_x.py": "import flax.linen as nn\nnn.Dense.__call__ = None"},
  },
  check_errors_are_ours: {
    "a builtin": "def f(x):\n  raise ValueError('f', expected='a', got=x, fix='')",
    "a callback": "import jax\ndef f(x):\n  jax.pure_callback(print, x)",
  },
  check_no_none_among_objects: {"a dtype": "def f(x, y):\n  return x not in (None, y)"},
  check_tests_mirror: {
    "no test": "",
    "no module": {"tests/test_nothing.py": ""},
    "no module in a folder": {
      "mpjax/_core/x.py": "",
      "tests/core/test_x.py": "",
      "tests/core/test_x_topic.py": "",
      "tests/core/test_xs.py": "",
    },
    "no test for either framework": {"mpjax/nnx/_x.py": "", "tests/integration/test_y.py": ""},
  },
}
"""Every check, and sources that it must object to: a text alone is that of mpjax/_core/x.py."""


@pytest.mark.parametrize(
  "check",
  CHECKS,
  ids=lambda check: check.__name__,
)
def test_house_rule(check):
  sources = library()
  assert len(sources) > 5, "the sources were not found"
  if check is check_tests_mirror:
    sources |= read("tests")
  assert check(sources) == []


@pytest.mark.parametrize(
  ("check", "sources"),
  [
    pytest.param(check, sources, id=f"{check.__name__}: {name}")
    for check, cases in CHECKS.items()
    for name, sources in cases.items()
  ],
)
def test_check_can_fail(check, sources):
  sources = {"mpjax/_core/x.py": sources} if isinstance(sources, str) else sources
  assert len(check(sources)) == 1


def test_no_room_has_the_name_of_a_folder_that_pytest_leaves_out():
  # `norecursedirs` knows names alone, so tests/optim/check would be left out with tests/check.
  rooms = [folder for folder in (ROOT / "tests").glob("*/**") if folder.is_dir()]
  assert [
    room for room in rooms if room.name in ("check", "lint") and room.parent.name != "tests"
  ] == []


def test_benchmarks_import_each_other_in_no_circle():
  scripts = {path.rpartition("/")[2]: text for path, text in read("benchmarks").items()}
  assert check_no_cycles(scripts) == []


def one_apply() -> Callable[[], object]:
  """A call of a model with layers that a policy casts, and some that it does not."""
  x, net = jnp.ones((2, 4)), nn.Sequential([nn.Dense(4), nn.gelu, nn.LayerNorm(), nn.Dense(4)])
  applied = mpjax.linen.with_policy(net, "mixed_bfloat16")
  variables = applied.init(jax.random.key(0), x)  # imports what is imported on first use
  return lambda: applied.apply(variables, x)


def one_view() -> Callable[[], object]:
  """A view of a model whose class has none yet, and the view's first call."""

  class Net(nnx.Linear):
    pass

  def call(cls: type[nnx.Linear]) -> object:
    return mpjax.with_policy(cls(4, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")(jnp.ones((2, 4)))

  call(nnx.Linear)  # imports what is imported on first use
  return lambda: call(Net)


def one_step() -> Callable[[], object]:
  """A training step with a loss scale."""

  def loss_fn(params, model_state, batch, rng):
    return jnp.sum((batch @ params["w"]).astype(jnp.float16)), (model_state, {})

  params, tx = {"w": jnp.ones(3)}, mpjax.loss_scaling(optax.sgd(0.1))
  step = mpjax.make_train_step(loss_fn, tx)
  state = mpjax.TrainState.create(params, tx)
  return lambda: step(state, jnp.ones((4, 3)))


def one_report() -> Callable[[], object]:
  """The ranges of a training step without a scale."""

  def step(params, x):
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

  return lambda: mpjax.ranges(step)({"w": jnp.ones((8, 8))}, jnp.ones((4, 8)))


@pytest.mark.parametrize(
  ("page", "call", "length"),
  [
    ("apply", one_apply, 13),
    ("architecture", one_report, 13),
    ("nnx", one_view, 17),
    ("training", one_step, 14),
  ],
)
def test_the_table_of_a_way_names_its_functions_in_order(page, call, length):
  calls, run = {}, call()

  def note(frame, event, _):
    if event == "call":
      file = pathlib.Path(frame.f_code.co_filename)
      if ROOT / "mpjax" in file.parents:
        calls.setdefault((frame.f_code.co_name, file.relative_to(ROOT).as_posix()))

  sys.setprofile(note)
  try:
    run()
  finally:
    sys.setprofile(None)
  text = (ROOT / f"docs/design/{page}.md").read_text(encoding="utf-8")
  named = re.findall(r"\| \d+ \| `(\w+)` in `([\w/.]+)`", text)
  assert len(named) == length
  assert [call for call in calls if call in named] == named
