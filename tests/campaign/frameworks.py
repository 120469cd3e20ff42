"""The campaign of `mpjax.scaled`: a step in each framework, under each transformation of JAX.

The step is written once. A run is that step with mpjax, and some of its batches are bad. The
control is the same step with plain optax and the plain loss, and its bad steps are deleted. A scale
that is a power of two changes no bit, so the control has none. Only float16 rounds otherwise at a
scale, so there the control multiplies the loss and divides the gradients itself.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import mpjax
from tests.campaign.outcome import Outcome, differing, judge, require
from tests.loss_scale_oracle import Oracle
from tests.programs import data_of_keys

DEVICES, MEMBERS, ROWS = 4, 2, 16

WIDTH = 8
"""Of all layers. A policy keeps matmuls that sum fewer products in float32."""

SCALE = 2.0**10
DYNAMIC = {"init_scale": 2.0**12, "min_scale": SCALE, "max_scale": 2.0**14}
DYNAMIC |= {"growth_interval": 3, "hysteresis": 2}
SCALES = {
  "dynamic": mpjax.DynamicLossScale(**DYNAMIC),
  "static": mpjax.StaticLossScale(SCALE),
  "number": mpjax.SkipNonfinite(),  # Beside a number that the loss is scaled by.
}

ORACLES = {
  "dynamic": DYNAMIC,
  "static": {"init_scale": SCALE, "min_scale": SCALE, "max_scale": SCALE},
  "number": {"init_scale": 1, "max_scale": 1},
}
NUMBERS = {"loss_scale": "scale"} | {n: n for n in ("total", "skipped", "consecutive_skips")}
"""The metrics that are compared, with their names in the oracle."""

EXACT = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
"""With these options XLA contracts no product and sum, and rounds to float16 wherever JAX does."""

CLIP = optax.clip(2**-4)
ADAMW = optax.adamw(2**-5, b1=0.5, b2=0.5, weight_decay=2**-3)
OPTIMIZERS = {
  # What is outside of the loss scale, and what is inside.
  "adam": ([], optax.adam(2**-5, b1=0.5, b2=0.5)),
  "sgd momentum": ([], optax.sgd(2**-4, momentum=0.5)),
  "clip and adamw inside": ([], optax.chain(CLIP, ADAMW)),
  "clip outside of adamw": ([CLIP], ADAMW),
}
"""Constants are powers of two, so it does not show whether XLA contracts a product and a sum. The
clip is that of elements, which sums nothing in an order of its own and turns an inf into a number.
"""

POLICIES = ("none", "mixed_float16", "mixed_bfloat16")

LARGE = {"none": 2.0**124, "mixed_float16": 2.0**13, "mixed_bfloat16": 2.0**124}
"""The weight of an example whose gradient is finite, and overflows at each of the scales."""


class Case(NamedTuple):
  """One kind of run; each is compiled once."""

  framework: str
  transform: str
  scale: str = "dynamic"
  optimizer: str = "adam"
  policy: str = "none"


# Frameworks. The loss is `loss(params, statistics, batch, key) -> (loss, new statistics)`.


class Model(NamedTuple):
  """A model with batch statistics and dropout, as the tools of its framework differentiate it."""

  params: Any
  statistics: Any
  loss: Callable[..., Any]
  value_and_grad: Callable[..., Any] = jax.value_and_grad
  remat: Callable[..., Any] = jax.checkpoint
  whole: Callable[[Any], Any] = lambda params: params


def mean_error(out: Any, batch: Any) -> Any:
  error = out.astype(jnp.float32) - batch["y"]
  return jnp.mean(batch["weight"][:, None] * error**2)


def normal(seed: int, *shape: int) -> Any:
  return np.asarray(jax.random.normal(jax.random.key(seed), shape) / 2)


def plain(policy: Any, dtype: Any = "float32") -> Model:
  """Returns a tree of arrays, of which one has a dtype."""

  def forward(params, statistics, x, key):
    h = x.astype(params["w"].dtype) @ params["w"]
    h = jnp.real(h) + jnp.imag(h) if jnp.iscomplexobj(h) else h
    h = h + params["b"]
    new = (statistics + jnp.mean(h.astype(jnp.float32), 0)) / 2
    h = jnp.tanh(h - statistics[None])
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, jnp.zeros_like(h))
    return h @ params["v"], new

  run = mpjax.autocast(forward, policy) if policy else forward

  def loss(params, statistics, batch, key):
    out, new = run(params, statistics, batch["x"], key)
    return mean_error(out, batch), jax.lax.stop_gradient(new)

  params = {
    "w": normal(0, WIDTH, WIDTH).astype(dtype),
    "b": normal(1, 1, WIDTH),
    "v": normal(2, WIDTH, WIDTH),
  }
  if dtype == "complex64":
    params["w"] = params["w"] + 1j * normal(3, WIDTH, WIDTH)
  return Model(params, np.zeros(WIDTH, np.float32), loss)


class LinenNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(WIDTH)(x))
    return nn.Dense(WIDTH)(nn.Dropout(0.5, deterministic=False)(nn.relu(x)))


def linen(policy: Any) -> Model:
  net = mpjax.with_policy(LinenNet(), policy) if policy else LinenNet()
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  variables = LinenNet().init(keys, jnp.ones((ROWS, WIDTH)))

  def loss(params, statistics, batch, key):
    variables = {"params": params, "batch_stats": statistics}
    rngs = {"dropout": key}
    out, new = net.apply(variables, batch["x"], mutable=["batch_stats"], rngs=rngs)
    return mean_error(out, batch), new["batch_stats"]

  return Model(variables["params"], variables["batch_stats"], loss)


def haiku(policy: Any) -> Model:
  def forward(x):
    x = hk.BatchNorm(True, True, 0.5)(hk.Linear(WIDTH)(x), True)
    return hk.Linear(WIDTH)(hk.dropout(hk.next_rng_key(), 0.5, jax.nn.relu(x)))

  net = hk.transform_with_state(forward)
  params, state = net.init(jax.random.key(0), jnp.ones((ROWS, WIDTH)))
  apply = mpjax.autocast(net.apply, policy) if policy else net.apply

  def loss(params, statistics, batch, key):
    out, new = apply(params, statistics, key, batch["x"])
    return mean_error(out, batch), new

  return Model(params, state, loss)


class EquinoxNet(eqx.Module):
  first: eqx.nn.Linear
  norm: eqx.nn.BatchNorm
  dropout: eqx.nn.Dropout
  last: eqx.nn.Linear

  def __init__(self, key):
    self.first, self.last = (eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in jax.random.split(key))
    self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="rows", momentum=0.5, mode="ema")
    self.dropout = eqx.nn.Dropout(0.5)

  def __call__(self, x, key, state):
    x, state = self.norm(self.first(x), state)
    return self.last(self.dropout(jax.nn.relu(x), key=key)), state


def equinox(policy: Any) -> Model:
  model, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))

  def forward(model, x, keys, state):
    return jax.vmap(model, axis_name="rows", in_axes=(0, 0, None), out_axes=(0, None))(
      x, keys, state
    )

  run = mpjax.autocast(forward, policy) if policy else forward

  def loss(model, statistics, batch, key):
    out, new = run(model, batch["x"], jax.random.split(key, len(batch["x"])), statistics)
    return mean_error(out, batch), new

  params, static = eqx.partition(model, eqx.is_inexact_array)
  whole = functools.partial(eqx.combine, static)
  return Model(params, state, loss, eqx.filter_value_and_grad, eqx.filter_checkpoint, whole)


class NnxNet(nnx.Module):
  def __init__(self, rngs):
    self.first, self.last = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
    self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def nnx_model(policy: Any) -> Model:
  """Returns a model that holds its statistics and its counts of keys itself."""

  def loss(model, statistics, batch, key):
    view = mpjax.with_policy(model, policy) if policy else model
    return mean_error(view(batch["x"]), batch), ()

  return Model(NnxNet(nnx.Rngs(0)), (), loss, nnx.value_and_grad, nnx.remat)


FRAMEWORKS = {
  "plain": plain,
  "complex": functools.partial(plain, dtype="complex64"),
  "linen": linen,
  "haiku": haiku,
  "equinox": equinox,
  "nnx": nnx_model,
}


# Differentiators, `differentiate(model, wrap, params, *rest) -> (loss, new statistics), gradients`,
# where `wrap` is `mpjax.scaled`, or returns the loss as it is.


def by_argument(model, wrap, params, *rest):
  return model.value_and_grad(wrap(model.loss), has_aux=True)(params, *rest)


def by_keyword(model, wrap, params, statistics, batch, key):
  grad_fn = model.value_and_grad(wrap(model.loss), has_aux=True)
  return grad_fn(params, statistics=statistics, batch=batch, key=key)


def without_aux(model, wrap, params, *rest):
  loss, grads = model.value_and_grad(wrap(lambda *args: model.loss(*args)[0]))(params, *rest)
  return (loss, rest[0]), grads


def over_batch(model, wrap, params, *rest):
  return model.value_and_grad(wrap(lambda p: model.loss(p, *rest)), has_aux=True)(params)


def over_parameters(model, wrap, params, *rest):
  leaves, structure = jax.tree.flatten(params)

  def of_all(leaves):
    def of_some(some):
      return model.loss(jax.tree.unflatten(structure, [*some, *leaves[len(some) :]]), *rest)

    return wrap(of_some)(leaves[: len(leaves) // 2])

  result, grads = jax.value_and_grad(of_all, has_aux=True)(leaves)
  return result, jax.tree.unflatten(structure, grads)


def remat_inside(model, wrap, *args):
  return by_argument(model._replace(loss=model.remat(model.loss)), wrap, *args)


def remat_around(model, wrap, *args):
  return by_argument(model, lambda loss: model.remat(wrap(loss)), *args)


def parts_of(batch):
  return jax.tree.map(lambda x: x.reshape(2, len(x) // 2, *x.shape[1:]), batch)


def micro_batches(model, wrap, params, statistics, batch, key):
  def body(carry, part):
    total, statistics = carry
    (loss, statistics), grads = by_argument(model, wrap, params, statistics, part, key)
    return (jax.tree.map(jnp.add, total, grads), statistics), loss

  zero = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_inexact_array(x) else None, params)
  (grads, new), losses = jax.lax.scan(body, (zero, statistics), parts_of(batch))
  return (jnp.mean(losses), new), jax.tree.map(lambda g: g / 2, grads)


def nnx_micro_batches(model, wrap, module, statistics, batch, key):
  graphdef, params, rest = nnx.split(module, nnx.Param, ...)

  def body(carry, part):
    total, rest = carry
    inner = nnx.merge(graphdef, params, rest, copy=True)
    (loss, _), grads = by_argument(model, wrap, inner, (), part, None)
    rest = nnx.split(inner, nnx.Param, ...)[2]
    return (jax.tree.map(jnp.add, total, grads), rest), loss

  first = jax.tree.map(jnp.zeros_like, params), rest
  (grads, rest), losses = jax.lax.scan(body, first, parts_of(batch))
  nnx.update(module, rest)
  return (jnp.mean(losses), ()), jax.tree.map(lambda g: g / 2, grads)


def jacobian(model, wrap, params, *rest):
  def two(params):
    loss, new = model.loss(params, *rest)
    return jnp.stack([loss, 2 * loss]), (loss, new)

  rows, result = jax.jacrev(wrap(two), has_aux=True)(params)
  return result, jax.tree.map(lambda g: g[0], rows)


def hessian_product(model, wrap, params, *rest):
  loss_fn = wrap(lambda p: model.loss(p, *rest))
  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
  result, grads = grad_fn(params)
  product = jax.jvp(lambda p: grad_fn(p)[1], (params,), (params,))[1]
  return result, jax.tree.map(lambda g, h: g + h / 64, grads, product)


def penalty(model, wrap, params, statistics, batch, key):
  def with_jacobian(params, statistics, batch, key):
    evenly = batch | {"weight": jnp.ones_like(batch["weight"])}  # Squares of large ones overflow.
    of_input = lambda x: model.loss(params, statistics, evenly | {"x": x}, key)[0]  # noqa: E731
    loss, new = model.loss(params, statistics, batch, key)
    return loss + jnp.mean(jax.jacrev(of_input)(batch["x"]) ** 2), new

  return by_argument(model._replace(loss=with_jacobian), wrap, params, statistics, batch, key)


class Transform(NamedTuple):
  """How a loss is differentiated, and what the step is inside of."""

  differentiate: Callable[..., Any] = by_argument
  mapped: str = ""  # "members", "pmap" or "shard_map", where the rows are on devices
  check_vma: bool = False


TRANSFORMS = {
  "jit": Transform(),
  "kwargs": Transform(by_keyword),
  "no aux": Transform(without_aux),
  "vmap": Transform(mapped="members"),
  "vmap of closure": Transform(over_batch, mapped="members"),
  "shard_map": Transform(mapped="shard_map"),
  "shard_map, check_vma": Transform(mapped="shard_map", check_vma=True),
  "shard_map of closure, check_vma": Transform(over_batch, "shard_map", check_vma=True),
  "pmap": Transform(mapped="pmap"),
  "remat inside": Transform(remat_inside),
  "remat around": Transform(remat_around),
  "scan": Transform(micro_batches),
  "closure over batch": Transform(over_batch),
  "closure over parameters": Transform(over_parameters),
  "jacrev": Transform(jacobian),
  "hvp": Transform(hessian_product),
  "jacrev inside": Transform(penalty),
}

OF_TREES = ("closure over parameters", "jacrev", "hvp", "jacrev inside")
"""Transformations by `jax.jvp` or `jax.jacrev`, which take no modules."""


def is_possible(framework: str, transform: str) -> bool:
  if framework == "equinox" and "shard_map" in transform:
    return False  # The state of its BatchNorm cannot be written there.
  return framework not in ("equinox", "nnx") or transform not in OF_TREES


def generated(rng: np.random.Generator, count: int) -> list[Case]:
  """Returns `count` cases. Each value of each field occurs about as often as the others."""
  fields = [TRANSFORMS, FRAMEWORKS, SCALES, OPTIMIZERS, POLICIES]
  transforms, frameworks, scales, optimizers, policies = (_deck(rng, [*x]) for x in fields)
  cases = []
  for transform in itertools.islice(transforms, count):
    framework = next(each for each in frameworks if is_possible(each, transform))
    # Optax clips no complex numbers.
    optimizer = next(each for each in optimizers if framework != "complex" or "clip" not in each)
    cases.append(Case(framework, transform, next(scales), optimizer, next(policies)))
  return cases


PICKED = (
  Case("nnx", "vmap", "dynamic", "clip outside of adamw", "mixed_float16"),
  Case("nnx", "scan", "static", "adam", "mixed_float16"),
  Case("nnx", "shard_map of closure, check_vma", "dynamic", "adam", "mixed_float16"),
  Case("nnx", "remat around", "dynamic", "clip and adamw inside", "mixed_float16"),
  Case("equinox", "closure over batch", "dynamic", "clip and adamw inside", "mixed_float16"),
  Case("equinox", "vmap", "dynamic", "adam", "mixed_float16"),
  Case("linen", "scan", "dynamic", "clip outside of adamw", "mixed_float16"),
  Case("linen", "closure over parameters", "dynamic", "sgd momentum", "mixed_float16"),
  Case("haiku", "pmap", "dynamic", "adam", "mixed_float16"),
  Case("complex", "shard_map, check_vma", "dynamic", "sgd momentum"),
  Case("complex", "hvp", "number", "adam"),
)
"""Pairs that are in danger, whether they are drawn or not."""


def _deck(rng: np.random.Generator, values: list[str]) -> Iterator[str]:
  while True:
    yield from rng.permutation(values).tolist()


# The step, `step(state, batch, scale) -> state, metrics`.


class _Kind(NamedTuple):
  """What a step is made of: parts of mpjax, or plain ones."""

  tx: Any
  wrap: Callable[..., Any]  # of a loss, the state of the optimizer, and a scale
  keep: Callable[..., Any]
  atomic: Callable[..., Any]
  by_hand: bool = False  # The loss is at a scale, by which gradients are divided.
  guard: bool = False


def kind_of_run(case: Case, guard: bool) -> _Kind:
  outside, inside = OPTIMIZERS[case.optimizer]
  axis_name = "data" if TRANSFORMS[case.transform].mapped in ("pmap", "shard_map") else None
  if not guard:
    tx = optax.chain(*outside, mpjax.loss_scaling(inside, mpjax.NoLossScale()))
    wrap = lambda loss, *_: mpjax.scaled(loss, SCALE)  # noqa: E731
    return _Kind(tx, wrap, lambda _, new, old: new, lambda step: step)
  scaling = mpjax.loss_scaling(inside, SCALES[case.scale], axis_name=axis_name)
  tx = optax.chain(*outside, scaling) if outside else scaling
  of_number = case.scale == "number"
  wrap = lambda loss, opt_state, _: mpjax.scaled(loss, SCALE if of_number else opt_state)  # noqa: E731
  return _Kind(tx, wrap, mpjax.keep_if_skipped, mpjax.nnx.atomic_step, guard=True)


def kind_of_control(case: Case) -> _Kind:
  outside, inside = OPTIMIZERS[case.optimizer]
  by_hand = case.policy == "mixed_float16"

  def wrap(loss_fn, opt_state, scale):
    if not by_hand:
      return loss_fn

    def multiplied(*args, **kwargs):
      result = loss_fn(*args, **kwargs)
      if isinstance(result, tuple):
        return result[0] * scale, *result[1:]
      return result * scale

    return multiplied

  tx = optax.chain(*outside, inside) if outside else inside
  return _Kind(tx, wrap, lambda _, new, old: new, lambda step: step, by_hand)


def gradients(model: Model, transform: Transform, kind: _Kind, opt_state, scale, *args) -> Any:
  """Returns new statistics and the gradients, averaged over devices."""
  mean = functools.partial(jax.lax.pmean, axis_name="data")

  def wrap(loss_fn):
    wrapped = kind.wrap(loss_fn, opt_state, scale)
    if not transform.check_vma:
      return wrapped

    def of_all_devices(*args, **kwargs):
      # The transpose of this mean adds up the gradients of devices.
      loss, aux = wrapped(*args, **kwargs)
      return mean(loss), aux

    return of_all_devices

  (_, new), grads = transform.differentiate(model, wrap, *args)
  if transform.mapped in ("pmap", "shard_map"):
    new = averaged(new)
    grads = grads if transform.check_vma else mean(grads)
  grads = jax.tree.map(lambda g: g / scale, grads) if kind.by_hand else grads
  # XLA must not let the division round what the optimizer computes from the quotients.
  return new, jax.lax.optimization_barrier(grads)


def averaged(statistics: Any) -> Any:
  """Returns floats averaged over devices, and other leaves as they are on each."""
  mean = lambda x: (jax.lax.pmean if is_float(x) else jax.lax.pmax)(x, "data")  # noqa: E731
  return jax.tree.map(mean, statistics)


def is_float(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def all_finite(grads: Any) -> Any:
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))


def of_inner(opt_state: Any) -> Any:
  """Returns the state of an optimizer without its loss scale."""
  is_scaling = lambda x: isinstance(x, mpjax.states.LossScalingState)  # noqa: E731
  return jax.tree.map(
    lambda x: x.inner_state if is_scaling(x) else x, opt_state, is_leaf=is_scaling
  )


def functional_step(model: Model, transform: Transform, kind: _Kind) -> tuple[Any, Any, Any]:
  """Returns the first state of a model whose parameters are a tree, its step and `FIELDS` of it."""

  def step(state, batch, scale):
    params, opt_state, statistics, count = state
    key = jax.random.fold_in(jax.random.key(0), count)
    args = model.whole(params), statistics, batch, key
    new, grads = gradients(model, transform, kind, opt_state, scale, *args)
    updates, opt_state = kind.tx.update(grads, opt_state, params)
    rest = kind.keep(opt_state, (new, count + 1), (statistics, count))
    metrics = mpjax.loss_scaling_metrics(opt_state) if kind.guard else {}
    state = optax.apply_updates(params, updates), opt_state, *rest
    return state, metrics | {"finite gradients": all_finite(grads)}

  params = jax.tree.map(jnp.asarray, model.params)
  fields = lambda state: (state[0], of_inner(state[1]), *state[2:])  # noqa: E731
  return (params, kind.tx.init(params), model.statistics, jnp.int32(0)), step, fields


def nnx_step(model: Model, transform: Transform, kind: _Kind) -> tuple[Any, Any, Any]:
  """Returns the same for a module with an `nnx.Optimizer`."""
  if transform.differentiate is micro_batches:
    transform = transform._replace(differentiate=nnx_micro_batches)

  @kind.atomic
  def train(module, optimizer, batch, scale):
    # mpjax finds the scale in the optimizer itself.
    args = module, (), batch, None
    _, grads = gradients(model, transform, kind, optimizer, scale, *args)
    if transform.mapped in ("pmap", "shard_map"):
      nnx.update(module, averaged(nnx.state(module, nnx.BatchStat)))
    optimizer.update(module, grads)
    return all_finite(grads)

  def step(state, batch, scale):
    module, optimizer = nnx.merge(graphdef, state, copy=True)
    metrics = {"finite gradients": train(module, optimizer, batch, scale)}
    metrics |= mpjax.loss_scaling_metrics(optimizer) if kind.guard else {}
    return nnx.state((module, optimizer)), metrics

  def fields(state):
    module, optimizer = nnx.merge(graphdef, state, copy=True)
    params, rest = nnx.state(module, nnx.Param, ...)
    own = of_inner(nnx.as_pure(optimizer.opt_state))
    return nnx.as_pure(params), own, nnx.as_pure(rest), optimizer.step[...]

  graphdef, state = nnx.split((model.params, nnx.Optimizer(model.params, kind.tx, wrt=nnx.Param)))
  return state, step, fields


FIELDS = ("parameters", "optimizer", "statistics", "step")
"""What a step commits together."""


def program(case: Case, kind: _Kind) -> tuple[Any, Any, Any]:
  """Returns the first state, the compiled step, and a function that returns `FIELDS` of a state."""
  model = FRAMEWORKS[case.framework](None if case.policy == "none" else case.policy)
  transform = TRANSFORMS[case.transform]
  make = nnx_step if case.framework == "nnx" else functional_step
  state, step, fields = make(model, transform, kind)
  if transform.mapped == "members":
    state = jax.tree.map(lambda x: jnp.stack([x] * MEMBERS), state)
    step = jax.vmap(step)
  if transform.mapped == "shard_map":
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    whole, rows = PartitionSpec(), PartitionSpec("data")
    specs = {"in_specs": (whole, rows, whole), "out_specs": whole}
    step = jax.shard_map(step, mesh=mesh, check_vma=transform.check_vma, **specs)
  if transform.mapped != "pmap":
    return state, jax.jit(step, compiler_options=EXACT), fields
  on_devices = jax.pmap(step, "data", in_axes=(None, 0, None), out_axes=None)

  def over_devices(state, batch, scale):
    batch = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
    return on_devices(state, batch, scale)

  return state, over_devices, fields


# The campaign.

FAULTS = (np.nan, np.inf, -np.inf, LARGE)
"""What is planted: three values in the input, or an overflow that only the scale causes."""


class Step(NamedTuple):
  """A step of all members: good batches, the same with faults, and which have one."""

  good: Any
  bad: Any
  planted: np.ndarray
  is_value: np.ndarray  # whether the fault is one without a scale too


def draw(case: Case, rng: np.random.Generator, planted: np.ndarray) -> Step:
  members = len(planted)
  good = {
    "x": rng.normal(size=(members, ROWS, WIDTH)).astype(np.float32),
    "y": 2 + rng.normal(size=(members, ROWS, WIDTH)).astype(np.float32),
    "weight": np.ones((members, ROWS), np.float32),
  }
  bad, is_value = jax.tree.map(np.copy, good), np.zeros(members, bool)
  for member in np.flatnonzero(planted):
    fault, row = FAULTS[rng.integers(len(FAULTS))], rng.integers(ROWS)
    is_value[member] = fault is not LARGE
    if fault is LARGE:
      bad["weight"][member, row] = LARGE[case.policy]
    else:
      bad["x"][member, row, rng.integers(WIDTH)] = fault
  return Step(good, bad, planted, is_value)


def attack(case: Case, steps: int, rng: np.random.Generator, *, guard: bool) -> Outcome:
  """Trains with faults and returns how many there were, and how many left a trace.

  Args:
    case: what is run.
    steps: how often.
    rng: draws data and faults.
    guard: whether what should catch the faults is in place.
  """
  has_members = TRANSFORMS[case.transform].mapped == "members"
  planted = rng.random((MEMBERS if has_members else 1, steps)) < 0.4
  planted[:, -2:] = [True, False]  # Each run has a fault, and a step that shows it.
  shaped = (lambda x: x) if has_members else (lambda x: x[0])  # of values for each member
  rows = (lambda x: x) if has_members else (lambda x: x[None])

  state, run, fields = program(case, kind_of_run(case, guard))
  plain, control, plain_fields = program(case, kind_of_control(case))
  oracles = [Oracle(**ORACLES[case.scale]) for _ in planted]
  wrong = {name: np.zeros_like(planted) for name in (*FIELDS, *("flag", "scale") * guard)}
  for number in range(steps):
    step = draw(case, rng, planted[:, number])
    good, bad = (jax.tree.map(shaped, batch) for batch in (step.good, step.bad))
    is_own = guard and case.scale != "number"
    scales = np.asarray([o.scale if is_own else SCALE for o in oracles], np.float32)
    # 1. The fault is what it is said to be.
    _, seen = control(plain, bad, np.ones_like(shaped(scales)))
    require(np.all(seen["finite gradients"] == shaped(~step.is_value)), f"{case}: another fault")
    # 2. The run meets it, and the control does not.
    state, metrics = run(state, bad, shaped(scales))
    metrics = jax.device_get(metrics)
    new, _ = control(plain, good, shaped(scales))
    plain = chosen(shaped(~step.planted), new, plain)
    # 3. They have the same bits.
    pairs = zip(FIELDS, fields(state), plain_fields(plain), strict=True)
    for name, found, expected in pairs:
      found, expected = (jax.tree.map(rows, data_of_keys(tree)) for tree in (found, expected))
      wrong[name][:, number] = differing(found, expected)
    if guard:
      numbers = [o.step(not bad).numbers() for o, bad in zip(oracles, step.planted, strict=True)]
      wrong["flag"][:, number] = rows(metrics["finite"]) == step.planted
      for name, key in NUMBERS.items():
        unlike = rows(metrics[name]) != np.asarray([each[key] for each in numbers])
        wrong["scale"][:, number] |= unlike
  outcome = Outcome(f"scaled: {case.framework}, {case.transform}")
  judge(outcome, planted, wrong, ", ".join(case))
  return outcome


def chosen(condition: Any, new: Any, old: Any) -> Any:
  """Returns leaves of a tree, or of another one, for each member."""

  def choose(a, b):
    shape = np.shape(condition) + (1,) * (np.ndim(a) - np.ndim(condition))
    return jnp.where(np.reshape(condition, shape), a, b)

  return jax.tree.map(choose, new, old)
