"""google-tunix: `PeftTrainer` trains a small Qwen3, which is a model of Flax NNX."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import observed
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils

import mpjax

STEPS, ACCUMULATED = 6, 2
SCALE = 2.0**15
BATCH, LENGTH, VOCABULARY = 4, 32, 128


def run(variant: str) -> observed.Run:
  """Trains in one variant."""
  with _mesh() as mesh:
    model = _model(jnp.bfloat16 if variant == observed.OWN else jnp.float32, mesh)
    if variant == observed.BFLOAT16:
      model = mpjax.with_policy(model, "mixed_bfloat16")  # mpjax
    if variant == observed.FLOAT16:
      model = mpjax.with_policy(model, "mixed_float16")  # mpjax

    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3))
    config = peft_trainer.TrainingConfig(
      eval_every_n_steps=STEPS, max_steps=STEPS, gradient_accumulation_steps=ACCUMULATED
    )
    trainer = peft_trainer.PeftTrainer(model, tx, config).with_gen_model_input_fn(_inputs)
    if variant == observed.FLOAT16:
      trainer.with_loss_fn(mpjax.scaled(trainer.loss_fn, SCALE))  # mpjax
      # Around `optax.MultiSteps` of the trainer, which would keep the NaN of an overflow.
      skips = mpjax.loss_scaling(
        trainer.optimizer.tx.gradient_transformation(), mpjax.SkipNonfinite()
      )
      trainer.optimizer = nnx.Optimizer(model, skips, wrt=nnx.Param)  # mpjax

    batches = _batches()
    trainer.train(batches)
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")

  def step(model, optimizer, batch):
    with _mesh():
      return trainer.create_train_step_fn()(model, optimizer, batch)

  skipped = None
  if variant == observed.FLOAT16:
    skipped = int(mpjax.loss_scaling_metrics(trainer.optimizer)["skipped"])
  return observed.Run(
    losses=losses,
    params=nnx.state(trainer.model, nnx.Param),
    opt_state=nnx.state(trainer.optimizer),
    step=step,
    step_args=(trainer.model, trainer.optimizer, batches[0]),
    loss=lambda model, batch: trainer.loss_fn(model, **_inputs(batch)),
    loss_args=(trainer.model, batches[0]),
    skipped=skipped,
  )


def _mesh():
  """Returns the mesh as a context; None in it on a single device, as tunix expects it."""
  if jax.device_count() == 1:
    return contextlib.nullcontext()
  types = (jax.sharding.AxisType.Auto,) * 2
  return jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=types)


def _model(dtype, mesh):
  config = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=VOCABULARY,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
    remat_config=qwen3.RematConfig.BLOCK,
    dtype=dtype,
  )
  model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
  # The kernels of the MLPs begin as zeros, for a checkpoint to fill: they would never learn.
  keys = iter(jax.random.split(jax.random.key(1), 3 * config.num_layers))
  for layer in model.layers:
    for kernel in (
      layer.mlp.gate_proj.kernel,
      layer.mlp.up_proj.kernel,
      layer.mlp.down_proj.kernel,
    ):
      kernel[...] = nnx.initializers.lecun_normal()(next(keys), kernel.shape)
  if mesh is not None:
    state = nnx.state(model)
    nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
  return model


def _batches():
  tokens = np.random.default_rng(0).integers(0, VOCABULARY // 4, (STEPS * ACCUMULATED, BATCH, 1))
  # Each text counts upwards, which can be learned.
  tokens = ((tokens + np.arange(LENGTH)) % VOCABULARY).astype(np.int32)
  mask = np.ones((BATCH, LENGTH), bool)
  return [peft_trainer.TrainingInput(input_tokens=each, input_mask=mask) for each in tokens]


def _inputs(batch):
  return {
    "input_tokens": batch.input_tokens,
    "input_mask": batch.input_mask,
    "positions": utils.build_positions_from_mask(batch.input_mask),
    "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
  }


if __name__ == "__main__":
  observed.main(run)
