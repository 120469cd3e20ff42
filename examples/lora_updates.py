"""Fine-tune with LoRA in bfloat16, and see why the loss does not move: the updates vanish.

  python examples/lora_updates.py                      # prints the report
  python examples/lora_updates.py --picture ranges.png # draws it too

The matrices of the adapter are stored in bfloat16, as the frozen weights are. Adam at 1e-4 moves
each element by about 1e-4, while bfloat16 numbers near 0.1 are 4.9e-4 apart: most additions round
to the old number. The same run with a float32 copy in the optimizer (line 1) learns.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import mpjax

STEPS = 60


class LoRADense(nn.Module):
  """A frozen layer, and a product of two thin matrices that is trained."""

  features: int
  rank: int = 4

  @nn.compact
  def __call__(self, x):
    width = x.shape[-1]
    frozen = self.variable(
      "frozen", "kernel", nn.initializers.lecun_normal(), jax.random.key(0), (width, self.features)
    )
    a = self.param("lora_a", nn.initializers.normal(0.2), (width, self.rank))
    b = self.param("lora_b", nn.initializers.normal(0.2), (self.rank, self.features))
    return x @ frozen.value + (x @ a) @ b


class Network(nn.Module):
  """Three layers, each with an adapter."""

  @nn.compact
  def __call__(self, x):
    x = nn.gelu(LoRADense(64, name="up")(x))
    x = nn.gelu(LoRADense(64, name="mid")(x))
    return LoRADense(16, name="down")(x)


def task(masters):
  """Returns a training step, and its first arguments."""
  model = Network()
  x = jax.random.normal(jax.random.key(1), (256, 32))
  target = jnp.sin(x @ jax.random.normal(jax.random.key(2), (32, 16)) / 4)
  variables = mpjax.Policy.parse("bfloat16").cast_to_param(model.init(jax.random.key(3), x))
  frozen, params = variables["frozen"], variables["params"]
  tx = optax.adam(1e-4)
  tx = mpjax.master_weights(tx) if masters else tx  # 1

  @jax.jit
  def step(params, opt_state, x, target):
    def loss_fn(params):
      out = model.apply({"params": params, "frozen": frozen}, x.astype(jnp.bfloat16))
      return jnp.mean((out.astype(jnp.float32) - target) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return mpjax.apply_updates(params, updates, opt_state), opt_state, loss

  return step, (params, tx.init(params), x, target)


def train(masters):
  """Returns the first and the last loss, and the report of the last step."""
  step, (params, opt_state, *batch) = task(masters)
  losses = []
  for _ in range(STEPS):
    params, opt_state, loss = step(params, opt_state, *batch)
    losses.append(float(loss))
  return losses[0], losses[-1], mpjax.ranges(step)(params, opt_state, *batch)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--picture", help="a file for the heat map")
  args = parser.parse_args()
  for masters in (False, True):
    first, last, report = train(masters)
    name = "float32 masters" if masters else "bfloat16 alone"
    print(f"{name}: loss {first:.4f} -> {last:.4f}, lost updates {report.lost_updates:.1%}")
    if not masters:
      plain = report
  print()
  print(plain)
  if args.picture:
    plain.plot(args.picture)


if __name__ == "__main__":
  main()
