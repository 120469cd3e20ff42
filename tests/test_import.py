"""What `import mpjax` loads: jax, and nothing else that is not ours; no device is touched."""

import ast
import os
import subprocess
import sys

import pytest

import mpjax

EXTRAS = ("matplotlib", "sklearn", "pytest", "hypothesis")
HEAVY = ("chex", "flax", "matplotlib", "optax", "orbax", "rich")
"""What takes long to import, or is an extra: a user of something else need not wait for it."""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
  """Runs `program` in a fresh interpreter, as a user's script would run."""
  return subprocess.run(
    [sys.executable, "-W", "error::ImportWarning", "-c", program],
    env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )


def loaded(*lines: str) -> list[list[str]]:
  """Returns which of `HEAVY` has any part loaded after each line of a program."""
  parts = f"{{m.split('.')[0] for m in sys.modules}} & set({HEAVY})"
  done = run("\n".join(["import sys", *(f"{line}\nprint(*sorted({parts}))" for line in lines)]))
  assert done.returncode == 0, done.stderr
  return [line.split() for line in done.stdout.split("\n")[:-1]]


def test_a_name_loads_what_it_needs():
  lines = ["import mpjax", "mpjax.Policy", "mpjax.full_precision", "mpjax.autocast", "mpjax.audit"]
  assert loaded(*lines) == [[], [], [], [], ["rich"]]
  lines = ["import mpjax", "assert 'checkpoints' in dir(mpjax)", "mpjax.loss_scaling"]
  lines += ["mpjax.checkpoints.restore_like"]
  assert loaded(*lines) == [[], [], ["optax"], ["optax", "orbax"]]


def test_names_that_moved_are_found_and_say_where_they_are():
  for name, new in (("MpjaxTypeError", "errors.MpjaxTypeError"), ("Audit", "reports.AuditReport")):
    with pytest.warns(DeprecationWarning, match=f"mpjax.{name} is mpjax.{new}"):
      found = getattr(mpjax, name)
    module, rest = new.split(".")
    assert found is getattr(getattr(mpjax, module), rest)


def test_type_checkers_and_python_import_the_same_names():
  with open(mpjax.__file__, encoding="utf-8") as file:
    module = ast.parse(file.read())
  (for_checkers,) = (
    node for node in module.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
  )
  said = {
    (imported.name, node.module)
    for node in for_checkers.body
    if isinstance(node, ast.ImportFrom) and node.module != "mpjax"
    for imported in node.names
  }
  lazy = set(mpjax.__all__) - set(mpjax._MODULES) - vars(mpjax).keys()
  assert said == {(name, mpjax._ON_FIRST_USE.get(name, "mpjax.transforms")) for name in lazy}


def test_threads_use_names_for_the_first_time_at_once():
  # As workers of a pool do, each of which needs something else first.
  done = run(
    "import random, threading, mpjax\n"
    "together = threading.Barrier(16)\n"
    "def use(seed):\n"
    "  names = list(mpjax.__all__)\n"
    "  random.Random(seed).shuffle(names)\n"
    "  together.wait()\n"
    "  for name in names: getattr(mpjax, name)\n"
    "threads = [threading.Thread(target=use, args=(i,)) for i in range(16)]\n"
    "for thread in threads: thread.start()\n"
    "for thread in threads: thread.join()"
  )
  assert not done.stderr


def test_each_side_of_flax_loads_on_first_use():
  lines = ["import sys, mpjax"]
  for api in ("linen", "nnx"):
    lines += [
      f"print('{api}' in dir(mpjax), 'mpjax.{api}' in sys.modules)",
      f"print(mpjax.{api} is sys.modules['mpjax.{api}'], 'flax.{api}' in sys.modules)",
    ]
  done = run("\n".join(lines))
  assert done.stdout.split() == ["True", "False", "True", "True"] * 2, done.stderr


def test_import_touches_no_device():
  # A platform that does not exist fails on first use of a device.
  program = "import mpjax, jax.numpy as jnp\nprint('imported', flush=True)\njnp.ones(1)"
  done = run(program, JAX_PLATFORMS="nowhere")
  assert done.stdout == "imported\n"
  assert done.returncode != 0
  assert "nowhere" in done.stderr


def test_import_needs_no_extra():
  blocked = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\nimport mpjax"
  done = run(f"{blocked}\nprint('imported', flush=True)\nimport matplotlib")
  assert done.stdout == "imported\n"
  assert done.returncode != 0


def test_unknown_attribute_is_an_attribute_error():
  with pytest.raises(AttributeError, match="module 'mpjax' has no attribute 'linnen'"):
    _ = mpjax.linnen
