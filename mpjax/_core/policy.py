"""`Policy`: the dtypes in which parameters are stored, used in computation and returned."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.dtypes import (
  HALF_NAMES,
  NAMES,
  MatmulPrecision,
  check_precision,
  is_float8,
  parse_dtype,
  parse_precision,
  written,
)
from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_call, nearest, shortened
from mpjax._core.float8 import parse_recipe
from mpjax._core.trees import cast_leaf, is_floating
from mpjax._core.types import DType, DTypeLike, Leaf, PyTree

_PRESETS = {
  **{name: f"p={name},c={name},o={name}" for name in ("float32", "bfloat16", "float16")},
  "mixed_bfloat16": "p=float32,c=bfloat16,o=float32",
  "mixed_float16": "p=float32,c=float16,o=float32",
  "mixed_float8": "p=float32,c=bfloat16,o=float32,matmul=float8",
}
"""The mixed ones output float32, so that the loss is computed in it."""

_AS_STRING = (
  'A name or a string of dtypes goes to mpjax.Policy.parse("mixed_bfloat16"), and wherever a '
  "policy is taken; dtypes go here by keyword: mpjax.Policy(compute_dtype='bfloat16')."
)

_KEYS = {
  **{"params": "param_dtype", "p": "param_dtype"},
  **{"compute": "compute_dtype", "c": "compute_dtype"},
  **{"output": "output_dtype", "o": "output_dtype"},
  **{"weight_grad": "weight_grad_dtype", "w": "weight_grad_dtype"},
  **{"precision": "precision", "matmul": "matmul"},
}


@dataclasses.dataclass(frozen=True, kw_only=True, init=False)
class Policy:
  """The dtypes of a module: of its parameters, of its computation, of its results.

  Frozen and hashable: a policy can be a field of a module, a static argument of `jax.jit`, a key.

  Args:
    param_dtype: the dtype parameters are stored in.
    compute_dtype: the dtype of matmuls and convolutions; in NNX that of inputs and parameters at
      each use.
    output_dtype: the dtype of results where the policy begins (the root call, or the outermost
      module that a rule picked). None: whatever was computed; in NNX, under a rule, the compute
      dtype of the surrounding policy.
    weight_grad_dtype: the dtype that the gradients of a layer's kernel and bias are computed in;
      None (or the compute dtype) leaves them to the matmuls of the layer. With float32 under a
      compute dtype of 16 bits they are neither rounded to it nor added up in it, on one device or
      on many.
    precision: how exactly matmuls and convolutions multiply what they are given, where the model
      itself says nothing: "default", "high" or "highest", which are about float32, or a
      `jax.lax.DotAlgorithmPreset` for matmuls, as an object or by its name. None: what
      `jax_default_matmul_precision` says. That is TF32 for float32 on GPUs since Ampere (10 bits
      of mantissa, as float16 has), and bfloat16 on TPUs: "highest" is float32.
    matmul: a `mpjax.Float8` (or its text, such as "float8"): matmuls of parameters that are large
      enough multiply in float8, forward and backward; everything else is as without it. Or a recipe
      of your own, see docs/float8.md. None: all matmuls are in the compute dtype.

  Raises:
    MpjaxValueError: a dtype name is unknown, float64 is asked for without `jax_enable_x64`, or
      weight gradients are asked for in something other than float32, float64 and the compute dtype,
      or narrower than it; the precision is unknown, or none for the compute dtype; float8 is asked
      for beside another compute dtype than bfloat16 or float16.
    MpjaxTypeError: a dtype that is not floating, or an 8-bit one outside `param_dtype`; a precision
      that is neither a name nor one of JAX's.

  >>> import jax.numpy as jnp, mpjax
  >>> policy = mpjax.Policy(compute_dtype=jnp.bfloat16, output_dtype="f32")
  >>> print(policy)
  params=float32,compute=bfloat16,output=float32
  >>> policy == mpjax.Policy.parse("mixed_bfloat16")
  True
  >>> print(mpjax.Policy(precision="highest"))
  params=float32,compute=float32,precision=highest
  """

  param_dtype: DType
  compute_dtype: DType
  output_dtype: DType | None
  weight_grad_dtype: DType | None
  precision: MatmulPrecision | None
  matmul: Any

  @check_call("mpjax.Policy(...)", fix=_AS_STRING)
  def __init__(
    self,
    *,
    param_dtype: DTypeLike = "float32",
    compute_dtype: DTypeLike = "float32",
    output_dtype: DTypeLike | None = None,
    weight_grad_dtype: DTypeLike | None = None,
    precision: str | MatmulPrecision | None = None,
    matmul: Any = None,
  ) -> None:
    needed = {"param_dtype": param_dtype, "compute_dtype": compute_dtype}
    optional = {"output_dtype": output_dtype, "weight_grad_dtype": weight_grad_dtype}
    for name, value in {**needed, **optional}.items():
      if name in optional and value is None:
        object.__setattr__(self, name, None)
        continue
      where = f"mpjax.Policy({name}=...)"
      dtype = parse_dtype(value, where)
      if is_float8(dtype) and name != "param_dtype":
        raise MpjaxTypeError(
          where,
          expected="a dtype that XLA promotes and adds in, such as 'bfloat16'",
          got=dtype.name,
          fix="8-bit formats need a scale for each tensor; here they can only be stored.",
        )
      object.__setattr__(self, name, dtype)
    wide, compute = self.weight_grad_dtype, self.compute_dtype
    if wide is not None and wide != compute and not 4 <= wide.itemsize > compute.itemsize:
      raise MpjaxValueError(
        "mpjax.Policy(weight_grad_dtype=...)",
        expected="float32 or float64, wider than the compute dtype, or the compute dtype itself",
        got=f"{wide.name} with compute_dtype={compute.name}",
        fix="Write 'float32' beside a narrower compute dtype, and leave it out otherwise: any "
        "other dtype would only round once more.",
      )
    where = "mpjax.Policy(precision=...)"
    parsed = None if precision is None else parse_precision(precision, where)
    object.__setattr__(self, "precision", parsed)
    if parsed is not None:
      check_precision(parsed, self.compute_dtype, self.weight_grad_dtype, where)
    where = "mpjax.Policy(matmul=...)"
    recipe = None if matmul is None else parse_recipe(matmul, self.compute_dtype, where)
    object.__setattr__(self, "matmul", recipe)

  @classmethod
  def parse(cls, policy: "PolicyLike") -> "Policy":
    """Returns the policy that a string names; a `Policy` is returned as it is.

    Args:
      policy: a preset ("float32", "bfloat16", "float16": all three dtypes; "mixed_bfloat16",
        "mixed_float16": float32 parameters, 16-bit compute, float32 output, for which "bf16",
        "fp16" and "half" are short, as in trainers' flags; "mixed_float8": as "mixed_bfloat16",
        with large matmuls in float8), or dtypes by key ("params=float32,compute=float16", or short
        "p=f32,c=bf16,o=f32"); weight_grad=, precision= and matmul= may follow.

    Raises:
      MpjaxValueError: an unknown preset, key or dtype, a key given twice, an empty item.
      MpjaxTypeError: neither a string nor a `Policy`.

    >>> import mpjax
    >>> mpjax.Policy.parse("c=bf16").output_dtype is None
    True
    """
    return parse_policy(policy, "mpjax.Policy.parse(policy)")

  def __str__(self) -> str:
    long = {key: name for key, name in _KEYS.items() if name.endswith("_dtype") and len(key) > 1}
    dtypes = {key: getattr(self, name) for key, name in long.items()}
    texts = {key: dtype.name for key, dtype in dtypes.items() if dtype is not None}
    if self.precision is not None:
      texts["precision"] = written(self.precision)
    if self.matmul is not None:
      texts["matmul"] = str(self.matmul)
    return ",".join(f"{k}={text}" for k, text in texts.items())

  def cast_to_param(self, tree: PyTree) -> PyTree:
    """Returns `tree` with its floating arrays in `param_dtype`.

    Args:
      tree: any tree; integers, keys, Python numbers and objects are returned as they are.

    >>> import jax.numpy as jnp, mpjax
    >>> mpjax.Policy.parse("bfloat16").cast_to_param({"w": jnp.ones(2), "step": 3})
    {'step': 3, 'w': Array([1, 1], dtype=bfloat16)}
    """
    return _cast(tree, self.param_dtype)

  def cast_to_compute(self, tree: PyTree) -> PyTree:
    """Returns `tree` with its floating arrays in `compute_dtype`.

    Args:
      tree: any tree; integers, keys, Python numbers and objects are returned as they are.

    >>> import jax.numpy as jnp, mpjax
    >>> mpjax.Policy.parse("mixed_float16").cast_to_compute(jnp.ones(2)).dtype
    dtype('float16')
    """
    return _cast(tree, self.compute_dtype)

  def cast_to_output(self, tree: PyTree) -> PyTree:
    """Returns `tree` with its floating arrays in `output_dtype`; as it is where that is None.

    Args:
      tree: any tree; integers, keys, Python numbers and objects are returned as they are.

    >>> import jax.numpy as jnp, mpjax
    >>> mpjax.Policy.parse("mixed_float16").cast_to_output(jnp.ones(2, jnp.float16)).dtype
    dtype('float32')
    """
    return tree if self.output_dtype is None else _cast(tree, self.output_dtype)


PolicyLike: TypeAlias = str | Policy
"""Everywhere a policy is taken, a string is too."""


def parse_policy(policy: PolicyLike, where: str) -> Policy:
  """Returns the policy that an argument of the public call `where` says, see `Policy.parse`."""
  expected = f"a preset ({', '.join(map(repr, _PRESETS))}) or 'params=...,compute=...,output=...'"
  if isinstance(policy, Policy):
    return policy
  if not isinstance(policy, str):
    got = shortened(" ".join(repr(policy).split()), 80)
    fix = 'Pass a string, such as "mixed_bfloat16", or a mpjax.Policy.'
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  name = policy.strip()
  if name in NAMES.keys() - _PRESETS.keys():  # a short name of a dtype
    name = "mixed_" * (NAMES[name] in HALF_NAMES) + NAMES[name]
  name = _PRESETS.get(name, name)
  if "=" not in name:
    fix = f"Did you mean {' or '.join(map(repr, nearest(name, _PRESETS)))}?"
    raise MpjaxValueError(where, expected=expected, got=repr(policy), fix=fix)
  fields: dict[str, str] = {}
  for position, item in enumerate(name.split(","), start=1):
    key, equals, value = (part.strip() for part in item.partition("="))
    got = f"{item.strip()!r} as item {position} of {policy!r}"
    if not equals or not value:
      fix = "Write every item as key=dtype, with one comma between items."
      raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
    if key not in _KEYS:
      fix = f"Did you mean {' or '.join(map(repr, nearest(key, _KEYS)))}?"
      raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
    if _KEYS[key] in fields:
      fix = f"{_KEYS[key]} is given twice; keep one."
      raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
    fields[_KEYS[key]] = value
  return Policy(**fields)


def _cast(tree: PyTree, dtype: DType) -> PyTree:
  def leaf(x: Leaf) -> Leaf:
    if isinstance(x, (np.ndarray, np.generic)) and is_floating(x):
      return jnp.asarray(cast_leaf(x, dtype))
    return cast_leaf(x, dtype)

  return jax.tree.map(leaf, tree)
