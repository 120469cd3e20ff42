"""Flax's example Gemma, a model of NNX: `train_and_evaluate` of its `train.py`.

An example is code to copy, so a policy is a line that its user writes: `EDITS` are made to the text
of `train.py` before it is imported. Its own file stays as it is.
"""

import sys
import tempfile
import types
from functools import partial
from unittest import mock

import jax
import numpy as np
import observed
from flax import nnx

import mpjax

STEPS, BATCH, LENGTH, VOCABULARY = 6, 4, 32, 128

EDITS = {
  observed.BFLOAT16: {
    "    optimizer = nnx.Optimizer(\n": (
      '    model = mpjax.with_policy(model, "mixed_bfloat16")  # mpjax\n'
      "    optimizer = nnx.Optimizer(\n"
    ),
  },
  observed.FLOAT16: {
    "    optimizer = nnx.Optimizer(\n": (
      '    model = mpjax.with_policy(model, "mixed_float16")  # mpjax\n'
      "    optimizer = nnx.Optimizer(\n"
    ),
    "        tx=optax.adamw(\n": "        tx=mpjax.loss_scaling(optax.adamw(  # mpjax\n",
    "            weight_decay=config.weight_decay,\n        ),\n": (
      "            weight_decay=config.weight_decay,\n        )),\n"
    ),
    "  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)\n": (
      "  scaled_loss_fn = mpjax.scaled(loss_fn, optimizer)  # mpjax\n"
      "  grad_fn = jax.value_and_grad(scaled_loss_fn, has_aux=True)\n"
    ),
  },
}


def run(variant: str) -> observed.Run:
  """Trains in one variant."""
  observed.without_writers()
  train = _module(EDITS.get(variant, {}))
  config = _config(use_bfloat16=variant == observed.OWN)
  steps = []
  jit = jax.jit

  def remembering(fn, **options):
    jitted = jit(fn, **options)
    if getattr(fn, "func", None) is not train.jax_train_step:
      return jitted
    steps.append(_Step(jitted))
    return steps[0]

  encoder = mock.Mock(vocab_size=lambda: VOCABULARY, pad_id=lambda: 0)
  with (
    mock.patch.object(jax, "jit", remembering),
    mock.patch.object(train.input_pipeline, "get_datasets", partial(_data, encoder)),
    # Text is made of a vocabulary, and there is none.
    mock.patch.object(train.tokenizer, "load_sentencepiece_processor"),
    mock.patch.object(train.sampler_lib, "Sampler"),
    tempfile.TemporaryDirectory() as folder,
  ):
    train.train_and_evaluate(config, folder)

  (step,) = steps
  model, optimizer, rngs, _, metrics, *_ = args = step.args
  mesh = jax.make_mesh(config.get_mesh_shape(jax.device_count()), config.mesh_axes)
  batch = next(iter(_batches(jax.NamedSharding(mesh, jax.P(config.data_sharding)))))
  # The loss is traced without its step, so a dynamic scale would be a constant. It saves no bytes.
  unscaled = mock.patch.object(mpjax, "scaled", lambda loss_fn, _: loss_fn)
  with jax.set_mesh(mesh), unscaled:
    plain = partial(train.jax_train_step, with_capture=True)
    loss, loss_args = observed.differentiated(plain, (model, optimizer, rngs, batch, metrics), jax)
  skipped = None
  if variant == observed.FLOAT16:
    skipped = int(mpjax.loss_scaling_metrics(optimizer)["skipped"])
  return observed.Run(
    losses=step.losses,
    params=nnx.state(model, nnx.Param),
    opt_state=nnx.state(optimizer),
    step=step.step,
    step_args=args,
    loss=loss,
    loss_args=loss_args,
    skipped=skipped,
    context=jax.set_mesh(mesh),
  )


class _Step(observed.Calls):
  """The training step, whose losses the trainer adds up in its metrics."""

  def __init__(self, fn):
    super().__init__(fn)
    self.losses, self.total, self.count = [], 0.0, 0.0

  def __call__(self, *args):
    updates, _ = result = super().__call__(*args)
    loss = updates[3]["loss"]
    total, count = (float(loss[name][...]) for name in ("total", "count"))
    self.losses.append((total - self.total) / (count - self.count))
    self.total, self.count = total, count
    return result


def _module(edits):
  """Returns the example's `train`, imported with edits to its text."""
  folder = observed.source() / "examples" / "gemma"
  sys.path.insert(0, str(folder))
  text = (folder / "train.py").read_text(encoding="utf-8")
  for old, new in edits.items():
    if text.count(old) != 1 and "grad_fn" not in old:
      raise ValueError(f"train.py has {text.count(old)} times {old!r}")
    text = text.replace(old, new, 1)
  module = types.ModuleType("train")
  sys.modules["train"] = module
  module.__dict__["mpjax"] = mpjax
  exec(compile(text, str(folder / "train.py"), "exec"), module.__dict__)
  return module


def _config(*, use_bfloat16):
  from configs import tiny

  params = {
    **{"num_layers": 2, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16},
    **{"num_kv_heads": 1, "use_post_attn_norm": False, "use_post_ffw_norm": False},
    **{"attention_types": (1, 1), "final_logit_softcap": None},
  }
  return tiny.get_config().replace(
    transformer_params=params,
    use_bfloat16=use_bfloat16,
    num_train_steps=STEPS,
    num_eval_steps=1,
    warmup_steps=2,
    learning_rate=3e-3,
    save_checkpoints=False,
    restore_checkpoints=False,
  )


def _data(encoder, config, vocab_path, data_sharding):
  batches = _batches(data_sharding)
  return batches, batches[:1], encoder


def _batches(sharding):
  starts = np.random.default_rng(0).integers(0, VOCABULARY // 4, (STEPS, BATCH, 1))
  # Each text counts upwards, which can be learned. The token 0 is padding.
  texts = (1 + (starts + np.arange(LENGTH + 1)) % (VOCABULARY - 1)).astype(np.int32)
  positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
  batches = [
    {
      "inputs": text[:, :-1],
      "targets": text[:, 1:],
      "inputs_position": positions,
      "inputs_segmentation": np.ones_like(positions),
    }
    for text in texts
  ]
  return [jax.device_put(batch, sharding) for batch in batches]


if __name__ == "__main__":
  observed.main(run)
