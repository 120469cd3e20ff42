"""Store a network in half but for its batch norms, train float32 masters of it, on several devices.

  python examples/half_with_master_weights.py --devices 4

What Apex's examples do with `network_to_half`, `FP16_Optimizer` and `DistributedDataParallel`, on
handwritten digits. The numbered lines are all that is added to a float32 script:

  1  network_to_half: parameters are stored, and layers compute, in half; those of batch norms are
     stored, and statistics are taken, in float32. Sums of gradients over devices are in float32,
     which is `DistributedDataParallel(allreduce_always_fp32=True)`
  2  the masters of FP16_Optimizer: the optimizer trains a float32 copy
  3  its loss scale. In float16 the first half of the run has `static_loss_scale=128`, the second
     one `dynamic_loss_scale=True`. The masters, the moments and the schedule go on as they are
  4  afterwards: the masters are saved as a float32 checkpoint, which the plain network then reads.
     Nothing in it says how it was trained

There is nothing about devices in the step (5): arrays say where they are, and XLA divides the work.
"""

import argparse
import functools

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import side_by_side
from flax import linen as nn

import mpjax

STEPS = 300
DEVICES = 4
POLICIES = ("float32", "bfloat16", "float16")


class Network(nn.Module):
  """Two convolutions with batch norms, and not a word about precision."""

  @nn.compact
  def __call__(self, images, train):
    x = images
    for features in (32, 64):
      x = nn.Conv(features, (3, 3), strides=2, use_bias=False)(x)
      x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
    return nn.Dense(10)(x.reshape(len(x), -1))


NETWORK = Network()

LOSS_SCALES = {
  "float32": (mpjax.NoLossScale(),),
  "bfloat16": (mpjax.NoLossScale(),),
  # The run is shorter than the default interval after which the scale grows.
  "float16": (mpjax.StaticLossScale(128), mpjax.DynamicLossScale(growth_interval=10)),
}


def half_network(dtype):
  """Returns the network, stored in `dtype` but for its batch norms."""
  policy = mpjax.Policy(
    param_dtype=dtype, compute_dtype=dtype, output_dtype="float32", weight_grad_dtype="float32"
  )
  norms = mpjax.Rule(mpjax.Policy(compute_dtype=dtype), module=nn.BatchNorm)
  return mpjax.with_policy(NETWORK, policy, [norms])  # 1


def losses(model, variables, images, labels, train):
  """Returns the loss of each image, whether it was recognised, and the new batch statistics."""
  logits, new = model.apply(variables, images, train=train, mutable=["batch_stats"])
  found = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return found, logits.argmax(-1) == labels, new["batch_stats"]


def train(dtype, steps, on_step, devices, seed=0):
  """Returns the losses of all steps, the last state, and what loss scaling said in each step."""
  model = half_network(dtype)
  mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,))  # 5
  replicated, by_rows = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))

  def loss_fn(params, batch_stats, batch, rng):
    variables = {"params": params, "batch_stats": batch_stats}
    found, _, batch_stats = losses(model, variables, *batch, train=True)
    return found.mean(), (batch_stats, {})

  inner = optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9)
  inner = mpjax.master_weights(optax.chain(optax.add_decayed_weights(1e-4), inner))  # 2
  variables = model.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), train=False)
  variables = jax.device_put(variables, replicated)
  params, batch_stats = variables["params"], variables["batch_stats"]

  state = mpjax.TrainState.create(params, mpjax.loss_scaling(inner), model_state=batch_stats)
  history, batches = [], list(digits.batches(digits.load_data()[0], steps))
  parts = np.array_split(range(steps), len(LOSS_SCALES[dtype]))
  for part, loss_scale in zip(parts, LOSS_SCALES[dtype], strict=True):
    tx = mpjax.loss_scaling(inner, loss_scale)  # 3
    opt_state = tx.init(state.params)._replace(inner_state=state.opt_state.inner_state)
    state = state._replace(opt_state=opt_state)
    step = mpjax.make_train_step(loss_fn, tx)
    for index in part:
      state, metrics = step(state, jax.device_put(batches[index], by_rows))
      history.append(jax.device_get(metrics))
      jax.block_until_ready(state)
      on_step()
    mpjax.check_skipped_steps(state)  # raises if the last 50 steps in a row were skipped
  return state, history


def export(state, path):
  """Saves the float32 weights of a half network, and its statistics."""
  weights = mpjax.states.master_params(state.opt_state, state.params)  # 4
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, {"params": weights, "batch_stats": state.model_state}, force=True)


def load(path):
  """Returns the variables of the plain network from any float32 checkpoint."""
  init = functools.partial(NETWORK.init, train=False)
  target = jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
  return mpjax.checkpoints.restore_like(target, path)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(model, variables, images, labels):
  """Returns the share of images that are recognised, and their mean loss."""
  found, correct, _ = losses(model, variables, images, labels, train=False)
  return correct.mean(), found.mean()


def main(
  steps=STEPS,
  path=side_by_side.OUT / "half_with_master_weights.png",
  policies=POLICIES,
  console=None,
  devices=DEVICES,
  seed=0,
):
  """Trains in each dtype, exports and evaluates; returns all runs."""
  test = digits.load_data()[1]

  def run(dtype, steps, on_step):
    state, history = train(dtype, steps, on_step, devices, seed)
    checkpoint = path.parent.absolute() / f"{path.stem}_{dtype}"
    export(state, checkpoint)
    variables = {"params": state.params, "batch_stats": state.model_state}
    accuracy, loss = evaluate(half_network(dtype), jax.device_get(variables), *test)
    exported, exported_loss = evaluate(NETWORK, load(checkpoint), *test)
    size = sum(x.nbytes for x in jax.tree.leaves(state.params))
    masters = sum(x.nbytes for x in jax.tree.leaves(mpjax.states.master_params(state.opt_state)))
    scales = [f"{x['loss_scale']:.0f}" for x in (history[0], history[-1])]
    figures = {
      "parameters": f"{size / 1e3:.0f} kB",
      "masters": f"{masters / 1e3:.0f} kB",
      "test accuracy": f"{accuracy:.2%}",
      "test loss": f"{loss:.4f}",
      "exported to float32: accuracy": f"{exported:.2%}",
      "exported to float32: loss": f"{exported_loss:.4f}",
      "loss scale, first and last": " ".join(scales),
      "skipped steps": f"{sum(not x['finite'] for x in history)}",
    }
    numbers = {"loss": float(loss), "exported_loss": float(exported_loss)}
    kept = {"state": state, "history": history, "checkpoint": checkpoint, **numbers}
    return side_by_side.Run(np.array([x["loss"] for x in history]), figures, kept)

  title = f"Parameters in half, masters in float32, {devices} devices"
  return side_by_side.compare(title, run, steps, path, policies, console)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS)
  parser.add_argument("--policy", choices=POLICIES[1:], help="this one, beside float32")
  parser.add_argument("--devices", type=int, default=DEVICES, help="a CPU is divided into as many")
  options = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", options.devices)  # no effect on GPUs
  chosen = POLICIES if options.policy is None else ("float32", options.policy)
  main(options.steps, policies=chosen, devices=options.devices)
