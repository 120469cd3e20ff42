"""Models of Linen around the functions of `stumbles`, as users write them.

`hand` is the dtype that their author would give to each layer by hand. `stumbles_nnx` has the same.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.models import stumbles

NORMAL = nn.initializers.normal()


def dense(features, hand=None, **options):
  return nn.Dense(features, use_bias=False, dtype=hand, **options)


class Function(nn.Module):
  """A function as a module of its own."""

  name_of: str

  @nn.compact
  def __call__(self, *args):
    return getattr(stumbles, self.name_of)(*args)


class Rotary(nn.Module):
  """Rotated queries: in the method itself, in a helper, or in a module of their own."""

  place: str

  def rope(self, q, angles):
    return stumbles.rope(q, angles)

  @nn.compact
  def __call__(self, x):
    q = dense(16, name="q")(x)
    rotate = {"inline": stumbles.rope, "helper": self.rope, "module": Function("rope")}[self.place]
    return rotate(q, stumbles.angles(jnp.arange(x.shape[0]), 16))


class TimeEmb(nn.Module):
  hand: str | None = None

  @nn.compact
  def __call__(self, t):
    return dense(16, self.hand)(stumbles.sinusoid(t))


class Denoiser(nn.Module):
  hand: str | None = None

  @nn.compact
  def __call__(self, x, t):
    h = dense(16, self.hand)(x) + TimeEmb(self.hand)(t)
    return dense(4, self.hand)(nn.silu(h))


class Nerf(nn.Module):
  hand: str | None = None

  @nn.compact
  def __call__(self, origins, directions, t):
    h = Function("encode")(Function("rays")(origins, directions, t))
    return dense(4, self.hand)(nn.relu(dense(16, self.hand)(h)))


class Deformable(nn.Module):
  """Features between the places of a grid, moved by what is predicted."""

  grid: str

  @nn.compact
  def __call__(self, features, grid):
    grid = stumbles.GRIDS.get(self.grid, lambda: grid)()
    offsets = nn.Dense(1)(features)[:, 0]
    sampled = Function("interpolate")(features, grid + offsets)
    return sampled, dense(4)(sampled)


class Detector(nn.Module):
  """Boxes, as far as they are from their anchors, and what another layer makes of them."""

  grid: str

  @nn.compact
  def __call__(self, features, anchors):
    anchors = stumbles.ANCHORS_BY.get(self.grid, lambda: anchors)()
    boxes = Function("decode")(anchors, nn.Dense(4)(features))
    return boxes - anchors, dense(4)(boxes)


class Ends(nn.Module):
  """A classifier that returns probabilities, by a softmax of some kind."""

  end: str

  def softmax(self, x):
    return stumbles.softmax(x)

  @nn.compact
  def __call__(self, x):
    logits = dense(10)(x)
    return {
      "by hand": stumbles.softmax,
      "by hand in a helper": self.softmax,
      "by hand in a module": Function("softmax"),
      "of JAX": jax.nn.softmax,
    }[self.end](logits)


class EndsInLog(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.log_softmax(dense(10)(x))


class ActorCritic(nn.Module):
  """That of Flax's PPO example, smaller, its dtypes as there."""

  @nn.compact
  def __call__(self, x):
    dtype = jnp.float32
    x = x.astype(dtype) / 255.0
    x = nn.relu(nn.Conv(8, kernel_size=(8, 8), strides=(4, 4), name="conv1", dtype=dtype)(x))
    x = nn.relu(nn.Conv(8, kernel_size=(4, 4), strides=(2, 2), name="conv2", dtype=dtype)(x))
    x = x.reshape((x.shape[0], -1))
    x = nn.relu(nn.Dense(16, name="hidden", dtype=dtype)(x))
    logits = nn.Dense(4, name="logits", dtype=dtype)(x)
    return nn.log_softmax(logits), nn.Dense(1, name="value", dtype=dtype)(x)


class Attention(nn.Module):
  big: float
  style: str

  @nn.compact
  def __call__(self, x, valid):
    q, k, v = (dense(8, name=name)(x) for name in "qkv")
    scores = jnp.einsum("btd,bsd->bts", q, k) / 8**0.5
    weights = jax.nn.softmax(stumbles.masked(scores, valid, self.big, self.style))
    return jnp.einsum("bts,bsd->btd", weights, v)


class Masked(nn.Module):
  big: float
  style: str

  @nn.compact
  def __call__(self, x, valid):
    return dense(4)(x + Attention(self.big, self.style)(x, valid))


