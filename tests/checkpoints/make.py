"""Makes the frozen checkpoints in this folder: one for each layout that states of mpjax ever had.

python tests/checkpoints/make.py NAME    # for a new layout; what is there is never made again

A folder holds the state as an Orbax checkpoint (`state/`) and as arrays (`state.npz`), and what it
became after more steps (`next.npz`). `tests/integration/test_resume.py` loads them.

All gradients are small multiples of 1/4 and all rates are powers of two, so that each sum and
product below is exact, and every machine must find the same bits (but for the quotients of Adam).
"""

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import mpjax

FOLDER = pathlib.Path(__file__).parent
SCALE = mpjax.DynamicLossScale(init_scale=64, growth_interval=4, hysteresis=2)


class Layout(NamedTuple):
  """A layout of states: how one is begun, and how a step is made with gradients of this size."""

  begin: Callable[[], Any]
  step: Callable[[Any, float], Any]
  saved: list[float]  # the gradients before the save; an inf overflows
  after: list[float]  # and after it


# 0.1.0-loss_scaling: loss_scaling around an optimizer, commit 3205ca9.


def adam() -> Any:
  return mpjax.loss_scaling(optax.adam(0.125, b1=0.5, b2=0.75), SCALE)


def begin_adam() -> Any:
  params = {"w": jnp.asarray([[1.0, -2.0], [0.5, 4.0]]), "b": jnp.asarray([0.25, 0.0])}
  return {"params": params, "opt_state": adam().init(params)}


def step_adam(state: Any, gradient: float) -> Any:
  params, opt_state = state["params"], state["opt_state"]
  slopes = {"w": jnp.asarray([[1.0, 2.0], [-1.0, 0.0]]), "b": jnp.asarray([0.25, -0.5])}
  # An inf is added: times the 0 among the slopes it would be NaN, which is another case.
  extra = gradient if np.isinf(gradient) else 0.0
  factor = 1.0 if np.isinf(gradient) else gradient
  grads = jax.tree.map(lambda s: s * factor + extra, slopes)
  updates, opt_state = adam().update(grads, opt_state, params)
  return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}


# 0.1.0-training: TrainState, with batch statistics, over loss scaling, accumulation
# and master weights.


def momentum() -> Any:
  inner = mpjax.master_weights(optax.sgd(0.5, momentum=0.5))
  return mpjax.loss_scaling(mpjax.accumulate_gradients(inner, 4), SCALE)


def begin_training() -> Any:
  w = jnp.asarray([[1.0, -2.0], [0.5, 4.0]], jnp.bfloat16)
  params = {"w": w, "norm": jnp.asarray([1.0, 2])}
  rest = {"model_state": {"mean": jnp.asarray([0.0, 1.0])}, "rng": jax.random.key(5)}
  return mpjax.TrainState.create(params, momentum(), **rest)


def linear(params: Any, model_state: Any, gradient: Any, rng: Any) -> Any:
  slopes = {"w": jnp.asarray([[1.0, 2.0], [-1.0, 3.0]]), "norm": jnp.asarray([-1.0, 1.0])}
  products = jax.tree.map(
    lambda p, s: p.astype(jnp.float16) * (s * gradient).astype(jnp.float16), params, slopes
  )
  loss = sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(products))
  mean = 0.5 * model_state["mean"] + 0.5 * gradient
  return loss, ({"mean": mean}, {})


@functools.cache
def train_step() -> Any:
  return mpjax.make_train_step(linear, momentum(), donate=False)


def step_training(state: Any, gradient: float) -> Any:
  return train_step()(state, jnp.asarray(gradient, jnp.float32))[0]


LAYOUTS = {
  # Saved with one of two overflows used up, and two good steps of four done.
  "0.1.0-loss_scaling": Layout(
    begin_adam, step_adam, [1, 2, 1, 1, np.inf, 2, 1], [1, np.inf, -1, np.inf, 2]
  ),
  # And in the middle of a window of accumulation: three of four.
  "0.1.0-training": Layout(
    begin_training, step_training, [1, 2, 1, 1, np.inf, 1, 3, -1], [np.inf, 2, np.inf, 1, 1]
  ),
}


def run(layout: Layout, state: Any, gradients: list[float]) -> Any:
  for gradient in gradients:
    state = layout.step(state, gradient)
  return state


def make(name: str) -> None:
  layout, folder = LAYOUTS[name], FOLDER / name
  folder.mkdir()
  state = run(layout, layout.begin(), layout.saved)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", state)
  # It holds nothing but the path on this machine, and only object stores look for it.
  (folder / "state" / "commit_success.txt").unlink(missing_ok=True)
  np.savez_compressed(folder / "state.npz", **mpjax.checkpoints.to_arrays(state))
  after = run(layout, state, layout.after)
  np.savez_compressed(folder / "next.npz", **mpjax.checkpoints.to_arrays(after))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("name", choices=LAYOUTS)
  make(parser.parse_args().name)
