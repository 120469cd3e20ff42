"""The gradients of one batch: the loss as a jaxpr, over micro-batches one by one, over devices."""

import functools
import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from mpjax._core.errors import REFUSALS, MpjaxTypeError, MpjaxValueError, flax_errors, listed
from mpjax._core.leaves import is_key, path_text
from mpjax._core.trees import check_alike, is_inexact
from mpjax._core.types import Array, Grads, Leaf, Params, PyTree
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import inner_jaxprs, walk
from mpjax._optim.loss_scale import COUNTERS
from mpjax._optim.train_state import TrainState, own_scale
from mpjax._optim.trees import at_least_float32, stored_first, strong, unless_there_before
from mpjax._optim.value_and_grad import check_loss, value_and_grad

Metrics: TypeAlias = dict[str, Leaf]

LossFn: TypeAlias = Callable[
  [Params, PyTree, PyTree, Array | None], tuple[Array, tuple[PyTree, Metrics]]
]
"""`loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))`."""

OUR_METRICS = frozenset(
  {"loss", "grad_norm", "retries", "loss_scale", "finite", "scale_changed", *COUNTERS}
)
"""The names that a loss function leaves to the step."""


def trace_loss(
  loss_fn: LossFn, params: Params, model_state: PyTree, batch: PyTree, rng: Array | None
) -> tuple[LossFn, ClosedJaxpr, PyTree]:
  """Returns `loss_fn` traced, its jaxpr, and which leaves of the model state it leaves alone."""

  @functools.wraps(loss_fn)
  def checked(params: Params, model_state: PyTree, batch: PyTree, rng: Array | None) -> PyTree:
    where = "mpjax.make_train_step(loss_fn)"
    try:
      out = loss_fn(params, model_state, batch, rng)
    except (*REFUSALS, *flax_errors()) as error:
      options = {"model_state=": not jax.tree.leaves(model_state), "rng=": rng is None}
      absent = " and ".join(name for name, is_absent in options.items() if is_absent)
      of_state = f"; TrainState.create made this state without {absent}" if absent else ""
      call = "mpjax.make_train_step calls loss_fn(params, model_state, batch, rng)"
      error.add_note(f"{call}{of_state}.")
      raise
    aux: PyTree = out[1] if isinstance(out, tuple) and len(out) == 2 else None
    if not (isinstance(aux, tuple) and len(aux) == 2 and isinstance(aux[1], Mapping)):
      expected = "it to return (loss, (model_state, metrics)) with a dict of metrics"
      fix = "Return (loss, ((), {})) if there is no model state and nothing to report."
      got = str(jax.tree.map(jax.typeof, out))
      raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
    bad = [name for name in aux[1] if not isinstance(name, str) or name in OUR_METRICS]
    if bad:
      expected, fix = "other names than ours, and strings", "Rename them: ours are in that dict."
      raise MpjaxValueError(f"{where}: metrics", expected=expected, got=str(bad), fix=fix)
    expected = "the structure, shapes and dtypes that it was given"
    fix = "Return the entire new state, cast to the dtypes of the old one."
    check_alike(aux[0], model_state, f"{where}: model_state", expected=expected, fix=fix)
    # Here, since JAX itself takes only arrays, and one result has to come before the state's.
    check_loss(out[0], "mpjax.value_and_grad(fun): the loss")
    return out

  # JAX keeps the trace: the step differentiates, looks at and runs what it has called once.
  traced = jax.jit(checked)
  jaxpr = traced.trace(params, model_state, batch, rng).jaxpr
  # Leaves of the arguments are those of params, then of model_state; of the results, the loss comes
  # first.
  leaves, structure = jax.tree.flatten(model_state)
  graph, before = Graph(jaxpr), len(jax.tree.leaves(params))
  unchanged = [graph.results[1 + i] is graph.arguments[before + i] for i in range(len(leaves))]
  return traced, jaxpr, structure.unflatten(unchanged)


