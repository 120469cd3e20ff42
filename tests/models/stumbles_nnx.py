"""Models of NNX around the functions of `stumbles`, as users write them: as in `stumbles_linen`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from tests.models import stumbles


def dense(inputs, features, rngs, hand=None, **options):
  return nnx.Linear(inputs, features, use_bias=False, dtype=hand, rngs=rngs, **options)


class Function(nnx.Module):
  """A function as a module of its own."""

  def __init__(self, name_of):
    self.name_of = name_of

  def __call__(self, *args):
    return getattr(stumbles, self.name_of)(*args)


class Rotary(nnx.Module):
  """Rotated queries: in the method itself, in a helper, or in a module of their own."""

  def __init__(self, place, *, rngs):
    self.place = place
    self.q = dense(16, 16, rngs)
    self.inner = Function("rope")

  def rope(self, q, angles):
    return stumbles.rope(q, angles)

  def __call__(self, x):
    rotate = {"inline": stumbles.rope, "helper": self.rope, "module": self.inner}[self.place]
    return rotate(self.q(x), stumbles.angles(jnp.arange(x.shape[0]), 16))


class TimeEmb(nnx.Module):
  def __init__(self, hand, rngs):
    self.dense = dense(32, 16, rngs, hand)

  def __call__(self, t):
    return self.dense(stumbles.sinusoid(t))


class Denoiser(nnx.Module):
  def __init__(self, hand=None, *, rngs):
    self.temb = TimeEmb(hand, rngs)
    self.first, self.last = dense(4, 16, rngs, hand), dense(16, 4, rngs, hand)

  def __call__(self, x, t):
    return self.last(nnx.silu(self.first(x) + self.temb(t)))


class Nerf(nnx.Module):
  def __init__(self, hand=None, *, rngs):
    self.rays, self.encode = Function("rays"), Function("encode")
    self.first, self.last = dense(51, 16, rngs, hand), dense(16, 4, rngs, hand)

  def __call__(self, origins, directions, t):
    h = self.encode(self.rays(origins, directions, t))
    return self.last(nnx.relu(self.first(h)))


class Deformable(nnx.Module):
  """Features between the places of a grid, moved by what is predicted."""

  def __init__(self, grid, *, rngs):
    self.grid = grid
    self.offsets, self.last = nnx.Linear(8, 1, rngs=rngs), dense(8, 4, rngs)
    self.interpolate = Function("interpolate")

  def __call__(self, features, grid):
    grid = stumbles.GRIDS.get(self.grid, lambda: grid)()
    sampled = self.interpolate(features, grid + self.offsets(features)[:, 0])
    return sampled, self.last(sampled)


class Detector(nnx.Module):
  """Boxes, as far as they are from their anchors, and what another layer makes of them."""

  def __init__(self, grid, *, rngs):
    self.grid = grid
    self.deltas, self.last = nnx.Linear(8, 4, rngs=rngs), dense(4, 4, rngs)
    self.decode = Function("decode")

  def __call__(self, features, anchors):
    anchors = stumbles.ANCHORS_BY.get(self.grid, lambda: anchors)()
    boxes = self.decode(anchors, self.deltas(features))
    return boxes - anchors, self.last(boxes)


class Ends(nnx.Module):
  """A classifier that returns probabilities, by a softmax of some kind."""

  def __init__(self, end, *, rngs):
    self.end = end
    self.logits, self.inner = dense(8, 10, rngs), Function("softmax")

  def softmax(self, x):
    return stumbles.softmax(x)

  def __call__(self, x):
    return {
      "by hand": stumbles.softmax,
      "by hand in a helper": self.softmax,
      "by hand in a module": self.inner,
      "of JAX": jax.nn.softmax,
    }[self.end](self.logits(x))


class EndsInLog(nnx.Module):
  def __init__(self, *, rngs):
    self.logits = dense(8, 10, rngs)

  def __call__(self, x):
    return jax.nn.log_softmax(self.logits(x))


class ActorCritic(nnx.Module):
  """That of Flax's PPO example, smaller, its dtypes as there."""

  def __init__(self, *, rngs):
    options = {"dtype": jnp.float32, "rngs": rngs}
    self.conv1 = nnx.Conv(4, 8, kernel_size=(8, 8), strides=(4, 4), **options)
    self.conv2 = nnx.Conv(8, 8, kernel_size=(4, 4), strides=(2, 2), **options)
    self.hidden = nnx.Linear(32, 16, **options)
    self.logits, self.value = nnx.Linear(16, 4, **options), nnx.Linear(16, 1, **options)

  def __call__(self, x):
    x = x.astype(jnp.float32) / 255.0
    x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
    x = nnx.relu(self.hidden(x.reshape((x.shape[0], -1))))
    return nnx.log_softmax(self.logits(x)), self.value(x)


