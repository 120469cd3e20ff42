"""The table of primitives: the part and the facts of each primitive of JAX.

All code that treats primitives differently reads this table, by `facts_of`.
"""

import enum
import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from mpjax._jaxpr.compat import params_of_object

Part: TypeAlias = Literal["half", "float32", "promote", "keep", "opaque"]

PARTS: Mapping[Part, str] = types.MappingProxyType(
  {
    "half": "They run in the compute dtype.",
    "float32": "They run in float32.",
    "promote": "They run in float32 or the compute dtype, by their operands and consumers.",
    "keep": "They run in the dtype of their operand, unless a consumer widens them.",
    "opaque": "They run in the dtypes in which they were traced.",
  }
)
"""What each part means."""

EqnParams: TypeAlias = Mapping[str, Any]
"""The parameters of an equation."""

Predicate: TypeAlias = Callable[[EqnParams], str]
"""A function from the parameters of an equation to the name of a part."""

Degree: TypeAlias = Callable[[Sequence[float], EqnParams], float]
"""A function from the growth of the operands, as exponents, to the growth of the result."""


Terms: TypeAlias = Callable[[Sequence[tuple[int, ...]], EqnParams], float]
"""A function from the shapes of the operands and the parameters to a number of terms."""

UNCOUNTED = 2.0**63
"""The number of terms of a sum if its parameters do not give it, as in a sum over devices.

No array has more elements. A sum of as many ones is finite in bfloat16, but infinite in float16.
"""


class Holds(enum.Enum):
  """How a primitive runs the jaxprs in its parameters."""

  # Once, on all operands.
  CALL = enum.auto()
  # Once, on all operands. A compiler may replace it by its own code of the same name and types.
  COMPOSITE = enum.auto()
  # Once on each device, on its shards of the operands.
  SHARD_MAP = enum.auto()
  # Once, on all operands, unless it is differentiated or batched. Then the user's rule runs.
  CUSTOM_JVP = enum.auto()
  CUSTOM_VJP = enum.auto()
  CUSTOM_VMAP = enum.auto()
  # One of several branches.
  COND = enum.auto()
  # A fixed number of times, with a carry and slices of the operands.
  SCAN = enum.auto()
  # As often as the values decide, with a carry. The first jaxpr is the condition.
  WHILE = enum.auto()
  # Once, on all operands. A second jaxpr is its transpose and must match.
  LINEAR_CALL = enum.auto()
  # Four jaxprs that must agree. The operands of three of them are not known.
  LINEAR_SOLVE = enum.auto()
  # In an object of JAX, in which nothing can be changed.
  OBJECT = enum.auto()
  # The jaxpr combines two numbers, as in `reduce`. It is not entered.
  BINARY = enum.auto()
  # A kernel, or code that is compiled or placed elsewhere. It is not entered.
  KERNEL = enum.auto()
  # The code of one platform for an operation that has other code elsewhere. It is not entered.
  PLATFORM = enum.auto()


# A policy leaves these as they were traced: their jaxpr must match another one, or is in an object.
AS_TRACED = frozenset((Holds.LINEAR_CALL, Holds.LINEAR_SOLVE, Holds.OBJECT))

# These have a derivative rule, which may differ from the derivative of the jaxpr that they hold.
HAS_DERIVATIVE = AS_TRACED | {Holds.CUSTOM_JVP, Holds.CUSTOM_VJP}

# A handler in `runner.py` enters these. All others that are entered are calls, which run once.
NESTED = frozenset((Holds.SCAN, Holds.WHILE, Holds.COND, Holds.SHARD_MAP))


