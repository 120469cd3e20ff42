"""Programs of plain JAX, each in one text: without a dtype, and with dtypes by hand.

By hand is what a careful author writes: every operand of a product is cast to half, norms, softmax
and losses are computed in float32 and their results cast back, tables are gathered before they are
cast, the state of a recurrence and of a solver stays float32. Nothing but JAX and NumPy is needed,
and of JAX only what many releases have.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Style(NamedTuple):
  """How a program is written.

  Fields:
    half: the dtype that is threaded by hand; None leaves all dtypes out.
    scopes: whether norms and embeddings are in a `jax.named_scope`, as the layers of a library are.
  """

  half: Any = None
  scopes: bool = False


PLAIN = Style()


class Program(NamedTuple):
  """One program.

  Fields:
    loss: `(params, batch, style) -> scalar`, in float32.
    make: `size -> (params, batch)`, float32 and integer NumPy arrays; `size` is the width.
    attention: whether there is attention in it, whose error may be twice that of others.
  """

  loss: Callable[..., Any]
  make: Callable[[int], tuple[Any, Any]]
  attention: bool = False


def low(x: Any, style: Style) -> Any:
  """Returns `x` in half; in the plain version as it is."""
  return x if style.half is None else x.astype(style.half)


def wide(x: Any) -> Any:
  """Returns `x` in float32, which in the plain version it is already."""
  return x.astype(jnp.float32)


def scope(style: Style, name: str) -> Any:
  return jax.named_scope(name) if style.scopes else contextlib.nullcontext()


def dense(x: Any, weights: Any, style: Style) -> Any:
  return low(x, style) @ low(weights, style)


def layer_norm(x: Any, scale: Any, style: Style) -> Any:
  with scope(style, "norm"):
    y = wide(x)
    y = y - y.mean(-1, keepdims=True)
    return low(y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale, style)


def cross_entropy(logits: Any, labels: Any) -> Any:
  logp = jax.nn.log_softmax(wide(logits))
  return -jnp.take_along_axis(logp, labels[..., None], axis=-1).mean()


def _normal(*shape: int, seed: int = 0) -> Any:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _matrix(*shape: int, seed: int = 0) -> Any:
  return _normal(*shape, seed=seed) / np.sqrt(shape[-2], dtype=np.float32)


def _labels(*shape: int, below: int, seed: int = 9) -> Any:
  return np.random.default_rng(seed).integers(0, below, shape, np.int32)


def mlp(params: Any, batch: Any, style: Style = PLAIN) -> Any:
  """Dense layers with biases, norms and gelu."""
  x = batch["x"]
  for layer in params["layers"]:
    x = dense(x, layer["kernel"], style) + low(layer["bias"], style)
    x = jax.nn.gelu(layer_norm(x, layer["scale"], style))
  return cross_entropy(dense(x, params["head"], style), batch["y"])


def _mlp(size: int) -> tuple[Any, Any]:
  layers = [
    {
      "kernel": _matrix(size, size, seed=i),
      "bias": _normal(size, seed=i) / 4,
      "scale": np.ones(size, np.float32),
    }
    for i in range(3)
  ]
  params = {"layers": layers, "head": _matrix(size, 10, seed=7)}
  return params, {"x": _normal(size, size, seed=8), "y": _labels(size, below=10)}


def _convolve(x: Any, kernel: Any, style: Style, stride: int = 1) -> Any:
  numbers = ("NHWC", "HWIO", "NHWC")
  return jax.lax.conv_general_dilated(
    low(x, style), low(kernel, style), (stride, stride), "SAME", dimension_numbers=numbers
  )


def _batch_norm(x: Any, scale: Any, style: Style) -> Any:
  with scope(style, "norm"):
    y = wide(x)
    y = y - y.mean((0, 1, 2))
    return low(y * jax.lax.rsqrt((y * y).mean((0, 1, 2)) + 1e-5) * scale, style)


def resnet(params: Any, batch: Any, style: Style = PLAIN) -> Any:
  """Residual blocks of convolutions, their batch normalisation written out."""
  x = _convolve(batch["x"], params["stem"], style)
  for i, block in enumerate(params["blocks"]):
    stride = 1 + i % 2
    y = jax.nn.silu(_batch_norm(x, block["scale_1"], style))
    y = _convolve(y, block["kernel_1"], style, stride)
    y = jax.nn.silu(_batch_norm(y, block["scale_2"], style))
    y = _convolve(y, block["kernel_2"], style)
    x = _convolve(x, block["shortcut"], style, stride) + y
  x = wide(x).mean((1, 2))
  return cross_entropy(dense(x, params["head"], style), batch["y"])


def _resnet(size: int) -> tuple[Any, Any]:
  width = max(4, size // 8)

  def kernel(taps: int, seed: int) -> Any:
    return _normal(taps, taps, width, width, seed=seed) / np.float32(taps * np.sqrt(width))

  blocks = [
    {
      **{"kernel_1": kernel(3, 2 * i), "kernel_2": kernel(3, 2 * i + 1), "shortcut": kernel(1, i)},
      **{"scale_1": np.ones(width, np.float32), "scale_2": np.ones(width, np.float32)},
    }
    for i in range(3)
  ]
  stem = _normal(3, 3, 3, width, seed=7) / np.float32(np.sqrt(27))
  params = {"stem": stem, "blocks": blocks, "head": _matrix(width, 10, seed=8)}
  return params, {"x": _normal(8, 16, 16, 3, seed=9), "y": _labels(8, below=10)}


def attention(x: Any, layer: Any, style: Style, core: Any) -> Any:
  heads = 4
  q, k, v = jnp.split(dense(x, layer["qkv"], style), 3, axis=-1)
  q, k, v = (t.reshape(*t.shape[:2], heads, -1) for t in (q, k, v))
  return dense(core(q, k, v).reshape(x.shape), layer["out"], style)


def causal(q: Any, k: Any, v: Any) -> Any:
  scores = wide(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * q.shape[-1] ** -0.5
  seen = np.tril(np.ones(scores.shape[-2:], bool))
  weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min))
  return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def block(x: Any, layer: Any, style: Style, core: Any = causal) -> Any:
  x = x + attention(layer_norm(x, layer["norm_1"], style), layer, style, core)
  y = dense(layer_norm(x, layer["norm_2"], style), layer["up"], style) + low(layer["bias"], style)
  return x + dense(jax.nn.gelu(y), layer["down"], style)


def _language_model(params: Any, batch: Any, style: Style, stack: Callable[[Any], Any]) -> Any:
  with scope(style, "embed"):
    x = jnp.take(params["table"], batch["ids"], axis=0)
    x = low(x, style) + low(params["places"], style)
  x = stack(x)
  logits = dense(layer_norm(x, params["norm"], style), params["table"].T, style)
  return cross_entropy(logits[:, :-1], batch["ids"][:, 1:])


def transformer_loop(params: Any, batch: Any, style: Style = PLAIN, core: Any = causal) -> Any:
  """A causal language model, its layers one after the other, one table at both ends."""

  def stack(x: Any) -> Any:
    for i in range(3):
      x = block(x, jax.tree.map(lambda p, i=i: p[i], params["layers"]), style, core)
    return x

  return _language_model(params, batch, style, stack)


def transformer_scan(params: Any, batch: Any, style: Style = PLAIN) -> Any:
  """The same under `scan` and `checkpoint`."""

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(x: Any, layer: Any) -> Any:
    return block(x, layer, style), None

  return _language_model(params, batch, style, lambda x: jax.lax.scan(step, x, params["layers"])[0])


def _transformer(size: int) -> tuple[Any, Any]:
  layers = {
    **{"norm_1": np.ones((3, size), np.float32), "norm_2": np.ones((3, size), np.float32)},
    **{"qkv": _matrix(3, size, 3 * size, seed=1), "out": _matrix(3, size, size, seed=2)},
    **{"up": _matrix(3, size, 4 * size, seed=3), "bias": _normal(3, 4 * size, seed=4) / 4},
    "down": _matrix(3, 4 * size, size, seed=5),
  }
  length = size // 2
  params = {
    **{"table": _normal(50, size, seed=6), "places": _normal(length, size, seed=7) / 4},
    **{"layers": layers, "norm": np.ones(size, np.float32)},
  }
  return params, {"ids": _labels(4, length, below=50)}


def lstm(params: Any, batch: Any, style: Style = PLAIN) -> Any:
  """A recurrence over time with a float32 state, and a product at the end."""
  x = low(batch["x"], style)
  start = jnp.zeros((x.shape[0], params["hidden"].shape[0]), jnp.float32)

  def step(state: Any, x: Any) -> Any:
    cell, hidden = state
    gates = dense(x, params["in"], style) + dense(hidden, params["hidden"], style)
    i, f, g, o = jnp.split(gates + low(params["bias"], style), 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (cell, hidden), low(hidden, style)

  _, out = jax.lax.scan(step, (start, start), jnp.swapaxes(x, 0, 1))
  return cross_entropy(dense(out[-1], params["head"], style), batch["y"])


def _lstm(size: int) -> tuple[Any, Any]:
  params = {
    **{"in": _matrix(size, 4 * size, seed=1), "hidden": _matrix(size, 4 * size, seed=2)},
    **{"bias": _normal(4 * size, seed=3) / 4, "head": _matrix(size, 10, seed=4)},
  }
  return params, {"x": _normal(8, 12, size, seed=5), "y": _labels(8, below=10)}


# Attention with a backward pass of its own, which computes the weights again.


@jax.custom_vjp
def own_attention(q: Any, k: Any, v: Any) -> Any:
  return _own_forward(q, k, v)[0]


def _own_forward(q: Any, k: Any, v: Any) -> Any:
  scores = wide(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * q.shape[-1] ** -0.5
  largest = scores.max(-1, keepdims=True)
  weights = jnp.exp(scores - largest)
  total = weights.sum(-1, keepdims=True)
  out = jnp.einsum("bhqk,bkhd->bqhd", (weights / total).astype(v.dtype), v)
  return out, (q, k, v, largest + jnp.log(total))


def _own_backward(kept: Any, out_bar: Any) -> Any:
  q, k, v, log_total = kept
  scale = q.shape[-1] ** -0.5
  weights = jnp.exp(wide(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * scale - log_total)
  weights_bar = wide(jnp.einsum("bqhd,bkhd->bhqk", out_bar, v))
  inner = (weights * weights_bar).sum(-1, keepdims=True)
  scores_bar = (weights * (weights_bar - inner) * scale).astype(q.dtype)
  return (
    jnp.einsum("bhqk,bkhd->bqhd", scores_bar, k),
    jnp.einsum("bhqk,bqhd->bkhd", scores_bar, q),
    jnp.einsum("bhqk,bqhd->bkhd", weights.astype(v.dtype), out_bar),
  )


own_attention.defvjp(_own_forward, _own_backward)


def transformer_own_rule(params: Any, batch: Any, style: Style = PLAIN) -> Any:
  """The transformer with attention by `custom_vjp`."""
  return transformer_loop(params, batch, style, own_attention)


# A layer whose result is the fixed point of an equation, found and differentiated by iteration.


def _iterate(fun: Callable[[Any], Any], start: Any) -> Any:
  def unfinished(state: Any) -> Any:
    _, change, turns = state
    return (change > 1e-2) & (turns < 40)

  def turn(state: Any) -> Any:
    x, _, turns = state
    new = fun(x)
    return new, jnp.max(jnp.abs(new - x)), turns + 1

  return jax.lax.while_loop(unfinished, turn, (start, jnp.float32(jnp.inf), 0))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(fun: Any, params: Any, x: Any, start: Any) -> Any:
  return _iterate(lambda z: fun(params, x, z), start)


def _fixed_forward(fun: Any, params: Any, x: Any, start: Any) -> Any:
  z = _iterate(lambda z: fun(params, x, z), start)
  return z, (params, x, z)


def _fixed_backward(fun: Any, kept: Any, z_bar: Any) -> Any:
  params, x, z = kept
  _, pull = jax.vjp(lambda z: fun(params, x, z), z)
  solved = _iterate(lambda u: z_bar + pull(u)[0], z_bar)
  _, pull = jax.vjp(lambda params, x: fun(params, x, z), params, x)
  return (*pull(solved), jnp.zeros_like(z))


fixed_point.defvjp(_fixed_forward, _fixed_backward)


def solver(params: Any, batch: Any, style: Style = PLAIN) -> Any:
  """A layer that solves an equation in a `while_loop`, in float32 between products in style."""

  def turn(params: Any, x: Any, z: Any) -> Any:
    return jnp.tanh(wide(dense(z, params["state"], style)) + x)

  x = wide(dense(batch["x"], params["in"], style))
  z = fixed_point(turn, params, x, jnp.zeros_like(x))
  return cross_entropy(dense(z, params["head"], style), batch["y"])


def _solver(size: int) -> tuple[Any, Any]:
  params = {
    **{"in": _matrix(size, size, seed=1), "state": _matrix(size, size, seed=2) / 3},
    "head": _matrix(size, 10, seed=3),
  }
  return params, {"x": _normal(16, size, seed=4), "y": _labels(16, below=10)}


@functools.partial(jax.jit, static_argnums=2)
def _predict(params: Any, x: Any, style: Style) -> Any:
  x = jax.nn.silu(dense(x, params["in"], style) + low(params["bias"], style))
  return jax.nn.softmax(wide(dense(x, params["head"], style)))


def classifier(params: Any, batch: Any, style: Style = PLAIN) -> Any:
  """Probabilities from a function under `jit`, as libraries hand them out, then their entropy."""
  chances = _predict(params, batch["x"], style)
  return -jnp.log(jnp.take_along_axis(chances, batch["y"][:, None], axis=-1)).mean()


def _classifier(size: int) -> tuple[Any, Any]:
  params = {
    **{"in": _matrix(size, 2 * size, seed=1), "bias": _normal(2 * size, seed=2) / 4},
    "head": _matrix(2 * size, 10, seed=3),
  }
  return params, {"x": _normal(size, size, seed=4), "y": _labels(size, below=10)}


def experts(params: Any, batch: Any, style: Style = PLAIN) -> Any:
  """Each group of tokens goes to the expert of its choice by `switch`, in a `scan` over groups."""
  branches = [
    lambda x, up, down: dense(jax.nn.gelu(dense(x, up, style)), down, style),
    lambda x, up, down: dense(jnp.tanh(dense(x, up, style)), down, style),
  ]

  def one(_: Any, x: Any) -> Any:
    gates = jax.nn.softmax(wide(dense(x, params["router"], style)).mean(0))
    chosen = jnp.argmax(gates)
    out = jax.lax.switch(chosen, branches, x, params["up"], params["down"])
    return None, x + out * low(gates[chosen], style)

  out = jax.lax.scan(one, None, low(batch["x"], style))[1]
  return cross_entropy(dense(out, params["head"], style), batch["y"])


def _experts(size: int) -> tuple[Any, Any]:
  params = {
    **{"router": 4 * _matrix(size, 2, seed=1), "up": _matrix(size, 2 * size, seed=2)},
    **{"down": _matrix(2 * size, size, seed=3), "head": _matrix(size, 10, seed=4)},
  }
  return params, {"x": _normal(6, 4, size, seed=5), "y": _labels(6, 4, below=10)}


PROGRAMS: dict[str, Program] = {
  "mlp": Program(mlp, _mlp),
  "resnet": Program(resnet, _resnet),
  "transformer, loop": Program(transformer_loop, _transformer, attention=True),
  "transformer, scan and remat": Program(transformer_scan, _transformer, attention=True),
  "transformer, custom_vjp": Program(transformer_own_rule, _transformer, attention=True),
  "lstm, scan": Program(lstm, _lstm),
  "experts, switch": Program(experts, _experts),
  "fixed point, while": Program(solver, _solver),
  "classifier, jit": Program(classifier, _classifier),
}
