"""Train LeNet-5 at levels O0, O2 and O3, and with single layers kept in float32.

  python examples/lenet_per_module.py
  python examples/lenet_per_module.py --policy "O2, fc3 float32" --steps 100

What MindSpore does with `build_train_network(net, optimizer, loss, level="O2")` and, layer by
layer, with `net.add_flags_recursive(fp16=True)` and `net.fc3.to_float(mstype.float32)`. Lines 1 to
4 are all that mixed precision adds; LeNet-5 itself says nothing about it. In MindSpore they are:

  1  `level="O2"`, and flags or `to_float` on cells: rules, by path or by class
  2  the float32 copies of parameters that are stored in half (MindSpore stores them in float32)
  3  `loss_scale_manager`, which a level brings along
  4  `build_train_network`, or `Model(...).train`: the step that scales, skips and updates

The table says for each layer in which dtype its products really ran, forward and backward, read
from the program of the training step, and in which its parameters are stored. At O3 there is a
warning, rightly: parameters in half, with no float32 copy, lose small updates. The plot is written
to out/lenet_per_module.png.
"""

import argparse
from typing import Any, NamedTuple

import digits
import flax.linen as nn
import jax
import numpy as np
import optax
import side_by_side
from jax.extend import core
from side_by_side import Run

import mpjax

STEPS = 300
BATCH = 64
TITLE = "LeNet-5 on digits; for each layer: dtype of its products / of its parameters"

FLOAT16 = mpjax.Policy(param_dtype="float16", compute_dtype="float16", output_dtype="float32")


class Level(NamedTuple):
  """The settings of a level."""

  policy: mpjax.Policy
  rules: tuple[mpjax.Rule, ...] = ()
  loss_scale: mpjax.NoLossScale | mpjax.SkipNonfinite | mpjax.DynamicLossScale = mpjax.NoLossScale()
  master_weights: bool = False


O2 = Level(FLOAT16, loss_scale=mpjax.DynamicLossScale(), master_weights=True)

LEVELS = {
  "O0": Level(mpjax.Policy()),
  "O2": O2,
  "O3": Level(FLOAT16, loss_scale=mpjax.SkipNonfinite()),
  # One cell: net.fc3.to_float(mstype.float32), or net.fc3.add_flags_recursive(fp16=False).
  "O2, fc3 float32": O2._replace(rules=(mpjax.Rule("float32", path="fc3"),)),
  # All cells of a class.
  "O2, Conv float32": O2._replace(rules=(mpjax.Rule("float32", module=nn.Conv),)),
}

# The levels that store parameters in float32, as MindSpore's O2 does: by the names of policies.
POLICIES = {
  "float32": LEVELS["O0"],
  "mixed_bfloat16": Level(mpjax.Policy.parse("mixed_bfloat16")),
  "mixed_float16": Level(mpjax.Policy.parse("mixed_float16"), loss_scale=mpjax.DynamicLossScale()),
}


class LeNet5(nn.Module):
  """LeCun's network of 1998 in its usual modern form, with max pooling and ReLU."""

  @nn.compact
  def __call__(self, images):
    x = nn.relu(nn.Conv(6, (5, 5), padding="VALID", name="conv1")(images))
    x = nn.max_pool(x, (2, 2), strides=(2, 2))
    x = nn.relu(nn.Conv(16, (5, 5), padding="VALID", name="conv2")(x))
    x = nn.max_pool(x, (2, 2), strides=(2, 2))
    x = x.reshape(len(x), -1)
    x = nn.relu(nn.Dense(120, name="fc1")(x))
    x = nn.relu(nn.Dense(84, name="fc2")(x))
    return nn.Dense(10, name="fc3")(x)


LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")


class Trained(NamedTuple):
  """What a training leaves."""

  accuracy: float  # on the test set
  state: mpjax.TrainState  # after the last step
  metrics: dict[str, Any]  # of the last step
  products: dict[str, list[str]]  # of each layer: the dtypes of its products in a training step


def load_data():
  """Returns the training and the test set of `digits`, enlarged to the 32x32 that LeNet-5 takes."""
  enlarged = []
  for images, labels in digits.load_data():
    images = jax.image.resize(images, (len(images), 32, 32, 1), "linear")
    enlarged.append(digits.Data(np.asarray(images), labels))
  return enlarged