class Row(NamedTuple):
  """Primitives with the same facts."""

  names: str | tuple[str, ...]  # one name or several, as `jax.make_jaxpr` prints them
  # The result is exact for low-precision operands: numbers are chosen or moved. This excludes the
  # maximum over an axis, whose derivative counts the positions with the maximum.
  exact: bool = False
  # Each number of a result is one of an operand, also where neither `exact` nor `moves` holds.
  keeps_numbers: bool = False
  moves: bool = False  # each element of a result is an element of an operand: casts may come before
  elementwise: bool = False  # an element of a result depends only on elements at its position
  bounded: bool = False  # finite operands give finite results
  arithmetic: bool = False  # a float32 consumer makes it run in float32: see `_autocast`'s `Flag`
  tests: bool = False  # the result is boolean and depends on the size of numbers
  orders: bool = False  # the order of the results depends on the size of numbers
  folds: Callable[..., Any] | None = None  # computes the result of numbers that are known
  terms: Terms | None = None  # how many terms each element of the result sums
  # Errors of a sum are absolute, so the rounding of an operand may be as large as the result. Those
  # of a product are relative.
  acts_as: Literal["sum", "product", "linear algebra"] | None = None
  scales: bool = False  # multiplies by one number, or divides by it, without rounding
  draws: bool = False  # the results are random numbers, unless an operand is floating
  # The way in which the derivative needs precision. It is a sum over elements of the result if the
  # operand is "repeated", or if it is broadcast and then "added" or "multiplied". "chosen": it
  # counts equal elements. "placed": it is placed among zeros, and added to those of other parts of
  # the operand. "selected": it is so by a mask. "result": it reads the result, which is saved.
  gradient: (
    Literal["repeated", "added", "multiplied", "chosen", "placed", "selected", "result"] | None
  ) = None
  degree: Degree | None = None  # the growth of elementwise operations of activation functions
  # The parameter that names the dtype, or that holds a jaxpr in the dtype.
  dtype_param: Literal["preferred_element_type", "update_jaxpr"] | None = None
  # The part of an operation that is no matmul, though its primitive is in the half list.
  instead_of_half: Part | None = None
  # The formula for its floating-point operations.
  flops: Literal["dot", "ragged_dot", "scaled_dot", "convolution"] | None = None
  holds: Holds | None = None  # how it runs the jaxprs that it holds; None if it holds none
  # The parameters whose jaxprs are replaced. Versions of JAX may have different ones of them.
  jaxpr_params: tuple[str, ...] = ()
  # Flags such as `jax_remat3` replace the primitive by an object of JAX, which this parameter of
  # the object identifies.
  object_param: str = ""

  @property
  def adds(self) -> bool:
    """Whether it is the addition of two operands."""
    return self.folds is operator.add


class Family:
  """Primitives that are in one part for one reason.

  Args:
    part: the part, or a function that decides it. None for higher-order primitives, whose jaxprs
      are entered.
    reason: the reason, a sentence or two for docs/op_lists.md.
    rows: the primitives. A string is a row without further facts.
    fixed: whether users cannot move them, because they hold a jaxpr or a reference whose dtypes
      were fixed by the trace.
    decides: the decision of the function `part`, in words.
  """

  def __init__(
    self,
    part: Part | Predicate | None,
    reason: str,
    *rows: str | Row,
    fixed: bool = False,
    decides: str = "",
  ) -> None:
    self.part: Part | Predicate | None = part
    self.reason, self.fixed, self.decides = reason, fixed, decides
    self.rows: list[tuple[str, Row]] = []  # each primitive and its row
    for each in rows:
      row = Row(each) if isinstance(each, str) else each
      names = (row.names,) if isinstance(row.names, str) else row.names
      self.rows += ((name, row) for name in names)
    self.names = tuple(sorted(name for name, _ in self.rows))


def integer_pow_part(params: EqnParams) -> Part:
  """Keeps the powers 0 to 3; the others run in float32."""
  return "keep" if 0 <= params["y"] <= 3 else "float32"


# Facts that several rows have.
_MOVES: Mapping[str, Any] = {"exact": True, "moves": True}
_UPDATES: Mapping[str, Any] = {"dtype_param": "update_jaxpr", "holds": Holds.BINARY}
_ARITHMETIC: Mapping[str, Any] = {"elementwise": True, "arithmetic": True}
_FACTORS: Mapping[str, Any] = {**_ARITHMETIC, "acts_as": "product", "gradient": "multiplied"}
_SUMS: Mapping[str, Any] = {
  **_ARITHMETIC,
  "acts_as": "sum",
  "gradient": "added",
  "degree": lambda degrees, _: max(degrees),
}
_SQUARES: Mapping[str, Any] = {
  **_ARITHMETIC,
  "acts_as": "product",
  "degree": lambda degrees, _: 2 * degrees[0],
}
_BOUNDED: Mapping[str, Any] = {**_ARITHMETIC, "bounded": True}


