"""What a user does first: `.ci/smoke.py` runs it where mpjax is installed, far from a checkout."""

import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax


def autocast() -> None:
  """A plain function computes its matmul in bfloat16, and its sum in float32."""

  def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)

  w, x = jnp.ones((16, 16)), jnp.ones((4, 16))
  report = mpjax.audit(jax.value_and_grad(mpjax.autocast(loss, "bfloat16")))(w, x)
  report.assert_no_leaks()
  assert "100.0 %" in str(report)
  assert jax.jit(mpjax.autocast(loss, "bfloat16"))(w, x).dtype == jnp.float32


def train_and_restore(folder: pathlib.Path) -> None:
  """An NNX model trains in float16; what a checkpoint restores is what was saved, bit for bit."""
  model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
  tx = mpjax.loss_scaling(optax.adam(1e-2))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, x, labels):
    def loss_fn(model):
      logits = mpjax.with_policy(model, "mixed_float16")(x)
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))(model)
    optimizer.update(model, grads)
    return loss

  x, labels = jax.random.normal(jax.random.key(1), (9, 4)), jnp.arange(9) % 3
  losses = [float(step(model, optimizer, x, labels)) for _ in range(20)]
  assert losses[-1] < losses[0], losses
  mpjax.check_skipped_steps(optimizer)

  def state():
    return {
      "params": nnx.to_pure_dict(nnx.state(model, nnx.Param)),
      "opt_state": nnx.as_pure(optimizer.opt_state),
    }

  saved = state()
  np.savez(folder / "state.npz", **mpjax.checkpoints.to_arrays(saved))
  with np.load(folder / "state.npz") as file:
    restored = mpjax.checkpoints.restore_like(saved, file)
  same = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), saved, restored)
  assert all(jax.tree.leaves(same)), same


if __name__ == "__main__":
  assert pathlib.Path(sys.prefix) in pathlib.Path(mpjax.__file__).parents, mpjax.__file__
  autocast()
  with tempfile.TemporaryDirectory() as folder:
    train_and_restore(pathlib.Path(folder))
  sys.stdout.write(f"mpjax {mpjax.__version__} works with jax {jax.__version__}\n")
