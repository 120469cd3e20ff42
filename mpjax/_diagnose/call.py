"""The call of a function: its traced leaves and their names, its jaxpr, its compiled program."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.boundary import Boundary, jax_order
from mpjax._core.errors import MpjaxTypeError, flax_errors, kind_of
from mpjax._core.frameworks import is_nnx_object, is_nnx_variable
from mpjax._core.leaves import Path, is_array, leaf_paths
from mpjax._core.types import Args, Array, Class, Function, Kwargs, Leaf, PyTree
from mpjax._core.wrappers import name_of
from mpjax._jaxpr.steps import body_of
from mpjax._policy.active import AUDIT
from mpjax._policy.audit_record import AuditRecord


class Argument(NamedTuple):
  """A traced leaf of the arguments."""

  name: str  # the argument and the path in it, such as "params/Dense_0/kernel"
  keys: Path  # the path without the name of the argument
  is_first: bool  # it is in the first argument, or in the `params` of that; no loss scale is
  is_parameter: bool  # it is in a tree called `params`, or an `nnx.Param`

  @property
  def module(self) -> Path:
    """The path of the module whose parameter it is, if it is one."""
    # The last key is the parameter itself. Linen's collection "params" is no module either.
    return self.keys[self.keys[:1] == ("params",) : -1]


class Traced(NamedTuple):
  """A function of the arrays of a call, as it was traced.

  It holds the classes of arrays instead of arrays, since no tracer may outlive its trace
  (`jax.checking_leaks`).

  Fields:
    program: its jaxpr.
    outputs: the paths of the results of the jaxpr: first the arrays that the function returned,
      then those that it wrote into its arguments.
    kind: the class of the returned value.
    structure: the tree of the returned value, whose leaves are `leaves`.
    leaves: its leaves, with `jax.Array` in place of each array.
    written: for each written result, by its position, the position of the traced leaf that it
      replaces, such as a parameter of an NNX model.
  """

  program: ClosedJaxpr
  outputs: list[Path]
  kind: Class
  structure: PyTree
  leaves: list[Leaf]
  written: Mapping[int, int]

  @property
  def is_loss(self) -> bool:
    """Whether it returned a loss: a floating scalar, or one and aux.

    A function with a backward pass inside may be a training step, which returns or writes more than
    its loss. Only if it returns a scalar alone is it a loss, such as that of a physics-informed
    network.
    """
    # A tuple is (loss, aux). Its first result has the path "0".
    path_of_loss = ("0",) if issubclass(self.kind, tuple) else ()
    if self.outputs[:1] != [path_of_loss]:
      return False
    first = self.program.out_avals[0]
    is_scalar = first.shape == () and jnp.issubdtype(first.dtype, jnp.floating)
    return is_scalar and (len(self.outputs) == 1 or not has_backward_pass(self.program))


class Call:
  """The arguments of a call: some leaves are traced, and the others stay as they are.

  Attributes:
    positions: the positions of the traced leaves among all.
    arrays: the traced leaves.
  """

  def __init__(
    self, args: Args, kwargs: Kwargs, where: str = "", is_traced: Callable[[Leaf], bool] = is_array
  ) -> None:
    self._where = where
    # A model in two arguments stays one object, so both see what the function writes to it.
    # Each occurrence of an array is an argument of its own, as under `jax.jit`.
    self._boundary = Boundary((args, kwargs), tie=is_nnx_object)
    self._leaves = leaves = self._boundary.leaves
    # JAX sorts the keys of dicts. The names below come from `jax.tree.leaves`, in that order.
    self._order = list(jax_order(self._boundary.order))
    # The order holds the leaves of a shared object at each occurrence. Each is traced once.
    self.positions = [i for i in dict.fromkeys(self._order) if is_traced(leaves[i])]
    self.arrays = [leaves[i] for i in self.positions]

  def with_arrays(self, arrays: Sequence[Leaf]) -> tuple[Args, Kwargs]:
    """Returns the arguments with other arrays instead of the traced leaves."""
    traced = dict(zip(self.positions, arrays, strict=True))
    leaves = [traced.get(i, x) for i, x in enumerate(self._leaves)]
    return self._boundary.inside(leaves).args

  def arguments(self, fn: Function, scales: Sequence[Leaf] = ()) -> list[Argument]:
    """Returns a description of each traced leaf for a function; `scales` are loss scales."""
    # Rebuild the arguments, so that names and leaves come from one tree in JAX's order.
    args, _ = call = self.with_arrays(self.arrays)
    names = positional_names(fn, len(args))
    # A variable may hold several arrays. Each needs the class of its variable, which tells a
    # parameter.
    variables = jax.tree.leaves(call, is_leaf=is_nnx_variable)
    nodes = [node for node in variables for _ in jax.tree.leaves(node)]
    paths = leaf_paths(call)
    # The first argument, or the `params` in it: Linen variables hold other collections, such as
    # `batch_stats`, beside the parameters. A path begins with "0" for `args`.
    first = ("0", "0")
    if any(path[:3] == (*first, "params") for path in paths):
      first = (*first, "params")
    arguments = dict[int, Argument]()
    for i, x, path, node in zip(self._order, jax.tree.leaves(call), paths, nodes, strict=True):
      kind, argument, *keys = path
      parts = [names[int(argument)] if kind == "0" else argument, *keys]
      # A loss scale may sit in the first argument, for example in a train state. It is no
      # parameter.
      is_scale = any(x is scale for scale in scales)
      is_first = path[: len(first)] == first and not is_scale
      # Only the names of trees around a leaf count, not its own name. An argument that is one array
      # has no other name.
      around = {*(parts[:-1] if len(parts) > 1 else parts)}
      # The class is known by its name, or that of a base, without importing Flax.
      is_param = any(base.__name__ == "Param" for base in type(node).__mro__)
      is_parameter = is_param or not around.isdisjoint(("params", "parameters", "weights"))
      # A shared leaf has several paths. The first one names it.
      arguments.setdefault(i, Argument("/".join(parts), tuple(keys), is_first, is_parameter))
    return [arguments[i] for i in self.positions]

  def check_concrete(self) -> None:
    """Raises MpjaxTypeError if a leaf has no value."""
    abstract = [x for x in self._leaves if isinstance(x, (Tracer, jax.ShapeDtypeStruct))]
    if abstract:
      raise MpjaxTypeError(
        f"{self._where}(*args)",
        expected="concrete arrays",
        got=kind_of(abstract[0]),
        fix="Call it on the host, outside of jax.jit and jax.grad: it computes with their values.",
      )

  def traced(self, fn: Function) -> Traced:
    """Traces a function of the arrays."""
    noted: list[tuple[list[Path], Class, PyTree, list[Leaf], dict[int, int]]] = []

    # NNX functions may return nothing and write to their model. The changed leaves are results too.
    def flat(*arrays: Array) -> list[Leaf]:
      args, kwargs = call = self.with_arrays(arrays)
      before = jax.tree.leaves(call)
      returned = fn(*args, **kwargs)
      leaves, structure = jax.tree.flatten(returned)
      leaves = [jax.Array if isinstance(x, jax.Array) else x for x in leaves]
      results = [(path, x) for path, x in _leaves_by_path(returned) if isinstance(x, jax.Array)]
      # NNX replaces the array of a variable, so a written leaf is another object.
      old, written = {id(x) for x in before}, dict[int, int]()
      after = [*_leaves_by_path(call)]
      # A function may also add leaves, such as intermediate values. Then places say nothing.
      places = self._order if len(after) == len(before) else [-1] * len(after)
      for i, (path, x) in zip(places, after, strict=True):
        if id(x) not in old and isinstance(x, jax.Array):
          if i in self.positions:
            written[len(results)] = self.positions.index(i)
          # Leave out the first two keys, which are the kind and the position or keyword.
          results.append((path[2:], x))
      noted.append(([path for path, _ in results], type(returned), structure, leaves, written))
      return [x for _, x in results]

    # Reports and errors of JAX show the name of the traced function.
    flat.__name__ = name_of(fn)
    try:
      # The record makes models under a policy mark their modules. NNX modules leave no other scope.
      with AUDIT(AUDIT.value or AuditRecord()):
        return Traced(jax.make_jaxpr(flat)(*self.arrays), *noted[-1])
    except flax_errors("TraceContextError") as error:
      raise MpjaxTypeError(
        self._where,
        expected="a function that changes nothing but its arguments",
        got=f"a function that closes over an NNX model and writes to it: {error}",
        fix="Pass the model as an argument: fn = lambda model, x: model(x). A loss takes it first.",
      ) from error


def has_backward_pass(program: ClosedJaxpr) -> bool:
  """Whether a program computes a gradient."""
  return any(step.location.direction == "backward" for step in body_of(program).every_step())


def _leaves_by_path(tree: PyTree) -> Iterator[tuple[Path, Leaf]]:
  return zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)


def positional_names(fn: Function, count: int) -> list[str]:
  """Returns the names of positional arguments: "rest[0]" is the first of `*rest`."""
  try:
    # Some builtins and C functions have no signature.
    parameters = list(inspect.signature(fn).parameters.values())
  except (TypeError, ValueError):
    parameters = []
  names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
  rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
  return [*names[:count], *(f"{rest}[{i}]" for i in range(count - len(names)))]


def with_model_as_argument(fn: Function, args: Args) -> tuple[Function, Args]:
  """Returns a call whose NNX model, if `fn` is a model or a method of one, is the first argument.

  The arrays of the model then have paths, its parameters are known as such, and the function may
  write to it.
  """
  method, bound = _method_of_model(fn)
  if not bound:
    return fn, args

  name = getattr(method, "__name__", "")
  is_attribute = getattr(type(bound[0]), name, None) is method

  @functools.wraps(method)
  def call(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    # A view may stand for the model. It has methods of its own.
    called = getattr(model, name) if is_attribute else functools.partial(method, model)
    return called(*args, **kwargs)

  # Reports show the name of the function that the user passed.
  call.__name__ = name_of(fn)
  return call, (*bound, *args)


def _method_of_model(fn: Function) -> tuple[Function, Args]:
  """Returns a function, and the model of NNX and other arguments that `fn` calls it with."""
  # `type(fn).__call__` is the method without its model.
  if is_nnx_object(fn):
    return type(fn).__call__, (fn,)
  if inspect.ismethod(fn) and is_nnx_object(fn.__self__):
    return fn.__func__, (fn.__self__,)
  # A method under `nnx.jit` is a `functools.partial` too.
  if isinstance(fn, functools.partial):
    method, bound = _method_of_model(fn.func)
    bound = (*bound, *fn.args)
    if any(map(is_nnx_object, bound[:1])):
      return (functools.partial(method, **fn.keywords) if fn.keywords else method), bound
  return fn, ()


def compiled_as_written(fn: Function, *, runs_often: bool = False) -> Callable[..., Any]:
  """Returns a function that is compiled when it is called, and in which each cast rounds.

  Args:
    fn: the function.
    runs_often: whether it has loops whose run takes longer than some compilation.
  """
  # XLA may leave out a cast to float16 and back, and with it the rounding and the overflow.
  options: dict[str, str | bool | int] = {"xla_allow_excess_precision": False}
  if jax.default_backend() == "cpu":
    # On a CPU, LLVM takes half of the compilation time. Its first level makes loops three times as
    # fast, and the others add nothing.
    options |= {
      "xla_backend_optimization_level": int(runs_often),
      "xla_llvm_disable_expensive_passes": True,
    }
  return jax.jit(fn, compiler_options=options)
