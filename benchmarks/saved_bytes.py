"""Compare the memory for the backward pass under a policy and with dtypes set by hand.

  JAX_PLATFORMS=cpu PYTHONPATH=. .venv-compilers/bin/python benchmarks/saved_bytes.py
  python benchmarks/saved_bytes.py --gpu none --differences Gemma scan
  python benchmarks/saved_bytes.py --show

The models are language models with RMSNorm or LayerNorm, with a gate or without, and a ResNet with
BatchNorm. *As traced* counts the arrays in `jax.vjp(loss, params)[1]` that the forward pass
computes. *Compiled* counts the bytes moved and the temporaries of a training step, which is
compiled for a GPU but does not run. By hand, every layer has `dtype=bfloat16`. Norms, rotary
positions and softmax run in float32 and return bfloat16. The logits are the float32 sums of their
matmul, as under a policy.
"""

import argparse
import collections
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aot
import flax.linen as nn
import gpu_hlo
import jax
import jax.numpy as jnp
import measure
import models
import numpy as np
import tables
from jax.extend.core import Jaxpr, Literal, Var
from rich.console import Console

FOLDER = pathlib.Path(__file__).parent
RECORDED = FOLDER / "results" / "saved_bytes" / "h200_jax_0.12.json"
PAGE = FOLDER.parent / "docs" / "autocast_measured.md"
VERSIONS = (aot.FLOAT32_LOGITS, "policy")


class OwnRMSNorm(nn.Module):
  """The norm of Llama and Gemma as it is written by hand, in float32."""

  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.zeros, x.shape[-1:])
    wide = x.astype(jnp.float32)
    normalized = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (normalized * (1 + scale)).astype(self.dtype or jnp.float32)


def rotated(x: Any) -> Any:
  """Returns queries or keys `[batch, length, heads, features]`, rotated by their positions."""
  angles = jnp.arange(x.shape[1])[:, None, None] / 1e4 ** jnp.linspace(0, 1, x.shape[-1] // 2)
  sin, cos = jnp.sin(angles)[None], jnp.cos(angles)[None]
  first, second = jnp.split(x, 2, -1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
  return turned.astype(x.dtype)


class Block(nn.Module):
  """A layer of a language model: attention and an MLP, each behind a norm.

  Fields:
    norm: the class of both norms.
    gate: the activation function of a gated MLP, without biases; None for a GELU with biases.
  """

  heads: int
  norm: type[nn.Module]
  gate: Callable[[Any], Any] | None
  dtype: Any = None

  @nn.compact
  def __call__(self, x):
    x = x + self.attention(self.norm(dtype=self.dtype)(x))
    return x + self.mlp(self.norm(dtype=self.dtype)(x))

  def attention(self, x):
    dense = functools.partial(nn.DenseGeneral, use_bias=self.gate is None, dtype=self.dtype)
    shape = (self.heads, x.shape[-1] // self.heads)
    query, key, value = (dense(shape, name=name)(x) for name in ("query", "key", "value"))
    if self.gate is not None:
      query, key = rotated(query), rotated(key)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query * shape[1] ** -0.5, key)
    seen = np.tril(np.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(self.dtype or jnp.float32), value)
    return dense(x.shape[-1], axis=(-2, -1), name="out")(mixed)

  def mlp(self, x):
    dense = functools.partial(nn.Dense, use_bias=self.gate is None, dtype=self.dtype)
    width = x.shape[-1]
    if self.gate is None:
      return dense(width)(nn.gelu(dense(4 * width)(x)))
    return dense(width)(self.gate(dense(3 * width)(x)) * dense(3 * width)(x))


class Language(nn.Module):
  """A causal language model. Input: tokens `[batch, length]`.

  Fields:
    scans: whether `nn.scan` repeats one layer.
    remats: whether the backward pass computes each layer again.
  """

  layers: int
  width: int
  heads: int
  vocabulary: int
  norm: type[nn.Module]
  gate: Callable[[Any], Any] | None
  scans: bool = False
  remats: bool = False
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens):
    dtype = self.dtype or jnp.float32
    x = nn.Embed(self.vocabulary, self.width)(tokens).astype(dtype)
    layer = nn.remat(Block, prevent_cse=not self.scans) if self.remats else Block
    make = functools.partial(layer, self.heads, self.norm, self.gate, self.dtype)
    if self.scans:
      stack = nn.scan(
        lambda layer, x, _: (layer(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=self.layers,
      )
      x, _ = stack(make(), x, None)
    else:
      for _ in range(self.layers):
        x = make()(x)
    x = self.norm(dtype=self.dtype)(x)
    return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x).astype(jnp.float32)


KINDS: Mapping[str, Mapping[str, Any]] = {
  "Llama": {"norm": nn.RMSNorm, "gate": nn.silu},
  "Gemma": {"norm": OwnRMSNorm, "gate": nn.gelu},
  "GPT": {"norm": nn.LayerNorm, "gate": None},
}
WAYS: Mapping[str, Mapping[str, bool]] = {
  "unrolled": {},
  "remat": {"remats": True},
  "scan": {"scans": True},
  "scan, remat": {"scans": True, "remats": True},
}
SIZES: Mapping[str, Mapping[str, Any]] = {
  "tiny": {
    **{"layers": 2, "width": 16, "heads": 2, "vocabulary": 17, "batch": 2, "length": 6},
    "resnet": models.SIZES["tiny"]["resnet"],
  },
  "full": {
    **{"layers": 4, "width": 512, "heads": 8, "vocabulary": 1024, "batch": 32, "length": 128},
    "resnet": models.SIZES["quick"]["convolutions"],
  },
}
"""The full size has 4,096 tokens in short texts, so attention does not hide norms and gates."""


def cases(size: str) -> dict[tuple[str, str], models.Case]:
  """Returns the models by kind and by the way in which their layers are repeated."""
  fields = dict(SIZES[size])
  resnet, shape = fields.pop("resnet"), (fields.pop("batch"), fields.pop("length"))

  def case(kind: str, way: str) -> models.Case:
    return models.Case(
      make=lambda dtype=None: Language(**fields, **KINDS[kind], **WAYS[way], dtype=dtype),
      inputs=jax.ShapeDtypeStruct(shape, jnp.int32),
      classes=fields["vocabulary"],
      outputs=shape,
    )

  found = {(kind, way): case(kind, way) for kind, way in itertools.product(KINDS, WAYS)}
  return {**found, ("ResNet", "unrolled"): resnet}


def kept(case: models.Case, version: str) -> collections.Counter[str]:
  """Returns the bytes that the backward pass keeps, by type and by the operation that made them."""
  params, state, _ = aot.state_of(case)
  state, inputs, labels = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    (state, case.inputs, jax.ShapeDtypeStruct(case.outputs, jnp.int32)),
  )
  loss = aot.losses(case, "bfloat16")[version]

  def residuals(params: Any) -> Any:
    return jax.tree.leaves(jax.vjp(lambda p: loss(p, state, inputs, labels)[0], params)[1])

  jaxpr = jax.make_jaxpr(residuals)(params).jaxpr
  makers = _makers(jaxpr)
  found: collections.Counter[str] = collections.Counter()
  # Each array counts once. Parameters and inputs are there anyway.
  for v in dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, Literal)):
    if v in makers:
      size = int(np.prod(v.aval.shape)) * v.aval.dtype.itemsize
      found[f"{v.aval.str_short()} {makers[v]}"] += size
  return found


