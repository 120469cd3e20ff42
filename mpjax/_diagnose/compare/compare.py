"""`compare`: the same arguments through two functions, and the first module where they part."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from mpjax._autocast.autocast import autocast
from mpjax._core.errors import MpjaxValueError, check_call, check_callable
from mpjax._core.frameworks import framework_of
from mpjax._core.types import Args, Function, Kwargs
from mpjax._core.wrappers import name_of
from mpjax._diagnose.call import Call, with_model_as_argument
from mpjax._diagnose.compare.report import CompareReport
from mpjax._diagnose.compare.rows import compared
from mpjax._diagnose.compare.run import RecordedRun, any_function, any_method, load, record
from mpjax._diagnose.expectations import check_float32, lows_of
from mpjax._diagnose.module_names import in_models, with_models
from mpjax._diagnose.parameter_scopes import with_parameter_scopes
from mpjax._diagnose.report import Advance, Pending
from mpjax._jaxpr.graph import Graph
from mpjax._policy.policy import Policy, PolicyLike, parse_policy

Side: TypeAlias = Function | str | os.PathLike[str]
"""A function, or the file of a saved run."""

_CALL = "mpjax.compare(f, g)"
_CALL_OF_POLICY = "mpjax.compare(f, policy=policy)"
_ADVICE = (
  "A function closes over an NNX model. Pass the model as an argument to get a row for each of its "
  "modules."
)
_FIX = "Write mpjax.compare(f, g)(*args), or mpjax.compare(f, policy=policy)(*args)."


@check_call(_CALL, fix=_FIX)
def compare(
  f: Callable[..., object] | str | os.PathLike[str],
  g: Callable[..., object] | str | os.PathLike[str] | None = None,
  *,
  policy: PolicyLike | None = None,
) -> Callable[..., CompareReport]:
  """Compare two functions module by module, for the same arguments.

  Each function runs once, compiled, and returns the outputs of its modules beside its results. The
  report has the relative error of each module in `f` against `g`, the reference, and the first
  module where they part. If both return a scalar loss (or a tuple that begins with one), the
  cotangents of these outputs and the gradients by the first argument are compared too. For returned
  integers and booleans, the report has the share of elements that differ.

  Args:
    f: a function of arrays, such as a loss, a model or a step, or the file of a saved run. An NNX
      model that is called, or whose method is called, is the first argument of its own call.
    g: the reference, likewise. Without it, `f` as it is written.
    policy: compare `f` under this policy with `f`, instead of `g`. Models of Flax run as under
      `mpjax.with_policy`, a function without models as under `mpjax.autocast`.

  Returns:
    A function with the arguments of `f`, which must be concrete, that returns a report. It takes
    none if both `f` and `g` are files. With neither `g` nor `policy` it runs `f` alone:
    `.save("run.npz")` of the report keeps the run, for another process.

  Raises:
    MpjaxTypeError: `f` or `g` is neither a function nor a file; when called: an argument is traced.
    MpjaxValueError: both `g` and `policy` are given, or `f` is a file and `policy` is given; when
      called: `policy` changes nothing in `f`, since a model has one already.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x, digits=24):
  ...   for i in range(3):
  ...     with jax.named_scope(f"layer_{i}"):
  ...       x = jnp.tanh(x @ w[i])
  ...       x = jax.lax.reduce_precision(x, 8, digits - 1 if i == 1 else 23)
  ...   return jnp.mean(x**2)
  >>> rounded = lambda w, x: loss_fn(w, x, digits=8)
  >>> w, x = jax.random.normal(jax.random.key(0), (3, 4, 4)), jnp.ones((2, 4))
  >>> mpjax.compare(rounded, loss_fn)(w, x).first.path
  'layer_1'
  """
  _check_side(f, "f")
  if g is not None:
    _check_side(g, "g")
  # A policy compares `f` with itself. A second function or a saved run leaves it nothing to do.
  parsed = None if policy is None else parse_policy(policy, "mpjax.compare(policy)")
  if parsed is not None and (g is not None or isinstance(f, (str, os.PathLike))):
    raise MpjaxValueError(
      _CALL_OF_POLICY,
      expected="a function f, and either a policy or g",
      got="both g and policy" if g is not None else f"a policy for the file {_name(f)!r}",
      fix="Leave out g: the reference of a policy is f itself. To compare two policies, write "
      "mpjax.compare(f, g) with a model of mpjax.with_policy, or mpjax.autocast(fn, policy), in "
      "each.",
    )
  # The function runs under the policy, if one is given, and the reference without one.
  sides = [(f, parsed)]
  if g is not None or parsed is not None:
    sides.append((f if g is None else g, None))

  def report(_: Function, args: Args, kwargs: Kwargs, advance: Advance) -> CompareReport:
    called = [_called(side, args, kwargs) if callable(side) else None for side, _ in sides]
    functions = [each for each in called if each is not None]
    if not functions:
      saved_runs(*args, **kwargs)
    # Rows are matched by path, so both sides need paths of one kind: modules of Flax, or
    # parameters.
    models = all(in_models(each.function, each.call) is not None for each in functions)
    # A function with a policy of its own ignores the given one. The errors would all be 0, and look
    # good.
    if parsed is not None:
      _check_changes(functions[0], parsed, models)
    # Each run returns its arrays on the host, so the second one has the memory of the device.
    runs: list[RecordedRun] = []
    for i, ((side, its_policy), each) in enumerate(zip(sides, called, strict=True)):
      advance(i, len(sides))
      name = _name(side) if its_policy is None else f"{_name(side)} under {policy}"
      if each is not None:
        runs.append(record(_named(each, its_policy, models), each.call, name, each.names))
      elif not callable(side):
        runs.append(load(side, "mpjax.compare(path)")._replace(name=name))
    # A policy rounds to its compute dtype on purpose. Such an error is no fault.
    least = 0.0 if parsed is None else float(jnp.finfo(parsed.compute_dtype).eps)
    found = compared(runs[0], runs[-1], least)
    # The weights of such a model are constants of the trace, which have no module names.
    if not models and any(_closes_over_models(each.function) for each in functions):
      found = dataclasses.replace(found, notes=(*found.notes, _ADVICE))
    return found

  # `Pending` explains arguments that do not fit this function. A saved run has its own in the file.
  fn = next((side for side, _ in sides if callable(side)), saved_runs)
  # Each of two models is the first argument of its own call.
  return Pending(_CALL, fn, report, _FIX, model_first=False)


def saved_runs() -> None:
  """Stands for the functions of saved runs, which take no arguments."""


def _check_side(side: object, name: str) -> None:
  if not isinstance(side, (str, os.PathLike)):
    expected = "a function of arrays, or the file of a saved run"
    check_callable(side, f"mpjax.compare({name})", expected=expected, fix=_FIX)


def _name(side: Side) -> str:
  if callable(side):
    return name_of(side)
  return os.path.basename(os.fspath(side))


class _Called(NamedTuple):
  """A function, and its arguments: the first is the model that is called, if it is one of NNX."""

  function: Function
  call: Call
  names: Function  # its arguments have names that are equal on both sides


def _called(side: Function, args: Args, kwargs: Kwargs) -> _Called:
  fn, operands = with_model_as_argument(side, args)
  call = Call(operands, kwargs, _CALL)
  # The runs need values. Tracers have none.
  call.check_concrete()
  return _Called(fn, call, any_function if fn is side else any_method)


def _check_changes(f: _Called, policy: Policy, models: bool) -> None:
  """Raises if a function in low precision computes the same under a policy as without it."""
  # A function in float32 changes under any policy. Trace it only if it has low precision.
  plain = Graph(f.call.traced(f.function).program)
  if not lows_of(plain):
    return
  under_policy = Graph(f.call.traced(_named(f, policy, models)).program)
  # Each operation that computes, and the dtypes of its results.
  before, after = (
    [(each.name, [v.dtype for v in each.results]) for each in graph.computing()]
    for graph in (plain, under_policy)
  )
  if before == after:
    check_float32(plain, f"{_CALL_OF_POLICY}(*args)", "function")


def _named(called: _Called, policy: Policy | None, models: bool) -> Function:
  """Returns a function under a policy, if one is given, whose operations are in modules."""
  fn = called.function
  # Name operations first, then apply the policy. The rewriter keeps the name stack.
  if not models:
    named = with_parameter_scopes(fn)
    return named if policy is None else autocast(named, policy)
  # A loss that makes views itself has modules without being wrapped.
  of_models = in_models(fn, called.call) if policy is None else None
  return with_models(fn, policy) if of_models is None else of_models.function


def _closes_over_models(fn: Function) -> bool:
  """Whether a function reads NNX models that are not among its arguments."""
  # A decorator, such as `jax.jit`, hides the closure. Its `__wrapped__` leads to the function.
  plain = inspect.unwrap(fn)
  if not inspect.isfunction(plain):
    return False
  try:
    variables = inspect.getclosurevars(plain)
  except ValueError:  # A variable of the function around it has no value.
    return False
  read = (*variables.nonlocals.values(), *variables.globals.values())
  # The global `nnx.Linear` is a class, which a function may use without reading a model.
  return any(framework_of(x) == "NNX" and not isinstance(x, type) for x in read)