def _sizes(shape: tuple[int, ...], axes: Iterable[int]) -> int:
  return math.prod(shape[axis] for axis in axes)


def _in_window(_: Sequence[tuple[int, ...]], params: EqnParams) -> int:
  return math.prod(params["window_dimensions"])


def _updates(shapes: Sequence[tuple[int, ...]], _: EqnParams) -> int:
  return 1 + math.prod(shapes[2])  # the operand, and at most all updates


FAMILIES: tuple[Family, ...] = (
  # half list
  Family(
    "half",
    "Tensor Cores multiply low precision and accumulate in float32.",
    Row(
      "conv_general_dilated",
      dtype_param="preferred_element_type",
      flops="convolution",
      folds=operator.mul,
      terms=lambda shapes, p: _sizes(shapes[1], p["dimension_numbers"].rhs_spec[1:]),
    ),
    Row(
      "dot_general",
      dtype_param="preferred_element_type",
      flops="dot",
      folds=operator.mul,
      terms=lambda shapes, p: _sizes(shapes[0], p["dimension_numbers"][0][0]),
    ),
    Row("ragged_dot_general", dtype_param="preferred_element_type", flops="ragged_dot"),
  ),
  # float32
  Family(
    "float32",
    "An absolute error of the operand is a relative error of the result. exp(11.1) overflows "
    "float16.",
    Row("exp", elementwise=True, gradient="result"),
    Row(("exp2", "expm1"), elementwise=True),
  ),
  Family(
    "float32",
    "Near 1 the rounding of the operand is the size of the result.",
    Row(("log", "log1p", "log2"), elementwise=True),
  ),
  Family(
    "float32",
    "It is exp(y log x), with the errors of both.",
    Row("pow", elementwise=True),
  ),
  Family(
    "float32",
    "Its gradient overflows float16 below 4e-4, as in norms.",
    Row("rsqrt", elementwise=True),
  ),
  Family(
    "float32",
    "Errors of an angle are absolute. Near 1000, bfloat16 numbers are 4 apart.",
    Row(("sin", "cos", "tan"), elementwise=True),
  ),
  Family(
    "float32",
    "Its large terms cancel.",
    Row("polynomial", elementwise=True),
  ),
  Family("float32", "They grow as `exp` does.", Row(("sinh", "cosh"), elementwise=True)),
  Family(
    "float32",
    "The slope is infinite at the end of the domain.",
    Row(("acos", "acosh", "asin", "atanh"), elementwise=True),
  ),
  Family(
    "float32",
    "Special functions are steep, and too rare to cost time.",
    Row(
      ("bessel_i0e", "bessel_i1e", "digamma", "erf_inv", "igamma", "igamma_grad_a", "igammac"),
      elementwise=True,
    ),
    Row(("lgamma", "polygamma", "regularized_incomplete_beta", "zeta"), elementwise=True),
  ),
  Family(
    "float32",
    "Roundings add up. A sum of ones stops at 256 in bfloat16, and float16 overflows at 65504.",
    *("cumlogsumexp", "cumprod", "reduce_prod"),
    Row("cumsum", terms=lambda shapes, p: shapes[0][p["axis"]]),
    Row("reduce_sum", terms=lambda shapes, p: _sizes(shapes[0], p["axes"])),
    Row("reduce_window_sum", terms=_in_window),
  ),
  Family(
    "float32",
    "Gradients divided by a loss scale underflow float16, and those multiplied by it overflow.",
    Row("scale_value", elementwise=True, scales=True),
  ),
  Family(
    "float32",
    "It sums the gradients of all uses of a value.",
    Row("add_any", elementwise=True, terms=lambda shapes, _: len(shapes)),
  ),
  Family(
    "float32",
    "The data decides how many values they sum, as in gradients of embeddings.",
    Row(("scatter-add", "scatter-sub"), **_UPDATES, terms=_updates),
    Row("scatter-mul", **_UPDATES),
    Row("select_and_scatter_add", terms=_in_window),
  ),
  Family(
    "float32",
    'They sum gradients over devices, with twice the bytes. "keep" sends half.',
    Row(
      ("psum", "psum_invariant", "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter"),
      terms=lambda shapes, _: UNCOUNTED,
    ),
  ),
  # promote
  Family(
    "promote",
    "The result is rounded once.",
    Row("add", **_SUMS, folds=operator.add),
    Row("sub", **_SUMS, folds=operator.sub),
    Row("div", **_FACTORS, degree=lambda d, _: d[0] - d[1], folds=operator.truediv),
    Row(
      ("max", "min"),
      elementwise=True,
      exact=True,
      gradient="multiplied",
      degree=lambda d, _: max(d),
    ),
    Row("mul", **_FACTORS, degree=lambda d, _: d[0] + d[1], folds=operator.mul),
    Row("rem", **_ARITHMETIC, acts_as="sum", gradient="multiplied"),
  ),
  Family(
    "promote",
    "A small relative error of the operands is a small error of the angle.",
    Row("atan2", **_FACTORS),
  ),
  Family(
    "promote",
    "Both sides of a comparison have one dtype.",
    Row(("eq", "eq_to", "ge", "gt", "le", "le_to", "lt", "lt_to", "ne"), tests=True),
  ),
  Family(
    "promote",
    "The widest dtype holds all values exactly.",
    Row("stack", keeps_numbers=True),
    Row("clamp", elementwise=True, keeps_numbers=True),
    Row(("concatenate", "pad"), **_MOVES),
    Row("select_n", **_MOVES, gradient="selected"),
  ),
  Family(
    "promote",
    "They return each operand in its own dtype.",
    Row(("device_put", "shard_alike", "tie"), keeps_numbers=True),
    Row("optimization_barrier", **_MOVES),
    Row("sort", exact=True, orders=True),
  ),
  Family(
    "promote",
    "The widest dtype holds all values exactly.",
    Row("ragged_all_to_all", keeps_numbers=True),
  ),
  # keep
  Family(
    "keep",
    "They are exact in every dtype.",
    Row("abs", elementwise=True, exact=True, degree=lambda d, _: d[0], folds=operator.abs),
    Row("neg", elementwise=True, exact=True, degree=lambda d, _: d[0], folds=operator.neg),
    Row(("ceil", "floor", "round"), **_BOUNDED, acts_as="sum"),
    Row("is_finite", tests=True),
    Row("sign", elementwise=True, exact=True, folds=np.sign),
  ),
  Family(
    "keep",
    "Activation functions with slopes of at most about 1. Float32 would double their memory.",
    Row(("asinh", "atan"), **_BOUNDED),
    Row(("erf", "erfc", "logistic"), **_BOUNDED, degree=lambda d, _: 0),
    Row("tanh", **_BOUNDED, gradient="result", degree=lambda d, _: 0),
  ),
  Family(
    "keep",
    "The result and its gradient stay in range.",
    Row("cbrt", **_BOUNDED),
    Row("sqrt", **_ARITHMETIC, degree=lambda d, _: d[0] / 2),
  ),
  Family(
    "keep",
    "The result is rounded once. Sums widen them.",
    Row("one_minus_square", **_SQUARES),
    Row("square", **_SQUARES, folds=np.square),
  ),
  Family(
    "keep",
    "They select values, which is exact in every dtype.",
    Row(("approx_top_k", "reduce_window_max", "reduce_window_min"), keeps_numbers=True),
    Row(("pmax", "pmin", "unreduced_pmax", "unreduced_pmin"), keeps_numbers=True),
    Row(("argmax", "argmin"), exact=True),
    Row(("cummax", "cummin", "top_k"), exact=True),
    Row(("reduce_max", "reduce_min"), gradient="chosen", keeps_numbers=True),
  ),
  Family(
    "keep",
    "They move values, which is exact in every dtype.",
    Row(("broadcast_in_dim", "gather"), **_MOVES, gradient="repeated"),
    Row(("broadcast_to", "tile"), moves=True, gradient="repeated"),
    Row(("copy", "reshape", "rev", "squeeze", "stop_gradient", "transpose"), **_MOVES),
    Row(("dynamic_slice", "slice", "split"), **_MOVES, gradient="placed"),
    Row("unstack", moves=True, gradient="placed"),
    Row(("name", "stage", "xla_metadata_value"), moves=True),
  ),
  Family(
    "keep",
    "They say where values are stored.",
    Row(("layout_constraint", "relayout", "with_memory_space_constraint"), keeps_numbers=True),
    Row(("first_order", "reshard", "sharding_constraint"), **_MOVES),
  ),
  Family(
    "keep",
    "It scales gradients, and returns its operand.",
    Row("scale_cotangent", **_MOVES),
  ),
  Family(
    "keep",
    "They move values between devices. Low precision halves the bytes.",
    Row(("preduced", "reduced_vary_cast", "reduced_vary_cast_p"), keeps_numbers=True),
    Row(("vary_unreduced_cast", "vary_unreduced_cast_p"), keeps_numbers=True),
    Row(("all_gather", "all_gather_invariant", "all_gather_reduced"), moves=True),
    Row(("all_to_all", "pbroadcast", "pbroadcast_dynamic", "ppermute"), moves=True),
    Row("pvary", **_MOVES),
  ),
  Family(
    "keep",
    "They write into a buffer. Zeros take the dtype of the values, and inputs make it float32.",
    Row("dynamic_update_slice", **_MOVES),
    Row("scatter", exact=True, **_UPDATES),
    # The derivative of `segment_max` counts the updates that equal the maximum.
    Row(("scatter-max", "scatter-min"), exact=True, gradient="repeated", **_UPDATES),
  ),
  Family(
    "keep",
    "A cast of your code to low precision stays.",
    "convert_element_type",
  ),
  # opaque
  Family(
    "opaque",
    "They take integers and booleans.",
    *("and", "clz", "mulhi", "not", "or", "population_count", "reduce_and", "reduce_or"),
    *("reduce_xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "xor"),
  ),
  Family(
    "opaque",
    "They have no operand. Positions above 256 are inexact in bfloat16.",
    *("axis_index", "dim_as_value", "dimension_size", "empty", "empty2", "iota", "iota_2x32_shape"),
    *("platform_index", "zeros_like"),
  ),
  Family(
    "opaque",
    "The samples are those without autocast.",
    *("philox2x32", "philox4x32", "random_bits", "random_clone", "random_fold_in", "random_seed"),
    *("random_split", "random_unwrap", "random_wrap", "rng_bit_generator", "threefry2x32"),
    *("threefry4x32",),
    Row(("random_gamma", "rng_uniform"), draws=True),
  ),
  Family(
    "opaque",
    "They take keys and other types that are no numbers.",
    *("assert_consumed_value", "consume", "from_edtype", "to_edtype"),
  ),
  Family(
    "opaque",
    "They work on the bits of a dtype.",
    *("nextafter", "reduce_precision"),
    Row("bitcast_convert_type", draws=True),
  ),
  Family(
    "opaque",
    "There is no complex dtype of low precision.",
    *("complex", "conj", "fft", "imag", "real"),
  ),
  Family(
    "opaque",
    "The libraries take no low precision. The condition number magnifies errors.",
    Row(
      (
        *("cholesky", "cholesky_update", "eig", "eigh", "geqp3", "geqrf", "hessenberg"),
        *("householder_product", "lu", "lu_pivots_to_permutation", "ormqr", "qr", "schur", "svd"),
        *("symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
      ),
      acts_as="linear algebra",
    ),
  ),
  Family(
    "opaque",
    "The libraries for sparse matrices take no low precision.",
    *("bcoo_dot_general", "bcoo_dot_general_sampled", "bcoo_extract", "bcoo_fromdense"),
    *("bcoo_sort_indices", "bcoo_spdot_general", "bcoo_sum_duplicates", "bcoo_todense"),
    *("bcoo_transpose", "bcsr_dot_general", "bcsr_extract", "bcsr_fromdense", "bcsr_todense"),
    *("coo_fromdense", "coo_matmat", "coo_matvec", "coo_spmm", "coo_spmv", "coo_todense"),
    *("csr_fromdense", "csr_matmat", "csr_matvec", "csr_spmm", "csr_spmv", "csr_todense"),
    *("spsolve", "todense"),
  ),
  Family(
    "opaque",
    "The code has chosen operands of eight bits or fewer, and their scales.",
    *("format_rounding", "scaled_dot", "scaled_matmul", "scaled_matmul_wrapper"),
    Row("block_scaled_dot", flops="scaled_dot", holds=Holds.PLATFORM),
  ),
  Family(
    "opaque",
    "Kernels of cuDNN are chosen by the dtypes in the jaxpr.",
    Row(
      (
        *("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper"),
        *("dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper"),
        *("dot_product_attention_fp8_fwd", "dot_product_attention_fp8_fwd_wrapper"),
        *("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper", "rnn_bwd", "rnn_fwd"),
      ),
      holds=Holds.KERNEL,
    ),
    fixed=True,
  ),
  Family(
    "opaque",
    "A callback expects the dtypes of the code.",
    *("buffer_callback", "debug_callback", "debug_print", "inspect_sharding", "io_callback"),
    *("pure_callback",),
  ),
  Family(
    "opaque",
    "It is compiled for the dtypes in the jaxpr.",
    Row("ffi_call", holds=Holds.KERNEL),
    fixed=True,
  ),
  Family(
    "opaque",
    "They order, check or transfer values, without arithmetic.",
    *("after_all", "check", "create_token", "dce_sink", "global_array_to_host_local_array"),
    *("host_local_array_to_global_array", "precv", "psend", "shape_assertion", "unreachable"),
  ),
  Family(
    "opaque",
    "The two halves of a transfer have one dtype.",
    *("all_gather_done", "all_gather_reduced_start", "all_gather_start", "all_to_all_done"),
    *("all_to_all_start", "pbroadcast_done", "pbroadcast_start", "ppermute_done", "ppermute_start"),
    *("psum_done", "psum_invariant_start", "psum_start", "reduce_scatter_done"),
    *("reduce_scatter_start", "unreduced_psum_start", "unreduced_reduce_scatter_start"),
  ),
  Family(
    "opaque",
    "They are steps of differentiation, and rare in a finished jaxpr.",
    *("custom_lin", "select_and_gather_add"),
  ),
  Family(
    "opaque",
    "A reference keeps the dtype with which it was created.",
    *("accum_grad_in_ref", "addupdate", "box_get", "box_set", "create_linear", "empty_ref"),
    *("free_ref", "freeze", "get", "log_extend", "log_read", "new_box", "new_log", "new_ref"),
    *("pin", "swap", "unpin"),
    fixed=True,
  ),
  Family(
    "opaque",
    "They hold an operation in the dtypes in which it was traced.",
    Row(("reduce", "reduce_window", "select_and_scatter"), holds=Holds.BINARY),
    fixed=True,
  ),
  Family(
    "opaque",
    "They hold a kernel, or a jaxpr that is compiled or placed elsewhere.",
    Row(
      ("call_exported", "call_hi_primitive_linearized", "compute_on", "core_map"),
      holds=Holds.KERNEL,
    ),
    Row(
      ("cudnn_fusion", "custom_jvp_call_jaxpr", "custom_partitioning", "fused_call"),
      holds=Holds.KERNEL,
    ),
    Row(
      ("mpmd_map", "pallas_call", "remat_opt", "run_state", "xla_metadata_call"), holds=Holds.KERNEL
    ),
    fixed=True,
  ),
  # conditional
  Family(
    integer_pow_part,
    "Squares and cubes are part of activation functions, such as GELU. The fourth power overflows "
    "float16 from 16 on.",
    Row("integer_pow", **_ARITHMETIC, acts_as="product", degree=lambda d, p: p["y"] * d[0]),
    decides="keep for the powers 0 to 3, float32 for others",
  ),
  # higher-order
  Family(
    None,
    "Their jaxprs are entered.",
    Row(("call", "closed_call", "program_order"), holds=Holds.CALL, jaxpr_params=("call_jaxpr",)),
    Row(("checkpoint", "remat2"), holds=Holds.CALL, jaxpr_params=("jaxpr",), object_param="policy"),
    Row("jit", holds=Holds.CALL, jaxpr_params=("jaxpr",)),
    # A call of the function that `jax.jit(f).trace(x)` returns.
    Row("eval_jaxpr", holds=Holds.CALL, jaxpr_params=("call_jaxpr", "jaxpr")),
    Row("composite", holds=Holds.COMPOSITE, jaxpr_params=("call_jaxpr", "jaxpr")),
    Row("shard_map", holds=Holds.SHARD_MAP, jaxpr_params=("jaxpr",)),
    # JAX replaces these two when it differentiates a jaxpr. Otherwise the plain jaxpr runs.
    Row(
      "custom_jvp_call",
      holds=Holds.CUSTOM_JVP,
      jaxpr_params=("call_jaxpr",),
      object_param="jvp_rule",
    ),
    Row(
      "custom_vjp_call", holds=Holds.CUSTOM_VJP, jaxpr_params=("call_jaxpr",), object_param="bwd"
    ),
    Row("custom_vmap_call", holds=Holds.CUSTOM_VMAP, jaxpr_params=("call",)),
    Row("cond", holds=Holds.COND, jaxpr_params=("branches",)),
    Row("scan", holds=Holds.SCAN, jaxpr_params=("jaxpr",)),
    Row("while", holds=Holds.WHILE, jaxpr_params=("cond_jaxpr", "body_jaxpr")),
  ),
  Family(
    None,
    "They come with others that must agree, or are objects of JAX, and run as they were traced.",
    # Objects with an `object_param` have the row of the primitive that they replace instead.
    Row("call_hi_primitive", holds=Holds.OBJECT),
    # One of its four jaxprs runs. The others are for derivatives and checks.
    Row("custom_linear_solve", holds=Holds.LINEAR_SOLVE, acts_as="linear algebra"),
    Row(("activation_tangent", "linear_call", "matmul_tangent"), holds=Holds.LINEAR_CALL),
  ),
)
"""Every primitive of each supported JAX, in exactly one row."""


FACTS: Mapping[str, Row] = types.MappingProxyType(
  {name: row for family in FAMILIES for name, row in family.rows}
)
"""The row of each primitive."""

# The rows of primitives that JAX may replace by an object, by a parameter of that object.
_OF_OBJECTS = {row.object_param: row for row in FACTS.values() if row.object_param}

HIGHER_ORDER = frozenset(
  name for family in FAMILIES if family.part is None for name in family.names
)
"""Primitives that hold jaxprs and have no part. The operations inside have theirs."""

_UNKNOWN = Row(())

_NO_MATMUL = FACTS["dot_general"]._replace(flops=None, acts_as="product")

_OUTER_PRODUCT = _NO_MATMUL._replace(arithmetic=True, instead_of_half="promote")
"""A `dot_general` that sums nothing, so that it is a multiplication: `einsum("i,j->ij")`, or the
matmul of a column and a row."""

_INNER_PRODUCT = _NO_MATMUL._replace(instead_of_half="float32")
"""A `dot_general` in which no operand has a free axis, so that it is a sum, such as `vdot`."""


def facts_of(eqn: JaxprEqn) -> Row:
  """Returns the facts about the primitive of an equation; a row without facts if it is unknown."""
  row = FACTS.get(eqn.primitive.name, _UNKNOWN)
  if row.holds is Holds.OBJECT:
    return next((_OF_OBJECTS[x] for x in params_of_object(eqn) if x in _OF_OBJECTS), row)
  if row.flops != "dot":
    return row
  # The primitive is the same for three operations, which its axes tell apart.
  (summed, _), (batch, _) = eqn.params["dimension_numbers"]
  left, right = (cast(ShapedArray, v.aval).shape for v in eqn.invars)
  if all(left[axis] == 1 for axis in summed):
    return _OUTER_PRODUCT
  return _INNER_PRODUCT if len(left) == len(right) == len(summed) + len(batch) else row


def is_higher_order(eqn: JaxprEqn) -> bool:
  """Whether an equation holds jaxprs that readers enter."""
  return eqn.primitive.name in HIGHER_ORDER
