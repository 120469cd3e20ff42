"""What every test runs under: CPU devices, strict promotion, flags that stay as they were."""

import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS_OF_XLA = {
  "--xla_force_host_platform_device_count": "8",
  # Two thirds of the time goes into compiling tiny programs that run once. What the tests say of
  # dtypes, operations and numbers holds without optimization too; a test of what the optimizer
  # makes of a jaxpr passes compiler_options=.
  "--xla_backend_optimization_level": "0",
  "--xla_llvm_disable_expensive_passes": "true",
}
_JAXLIB = importlib.metadata.version("jaxlib")
if _JAXLIB.startswith("0.10."):
  # A kernel written by LLVM alone takes a fifth of the time of one that goes through MLIR. A later
  # XLA has no other way to write one, and ends the process for a flag that it does not know.
  _FLAGS_OF_XLA["--xla_cpu_use_fusion_emitters"] = "false"
  _FLAGS_OF_XLA["--xla_cpu_parallel_codegen_split_count"] = "1"
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
  [_given, *(f"{flag}={value}" for flag, value in _FLAGS_OF_XLA.items() if flag not in _given)]
).strip()

import contextlib
import gc
import hashlib
import importlib
import pathlib
import platform
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

pytest.register_assert_rewrite("tests.errors")

# One seed for all: a failure in continuous integration is the same failure here. `make check` runs
# the properties again with --hypothesis-profile=full.
hypothesis.settings.register_profile(
  "fast", max_examples=10, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile(
  "full", hypothesis.settings.get_profile("fast"), max_examples=300
)
hypothesis.settings.load_profile("fast")

# Tracing makes many small objects that live long. To look for garbage among them every 700, as
# Python does, takes a twentieth of the time of these tests.
gc.set_threshold(200_000, 20, 50)

_TESTS = pathlib.Path(__file__).parent

_EXAMPLES = ("test_docs.py", "test_public_api.py")
"""Files that run what users will run, as users will run it."""

_FLAGS = (
  "jax_check_tracer_leaks",
  "jax_debug_nans",
  "jax_default_matmul_precision",
  "jax_disable_jit",
  "jax_enable_x64",
  "jax_numpy_dtype_promotion",
  "jax_numpy_rank_promotion",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
  """Skips a test that is not for a flag which is set, as in `make flags`."""
  for mark in item.iter_markers("not_with"):
    flag, reason = mark.args
    if os.environ.get(flag) == "1":
      pytest.skip(f"with {flag}: {reason}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Leaves out tests marked `gpu` where there is no GPU, and refuses ids that change by process.

  Leaves out `convergence` and `accuracy` too, unless `-m` or the id of a test asks for them, and
  `slow` in a run of all tests, unless `-m` asks for them.
  """
  by_id = any("::" in arg for arg in config.args)
  left = [m for m in ("convergence", "accuracy") if not (by_id or m in config.option.markexpr)]
  if config.args == config.getini("testpaths") and "slow" not in config.option.markexpr:
    left.append("slow")
  long = [item for item in items if any(map(item.get_closest_marker, left))]
  if long:
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
  changing = [item.nodeid for item in items if " at 0x" in item.nodeid]
  if changing:
    raise pytest.UsageError(f"an address is part of these ids, give ids=: {changing}")
  if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
    for item in items:
      if item.get_closest_marker("gpu"):
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def _compiled() -> Iterator[list[pathlib.Path]]:
  """The folder of what this worker has compiled, and that of all workers and earlier runs."""
  key = "\0".join([platform.machine(), _JAXLIB, os.environ["XLA_FLAGS"]])
  shared = _TESTS.parent / ".cache" / "compiled" / hashlib.sha256(key.encode()).hexdigest()[:16]
  shared.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=shared.parent) as folder:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    yield [pathlib.Path(folder), shared]


@pytest.fixture(scope="module", autouse=True)
def _compile_once(_compiled: list[pathlib.Path]) -> Iterator[None]:
  """Compiles a program once, however many tests, workers and later runs trace it."""
  # A cache in common would have files that the other worker is still writing: they are linked, once
  # they are complete, before and after each file of tests.
  own, shared = _compiled
  _link_files(shared, own)
  yield
  _link_files(own, shared)


def _link_files(source: pathlib.Path, target: pathlib.Path) -> None:
  # A folder is what the autotuner of a GPU knows, and cannot be linked.
  for name in set(os.listdir(source)).difference(os.listdir(target)):
    with contextlib.suppress(FileExistsError):
      if not (source / name).is_dir():
        (target / name).hardlink_to(source / name)


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
  """Makes silent promotion of ranks and dtypes an error.

  A test that needs the standard rules says so: `@pytest.mark.standard_promotion`, or with "dtypes"
  as its argument if ranks are strict all the same.
  """
  mark = request.node.get_closest_marker("standard_promotion")
  free = request.path.name in _EXAMPLES or (mark is not None and not mark.args)
  with contextlib.ExitStack() as stack:
    if not free:
      stack.enter_context(jax.numpy_rank_promotion("raise"))
    if not free and mark is None:
      stack.enter_context(jax.numpy_dtype_promotion("strict"))
    yield


@pytest.fixture(autouse=True)
def _flags_stay(_strict_promotion: None) -> Iterator[None]:
  """Fails a test that leaves a global flag changed, and puts the flag back for the next one."""
  before = {name: getattr(jax.config, name) for name in _FLAGS}
  yield
  changed = {name: old for name, old in before.items() if getattr(jax.config, name) != old}
  for name, old in changed.items():
    jax.config.update(name, old)
  assert not changed, f"left changed: {sorted(changed)}; use the set_flag fixture"


@pytest.fixture
def set_flag() -> Iterator[Callable[[str, object], None]]:
  """Returns `set_flag(name, value)` for `jax.config`; the old values come back afterwards."""
  before: dict[str, object] = {}

  def set_flag(name: str, value: object) -> None:
    before.setdefault(name, getattr(jax.config, name))
    jax.config.update(name, value)

  yield set_flag
  for name, old in before.items():
    jax.config.update(name, old)


@pytest.fixture
def collect() -> Iterator[Callable[[], int]]:
  """Returns `gc.collect` for the objects of one test: among those of all it takes a second."""
  gc.freeze()
  yield gc.collect
  gc.unfreeze()


@pytest.fixture
def no_cache(set_flag: Callable[[str, object], None]) -> Iterator[None]:
  """Compiles without JAX's cache on disk.

  JAX could load a function for a device that is not there only to run it. Threads that compile at
  once may read an entry that another is still writing, and JAX then warns.
  """
  compilation_cache.reset_cache()
  set_flag("jax_enable_compilation_cache", False)
  yield
  compilation_cache.reset_cache()


@pytest.fixture
def h200(gpu_hlo: Any, no_cache: None) -> Any:
  """An H200 to compile for, where jax's plugin for CUDA is installed: no GPU is needed."""
  return _gpu(gpu_hlo, "h200")


@pytest.fixture
def b200(gpu_hlo: Any, no_cache: None) -> Any:
  """Likewise a B200, which multiplies MXFP8 and NVFP4."""
  return _gpu(gpu_hlo, "b200")


def _gpu(gpu_hlo: Any, name: str) -> Any:
  try:
    return gpu_hlo.gpu_device(name)
  except RuntimeError as error:
    pytest.skip(str(error))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
  """Returns `example(name)`, which imports a script of examples/ as it is when it is run."""
  monkeypatch.syspath_prepend(str(_TESTS.parent / "examples"))
  return importlib.import_module


@pytest.fixture
def key() -> jax.Array:
  """A typed PRNG key."""
  return jax.random.key(0)


@pytest.fixture
def devices() -> list[Any]:
  """Four CPU devices, for meshes."""
  return _first_devices(4)


@pytest.fixture
def eight_devices() -> list[Any]:
  """Eight CPU devices, for what is said of data parallel training."""
  return _first_devices(8)


def _first_devices(count: int) -> list[Any]:
  found = jax.devices("cpu")[:count]
  assert len(found) == count, "XLA_FLAGS was set without enough host devices"
  return found