def _makers(jaxpr: Jaxpr) -> Mapping[Var, str]:
  return {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}


def compiled(case: models.Case, version: str, gpu: str) -> tuple[int, int]:
  """Returns the bytes moved and the temporaries of a training step, compiled for a GPU."""
  step, state = aot.plain_steps(case, "bfloat16")[version]
  args = aot.arguments_of(case, gpu_hlo.gpu_device(gpu), state)
  figures, _ = aot.compiled_step(step, args, gpu_hlo.OPTIONS)
  return figures["traffic_bytes"], figures["temp_bytes"]


def main(
  size: str = "full",
  gpu: str | None = "h200",
  kinds: Sequence[str] = (*KINDS, "ResNet"),
  out: pathlib.Path = RECORDED,
  console: Console | None = None,
) -> dict[str, Any]:
  """Measures, writes JSON, prints the table, and returns the results."""
  console = console or Console()
  chosen = {name: case for name, case in cases(size).items() if name[0] in kinds}
  settings = {"target": gpu, "size": size, "options": gpu_hlo.OPTIONS}
  results: dict[str, Any] = {"environment": gpu_hlo.environment_here(), "settings": settings}
  results["models"] = {}
  with tables.progress_bar(console) as bar:
    task = bar.add_task("measure", total=len(chosen) * len(VERSIONS))
    for (kind, way), case in chosen.items():
      one = results["models"].setdefault(kind, {})[way] = {}
      for version in VERSIONS:
        bar.update(task, description=f"{kind}, {way}, {version}")
        one[version] = {"kept": kept(case, version).total()}
        if gpu is not None:
          one[version]["moved"], one[version]["temporaries"] = compiled(case, version, gpu)
        bar.advance(task)
  measure.write(out, results)
  console.print(table(results))
  return results


def ratio(one: Mapping[str, Mapping[str, int]], figure: str) -> float:
  """Returns a figure of the policy divided by that of dtypes by hand."""
  return one["policy"][figure] / one[aot.FLOAT32_LOGITS][figure]


def table(results: Mapping[str, Any]) -> str:
  """Returns the ratios of each model in Markdown."""
  rows = [["model", "layers", "kept, as traced", "bytes moved", "temporaries"]]
  for kind, ways in results["models"].items():
    for way, one in ways.items():
      figures = [name for name in ("kept", "moved", "temporaries") if name in one["policy"]]
      rows.append([kind, way, *(f"{ratio(one, name):.3f}" for name in figures)])
  return tables.table(rows, 2)


def updated(page: str, results: Mapping[str, Any]) -> str:
  """Returns the text of the page with its table made from the recorded figures."""
  return tables.replaced(page, "saved bytes", table(results))


def show_differences(case: models.Case, console: Console) -> None:
  """Prints the bytes that a policy keeps beyond dtypes by hand, or saves, largest first."""
  by_hand, policy = (kept(case, version) for version in VERSIONS)
  policy.subtract(by_hand)
  for name, count in sorted(policy.items(), key=lambda each: -abs(each[1])):
    if count:
      console.print(f"{count / 1e6:+10.2f} MB  {name}", highlight=False)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--kinds", nargs="+", default=[*KINDS, "ResNet"], help="kinds of models")
  parser.add_argument("--size", default="full", choices=SIZES)
  parser.add_argument("--gpu", default="h200", choices=[*gpu_hlo.GPUS, "none"])
  parser.add_argument("--out", type=pathlib.Path, default=RECORDED)
  parser.add_argument("--differences", nargs=2, metavar=("KIND", "WAY"), help="as traced")
  parser.add_argument("--show", action="store_true", help="write the recorded table to its page")
  given = parser.parse_args()
  if given.differences:
    show_differences(cases(given.size)[tuple(given.differences)], Console())
  elif given.show:
    text = updated(PAGE.read_text(encoding="utf-8"), measure.read(RECORDED))
    PAGE.write_text(text, encoding="utf-8")
  else:
    chosen_gpu = None if given.gpu == "none" else given.gpu
    main(given.size, chosen_gpu, given.kinds, given.out)
