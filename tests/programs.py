"""What a traced program does: its products, casts and exponentials, counted from the jaxpr.

Nothing of mpjax is used here. All functions take what `jax.make_jaxpr` returns and look into every
jaxpr inside it: jit, scan (whose body counts as often as it runs), cond (every branch counts),
while (once, since nobody knows how often it runs), remat, custom derivatives, shard_map.
"""

import collections
import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.interpreters import ad

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
HALF = ("bfloat16", "float16")

PROBE = "probe:"
"""What the scope of a product begins with that only shows in which dtype it is computed."""

COMBINING = (
  *("reduce", "reduce_window", "select_and_scatter", "scatter"),
  *("scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
  "block_scaled_dot",
)
"""Operations that hold, as a program, how they bring two numbers together, or what CUDA runs."""


@dataclasses.dataclass(frozen=True)
class Product:
  """One matrix product or convolution of a program."""

  primitive: str
  operands: tuple[str, str]  # "dtype[shape]" of both
  result: str  # "dtype[shape]"
  layout: str  # dimension numbers, window and precision
  flops: int  # twice its multiplications, times the number of runs

  @property
  def dtypes(self) -> tuple[str, str]:
    """The dtypes of both operands."""
    left, right = self.operands
    return left.partition("[")[0], right.partition("[")[0]

  @property
  def is_low_precision(self) -> bool:
    """Whether both operands are in a half type: what a tensor core needs."""
    return all(dtype in HALF for dtype in self.dtypes)


def equations(program: ClosedJaxpr | Jaxpr, runs: int = 1) -> Iterator[tuple[Any, int]]:
  """Yields every equation that does something itself, and how often it runs."""
  jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
  for eqn in jaxpr.eqns:
    inner = list(inner_jaxprs(eqn.params))
    if not inner or eqn.primitive.name in COMBINING:
      yield eqn, runs
      continue
    length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    for sub in inner:
      yield from equations(sub, runs * length)


def outermost(program: ClosedJaxpr | Jaxpr, names: Sequence[str]) -> Iterator[Any]:
  """Yields the equations of some primitives, without those inside of them."""
  jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in names:
      yield eqn
    else:
      for sub in inner_jaxprs(eqn.params):
        yield from outermost(sub, names)


def operations(program: ClosedJaxpr) -> list[Any]:
  """Returns each operation with the types of its operands and results, in the order they run in."""
  return [
    (eqn.primitive.name, *(var.aval.str_short() for var in (*eqn.invars, *eqn.outvars)), runs)
    for eqn, runs in equations(program)
  ]


def inner_jaxprs(value: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
  """Yields the programs in the parameters of an equation."""
  if isinstance(value, (ClosedJaxpr, Jaxpr)):
    yield value
  elif isinstance(value, jax.stages.Traced):
    yield value.jaxpr
  elif isinstance(params := getattr(value, "params", None), dict):  # An object of JAX.
    yield from inner_jaxprs(params)
  elif isinstance(value, (dict, tuple, list)):
    for item in value.values() if isinstance(value, dict) else value:
      yield from inner_jaxprs(item)


def parts_of_scan(eqn: Any) -> tuple[int, int]:
  """Returns the numbers of the constants of a scan, its first operands, and of its carry."""
  if "ft_in" in eqn.params:  # From jax 0.11 on.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)
  return eqn.params["num_consts"], eqn.params["num_carry"]


def products(program: ClosedJaxpr) -> list[Product]:
  """Returns the products of floating numbers, those of probes left out."""
  return [
    _product(eqn, runs)
    for eqn, runs in equations(program)
    if eqn.primitive.name in PRODUCTS and _floating(eqn.invars[0]) and _floating(eqn.invars[1])
    if PROBE not in str(eqn.source_info.name_stack)
  ]


def _floating(var: Any) -> bool:
  return bool(jnp.issubdtype(var.aval.dtype, jnp.floating))


def _product(eqn: Any, runs: int) -> Product:
  left, right = (var.aval for var in eqn.invars[:2])
  out = eqn.outvars[0].aval
  name, params = eqn.primitive.name, eqn.params
  if name == "dot_general":
    terms = math.prod(left.shape[i] for i in params["dimension_numbers"][0][0])
  elif name == "conv_general_dilated":
    features = right.shape[params["dimension_numbers"].rhs_spec[0]]
    terms = math.prod(right.shape) // features
  else:
    numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    terms = math.prod(left.shape[i] for i in numbers[0][0])
  # What is the same for the same product in another type is its layout; the types are named apart.
  layout = {k: v for k, v in params.items() if k not in ("preferred_element_type", "out_sharding")}
  return Product(
    primitive=name,
    operands=(_shown(left), _shown(right)),
    result=_shown(out),
    layout=str(sorted(layout.items(), key=lambda item: item[0])),
    flops=2 * math.prod(out.shape) * terms * runs,
  )


def _shown(aval: Any) -> str:
  return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def half_share(program: ClosedJaxpr) -> float:
  """Returns the share of the products' FLOPs whose operands are both in a half type."""
  found = products(program)
  assert found, "a program without products has no share of them in half"
  return sum(p.flops for p in found if p.is_low_precision) / sum(p.flops for p in found)


def residual_bytes(fun: Any, *args: Any) -> int:
  """Returns how many bytes a function keeps from its forward pass for its backward pass."""
  # These are the arrays that `jax.vjp` saves, without the arguments and closed-over constants,
  # which exist anyway. A compiler may keep fewer, by computing them again.

  def saved(*args: Any) -> list[Any]:
    return jax.tree.leaves(jax.vjp(fun, *args)[1])

  jaxpr = jax.make_jaxpr(saved)(*args).jaxpr
  saved_once = {v for v in jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)}
  kept = (v.aval for v in saved_once - {*jaxpr.invars, *jaxpr.constvars})
  return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept)