class Attention(nnx.Module):
  def __init__(self, big, style, rngs):
    self.big, self.style = big, style
    self.q, self.k, self.v = (dense(8, 8, rngs) for _ in range(3))

  def __call__(self, x, valid):
    q, k, v = self.q(x), self.k(x), self.v(x)
    scores = jnp.einsum("btd,bsd->bts", q, k) / 8**0.5
    weights = jax.nn.softmax(stumbles.masked(scores, valid, self.big, self.style))
    return jnp.einsum("bts,bsd->btd", weights, v)


class Masked(nnx.Module):
  def __init__(self, big, style, *, rngs):
    self.attention, self.last = Attention(big, style, rngs), dense(8, 4, rngs)

  def __call__(self, x, valid):
    return self.last(x + self.attention(x, valid))


class Messages(nnx.Module):
  def __init__(self, rngs):
    self.dense = dense(1, 1, rngs)

  def __call__(self, x, ids):
    return jax.ops.segment_sum(x, ids, 2), jax.ops.segment_sum(self.dense(x), ids, 2)


class Graph(nnx.Module):
  def __init__(self, *, rngs):
    self.messages = Messages(rngs)

  def __call__(self, x, ids):
    return self.messages(x, ids)


class Whiten(nnx.Module):
  """A norm by another name."""

  def __init__(self, features):
    self.scale = nnx.Param(jnp.ones(features))

  def __call__(self, x):
    return stumbles.mean_square_norm(x) * self.scale.reshape(1, -1)


class Normed(nnx.Module):
  def __init__(self, *, rngs):
    self.norm, self.first, self.last = Whiten(16), dense(16, 16, rngs), dense(16, 4, rngs)

  def __call__(self, x):
    return self.last(self.norm(self.first(x)))


class Layer(nnx.Module):
  def __init__(self, rngs):
    self.dense, self.norm = dense(16, 16, rngs), Whiten(16)

  def __call__(self, x):
    y = self.dense(x)
    return y + 100 * self.norm(y)


