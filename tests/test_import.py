"""What `import mpjax` loads: jax, and nothing else that is not ours; no device is touched."""

import ast
import os
import re
import subprocess
import sys

import pytest

import mpjax

EXTRAS = ("matplotlib", "sklearn", "pytest", "hypothesis")
WATCHED = ("chex", "flax", "matplotlib", "mpjax.linen", "mpjax.nnx", "optax", "orbax", "rich")
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


LOADS = {
  # a line of a program, and which of `WATCHED` it loads
  "import mpjax": "",
  "mpjax.Policy, mpjax.full_precision, mpjax.autocast": "",
  "assert {'checkpoints', 'linen', 'nnx'} <= set(dir(mpjax))": "",
  "mpjax.audit": "rich",
  "mpjax.loss_scaling": "optax",
  "mpjax.checkpoints.restore_like": "orbax",
  "mpjax.linen": "flax mpjax.linen",
  "mpjax.nnx": "mpjax.nnx",
}


@pytest.mark.slow
def test_a_name_loads_what_it_needs():
  watch = f"print(*sorted(set(sys.modules) & set({WATCHED})))"
  done = run("\n".join(["import sys", *(f"{line}\n{watch}" for line in LOADS)]))
  assert not done.stderr
  loaded: list[str] = []
  for line, names in zip(LOADS, done.stdout.splitlines(), strict=True):
    loaded += LOADS[line].split()
    assert names.split() == sorted(loaded), line


@pytest.mark.parametrize(
  ("name", "hint"),
  [
    ("LossScalingState", "write mpjax.states.LossScalingState"),
    ("AuditReport", "write mpjax.reports.AuditReport"),
    ("policy", "write mpjax.Policy"),
    ("find_nonfinit", "the nearest are find_nonfinite"),
    ("GradScaler", "write mpjax.loss_scaling(optimizer)"),
    ("mixed_bfloat16", 'write mpjax.with_policy(model, "mixed_bfloat16")'),
  ],
)
def test_an_unknown_name_has_an_error_with_a_hint(name, hint):
  with pytest.raises(AttributeError, match=re.escape(f"no attribute '{name}'; {hint}")):
    getattr(mpjax, name)


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
  lazy = set(mpjax.__all__) - vars(mpjax).keys()
  assert said == {(name, mpjax._HOMES[name]) for name in lazy}


@pytest.mark.slow
def test_a_step_compiled_before_names_are_used_is_not_compiled_again():
  # JAX would compile it again if a name created a user context.
  done = run(
    "import jax, jax.numpy as jnp, mpjax\n"
    "@jax.jit\n"
    "def step(x):\n"
    "  print('traced')\n"
    "  return mpjax.with_policy(jnp.matmul, 'mixed_bfloat16')(x, x)\n"
    "step(jnp.ones((8, 8)))\n"
    "for name in dir(mpjax): getattr(mpjax, name)\n"
    "step(jnp.ones((8, 8)))"
  )
  assert done.stdout == "traced\n"
  assert not done.stderr


@pytest.mark.slow
def test_threads_use_names_for_the_first_time_at_once():
  # As workers of a pool do, each of which needs something else first.
  done = run(
    "import random, threading, mpjax\n"
    "together = threading.Barrier(16)\n"
    "def use(seed):\n"
    "  names = dir(mpjax)\n"
    "  random.Random(seed).shuffle(names)\n"
    "  together.wait()\n"
    "  for name in names: getattr(mpjax, name)\n"
    "threads = [threading.Thread(target=use, args=(i,)) for i in range(16)]\n"
    "for thread in threads: thread.start()\n"
    "for thread in threads: thread.join()"
  )
  assert not done.stderr


@pytest.mark.slow
def test_import_needs_no_extra_and_touches_no_device():
  # A platform that does not exist fails on first use of a device.
  program = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\nimport mpjax\n"
  program += "import jax.numpy as jnp\nprint('imported', flush=True)\njnp.ones(1)"
  done = run(program, JAX_PLATFORMS="nowhere")
  assert done.stdout == "imported\n"
  assert done.returncode != 0
  assert "nowhere" in done.stderr
