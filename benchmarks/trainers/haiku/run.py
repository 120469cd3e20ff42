"""Haiku's examples/transformer: its `main` trains a small language model."""

import random
import sys
import tempfile
from unittest import mock

import haiku as hk
import jmp
import observed
from absl import flags

import mpjax

sys.path.insert(0, str(observed.source()))

from examples.transformer import model, train

STEPS = 8


def run(variant: str) -> observed.Run:
  """Trains in one variant."""
  if variant == observed.OWN:
    # The example has no setting of a dtype, but its library has one for each class of modules.
    hk.mixed_precision.set_policy(model.LanguageModel, jmp.get_policy("p=f32,c=bf16,o=f32"))
  loss_fn, optimiser = train.loss_fn, train.optimiser
  if variant == observed.BFLOAT16:
    apply = mpjax.autocast(loss_fn.apply, "mixed_bfloat16")  # mpjax
    train.loss_fn = loss_fn._replace(apply=apply)
  if variant == observed.FLOAT16:
    apply = mpjax.scaled(mpjax.autocast(loss_fn.apply, "mixed_float16"), 2.0**15)  # mpjax
    train.loss_fn = loss_fn._replace(apply=apply)
    train.optimiser = lambda: mpjax.loss_scaling(optimiser(), mpjax.SkipNonfinite())  # mpjax

  train.NUM_LAYERS, train.NUM_HEADS, train.MODEL_SIZE, train.KEY_SIZE = 2, 4, 64, 16
  train.MAX_STEPS, train.LOG_EVERY, train.LEARNING_RATE = STEPS, 1, 3e-3
  update, steps, losses = train.update, [], []

  def noted(state, batch):
    state, metrics = update(state, batch)
    steps.append((state, batch))
    return state, metrics

  with (
    tempfile.NamedTemporaryFile("w", suffix=".txt") as file,
    mock.patch.object(train, "update", noted),
    mock.patch.object(train.logging, "info", lambda x: losses.append(x["loss"])),
  ):
    # Which letters follow others can be learned.
    file.write("".join(chr(97 + i * i % 26) for i in range(4000)))
    file.flush()
    flags.FLAGS(["train", f"--dataset_path={file.name}"])
    random.seed(0)  # The example shuffles its data.
    train.main(None)

  state, batch = steps[-1]
  skipped = None
  if variant == observed.FLOAT16:
    skipped = int(mpjax.loss_scaling_metrics(state.opt_state)["skipped"])
  return observed.Run(
    losses=losses,
    params=state.params,
    opt_state=state.opt_state,
    step=update,
    step_args=(state, batch),
    loss=train.loss_fn.apply,
    loss_args=(state.params, state.rng_key, batch),
    skipped=skipped,
  )


if __name__ == "__main__":
  observed.main(run)
