"""The module, pass and line of an equation."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._jaxpr.locations import (
  Location,
  is_library,
  line_of_user,
  lines_of_call,
  location,
  shown_file,
)
from mpjax._jaxpr.reader import inner_jaxprs, opened


def locations(program, around=None):
  """Yields the primitive and location of each equation, those of inner jaxprs included."""
  for eqn in opened(program).eqns:
    here = location(eqn, around)
    found = inner_jaxprs(eqn) or ()
    if not found:
      yield eqn, here
    for inner in found:
      yield from locations(inner.program, here)


def places(fn, *args, of="dot_general"):
  program = jax.make_jaxpr(fn)(*args)
  return {(x.path, x.direction) for eqn, x in locations(program) if eqn.primitive.name == of}


X = jnp.ones((4, 4))


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.relu(nn.Dense(4)(x))


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.remat(Block)(name="repeated")(Block(name="plain")(x))


class Scanned(nn.Module):
  @nn.compact
  def __call__(self, x):
    def body(module, x, _):
      return nn.Dense(4, name="inside")(x), None

    lifted = nn.scan(body, variable_broadcast="params", split_rngs={"params": False}, length=3)
    return lifted(self, x, None)[0]


class Other(nn.Module):
  def setup(self):
    self.block = Block()

  def encode(self, x):
    return self.block(x)

  def __call__(self, x):
    return self.encode(x)


def test_passes_and_paths_of_linen():
  # Neither a method is a module, nor the function that a lifted transform takes.
  both, recomputed = ("forward", "backward"), ("forward", "recomputed", "backward")
  for model, expected in (
    (Net(), {"Net/plain/Dense_0": both, "Net/repeated/Dense_0": recomputed}),
    (Scanned(), {"Scanned/inside": both}),
    (Other(), {"Other/block/Dense_0": both}),
  ):
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    gradient = jax.grad(lambda v, x: model.apply(v, x).sum())  # noqa: B023
    found = places(gradient, variables, X)
    assert found == {(path, each) for path, passes in expected.items() for each in passes}


def test_scopes_inside_and_outside_of_a_gradient():
  def fn(x):
    with jax.named_scope("outer"):
      return jax.grad(lambda x: inner(x).sum())(x)

  def inner(x):
    with jax.named_scope("inner"):
      return x @ x

  assert places(fn, X) == {("outer/inner", "forward"), ("outer/inner", "backward")}


def test_scopes_around_what_is_computed_again_are_not_repeated():
  def fn(x):
    with jax.named_scope("net"), jax.named_scope("block"):
      return jax.checkpoint(lambda x: jnp.sin(x @ x))(x).sum()

  assert places(jax.grad(fn), X) == {
    ("net/block", direction) for direction in ("forward", "recomputed", "backward")
  }


@pytest.mark.parametrize(
  ("scopes", "path"),
  [
    ((), ""),
    (("mpjax.region=float16", "a", "mpjax.module=a", "b"), "a/b"),
    (("block", "block"), "block"),
    (("RNN", "cell.scan_fn", "cell", "hi"), "RNN/cell/hi"),
    (("Net", "a.encode", "b", "b"), "Net/a/b/b"),
    (("a", "block", "block"), "a/block/block"),
    (("layer.0", "x"), "layer.0/x"),
    (("Net", "a.up", "mpjax.module=a.up"), "Net/a.up"),
    (("Net.encode", "Net.encode", "a"), "Net/a"),
    (("Net", "bqhd,bkhd->bhqk"), "Net"),
    # In NNX scopes are the user's, and no part of the module's path.
    (("mpjax.module=layers/0", "block", "mpjax.module=layers/0/up"), "layers/0/up"),
    (("mpjax.module=", "block"), "block"),
    (("mpjax.module=up", "backup"), "up"),
  ],
)
def test_path_of_scopes(scopes, path):
  assert Location(scopes).path == path


def test_the_line_is_the_users_and_not_a_librarys():
  def fn(x):
    y = jax.nn.softmax(x)
    return nn.relu(y @ y)

  lines, first = inspect.getsourcelines(fn)
  (found,) = {
    (x.source.line - first, x.source.function.split(".")[-1])
    for eqn, x in locations(jax.make_jaxpr(fn)(X))
    if eqn.primitive.name in ("exp", "reduce_max") and x.source
  }
  assert found == (1, "fn")
  assert "softmax" in lines[1]
  (source,) = {
    str(x.source) for eqn, x in locations(jax.make_jaxpr(fn)(X)) if eqn.primitive.name == "exp"
  }
  assert source == f"test_locations.py:{first + 1}"


def test_a_line_of_a_notebook_is_shown_by_its_cell():
  names = {"jnp": jnp}
  file = "/tmp/ipykernel_4242/2194308582.py"
  exec(compile("\ndef fn(x):\n  return jnp.sin(x)\n", file, "exec"), names)
  ((_, found),) = locations(jax.make_jaxpr(names["fn"])(X))
  assert found.source == (file, 3, "fn")
  assert str(found.source) == "cell:3"


def test_the_second_call_of_a_jitted_function_of_a_library_has_its_own_line():
  def fn(x):
    y = jax.nn.one_hot(x, 4)
    return y + jax.nn.one_hot(x, 4)

  first = inspect.getsourcelines(fn)[1]
  program = jax.make_jaxpr(fn)(jnp.arange(3))
  found = [
    x.source.line for eqn, x in locations(program) if eqn.primitive.name == "eq" and x.source
  ]
  assert found == [first + 1, first + 2]


@pytest.mark.standard_promotion
def test_equations_of_one_call_of_a_library():
  def fn(x):
    return x.astype("float32") * (x + jnp.ones(3))

  program = jax.make_jaxpr(fn)(jnp.ones(3, "bfloat16"))
  calls = [
    lines_of_call(eqn) for eqn, _ in locations(program) if eqn.primitive.name != "broadcast_in_dim"
  ]
  asked, promotes, add, mul = calls
  assert promotes == add
  assert asked not in (add, mul, ())


FILES = ["/home/me/mpjax/model.py", "/env/lib/python3.11/site-packages/zoo/net.py"]
CELLS = {
  "/tmp/ipykernel_4242/2194308582.py": "cell",
  "C:\\Users\\me\\AppData\\Local\\Temp\\ipykernel_4242\\2194308582.py": "cell",
  "<ipython-input-12-0a1b2c3d4e5f>": "cell 12",
  "/tmp/ipython-input-2938354417.py": "cell",
  "/tmp/ipython-input-3-4282502808.py": "cell 3",
}
"""The files of cells, as Jupyter, IPython and Colab name them, and what a reader is shown."""


def error_in(file, line, **names):
  """Returns what a line of a function in some file raises."""
  exec(compile(f"def ask(x):\n  {line}\n", file, "exec"), names)
  with pytest.raises(Exception) as excinfo:
    jax.jit(names["ask"])(1.0)
  return excinfo.value


def test_the_line_of_the_user_is_found_wherever_the_code_is():
  # A checkout may be called anything, and a model may be an installed package.
  for file in (*FILES, "/srv/jax/train.py"):
    assert line_of_user(error_in(file, "return 1 if x else 2")).startswith(f"{file}:2: ")
  for file, shown in CELLS.items():
    assert line_of_user(error_in(file, "raise ValueError")).startswith(f"{shown}:2: ")
    assert not is_library(file)


def test_every_part_of_mpjax_is_a_library_and_a_users_model_is_not():
  for module in (mpjax, mpjax.linen, mpjax.states, jax, functools):
    assert is_library(str(module.__file__))
  assert is_library("/venv/lib/python3.11/site-packages/flax/linen/linear.py")
  assert is_library("<frozen importlib._bootstrap>")
  assert not is_library("/venv/lib/python3.11/site-packages/transformers/models/bert.py")
  assert not is_library("<ipython-input-1>")
  assert not is_library(__file__)
  # A file of another kind has its own name.
  files = ["/home/me/ipykernel_4242/train.py", "/home/me/2194308582.py", "ipykernel_4242.py"]
  assert [shown_file(file) for file in (*files, "<stdin>")] == [*files, "<stdin>"]
