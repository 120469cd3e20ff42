"""A training step run at a loss scale of choice, in float32, so that nothing is lost on the way."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from mpjax._core.errors import REFUSALS, MpjaxTypeError, flax_errors
from mpjax._core.trees import half_to_float32, is_half
from mpjax._core.types import Array, Function, KeyPath, Leaf, PyTree
from mpjax._jaxprs.atoms import Atom, dtype_of, retyped, shape_of
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.inner_jaxprs import Program, inner_jaxprs, mapped_with, opened, with_each
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of
from mpjax.transforms._loss_scale import LossScaleState
from mpjax.transforms._state import OwnedScale, plain_array, scales_in
from mpjax.transforms._trees import is_nnx_variable, nodes_of

Path: TypeAlias = tuple[str, ...]
Leaves: TypeAlias = dict[Path, Leaf]

_CALLS = {Holds.CALL, Holds.COMPOSITE, Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP}


WHERE = "mpjax.check_loss_scaling(step)"
EXPECTED_STATE = "the state of an optimizer created by mpjax.loss_scaling"
_MARK = 2**30
"""The count of steps that tells the scale under test from others in what the step returns."""


class Run(NamedTuple):
  states: list[LossScaleState]  # those with the label of the scale under test, wherever they are
  after: Leaves  # what the step returned, and the variables that it was given

  @property
  def updated(self) -> list[LossScaleState]:
    return [one for one in self.states if np.max(one.total) > _MARK]

  @property
  def finite(self) -> bool:
    return all(bool(np.all(one.finite)) for one in self.updated)


def step_runner(
  step: Function, call: PyTree, scale: OwnedScale
) -> tuple[Callable[..., Run], ClosedJaxpr | None]:
  """Returns a function that runs the step at a scale, and the jaxpr of the step if it has one."""
  flat = dict(arrays_in(call, plain=False))
  inputs = {path: jnp.asarray(plain_array(x)) for path, x in flat.items()}

  def outcome(inputs: Leaves) -> Run:
    variables = dict[int, Leaf]()

    def put(path: KeyPath, x: Leaf) -> Leaf:
      value = inputs.get(_path(path), x)
      if not is_nnx_variable(x):
        return value
      variable = jax.tree.unflatten(jax.tree.structure(x), [value])
      return variables.setdefault(id(x), variable)  # One that is tied stays so.

    new = jax.tree_util.tree_map_with_path(put, call, is_leaf=is_nnx_variable)
    out = step(*new[:-1], **new[-1])
    if not variables and scale.label not in {one.label for one in scales_in(out)}:
      raise _none_returned(out)
    states = [one.state for one in scales_in((out, new)) if one.label == scale.label]
    written = {path: x for path, x in arrays_in(new) if is_nnx_variable(flat.get(path))}
    return Run([one for one in states if one is not None], dict(arrays_in(out)) | written)

  wide = program = None
  # What is wrong with it, it raises again where it runs.
  with _quiet(), contextlib.suppress(*REFUSALS, *flax_errors()):
    traced, shapes = jax.make_jaxpr(outcome, return_shape=True)(inputs)
    run_wide, structure = jax.jit(in_float32(traced)), jax.tree.structure(shapes)
    jax.eval_shape(run_wide, *jax.tree.leaves(inputs))
    program, wide = traced, lambda x: structure.unflatten(run_wide(*jax.tree.leaves(x)))

  def run(number: float, start: Leaves | None = None) -> Run:
    # An inf or NaN belongs to all losses, and of several optimizers one alone may be skipped.
    moving = [scale] if np.isfinite(number) else [one for one in scales_in(call) if one.stored]
    marked = {id(one.stored.scale): number for one in moving} | {id(scale.stored.total): _MARK}
    values = inputs | (start or {})
    with _quiet():
      values = {
        path: jnp.full_like(x, marked[id(flat[path])]) if id(flat[path]) in marked else jnp.copy(x)
        for path, x in values.items()
      }
      return outcome(values) if wide is None else wide(jax.tree.map(half_to_float32, values))

  return run, program


@contextlib.contextmanager
def _quiet() -> Generator[None]:
  with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
    yield


def arrays_in(tree: PyTree, *, plain: bool = True) -> Generator[tuple[Path, Leaf]]:
  """Yields the arrays in a tree, those in variables too (or the variables), and their paths."""
  for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_nnx_variable):
    if is_nnx_variable(x) or hasattr(x, "dtype"):
      yield _path(path), plain_array(x) if plain else x


def _path(path: KeyPath) -> Path:
  return tuple(jax.tree_util.keystr((key,)) for key in path)


def _none_returned(out: PyTree) -> MpjaxTypeError:
  got, fix = "none in what step returned", "Return the new opt_state as well."
  if nodes_of(out, LossScaleState):  # The update of a chain takes any tuple of its length apart.
    got = "one that the update of another optimizer has taken apart in what step returned"
    fix = (
      "Update with the tx that mpjax.loss_scaling returned, not with the optimizer inside of it."
    )
  return MpjaxTypeError(WHERE, expected=EXPECTED_STATE, got=got, fix=fix)


def in_float32(program: Program) -> Callable[..., list[Array]]:
  """Returns a function that runs a jaxpr, with float32 for each value of 16 bits."""
  # What takes no float32, a kernel or an operation on bits, runs as it was written.
  jaxpr, consts = opened(program), getattr(program, "consts", ())

  def run(*operands: Leaf) -> list[Array]:
    pairs = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True)
    values: dict[Atom, Any] = {v: half_to_float32(x) for v, x in pairs}

    def read(atom: Atom) -> Leaf:
      if not isinstance(atom, Literal):
        return values[atom]
      return (
        half_to_float32(jnp.asarray(atom.val, dtype_of(atom))) if is_half(atom.aval) else atom.val
      )

    for eqn in jaxpr.eqns:
      values.update(zip(eqn.outvars, _results(eqn, [*map(read, eqn.invars)]), strict=True))
    return [jnp.asarray(read(v)) for v in jaxpr.outvars]

  return run


def _results(eqn: JaxprEqn, operands: Sequence[Leaf]) -> Sequence[Array]:
  inner, holds = inner_jaxprs(eqn), facts_of(eqn).holds
  if inner and holds in _CALLS:
    return in_float32(inner[0].program)(*operands)
  if inner and holds is Holds.SHARD_MAP:
    body = in_float32(inner[0].program)
    return jax.shard_map(lambda *xs: tuple(body(*xs)), **mapped_with(eqn))(*operands)
  try:
    params = {name: _wide(value) for name, value in with_each(eqn, _retraced).items()}
    results = bind(eqn.replace(params=params), operands)
    if all(_fits(x, v) for x, v in zip(results, eqn.outvars, strict=True)):
      return results
  except REFUSALS:
    pass
  pairs = zip(operands, eqn.invars, strict=True)
  narrow = [jnp.asarray(x, dtype_of(v)) if is_half(v.aval) else x for x, v in pairs]
  return [*map(half_to_float32, bind(eqn, narrow))]


def _retraced(program: Program) -> Program:
  invars = [retyped(v, jnp.float32) if is_half(v.aval) else v for v in opened(program).invars]
  closed = jax.make_jaxpr(in_float32(program))(*[v.aval for v in invars])
  return closed if isinstance(program, ClosedJaxpr) else closed.jaxpr


def _wide(value: object) -> object:
  half = isinstance(value, np.dtype) and value in (jnp.float16, jnp.bfloat16)
  return np.dtype(np.float32) if half else value


def _fits(x: Array, like: Atom) -> bool:
  wide = jnp.float32 if is_half(like.aval) else dtype_of(like)
  return wide is None or (jnp.shape(x), x.dtype) == (shape_of(like), wide)
