"""Sequences, graphs and fields as research code writes them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.parts import dense, module

NORMAL = nn.initializers.normal(0.3)


def gated(x, gate, value, dilation):
  """One convolution over the past through a tanh, times another through a sigmoid."""

  def causal(kernel):
    padded = jnp.pad(x, ((0, 0), (dilation, 0), (0, 0)))
    return jax.lax.conv_general_dilated(
      padded, kernel, (1,), "VALID", None, (dilation,), dimension_numbers=("NWC", "WIO", "NWC")
    )

  gate = jax.nn.sigmoid(causal(gate))
  return jnp.tanh(causal(value)) * gate


def states_over_time(u, step, drive, log_decay, readout):
  """The diagonal state space: its state starts in float32, and is read at each time."""
  decay = jnp.exp(-step[..., None] * jnp.exp(log_decay)[None, None, None])

  def advance(state, now):
    decay, step, u, drive = now
    state = state * decay + (step * u)[..., None] * drive[:, None]
    return state, state.astype(u.dtype)

  start = jnp.zeros((u.shape[0], *decay.shape[2:]))
  over_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (decay, step, u, drive))
  _, states = jax.lax.scan(advance, start, over_time)
  return jnp.einsum("tbds,sd->btd", states, readout)


class WaveNet(nn.Module):
  """Dilated causal convolutions from raw parameters, gated, with skip connections."""

  @nn.compact
  def __call__(self, x):
    def kernel(name):
      return self.param(name, NORMAL, (2, 8, 8))

    x, skips = nn.Dense(8)(x), 0.0
    for i, dilation in enumerate((1, 2, 4)):
      h = gated(x, kernel(f"gate_{i}"), kernel(f"filter_{i}"), dilation)
      skips = skips + nn.Dense(8)(h)
      x = x + nn.Dense(8)(h)
    # Smooth: which slope a relu has depends on the last bit of what is nearly 0.
    return nn.Dense(4)(nn.silu(skips))


def _diagonal(m, u):
  """A diagonal state space with input-dependent gates, its state float32 through `lax.scan`."""
  step, drive = jax.nn.softplus(m.step(u)), m.drive(u)
  return states_over_time(u, step, drive, m.log_decay[...], m.readout[...])


STATE_SPACE = module(
  _diagonal,
  {
    "log_decay": (lambda _, shape: jnp.log(jnp.arange(1.0, shape[0] + 1)), (4,)),
    "readout": (NORMAL, (4, 8)),
  },
  step=dense(8, 8, bias=True),
  drive=dense(8, 4, bias=True),
)


class Mamba(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(8)(x)
    for _ in range(2):
      h = nn.RMSNorm()(x)
      x = x + nn.Dense(8)(
        STATE_SPACE.linen(None)(nn.silu(nn.Dense(8)(h))) * nn.silu(nn.Dense(8)(h))
      )
    return nn.Dense(8)(x)


class GraphNetwork(nn.Module):
  """Messages along edges, added up by segment; nodes are counted in integers."""

  steps: int = 2

  @nn.compact
  def __call__(self, nodes, edges, senders, receivers):
    count = nodes.shape[0]
    degree = jax.ops.segment_sum(jnp.ones_like(receivers), receivers, count)
    nodes = nn.Dense(8)(nodes)
    for _ in range(self.steps):
      messages = jnp.concatenate([nodes[senders], nodes[receivers], edges], axis=-1)
      messages = nn.Dense(8)(nn.silu(nn.Dense(16)(messages)))
      total = jax.ops.segment_sum(messages, receivers, num_segments=count)
      nodes = nodes + nn.Dense(8)(nn.silu(total / jnp.maximum(degree, 1)[:, None]))
    return nn.Dense(3)(nodes.sum(axis=0))


def _coloured(m, points):
  """A coordinate network: positional encoding, a skip connection, density and colour."""
  angles = points[..., None] * 2.0 ** np.arange(3)
  x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
  x = start = x.reshape(*points.shape[:-1], -1)
  x = nn.softplus(m.second(nn.softplus(m.first(x))))
  return m.head(nn.softplus(m.third(jnp.concatenate([x, start], axis=-1))))


FIELD = module(
  _coloured,
  first=dense(12, 16, bias=True),
  second=dense(16, 16, bias=True),
  third=dense(28, 16, bias=True),
  head=dense(16, 4, bias=True),
)


class Implicit(nn.Module):
  """A hypernetwork: a code becomes the parameters of a small network, called by its `.apply`."""

  @nn.compact
  def __call__(self, code, points):
    target = nn.Sequential([nn.Dense(8), jnp.tanh, nn.Dense(1)])
    shapes = jax.eval_shape(lambda: target.init(jax.random.key(0), points[0]))
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)]
    flat = nn.Dense(sum(sizes))(nn.tanh(nn.Dense(16)(code)))

    def network(flat, points):
      pieces = jnp.split(flat, np.cumsum(sizes)[:-1])
      leaves = [p.reshape(s.shape) for p, s in zip(pieces, jax.tree.leaves(shapes), strict=True)]
      return target.apply(jax.tree.unflatten(jax.tree.structure(shapes), leaves), points)

    return jax.vmap(network, (0, None))(flat, points)
