"""Which results of a training step are updated parameters, in steps as users write them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax
from mpjax._diagnose.call import Call
from mpjax._diagnose.optimizer_work import optimizer_of
from mpjax._jaxpr.graph import Graph

W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
X, B = W[0], W[1]
P = {"w": W, "b": B}


def updates(fn, *args, **kwargs):
  """Returns the path of each result that is an updated argument, and the name of this argument."""
  call = Call(args, kwargs)
  traced = call.traced(fn)
  arguments, graph = call.arguments(fn), Graph(traced.program)
  additions = optimizer_of(graph, arguments, traced.outputs).additions
  names = {value: one.name for value, one in zip(graph.arguments, arguments, strict=True)}
  return {"/".join(traced.outputs[each.result]): names[each.old] for each in additions}


def loss(params, x):
  return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def sgd(params, x, rate=0.1):
  return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params, x))


def with_average(params, average, x):
  params = sgd(params, x)
  return params, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)


def early_average(average, params, count, x):
  # As long as there are few steps, the average is the parameters.
  params = sgd(params, x)
  early = lambda a, p: jnp.where(count < 9, p, 0.9 * a + 0.1 * p)  # noqa: E731
  return jax.tree.map(early, average, params), params


def periodic(target, params, count, x):
  params = sgd(params, x)
  return optax.periodic_update(params, target, count, 9), params


def lookahead(fast, slow, count, x):
  fast = sgd(fast, x)
  is_last = count % 9 == 0
  step = lambda s, f: jnp.where(is_last, s + 0.5 * (f - s), s)  # noqa: E731
  slow = jax.tree.map(step, slow, fast)
  return jax.tree.map(lambda s, f: jnp.where(is_last, s, f), slow, fast), slow


def decayed(params, x):
  return jax.tree.map(lambda p, q: q - 0.01 * p, params, sgd(params, x))


def with_change(params, x):
  new = sgd(params, x)
  return {"change": jax.tree.map(lambda p, q: q - p, params, new)}, new


def adversarial(w, v, x):
  def second(v, w):
    return jnp.sum(jnp.tanh(x @ v) @ w)

  w = w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)
  return w, v - 0.1 * jax.grad(second)(v, w)


def accumulated(params, total, x):
  total = jax.tree.map(jnp.add, total, jax.grad(loss)(params, x))
  return jax.tree.map(lambda p, g: p - 0.1 * g, params, total), total


def heavy_ball(params, momentum, x):
  grads = jax.grad(loss)(params, x)
  with jax.named_scope("optimizer"):
    momentum = jax.tree.map(lambda m, g: m - 0.1 * g, momentum, grads)
    return optax.apply_updates(params, momentum), momentum


def scoped(x, w):
  grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
  with jax.named_scope("optimizer"):
    return w - 0.1 * grads


def stateful(params, mean, x):
  def loss(params):
    y = x @ params["w"] + params["b"]
    new = {"m": mean["m"] + 0.1 * (y - mean["m"])}
    return jnp.sum((y - new["m"]) ** 2), new

  grads, mean = jax.grad(loss, has_aux=True)(params)
  return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), mean


def mastered(low, master, momentum, x):
  grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(low)
  momentum = 0.9 * momentum + grads.astype(jnp.float32)
  master = master - 0.1 * momentum
  return master.astype(jnp.bfloat16), master, momentum


def looped(params, xs):
  return jax.lax.scan(lambda p, x: (sgd(p, x), loss(p, x)), params, xs)


def summed(params, xs):
  new = sgd(params, xs[0])
  return new, jax.lax.scan(lambda total, x: (total + x, None), 2 * new["b"], xs)[0]


def with_change_of_array(w, x):
  new = w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
  return new - w, new


def with_perturbed(params, x):
  grads = jax.grad(loss)(params, x)
  perturbed = jax.tree.map(lambda p, g: p + 0.1 * g, params, grads)
  return {"perturbed": perturbed}, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def pruned(w, mask, x):
  grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
  return jnp.where(mask, w - 0.1 * grads, w), w + 0.1 * grads


def cast(params, x):
  return jax.tree.map(lambda p: p.astype(jnp.bfloat16), sgd(params, x)), params["b"]


def decayed_alone(params, x):
  unread = params["unread"]
  return {**sgd({"w": params["w"], "b": params["b"]}, x), "unread": unread - 0.1 * unread}


def embedded(w, i):
  return w.at[i].add(-0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(w[i])))(w)[i])


def delayed(old, new, xs):
  """The loss reads the weights of the step before."""

  def step(carry, x):
    old, new = carry
    grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(old)
    return (new, new - 0.1 * grads), None

  return jax.lax.scan(step, (old, new), xs)[0][1]


def arrays(x, w, b):
  """The parameters follow the batch, and have no names."""
  value, (of_w, of_b) = jax.value_and_grad(lambda w, b: jnp.sum((x * w + b) ** 2), (0, 1))(w, b)
  return value, w - 0.1 * of_w, b - 0.1 * of_b


STEPS = {
  "parameters alone": (sgd, (P, X), {"w": "params/w", "b": "params/b"}),
  "average behind": (with_average, (P, P, X), {"0/w": "params/w", "0/b": "params/b"}),
  "average that begins as they are": (
    *(early_average, (P, P, 0, X)),
    {"1/w": "params/w", "1/b": "params/b"},
  ),
  "target that is copied at times": (
    *(periodic, (P, P, jnp.asarray(9), X)),
    {"1/w": "params/w", "1/b": "params/b"},
  ),
  "weights that follow others": (
    *(lookahead, (P, P, 9, X)),
    {"0/w": "fast/w", "0/b": "fast/b", "1/w": "slow/w", "1/b": "slow/b"},
  ),
  "returned twice": (
    *(lambda params, x: 2 * (sgd(params, x),), (P, X)),
    {"0/w": "params/w", "0/b": "params/b"},
  ),
  "two additions": (decayed, (P, X), {"w": "params/w", "b": "params/b"}),
  "change as a log": (with_change, (P, X), {"1/w": "params/w", "1/b": "params/b"}),
  "change of an array": (with_change_of_array, (W, X), {"1": "w"}),
  "another sum with them": (with_perturbed, (P, X), {"1/w": "params/w", "1/b": "params/b"}),
  "masked, and another sum": (pruned, (W, W > 0, X), {"0": "w"}),
  "another dtype": (cast, (P, X), {}),
  "not read by the loss": (
    *(decayed_alone, ({**P, "unread": W}, X)),
    {name: f"params/{name}" for name in ("w", "b", "unread")},
  ),
  "rows of a table": (embedded, (W, jnp.asarray([0, 2])), {"": "w"}),
  "of the step before": (delayed, (W, W, W), {"": "new"}),
  "two losses": (adversarial, (W, W, X), {"0": "w", "1": "v"}),
  "accumulated": (accumulated, (P, P, X), {"0/w": "params/w", "0/b": "params/b"}),
  "accumulated on a device": (
    *(jax.pmap(accumulated), jax.tree.map(lambda x: x[None], (P, P, X))),
    {"0/w": "params/w", "0/b": "params/b"},
  ),
  "optimizer in a scope": (heavy_ball, (P, P, X), {"0/w": "params/w", "0/b": "params/b"}),
  "array without a name in a scope": (scoped, (X, W), {"": "w"}),
  "state of a model": (
    *(stateful, (P, {"m": B}, X)),
    {"0/w": "params/w", "0/b": "params/b"},
  ),
  "master without a name": (
    *(mastered, (W.astype(jnp.bfloat16), W, W, X.astype(jnp.bfloat16))),
    {"1": "master"},
  ),
  "loop": (looped, (P, W), {"0/w": "params/w", "0/b": "params/b"}),
  "arrays without names": (arrays, (X, W[2], B), {"1": "w", "2": "b"}),
  "numbers without names": (arrays, (X[0], W[0, 0], W[1, 1]), {"1": "w", "2": "b"}),
  "loop of sums": (summed, (P, W), {"0/w": "params/w", "0/b": "params/b"}),
  "a loss": (loss, (P, X), {}),
  "a gradient": (jax.grad(loss), (P, X), {}),
  "an optimizer alone": (
    *(lambda p, grads, mu: (p - 0.1 * mu, 0.9 * mu + grads), (W, W, W)),
    {"0": "p"},
  ),
  "a count": (lambda p, state: (p, {"n": state["n"] + 1.0}), (W, {"n": B[0]}), {}),
  "a residual model": (lambda x, w: x + jnp.tanh(x @ w) + jnp.sin(x @ w), (X, W), {}),
}


@pytest.mark.parametrize("kind", STEPS)
def test_the_results_that_are_parameters_plus_an_update(kind):
  step, args, expected = STEPS[kind]
  assert updates(step, *args) == expected


# With the momentum of a skipped step, the old one is selected, and is no term of the new one.
OPTIMIZERS = {
  "adamw": optax.adamw(0.1),
  "momentum": optax.sgd(0.1, momentum=0.9),
  "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
  "several steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


@pytest.mark.standard_promotion("dtypes")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_of_a_scaled_optimizer_are_no_parameters(optimizer):
  tx = mpjax.loss_scaling(OPTIMIZERS[optimizer])

  def step(params, opt_state, x):
    value, grads = jax.value_and_grad(mpjax.scaled(loss, opt_state))(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return mpjax.apply_updates(params, updates), opt_state, {"loss": value, "grads": grads}

  found = updates(step, P, tx.init(P), X)
  assert found == {"0/w": "params/w", "0/b": "params/b"}
  of_names = updates(step, x=X, opt_state=tx.init(P), params=P)
  assert of_names == found


@pytest.mark.standard_promotion("dtypes")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masters_take_the_place_of_parameters_in_low_precision(dtype):
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.adam(0.1)))

  def step(params, opt_state, x):
    grads = jax.grad(mpjax.scaled(loss, opt_state))(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return mpjax.apply_updates(params, updates), opt_state

  params = jax.tree.map(lambda x: x.astype(dtype), P)
  found = updates(step, params, tx.init(params), X)
  names = {name.split("/")[0] for name in found.values()}
  assert names == {"opt_state" if dtype == "bfloat16" else "params"}
  assert len(found) == 2


@pytest.mark.standard_promotion("dtypes")
def test_a_train_state_and_a_model_that_is_written_to():
  model = nn.Dense(3)
  state = TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), X),
    tx=mpjax.loss_scaling(optax.adam(0.1)),
  )

  def step(state, x):
    grads = jax.grad(mpjax.scaled(lambda p: jnp.sum(state.apply_fn(p, x) ** 2), state.opt_state))(
      state.params
    )
    return state.apply_gradients(grads=grads)

  end = "params/params/{}"
  expected = {end.format(x): f"state/{end.format(x)}" for x in ("kernel", "bias")}
  assert updates(step, state, X) == expected

  net = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(net, mpjax.loss_scaling(optax.adam(0.1)), wrt=nnx.Param)

  def write(net, optimizer, batch):
    scaled = mpjax.scaled(lambda net: jnp.sum(net(batch["x"]) ** 2), optimizer)
    optimizer.update(net, nnx.grad(scaled)(net))

  for fn in (write, nnx.jit(write)):
    found = updates(fn, net, optimizer, {"x": X})
    assert found == {"kernel": "net/kernel", "bias": "net/bias"}

  low = nnx.Linear(3, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  masters = nnx.Optimizer(
    low, mpjax.loss_scaling(mpjax.master_weights(optax.adam(0.1))), wrt=nnx.Param
  )
  found = updates(write, low, masters, {"x": X})
  assert {name.split("/")[0] for name in found.values()} == {"optimizer"}
  assert len(found) == 2
