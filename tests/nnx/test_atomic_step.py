"""Nothing of a skipped step of NNX remains, statistics, counts and new optimizers included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.nnx._atomic_step import nodes_in
from tests.errors import refused
from tests.programs import bits

pytestmark = [
  pytest.mark.standard_promotion("dtypes"),
  pytest.mark.filterwarnings("ignore:Using 'Module.sow"),
]


def network():
  """Returns a model with a layer that is tied, statistics and dropout."""
  rngs = nnx.Rngs(0)
  layers = [nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)]
  model = nnx.Sequential(*layers, nnx.Dropout(0.5, rngs=rngs))
  model.layers[1].kernel = model.layers[0].kernel
  return model


ADAM = optax.adam(0.1)


def training(inner=ADAM):
  model = network()
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(init_scale=8))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def plain_step(model, optimizer, x):
  loss, grads = nnx.value_and_grad(mpjax.scaled(lambda m: jnp.mean(m(x) ** 2), optimizer))(model)
  optimizer.update(model, grads)
  return loss


def numbers(model, optimizer):
  """Everything but the loss scale."""
  state = nnx.state((model, optimizer.opt_state.inner_state, optimizer.step))
  leaves = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "type"))
  return bits([nnx.as_pure(x) for x in leaves])


def counts(optimizer):
  metrics = mpjax.loss_scaling_metrics(optimizer)
  return tuple(metrics[key] for key in ("total", "skipped", "consecutive_skips", "finite"))


GOOD, BAD = jnp.arange(8.0).reshape(2, 4), jnp.full((2, 4), jnp.inf)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_skipped_step_is_a_deleted_one(wrap):
  step = wrap(mpjax.nnx.atomic_step(plain_step))
  ours, deleted, plain = training(), training(), training()
  for x in (GOOD, BAD, BAD, GOOD):
    step(*ours, x)
    if x is GOOD:
      step(*deleted, x)
      wrap(plain_step)(*plain, x)
    else:
      assert not mpjax.step_applied(ours[1])
  assert numbers(*ours) == numbers(*deleted) == numbers(*plain)
  assert mpjax.loss_scaling_metrics(ours[1])["loss_scale"] == 2
  assert ours[0].layers[1].kernel is ours[0].layers[0].kernel


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_step_is_skipped_also_where_its_counts_have_stopped(wrap):
  model, optimizer = training()
  (scale,) = optimizer.opt_state.loss_scale.values()
  for count in (scale.total, scale.skipped):
    count.set_raw_value(jnp.int32(2**31 - 1))
  step, before = wrap(mpjax.nnx.atomic_step(plain_step)), numbers(model, optimizer)
  step(model, optimizer, BAD)
  assert numbers(model, optimizer) == before
  step(model, optimizer, GOOD)
  assert numbers(model, optimizer) != before


@pytest.mark.slow
def test_of_two_optimizers_the_one_that_is_updated_decides():
  # The other one has skipped its last step, which was another.
  (model, optimizer), (other, skipped) = training(), training()
  plain_step(other, skipped, BAD)
  assert not mpjax.step_applied(skipped)
  with pytest.raises(mpjax.errors.MpjaxRuntimeError, match="skipped steps in a row"):
    mpjax.check_skipped_steps(skipped, 1)
  step = mpjax.nnx.atomic_step(lambda m, o, unused, x: plain_step(m, o, x))
  step(model, optimizer, skipped, GOOD)
  assert int(model.layers[3].rngs.count[...]) == int(optimizer.step[...]) == 1


@mpjax.nnx.atomic_step
def both(one, x, other, y):
  plain_step(*one, x)
  plain_step(*other, y)


@pytest.mark.slow
def test_metrics_that_are_read_after_the_call_count_what_was_taken_back():
  one, other = training(), training()

  @nnx.jit
  def read_around(one, other):
    both(one, GOOD, other, BAD)
    return counts(one[1]), counts(other[1])

  found = read_around(one, other)
  assert found == (counts(one[1]), counts(other[1])) == ((1, 1, 1, False),) * 2


@pytest.mark.slow
def test_where_one_of_two_optimizers_has_skipped_the_other_keeps_its_moments_as_well():
  # Else they were of a step that the parameters have not made; split masters were others.
  labels = lambda params: jax.tree.map(lambda p: p.ndim, params)  # noqa: E731
  for inner in (ADAM, optax.multi_transform({1: optax.set_to_zero(), 2: ADAM}, labels)):
    one, other = training(inner), training()
    before = numbers(*one)
    both(one, GOOD, other, BAD)
    assert numbers(*one) == before
    assert counts(one[1]) == (1, 1, 1, False)
    both(one, GOOD, other, GOOD)
    assert counts(one[1]) == (2, 1, 0, True)


@pytest.mark.slow
def test_all_updates_of_a_step_are_applied_or_none():
  # Of an only optimizer, which keeps its own state, but in each update by itself.
  def each(model, optimizer, batches):
    return [plain_step(model, optimizer, x) for x in batches]

  def start():
    model, tx = network(), mpjax.loss_scaling(mpjax.master_weights(ADAM, storage="split"))
    nnx.update(model, jax.tree.map(lambda p: p.astype("bfloat16"), nnx.state(model, nnx.Param)))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

  ours, plain = start(), start()
  before, compiled = numbers(*ours), nnx.jit(step := mpjax.nnx.atomic_step(each))
  for batches in ([BAD, GOOD], [GOOD, BAD]):
    compiled(*ours, batches)
    assert numbers(*ours) == before
  assert counts(ours[1]) == (4, 4, 4, False)
  step(*ours, [GOOD, GOOD])
  each(*plain, [GOOD, GOOD])
  assert numbers(*ours) == numbers(*plain)


@pytest.mark.slow
def test_without_a_scale():
  where = "mpjax.nnx.atomic_step(step)"
  for other in (GOOD, mpjax.loss_scaling(ADAM).init(GOOD)):  # A state in no variables is returned.
    with refused(TypeError, where, "a loss scale among the arguments", "none", "nnx.Optimizer"):
      mpjax.nnx.atomic_step(lambda x: x)(other)
  with refused(TypeError, where, "a function", "3", "@mpjax.nnx.atomic_step"):
    mpjax.nnx.atomic_step(3)
  model = network()
  tx = mpjax.loss_scaling(ADAM, mpjax.NoLossScale())
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  mpjax.nnx.atomic_step(plain_step)(model, optimizer, BAD)
  assert int(optimizer.step[...]) == 1, "nothing is skipped"
  before = numbers(model, optimizer)
  both((model, optimizer), GOOD, training(), BAD)
  assert numbers(model, optimizer) == before


@pytest.mark.slow
def test_it_needs_no_more_memory():
  # The moments are kept by the update itself: a second choice would keep the old ones beside.
  model, optimizer = training()
  graphdef, state = nnx.split((model, optimizer))

  def temporaries(step):
    def pure(state, x):
      model, optimizer = nnx.merge(graphdef, state, copy=True)
      loss = step(model, optimizer, x)
      return nnx.state((model, optimizer)), loss

    compiled = jax.jit(pure, donate_argnums=0).lower(state, GOOD).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(mpjax.nnx.atomic_step(plain_step)) <= temporaries(plain_step) + 256


# Steps that write to a variable in every way. `k` is inf where a step is to be skipped.

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])


class Holder(nnx.Module):
  """A model with a parameter, and a variable and a layer that a step writes to."""

  def __init__(self, value=None, **metadata):
    self.w = nnx.Param(jnp.ones(2))
    self.v = nnx.Variable(jnp.zeros(()) if value is None else value, **metadata)
    self.other = nnx.Variable(jnp.full((), 7.0))
    self.layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    self.items = nnx.List([nnx.Variable(jnp.full((), 5.0))])
    self.plain = nnx.data([nnx.Variable(jnp.full((), 6.0))])


def holding(value=None, **metadata):
  model = Holder(value, **metadata)
  return model, nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(0.1)), wrt=nnx.Param)


def step_that(write):
  """Returns a step that calls `write(model)` before it updates the parameters."""

  def step(model, optimizer, k):
    write(model)
    loss_fn = lambda m: jnp.sum(m.w.get_raw_value() ** 2) * k  # noqa: E731
    optimizer.update(model, nnx.value_and_grad(mpjax.scaled(loss_fn, optimizer))(model)[1])

  return step


def contents(model):
  """Returns what the variables of a model hold, by path, without hooks."""
  variables = (
    (path, x) for path, x in nnx.iter_graph(model, graph=True) if hasattr(x, "get_value")
  )
  values = {path: x.get_value() if x.ref else x.get_raw_value() for path, x in variables}
  return {path: (jax.tree.structure(value), bits(value)) for path, value in values.items()}


def objects(model):
  """Returns the identity of each module and variable of a model by its path."""
  nodes = nnx.iter_graph(model, graph=True)
  return {path: id(x) for path, x in nodes if isinstance(x, (nnx.Pytree, nnx.Variable))}


def check_that_a_skip_leaves_nothing(write, start, wrap):
  """Runs a skipped step, and then an applied one, which has to do what the plain step does."""
  (ours, optimizer), plain = start(), start()
  step = step_that(write)
  before = contents(ours)
  atomic = wrap(mpjax.nnx.atomic_step(step))
  atomic(ours, optimizer, np.float32(np.inf))
  assert contents(ours) == before
  assert counts(optimizer) == (1, 1, 1, False)
  atomic(ours, optimizer, np.float32(1))
  wrap(step)(*plain, np.float32(1))
  assert contents(ours) == contents(plain[0])
  assert counts(optimizer) == (2, 1, 0, True)


def add_one(model):
  for v in (model.v, *getattr(model, "more", ())):
    v.set_raw_value(jax.tree.map(lambda x: x + 1, v.get_raw_value()))


@pytest.mark.slow
@WRAPS
def test_a_value_may_be_any_tree(wrap):
  def start():
    model, optimizer = holding()
    values = (
      *({"b": jnp.zeros(2), "a": jnp.ones((), jnp.int32)}, (jnp.zeros(2), jnp.ones(()))),
      *([jnp.zeros(2)], ADAM.init({"w": jnp.ones(2)}), optax.MaskedNode()),
    )
    model.more = nnx.List([nnx.Variable(value) for value in values])
    return model, optimizer

  check_that_a_skip_leaves_nothing(add_one, start, wrap)


@pytest.mark.slow
@WRAPS
def test_a_dict_that_is_changed_in_place_is_put_back(wrap):
  def write(model):
    model.v["a"] = model.v["a"] + 1

  check_that_a_skip_leaves_nothing(write, lambda: holding({"a": jnp.zeros(2)}), wrap)


@pytest.mark.slow
@WRAPS
@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize("hook", ["on_get_value", "on_set_value"])
def test_hooks_of_a_variable_do_not_run(hook, wrap):
  start = functools.partial(holding, **{hook: lambda _, x: x * 2 + 1})
  for write in (add_one, lambda model: None):
    check_that_a_skip_leaves_nothing(write, start, wrap)


def replace(model):
  model.v = nnx.Variable(model.v[...] + 1)


def replace_a_layer(model):
  model.layer = nnx.Linear(1, 1, rngs=nnx.Rngs(1))


def swap(model):
  model.v, model.other = model.other, model.v


def replace_in_containers(model):
  model.items[0] = nnx.Variable(model.items[0][...] + 1)
  model.plain[0] = nnx.Variable(model.plain[0][...] + 1)


def tie(model):
  model.v = model.layer.bias = nnx.Param(model.layer.bias[...] + 1)


@WRAPS
@pytest.mark.parametrize("write", [replace, replace_a_layer, swap, replace_in_containers])
def test_a_variable_that_is_replaced_has_its_old_value(write, wrap):
  check_that_a_skip_leaves_nothing(write, holding, wrap)


def sow(model):
  model.sow(nnx.Intermediate, "h", model.w[...] * 2)


def sow_and_pop(model):
  sow(model)
  nnx.pop(model, nnx.Intermediate)


def delete(model):
  del model.other


def append(model):
  model.items.append(nnx.Variable(jnp.zeros(())))


def reshape(model):
  model.v = nnx.Variable(jnp.zeros((3,), jnp.int32))


STRUCTURAL = [replace, replace_a_layer, swap, replace_in_containers, tie, sow, sow_and_pop]


@pytest.mark.parametrize("write", [*STRUCTURAL, delete, append, reshape])
def test_outside_of_jit_a_skip_leaves_the_very_objects(write):
  model, optimizer = holding()
  sow(model)
  before, values = objects((model, optimizer)), contents(model)
  mpjax.nnx.atomic_step(step_that(write))(model, optimizer, np.float32(np.inf))
  assert objects((model, optimizer)) == before
  assert contents(model) == values


def test_outside_of_jit_a_skip_takes_from_the_model_what_a_view_was_given():
  model, optimizer = holding()
  before = objects(model)

  @mpjax.nnx.atomic_step
  def step(view, optimizer, k):
    sow(view)
    step_that(replace)(view, optimizer, k)

  step(mpjax.with_policy(model, "float32"), optimizer, np.float32(np.inf))
  assert objects(model) == before
  step(mpjax.with_policy(model, "float32"), optimizer, np.float32(1))
  assert model.h is not None
  assert model.v[...] == 1


@pytest.mark.parametrize("k", [1.0, np.inf], ids=["applied", "skipped"])
def test_what_is_sown_and_popped_in_the_step_is_gone_after_it(k):
  model, optimizer = holding()
  sow(model)  # Once outside, to look at it.
  nnx.jit(mpjax.nnx.atomic_step(step_that(sow_and_pop)))(model, optimizer, np.float32(k))
  assert not hasattr(model, "h")
  assert counts(optimizer)[0] == 1


def test_under_jit_a_new_variable_stays_and_a_deleted_one_is_gone():
  model, optimizer = holding()

  def write(model):
    append(model)
    delete(model)

  nnx.jit(mpjax.nnx.atomic_step(step_that(write)))(model, optimizer, np.float32(np.inf))
  assert len(model.items) == 2
  assert not hasattr(model, "other")


DIFFERENT = {
  "sown": (sow, "args[0].h: an extra leaf at [1]"),
  "shape": (reshape, "args[0].v: int32[3] for float32[]"),
  "tied": (tie, "args[0].layer.bias and args[0].v: one variable instead of 2"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_under_jit_a_value_that_cannot_be_put_back_is_named(kind):
  write, got = DIFFERENT[kind]
  model, optimizer = holding()
  sow(model)
  where, expected = "mpjax.nnx.atomic_step(step)", "values keep their structure, shapes and dtypes"
  with refused(ValueError, where, expected, got, "nnx.pop(model, nnx.Intermediate)"):
    nnx.jit(mpjax.nnx.atomic_step(step_that(write)))(model, optimizer, np.float32(1))


@WRAPS
def test_the_variables_of_the_optimizer_may_be_replaced(wrap):
  def step(model, optimizer, k):
    optimizer.opt_state = jax.tree.map(lambda x: x, optimizer.opt_state)  # Has new variables.
    step_that(add_one)(model, optimizer, k)

  model, optimizer = holding()
  atomic = wrap(mpjax.nnx.atomic_step(step))
  for k, value in ((np.inf, 0), (1, 1), (np.inf, 1)):
    atomic(model, optimizer, np.float32(k))
    assert model.v[...] == value
  assert counts(optimizer) == (3, 2, 1, False)


def test_a_step_that_exchanges_its_loss_scale_is_refused():
  model, optimizer = holding()

  @mpjax.nnx.atomic_step
  def step(model, optimizer):
    tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))
    optimizer.opt_state = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state

  where, got = "mpjax.nnx.atomic_step(step)", "static(scale=8)"
  with refused(ValueError, where, "keeps its loss scales, dynamic", got, "optimizer.update"):
    step(model, optimizer)


@WRAPS
def test_a_state_of_nnx_is_an_argument_as_its_optimizer_is(wrap):
  graphdef, state = nnx.split(holding())

  @wrap
  @mpjax.nnx.atomic_step
  def step(state, k):
    step_that(add_one)(*nnx.merge(graphdef, state), k)

  for k, value in ((np.inf, 0), (1, 1)):
    step(state, np.float32(k))
    assert state[0]["v"][...] == value


@WRAPS
def test_references_are_put_back(wrap):
  def write(model):
    model.v[...] = model.v[...] + 1

  check_that_a_skip_leaves_nothing(write, lambda: holding(ref=True), wrap)


def test_modules_that_are_shared_at_each_level_are_searched_once():
  class Pair(nnx.Module):
    def __init__(self, child):
      self.left = self.right = child

  module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  for _ in range(40):  # 2^40 paths lead to the layer.
    module = Pair(module)
  nodes = list(nodes_in(module, "model", {}))
  assert len(nodes) < 200