def warn_without_float16(loss_fn: LossFn, jaxpr: ClosedJaxpr) -> None:
  """Warns if a dynamic scale protects no float16."""
  # A jaxpr says nothing of how the rules of `jax.custom_vjp` compute in it, nor of the inside of a
  # primitive that this version does not know.
  for eqn in walk(jaxpr):
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    in_float16 = any(getattr(aval, "dtype", None) == jnp.float16 for aval in avals)
    if in_float16 or inner_jaxprs(eqn) is None or facts_of(eqn).holds is Holds.CUSTOM_VJP:
      return
  # Between the user's call and this one are JAX's, as many as there are: the line to change is that
  # of the function.
  code = getattr(inspect.unwrap(loss_fn), "__code__", warn_without_float16.__code__)
  warnings.warn_explicit(
    "mpjax.make_train_step: the loss scale is dynamic, but nothing in loss_fn is computed in "
    "float16. bfloat16 and float32 have the range to do without: SkipNonfinite() skips bad "
    "steps without scaling, NoLossScale() does not look for them.",
    UserWarning,
    code.co_filename,
    code.co_firstlineno,
  )


IntegerState: TypeAlias = Literal["sum", "same"] | Mapping[str, Literal["sum", "same"]] | None
"""How integers of the model state are combined: all alike, or by path."""


def batch_gradients(
  loss_fn: LossFn,
  state: TrainState,
  batch: PyTree,
  rng: Array | None,
  micro_batches: int,
  axes: tuple[Hashable, ...],
  integer_state: IntegerState,
) -> tuple[Array, PyTree, Metrics, Grads, PyTree]:
  """Returns loss, model state, metrics and scaled float32 gradients of a batch.

  And what has to be finite: the new model state, with 0 for what was there before the batch.
  """
  params, vary = localise(state.params, axes)
  dynamic = own_scale(state.opt_state, "").dynamic
  seen = []  # Whether leaves of the model state are returned as they were given.

  def run(model_state: PyTree, batch: PyTree, rng: Array | None) -> tuple[PyTree, ...]:
    traced, jaxpr, unchanged = trace_loss(loss_fn, params, model_state, batch, rng)
    seen.append(unchanged)
    if dynamic:
      warn_without_float16(loss_fn, jaxpr)

    def own_loss(*args: PyTree) -> tuple[Array, tuple[PyTree, Metrics]]:
      # A loss that loss_fn has reduced is one number for all devices: differentiated as such, each
      # would get its share of the gradient, and the mean below would divide that once more.
      loss, aux = traced(*args)
      return vary(loss), aux

    differentiate = value_and_grad(own_loss, state.opt_state, has_aux=True)
    (loss, (new, metrics)), grads = differentiate(params, model_state, batch, rng)
    metrics = jax.tree.map(_metric, metrics)
    new = jax.tree.map(strong, new)
    return at_least_float32(loss), vary(new), metrics, jax.tree.map(at_least_float32, grads)

  model_state = vary(state.model_state)
  if micro_batches == 1:
    loss, model_state, metrics, grads = run(model_state, batch, rng)
  else:

    def body(carry: tuple[PyTree, Grads], xs: tuple[Array, PyTree]) -> tuple[PyTree, PyTree]:
      (model_state, total), (index, micro_batch) = carry, xs
      key = None if rng is None else jax.random.fold_in(rng, index)
      loss, model_state, metrics, grads = run(model_state, micro_batch, key)
      return (model_state, jax.tree.map(jnp.add, total, grads)), (loss, metrics)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(at_least_float32(p)), params)
    # Row i goes to micro-batch i % micro_batches: what is divided over devices stays where it is.
    cut = lambda x: x.reshape(x.shape[0] // micro_batches, micro_batches, *x.shape[1:])  # noqa: E731
    parts = jax.tree.map(lambda x: jnp.moveaxis(cut(x), 1, 0), batch)
    (model_state, total), (losses, each) = jax.lax.scan(
      body, (model_state, zeros), (jnp.arange(micro_batches), parts)
    )
    grads = jax.tree.map(lambda t: t / micro_batches, total)
    loss = jnp.mean(losses)
    metrics = jax.tree.map(
      lambda x: jnp.mean(x, axis=0) if is_inexact(x) else jnp.sum(x, axis=0, dtype=x.dtype), each
    )
  unchanged = seen[-1]
  if axes:
    mean = functools.partial(jax.lax.pmean, axis_name=axes)
    model_state = common_state(model_state, state.model_state, unchanged, axes, integer_state)
    metrics = jax.tree.map(lambda x: mean(x) if is_inexact(x) else jax.lax.psum(x, axes), metrics)
    loss, grads = mean(loss), jax.tree.map(mean, grads)
  watched = jax.tree.map(_watched, model_state, state.model_state, unchanged)
  return loss, model_state, metrics, stored_first(grads), watched


def _watched(new: Array, old: Array, unchanged: bool) -> Leaf:
  """Returns what has to be finite of a leaf of the model state."""
  return 0 if unchanged or not is_inexact(new) else unless_there_before(new, old)


def _metric(x: Leaf) -> Array:
  """`x` in the dtype in which it is added up: at least float32, or int32 (as bool is counted)."""
  x = at_least_float32(x)
  return x if is_inexact(x) or x.dtype.itemsize >= 4 else x.astype(jnp.int32)


# What the devices of a mapped axis have in common: parameters before, model state after.


def localise(
  params: Params, axes: tuple[Hashable, ...]
) -> tuple[Params, Callable[[PyTree], PyTree]]:
  """Returns the parameters as each device's own, and a function that does so to other trees."""
  # Of replicated parameters the gradient that `jax.grad` returns inside of a `shard_map` is already
  # summed over devices, in the dtype of the matmul. Of a device's own ones it is not.
  manual = tuple(name for name in axes if name in jax.sharding.get_abstract_mesh().manual_axes)
  if not manual:
    return params, lambda tree: tree
  try:
    local = jax.tree.map(lambda p: jax.lax.pcast(p, manual, to="varying"), params)
  except ValueError as error:
    where = f"mpjax.make_train_step(axis_name={axes!r})"
    expected, got = "parameters that are the same on all devices along it", "some that differ"
    fix = "Pass them with in_specs=jax.P(); if sharded, use jit over a Mesh, without axis_name."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix) from error
  flag = jax.lax.pcast(jnp.asarray(True), manual, to="varying")
  # Also for what varies already: a scan wants the same from all that it carries.
  return local, lambda tree: jax.tree.map(lambda x: jnp.where(flag, x, x), tree)


