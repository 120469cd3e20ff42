"""Kauldron: `kd.train.Trainer` trains a small ViT, which is a model of Flax Linen."""

import dataclasses
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import observed
import optax
from flax import linen as nn
from kauldron import kd
from kauldron.train import train_step

import mpjax

STEPS, ACCUMULATED = 8, 2
BATCH, SIZE, CLASSES = 8, 16, 8


def run(variant: str) -> observed.Run:
  """Trains in one variant."""
  # Layers take the dtype of the images. Norms and the embedding of positions have their own.
  dtype = jnp.bfloat16 if variant == observed.OWN else jnp.float32
  model = _model(dtype)
  tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3))
  tx = optax.MultiSteps(tx, ACCUMULATED).gradient_transformation()
  if variant == observed.BFLOAT16:
    model = mpjax.with_policy(model, "mixed_bfloat16")  # mpjax
  if variant == observed.FLOAT16:
    model = mpjax.with_policy(model, "mixed_float16")  # mpjax
    tx = mpjax.loss_scaling(tx, mpjax.SkipNonfinite())  # mpjax
    train_step.forward_with_loss = mpjax.scaled(train_step.forward_with_loss, 2.0**15)  # mpjax

  losses: list[float] = []
  several = jax.device_count() > 1
  params = {"params": kd.sharding.FSDPSharding(min_size_to_shard_mb=0)} if several else {}
  trainer = kd.train.Trainer(
    workdir=tempfile.mkdtemp(),
    train_ds=kd.data.InMemoryPipeline(loader=lambda: _examples(dtype), batch_size=BATCH),
    model=model,
    optimizer=tx,
    train_losses={
      "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(
        logits="preds.logits", labels="batch.label"
      )
    },
    sharding=kd.sharding.ShardingStrategy(**params),
    num_train_steps=STEPS - 1,  # The loop begins with step 0, and includes the last one.
    log_metrics_every=1,
    writer=_Losses(keep=losses.append),
  )
  state, _ = trainer.train()

  batch = jax.tree.map(jnp.asarray, next(iter(trainer.train_ds)))
  context = kd.train.Context.from_state_and_batch(state=state, batch=batch)

  def step(state, batch):
    return trainer.trainstep.step(state, batch, return_losses=True)

  def loss(context):
    return train_step.forward_with_loss(
      context,
      model=trainer.model,
      losses=trainer.trainstep.aux.losses,
      rngs=trainer.rng_streams.train_rngs(context.step),
      is_training=True,
    )

  skipped = None
  if variant == observed.FLOAT16:
    skipped = int(mpjax.loss_scaling_metrics(state.opt_state)["skipped"])
  return observed.Run(
    losses=losses,
    params=state.params,
    opt_state=state.opt_state,
    step=step,
    step_args=(state, batch),
    loss=loss,
    loss_args=(context,),
    skipped=skipped,
  )


@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class _Losses(kd.train.metric_writer.NoopWriter):
  """A writer of metrics that hands on the loss of each step."""

  keep: Callable[[float], None]

  def write_step_metrics(self, *, aux, **kwargs):
    self.keep(float(aux.compute().loss_values["losses/total"]))


def _model(dtype):
  encoder = kd.nn.VitEncoder.from_spec(
    num_heads=2,
    hidden_size=32,
    num_layers=2,
    patch_size=4,
    mlp_size=128,
    dtype=dtype,
    pos_embedding=kd.nn.LearnedEmbedding(dtype=dtype),
    encoder_norm=nn.RMSNorm(dtype=dtype),
  )
  return kd.nn.Vit(encoder=encoder, num_classes=CLASSES, image="batch.image")


def _examples(dtype):
  rng = np.random.default_rng(0)
  labels = rng.integers(0, CLASSES, STEPS * BATCH).astype(np.int32)
  # The images of each class have a pattern of their own, which can be learned.
  images = rng.normal(size=(CLASSES, SIZE, SIZE, 3))[labels]
  images = images + 0.5 * rng.normal(size=images.shape)
  return {"image": images.astype(dtype), "label": labels[:, None]}


if __name__ == "__main__":
  observed.main(run)