class Messages(nn.Module):
  @nn.compact
  def __call__(self, x, ids):
    return jax.ops.segment_sum(x, ids, 2), jax.ops.segment_sum(dense(1)(x), ids, 2)


class Graph(nn.Module):
  @nn.compact
  def __call__(self, x, ids):
    return Messages()(x, ids)


class Whiten(nn.Module):
  """A norm by another name."""

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    return stumbles.mean_square_norm(x) * scale.reshape(1, -1)


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x):
    return dense(4)(Whiten()(dense(16)(x)))


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    y = dense(16)(x)
    return y + 100 * Whiten()(y), None


class Stacked(nn.Module):
  """Norms in a stack of layers."""

  @nn.compact
  def __call__(self, x):
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
    return nn.scan(Layer, **options)()(x, None)[0]


class Table(nn.Module):
  @nn.compact
  def __call__(self, ids):
    return self.param("table", NORMAL, (4, 4))[ids]


class Embedded(nn.Module):
  @nn.compact
  def __call__(self, ids):
    return dense(4)(Table()(ids))


class Tied(nn.Module):
  how: str

  def setup(self):
    self.wte = nn.Embed(16, 8)
    self.mix = dense(8)

  def __call__(self, ids):
    x = jnp.tanh(self.mix(self.wte(ids)))
    return x @ self.wte.embedding.T if self.how == "embedding.T" else self.wte.attend(x)


class Activated(nn.Module):
  name_of: str

  @nn.compact
  def __call__(self, x):
    return dense(4)(stumbles.ACTIVATIONS[self.name_of](dense(4)(x)))


class Trained(nn.Module):
  """A classifier that computes its own loss."""

  place: str

  def loss(self, logits, labels):
    return stumbles.cross_entropy(logits, labels)

  @nn.compact
  def __call__(self, x, labels):
    loss = self.loss if self.place == "helper" else Function("cross_entropy")
    return loss(dense(10)(x), labels)


class Multiply(nn.Module):
  def setup(self):
    self.w = self.param("w", nn.initializers.ones, ())

  def __call__(self, x):
    return x * self.w


class Shared(nn.Module):
  """One layer, called for each of many rows."""

  def setup(self):
    self.first, self.layer = dense(1), Multiply()

  def __call__(self, x):
    h = self.first(x)
    return sum(jnp.sum(self.layer(h[i])) for i in range(x.shape[0]))


class Owner(nn.Module):
  def setup(self):
    self.w = self.param("w", NORMAL, (16, 4))

  def __call__(self, x):
    return x @ self.w


class Reader(nn.Module):
  other: nn.Module

  def __call__(self, x):
    return x @ self.other.w


class Precisely(nn.Module):
  """A layer called under the policy and without it, and its weight read by another module."""

  order: str

  def setup(self):
    self.owner = Owner()
    self.reader = Reader(self.owner)

  def __call__(self, x):
    calls = {"half": self.owner, "full": mpjax.full_precision(self.owner), "read": self.reader}
    found = {name: calls[name](x) for name in self.order.split()}
    return found["half"], found["full"], found["read"]


class Fused(nn.Module):
  """Attention by a kernel that takes nothing but half."""

  kernel: str
  hand: str | None = None

  @nn.compact
  def __call__(self, x):
    q, k, v = (dense(16, self.hand, name=n)(x).reshape(*x.shape[:2], 2, 8) for n in "qkv")
    return dense(16, self.hand)(getattr(stumbles, self.kernel)(q, k, v).reshape(x.shape))


class FusedBlock(nn.Module):
  kernel: str
  hand: str | None = None

  @nn.compact
  def __call__(self, x):
    return dense(4, self.hand)(x + Fused(self.kernel, self.hand)(x))


class Headed(nn.Module):
  precision: str | None = None

  @nn.compact
  def __call__(self, x):
    return dense(5, name="head", precision=self.precision)(jnp.tanh(dense(6, name="body")(x)))


class Looking(nn.Module):
  """Its Python looks at the values of arrays."""

  @nn.compact
  def __call__(self, x):
    h = dense(4)(x)
    if float(h.sum()) > 0:
      h = h * 2
    return h + 0 * float(np.asarray(h).max()), dense(4)(h)


class Affine(nn.Module):
  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    shift = self.param("shift", nn.initializers.zeros, (x.shape[-1],))
    return x * scale.reshape(1, -1) + shift.reshape(1, -1)


class Biased(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Affine()(nn.Dense(4)(x))
