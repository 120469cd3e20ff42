"""`restore_like`: what was saved comes back exactly, or the error says what does not fit."""

import contextlib
import pathlib
from typing import NamedTuple

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.programs import assert_bit_equal, bits, compilations, data_of_keys

P = jax.sharding.PartitionSpec
restore_like, to_arrays = mpjax.checkpoints.restore_like, mpjax.checkpoints.to_arrays
WHERE = "mpjax.checkpoints.restore_like(target, restored)"
DTYPE_AND_SHAPE = "the dtype and shape of target"


@flax.struct.dataclass
class Fields:
  kernel: object
  name: str = flax.struct.field(pytree_node=False, default="static")


class Everything(NamedTuple):
  step: object
  params: object
  opt_state: object
  nothing: object
  keys: object


GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")


def everything(seed):
  """A tree with each kind of container, of empty state and of dtype."""
  rng = np.random.default_rng(seed)
  half = rng.normal(size=(3, 2)).astype(np.float32)
  return Everything(
    step=jnp.asarray(seed, jnp.int32),
    params={
      "w": jnp.asarray(half, jnp.bfloat16),
      "layers": [Fields(jnp.asarray(half[0])), (jnp.asarray(half, jnp.float16),)],
      "a.b/c@d": jnp.asarray(half > 0),
      "f8": jnp.asarray(half, jnp.float8_e4m3fn),
    },
    opt_state=(
      optax.EmptyState(),
      optax.MaskedNode(),
      optax.ScaleByAdamState(jnp.asarray(seed, jnp.int32), {"w": jnp.asarray(half)}, ()),
      (),
    ),
    nothing=None,
    keys=[jax.random.split(jax.random.key(seed, impl=impl), 2) for impl in GENERATORS],
  )


SAVED, TARGET = everything(1), everything(2)
W = {"w": jnp.ones(2)}


def save(path, tree):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, tree)
  return path


def as_it_is(tree, path):
  return tree


def orbax_path(tree, path):
  return save(path, tree)


def orbax_raw(tree, path):
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(save(path, tree))


def msgpack(tree, path):
  return flax.serialization.msgpack_restore(flax.serialization.to_bytes(data_of_keys(tree)))


def npz(tree, path):
  np.savez(path.with_suffix(".npz"), **to_arrays(tree))
  with np.load(path.with_suffix(".npz")) as file:
    return dict(file)


FORMATS = [as_it_is, orbax_path, orbax_raw, msgpack, npz]
KINDS = pytest.mark.parametrize("through", [as_it_is, orbax_path, msgpack, npz])
"""A tree, a path, a tree that lost its classes, arrays by name: what is told apart."""


def assert_same(new, old):
  assert_bit_equal(new, old)
  for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
    assert isinstance(a, jax.Array)
    assert (a.dtype, jax.typeof(a).weak_type) == (b.dtype, False)


def misfit(target, restored, got, fix, expected=DTYPE_AND_SHAPE, where=WHERE, cast=True):
  """Asserts that this cannot be restored, and returns the text of the error."""
  with refused(ValueError, where, expected, got, fix) as excinfo:
    restore_like(target, restored, cast=cast)
  return str(excinfo.value)


@pytest.mark.parametrize("through", FORMATS)
def test_everything_comes_back(through, tmp_path):
  restored = through(SAVED, tmp_path / "state")
  for target in (TARGET, jax.eval_shape(lambda: TARGET)):
    assert_same(restore_like(target, restored), SAVED)
  if through not in (orbax_path, orbax_raw):  # Orbax saves no single array.
    assert_same(restore_like(jnp.zeros(2), through(jnp.ones(2), tmp_path / "x")), jnp.ones(2))


def test_a_path_may_be_a_text_or_relative(tmp_path, monkeypatch):
  path = save(tmp_path / "state", W)
  monkeypatch.chdir(tmp_path)
  for spelt in (str(path), "state", pathlib.Path("state")):
    assert_same(restore_like({"w": jnp.zeros(2)}, spelt), W)


@pytest.mark.parametrize("through", [as_it_is, orbax_path, orbax_raw, npz])
def test_python_numbers_become_arrays(through, tmp_path):
  target = {"count": jnp.asarray(0, jnp.int32), "rate": jnp.zeros(()), "on": jnp.asarray(True)}
  saved = through({"count": 3, "rate": 0.1, "on": False}, tmp_path / "state")
  expected = {"count": np.int32(3), "rate": np.float32(0.1), "on": np.bool_(False)}
  for committed in (False, True):
    placed = jax.device_put(target, jax.devices()[1]) if committed else target
    restored = restore_like(placed, saved)
    assert_same(restored, jax.tree.map(jnp.asarray, expected))
    assert {x.committed for x in jax.tree.leaves(restored)} == {committed}