class Stacked(nnx.Module):
  """Norms in a stack of layers."""

  def __init__(self, *, rngs):
    self.layers = nnx.split_rngs(splits=2)(nnx.vmap(Layer))(rngs)

  def __call__(self, x):
    scan = nnx.scan(lambda b, x: b(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return scan(self.layers, x)


class Table(nnx.Module):
  def __init__(self, rngs):
    self.table = nnx.Param(rngs.params.normal((4, 4)))

  def __call__(self, ids):
    return self.table[ids]


class Embedded(nnx.Module):
  def __init__(self, *, rngs):
    self.embed, self.last = Table(rngs), dense(4, 4, rngs)

  def __call__(self, ids):
    return self.last(self.embed(ids))


class Tied(nnx.Module):
  def __init__(self, how, *, rngs):
    self.how = how
    self.wte, self.mix = nnx.Embed(16, 8, rngs=rngs), dense(8, 8, rngs)

  def __call__(self, ids):
    x = jnp.tanh(self.mix(self.wte(ids)))
    return x @ self.wte.embedding.T if self.how == "embedding.T" else self.wte.attend(x)


class Activated(nnx.Module):
  def __init__(self, name_of, *, rngs):
    self.name_of = name_of
    self.first, self.last = dense(4, 4, rngs), dense(4, 4, rngs)

  def __call__(self, x):
    return self.last(stumbles.ACTIVATIONS[self.name_of](self.first(x)))


class Trained(nnx.Module):
  """A classifier that computes its own loss."""

  def __init__(self, place, *, rngs):
    self.place = place
    self.logits, self.inner = dense(4, 10, rngs), Function("cross_entropy")

  def loss(self, logits, labels):
    return stumbles.cross_entropy(logits, labels)

  def __call__(self, x, labels):
    loss = self.loss if self.place == "helper" else self.inner
    return loss(self.logits(x), labels)


class Multiply(nnx.Module):
  def __init__(self):
    self.w = nnx.Param(jnp.ones(()))

  def __call__(self, x):
    return x * self.w


class Shared(nnx.Module):
  """One layer, called for each of many rows."""

  def __init__(self, *, rngs):
    self.first, self.layer = dense(1, 1, rngs), Multiply()

  def __call__(self, x):
    h = self.first(x)
    return sum(jnp.sum(self.layer(h[i])) for i in range(x.shape[0]))


class Owner(nnx.Module):
  def __init__(self, *, rngs):
    self.w = nnx.Param(rngs.params.normal((16, 4)))

  def __call__(self, x):
    return x @ self.w


class Reader(nnx.Module):
  def __init__(self, other):
    self.other = other

  def __call__(self, x):
    return x @ self.other.w


class Precisely(nnx.Module):
  """A layer called under the policy and without it, and its weight read by another module."""

  def __init__(self, order, *, rngs):
    self.order, self.owner = order, Owner(rngs=rngs)
    self.reader = Reader(self.owner)

  def __call__(self, x):
    calls = {"half": self.owner, "full": mpjax.full_precision(self.owner), "read": self.reader}
    found = {name: calls[name](x) for name in self.order.split()}
    return found["half"], found["full"], found["read"]


class Fused(nnx.Module):
  """Attention by a kernel that takes nothing but half."""

  def __init__(self, kernel, hand, rngs):
    self.kernel = kernel
    self.q, self.k, self.v, self.out = (dense(16, 16, rngs, hand) for _ in range(4))

  def __call__(self, x):
    q, k, v = (layer(x).reshape(*x.shape[:2], 2, 8) for layer in (self.q, self.k, self.v))
    return self.out(getattr(stumbles, self.kernel)(q, k, v).reshape(x.shape))


class FusedBlock(nnx.Module):
  def __init__(self, kernel, hand=None, *, rngs):
    self.attention, self.last = Fused(kernel, hand, rngs), dense(16, 4, rngs, hand)

  def __call__(self, x):
    return self.last(x + self.attention(x))


class Headed(nnx.Module):
  def __init__(self, precision=None, *, rngs):
    self.body, self.head = dense(8, 6, rngs), dense(6, 5, rngs, precision=precision)

  def __call__(self, x):
    return self.head(jnp.tanh(self.body(x)))


class Looking(nnx.Module):
  """Its Python looks at the values of arrays."""

  def __init__(self, *, rngs):
    self.first, self.last = dense(4, 4, rngs), dense(4, 4, rngs)

  def __call__(self, x):
    h = self.first(x)
    if float(h.sum()) > 0:
      h = h * 2
    return h + 0 * float(np.asarray(h).max()), self.last(h)


class Affine(nnx.Module):
  def __init__(self, features):
    self.scale, self.shift = nnx.Param(jnp.ones(features)), nnx.Param(jnp.zeros(features))

  def __call__(self, x):
    return x * self.scale.reshape(1, -1) + self.shift.reshape(1, -1)


class Biased(nnx.Module):
  def __init__(self, *, rngs):
    self.dense, self.affine = nnx.Linear(4, 4, rngs=rngs), Affine(4)

  def __call__(self, x):
    return self.affine(self.dense(x))
