"""Autocast over, under and between the transformations of JAX; and side effects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import mpjax
from tests import programs
from tests.jaxprs.autocast import checks
from tests.jaxprs.autocast.programs import PROGRAMS, model
from tests.models.values import normal

pytestmark = pytest.mark.standard_promotion

HALF = "bfloat16"
BOUND = 1.6e-2

NAMES = ("custom_vjp_attention", "experts_by_branch", "solver_scan")
"""Programs with all kinds of bodies in them: a derivative rule, scan, cond, switch, map."""


def cast(fun):
  return mpjax.autocast(fun, HALF)


def loss_of(name):
  return lambda params, batch: model(name).fun(params, batch)[0]


def two(batch):
  """Returns two batches, stacked."""
  return jax.tree.map(lambda x: np.stack([x, x[::-1]]), batch)


def over_batches(fun):
  return jax.vmap(fun, (None, 0))


def in_a_scan(fun):
  """Returns `fun` of one batch after another, a float32 sum of all results beside them."""

  def scanned(params, batches):
    first = jax.tree.map(lambda x: x[0], batches)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(fun, params, first))

    def step(total, batch):
      found = fun(params, batch)
      return jax.tree.map(jnp.add, total, found), found

    total, each = jax.lax.scan(step, start, batches)
    return jax.tree.map(lambda t, x: jnp.concatenate([x, t[None]]), total, each)

  return scanned


LOSSES = {
  # name: (loss, batches) -> the loss of both batches
  "vmap": lambda f: over_batches(cast(f)),
  "autocast(jit(vmap))": lambda f: cast(jax.jit(over_batches(f))),
  "scan": lambda f: in_a_scan(cast(f)),
  "autocast(scan)": lambda f: cast(in_a_scan(f)),
  "autocast(autocast)": lambda f: over_batches(cast(cast(f))),
}

GRADIENTS = {
  # name: (loss, batches) -> the gradients of both batches
  "vmap(grad)": lambda f: over_batches(jax.grad(cast(f))),
  "autocast(vmap(grad))": lambda f: cast(over_batches(jax.grad(f))),
  "vmap(grad(jit))": lambda f: over_batches(jax.grad(jax.jit(cast(f)))),
  "vmap(grad(remat))": lambda f: over_batches(jax.grad(jax.checkpoint(cast(f)))),
  "vmap(grad(autocast(remat)))": lambda f: over_batches(jax.grad(cast(jax.checkpoint(f)))),
  "scan(grad)": lambda f: in_a_scan(jax.grad(cast(f))),
}

ORDERS = [(0, order) for order in LOSSES.values()] + [(1, order) for order in GRADIENTS.values()]


@functools.cache
def in_float32(name):
  """Returns losses and gradients of both batches, and then their sums."""
  _, params, batch = model(name)
  found = programs.run(over_batches(jax.value_and_grad(loss_of(name))), params, two(batch))
  return jax.tree.map(lambda x: np.concatenate([x, x.sum(0, keepdims=True)]), found)


@pytest.mark.parametrize(
  ("number", "part", "order"),
  [(number, *each) for number, each in enumerate(ORDERS)],
  ids=[*LOSSES, *GRADIENTS],
)
def test_losses_and_gradients_in_any_order(number, part, order):
  # All programs are traced, and each in turn is run.
  for name in NAMES:
    _, params, batch = model(name)
    traced = jax.jit(order(loss_of(name))).trace(params, two(batch))
    assert checks.halves(traced.jaxpr, HALF) == [], name
    assert {str(v.dtype) for v in traced.jaxpr.out_avals} == {"float32"}
    if name == NAMES[number % len(NAMES)]:
      got = programs.compiled(traced.lower())(params, two(batch))
      count = jax.tree.leaves(got)[0].shape[0]
      want = jax.tree.map(lambda x: x[:count], in_float32(name)[part])  # noqa: B023
      assert programs.error(got, want) <= BOUND * (2 if PROGRAMS[name].attention else 1)


# Side effects.


def test_callbacks_run_once_and_in_order():
  seen = []

  def note(where, x):
    seen.append((where, str(x.dtype), x.shape))
    return np.zeros((), np.int32)

  def say(where, x):
    io_callback(
      functools.partial(note, where), jax.ShapeDtypeStruct((), jnp.int32), x, ordered=True
    )

  def fun(w, x):
    h = x @ w
    say("product", h)

    def step(c, _):
      c = jnp.tanh(c @ w)
      say("step", c)
      return c, None

    h, _ = jax.lax.scan(step, h, None, length=2)
    say("sum", jnp.exp(h).sum())

    def taken(h):
      say("branch", h)
      return h @ w

    return jax.lax.cond(h.sum() > -1e3, taken, lambda h: h, h).sum()

  args = (normal(4, 4) / 4, normal(3, 4, seed=1))
  for make in (lambda f: f, jax.jit):
    found = []
    for each in (fun, cast(fun)):
      seen.clear()
      jax.block_until_ready(make(each)(*args))
      jax.effects_barrier()
      found.append(list(seen))
    plain, ours = found
    names = ["product", "step", "step", "sum", "branch"]
    assert [where for where, *_ in plain] == names
    assert ours == plain


def test_prints_and_debug_callbacks_run_once(capfd):
  seen = []

  def fun(w, x):
    h = x @ w
    jax.debug.print("h {}", h.shape[0] * h[0, 0], ordered=True)
    jax.debug.callback(lambda x: seen.append(x.dtype), h, ordered=True)
    return jax.checkpoint(jnp.tanh)(h).sum()

  eye = np.eye(3, dtype=np.float32)
  for make in (cast, lambda f: jax.jit(cast(f)), lambda f: jax.grad(cast(f))):
    seen.clear()
    jax.block_until_ready(make(fun)(eye, eye))
    jax.effects_barrier()
    assert capfd.readouterr().out == "h 3.0\n"
    assert seen == [np.dtype("float32")]
