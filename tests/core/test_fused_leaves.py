"""Leaves of one size together, as on a GPU: the same bits as one by one, and nothing gathered."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax._core import fused_leaves
from mpjax._core.fused_leaves import first_nonfinite
from mpjax._core.trees import all_finite, select
from tests import partitioned, programs

DTYPES = ("float32", "bfloat16", "float16", "complex64", "int32", "float8_e5m2")
SHAPES = ((), (3,), (2, 3), (6,), (3, 2), (0, 4), (1,))


def as_on_gpu(operand, on_gpu, elsewhere):
  return on_gpu(operand)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
  monkeypatch.setattr(fused_leaves, "_on_gpu", as_on_gpu)


@pytest.fixture(params=["one by one", "together"])
def both(request):
  """Runs what a CPU is given, and on it what a GPU is given."""
  if request.param == "together":
    request.getfixturevalue("as_on_a_gpu")


def fresh(fun):
  """Returns `fun` jitted anew: JAX keeps what it traced of a function, patched or not."""
  return jax.jit(lambda *args: fun(*args))


def primitives(jaxpr):
  return collections.Counter(eqn.primitive.name for eqn, _ in programs.equations(jaxpr))


def leaves_of(rng, count):
  """Returns random finite leaves of all dtypes and shapes."""
  found = []
  for _ in range(count):
    x = rng.standard_normal(SHAPES[rng.integers(len(SHAPES))]) * 8
    found.append(x.astype(jnp.dtype(DTYPES[rng.integers(len(DTYPES))])))
  return found


def with_one(x, value, index):
  """Returns a copy with a number at an index of the flat array; None where it cannot hold one."""
  if x.size == 0 or not jnp.issubdtype(x.dtype, jnp.inexact):
    return None
  new = np.array(x)
  new.reshape(-1)[index] = value * 1j if new.dtype.kind == "c" else value
  return new


def oracle(leaves):
  bad = [
    i
    for i, x in enumerate(leaves)
    if jnp.issubdtype(x.dtype, jnp.inexact) and not np.isfinite(x.astype(np.complex128)).all()
  ]
  return min(bad, default=len(leaves))


def test_the_first_bad_leaf_is_numpys(both):
  rng = np.random.default_rng(0)
  leaves = leaves_of(rng, 80)
  find = fresh(first_nonfinite)
  assert find(leaves) == oracle(leaves) == len(leaves)
  assert first_nonfinite([]) == 0
  assert first_nonfinite([jnp.ones(2)]).dtype == jnp.int32
  for value in (np.nan, np.inf, -np.inf):
    for i, x in enumerate(leaves):
      for index in (0, -1):
        if (new := with_one(x, value, index)) is not None:
          assert find([*leaves[:i], new, *leaves[i + 1 :]]) == i
    several = list(leaves)
    for i in rng.permutation(len(leaves))[:20]:
      several[i] = x if (x := with_one(leaves[i], value, 0)) is not None else leaves[i]
      assert find(several) == oracle(several)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_more_leaves_than_one_reduction_takes_and_longer_ones_than_a_row():
  find = fresh(first_nonfinite)
  clean = [jnp.ones(5)] * 100
  assert find(clean) == 100
  for i in (0, 31, 32, 63, 64, 98, 99):
    assert find([*clean[:i], clean[i].at[4].set(jnp.nan), *clean[i + 1 :]]) == i
  # A bad element at each end of each row, of leaves that fill their last row and that do not.
  sizes = (
    1,
    fused_leaves._ROW - 1,
    fused_leaves._ROW,
    fused_leaves._ROW + 1,
    3 * fused_leaves._ROW,
    0,
    2,
  )
  clean = [np.ones(n, np.float32) for n in sizes]
  assert find(clean) == len(sizes)
  for i, n in enumerate(sizes):
    for index in {0, fused_leaves._ROW - 1, fused_leaves._ROW, n - 1} & set(range(n)):
      assert find([*clean[:i], with_one(clean[i], np.nan, index), *clean[i + 1 :]]) == i


def test_a_sum_of_squares_is_numpys(both):
  # Of leaves in low precision too, whose squares may be more than their dtype holds.
  rng = np.random.default_rng(0)
  found = [x for x in leaves_of(rng, 60) if jnp.issubdtype(x.dtype, jnp.floating)]
  leaves = [x for x in found if x.dtype != "float8_e5m2"] + [np.full(3000, 300.0, np.float16)] * 2
  wanted = sum(np.sum(x.astype(np.float64) ** 2) for x in leaves)
  got = fresh(fused_leaves.sum_of_squares)(list(map(jnp.asarray, leaves)))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("members", [None, 3])
def test_a_step_keeps_or_moves_the_same_bits(members, monkeypatch):
  # Of every leaf at once, in dtypes that share a size, under `vmap` and with donated buffers.
  shapes = {"a": (4,), "b": (4,), "c": (2, 2), "d": (2, 2), "e": (), "f": (4,)}
  dtypes = dict.fromkeys(shapes, "float32") | {"b": "bfloat16", "d": "float16", "f": "int32"}
  params = {k: jnp.ones(s, dtypes[k]) for k, s in shapes.items()}
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.adamw(0.5)), mpjax.DynamicLossScale())
  grads = {k: np.full(s, 3.0, "float32") for k, s in shapes.items() if k != "f"}
  grads["f"] = None if members else np.zeros(shapes["f"], jax.dtypes.float0)

  def gradients(name):
    own = {**grads}
    if name:
      own[name] = own[name].copy()
      own[name].reshape(-1)[0] = np.inf
    if not members:
      return own
    return jax.tree.map(lambda g: np.stack([g, np.full_like(g, 2.0), g]), own)

  def compiled():
    update = lambda g, s, p: tx.update(g, s, p)  # noqa: E731
    if members:
      return jax.jit(jax.vmap(update, in_axes=(0, None, None)))
    return jax.jit(update, donate_argnums=1)

  names = (None, *(name for name in grads if name != "f"))
  plain_step, grouped_step = compiled(), compiled()
  plain = {name: plain_step(gradients(name), tx.init(params), params) for name in names}
  monkeypatch.setattr(fused_leaves, "_on_gpu", as_on_gpu)
  for name in names:
    grouped = grouped_step(gradients(name), tx.init(params), params)
    assert programs.bits(plain[name]) == programs.bits(grouped)
    finite = mpjax.loss_scaling_metrics(grouped[1])["finite"]
    alone = name is None
    assert finite.tolist() == (alone if not members else [alone, True, alone])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_scalars_that_are_read_from_one_array_keep_their_bits():
  # NaN with its payload, -0.0 and subnormal numbers too: an array of integers carries them.
  bits = [0, 1, 0x80000000, 0x7FC00001, 0xFF800000, 0x3F800000, 0x00400000]
  given = [
    *(jnp.asarray(np.uint32(b).view(np.float32)) for b in bits),
    *(jnp.asarray(True), jnp.asarray(False)),
    *(jnp.asarray(2**31 - 1, jnp.int32), jnp.asarray(-(2**31), jnp.int32)),
  ]
  read = fresh(fused_leaves.read_together)(given)
  assert programs.bits(read) == programs.bits(given)
  mapped = fresh(jax.vmap(fused_leaves.read_together))(jax.tree.map(lambda x: x[None], given))
  assert programs.bits(jax.tree.map(lambda x: x[0], mapped)) == programs.bits(given)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_scalars_of_a_shard_map_stay_what_they_are(devices):
  # In one array with what varies, a count that does not would vary as well.
  mesh = jax.make_mesh((4,), ("x",), devices=devices, axis_types=(AxisType.Auto,))

  def read(count, flags):
    count, flag = fused_leaves.read_together([count, flags[0]])
    return count, flag[None]

  specs = (P(), P("x"))
  mapped = jax.jit(jax.shard_map(read, mesh=mesh, in_specs=specs, out_specs=specs))
  flags = jnp.asarray([True, False, True, False])
  count, found = mapped(jnp.asarray(7, jnp.int32), flags)
  assert count == 7
  assert (found == flags).all()


def test_it_is_decided_where_it_is_lowered_and_leaves_no_branch():
  # Sizes 6 (of two shapes), 4, and 5: one reduction for a GPU, seven for a CPU.
  shapes = [(2, 3), (4,), (3, 2), (4,), (2, 3), (5,), (4,)]
  args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  find = lambda *leaves: first_nonfinite(leaves)  # noqa: E731

  def count(text, fun, *args):
    traced, platforms = jax.jit(fun).trace(*args), ("cpu", "cuda", "rocm", "tpu")
    return [traced.lower(lowering_platforms=(p,)).as_text().count(text) for p in platforms]

  assert count("applies stablehlo.and", find, *args) == [7, 1, 1, 7]
  compiled = jax.jit(find).lower(*args).compile().as_text()
  assert "conditional" not in compiled
  assert "concatenate" not in compiled
  # Small leaves of which several have one shape share a mask on a GPU.
  shapes = {"a": (4,), "b": (4,), "c": (2, 2), "d": (2, 2), "alone": (5,), "number": ()}
  shapes |= {"large": (2**9, 2**8), "larger": (2**9, 2**8), "empty": (0,), "nothing": (0,)}
  tree = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
  flag = jax.ShapeDtypeStruct((), jnp.bool_)
  pick = functools.partial(select, where="here")
  assert count("optimization_barrier", pick, flag, tree, tree) == [0, 1, 1, 0]
  # Outside of `jit` nothing is compiled for it.
  leaves = [jnp.ones(3), jnp.ones(3), jnp.asarray([1.0, jnp.nan, 1.0])]
  jaxpr = jax.make_jaxpr(lambda: first_nonfinite(leaves))()
  assert "platform_index" not in primitives(jaxpr)
  assert first_nonfinite(leaves) == 2


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_functions_of_symbolic_shapes_are_exported(platform):
  # A length that is a symbol is neither compared nor divided into rows.
  rows = jax.export.symbolic_shape("n, 3")
  tree = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (rows, (3,), rows, (3,))]

  def look(*leaves):
    finite = all_finite(leaves)
    return (
      finite,
      fused_leaves.sum_of_squares(leaves),
      select(finite, leaves[:2], leaves[2:], "here"),
    )

  exported = jax.export.export(jax.jit(look), platforms=[platform])(*tree)
  if platform == "cpu":
    for bad in (0, np.nan):
      finite, squares, chosen = exported.call(
        np.full((5, 3), bad, "f"), *[np.ones(s, "f") for s in [3, (5, 3), 3]]
      )
      assert finite == (bad == 0)
      np.testing.assert_array_equal(squares, 21 + bad)
      np.testing.assert_array_equal(chosen[0], np.full((5, 3), 0 if finite else 1))


SPECS = {"rows": P("x"), "columns": P(None, "x"), "both": P("x", "y"), "all": P(), "all2": P()}


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_leaves_on_a_mesh_are_not_gathered(devices, kind):
  # Of one shape, divided differently, in a step that looks at them all; nor for their norm.
  #
  # For that beside leaves that are not divided, and that are in one array where axes are Explicit.
  mesh = jax.make_mesh((2, 2), ("x", "y"), devices=devices, axis_types=(kind, kind))
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
  params = {k: place(jnp.ones((8, 8)), spec) for k, spec in SPECS.items()}
  tx = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), mpjax.DynamicLossScale(init_scale=1.0))
  state = tx.init(params)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  leaves = [*params.values(), place(jnp.ones((4, 6)), P(None, "y"))]
  norm = lambda *leaves: fused_leaves.sum_of_squares(leaves)  # noqa: E731
  for fun, args in ((step, (params, state, params)), (norm, leaves)):
    found = partitioned.collectives(fun, *args)
    assert {(each.op, math.prod(each.shape)) for each in found} == {("all-reduce", 1)}
  assert fresh(norm)(*leaves) == 5 * 64 + 24
  step = jax.jit(step)
  for name in params:
    bad = np.ones((8, 8), "float32")
    bad[7, 7] = np.inf
    grads = params | {name: jax.device_put(bad, params[name].sharding)}
    _, new = step(params, state, grads)
    assert not mpjax.loss_scaling_metrics(new)["finite"]
    with pytest.raises(mpjax.errors.MpjaxRuntimeError, match=name):
      mpjax.check_skipped_steps(new, 1, params=params)


def test_leaves_on_an_explicit_mesh_of_one_device_are_updated():
  # JAX refuses to ravel an array along an explicit axis, even if that axis has one device.
  mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    params = {name: jnp.ones((4, 8), out_sharding=P("x", "y")) for name in "ab"}
    tx = mpjax.loss_scaling(optax.sgd(0.5))
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
  assert jax.tree.all(jax.tree.map(lambda x: bool((x == -0.5).all()), updates))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("check_vma", [True, False])
def test_within_shard_map_what_a_device_has_is_looked_at_together(devices, check_vma):
  # Leaves that vary along different axes of the mesh are stacked all the same.
  mesh = jax.make_mesh((2, 2), ("x", "y"), devices=devices, axis_types=(AxisType.Auto,) * 2)
  specs = {"a": P("x"), "b": P("y"), "c": P(), "d": P(("x", "y"))}

  def look(tree):
    return jax.lax.pmin(first_nonfinite(jax.tree.leaves(tree)), ("x", "y"))

  mapped = jax.shard_map(look, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma)
  sizes = {"a": 8, "b": 8, "c": 4, "d": 16}
  clean = {k: jnp.ones(n) for k, n in sizes.items()}
  jaxpr = jax.make_jaxpr(mapped)(clean)
  counted = primitives(jaxpr)
  assert counted["reduce_and"] == 1
  assert jax.jit(mapped)(clean) == 4
  for i, name in enumerate(sizes):
    assert jax.jit(mapped)(clean | {name: clean[name].at[-1].set(jnp.nan)}) == i


def test_a_step_can_be_differentiated_as_before(both):
  # A meta-gradient: through the choice, with respect to the parameters.
  tx = mpjax.loss_scaling(optax.sgd(0.25), mpjax.StaticLossScale(2))
  params = [jnp.ones(3), jnp.full(3, 2.0)]

  def loss(params):
    updates, _ = tx.update(params, tx.init(params), params)
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(optax.apply_updates(params, updates)))

  grads = jax.jit(jax.grad(loss))(params)
  # p - 0.25 p is 0.75 p, and the derivative of its square 2 * 0.75 ** 2 p.
  np.testing.assert_allclose(grads, [[1.125] * 3, [2.25] * 3], rtol=1e-6)
