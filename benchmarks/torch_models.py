"""The models of `models.py` in PyTorch, as its users write them, and their parameters from Flax.

The same shapes and the same number of trained parameters; `test_torch_models.py` holds them to the
same numbers. A convolution of even width and stride 2 pads on both sides here, and on one in JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

Arrays = Mapping[str, np.ndarray]


class Mlp(nn.Module):
  """Dense layers with a norm each."""

  def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
    super().__init__()
    sizes = [features, *[width] * layers]
    self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
    self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(layers))
    self.head = nn.Linear(width, classes)

  def forward(self, x):
    for layer, norm in zip(self.layers, self.norms, strict=True):
      x = F.relu(norm(layer(x)))
    return self.head(x)

  def named(self) -> dict[str, nn.Module]:
    """Returns layers by the paths that they have in Flax."""
    layers = {f"Dense_{i}": each for i, each in enumerate([*self.layers, self.head])}
    return layers | {f"LayerNorm_{i}": each for i, each in enumerate(self.norms)}


class Block(nn.Module):
  """A residual block: two convolutions, or three with a bottleneck."""

  def __init__(self, inputs: int, features: int, stride: int, bottleneck: bool) -> None:
    super().__init__()
    outputs = 4 * features if bottleneck else features
    sizes = [(inputs, features, 1, 1)] if bottleneck else []
    sizes += [(features if bottleneck else inputs, features, 3, stride)]
    sizes += [(features, outputs, 1 if bottleneck else 3, 1)]
    if inputs != outputs or stride > 1:
      sizes.append((inputs, outputs, 1, stride))
    self.convolutions = nn.ModuleList(_convolution(*size) for size in sizes)
    self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
    self.depth = 3 if bottleneck else 2

  def forward(self, x):
    y = x
    for i in range(self.depth):
      y = self.norms[i](self.convolutions[i](y))
      y = F.relu(y) if i < self.depth - 1 else y
    if len(self.norms) > self.depth:
      x = self.norms[self.depth](self.convolutions[self.depth](x))
    return F.relu(x + y)

  def named(self) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {f"Conv_{i}": each for i, each in enumerate(self.convolutions)}
    return found | {f"BatchNorm_{i}": each for i, each in enumerate(self.norms)}


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
  return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class ResNet(nn.Module):
  """A residual network. Input [batch, 3, height, width]."""

  def __init__(
    self,
    stages: Sequence[int],
    width: int,
    classes: int,
    bottleneck: bool,
    large_images: bool,
  ) -> None:
    super().__init__()
    self.large_images = large_images
    self.first = _convolution(3, width, *((7, 2) if large_images else (3, 1)))
    self.norm = nn.BatchNorm2d(width)
    blocks, inputs = [], width
    for stage, count in enumerate(stages):
      for block in range(count):
        stride = 2 if stage > 0 and block == 0 else 1
        blocks.append(Block(inputs, width * 2**stage, stride, bottleneck))
        inputs = width * 2**stage * (4 if bottleneck else 1)
    self.blocks = nn.ModuleList(blocks)
    self.head = nn.Linear(inputs, classes)

  def forward(self, x):
    x = F.relu(self.norm(self.first(x)))
    if self.large_images:
      x = F.max_pool2d(x, 3, stride=2, padding=1)
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean((2, 3)))

  def named(self) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {
      "Conv_0": self.first, "BatchNorm_0": self.norm, "Dense_0": self.head,
    }  # fmt: skip
    for i, block in enumerate(self.blocks):
      found |= {f"Block_{i}/{name}": each for name, each in block.named().items()}
    return found


class Layer(nn.Module):
  """A layer of a transformer, norms first; queries, keys and values by one matmul."""

  def __init__(self, width: int, heads: int) -> None:
    super().__init__()
    self.heads = heads
    self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
    self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

  def forward(self, x):
    batch, length, width = x.shape
    heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
    return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):
  """A causal language model. Input: tokens [batch, length]."""

  def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
    super().__init__()
    self.tokens = nn.Embedding(vocabulary, width)
    self.places = nn.Parameter(torch.empty(1, length, width))
    self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
    self.norm = nn.LayerNorm(width, eps=1e-6)
    self.head = nn.Linear(width, vocabulary, bias=False)

  def forward(self, tokens):
    x = self.tokens(tokens) + self.places
    for layer in self.layers:
      x = layer(x)
    return self.head(self.norm(x))

  def named(self) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {
      "Embed_0": self.tokens, "LayerNorm_0": self.norm, "Dense_0": self.head,
    }  # fmt: skip
    for i, layer in enumerate(self.layers):
      attention = f"Layer_{i}/MultiHeadDotProductAttention_0"
      found |= {f"{attention}/out": layer.out}
      found |= {f"Layer_{i}/Dense_0": layer.up, f"Layer_{i}/Dense_1": layer.down}
      found |= {f"Layer_{i}/LayerNorm_{j}": norm for j, norm in enumerate(layer.norms)}
    return found


class Lstm(nn.Module):
  """A recurrent network that classifies sequences. Input [batch, length, features]."""

  def __init__(self, features: int, width: int, classes: int) -> None:
    super().__init__()
    self.cell = nn.LSTM(features, width, batch_first=True)
    # cuDNN has two biases, which are added; Flax has one.
    self.cell.bias_ih_l0.requires_grad_(False)
    self.head = nn.Linear(width, classes)

  def forward(self, x):
    return self.head(self.cell(x)[0][:, -1])

  def named(self) -> dict[str, nn.Module]:
    return {"Dense_0": self.head}


def model(kind: str, fields: Mapping[str, Any], inputs: Sequence[int]) -> nn.Module:
  """Returns a model with the fields that it has in Flax, for inputs of a shape."""
  more = {
    "Mlp": {"features": inputs[-1]},
    "Lstm": {"features": inputs[-1]},
    "Gpt": {"length": inputs[-1]},
  }
  made = {"Mlp": Mlp, "ResNet": ResNet, "Gpt": Gpt, "Lstm": Lstm}[kind]
  return made(**fields, **more.get(kind, {}))


@torch.no_grad()
def load(to: nn.Module, arrays: Arrays) -> None:
  """Copies parameters by their paths in Flax.

  Raises:
    ValueError: some array has no counterpart.
  """
  left = {name.partition("/")[2]: x for name, x in arrays.items() if name.startswith("params/")}

  def put(parameter: Any, x: np.ndarray) -> None:
    parameter.copy_(torch.from_numpy(np.ascontiguousarray(x)).view(parameter.shape))

  for path, layer in to.named().items():  # pyright: ignore[reportCallIssue]
    for name in ("kernel", "scale", "embedding", "bias"):
      x = left.pop(f"{path}/{name}", None)
      if x is not None:
        put(layer.bias if name == "bias" else layer.weight, _transposed(name, path, x))
  if isinstance(to, Gpt):
    put(to.places, left.pop("places"))
    for i, layer in enumerate(to.layers):
      prefix = f"Layer_{i}/MultiHeadDotProductAttention_0"
      for name, parameter in (("kernel", layer.qkv.weight), ("bias", layer.qkv.bias)):
        parts = [left.pop(f"{prefix}/{part}/{name}") for part in ("query", "key", "value")]
        flat = [x.reshape(x.shape[0], -1).T if name == "kernel" else x.ravel() for x in parts]
        put(parameter, np.concatenate(flat))
  if isinstance(to, Lstm):
    cell = to.cell
    of = next(name.rpartition("/hi/")[0] for name in left if name.endswith("/hi/kernel"))
    for name, kind in (("weight_ih_l0", "i"), ("weight_hh_l0", "h")):
      put(
        getattr(cell, name), np.concatenate([left.pop(f"{of}/{kind}{g}/kernel").T for g in "ifgo"])
      )
    put(cell.bias_hh_l0, np.concatenate([left.pop(f"{of}/h{g}/bias") for g in "ifgo"]))
    cell.bias_ih_l0.zero_()
  if left:
    raise ValueError(f"no parameter of PyTorch's model for {sorted(left)}")


def _transposed(name: str, path: str, x: np.ndarray) -> np.ndarray:
  if name != "kernel":
    return x
  if x.ndim == 4:  # height, width, inputs, outputs
    return x.transpose(3, 2, 0, 1)
  return x.reshape(-1, x.shape[-1]).T if path.endswith("/out") else x.T
