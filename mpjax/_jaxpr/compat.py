"""Code that depends on the version of JAX: attributes that JAX shows but does not document."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from mpjax._core.types import Array

WRITTEN_OUT: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
"""The `inline` parameter of a call that JAX replaces by its equations when it traces a jaxpr."""


NameStack: TypeAlias = Any
"""The named scopes of an equation: JAX exports no class for it."""


@functools.cache
def _class_of_traced() -> type[Tracer[Any]]:
  """Returns the class of the tracers of a jaxpr, which JAX does not export."""
  classes: list[Any] = []

  def keep_class(x: Array) -> Array:
    classes.append(type(x))
    return x

  jax.make_jaxpr(keep_class)(0.0)
  return classes[0]


def is_in_program(x: object) -> bool:
  """Whether a value is a tracer of a jaxpr that JAX is tracing.

  It is False for a concrete value, and for a tracer of `grad` or `vmap`.
  """
  return isinstance(x, _class_of_traced())


def comes_from_program(x: object) -> bool:
  """Whether a value is a tracer of a jaxpr, perhaps inside tracers of `grad` or `vmap`."""
  # No public function says this. `Tracer.to_concrete_value` has no value for arrays under an eager
  # `vmap` either, and parts that are shared there would be compiled in each call. Without sharing,
  # tracing a gradient takes 1.5 times as long (benchmarks/call_cost.py). If JAX renames these
  # attributes, only that time is lost. A tracer of `grad` has a `primal`, one of `vmap` a `val`.
  while isinstance(x, Tracer) and not is_in_program(x):
    x = getattr(x, "primal", getattr(x, "val", None))
  return is_in_program(x)


def context_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[object]:
  """Returns the context in which an equation was traced: its mesh and options of `with` blocks."""
  context = getattr(eqn, "ctx", None)
  return contextlib.nullcontext() if context is None else context.manager


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Array]:
  """Returns the results of an equation for other operands, in the context it was traced in."""
  # JAX writes jaxprs into the parameters of an equation where `bind` takes functions.
  params = eqn.primitive.get_bind_params(eqn.params)
  with context_of(eqn):
    results = eqn.primitive.bind(*operands, **params)
  return list(results) if eqn.primitive.multiple_results else [results]


def with_equations(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], **fields: Sequence[Any]) -> Jaxpr:
  """Returns a jaxpr with other equations, and perhaps other `invars` or `outvars`."""
  # The flag of a jaxpr that holds an object of JAX (`call_hi_primitive`). JAX expands it before
  # lowering. New equations may have brought an object in, or removed the last one.
  is_high = any(
    eqn.primitive.is_high(*(atom.aval for atom in eqn.invars), **eqn.params) for eqn in eqns
  )
  lists = {name: [*variables] for name, variables in fields.items()}
  return jaxpr.replace(eqns=[*eqns], is_high=is_high, **lists)


def params_of_object(eqn: JaxprEqn) -> Mapping[str, Any]:
  """Returns the parameters of an object of JAX that an equation runs; none for other equations."""
  return getattr(eqn.params.get("_prim"), "params", {})


def shown_by_object(eqn: JaxprEqn) -> ClosedJaxpr | None:
  """Returns the jaxpr that an object of JAX shows; None if it shows none."""
  params = params_of_object(eqn)
  # A `checkpoint` has a `jaxpr`. Functions with a derivative rule have a `traced` function.
  return params.get("jaxpr") or getattr(params.get("traced"), "jaxpr", None)


def closed_over(eqn: JaxprEqn) -> int:
  """Returns how many operands of a function with a derivative rule are values it closes over.

  They are the first operands.
  """
  if "traced" in params_of_object(eqn):
    return len(jax.tree.leaves(eqn.params["_prim"].in_avals[0]))
  return eqn.params.get("num_consts", 0)


def params_around(eqn: JaxprEqn, program: ClosedJaxpr) -> dict[str, Any]:
  """Returns the parameters of an object of JAX that shows a jaxpr, around another jaxpr.

  A function with a derivative rule keeps its jaxpr, since the rule belongs to it.
  """
  params = params_of_object(eqn)
  if "policy" not in params:  # It is not a `checkpoint`.
    return eqn.params
  options = {key: params[key] for key in ("policy", "prevent_cse") if params.get(key) is not None}
  fun = jax.checkpoint(jaxpr_as_fun(program), **options)
  return jax.make_jaxpr(fun)(*program.in_avals).eqns[-1].params


def without_scopes(name_stack: NameStack, prefix: str) -> NameStack:
  """Returns a name stack without the named scopes whose names begin with `prefix`."""
  kept = tuple(each for each in name_stack.stack if not each.name.startswith(prefix))
  # The same object if nothing changes: other caches look name stacks up by identity.
  same = len(kept) == len(name_stack.stack)
  return name_stack if same else dataclasses.replace(name_stack, stack=kept)


def with_scope(name_stack: NameStack, name: str) -> NameStack:
  """Returns a name stack with one more named scope, the innermost."""
  return name_stack.extend(name)


def within_scopes(name_stack: NameStack, names: Sequence[str]) -> NameStack:
  """Returns a name stack with more named scopes around it, the outermost first."""
  around = dataclasses.replace(name_stack, stack=())
  for name in names:
    around = around.extend(name)
  return dataclasses.replace(around, stack=around.stack + name_stack.stack)


def scopes_of(name_stack: NameStack) -> tuple[tuple[str, bool], ...]:
  """Returns the names in a name stack, each with whether a transformation has set it."""
  # JAX exports no class of the two, "Scope" and "Transform".
  return tuple((each.name, type(each).__name__ == "Transform") for each in name_stack.stack)


def varying_axes(aval: ShapedArray) -> tuple[str, ...]:
  """Returns the axes of a `shard_map` over which an array varies."""
  kind: Any = getattr(aval, "manual_axis_type", None)
  return tuple(sorted(getattr(kind, "varying", ()), key=str))


Traceback: TypeAlias = Any
"""The Python traceback of an equation: JAX exports no class for it."""


def frames_of(traceback: Traceback) -> list[tuple[str, int, str]]:
  """Returns the file, line and function of the frames of a traceback, the innermost first."""
  frames = () if traceback is None else traceback.frames
  return [(f.file_name, f.line_num, f.function_name) for f in frames]


Span: TypeAlias = tuple[int, int, int, int]
"""The code of an expression: its first line and column, and its last ones, as in `ast`."""


@functools.lru_cache(maxsize=65536)
def spans_of(traceback: Traceback) -> Sequence[tuple[str, Span]]:
  """Returns the file and the code that runs in each frame of a traceback, the innermost first."""
  if traceback is None:
    return ()
  frames = zip(*traceback.raw_frames(), strict=True)
  return [(code.co_filename, type(traceback).code_addr2location(code, i)) for code, i in frames]
