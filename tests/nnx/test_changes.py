"""What a call sets on a view's modules is the user's: containers, flags and what is in them."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.models.values import normal
from tests.programs import bits

pytestmark = pytest.mark.standard_promotion("dtypes")

with_policy = mpjax.nnx.with_policy

X8 = jnp.asarray(normal(2, 8))


class Holds(nnx.Module):
  def __init__(self, rngs):
    self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
    self.items, self.pair = nnx.List([jnp.zeros(()), self.a]), nnx.data((jnp.zeros(()),))
    self.named = nnx.Dict(n=jnp.zeros(()), of=nnx.List([1]))

  def __call__(self, x):
    self.a, self.b = self.b, self.a
    self.items[0] += 1
    self.items[1] = self.a
    self.items.extend([nnx.Cache(jnp.sign(x)), nnx.Dropout(0.5)])
    self.named["n"] += 1
    self.named["of"].append(2)
    self.pair = nnx.data((self.pair[0] + 1,))
    self.new = self.again = nnx.Dict(x=nnx.List([nnx.Cache(jnp.ones(()))]))
    return self.a(x)


@pytest.mark.parametrize("way", ["a view for each call", "in jit", "one view"])
def test_what_a_call_puts_into_containers_and_rebinds_is_the_models(way):
  plain, model = Holds(nnx.Rngs(0)), Holds(nnx.Rngs(0))
  view = mpjax.with_policy(model, "mixed_bfloat16") if way == "one view" else None
  step = lambda m: (view or mpjax.with_policy(m, "mixed_bfloat16"))(jnp.ones((1, 8)))  # noqa: E731
  step = nnx.jit(step) if way == "in jit" else step
  for _ in range(3):
    plain(jnp.ones((1, 8)))
    step(model)
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    assert bits(nnx.to_pure_dict(nnx.state(model))) == bits(nnx.to_pure_dict(nnx.state(plain)))


class Heads(nnx.Module):
  """Heads in an order of their own; a flag and a list of Python that calls change."""

  def __init__(self):
    self.heads = nnx.Dict(**{k: nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i, k in enumerate("za")})
    self.ready, self.history = False, []
    self.scale = nnx.BatchStat(jnp.ones(()))

  def __call__(self, x):
    first, second = (head(x) for head in self.heads.values())
    if not self.ready:
      self.scale[...] = jnp.std(first)
      self.ready = True
    self.history.append(first.mean())
    return first / self.scale[...], second


@pytest.mark.parametrize("jitted", [False, True])
def test_what_is_plain_python_in_a_module_is_as_without_a_policy(jitted):
  # A dict of modules keeps its order, and a flag that a call sets (ActNorm) is set.
  ours, plain = Heads(), Heads()
  assert list(with_policy(ours, "c=bf16").heads) == list(plain.heads) == ["z", "a"]

  def under(model, x):
    return with_policy(model, "c=bf16")(x)

  steps = [under, Heads.__call__]
  if jitted:  # A list is static: what is in it would be compiled in.
    steps = [nnx.jit(lambda m, x, f=f: (f(m, x), m.history.clear())[0]) for f in steps]
  for scale in (1, 5, 9):
    found, wanted = (f(m, scale * X8) for f, m in zip(steps, (ours, plain), strict=True))
    for x, y in zip(found, wanted, strict=True):
      np.testing.assert_allclose(x, y, atol=0.02 * float(jnp.abs(y).max()))
  assert ours.ready is plain.ready is True
  assert len(ours.history) == len(plain.history) == (0 if jitted else 3)
  np.testing.assert_allclose(ours.history, plain.history, rtol=0.05)


class Counts(nnx.Module):
  """Arrays in containers of Python that NNX takes for data, and a count of Python."""

  def __init__(self, looks):
    self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    self.named, self.listed = nnx.data({"n": jnp.zeros(())}), nnx.data([jnp.zeros(())])
    self.looks, self.calls = looks, 0

  def __call__(self, x):
    self.named["n"] += 1
    self.listed[0] += 1
    self.calls += 1
    y = self.layer(x) * self.named["n"]
    return y if not self.looks or float(y.sum()) < 1e9 else None


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.filterwarnings("ignore:mpjax.with_policy:UserWarning")
def test_python_containers_that_a_call_changes_belong_to_the_model(looks):
  # Where it is traced, and where it runs as Python, which looks at values twice.
  model, plain = Counts(looks), Counts(False)
  kept = model.named
  for _ in range(3):
    out, wanted = with_policy(model, "mixed_bfloat16")(X8), plain(X8)
  np.testing.assert_allclose(out, wanted, atol=0.05)
  assert model.named is kept
  assert (float(kept["n"]), float(model.listed[0]), model.calls) == (3, 3, 3)