def common_state(
  new: PyTree,
  old: PyTree,
  unchanged: PyTree,
  axes: tuple[Hashable, ...],
  integer_state: IntegerState,
) -> PyTree:
  """Returns the model state that all devices continue with."""
  # What no device has changed is what it was. Floating leaves are averaged in float32, keys are the
  # same everywhere, and of integers and booleans `integer_state` says which they are, of the leaf
  # or of the nearest branch that it is in. "sum" adds what each device has added: a counter that is
  # set back would go down once for each device.
  leaves, structure = jax.tree_util.tree_flatten_with_path(new)
  rules = integer_state if isinstance(integer_state, Mapping) else {"": integer_state}
  used, common, problems = {""}, list[Array](), list[str]()
  olds, same = jax.tree.leaves(old), jax.tree.leaves(unchanged)
  for (path, x), before, is_same in zip(leaves, olds, same, strict=True):
    text = path_text(path)
    above = [name for name in rules if not name or f"{text}/".startswith(f"{name}/")]
    used |= set(above)
    rule = rules[max(above, key=len)] if above else None
    if rule is None and not (is_same or is_inexact(x) or is_key(x.dtype)):
      problems.append(f"nothing about {x.dtype}{list(x.shape)} at {text or 'the root'}")
    common.append(before if is_same else _combine(x, before, rule, axes))
  problems += [f"{name!r}, where the state has no leaf" for name in rules if name not in used]
  if problems:
    raise MpjaxValueError(
      f"mpjax.make_train_step(axis_name={axes!r}): model_state",
      expected="integer_state= to say how devices combine integers that loss_fn changes: those "
      "that count a device's own rows are added, those that count steps are the same on all",
      got=listed(problems),
      fix='Pass integer_state="sum" (the old value and the changes of all devices), '
      'integer_state="same" (devices agree anyway), or a dict from paths ("a/b") to these.',
    )
  return structure.unflatten(common)


def _combine(x: Array, old: Array, rule: str | None, axes: tuple[Hashable, ...]) -> Array:
  if is_key(x.dtype):
    data = jax.lax.pmax(jax.random.key_data(x), axes)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  if is_inexact(x):
    return jax.lax.pmean(at_least_float32(x), axes).astype(x.dtype)
  if x.dtype == jnp.bool_:
    return jax.lax.pmax(x.astype(jnp.int32), axes).astype(jnp.bool_)
  return old + jax.lax.psum(x - old, axes) if rule == "sum" else jax.lax.pmax(x, axes)
