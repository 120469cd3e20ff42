"""A GPT whose attention is a kernel, compiled for TPUs that are not there.

  PYTHONPATH=. python benchmarks/tpu_kernels.py --chips v5e v6e

The kernel is JAX's flash attention for TPUs. "by hand" has `dtype=bfloat16` in each layer. The
others run under `mixed_bfloat16`: with the model's own `dtype`, with `mpjax.low_precision` around
the kernel, with a rule for the blocks as a whole, and with a kernel in float32. It needs libtpu
beside jax, as `make tpu-hlo` installs it. Nothing runs, so there are no times.
"""

import argparse
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import aot
import flax.linen as nn
import jax
import jax.numpy as jnp
import measure
import optax
import tpu_hlo
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mpjax

OUT = pathlib.Path(__file__).parent / "results" / "tpu_kernels" / "v5e_v6e.json"
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax")
BATCH, LENGTH, WIDTH, LAYERS, WORDS = 8, 1024, 1024, 4, 8192
HEAD = 128
POLICY = "mixed_bfloat16"


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Return causal attention. Arrays have shape [batch, heads, length, features]."""
  return flash_attention(q, k, v, causal=True, sm_scale=HEAD**-0.5)


class Block(nn.Module):
  """A pre-norm block. Input [batch, length, features]."""

  dtype: Any = None
  kernel: Callable[..., jax.Array] = attention

  @nn.compact
  def __call__(self, x):
    h = nn.LayerNorm(dtype=self.dtype)(x)
    qkv = nn.DenseGeneral((WIDTH // HEAD, 3 * HEAD), dtype=self.dtype)(h)
    q, k, v = jnp.split(jnp.swapaxes(qkv, 1, 2), 3, axis=-1)
    h = jnp.swapaxes(self.kernel(q, k, v), 1, 2)
    x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), dtype=self.dtype)(h)
    h = nn.LayerNorm(dtype=self.dtype)(x)
    h = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(h))
    return x + nn.Dense(WIDTH, dtype=self.dtype)(h)


class GPT(nn.Module):
  """A language model without positions. Input [batch, length], the numbers of tokens."""

  dtype: Any = None
  kernel: Callable[..., jax.Array] = attention

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(WORDS, WIDTH, dtype=self.dtype)(tokens)
    for _ in range(LAYERS):
      x = Block(self.dtype, self.kernel)(x)
    x = nn.LayerNorm(dtype=self.dtype)(x)
    return nn.Dense(WORDS, dtype=self.dtype)(x).astype(jnp.float32)


def versions() -> Mapping[str, Any]:
  """Return the models by the way in which their kernels get a dtype."""
  whole = mpjax.Rule("c=bf16", module=Block, rewrite=False)
  return {
    "float32": GPT(),
    "by hand": GPT(jnp.bfloat16),
    "own dtype": mpjax.with_policy(GPT(jnp.bfloat16), POLICY),
    "low_precision": mpjax.with_policy(GPT(kernel=mpjax.low_precision(attention)), POLICY),
    "rewrite=False": mpjax.with_policy(GPT(), POLICY, [whole]),
    "float32 kernel": mpjax.with_policy(GPT(), POLICY),
  }


def compiled_step(model: Any, device: Any) -> jax.stages.Compiled:
  """Return a compiled training step of AdamW."""
  optimizer = optax.adamw(1e-3)

  def step(params, state, tokens):
    def loss(params):
      logits = model.apply({"params": params}, tokens)[:, :-1]
      return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
  params = jax.eval_shape(GPT().init, jax.random.key(0), tokens)["params"]
  arrays = (params, jax.eval_shape(optimizer.init, params))
  args = aot.placed((*arrays, tokens), SingleDeviceSharding(device))
  return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def figures(compiled: jax.stages.Compiled) -> dict[str, float]:
  """Return bytes accessed, bytes of temporaries and FLOPs of a compiled step."""
  cost: Any = compiled.cost_analysis()
  memory: Any = compiled.memory_analysis()
  return {
    "bytes": cost["bytes accessed"],
    "temporaries": memory.temp_size_in_bytes,
    "flops": cost["flops"],
  }


def table(chip: str, found: Mapping[str, Mapping[str, float]]) -> Table:
  """Return a table of one chip, with ratios to "by hand"."""
  shown = Table("version", "GB accessed", "GB temporary", "ratios to by hand", title=chip)
  base = found["by hand"]
  for name, row in found.items():
    ratios = " ".join(f"{row[key] / base[key]:.3f}" for key in ("bytes", "temporaries"))
    shown.add_row(name, f"{row['bytes'] / 1e9:.2f}", f"{row['temporaries'] / 1e9:.2f}", ratios)
  return shown


def main(chips: list[str], out: pathlib.Path) -> None:
  """Compile all versions for each chip, write the figures, and show them."""
  console = Console()
  results: dict[str, Any] = {
    "environment": measure.environment({"mpjax": mpjax.__version__}, PACKAGES),
    "chips": {},
  }
  for chip in chips:
    device = tpu_hlo.devices(tpu_hlo.CHIPS[chip])[0]
    models = track(versions().items(), chip, console=console, total=len(versions()))
    results["chips"][chip] = {name: figures(compiled_step(x, device)) for name, x in models}
    measure.write(out, results)
    console.print(table(chip, results["chips"][chip]))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--chips", nargs="+", default=["v5e", "v6e"], choices=tpu_hlo.CHIPS)
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  main(**vars(parser.parse_args()))