def converts(program: ClosedJaxpr) -> collections.Counter[str]:
  """Returns the casts between floating dtypes, such as "float32->bfloat16", by number of runs."""
  found: collections.Counter[str] = collections.Counter()
  for eqn, runs in equations(program):
    if eqn.primitive.name == "convert_element_type" and _floating(eqn.invars[0]):
      new = eqn.params["new_dtype"]
      # A cast to the dtype that is there already only drops a weak type: it costs nothing.
      if jnp.issubdtype(new, jnp.floating) and new != eqn.invars[0].aval.dtype:
        found[f"{eqn.invars[0].aval.dtype}->{jnp.dtype(new)}"] += runs
  return found


def dtypes_of(program: ClosedJaxpr, *primitives: str) -> set[str]:
  """Returns the dtypes of the results of the named primitives."""
  return {
    str(var.aval.dtype)
    for eqn, _ in equations(program)
    if eqn.primitive.name in primitives
    for var in eqn.outvars[:1]
  }


# Or else the rounding of a bfloat16 result is left out where float32 reads it.
_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
if jax.__version_info__ >= (0, 10):  # The benchmarks compile with the JAX of other tools too.
  # A library of kernels that adds up some bfloat16 products in bfloat16, depending on the layout.
  _OPTIONS["xla_cpu_experimental_ynn_fusion_type"] = ""


