"""In what precision each primitive of JAX runs under autocast, and why: the data.

`mpjax.OpLists` is made of these groups, and so is the page docs/op_lists.md. Names are those that
`jax.make_jaxpr` prints. The higher-order primitives are not here: their inner jaxprs are entered,
see `inner_jaxprs.py`. Nor are the instructions of a Pallas kernel: a kernel is not entered.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

Part: TypeAlias = Literal["half", "float32", "promote", "keep", "opaque"]

Predicate: TypeAlias = Callable[[Mapping[str, Any]], str]
"""From the parameters of an equation to a part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Primitives that are in one part for one reason.

  Fields:
    part: where they are.
    names: the primitives.
    reason: why they are there, a sentence or two for the page.
    fixed: whether they cannot be moved, because they hold a program, or a reference to memory, in
      types that were fixed when it was written.
  """

  part: Part
  names: tuple[str, ...]
  reason: str
  fixed: bool = False


def _group(part: Part, names: str, reason: str, *, fixed: bool = False) -> Group:
  return Group(part=part, names=tuple(names.split()), reason=reason, fixed=fixed)


PARTS: Mapping[Part, str] = types.MappingProxyType(
  {
    "half": "Its operands are cast to the half type, and its result is in the half type.",
    "float32": "Its operands are cast to float32, and its result is float32.",
    "promote": "It runs in the widest type among its operands. Parameters, masks, and "
    "literals that survive in half do not count.",
    "keep": "It runs in the type that its operand has. Where it writes into a buffer, that is the "
    "first operand, and what is written is cast.",
    "opaque": "It runs in the types in which the program was written, as without autocast.",
  }
)
"""What each part means."""


GROUPS: tuple[Group, ...] = (
  # half
  _group(
    "half",
    "conv_general_dilated dot_general ragged_dot_general",
    "Matrix products and convolutions: nearly all of the arithmetic of a network, what Tensor "
    "Cores are for, and added up in float32 by the hardware before the one rounding of the "
    "result.",
  ),
  # float32
  _group(
    "float32",
    "exp exp2 expm1",
    "The absolute error of the operand becomes the relative error of the result: bfloat16 rounds "
    "8.03 to 8, and 3 % are lost. And exp(11.1) overflows float16.",
  ),
  _group(
    "float32",
    "log log1p log2",
    "Near 1 a rounding of the operand is all of the result; and the gradient 1/x of a small "
    "operand overflows float16.",
  ),
  _group(
    "float32",
    "pow",
    "It is exp(y log x), and takes the errors of both.",
  ),
  _group(
    "float32",
    "rsqrt",
    "Its gradient has the power -3/2 of the operand, which overflows float16 below 4e-4: where "
    "the variance of a norm is.",
  ),
  _group(
    "float32",
    "sin cos tan",
    "Their operands are angles, often thousands of radians (positions times frequencies). The "
    "absolute error of the angle is the error of the result, and half types round 1000 to a "
    "multiple of 0.5 or of 4.",
  ),
  _group(
    "float32",
    "polynomial",
    "It is a sum of powers, of large terms that cancel where it approximates a function.",
  ),
  _group(
    "float32",
    "sinh cosh",
    "They grow as the exponential function does.",
  ),
  _group(
    "float32",
    "acos acosh asin atanh",
    "At an end of their domain the slope is infinite, and a rounding of the operand there is far "
    "more than one of the result.",
  ),
  _group(
    "float32",
    "bessel_i0e bessel_i1e digamma erf_inv igamma igamma_grad_a igammac lgamma polygamma "
    "regularized_incomplete_beta zeta",
    "Special functions: steep, made of exponentials and logarithms, and part of losses and "
    "samplers rather than of the large layers, so that float32 costs little.",
  ),
  _group(
    "float32",
    "cumlogsumexp cumprod cumsum reduce_prod reduce_sum reduce_window_sum",
    "Sums and products of many numbers: the roundings add up, bfloat16 stops counting at 256, and "
    "float16 overflows at 65504. Softmax, means, norms and losses are made of them.",
  ),
  _group(
    "float32",
    "add_any",
    "The sum of the gradients of all uses of a value: of a shared or recurrent weight there are "
    "many.",
  ),
  _group(
    "float32",
    "scatter-add scatter-mul scatter-sub select_and_scatter_add",
    "Sums and products into a buffer: how many numbers meet in one place depends on the data. The "
    "gradients of an embedding and of pooling are such sums.",
  ),
  _group(
    "float32",
    "psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter",
    "Sums over devices, of gradients most of all: in half every hop rounds, and float16 "
    "overflows. They send twice the bytes of half; where that is the bottleneck, move them to "
    '"keep".',
  ),
  # promote
  _group(
    "promote",
    "add div max min mul rem sub",
    "One rounding of the result, as safe in half as its operands: the widest operand decides, so "
    "that nothing which is in float32 for a reason loses it.",
  ),
  _group(
    "promote",
    "atan2",
    "A small relative error of the operands is a small error of the angle, which is bounded.",
  ),
  _group(
    "promote",
    "eq eq_to ge gt le le_to lt lt_to ne",
    "Comparisons: both sides in the widest type, so that rounding one of them decides nothing. "
    "The result is boolean.",
  ),
  _group(
    "promote",
    "clamp concatenate pad select_n stack",
    "They choose among or join values without computing any: the widest keeps all of them exact.",
  ),
  _group(
    "promote",
    "sort",
    "What is sorted together stays exact, each in its own type or a wider one.",
  ),
  _group(
    "promote",
    "device_put optimization_barrier shard_alike tie",
    "They pass on each of their operands as it is: in its own type or a wider one, exactly.",
  ),
  _group(
    "promote",
    "ragged_all_to_all",
    "It writes what other devices send into a buffer: the widest keeps both exact.",
  ),
  # keep
  _group(
    "keep",
    "abs ceil floor is_finite neg round sign",
    "Exact in every type.",
  ),
  _group(
    "keep",
    "asinh atan erf erfc logistic tanh",
    "Activation functions and their kin: slopes of at most about one, results that stay in range. "
    "These hold the largest activations of a network, and float32 would double their memory.",
  ),
  _group(
    "keep",
    "cbrt sqrt",
    "Roots bring numbers of any size nearer to 1, and the gradient stays in range even for the "
    "smallest float16. After a sum they run in float32 anyway.",
  ),
  _group(
    "keep",
    "one_minus_square square",
    "Exact but for one rounding; part of activation functions and of their gradients. Before a sum "
    "they run in float32, because their reader does.",
  ),
  _group(
    "keep",
    "approx_top_k argmax argmin cummax cummin pmax pmin reduce_max reduce_min reduce_window_max "
    "reduce_window_min top_k unreduced_pmax unreduced_pmin",
    "They choose among the values of their operand, exactly in its own type.",
  ),
  _group(
    "keep",
    "broadcast_in_dim broadcast_to copy dynamic_slice gather name reshape rev slice split squeeze "
    "stage stop_gradient tile transpose unstack xla_metadata_value",
    "They move numbers and compute none.",
  ),
  _group(
    "keep",
    "layout_constraint relayout reshard sharding_constraint with_memory_space_constraint",
    "They say where numbers are to be.",
  ),
  _group(
    "keep",
    "all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast "
    "pbroadcast_dynamic ppermute preduced pvary reduced_vary_cast reduced_vary_cast_p "
    "vary_unreduced_cast vary_unreduced_cast_p",
    "They move numbers between devices and compute none; half sends half the bytes.",
  ),
  _group(
    "keep",
    "dynamic_update_slice scatter scatter-max scatter-min",
    "They write into a buffer, which keeps its type, as an array does on assignment: an update is "
    "cast to it.",
  ),
  _group(
    "keep",
    "convert_element_type",
    "A cast that the program asks for: one between real types it was written with is carried out, "
    "and one to float32 of what is float32 without autocast says nothing about precision.",
  ),
  # opaque
  _group(
    "opaque",
    "and clz mulhi not or population_count reduce_and reduce_or reduce_xor shift_left "
    "shift_right_arithmetic shift_right_logical xor",
    "Integers and booleans, which autocast never touches.",
  ),
  _group(
    "opaque",
    "axis_index dim_as_value dimension_size empty empty2 iota iota_2x32_shape platform_index "
    "zeros_like",
    "They make numbers from no operand. Positions above 256 would not survive in bfloat16.",
  ),
  _group(
    "opaque",
    "philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed "
    "random_split random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32 "
    "threefry4x32",
    "Random numbers: the samples are those that the program draws without autocast.",
  ),
  _group(
    "opaque",
    "assert_consumed_value consume from_edtype to_edtype",
    "They work on keys and other types that are no numbers.",
  ),
  _group(
    "opaque",
    "bitcast_convert_type nextafter reduce_precision",
    "They are about the bits of a type: in another one they would mean something else.",
  ),
  _group(
    "opaque",
    "complex conj fft imag real",
    "Complex numbers have no half type.",
  ),
  _group(
    "opaque",
    "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu "
    "lu_pivots_to_permutation ormqr qr schur svd symmetric_product triangular_solve tridiagonal "
    "tridiagonal_solve",
    "Linear algebra: the libraries behind it have no half type, and the condition number of the "
    "matrix multiplies every rounding.",
  ),
  _group(
    "opaque",
    "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices "
    "bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general "
    "bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm "
    "coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense "
    "spsolve todense",
    "Sparse matrices: no Tensor Cores to gain, and libraries without half types.",
  ),
  _group(
    "opaque",
    "scaled_dot scaled_matmul scaled_matmul_wrapper",
    "Products of numbers in eight bits or fewer, with scales of their own: more precise choices "
    "have been made than ours.",
  ),
  _group(
    "opaque",
    "dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd "
    "dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd "
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd "
    "dot_product_attention_fwd_wrapper rnn_bwd rnn_fwd",
    "Kernels of cuDNN, chosen for the types that the program gives them.",
  ),
  _group(
    "opaque",
    "buffer_callback debug_callback debug_print ffi_call inspect_sharding io_callback "
    "pure_callback",
    "What is called there expects the types that it was written for, or is to see them.",
  ),
  _group(
    "opaque",
    "after_all check create_token dce_sink global_array_to_host_local_array "
    "host_local_array_to_global_array precv psend shape_assertion unreachable",
    "Order, checks, and what crosses the boundary of the program: no arithmetic.",
  ),
  _group(
    "opaque",
    "all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start "
    "pbroadcast_done pbroadcast_start ppermute_done ppermute_start psum_done "
    "psum_invariant_start psum_start reduce_scatter_done reduce_scatter_start "
    "unreduced_psum_start unreduced_reduce_scatter_start",
    "Halves of a transfer that has been split in two by hand: both have to agree on the type.",
  ),
  _group(
    "opaque",
    "custom_lin select_and_gather_add",
    "Steps of differentiation, which are gone from a finished program or rare in it.",
  ),
  _group(
    "opaque",
    "accum_grad_in_ref addupdate box_get box_set create_linear empty_ref free_ref freeze get "
    "log_extend log_read new_box new_log new_ref pin swap unpin",
    "Memory that is written in place: the reference has the type with which it was made.",
    fixed=True,
  ),
  _group(
    "opaque",
    "reduce reduce_window select_and_scatter",
    "They hold the operation on two numbers by which they combine elements, in the types in which "
    "it was traced.",
    fixed=True,
  ),
  _group(
    "opaque",
    "call_exported call_hi_primitive_linearized compute_on core_map "
    "cudnn_fusion custom_jvp_call_jaxpr custom_partitioning fused_call pallas_call "
    "remat_opt run_state xla_metadata_call",
    "They hold a program of their own that is deliberately not entered: a kernel written by hand, "
    "or one that has been compiled or placed elsewhere.",
    fixed=True,
  ),
)
"""Every first-order primitive of each supported JAX in exactly one place, with `CONDITIONS`."""


def integer_pow_part(params: Mapping[str, Any]) -> Part:
  """Keeps the powers 0 to 3; the others run in float32."""
  return "keep" if 0 <= params["y"] <= 3 else "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
  """A primitive whose part depends on the parameters of its equation.

  Fields:
    name: the primitive.
    part_of: from the parameters to the part.
    text: what it decides, in words.
    reason: why.
  """

  name: str
  part_of: Predicate
  text: str
  reason: str


CONDITIONS: tuple[Condition, ...] = (
  Condition(
    name="integer_pow",
    part_of=integer_pow_part,
    text="keep for the powers 0 to 3, float32 for others",
    reason="Squares and cubes are part of activation functions (GELU), where float32 would double "
    "the memory of the largest activations. The fourth power overflows float16 from 16 on, and "
    "negative ones for small operands. All of an activation function with a power in it, also one "
    "written as x * x, is computed in float32, and its slope is kept in half.",
  ),
)
