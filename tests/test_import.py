"""What `import mpjax` loads: jax and optax, but no Flax, no Orbax, and no device."""

import os
import subprocess
import sys

import pytest

import mpjax

EXTRAS = ("matplotlib", "sklearn", "pytest", "hypothesis")


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


def loaded(program: str) -> list[str]:
  """Returns which of Flax and Orbax has any part loaded after `program`."""
  parts = "{m.split('.')[0] for m in sys.modules} & {'flax', 'orbax'}"
  done = run(f"{program}\nimport sys\nprint(*sorted({parts}))")
  assert done.returncode == 0, done.stderr
  return done.stdout.split()


def test_import_loads_no_flax_and_no_orbax():
  assert loaded("import mpjax") == []


def test_the_check_sees_both():
  assert loaded("import mpjax\nimport flax.linen, orbax.checkpoint") == ["flax", "orbax"]


def test_checkpoints_load_orbax_on_first_use():
  assert loaded(
    "import mpjax\nassert 'checkpoints' in dir(mpjax)\nmpjax.checkpoints.restore_like"
  ) == ["orbax"]


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_each_side_of_flax_loads_on_first_use(api):
  done = run(
    "import sys, mpjax\n"
    f"print('{api}' in dir(mpjax), 'mpjax.{api}' in sys.modules)\n"
    f"print(mpjax.{api} is sys.modules['mpjax.{api}'], 'flax.{api}' in sys.modules)"
  )
  assert done.stdout.split() == ["True", "False", "True", "True"], done.stderr


def test_import_touches_no_device():
  # A platform that does not exist fails on first use of a device: the second program shows it.
  nowhere = {"JAX_PLATFORMS": "nowhere"}
  assert run("import mpjax", **nowhere).returncode == 0
  failed = run("import mpjax, jax.numpy as jnp\nmpjax.all_finite(jnp.ones(1))", **nowhere)
  assert failed.returncode != 0
  assert "nowhere" in failed.stderr


def test_import_needs_no_extra():
  blocked = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\nimport mpjax"
  assert run(blocked).returncode == 0
  assert run(f"{blocked}\nimport matplotlib").returncode != 0


def test_unknown_attribute_is_an_attribute_error():
  with pytest.raises(AttributeError, match="module 'mpjax' has no attribute 'linnen'"):
    _ = mpjax.linnen