def s(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
  """Returns what stands for an array where only shapes are asked for."""
  return jax.ShapeDtypeStruct(shape, dtype)


def mesh_of(devices: Sequence[Any], kind: Any = jax.sharding.AxisType.Auto) -> jax.sharding.Mesh:
  """Returns a mesh of one axis, "data"."""
  return jax.make_mesh((len(devices),), ("data",), (kind,), devices=devices)


def run(fun: Any, *args: Any) -> Any:
  """Returns `fun(*args)`, compiled; on a CPU with each rounding that the program says."""
  return compiled(jax.jit(fun).lower(*args))(*args)


def with_gradients(fun: Any) -> Any:
  """Returns a function of (w, x, ..., g): the result of `fun`, and the gradients of `w` and `x`.

  `fun` is a function of (w, x, ...). Its result is cast to the dtype of `g`, its cotangent.
  """

  def call(w: Any, x: Any, *rest: Any) -> Any:
    *others, g = rest
    y, pull = jax.vjp(lambda w, x: fun(w, x, *others).astype(g.dtype), w, x)
    return y, *pull(g)

  return call


def compiled(lowered: Any) -> Any:
  """Returns the compiled program; see `run`."""
  return lowered.compile(_options())


def jitted(fun: Any) -> Any:
  """Returns `jax.jit(fun)` that compiles as `run` does, for what is called more than once."""
  return jax.jit(fun, compiler_options=_options())


def _options() -> dict[str, Any] | None:
  return _OPTIONS if jax.default_backend() == "cpu" else None


def cast(tree: Any, dtype: Any) -> Any:
  """Returns a tree whose floating arrays are in a dtype; the others stay."""

  def leaf(x: Any) -> Any:
    return jnp.asarray(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(leaf, tree)


def bits(tree: Any) -> list[bytes]:
  """Returns the bytes of every leaf, with its dtype and shape; of keys those of their data."""
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(data_of_keys(tree))]
  return [f"{x.dtype}{x.shape}".encode() + x.tobytes() for x in leaves]


def assert_bit_equal(found: Any, expected: Any) -> None:
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  assert bits(found) == bits(expected)


def data_of_keys(tree: Any) -> Any:
  """Returns a tree with the data of its typed keys, which is all that some files can hold."""

  def data(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x

  return jax.tree.map(data, tree)


def stored(master: Any, dtype: Any) -> Any:
  """Returns float32 masters as parameters: rounded to nearest, in bfloat16 ties away from zero."""
  if dtype != jnp.bfloat16:
    return master.astype(dtype)
  number = jax.lax.bitcast_convert_type(master, jnp.uint32) + np.uint32(0x8000)
  return jax.lax.bitcast_convert_type((number >> 16).astype(jnp.uint16), jnp.bfloat16)


def error(got: Any, want: Any) -> float:
  """Returns the largest difference between two trees, over the largest value of all of `want`."""
  assert jax.tree.structure(got) == jax.tree.structure(want)
  ours = [np.asarray(x, np.float64) for x in jax.tree.leaves(got)]
  true = [np.asarray(x, np.float64) for x in jax.tree.leaves(want)]
  # np.max, not max: it hands on NaN.
  largest = np.max([np.max(np.abs(x)) for x in true])
  worst = np.max([np.max(np.abs(x - y)) for x, y in zip(ours, true, strict=True)])
  return float(worst / largest)


def relative_error(got: Any, want: Any) -> float:
  """Returns the norm of the difference of two trees, over that of `want`, in float64."""
  pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
  difference = sum(np.sum((np.float64(a) - np.float64(b)) ** 2) for a, b in pairs)
  return float(np.sqrt(difference / sum(np.sum(np.float64(b) ** 2) for _, b in pairs)))


class Derivatives:
  """Counts how often JAX asks for the derivative of one place in a program."""

  def __init__(self) -> None:
    self.count = 0

  def of(self, x: Any) -> Any:
    """Returns `x`, in an equation of its own."""
    return _COUNTED.bind(x, counts=self)


_COUNTED = Primitive("counted")
_COUNTED.def_impl(lambda x, counts: x)
_COUNTED.def_abstract_eval(lambda x, counts: x)


def _derivative(primals: Any, tangents: Any, counts: Derivatives) -> tuple[Any, Any]:
  counts.count += 1
  return counts.of(*primals), tangents[0]


ad.primitive_jvps[_COUNTED] = _derivative


COMPILED = re.compile(r"Finished XLA compilation of jit\((\w+)\)")


@contextlib.contextmanager
def compilations() -> Generator[collections.Counter[str]]:
  """Yields how often each jitted function is compiled inside, by its name, read from JAX's log.

  `_cache_size()` of a jitted function is no such count. It is that of a cache which all functions
  share: once that is full, JAX keeps no new entries, and says 0.
  """
  found: collections.Counter[str] = collections.Counter()

  class Count(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
      found.update(COMPILED.findall(record.getMessage()))

  logger, count = logging.getLogger("jax"), Count()
  logger.addHandler(count)
  try:
    with jax.log_compiles():
      yield found
  finally:
    logger.removeHandler(count)
