"""Flax's examples/lm1b: `train_and_evaluate` trains a small transformer of Flax Linen."""

import contextlib
import importlib
import sys
import tempfile
import types
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import observed

import mpjax

# When it is imported, it looks for the real TensorFlow.
importlib.import_module("flax.io")
observed.without_writers()
# TensorFlow makes a folder here. The example's own data is a corpus to be downloaded, and a
# tokenizer to be trained.
sys.modules["tensorflow"] = mock.MagicMock()
sys.modules["input_pipeline"] = types.ModuleType("input_pipeline")
sys.path.insert(0, str(observed.source() / "examples" / "lm1b"))

import models  # noqa: E402
import train  # noqa: E402
import utils  # noqa: E402
from configs import default  # noqa: E402

STEPS, BATCH, LENGTH, VOCABULARY = 6, 8, 32, 128


def run(variant: str) -> observed.Run:
  """Trains in one variant."""
  scope = contextlib.nullcontext()
  if variant == observed.BFLOAT16:
    scope = mpjax.policy_scope("mixed_bfloat16")  # mpjax
  if variant == observed.FLOAT16:
    scope = mpjax.policy_scope("mixed_float16")  # mpjax
    # The loss is a closure of the step, and the model is all of it that runs in float16.
    models.TransformerLM.apply = mpjax.scaled(models.TransformerLM.apply, 2.0**15)  # mpjax
    own, skip = utils.setup_initial_state, mpjax.SkipNonfinite()
    utils.setup_initial_state = lambda m, tx, *a: own(m, mpjax.loss_scaling(tx, skip), *a)  # mpjax

  train_step, writer, static, states = train.train_step, mock.Mock(), {}, []

  def noted(state, batch, config, learning_rate_fn, label_smoothing, dropout_rng):
    static.update(config=config, learning_rate_fn=learning_rate_fn)
    return train_step(state, batch, config, learning_rate_fn, label_smoothing, dropout_rng)

  with (
    mock.patch.object(train, "train_step", noted),
    mock.patch.object(train.metric_writers, "create_default_writer", return_value=writer),
    mock.patch.object(train.input_pipeline, "get_datasets", _data, create=True),
    # The loop returns nothing, but it saves its state, at last after the last step.
    mock.patch.object(
      train.checkpoints, "save_checkpoint_multiprocess", lambda _, state, __: states.append(state)
    ),
    tempfile.TemporaryDirectory() as folder,
    scope,
  ):
    train.train_and_evaluate(_config(use_bfloat16=variant == observed.OWN), folder)

  state = states[-1]
  step = partial(train_step, **static, dropout_rng=jax.random.PRNGKey(1))
  step_args = state, jax.tree.map(jnp.asarray, _batches()[0])
  with scope:
    loss, loss_args = observed.differentiated(step, step_args, jax)
  skipped = None
  if variant == observed.FLOAT16:
    skipped = int(mpjax.loss_scaling_metrics(state.opt_state)["skipped"])
  written = [call.args[1] for call in writer.write_scalars.call_args_list]
  return observed.Run(
    losses=[float(scalars["train_loss"]) for scalars in written if "train_loss" in scalars],
    params=state.params,
    opt_state=state.opt_state,
    step=step,
    step_args=step_args,
    loss=loss,
    loss_args=loss_args,
    skipped=skipped,
    context=scope,
  )


def _config(*, use_bfloat16):
  config = default.get_config()
  config.update({"num_layers": 2, "emb_dim": 64, "qkv_dim": 64, "mlp_dim": 128, "num_heads": 4})
  config.max_target_length = config.max_eval_target_length = LENGTH
  config.update(
    max_predict_length=8,
    use_bfloat16=use_bfloat16,
    num_train_steps=STEPS,
    num_eval_steps=1,
    eval_every_steps=1,
    warmup_steps=2,
    learning_rate=3e-3,
    restore_checkpoints=False,
  )
  return config


def _data(n_devices, config, vocab_path):
  encoder = mock.Mock(vocab_size=lambda: VOCABULARY)
  encoder.tokenize.return_value.numpy.return_value = np.arange(3, 6)
  evaluated = [{"inputs": mock.Mock(_numpy=lambda: _batches()[0]["inputs"])}]
  return _batches(), evaluated, None, encoder


def _batches():
  starts = np.random.default_rng(0).integers(0, VOCABULARY // 4, (STEPS, BATCH, 1))
  # Each text counts upwards, which can be learned. The token 0 is padding.
  texts = 1 + (starts + np.arange(LENGTH)) % (VOCABULARY - 1)
  return [{"inputs": text.astype(np.int32)} for text in texts]


if __name__ == "__main__":
  observed.main(run)