WIDE = {"a": jnp.asarray([1 / 3, 2.5]), "b": [jnp.zeros(3)], "c": jnp.ones((2, 2))}
HALF = {"a": jnp.zeros(2, jnp.bfloat16), "b": [jnp.zeros(3)], "c": jnp.zeros((2, 2), jnp.float16)}


@pytest.mark.parametrize("through", FORMATS)
def test_another_dtype_is_an_error_that_names_every_leaf(through, tmp_path):
  # And a cast that is asked for rounds to nearest.
  restored = through(WIDE, tmp_path / "state")
  got = "float32[2] for bfloat16[2] at a; float32[2, 2] for float16[2, 2] at c. "
  misfit(HALF, restored, got, "Pass cast=True", cast=False)
  found = restore_like(HALF, restored, cast=True)
  rounded = np.asarray([1 / 3, 2.5], np.float32).astype(ml_dtypes.bfloat16)
  expected = {"a": rounded, "b": [np.zeros(3, np.float32)], "c": np.ones((2, 2), np.float16)}
  assert_same(found, expected)
  # And back: exactly the rounded numbers.
  back = restore_like(WIDE, through(found, tmp_path / "half"), cast=True)
  assert_same(back, jax.tree.map(lambda x: x.astype(np.float32), expected))


def test_a_misfit_is_seen_before_anything_is_read(tmp_path, monkeypatch):
  path = save(tmp_path / "state", WIDE)
  monkeypatch.setattr(ocp.StandardCheckpointer, "restore", None)
  with pytest.raises(TypeError, match="'NoneType' object is not callable"):
    restore_like(WIDE, path)
  with pytest.raises(mpjax.errors.MpjaxValueError, match="float32\\[2\\] for bfloat16\\[2\\] at a"):
    restore_like(HALF, path)


@pytest.mark.parametrize("through", [as_it_is, orbax_path, npz])
def test_a_cast_that_overflows_is_an_error(through, tmp_path):
  saved = {"w": jnp.asarray([1.0, 1e5]), "ok": jnp.asarray([jnp.inf])}
  target = jax.tree.map(lambda x: x.astype(jnp.float16), saved)
  parts = {"got": "float32 beyond float16 at w. ", "fix": "keep these leaves in float32"}
  parts["expected"] = "values that the new dtype can hold"
  parts["where"] = "mpjax.checkpoints.restore_like(cast=True)"
  misfit(target, through(saved, tmp_path / "state"), **parts)


def test_bfloat16_without_a_name_is_an_error(tmp_path):
  np.savez(tmp_path / "x.npz", w=np.ones(2, ml_dtypes.bfloat16))
  target = {"w": jnp.zeros(2, jnp.bfloat16)}
  # The open file is a mapping, and as good as a dict.
  with np.load(tmp_path / "x.npz") as file:
    misfit(target, file, "V2[2] for bfloat16[2] at w", "mpjax.checkpoints.to_arrays")
    viewed = {"w": file["w"].view(jnp.bfloat16)}
  assert_same(restore_like(target, viewed), {"w": np.ones(2, ml_dtypes.bfloat16)})


@pytest.mark.parametrize("through", [as_it_is, orbax_path, orbax_raw, npz])
def test_keys_of_another_generator_are_an_error(through, tmp_path):
  # The data have the same shape: only the name tells them apart.
  restored = through({"rng": jax.random.key(1, impl="rbg")}, tmp_path / "state")
  target = {"rng": jax.random.key(1, impl="unsafe_rbg")}
  misfit(target, restored, "key<rbg>[] for key<urbg>[] at rng", "keys never change")


def scaled(config, **kwargs):
  return mpjax.loss_scaling(optax.sgd(0.1, momentum=0.9), config, **kwargs).init(W)


DYNAMIC, NONE = scaled(mpjax.DynamicLossScale()), scaled(mpjax.NoLossScale())
OF_TARGET = "mpjax.checkpoints.restore_like(target)"
OF_RESTORED = "mpjax.checkpoints.restore_like(restored)"
LEAVES = "the leaves of target"


