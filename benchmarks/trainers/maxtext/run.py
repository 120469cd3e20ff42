"""MaxText: `train_loop` trains a small Llama, which is a model of Flax NNX, on synthetic data."""

import contextlib
import json
import os
import pathlib
import tempfile
from unittest import mock

import jax
import observed
from flax import nnx

import mpjax

# Nothing of Google Cloud is installed. MaxText reads it when it is imported.
os.environ["DECOUPLE_GCLOUD"] = "TRUE"
observed.without("transformers", "huggingface_hub", "datasets", "tokenizers", "tiktoken")
observed.without("xprof", "sympy", "PIL", "tensorflow", "tensorflow_datasets")

from maxtext.optimizers import optimizers  # noqa: E402
from maxtext.trainers.pre_train import train  # noqa: E402
from maxtext.utils import maxtext_utils, sharding  # noqa: E402

STEPS, ACCUMULATED, BATCH, LENGTH = 6, 2, 4, 32

SCALE = 2.0**15

SETTINGS = {
  "run_name": "trainers",
  "hardware": "cpu",
  "skip_jax_distributed_system": True,
  "enable_checkpointing": False,
  "dataset_type": "synthetic",
  "steps": STEPS,
  "max_target_length": LENGTH,
  "decoder_block": "llama2",
  "base_emb_dim": 64,
  "base_mlp_dim": 128,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 16,
  "vocab_size": 128,
  "attention": "dot_product",
  "remat_policy": "minimal",
  "gradient_accumulation_steps": ACCUMULATED,
  "gradient_clipping_threshold": 0.5,
  "learning_rate": 3e-3,
  "warmup_steps_fraction": 0.2,
  "weight_dtype": "float32",
}


def run(variant: str) -> observed.Run:
  """Trains in one variant."""
  if variant == observed.BFLOAT16:
    train.loss_fn = mpjax.autocast(train.loss_fn, "mixed_bfloat16")  # mpjax
  if variant == observed.FLOAT16:
    train.loss_fn = mpjax.autocast(train.loss_fn, "mixed_float16")  # mpjax
    train.loss_fn = mpjax.scaled(train.loss_fn, SCALE)  # mpjax
    # MaxText clips first, which keeps the NaN of an overflow.
    make = optimizers.get_optimizer
    optimizers.get_optimizer = lambda *args, **options: mpjax.loss_scaling(  # mpjax
      make(*args, **options), mpjax.SkipNonfinite()
    )

  with tempfile.TemporaryDirectory() as folder:
    metrics = pathlib.Path(folder) / "metrics.txt"
    settings = SETTINGS | {
      "dtype": "bfloat16" if variant == observed.OWN else "float32",
      "per_device_batch_size": BATCH // jax.device_count(),
      "metrics_file": metrics,
      "base_output_directory": folder,
    }
    base = pathlib.Path(train.__file__).parents[2] / "configs" / "base.yml"
    config, recorder = train.initialize(
      ["train", str(base), *(f"{k}={v}" for k, v in settings.items())]
    )
    jit = train.train_utils.jit_train_and_eval_step
    with mock.patch.object(
      train.train_utils, "jit_train_and_eval_step", side_effect=jit
    ) as remembering:
      state = train.train_loop(config, recorder)
    lines = metrics.read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["learning/loss"] for line in lines]

  _, graph, mesh, _, shardings, *_, params_shardings = remembering.call_args.args
  context = contextlib.ExitStack()
  context.enter_context(jax.set_mesh(mesh))
  context.enter_context(train.logical_axis_rules(config.logical_axis_rules))
  data_sharding = sharding.get_input_data_sharding(config, mesh)
  batch = maxtext_utils.get_shaped_batch(config, batch_sharding=data_sharding)
  batch = train.make_synthetic_batch(config, batch)
  leaves, structure = jax.tree.flatten(state)

  def step(leaves, batch):
    state = jax.tree.unflatten(structure, leaves)
    return train.train_step(graph, config, shardings, params_shardings, state, dict(batch))

  def loss(model, batch):
    return train.loss_fn(model, config, dict(batch), None, None, is_train=True)

  trained = nnx.merge(graph, state)
  skipped = None
  if variant == observed.FLOAT16:
    skipped = int(mpjax.loss_scaling_metrics(trained.optimizer)["skipped"])
  return observed.Run(
    losses=losses,
    params=nnx.state(trained.model, nnx.Param),
    opt_state=nnx.state(trained.optimizer),
    step=step,
    step_args=(leaves, batch),
    loss=loss,
    loss_args=(trained.model, {k: v[:BATCH] for k, v in batch.items()}),
    skipped=skipped,
    context=context,
  )


if __name__ == "__main__":
  observed.main(run)