def batches(data, steps, seed):
  """Yields random batches of images and labels, the same ones for the same seed."""
  rng = np.random.default_rng(seed)
  for _ in range(steps):
    chosen = rng.choice(len(data.labels), BATCH, replace=False)
    yield {"images": data.images[chosen], "labels": data.labels[chosen]}


def prepare(level, steps, seed):
  """Returns the model under a level, its first state and its training step."""
  model = mpjax.with_policy(LeNet5(), level.policy, level.rules, unmatched="ignore")  # 1
  tx = optax.sgd(optax.cosine_decay_schedule(0.02, steps), momentum=0.9)
  if level.master_weights:
    tx = mpjax.master_weights(tx)  # 2
  tx = mpjax.loss_scaling(tx, level.loss_scale)  # 3

  def loss_fn(params, model_state, batch, rng):
    del rng
    logits = model.apply({"params": params}, batch["images"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), (model_state, {})

  params = model.init(jax.random.key(seed), np.zeros((1, 32, 32, 1), np.float32))["params"]
  state = mpjax.TrainState.create(params, tx)
  return model, state, mpjax.make_train_step(loss_fn, tx)  # 4


def product_dtypes(program):
  """Returns the dtypes of the operands of each layer's products and convolutions, in order.

  Flax puts every module into a named scope, and JAX names every equation by its scopes, those of
  the backward pass too.
  """
  found = {layer: [] for layer in LAYERS}
  for eqn, scopes in equations(program.jaxpr):
    if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
      (layer,) = (one for one in LAYERS if one in scopes)
      found[layer].append("x".join(sorted({str(x.aval.dtype) for x in eqn.invars[:2]})))
  return found


def equations(jaxpr, around=""):
  """Yields the equations of a program, and of those inside of them, with their scopes."""
  for eqn in jaxpr.eqns:
    scopes = f"{around}/{eqn.source_info.name_stack}"
    yield eqn, scopes
    for value in jax.tree.leaves(list(eqn.params.values())):
      if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        yield from equations(getattr(value, "jaxpr", value), scopes)


def train(policy, steps, on_step, *, seed=0):
  """Trains for some steps at one of `LEVELS` or `POLICIES`, and returns what came of it.

  Args:
    policy: the name of a level.
    steps: how many.
    on_step: called after each.
    seed: of the first parameters and of the order of the batches.

  Returns:
    A `Run` whose `state` is a `Trained`.
  """
  train_data, test = load_data()
  model, state, train_step = prepare((LEVELS | POLICIES)[policy], steps, seed)
  (batch,) = batches(train_data, 1, seed)
  products = product_dtypes(jax.make_jaxpr(train_step)(state, batch))
  losses, metrics = [], {}
  for batch in batches(train_data, steps, seed):
    state, metrics = train_step(state, batch)
    losses.append(float(metrics["loss"]))
    on_step()
  mpjax.check_skipped_steps(state)
  predict = jax.jit(lambda params, images: model.apply({"params": params}, images).argmax(-1))
  accuracy = float((predict(state.params, test.images) == test.labels).mean())
  figures = {layer: layer_text(products[layer], state.params[layer]) for layer in LAYERS}
  figures |= {
    "parameters": f"{sum(x.nbytes for x in jax.tree.leaves(state.params)) / 1e3:.0f} kB",
    "test accuracy": f"{accuracy:.2%}",
    "loss of the last 20 batches": f"{np.mean(losses[-20:]):.4f}",
    "loss scale": f"{metrics['loss_scale']:.0f}",
    "skipped steps": f"{metrics['skipped']}",
  }
  metrics = jax.device_get(metrics)
  return Run(np.array(losses), figures, Trained(accuracy, state, metrics, products))


def layer_text(products, params):
  """Returns what the table says of a layer: the dtypes of its products / of its parameters."""
  stored = {str(x.dtype) for x in jax.tree.leaves(params)}
  texts = ("+".join(sorted(dtypes)).replace("float", "f") for dtypes in (set(products), stored))
  return " / ".join(texts)


def main(
  steps=STEPS,
  path=side_by_side.OUT / "lenet_per_module.png",
  policies=tuple(LEVELS),
  console=None,
):
  """Trains at each level, prints the table, writes the plot, and returns the runs."""
  return side_by_side.compare(TITLE, train, steps, path, policies, console)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=STEPS, help="for each level")
  parser.add_argument("--policy", choices=[*LEVELS, *POLICIES], help="instead of all levels")
  options = parser.parse_args()
  main(options.steps, policies=[options.policy] if options.policy else tuple(LEVELS))