def test_what_does_not_fit_is_refused(tmp_path):
  ocp.PyTreeCheckpointer().save(tmp_path / "text", W | {"name": "adam"})
  named = W | {"name": jnp.ones(2)}
  misfit(named, tmp_path / "text", "'' for float32[2] at name. ", "Build target as")
  twice = {"w": np.ones(2, np.float32), "w@bfloat16": np.ones(2, np.uint16)}
  misfit(W, twice, "two at 'w'", "Rename", "different paths")
  partial = npz(DYNAMIC, tmp_path / "partial")
  del partial["inner_state/0/trace/w"]
  misfit(DYNAMIC, partial, "nothing at inner_state/0/trace/w. ", "add the missing leaves", LEAVES)
  arrays, fix = "arrays or jax.ShapeDtypeStruct as leaves", "leave out what is not an array"
  with refused(TypeError, OF_TARGET, arrays, "'adam' at x", fix):
    restore_like(W | {"x": "adam"}, {})


@KINDS
def test_missing_and_extra_leaves_are_an_error_that_names_them(through, tmp_path):
  saved = {"params": {"w": jnp.ones(2), "old": jnp.ones(1)}, "step": jnp.asarray(1)}
  target = {"params": {"w": jnp.ones(2), "new": jnp.ones(1)}, "step": None, "ema": [jnp.ones(2)]}
  missing = "nothing at ema/0; nothing at params/new"
  got = f"{missing}; an extra leaf at params/old; an extra leaf at step. "
  fix, expected = "Build target as the state was when it was saved", f"{LEAVES} and no others"
  misfit(target, through(saved, tmp_path / "state"), got, fix, expected)


STATIC, NO_SCALE = scaled(mpjax.StaticLossScale(8)), "none (no loss scale"
FIELDS = scaled(mpjax.DynamicLossScale(growth_interval=5, backoff_factor=0.25))
NAMED = scaled(mpjax.DynamicLossScale(), name="d")
BACKOFF = "'dynamic(backoff_factor=0.25,growth_interval=5)'"
PLAIN = optax.sgd(0.1, momentum=0.9).init(W)
CONFIGURATIONS = {
  "static": (STATIC, DYNAMIC, "'dynamic'", "'static(scale=8)'"),
  "fields": (FIELDS, NAMED, "'d:dynamic'", BACKOFF),
  "none": (NONE, DYNAMIC, "'dynamic'", "'none'"),
  "to_none": (DYNAMIC, NONE, "'none'", "'dynamic'"),
  "float32_run": (PLAIN, DYNAMIC, "'dynamic'", NO_SCALE),
}


@KINDS
def test_another_configuration_is_an_error_that_names_both(through, tmp_path):
  for name, (saved, target, expected, got) in CONFIGURATIONS.items():
    for place, wrap in (("opt", lambda x: {"opt": x}), ("the root", lambda x: x)):
      restored = through(wrap(saved), tmp_path / f"{name}_{place[:3]}")
      wanted = f"a loss scale of the configuration {expected}"
      text = misfit(wrap(target), restored, got, "set_loss_scale", wanted, cast=False)
      assert f" at {place}, got" in text
  assert_same(restore_like(NONE, msgpack(NONE, None)), NONE)


def optimizer_of_nnx(config):
  tx = mpjax.loss_scaling(optax.sgd(0.1, momentum=0.9), config)
  return nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)


def pure_dict(modules):
  return nnx.to_pure_dict(nnx.state(modules))


@pytest.mark.parametrize("form", [lambda x: x, nnx.state, pure_dict])
def test_the_loss_scale_of_an_nnx_optimizer_is_checked(form):
  target = form(optimizer_of_nnx(mpjax.DynamicLossScale()))
  other = to_arrays(form(optimizer_of_nnx(mpjax.StaticLossScale(8))))
  wanted = "a loss scale of the configuration 'dynamic' at opt_state"
  misfit(target, other, "'static(scale=8)'", "set_loss_scale", wanted, cast=False)
  saved = to_arrays(target)
  assert bits(restore_like(target, saved)) == bits(target)
  broken = {k: x * np.nan if "/scale" in k else x for k, x in saved.items()}
  expected = "a positive finite loss scale"
  misfit(target, broken, "nan", "restore another checkpoint", expected, OF_RESTORED, cast=False)


