"""Damaged checkpoints, which `restore_like` must refuse, and runs that were interrupted.

A damaged one must be refused with the path of what is wrong. An interrupted run, saved to bytes and
restored in whatever phase it was, must go on bit for bit as the one that was not.
"""

import functools
import io
import pathlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import mpjax
from tests.campaign import network
from tests.campaign.network import GRADIENT, LOSS, STATISTICS
from tests.campaign.outcome import Job, Outcome, judge, require

Arrays = dict[str, np.ndarray]
to_arrays = mpjax.checkpoints.to_arrays
SCALE = {"init_scale": 64.0, "growth_interval": 3, "min_scale": 4.0, "max_scale": 2.0**12}
TX = mpjax.loss_scaling(
  mpjax.accumulate_gradients(mpjax.master_weights(optax.adam(2**-4)), 4),
  mpjax.DynamicLossScale(**SCALE, hysteresis=2),
)
LABEL = "dynamic(growth_interval=3,min_scale=4,max_scale=4096,hysteresis=2)"
STEPS, BATCHES = 40, 16

# Orbax numbers its operations for the whole process: two saves in two threads can remove each
# other's folder while it is made.
_ONE_AT_A_TIME = threading.Lock()


def jobs(small: bool, guard: bool) -> list[Job]:
  runs = [functools.partial(damage, "bfloat16", small, guard=guard)]
  if not small:
    runs.append(functools.partial(damage, "float16", small, guard=guard))
    runs.append(functools.partial(interrupt, 12, guard=guard))
  return [Job("checkpoints", run) for run in runs]


def begin(stored: str, seed: int = 0) -> mpjax.TrainState:
  params = network.initial_parameters(np.random.default_rng(seed))
  return mpjax.TrainState.create(
    jax.tree.map(lambda p: jnp.asarray(p, stored), params),
    TX,
    model_state=network.initial_statistics(),
    rng=jax.random.key(seed),
    ema=True,
  )


def saved(arrays: Arrays) -> Arrays:
  """Returns what comes back from the bytes of NumPy's file."""
  file = io.BytesIO()
  np.savez(file, **arrays)
  file.seek(0)
  with np.load(file) as found:
    return dict(found)


class Damage(NamedTuple):
  """A checkpoint that must be refused."""

  text: str
  arrays: Arrays
  named: str  # what the error must name
  cast: bool = False


def damage(stored: str, small: bool, rng: np.random.Generator, *, guard: bool) -> list[Outcome]:
  outcome, target = Outcome("checkpoints: damaged"), begin(stored)
  good = to_arrays(target)
  unharmed = to_arrays(mpjax.checkpoints.restore_like(begin(stored, 1), saved(good)))
  require(same(unharmed, good), "an unharmed checkpoint does not come back")
  restore = mpjax.checkpoints.restore_like if guard else careless
  for case in list(damages(good, rng))[:: 9 if small else 1]:
    call = functools.partial(restore, target, saved(case.arrays), cast=case.cast)
    record(outcome, f"{stored}: {case.text}", call, case.named)
  with tempfile.TemporaryDirectory() as folder:
    for text, path, named in () if small else on_disk(target.params, pathlib.Path(folder)):
      call = functools.partial(restore, target.params, path, cast=False)
      record(outcome, f"{stored}, Orbax: {text}", call, named)
  return [outcome]


def careless(target: Any, arrays: Any, *, cast: bool) -> Any:
  """Returns a state in the order of the leaves, as it is easily written."""
  del cast
  leaves = list(arrays.values()) if isinstance(arrays, dict) else jax.tree.leaves(target)
  spare = len(jax.tree.leaves(target)) - len(leaves)
  leaves = [*leaves, *leaves[:1] * max(spare, 0)]
  return jax.tree.unflatten(jax.tree.structure(target), leaves[: len(jax.tree.leaves(target))])


def record(outcome: Outcome, text: str, call: Callable[[], Any], named: str) -> None:
  """Restores what is damaged, and puts down whether it was refused by name."""
  outcome.injected += 1
  try:
    call()
  except mpjax.errors.MpjaxValueError as error:
    outcome.lose(named not in str(error), f"{text}: {named!r} is not named: {error}")
  except Exception as error:
    outcome.lose(1, f"{text}: not one of our errors: {error!r}")
  else:
    outcome.lose(1, f"{text}: restored")


