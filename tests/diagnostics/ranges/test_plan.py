import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._diagnostics.ranges.plan import Group, Input, plan

BF16 = jnp.dtype(jnp.bfloat16)


def planned(fn, *args):
  leaves = jax.tree.leaves(args)
  inputs = [  # The second argument is not returned under its path.
    Input(f"leaf{i}", i == 0, x.dtype, x.shape, ("wu"[i],)) for i, x in enumerate(leaves)
  ]
  flat = jax.tree.structure(args)
  program = jax.make_jaxpr(lambda *x: jax.tree.leaves(fn(*jax.tree.unflatten(flat, x))))(*leaves)
  return plan(program.jaxpr, inputs, [("w",)] * len(program.jaxpr.outvars))


def updated(fn, *args):
  found = planned(fn, *args)
  return [found.groups[one.row].path for one in found.additions.values()]


def test_activations_and_gradients_by_module_without_the_optimizer():
  def step(w, x):
    def loss(w):
      with jax.named_scope("layer"):
        return jnp.sum(jnp.tanh(x @ w))

    return w - 0.1 * jax.grad(loss)(w) ** 2

  found = planned(step, jnp.ones((3, 3)), jnp.ones((2, 3)))
  assert set(found.groups) == {
    Group("parameters", "leaf0"),
    Group("activations", "layer"),
    Group("gradients", "layer"),
    Group("updates", "leaf0"),
  }


STEPS = {
  "added": lambda p, u: optax.apply_updates(p, u),
  "subtracted": lambda p, u: p - u,
  "other order": lambda p, u: u + p,
  "jitted": jax.jit(lambda p, u: optax.apply_updates(p, u)),
  "clipped": lambda p, u: jnp.clip(p + u, -1, 1),
  "selected": lambda p, u: jnp.where(jnp.all(u == u), p + u, p),
  "skipped": lambda p, u: jax.lax.cond(jnp.all(u == u), lambda p: p + u, lambda p: p, p),
  "twice": lambda p, u: jax.lax.scan(lambda p, _: (p + u, None), p, None, 2)[0],
  "wide": lambda p, u: (p.astype(jnp.float32) + u.astype(jnp.float32)).astype(p.dtype),
}


def test_updates_are_found():
  p = jnp.ones(3, jnp.bfloat16)
  for name, step in STEPS.items():
    assert updated(step, p, p) == ["leaf0"], name


OTHERS = {
  "low rank": lambda w, u: (w + u) @ w,
  "decayed": lambda p, u: 0.9 * p + u,
  "broadcast": lambda p, u: p[0, 0] + u,
  "from it": lambda p, u: u - p,
  "unchanged": lambda p, u: p,
}


def test_what_is_no_update():
  p = jnp.ones((3, 3))
  for name, step in OTHERS.items():
    assert updated(step, p, 2 * p) == [], name


def test_what_is_only_moved_or_cast_is_not_counted_again():
  found = planned(lambda x: x.T.reshape(-1)[:2].astype(jnp.bfloat16), jnp.ones((2, 2)))
  assert not found.results
  assert found.dtypes == {np.dtype(np.float32)}


def test_what_remat_repeats_is_not_counted_again():
  @jax.checkpoint
  def layer(x):
    with jax.named_scope("layer"):
      return jnp.sin(jnp.sin(x))

  once = planned(lambda x: jnp.sum(layer(x)), jnp.ones(3))
  found = planned(jax.grad(lambda x: jnp.sum(layer(x))), jnp.ones(3))

  def sines(plan):
    return sum(plan.groups[row] == Group("activations", "layer") for row in plan.results.values())

  assert sines(once) == 2
  assert sines(found) <= 2