def begun_nnx(seed):
  """Returns a model and its optimizer."""
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(seed))
  tx = mpjax.loss_scaling(optax.sgd(0.1, momentum=0.9))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def step_nnx(model, optimizer):
  loss_fn = lambda model: jnp.sum(model(jnp.ones((3, 2))) ** 2)  # noqa: E731
  _, grads = nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))(model)
  optimizer.update(model, grads)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("form", "through"),
  # Flax cannot write an `nnx.State` as msgpack.
  [*((pure_dict, each) for each in FORMATS), (nnx.state, orbax_path), (nnx.state, npz)],
)
def test_a_model_and_an_optimizer_of_nnx_go_on(form, through, tmp_path):
  old, new = begun_nnx(0), begun_nnx(1)
  step_nnx(*old)
  restored = restore_like(form(new), through(form(old), tmp_path / "state"))
  nnx.update(new, nnx.State(restored))
  assert bits(pure_dict(new)) == bits(pure_dict(old))
  step_nnx(*old)
  step_nnx(*new)
  assert bits(pure_dict(new)) == bits(pure_dict(old))


@KINDS
def test_a_pure_dict_does_not_fit_the_variables_of_nnx(through, tmp_path):
  model, _ = begun_nnx(0)
  saved, missing = through(pure_dict(model), tmp_path / "pure"), "nothing at kernel/value"
  for target in (model, nnx.state(model)):
    fix = "pass nnx.to_pure_dict(nnx.state(model)) as target"
    misfit(target, saved, missing, fix, LEAVES, cast=False)
  for name, variables in (("module", model), ("state", nnx.state(model))):
    extra, fix = "an extra leaf at kernel/value", "pass nnx.state(model) as target"
    saved = npz(variables, tmp_path / name)
    misfit(pure_dict(model), saved, extra, fix, LEAVES, cast=False)
  # A key of that name is no variable.
  plain = {"w": {"value": jnp.ones(2)}}
  misfit(plain, through(W, tmp_path / "plain"), "nothing at w/value", "Build target", LEAVES)


def with_scale(opt_state, scale):
  ((label, state),) = opt_state.loss_scale.items()
  return opt_state._replace(loss_scale={label: state._replace(scale=jnp.asarray(scale))})


@KINDS
def test_a_broken_scale_is_an_error(through, tmp_path):
  target, fix = (DYNAMIC,), "restore another checkpoint"
  where, expected = OF_RESTORED, "a positive finite loss scale"
  for scale in (float("nan"), float("inf"), 0.0, -2.0):
    broken = through((with_scale(*target, scale),), tmp_path / f"scale_{scale}")
    misfit(target, broken, str(scale), fix, expected, where, cast=False)
  # One of an ensemble is enough.
  states = jax.tree.map(lambda x: jnp.stack([x, x]), DYNAMIC)
  assert_same(restore_like(states, states), states)
  with pytest.raises(mpjax.errors.MpjaxValueError, match="a positive finite loss scale"):
    restore_like(states, with_scale(states, [1.0, jnp.nan]))


def test_a_path_without_a_checkpoint_is_an_error(tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "file").write_bytes(b"")
  with ocp.CheckpointManager(tmp_path / "manager") as manager:
    manager.save(1, args=ocp.args.StandardSave(W))
    manager.wait_until_finished()
  assert_same(restore_like({"w": jnp.zeros(2)}, tmp_path / "manager" / "1" / "default"), W)
  for kind in ("nothing", "empty", "file", "manager"):
    got = f"{tmp_path / kind}, which holds no checkpoint"
    expected = "the path of an Orbax checkpoint"
    misfit(W, tmp_path / kind, got, "directory/step/default", expected, OF_RESTORED, cast=False)


def uncommitted():
  return {
    "params": {"w": jnp.arange(8, dtype=jnp.float32), "b": jnp.ones(8, jnp.bfloat16)},
    "step": jnp.asarray(0, jnp.int32),
    "rng": jax.random.key(0),
  }


def committed():
  return jax.device_put(uncommitted(), jax.devices()[1])


def on_mesh(kind=jax.sharding.AxisType.Auto):
  mesh, state = jax.make_mesh((4,), ("d",), axis_types=(kind,)), uncommitted()
  everywhere = jax.device_put(state, jax.sharding.NamedSharding(mesh, P()))
  params = jax.device_put(state["params"], jax.sharding.NamedSharding(mesh, P("d")))
  return everywhere | {"params": params}


def on_explicit_mesh():
  return on_mesh(jax.sharding.AxisType.Explicit)


def python_numbers(state, path):
  return dict(msgpack(state, path), step=int(state["step"]))


