"""Train with every option of NNabla's updater: growing scale, retries, accumulation, all-reduce.

  python examples/updater.py
  python examples/updater.py --devices 8 --accum-grad 4 --policy mixed_float16

NNabla's `DynamicLossScalingUpdater` is an object that owns the loop body. Here the loop is yours,
and the lines marked 1 to 7 say what in NNabla these say:

  1  `get_extension_context("cudnn", type_config="half")`
  2  `scale`, `scaling_factor`, `N`: start, factor, and finite steps in a row until the scale grows
  3  `solver` and `weight_decay`; `clip_grad_norm` before them sees plain gradients
  4  `loss`, `accum_grad`: micro-batches in turn, added in float32 and divided once
  5  `comm.all_reduce(grads)`: gradients averaged in float32; all devices decide alike
  6  a step that overflows is run again at a lower scale
  7  `data_feeder`, `update()`

Two things go wrong on the way. One batch has a broken pixel, in the rows of the first device: in
float16 it is inf, where no scale can help, and all devices skip the step. A few batches weigh so
much that their gradients overflow at the scale reached by then: they are run again at lower scales
until they fit, and none is lost. The plot is written to out/updater.png.
"""

import argparse
import functools
from typing import Any, NamedTuple

import digits
import flax.linen as nn
import jax
import numpy as np
import optax
import side_by_side
from side_by_side import Run

import mpjax

STEPS = 240
DEVICES = 4
ACCUM_GRAD = 2

BROKEN = 40
"""The step whose batch has a broken pixel."""

HEAVY = range(60, 63)
"""The steps whose loss weighs more."""


class Network(nn.Module):
  """A perceptron that normalises its layers: no image looks at the others in its batch."""

  @nn.compact
  def __call__(self, images):
    x = images.reshape(len(images), -1)
    for features in (128, 128):
      x = nn.relu(nn.LayerNorm()(nn.Dense(features)(x)))
    return nn.Dense(10)(x)


UPDATERS = {
  # Nothing is computed in float16: nothing to scale, and no lower scale to try again at.
  "float32": {"loss_scale": mpjax.NoLossScale(), "max_retries": 0},
  "mixed_bfloat16": {"loss_scale": mpjax.NoLossScale(), "max_retries": 0},
  "mixed_float16": {
    # NNabla starts at 8, and doubles after 2000 steps, which is more than this run has.
    "loss_scale": mpjax.DynamicLossScale(  # 2
      init_scale=8, growth_factor=2, backoff_factor=0.5, growth_interval=10
    ),
    "max_retries": 20,  # 6
  },
}


class Trained(NamedTuple):
  """What a training leaves."""

  accuracy: float  # on the test set
  state: mpjax.TrainState  # after the last step, on all devices
  metrics: dict[str, np.ndarray]  # [steps] each


def prepare(policy, steps, devices, accum_grad, seed=0):
  """Returns the model under a policy, its first state, its updater, and where batches go."""
  model = mpjax.with_policy(Network(), policy)  # 1
  solver = optax.chain(  # 3
    optax.clip_by_global_norm(1.0),
    optax.add_decayed_weights(1e-4),
    optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9),
  )
  updater = UPDATERS[policy]
  tx = mpjax.loss_scaling(solver, updater["loss_scale"])

  def loss_fn(params, model_state, batch, rng):
    del rng
    logits = model.apply({"params": params}, batch["images"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return (losses * batch["weights"]).mean(), (model_state, {"cross_entropy": losses.mean()})

  update = mpjax.make_train_step(
    loss_fn,
    tx,
    micro_batches=accum_grad,  # 4
    axis_name="data",  # 5
    max_retries=updater["max_retries"],  # 6
  )
  mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,))
  everywhere, by_rows = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
  update = jax.shard_map(update, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
  params = model.init(jax.random.key(seed), np.zeros((1, 8, 8, 1), np.float32))["params"]
  state = mpjax.TrainState.create(jax.device_put(params, everywhere), tx)
  feed = functools.partial(jax.device_put, device=by_rows)
  return model, state, jax.jit(update, donate_argnums=0), feed


def batches(data, steps):
  """Yields batches in which something is wrong now and then."""
  for number, (images, labels) in enumerate(digits.batches(data, steps)):
    if number == BROKEN:
      images = images.copy()
      images[0, 0, 0] = 1e6  # float16 ends at 65504
    weight = 2**14 if number in HEAVY else 1
    yield {"images": images, "labels": labels, "weights": np.full(len(labels), weight, np.float32)}


def train(policy, steps, on_step, *, devices=1, accum_grad=ACCUM_GRAD, seed=0):
  """Trains for some steps under a policy; the `state` of the run is a `Trained`."""
  train_data, test = digits.load_data()
  model, state, update, feed = prepare(policy, steps, devices, accum_grad, seed)
  rows = []
  for batch in batches(train_data, steps):
    state, metrics = jax.block_until_ready(update(state, feed(batch)))  # 7
    rows.append({"retries": 0} | jax.device_get(metrics))
    on_step()
  mpjax.check_skipped_steps(state)
  metrics = {name: np.array([row[name] for row in rows]) for name in rows[0]}
  predict = jax.jit(lambda params, images: model.apply({"params": params}, images).argmax(-1))
  accuracy = float((predict(state.params, test.images) == test.labels).mean())
  losses = metrics["cross_entropy"]
  figures = {
    "test accuracy": f"{accuracy:.2%}",
    "loss of the last 20 batches": f"{losses[-20:].mean():.4f}",
    "loss scale": f"{metrics['loss_scale'][-1]:.0f}",
    "batches run again": f"{(metrics['retries'] > 0).sum()}, {metrics['retries'].sum()} times",
    "batches lost": f"{steps - int(state.step)}",
    f"{devices} replicas": "equal to the bit" if replicas_agree(state) else "DIFFERENT",
  }
  return Run(losses, figures, Trained(accuracy, state, metrics))


def replicas_agree(tree):
  """Whether all devices hold the same bits of every array."""
  shards = ([s.data for s in x.addressable_shards] for x in jax.tree.leaves(tree))
  return all(len({np.asarray(x).tobytes() for x in copies}) == 1 for copies in shards)


def main(
  steps=STEPS,
  path=side_by_side.OUT / "updater.png",
  policies=side_by_side.POLICIES,
  console=None,
  *,
  devices=1,
  accum_grad=ACCUM_GRAD,
) -> dict[str, Any]:
  """Trains under each policy, prints the table, writes the plot, and returns the runs."""
  title = f"{devices} devices x {accum_grad} micro-batches"
  run = functools.partial(train, devices=devices, accum_grad=accum_grad)
  return side_by_side.compare(title, run, steps, path, policies, console)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS, help="for each policy")
  parser.add_argument("--policy", choices=list(UPDATERS), help="instead of all")
  parser.add_argument("--devices", type=int, default=DEVICES, help="a CPU is divided into as many")
  parser.add_argument("--accum-grad", type=int, default=ACCUM_GRAD, help="micro-batches of a step")
  options = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", options.devices)  # no effect on GPUs
  main(
    options.steps,
    policies=[options.policy] if options.policy else side_by_side.POLICIES,
    devices=options.devices,
    accum_grad=options.accum_grad,
  )
