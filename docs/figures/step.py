"""A training step in float16 with loss scaling, and one that is skipped.

What is kept and what moves is found by two steps of a small model: one with a batch of numbers, and
one with an inf in it.
"""

import functools
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import mpjax
from docs.figures import style
from docs.figures.flow import Flow
from docs.figures.style import SMALL, Theme, text

ROWS = {
  "parameters": "parameters",
  "moments": "moments and count of adamw",
  "statistics": "batch statistics",
  "average": "average of the parameters",
  "step": "number of the step, dropout keys",
}
"""What is kept on a skipped step: the parts of the state that `facts` compares."""


COUNTERS = {
  "loss_scale": "loss scale S",
  "good_steps": "finite steps in a row",
  "skipped": "skipped steps",
}


class Facts(NamedTuple):
  """What two steps did to a state.

  Fields:
    changed: for each part of the state, whether a finite and a skipped step changed a bit of it.
    counters: the loss scale and the counters of loss scaling at first, after the finite step, and
      after the skipped one.
    grow: the number of finite steps in a row after which the loss scale doubles.
    dtypes: of the parameters, the matmuls "forward" and "backward", the loss, and the gradients
      as the optimizer gets them.
  """

  changed: dict[str, tuple[bool, bool]]
  counters: dict[str, tuple[str, str, str]]
  grow: int
  dtypes: dict[str, str]


class _Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x)))
    return nn.Dense(4)(x)


def _parts(state: mpjax.TrainState, average: Any) -> dict[str, Any]:
  return {
    "parameters": state.params,
    "moments": state.opt_state.inner_state,
    "statistics": state.model_state,
    "average": average,
    "step": (state.step, jax.random.key_data(state.rng)),
  }


def _three(values: Iterable[str]) -> tuple[str, str, str]:
  first, second, third = values
  return first, second, third


def _same(a: Any, b: Any) -> bool:
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def _loss_fn(params, model_state, batch, rng):
  model = mpjax.with_policy(_Network(), "mixed_float16")
  variables = {"params": params, "batch_stats": model_state}
  out, new = model.apply(variables, batch, mutable=["batch_stats"])
  return jnp.mean(out**2), (new["batch_stats"], {})


def _dtypes(*args: Any) -> dict[str, str]:
  """Returns the dtypes of the parameters, the matmuls of both passes, and the loss."""
  audit = mpjax.audit(jax.value_and_grad(_loss_fn, has_aux=True))(*args)
  found = dict(list(audit.flops))
  if len(found) != len(audit.flops):
    raise ValueError(f"the figure shows one dtype for each pass, and there are {audit.flops}")
  (found["parameters"],) = {x.dtype.name for x in jax.tree.leaves(args[0])}
  return {**found, "loss": jax.eval_shape(_loss_fn, *args)[0].dtype.name}


@functools.cache
def facts() -> Facts:
  """Makes a finite step and one that is skipped."""
  seen: dict[str, str] = {}

  def look(updates, state, params=None):
    (seen["gradients"],) = {x.dtype.name for x in jax.tree.leaves(updates)}
    return updates, state

  config = mpjax.DynamicLossScale()
  looking = optax.GradientTransformation(lambda params: optax.EmptyState(), look)
  tx = mpjax.loss_scaling(optax.chain(looking, optax.adamw(1e-3)), config)
  batch, key = jax.random.normal(jax.random.key(1), (8, 8)), jax.random.key(2)
  variables = _Network().init(jax.random.key(0), batch)
  params, stats = variables["params"], variables["batch_stats"]
  start = mpjax.TrainState.create(params, tx, model_state=stats, rng=key)
  train_step = mpjax.make_train_step(_loss_fn, tx, donate=False)
  states, averages = [start], [params]
  for inputs in (batch, batch.at[0, 0].set(jnp.inf)):
    state, _ = train_step(states[-1], inputs)
    moved = optax.incremental_update(state.params, averages[-1], 0.01)
    averages.append(mpjax.keep_if_skipped(state.opt_state, moved, averages[-1]))
    states.append(state)
  counters = [mpjax.loss_scaling_metrics(state) for state in states]
  first, second, third = map(_parts, states, averages)
  return Facts(
    changed={
      name: (not _same(first[name], second[name]), not _same(second[name], third[name]))
      for name in ROWS
    },
    counters={name: _three(f"{each[name]:,.0f}" for each in counters) for name in COUNTERS},
    grow=config.growth_interval,
    dtypes={**_dtypes(params, stats, batch, key), **seen},
  )


def draw(theme: Theme) -> Figure:
  found = facts()
  forward, backward = found.dtypes["forward"], found.dtypes["backward"]
  loss, plain = found.dtypes["loss"], found.dtypes["gradients"]
  figure, axes = style.page(728)
  flow, x = Flow(axes, theme), style.WIDTH / 2
  stored = f"matmuls in {forward}, parameters in {found.dtypes['parameters']}"
  words = [
    (f"Forward pass\n{stored}", forward),
    (f"Loss\nin {loss}; its cotangent is the loss scale S", loss),
    (f"Backward pass\nmatmuls in {backward}: gradients × S", backward),
    (f"Gradients\ncast to {plain}, divided by S", plain),
  ]
  boxes = [flow.box(x, 30 + 70 * i, 320, 46, *each) for i, each in enumerate(words)]
  for above, below in pairwise(boxes):
    flow.arrow([above.bottom, below.top])
  asked = flow.question(x, 316, 190, 56, "all finite?")
  flow.arrow([boxes[-1].bottom, asked.top])

  yes, no = 130, style.WIDTH - 130
  step = flow.box(
    yes, 400, 240, 64, "A step\nthe optimizer updates with the\nplain gradients", "plain"
  )
  skip = flow.box(no, 400, 240, 64, "A skipped step\nas if the batch\nhad never been", "lost")
  flow.arrow([asked.left, (yes, asked.y), step.top])
  flow.arrow([asked.right, (no, asked.y), skip.top])
  text(axes, yes + 12, 334, "yes", theme.text, size=SMALL, bold=True)
  text(axes, no - 12, 334, "no", theme.text, ha="right", size=SMALL, bold=True)
  _table(flow, 462, found)
  return figure


def _table(flow: Flow, y: float, found: Facts) -> None:
  """Draws what the two kinds of steps do to each part of the state."""
  first, second, third = 12, 302, 440
  rows = [
    (words, *("new" if changed else "kept" for changed in found.changed[name]))
    for name, words in ROWS.items()
  ]
  for name, words in COUNTERS.items():
    states = found.counters[name]
    rows.append((words, *(a if a == b else f"{a} → {b}" for a, b in pairwise(states))))
  flow.note(second, y, "a step", ha="center", kind="plain")
  flow.note(third, y, "a skipped step", ha="center", kind="lost")
  for row in rows:
    y += 26
    flow.axes.plot([12, 508], [y - 13, y - 13], color=flow.theme.rule, lw=0.5)
    for x, words, ha in zip((first, second, third), row, ("left", "center", "center"), strict=True):
      text(flow.axes, x, y, words, flow.theme.text, size=SMALL, ha=ha)
  y += 32
  words = f"After {found.grow:,} finite steps in a row S doubles."
  text(flow.axes, first, y, words, flow.theme.faint, size=SMALL)
