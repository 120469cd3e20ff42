"""`sample_activations`: statistics of the activations of modules, inside of a compiled step.

A sampled step runs the forward pass once more, in a branch of a `jax.lax.cond`. The training step
itself keeps its operations, its fusions and its residuals, and a step that is not sampled computes
nothing. What differentiates the loss, or saves memory in it, has no part in this.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax._core.errors import (
  MpjaxTypeError,
  UnmatchedRuleError,
  check_call,
  check_callable,
  kind_of,
  nearest,
)
from mpjax._core.leaves import is_subnormal, set_raw_value
from mpjax._core.nnx_objects import is_nnx_variable
from mpjax._core.types import Array, OptState, P, PyTree
from mpjax._debug.arguments import Call
from mpjax._debug.compare_modules import ALL_BODIES, find_modules, module_paths
from mpjax._debug.module_names import traced_with_modules
from mpjax._debug.paths import is_within, relative_to
from mpjax._debug.selectors import rule_paths_of
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.locations import MODULE
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.runner import Enclosing, Observer, run
from mpjax._jaxpr.steps import Body, Step, body_of
from mpjax._optim.monitor_activations import LARGEST_HEADROOM, monitor_state, no_activations
from mpjax._optim.optimizer_trees import at_least_float32, nodes_of
from mpjax._optim.states import ActivationMonitorState
from mpjax._policy.rules import matches_glob

_CALL = "mpjax.sample_activations(fun, opt_state)"
_NAME_MODULES = "Pass an NNX model as an argument. In functions, use jax.named_scope for modules."
_FIX = "Write opt_state = mpjax.sample_activations(loss_fn, opt_state)(params, batch)."


@check_call(_CALL, fix=_FIX)
def sample_activations(fun: Callable[P, PyTree], opt_state: OptState) -> Callable[P, OptState]:
  """Measure activations of the modules that `mpjax.monitor_activations` chose, every few steps.

  A sampled step runs the forward pass once more, in a branch. Gradients, memory of the backward
  pass and other steps do not change. Call it in the compiled step, before the gradients.

  The activations of a module are its outputs, the results of its matmuls, and the values that it
  passes to other modules. Those of the modules inside of it count too.

  Inside of a `jax.shard_map` or `jax.pmap` the statistics are those of all devices. Under a
  `jax.vmap` of the whole step each step runs the branch.

  Args:
    fun: the loss, or another function that calls the modules.
    opt_state: a state that holds one of `mpjax.monitor_activations`, or an `nnx.Optimizer`, whose
      variables are written.

  Returns:
    A function of the arguments of `fun` that returns `opt_state` with the statistics. Read them
    with `mpjax.states.activation_statistics`. Arguments do not change: neither do variables of Flax
    NNX in them.

  Raises:
    MpjaxTypeError: `fun` is no function, the state keeps no statistics of activations, or it is an
      `nnx.State`.
    UnmatchedRuleError: when called: no module has a path that a glob matches.

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax, optax
  >>> model = mpjax.with_policy(nn.Dense(2), "mixed_float16")
  >>> tx = mpjax.loss_scaling(optax.sgd(0.1))
  >>> tx = mpjax.monitor_activations(tx, "**", every=100)
  >>> @jax.jit
  ... def step(params, opt_state, x):
  ...   def loss_fn(params, x):
  ...     return jnp.mean(model.apply(params, x) ** 2)
  ...   opt_state = mpjax.sample_activations(loss_fn, opt_state)(params, x)
  ...   loss, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params, x)
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   return mpjax.apply_updates(params, updates, opt_state), opt_state
  >>> x = jnp.ones((1, 4))
  >>> params = model.init(jax.random.key(0), x)
  >>> params, opt_state = step(params, tx.init(params), x)
  >>> mpjax.states.activation_statistics(opt_state)["**"].headroom > 10_000
  Array(True, dtype=bool)
  """
  check_callable(fun, "mpjax.sample_activations(fun)", expected="a function", fix=_FIX)
  where = "mpjax.sample_activations(opt_state)"
  state = monitor_state(opt_state, where)
  # `monitor_state` also reads an `nnx.State`, into which statistics cannot be written.
  if not nodes_of(opt_state, ActivationMonitorState):
    raise MpjaxTypeError(
      where,
      expected="an optimizer state, or an nnx.Optimizer",
      got=kind_of(opt_state),
      fix="Merge the nnx.State in the step.",
    )

  def sample(*args: P.args, **kwargs: P.kwargs) -> OptState:
    call = Call(args, kwargs, _CALL)
    # This traces `fun` once more. The step's own trace of the loss stays as it is.
    body, operands = _forward_pass(fun, call)
    globs = list(state.activations)
    watched = _watched(body, globs)
    # Inside of a `shard_map` each device sees its part. These axes join the statistics.
    axes = jax.sharding.get_abstract_mesh().manual_axes

    def measured() -> dict[str, Array]:
      # A derivative of the step must not enter the branch.
      arrays = jax.lax.stop_gradient(operands)
      _, seen = run(body, arrays, _Statistics(watched, len(globs)), Enclosing(axes=axes))
      new = dict(zip(globs, _over_devices(seen, axes), strict=True))
      # Both branches need one type. In a `shard_map`, a state that differs by device is varying.
      return jax.tree.map(functools.partial(jnp.where, False), state.activations, new)

    # The counter is in the state, so a restored run samples the same steps.
    is_sampled = state.calls % state.every == 0
    activations = jax.lax.cond(is_sampled, measured, lambda: state.activations)
    # The update waits for the branch. Otherwise XLA copies the donated parameters that it reads.
    sample = {"activations": activations, "calls": state.calls + 1}
    new = {**sample, "inner_state": state.inner_state}
    return _with_sample(opt_state, jax.lax.optimization_barrier(new))

  return sample


def _forward_pass(fun: Callable[P, PyTree], call: Call) -> tuple[Body, list[Array]]:
  """Returns the steps that compute the results of a function, and their operands."""
  body = body_of(traced_with_modules(fun, call), compiled=True)
  # Writes to variables of Flax NNX come after the results.
  # Writes are dropped: the sample must not update batch statistics a second time.
  returned = sum(leaf is jax.Array for leaf in call.returned.leaves)
  # Traced values that the function closes over are operands: they depend on the step.
  closed_over = {slot: x for slot, x in body.consts.items() if isinstance(x, Tracer)}
  consts = {slot: x for slot, x in body.consts.items() if slot not in closed_over}
  inputs = (*body.inputs, *closed_over)
  body = dataclasses.replace(body, inputs=inputs, consts=consts, outputs=body.outputs[:returned])
  return body, [*call.arrays, *closed_over.values()]


def _watched(body: Body, globs: Sequence[str]) -> dict[int, list[int]]:
  """Returns for each chosen activation the positions of the globs that choose it."""
  # Globs match paths relative to a model. Operations have paths relative to the function.
  roots = _roots(body)
  # Modules of two models may have one path.
  activations = collections.defaultdict[str, set[int]](set)
  for scope, slots in _activations(body).items():
    for path in _paths(scope, roots):
      activations[path].update(slots)
  watched = collections.defaultdict[int, list[int]](list)
  for position, glob in enumerate(globs):
    chosen = [path for path in ("", *activations) if matches_glob(glob, path)]
    # A glob for a module covers the modules inside as well.
    slots = {slot for path in chosen for slot in _inside(path, activations)}
    if not slots:
      raise _unmatched(glob, activations)
    # One activation may belong to several globs.
    for slot in slots:
      watched[slot].append(position)
  return watched


def _activations(body: Body) -> Mapping[str, set[int]]:
  """Returns the own activations of each module by its scope, without modules inside of it."""
  forward = [step for step in body.every_step() if step.location.direction == "forward"]
  # Operations outside of modules have their line, "train.py:3", as their path.
  scopes = {path for step in forward for path in module_paths(step.location.scopes)}
  activations = collections.defaultdict[str, set[int]](set)
  for path, slot in (*_crossing(body), *_of_matmuls(forward)):
    if path in scopes or not path:
      activations[path].add(slot)
  return activations


def _crossing(body: Body) -> Iterator[tuple[str, int]]:
  """Yields the modules with the values that they return, or pass to modules inside."""
  # Enter every loop and branch: statistics need no fixed number of iterations.
  modules = find_modules(body, (), ALL_BODIES)
  for call in modules.calls:
    if call.direction == "forward":
      # Outputs are the values that code outside of the module reads.
      yield from ((call.path, slot) for slot in call.outputs.values())
      for slot in call.inputs.values():
        # An input that another module made is an activation of that module. The maker ends with its
        # number.
        if maker := modules.makers.get(slot):
          path, _, _ = maker.rpartition(" ")
          yield path, slot


def _of_matmuls(steps: Iterable[Step]) -> Iterator[tuple[str, int]]:
  """Yields the modules with the results of their matmuls. The root of a model of NNX is ""."""
  for step in steps:
    # A matmul between modules, such as the loss, has no module to belong to.
    paths = module_paths(step.location.scopes)
    is_inside = bool(paths) or step.location.marked(MODULE) is not None
    if is_inside and facts_of(step.eqn).flops is not None:
      path = paths[-1] if paths else ""
      yield from ((path, slot) for slot in step.outs)


def _inside(path: str, activations: Mapping[str, set[int]]) -> set[int]:
  """Returns the activations of a module and of the modules inside of it."""
  within = (slots for other, slots in activations.items() if is_within(other, path))
  return set[int]().union(*within)


def _roots(body: Body) -> set[str]:
  """Returns the scopes that models run in: in Linen a model has one of its class."""
  rule_paths = rule_paths_of(Graph(body)).items()
  # The part of a scope before the path of the module in its model is the root.
  roots = {
    scope.removesuffix(rule_path).rstrip("/")
    for scope, rule_path in rule_paths
    if scope.endswith(rule_path)
  }
  return roots - {""}


def _paths(scope: str, roots: Collection[str]) -> list[str]:
  """Returns the paths of a module: its scope, and the path from the root of the model around it."""
  around = [root for root in roots if is_within(scope, root)]
  return [scope, *(relative_to(scope, root) for root in around)]


def _unmatched(glob: str, paths: Collection[str]) -> UnmatchedRuleError:
  modules = sorted(set(paths) - {""})
  # With no path at all, the model was probably not an argument.
  near = ", ".join(map(repr, nearest(glob, modules)))
  return UnmatchedRuleError(
    f"mpjax.monitor_activations(modules): {glob!r}",
    expected="a glob that matches a module which the function calls",
    got=f"{len(modules)} paths that it does not match",
    fix=f"The nearest are {near}." if near else _NAME_MODULES,
  )


class _Statistics(Observer):
  """Measures the activations of modules, in all iterations and branches and on all devices.

  What it has seen is one row for each glob, with the fields of `ActivationStatistics`.
  """

  def __init__(self, watched: Mapping[int, Sequence[int]], rows: int) -> None:
    self.watched, self.rows = watched, rows

  def nothing(self) -> Array:
    return jnp.tile(no_activations(), (self.rows, 1))

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    for slot, x in zip(step.outs, outs, strict=True):
      if slot in self.watched:
        # One update for all rows of an activation. Rows of several activations accumulate.
        rows = jnp.asarray(self.watched[slot])
        new = jnp.tile(_statistics(jnp.asarray(x)), (len(rows), 1))
        self.seen = self.seen.at[rows].set(self.merge(self.seen[rows], new))

  def after(self, step: Step, outs: list[Any]) -> list[Any]:
    # A result of a loop may be an activation that no step inside makes.
    self.look(step, (), outs)
    return outs

  def merge(self, one: Array, other: Array) -> Array:
    return _by_field((jnp.add, jnp.maximum, jnp.minimum), one, other)

  def of_devices(self, seen: Array) -> Array:
    return _by_field([functools.partial(f, axis=0) for f in (jnp.sum, jnp.max, jnp.min)], seen)


def _over_devices(seen: Array, axes: tuple[Hashable, ...]) -> Array:
  """Returns the statistics over all devices of a `shard_map` around."""
  if not axes:
    return seen
  # Counts add up, the largest magnitude is a maximum, and headroom a minimum.
  reductions = (jax.lax.psum, jax.lax.pmax, jax.lax.pmin)
  return _by_field([functools.partial(f, axis_name=axes) for f in reductions], seen)


def _by_field(ways: Sequence[Callable[..., Array]], *rows: Array) -> Array:
  """Returns rows that are combined in one way for counts, one for magnitudes, one for headroom."""
  fields = (slice(0, 3), slice(3, 4), slice(4, 5))
  pairs = zip(ways, fields, strict=True)
  return jnp.concatenate([way(*(row[..., field] for row in rows)) for way, field in pairs], axis=-1)


def _statistics(x: Array) -> Array:
  """Returns the row of one array."""
  # A complex number is subnormal if one of its parts is.
  parts = (jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else (x,)
  is_small = functools.reduce(jnp.logical_or, map(is_subnormal, parts))
  is_bad = ~jnp.isfinite(x)
  # Non-finite elements are counted apart. The magnitude is that of the finite ones.
  largest = jnp.max(jnp.where(is_bad, 0, at_least_float32(jnp.abs(x))), initial=0)
  headroom = _headroom(largest, float(jnp.finfo(x.dtype).max))
  # After an overflow there is no headroom left.
  numbers = [largest, jnp.where(jnp.any(is_bad), 0, headroom)]
  # Numbers in float64 may be beyond the range of float32.
  rounded = [jnp.minimum(number, LARGEST_HEADROOM).astype(jnp.float32) for number in numbers]
  return jnp.stack([jnp.float32(x.size), _count(is_bad), _count(is_small), *rounded])


def _headroom(largest: Array, limit: float) -> Array:
  """Returns how many times a number may grow up to a limit, at most `LARGEST_HEADROOM` times."""
  # Dividing by 0 or by tiny numbers would overflow, also in the branch of `where` that is
  # discarded.
  is_less = largest > limit / LARGEST_HEADROOM
  return jnp.where(is_less, limit / jnp.where(is_less, largest, limit), LARGEST_HEADROOM)


def _count(mask: Array) -> Array:
  """Returns how many elements are true, in float32."""
  # Exact along the last axis. An int32 does not hold the number of all elements of a large array.
  along_last = jnp.sum(mask, axis=-1, dtype=jnp.int32) if mask.ndim else mask
  return jnp.sum(along_last.astype(jnp.float32))


def _with_sample(opt_state: OptState, new: dict[str, PyTree]) -> OptState:
  """Returns the state with other fields. The variables of an `nnx.Optimizer` are written."""
  (stored,) = nodes_of(opt_state, ActivationMonitorState)
  if is_nnx_variable(stored.calls):
    for name, value in new.items():
      # An `nnx.Optimizer` holds variables, which are written in place.
      variables = jax.tree.leaves(getattr(stored, name), is_leaf=is_nnx_variable)
      for variable, x in zip(variables, jax.tree.leaves(value), strict=True):
        set_raw_value(variable, x)
    return opt_state

  def is_monitor(node: PyTree) -> bool:
    return isinstance(node, ActivationMonitorState)

  def replaced(node: PyTree) -> PyTree:
    return node._replace(**new) if is_monitor(node) else node

  return jax.tree.map(replaced, opt_state, is_leaf=is_monitor)
