"""The wrapper step by step: what is checked, skipped, passed on and refused."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._core.trees import all_finite
from mpjax._optim import optimizer_trees
from mpjax._optim.states import StepCount
from tests.errors import refused
from tests.loss_scale_oracle import Oracle
from tests.programs import assert_bit_equal, bits, equations

pytestmark = pytest.mark.standard_promotion("dtypes")

WHERE = "mpjax.loss_scaling(inner)"
BAD = [np.inf, -np.inf, np.nan]
SGD = optax.sgd(0.1)
DYNAMIC, STATIC4, OFF = mpjax.DynamicLossScale(), mpjax.StaticLossScale(4), mpjax.NoLossScale()
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.01))
PARAMS = {"w": jnp.asarray([1.0, -0.0, 3.0]), "b": jnp.asarray(-0.0, jnp.float32)}


def numbers(state):
  (scale,) = state.loss_scale.values()
  return {key: getattr(scale, key).item() for key in Oracle().numbers()}


def metric(state, key):
  return mpjax.loss_scaling_metrics(state)[key].item()


def gradients(rng, scale=1.0):
  return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) * scale, jnp.float32), PARAMS)


def times(tree, factor):
  return jax.tree.map(lambda x: x * factor, tree)


class Rig:
  """An optimizer, its parameters and one compiled update."""

  def __init__(self, tx, params):
    self.tx, self.params, self.state = tx, params, tx.init(params)
    self.update = jax.jit(tx.update)

  def step(self, grads, **extra_args):
    updates, self.state = self.update(grads, self.state, self.params, **extra_args)
    self.params = optax.apply_updates(self.params, updates)
    return updates


@pytest.mark.parametrize("how", ["by a branch", "by a selection", "not traced"])
def test_a_skipped_step_changes_nothing(monkeypatch, how):
  # A branch is for CPU and a selection for all others; both are to be seen everywhere.
  on_cpu = how == "by a branch"
  monkeypatch.setattr(optimizer_trees, "compiled_for_cpu", lambda: jnp.asarray(on_cpu))
  rig = Rig(mpjax.loss_scaling(CLIPPED, mpjax.DynamicLossScale(init_scale=16)), PARAMS)
  if how == "not traced":
    rig.update = rig.tx.update
  rng, oracle = np.random.default_rng(0), Oracle(init_scale=16)
  for bad, leaf, skip in itertools.product(BAD, ("w", "b", "all"), (True, False, True)):
    before = rig.params, rig.state.inner_state
    grads = gradients(rng)
    if skip and leaf == "all":
      grads = jax.tree.map(lambda g, bad=bad: jnp.full_like(g, bad), grads)
    elif skip:
      grads[leaf] = grads[leaf].reshape(-1).at[-1].set(bad).reshape(grads[leaf].shape)
    updates = rig.step(grads)
    assert metric(rig.state, "finite") == (not skip)
    assert numbers(rig.state) == oracle.step(not skip).numbers()
    if skip:
      assert_bit_equal((rig.params, rig.state.inner_state), before)
      assert all(np.all(np.signbit(u)) and not np.any(u) for u in jax.tree.leaves(updates))
    else:
      assert bits(rig.params) != bits(before[0])


def test_what_counts_as_bad():
  rig = Rig(mpjax.loss_scaling(optax.sgd(0.0)), jnp.zeros(2))
  skipped = []
  for value in [11.0, np.inf, -np.inf, np.nan, 3e38, 11.0]:
    rig.step(jnp.asarray([value, value], jnp.float32))
    skipped.append((metric(rig.state, "skipped"), metric(rig.state, "consecutive_skips")))
  # 3e38 is finite although its square and its sum are not.
  assert skipped == [(0, 0), (1, 1), (2, 2), (3, 3), (3, 0), (3, 0)]


def test_without_scaling_only_steps_are_counted():
  tx = mpjax.loss_scaling(CLIPPED, OFF, axis_name="batch")
  state, plain = tx.init(PARAMS), CLIPPED.init(PARAMS)
  assert bits(state.inner_state) == bits(plain)
  found = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p, loss=jnp.nan))(PARAMS, state, PARAMS)
  expected = jax.make_jaxpr(CLIPPED.update)(PARAMS, plain, PARAMS)
  plain_eqns, eqns = (
    collections.Counter(eqn.primitive.name for eqn, _ in equations(p)) for p in (expected, found)
  )
  assert eqns - plain_eqns == collections.Counter(["lt", "and", "add", "select_n"])
  for steps in range(1, 4):
    _, state = tx.update(PARAMS, state, PARAMS)
    assert (metric(state, "total"), metric(state, "skipped")) == (steps, 0)
  full = state._replace(loss_scale={"none": StepCount(jnp.int32(2**31 - 1))})
  assert metric(tx.update(PARAMS, full, PARAMS)[1], "total") == 2**31 - 1


FROZEN = optax.masked(optax.set_to_zero(), {"w": False, "b": True})
WITHOUT_STATE = {
  "clip": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
  "clip of elements": lambda tx: optax.named_chain(("clip", optax.clip(0.5)), ("tx", tx)),
  "decay": lambda tx: optax.chain(optax.add_decayed_weights(0.1), tx, optax.scale(0.5)),
  "masked": lambda tx: optax.chain(optax.masked(tx, {"w": True, "b": False}), FROZEN),
}


@pytest.mark.parametrize("around", WITHOUT_STATE)
def test_what_has_no_state_may_be_around(around):
  wrap, plain = WITHOUT_STATE[around], optax.adam(0.1)
  rig, control = (Rig(wrap(tx), PARAMS) for tx in (mpjax.loss_scaling(plain), plain))
  rng = np.random.default_rng(3)
  for skip in (False, True, False):
    grads = gradients(rng, scale=10.0)
    # An overflow leaves `mpjax.scaled` as NaN, which no clip turns into a number.
    rig.step(times(grads, jnp.nan) if skip else grads)
    assert metric(rig.state, "finite") == (not skip)
    if not skip:
      control.step(grads)
    assert_bit_equal(rig.params, control.params)


def test_updates_that_are_not_finite():
  # The second derivative of lr: finite gradients, updates that overflow.
  inner = optax.chain(optax.trace(0.5), optax.scale(3e38))
  config, oracle = mpjax.DynamicLossScale(growth_interval=2), Oracle(growth_interval=2)
  rig = Rig(mpjax.loss_scaling(inner, config, check_updates=True), PARAMS)
  unchecked = Rig(mpjax.loss_scaling(inner, config), PARAMS)
  for big in (0.5, 1.5, 0.25, 2.0, 1.5, np.inf):
    before = rig.params, rig.state.inner_state
    grads = {"w": jnp.asarray([0.0, big, 0.0]), "b": jnp.asarray(0.0)}
    rig.step(grads)
    bad = metric(rig.state, "bad_updates") > oracle.bad_updates
    oracle.step(bool(np.isfinite(big)), not bad)
    assert numbers(rig.state) == oracle.numbers()
    if bad or not np.isfinite(big):
      assert_bit_equal((rig.params, rig.state.inner_state), before)
    assert all_finite(rig.params)
    unchecked.step(grads)
    unchecked.params = PARAMS
  assert oracle.bad_updates >= 2
  assert metric(unchecked.state, "bad_updates") == 0


def checked(inner):
  return Rig(mpjax.loss_scaling(inner, mpjax.SkipNonfinite(), check_updates=True), PARAMS)


def test_a_new_state_that_is_not_finite_is_not_committed():
  # The square of a finite gradient overflows; the update, divided by its root, is 0.
  rig = checked(optax.adam(0.1))
  before = rig.params, rig.state.inner_state
  rig.step({"w": jnp.asarray([0.0, 1e20, 0.0]), "b": jnp.asarray(0.0)})
  assert_bit_equal((rig.params, rig.state.inner_state), before)
  assert (metric(rig.state, "skipped"), metric(rig.state, "bad_updates")) == (1, 1)
  rig.step(PARAMS)
  assert metric(rig.state, "consecutive_skips") == 0


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_number_of_the_state_that_is_as_it_was_does_not_count(number):
  # A best loss that starts at inf.
  first = {"best": jnp.asarray([number, 1.0]), "count": jnp.int32(0)}

  def step(updates, state, params=None):
    return updates, state | {"count": state["count"] + 1}

  rig = checked(optax.GradientTransformation(lambda params: first, step))
  rig.step(PARAMS)
  assert metric(rig.state, "skipped") == 0
  assert rig.state.inner_state["count"] == 1


@pytest.mark.parametrize(("old", "new"), [(np.inf, np.nan), (np.inf, -np.inf), (1.0, np.inf)])
def test_a_number_of_the_state_that_becomes_another_that_is_not_finite_counts(old, new):
  def step(updates, state, params=None):
    return updates, jnp.full_like(state, new)

  rig = checked(optax.GradientTransformation(lambda params: jnp.full(2, old), step))
  rig.step(PARAMS)
  assert (metric(rig.state, "skipped"), metric(rig.state, "bad_updates")) == (1, 1)
  assert rig.state.inner_state.tolist() == [old, old]


def test_momentum_is_exact_while_the_scale_changes_every_step():
  momentum = optax.sgd(0.1, 0.9)
  config = mpjax.DynamicLossScale(init_scale=128, growth_interval=1)
  rig, control = Rig(mpjax.loss_scaling(momentum, config), PARAMS), Rig(momentum, PARAMS)
  rng, expected, skipped = np.random.default_rng(5), 2.0**7, 2
  for i in range(10):
    plain = gradients(rng)
    assert metric(rig.state, "loss_scale") == expected
    if i != skipped:
      control.step(plain)
    rig.step(plain | {"b": jnp.asarray(jnp.nan)} if i == skipped else plain)
    expected *= 0.5 if i == skipped else 2
    assert_bit_equal((rig.params, rig.state.inner_state), (control.params, control.state))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_the_loss_counts_if_it_is_passed(dtype):
  rig = Rig(mpjax.loss_scaling(SGD), PARAMS)
  start = rig.state
  for loss, gradient in itertools.product((1.0, np.inf, np.nan, None), (1.0, np.nan)):
    finite = gradient == 1.0 and loss in (1.0, None)
    rig.state, grads = start, {"w": jnp.zeros(3), "b": jnp.asarray(gradient)}
    rig.step(grads, loss=None if loss is None else jnp.asarray(loss, dtype))
    assert metric(rig.state, "finite") == finite, (dtype, loss, gradient)
    assert metric(rig.state, "loss_scale") == (2.0**15 if finite else 2.0**14)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_one_bad_element_anywhere_in_mixed_dtypes():
  # All trees with one such element in one program, each a member of a batch.
  shapes = {"f16": ((3,), jnp.float16), "bf16": ((2, 2), jnp.bfloat16), "f32": ((5,), jnp.float32)}
  shapes |= {"c64": ((2,), jnp.complex64), "scalar": ((), jnp.float32)}
  clean = {k: np.ones(shape, dtype) for k, (shape, dtype) in shapes.items()}
  tx = mpjax.loss_scaling(optax.identity(), STATIC4)
  members, told = [clean], ["clean"]
  for name, (shape, _) in shapes.items():
    for index in np.ndindex(shape):
      for bad in [*BAD, *([complex(0, np.nan)] if name == "c64" else [])]:
        members.append(clean | {name: clean[name].copy()})
        members[-1][name][index] = bad
        told.append((name, index, bad))
  update = jax.jit(jax.vmap(tx.update, in_axes=(0, None)))
  updates, after = update(jax.tree.map(lambda *x: np.stack(x), *members), tx.init(clean))
  found = mpjax.loss_scaling_metrics(after)["finite"]
  assert [what for what, finite in zip(told, found, strict=True) if finite] == ["clean"]
  assert all(np.all(np.asarray(leaf[0]) == 1) for leaf in jax.tree.leaves(updates))
  # Rows of an embedding are summed before the check.
  table = jnp.zeros((3, 2), jnp.float16)
  tx = mpjax.loss_scaling(SGD, mpjax.SkipNonfinite())
  loss = lambda table, ids: 40000.0 * jnp.sum(table[ids].astype(jnp.float32))  # noqa: E731
  for ids, finite in (([0, 1], True), ([1, 1], False)):
    _, after = tx.update(jax.grad(loss)(table, jnp.asarray(ids)), tx.init(table), table)
    assert metric(after, "finite") == finite


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_injected_hyperparameters_are_float32():
  make = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, b2=0.999)
  params = jnp.ones(2, jnp.bfloat16)
  assert make.init(params).hyperparams["b2"].dtype == jnp.bfloat16
  assert make.init(params).hyperparams["b2"] == 1.0
  tx = mpjax.loss_scaling(make)
  state = tx.init(params)
  for _ in range(2):
    updates, state = tx.update(jnp.ones(2, jnp.bfloat16), state, params)
    hyperparams = state.inner_state.hyperparams
    assert {value.dtype.name for value in hyperparams.values()} == {"float32"}
    assert hyperparams["b2"] == np.float32(0.999)
    assert all_finite(updates)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["jax_disable_jit", "jax_check_tracer_leaks"])
def test_under_the_debugging_flags(set_flag, flag):
  set_flag(flag, True)
  rig = Rig(mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale(init_scale=4)), jnp.ones(2))
  rig.step(jnp.asarray([1.0, 2.0]))
  rig.step(jnp.asarray([1.0, jnp.nan]), loss=1.0)
  assert metric(rig.state, "loss_scale") == 2


def test_order_of_operations():
  # Check, clip, optimizer, check of updates, selection; nothing before the first check.
  inner = optax.chain(optax.clip(0.5), optax.scale_by_learning_rate(0.125))
  tx = mpjax.loss_scaling(inner, STATIC4, check_updates=True)
  jaxpr = jax.make_jaxpr(tx.update)(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3))
  # Where a step is skipped there are constants alone.
  names = [
    eqn.primitive.name
    for eqn, _ in equations(jaxpr)
    if eqn.outvars[0].aval.shape == (3,) and eqn.primitive.name != "broadcast_in_dim"
  ]
  # The optimizer runs once for updates that are only looked at, and in the branch for those that
  # are applied.
  inner = ["max", "min", "mul"]
  assert names == ["is_finite", *inner, "is_finite", *inner, "select_n"]


def test_nesting_is_refused():
  scaled, named = mpjax.loss_scaling(SGD), mpjax.loss_scaling(SGD, name="x")
  branches = optax.multi_transform({"x": named, "y": SGD}, {"w": "x", "b": "y"})
  around = scaled, optax.chain(optax.clip(1.0), scaled), mpjax.loss_scaling(SGD, OFF)
  around += (optax.MultiSteps(scaled, 2).gradient_transformation(), mpjax.master_weights(branches))
  outer = DYNAMIC, OFF, {"a": STATIC4, "b": STATIC4}, {"a": OFF, "b": OFF}
  for config, inner in itertools.product(outer, around):
    expected, got = "an optimizer without a loss scale", "one that holds another mpjax.loss_scaling"
    with refused(TypeError, WHERE, expected, got, "Wrap once, outermost"):
      mpjax.loss_scaling(inner, config).init(PARAMS)


def test_what_is_no_configuration():
  # And arguments that contradict it.
  for config in (128, mpjax.DynamicLossScale):
    where, fix = "mpjax.loss_scaling(loss_scale)", "mpjax.StaticLossScale(1024)"
    with refused(TypeError, where, "DynamicLossScale", repr(config), fix):
      mpjax.loss_scaling(SGD, config)
  where = "mpjax.loss_scaling(check_updates)"
  for config in (OFF, {"a": OFF, "b": OFF}):
    with refused(ValueError, where, "False with NoLossScale()", "True", "SkipNonfinite()"):
      mpjax.loss_scaling(SGD, config, check_updates=True)
  with refused(TypeError, where, "a bool", "1 of type int", "True or False"):
    mpjax.loss_scaling(SGD, check_updates=1)
  for name in ("", "a:b", "a/b", 3):
    where = "mpjax.loss_scaling(name)"
    with refused(ValueError, where, "non-empty string", repr(name), "'generator'"):
      mpjax.loss_scaling(SGD, name=name)


def test_unknown_keywords():
  with refused(TypeError, "mpjax.loss_scaling", "arguments inner", "'ema'", "are set on inner"):
    mpjax.loss_scaling(SGD, ema=1)


def test_a_state_of_another_configuration_is_refused():
  dynamic, seven = (mpjax.DynamicLossScale(growth_interval=n) for n in (2000, 7))
  others = seven, mpjax.DynamicLossScale(min_scale=0.5), mpjax.StaticLossScale(16)
  losses = {"a": dynamic}, {"a": dynamic, "c": STATIC4}, dynamic
  for config, other in (
    *itertools.product((dynamic, STATIC4, OFF), others),
    *((config, {"a": dynamic, "b": STATIC4}) for config in losses),
  ):
    state, tx = mpjax.loss_scaling(SGD, config).init(PARAMS), mpjax.loss_scaling(SGD, other)
    own, given = (", ".join(map(repr, s.loss_scale)) for s in (tx.init(PARAMS), state))
    expected, got = f"the configuration {own}", f"one created with {given}"
    with refused(ValueError, f"{WHERE}.update(state)", expected, got, "Build the optimizer as"):
      tx.update(PARAMS, state, PARAMS)
  # But the scale itself comes from the state.
  old, new = (mpjax.loss_scaling(SGD, mpjax.DynamicLossScale(init_scale=s)) for s in (64, 2))
  _, state = old.update(jax.tree.map(lambda p: p + jnp.nan, PARAMS), old.init(PARAMS), PARAMS)
  _, state = new.update(PARAMS, state, PARAMS)
  assert (metric(state, "loss_scale"), metric(state, "skipped")) == (32, 1)


@pytest.mark.parametrize("name", ["bacth", 0])
def test_an_axis_that_is_not_bound(devices, name):
  tx = mpjax.loss_scaling(SGD, axis_name=name)
  update = functools.partial(tx.update, params=PARAMS)
  mesh = jax.make_mesh((4,), ("batch",), devices=devices)
  mapped = jax.shard_map(update, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
  here = "the axes of the mesh here: ('batch',)"
  for call, got in ((update, "none of that name"), (mapped, here)):
    where, expected = f"loss_scaling(axis_name={name!r})", "the name of an axis that is mapped"
    with refused(ValueError, where, expected, got, "Under plain jit leave axis_name out"):
      jax.eval_shape(call, PARAMS, tx.init(PARAMS))


# Several losses: gradients and configurations that are refused


SEVERAL = {"scaled": {"a": DYNAMIC, "b": STATIC4}, "unscaled": {"a": OFF, "b": OFF}}
NOT_BY_NAME = [({"a": PARAMS, 1: PARAMS}, "one with ['1', 'a']"), ({}, "one with []")]


def test_gradients_and_losses_come_by_name():
  # Losses where somebody looks at them; None is none at all.
  both = itertools.product(SEVERAL.values(), ("updates", "grad"))
  for several, argument in [*both, (SEVERAL["scaled"], "loss")]:
    tx = mpjax.loss_scaling(SGD, several)
    for tree, got in NOT_BY_NAME:
      given = {"updates": {"a": PARAMS, "b": PARAMS}, argument: tree}
      expected = "a dict with one entry for each loss, ['a', 'b']"
      fix = "{name: gradients, ...}, or their sum"
      with refused(ValueError, f"{WHERE}.update({argument})", expected, got, fix):
        tx.update(state=tx.init(PARAMS), params=PARAMS, **given)
  tx = mpjax.loss_scaling(SGD, SEVERAL["unscaled"])
  for tree, _ in NOT_BY_NAME:
    tx.update({"a": PARAMS, "b": PARAMS}, tx.init(PARAMS), PARAMS, loss=tree)


@pytest.mark.parametrize("bad", [None, "gradient", "loss"])
def test_the_gradient_of_a_sum_of_losses_counts_for_each_of_them(bad):
  # The names of the losses are those of the parameters too: the tree decides.
  params = {"a": PARAMS, "b": PARAMS}
  tx = mpjax.loss_scaling(SGD, {"a": DYNAMIC, "b": mpjax.DynamicLossScale(init_scale=4)})
  grads = jax.tree.map(lambda p: p * jnp.nan if bad == "gradient" else p, params)
  loss = jnp.inf if bad == "loss" else 1.0
  updates, state = tx.update(grads, tx.init(params), params, loss=loss)
  applied, _ = SGD.update(grads, SGD.init(params), params)
  nothing = jax.tree.map(lambda p: jnp.full_like(p, -0.0), params)
  assert_bit_equal(updates, applied if bad is None else nothing)
  scales = [mpjax.loss_scaling_metrics(state, name=name) for name in "ab"]
  expected = [2.0**15, 4] if bad is None else [2.0**14, 2]
  assert [float(scale["loss_scale"]) for scale in scales] == expected
  assert [bool(scale["finite"]) for scale in scales] == [bad is None] * 2


def test_the_gradient_of_a_sum_of_losses_with_none_for_a_key():
  # As Equinox returns it.
  params = {"w": PARAMS, "key": jax.random.key(0)}
  tx = mpjax.loss_scaling(SGD, {"a": DYNAMIC, "b": DYNAMIC})
  updates, _ = tx.update({"w": PARAMS, "key": None}, tx.init(params), params)
  applied, _ = SGD.update(PARAMS, SGD.init(PARAMS), PARAMS)
  assert_bit_equal(updates["w"], applied)


def test_configurations_of_several_losses():
  for key in ("", "a:b", "a/b", 3):
    where = f"mpjax.loss_scaling(loss_scale) with the key {key!r}"
    expected = "a non-empty string without ':' and '/'"
    with refused(ValueError, where, expected, repr(key), "'generator'"):
      mpjax.loss_scaling(SGD, {"fine": DYNAMIC, key: DYNAMIC})
  for wrong in (128, {"b": STATIC4}):
    where, fix = "mpjax.loss_scaling(loss_scale)", "mpjax.StaticLossScale(1024)"
    expected = "a NoLossScale, SkipNonfinite, StaticLossScale or DynamicLossScale"
    with refused(TypeError, where, expected, repr(wrong), fix):
      mpjax.loss_scaling(SGD, {"a": DYNAMIC, "b": wrong})
  mixed = {"a": DYNAMIC, "b": OFF}
  for loss_scale, name in (({}, None), (mixed, None), ({"a": DYNAMIC}, "x"), ({"a": OFF}, "x")):
    expected = "one scale for each loss, without name=, and either all or none NoLossScale()"
    got = f"{loss_scale!r} and name={name!r}"
    fix = "SkipNonfinite() gives one of several losses no scale"
    with refused(ValueError, "mpjax.loss_scaling(loss_scale)", expected, got, fix):
      mpjax.loss_scaling(SGD, loss_scale, name=name)


def test_a_sum_of_a_window_that_is_not_finite_is_not_committed():
  rig = checked(mpjax.accumulate_gradients(SGD, 4))
  large = jax.tree.map(lambda p: jnp.full_like(p, 3e38), PARAMS)
  rig.step(large)
  rig.step(large)
  assert metric(rig.state, "bad_updates") == 1
  assert rig.state.inner_state.micro_batches == 1
  assert_bit_equal(rig.state.inner_state.total, large)
