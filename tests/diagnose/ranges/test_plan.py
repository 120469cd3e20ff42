import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from mpjax._diagnose.call import Argument, Call
from mpjax._diagnose.ranges.low_steps import programs_of
from mpjax._diagnose.ranges.plan import plan


def planned(fn, *args):
  leaves = jax.tree.leaves(args)
  # The second argument is not returned under its path.
  inputs = [Argument(f"leaf{i}", ("wu"[i],), i == 0, False) for i in range(len(leaves))]
  flat = jax.tree.structure(args)
  call = Call(tuple(leaves), {})

  def run(*leaves):
    return jax.tree.leaves(fn(*jax.tree.unflatten(flat, leaves)))

  programs = programs_of(call.traced(run), call.arguments(run))
  return plan(programs.body, inputs, programs.low, [("w",)] * len(programs.outputs))


def updated(fn, *args):
  counted = planned(fn, *args)
  return [counted.steps[number][1] for number in counted.additions]


def test_activations_and_gradients_by_module_without_the_optimizer():
  def step(w, x):
    def loss(w):
      with jax.named_scope("layer"):
        return jnp.sum(jnp.tanh(x @ w))

    return w - 0.1 * jax.grad(loss)(w) ** 2

  counted = planned(step, jnp.ones((8, 8)), jnp.ones((8, 8)))
  assert set(counted.steps.values()) == {
    ("activations", "layer"),
    ("gradients", "layer"),
    ("float32", "layer"),  # The sum.
    ("updates", "leaf0"),
  }
  assert counted.inputs == {0: ("parameters", "leaf0")}
  assert [counted.steps[number][0] for number in counted.additions] == ["updates"]


def test_a_model_that_runs_again_after_the_update_is_no_optimizer():
  def loss(w, x):
    with jax.named_scope("layer"):
      return jnp.sum(jnp.tanh(x @ w))

  def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)

  def and_loss(w, x):
    w = step(w, x)
    return w, loss(w, x)

  x = jnp.ones((8, 8))
  once, again = (len(planned(fn, x, x).steps) for fn in (step, and_loss))
  assert again == once + 3  # The matmul, the tanh and the sum.


N = 8
"""The fewest products that a matmul of low precision sums."""


def mask(n):
  return jnp.where(jnp.tril(jnp.ones((n, n), bool)), 0.0, -1e9)


ROLES = {  # In float32, of matmuls that a policy runs in low precision: what follows the matmul.
  "result": (lambda y: y, [True]),
  "activation": (lambda y: jnp.tanh(y) @ y, [True, True, True]),
  "returned": (lambda y: jnp.tanh(y), [True, False]),
  "residual": (lambda y: (y + jnp.tanh(y)) @ y, [True, False, True, True]),
  "relu": (lambda y: jnp.maximum(y, 0) @ y, [True, True, True]),
  "exact factor": (lambda y: (y / 8) @ y, [True, True, True]),
  "sum": (lambda y: jnp.sum(y), [True, False]),
  "exp": (lambda y: jnp.exp(y) * 2, [True, False, False]),
  "exp, and a matmul": (lambda y: jnp.exp(y) @ y, [True, True, True]),
  "masked": (lambda y: 2 * jnp.where(y > 0, y, -1e9), [True, False]),
  "mask that is added": (lambda y: y + mask(N), [True, False]),
  "mask": (lambda y: (y, mask(N) * 2), [True, False]),
  "positions": (lambda y: (y, jnp.arange(3.0) * 2), [True, False, False]),
  "angles": (lambda y: (y, jnp.einsum("i,j->ij", *[jnp.arange(3.0)] * 2)), [True, False, False]),
  "in a loop": (
    lambda y: jax.lax.scan(lambda c, _: (c @ y, None), y * 0, None, 2)[0],
    [True] * 3,
  ),
  "carried": (
    lambda y: jax.lax.scan(lambda c, _: (c @ y, None), jnp.zeros((N, N)), None, 2)[0],
    [True, True],
  ),
  "of a branch": (
    lambda y: jax.lax.cond(y[0, 0] > 0, jnp.tanh, jnp.exp, y) @ y,
    [True, True, True, True],
  ),
}


@pytest.mark.parametrize(("fn", "low"), ROLES.values(), ids=ROLES)
def test_what_a_policy_would_hold_in_low_precision(fn, low):
  counted = planned(lambda w, x: fn(x @ w), jnp.ones((N, N)), jnp.ones((N, N)))
  floats = [counted.steps[key][0] == "activations" for key in sorted(counted.steps)]
  assert floats == low


def test_arrays_that_a_function_closes_over_have_the_roles_of_parameters():
  scale, mask = jnp.asarray(2.0), jnp.asarray(-1e9)

  def model(w, tokens):
    y = w[tokens] @ w
    return (y * scale) @ w, y + mask  # Float16 does not have the number of the mask.

  tokens = jnp.arange(N)
  for dtype in (jnp.float32, jnp.bfloat16):
    w = jnp.ones((N, N), dtype)
    argument = planned(model, w, tokens).steps
    closed_over = planned(lambda tokens, w=w: model(w, tokens), tokens).steps
    kinds = [argument[number].kind for number in sorted(argument)]
    assert [closed_over[number].kind for number in sorted(closed_over)] == kinds
    assert kinds[:3] == ["activations"] * 3


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


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_updates_are_found(step):
  p = jnp.ones(3, jnp.bfloat16)
  assert updated(step, p, p) == ["leaf0"]


OTHERS = {
  "low rank": lambda w, u: (w + u) @ w,
  "decayed": lambda p, u: 0.9 * p + u,
  "broadcast": lambda p, u: p[0, 0] + u,
  "from it": lambda p, u: u - p,
  "unchanged": lambda p, u: p,
}


@pytest.mark.parametrize("step", OTHERS.values(), ids=OTHERS)
def test_what_is_no_update(step):
  p = jnp.ones((3, 3))
  assert updated(step, p, 2 * p) == []


def gathered(x):
  """Casts a copy for each device, which computes nothing, and gathers them."""
  mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  local = lambda x: jax.lax.all_gather(jax.lax.pcast(x, "i", to="varying"), "i")  # noqa: E731
  return jax.shard_map(local, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("i"))(x)


MOVES = {
  "moved and cast": lambda x: x.T.reshape(-1)[:2].astype(jnp.bfloat16),
  "named": lambda x: checkpoint_name(x, "x"),
  "repeated": lambda x: jnp.tile(x, (2, 1)),
  "written": lambda x: jax.lax.dynamic_update_slice(jnp.zeros((4, 4)), x, (0, 0)),
  "sorted": jnp.sort,
  "padded": lambda x: jnp.pad(x, 1),
  "sent": gathered,
}


@pytest.mark.parametrize("fn", MOVES.values(), ids=MOVES)
def test_what_is_only_moved_sorted_or_cast_is_not_counted_again(fn):
  assert not planned(fn, jnp.ones((2, 2))).steps


def test_what_is_computed_is_counted():
  assert planned(lambda x: jnp.maximum(x, 0), jnp.ones((2, 2))).steps


def test_what_remat_repeats_is_not_counted_again():
  @jax.checkpoint
  def layer(x):
    with jax.named_scope("layer"):
      return jnp.tanh(x @ x) @ x

  def activations(fn):
    groups = planned(fn, jnp.ones((N, N))).steps.values()
    return sum(group == ("activations", "layer") for group in groups)

  assert activations(lambda x: jnp.sum(layer(x))) == 3
  assert activations(jax.grad(lambda x: jnp.sum(layer(x)))) <= 3