def damages(good: Arrays, rng: np.random.Generator) -> Iterator[Damage]:
  def changed(name: str, array: Any) -> Arrays:
    return good | {name: np.asarray(array)}

  for name, x in good.items():
    path, _, tag = name.rpartition("@")
    path = path or tag
    rest = {key: array for key, array in good.items() if key != name}
    yield Damage(f"{path} is missing", rest, f"nothing at {path}")
    yield Damage(f"{path} is renamed", rest | {f"{name}x": x}, f"nothing at {path}")
    yield Damage(f"{path} has a neighbour", good | {f"{path}_2": x}, f"{path}_2")
    for grown in (x[..., None], x[None], np.stack([x, x], -1)):
      yield Damage(f"{path} of shape {grown.shape}", changed(name, grown), f"at {path}")
    if x.ndim:
      yield Damage(f"{path} is cut short", changed(name, x[:-1]), f"at {path}", cast=True)
      yield Damage(f"{path} is too long", changed(name, np.repeat(x, 2, 0)), f"at {path}")
      yield Damage(f"{path} is empty", changed(name, x[:0]), f"at {path}")
    others = {"float64", "int16", "uint8", "bool", "complex64", "int64"} - {x.dtype.name}
    other = str(rng.choice(sorted(others)))
    yield Damage(f"{path} as {other}", changed(name, np.nan_to_num(x).astype(other)), f"at {path}")
    if path.rpartition("/")[2] == "scale":
      for value in (np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, -(2.0**15)):
        yield Damage(f"a scale of {value}", changed(name, x * 0 + np.float32(value)), "loss scale")
  half = next(name for name in good if name.startswith("params/w1"))
  path, _, tag = half.rpartition("@")
  if not tag or not path:  # float16: NumPy knows it.
    large = good[half].astype(np.float32) * 0 + 1e6
    yield Damage("too large for half", changed(half, large), "params/w1", cast=True)
  labels = ["dynamic", "static(scale=64)", f"a:{LABEL}", LABEL.replace("=3", "=4"), LABEL + " "]
  for label in labels:
    arrays = {name.replace(LABEL, label): x for name, x in good.items()}
    yield Damage(f"labelled {label}", arrays, label)
  unscaled = {name: x for name, x in good.items() if LABEL not in name}
  yield Damage("saved without a scale", unscaled, LABEL)
  for part in ("params", "model_state", "ema", "opt_state"):
    arrays = {name: x for name, x in good.items() if not name.startswith(f"{part}/")}
    yield Damage(f"{part} is missing", arrays, part)
  yield Damage("nothing at all", {}, "")


def on_disk(params: Any, folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, str]]:
  """Yields checkpoints of Orbax that do not fit, which shows without reading them."""
  wrong = {
    "another dtype": params | {"w1": params["w1"].astype(jnp.float32)},
    "another shape": params | {"w1": jnp.zeros((8, 9), params["w1"].dtype)},
    "a leaf missing": {name: p for name, p in params.items() if name != "w1"},
  }
  for text, tree in wrong.items():
    with _ONE_AT_A_TIME, ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(folder / text, tree)
    yield text, folder / text, "w1"
  yield "no folder", folder / "nowhere", "nowhere"
  (folder / text / "_METADATA").unlink()
  yield "no metadata", folder / text, str(folder / text)


def same(a: Arrays, b: Arrays) -> bool:
  return a.keys() == b.keys() and all(
    (x.dtype, x.shape, x.tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes())
    for name, x in a.items()
  )


def interrupt(runs: int, rng: np.random.Generator, *, guard: bool) -> list[Outcome]:
  """Saves and restores a run with faults at random steps, in a loop with donated states."""
  outcome = Outcome("checkpoints: interrupted runs")
  step = mpjax.make_train_step(network.loss_in("float16"), TX, ema_decay=0.5)
  pool = network.pool(rng, BATCHES)
  make_batch = jax.jit(functools.partial(network.make_batch, pool))
  phases: set[tuple[int, int, bool]] = set()
  stops = rng.random((runs, STEPS)) < 0.3
  wrong = np.zeros((runs, STEPS), bool)
  for run in range(runs):
    place = (GRADIENT, LOSS, STATISTICS)[run % 3]
    faults = network.plan(rng, 1, STEPS, place, "float16")
    index = rng.integers(0, BATCHES, STEPS)
    straight, broken = begin("float16", run), begin("float16", run)
    for i in range(STEPS):
      if stops[run, i]:
        phases.add(phase(broken))
        broken = resumed(broken, run, guard)
      batch = make_batch(index[i], network.Faults(*(f[0, i] for f in faults)))
      straight, _ = step(straight, batch)
      broken, _ = step(broken, batch)
      wrong[run, i] = not same(to_arrays(broken), to_arrays(straight))
  judge(outcome, stops, {"the resumed state": wrong}, "float16 with masters, windows of 4")
  everywhere = [set(p) for p in zip(*phases, strict=True)]
  require(everywhere == [{0, 1, 2, 3}, {0, 1, 2}, {True, False}], f"only {phases} was interrupted")
  outcome.lose(step._cache_size() - 1, f"compiled {step._cache_size()} times")
  return [outcome]


def phase(state: mpjax.TrainState) -> tuple[int, int, bool]:
  """Returns where a run is: in the window, in the growth of the scale, after a skip."""
  metrics = mpjax.loss_scaling_metrics(state.opt_state)
  window = state.opt_state.inner_state.micro_batches
  return int(window), int(metrics["good_steps"]), bool(metrics["finite"])


def resumed(state: mpjax.TrainState, seed: int, guard: bool) -> mpjax.TrainState:
  """Returns a run as it is when it was saved and restored; without the guard, parameters alone."""
  fresh = begin("float16", seed + 100)
  if not guard:
    return fresh._replace(params=state.params)
  return mpjax.checkpoints.restore_like(fresh, saved(to_arrays(state)))