@pytest.mark.parametrize("place", [uncommitted, committed, on_mesh, on_explicit_mesh])
def test_one_trace_and_one_program_across_a_resume(place, tmp_path):
  traces = []

  @jax.jit
  def step(state):
    traces.append(1)
    rng, _ = jax.random.split(state["rng"])
    params = jax.tree.map(lambda x: x * 2, state["params"])
    return {"params": params, "step": state["step"] + 1, "rng": rng}

  def run(state):
    with compilations() as compiled:
      for _ in range(4):
        state = jax.block_until_ready(step(state))
    return state, compiled["step"]

  state, programs = run(place())
  assert programs == 1
  for through in (*FORMATS, python_numbers):
    restored = restore_like(place(), through(state, tmp_path / through.__name__))
    assert_same(restored, state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
      assert (a.sharding, a.committed) == (b.sharding, b.committed), through
    # JAX may keep another entry for arrays that were made elsewhere, of the same program.
    assert (run(restored)[1], len(traces)) == (0, 1), through


@pytest.mark.parametrize("through", [orbax_path, npz])
def test_a_checkpoint_moves_to_another_mesh(through, tmp_path, devices):
  state = on_mesh()
  saved = through(state, tmp_path / "state")
  mesh = jax.sharding.Mesh(np.asarray(devices[:2]), ("m",))
  sharding = jax.sharding.NamedSharding(mesh, P("m"))
  target = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if x.ndim else None)  # noqa: E731
  restored = restore_like(jax.tree.map(target, state), saved)
  assert_same(restored, state)
  for x in jax.tree.leaves(restored["params"]):
    assert x.sharding == sharding
    assert {shard.data.shape for shard in x.addressable_shards} == {(4,)}
  assert not restored["step"].committed


def test_shapes_of_an_explicit_mesh_need_the_mesh():
  state = on_explicit_mesh()["params"]
  target = jax.eval_shape(lambda x: x, state)
  with jax.set_mesh(state["w"].sharding.mesh):
    restored = restore_like(target, jax.tree.map(np.asarray, state))
  assert_same(restored, state)
  assert restored["w"].sharding == state["w"].sharding
  other = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
  for mesh in (None, other):
    got, fix = "an abstract mesh, {'d': 4}", "jax.set_mesh(mesh)"
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
      misfit(target, state, got, fix, "shardings on devices", OF_TARGET, cast=False)


@pytest.mark.parametrize("place", [uncommitted, committed])
@pytest.mark.parametrize("through", [as_it_is, orbax_raw, msgpack])
def test_what_was_read_outlives_a_donated_result(through, place, tmp_path):
  # Parameters and their float32 masters may both come from the same leaves.
  saved = place()
  read = through(saved, tmp_path / "state")
  step = jax.jit(lambda state: jax.tree.map(lambda x: x * 0, state), donate_argnums=0)
  for _ in range(2):
    jax.block_until_ready(step(restore_like(saved, read)["params"]))
  assert_same(restore_like(saved, read), saved)


@pytest.mark.parametrize("form", [lambda x: x, nnx.state, lambda x: nnx.to_pure_dict(nnx.state(x))])
def test_another_configuration_is_the_same_error_of_nnx(form):
  saved = to_arrays(form(optimizer_of_nnx(mpjax.StaticLossScale(8))))
  target = form(optimizer_of_nnx(mpjax.DynamicLossScale()))
  wanted = "a loss scale of the configuration 'dynamic' at opt_state"
  misfit(target, saved, "'static(scale=8)'", "set_loss_scale", wanted, cast=False)


@pytest.mark.parametrize("form", [lambda x: x, nnx.state, lambda x: nnx.to_pure_dict(nnx.state(x))])
def test_a_broken_scale_is_the_same_error_of_nnx(form):
  target = form(optimizer_of_nnx(mpjax.DynamicLossScale()))
  saved = to_arrays(target)
  assert bits(restore_like(target, saved)) == bits(target)
  broken = {k: x * np.nan if "/scale" in k else x for k, x in saved.items()}
  expected = "a positive finite loss scale"
  misfit(target, broken, "nan", "restore another checkpoint", expected, OF_RESTORED, cast=False)


def test_swapped_arguments_are_refused(tmp_path):
  where = "mpjax.checkpoints.restore_like(target)"
  with refused(TypeError, where, "a tree of arrays", f"a path ({tmp_path})", "Swap"):
    mpjax.checkpoints.restore_like(tmp_path, {"w": jnp.ones(2)})
