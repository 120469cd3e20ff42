"""`Policy`: the dtypes in which parameters are stored, used in computation and returned."""

import dataclasses
import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import (
  MpjaxTypeError,
  MpjaxValueError,
  alternatives,
  check_call,
  in_one_line,
  nearest,
)
from mpjax._core.trees import cast_leaf, is_floating
from mpjax._core.types import HALF_NAMES, DType, DTypeLike, Leaf, PyTree
from mpjax._matmul.options import format_name
from mpjax._matmul.recipes import FORMATS, parse_recipe
from mpjax._policy.dtypes import NAMES, MatmulPrecision, parse_dtype, parse_precision, written

_ALL_IN_ONE = ("float32", "float64", *HALF_NAMES)

_PRESETS = {
  **{name: f"params={name},compute={name},output={name}" for name in _ALL_IN_ONE},
  "float32_highest": "params=float32,compute=float32,output=float32,precision=highest",
  "mixed_bfloat16": "params=float32,compute=bfloat16,output=float32",
  "mixed_float16": "params=float32,compute=float16,output=float32",
  **{
    f"mixed_{name}": f"params=float32,compute=bfloat16,output=float32,matmul={name}"
    for name in map(format_name, FORMATS)
  },
}
"""Presets by name, as `str` writes policies. Mixed ones output float32, as the loss needs it."""

EXACT_FLOAT32 = "float32_highest"
"""The preset for modules that need float32: GPUs and TPUs multiply "float32" in fewer bits."""

_MIXED = {name: f"mixed_{name}" for name in HALF_NAMES}
"""What the name of a 16-bit dtype stands for if it is not a preset, such as "bf16"."""

_AS_STRING = (
  'Write mpjax.Policy.parse("mixed_bfloat16"), or dtypes by keyword: '
  "mpjax.Policy(compute_dtype='bfloat16')."
)

# Long keys, which `str` writes, and short ones.
_KEYS = {
  **{"params": "param_dtype", "p": "param_dtype"},
  **{"compute": "compute_dtype", "c": "compute_dtype"},
  **{"output": "output_dtype", "o": "output_dtype"},
  **{"weight_grad": "weight_grad_dtype", "w": "weight_grad_dtype"},
  **{"precision": "precision", "matmul": "matmul"},
}
"""Fields of a policy by the keys of its text."""


@dataclasses.dataclass(frozen=True, kw_only=True, init=False)
class Policy:
  """The dtypes of a module: of its parameters, of its computation and of its results. Hashable.

  Args:
    param_dtype: the dtype in which parameters are stored.
    compute_dtype: the dtype of matmuls and convolutions.
    output_dtype: the dtype of the results of the outermost module under the policy. It is the root
      of the model, or a module that a rule matches. None leaves results as they were computed.
    weight_grad_dtype: the dtype in which gradients of kernels and biases are computed and added up,
      on one device or on many. None takes the dtype of the layer's matmuls, but float32 in float16,
      except for the kernels of convolutions.
    precision: the precision of matmuls and convolutions for which the model sets none: "default",
      "high", "highest" (float32 as float32), a `jax.lax.DotAlgorithmPreset` or its name. None
      follows `jax_default_matmul_precision`. If that is unset, a low-precision policy asks for
      "highest" in the matmuls that it keeps in float32.
    matmul: a format for matmuls of parameters: a `mpjax.Float8`, `mpjax.MXFP8`, `mpjax.NVFP4` or
      `mpjax.Int8`, or its text, such as "float8:row". For another recipe see docs/float8.md.

  Raises:
    MpjaxValueError: an unknown name; float64 without `jax_enable_x64`; a dtype of weight gradients,
      a precision or a recipe that does not fit the compute dtype.
    MpjaxTypeError: a dtype that is not floating, or an 8-bit one outside `param_dtype`.

  >>> import jax.numpy as jnp, mpjax
  >>> policy = mpjax.Policy(compute_dtype=jnp.bfloat16, output_dtype="f32")
  >>> print(policy)
  params=float32,compute=bfloat16,output=float32
  >>> policy == mpjax.Policy.parse("mixed_bfloat16")
  True
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
    dtypes = {
      **{"output_dtype": output_dtype, "weight_grad_dtype": weight_grad_dtype},
      **{"param_dtype": param_dtype, "compute_dtype": compute_dtype},
    }
    # The class is frozen, so fields are not set as attributes.
    fields = vars(self)
    for name, given in dtypes.items():
      # The other two fields have a dtype always, so `parse_dtype` refuses None for them.
      if given is None and name in ("output_dtype", "weight_grad_dtype"):
        fields[name] = None
        continue
      where = f"mpjax.Policy({name}=...)"
      fields[name] = dtype = parse_dtype(given, where)
      if dtype.itemsize == 1 and name != "param_dtype":
        raise MpjaxTypeError(
          where,
          expected="a dtype in which JAX can add, such as 'bfloat16'",
          got=dtype.name,
          fix="Use 8-bit dtypes for param_dtype only. For matmuls, write matmul=mpjax.Float8().",
        )
    # Each dtype is valid by itself. Now the fields are checked against each other.
    compute, gradients = self.compute_dtype, self.weight_grad_dtype
    if self.param_dtype == np.float64 and compute != np.float64:
      raise MpjaxValueError(
        "mpjax.Policy(param_dtype=...)",
        expected="float64 parameters with compute_dtype='float64'",
        got=f"float64 with compute_dtype={compute.name}",
        fix="JAX multiplies float64 parameters in float64. Store them in float32.",
      )
    # A narrower dtype would round gradients again. Float16 and bfloat16 do not hold each other.
    least = max(4, compute.itemsize + 1)
    if gradients is not None and gradients != compute and gradients.itemsize < least:
      raise MpjaxValueError(
        "mpjax.Policy(weight_grad_dtype=...)",
        expected="float32 or float64, wider than the compute dtype, or the compute dtype itself",
        got=f"{gradients.name} with compute_dtype={compute.name}",
        fix="Write 'float32' beside a narrower compute dtype, and leave it out otherwise.",
      )
    fields["precision"] = fields["matmul"] = None
    if precision is not None:
      fields["precision"] = parse_precision(precision, compute, gradients)
    if matmul is not None:
      fields["matmul"] = parse_recipe(matmul, compute, "mpjax.Policy(matmul=...)")

  @classmethod
  def parse(cls, policy: "PolicyLike") -> "Policy":
    """Parse the string of a policy. A `Policy` is returned unchanged.

    Args:
      policy: a preset or dtypes by key. Presets with one dtype for all are "float32", "float64",
        "bfloat16" and "float16". "float32_highest" is "float32" with precision="highest", for
        GPUs and TPUs, which multiply float32 in TF32 or bfloat16 by default. Presets with float32
        parameters and output are "mixed_bfloat16", "mixed_float16" ("bf16", "fp16" and "half" are
        short for them). "mixed_float8", "mixed_mxfp8", "mixed_nvfp4" and "mixed_int8" are
        "mixed_bfloat16" with matmuls in a format. Dtypes by key are "params=f32,compute=float16" or
        "c=f16". Other keys are weight_grad=, precision= and matmul=.

    Returns:
      The policy.

    >>> import mpjax
    >>> mpjax.Policy.parse("c=bf16").output_dtype is None
    True
    """
    return parse_policy(policy, "mpjax.Policy.parse(policy)")

  def __str__(self) -> str:
    # `parse` reads it. The marks of regions in jaxprs hold this text, too.
    texts: list[str] = []
    for key, name in _KEYS.items():
      value = getattr(self, name)
      is_short = len(key) == 1  # Each field has a long key and perhaps a short one.
      if value is None or is_short:
        continue
      if name.endswith("_dtype"):
        value = value.name
      elif name == "precision":
        value = written(value)
      texts.append(f"{key}={value}")
    return ",".join(texts)

  def cast_to_param(self, tree: PyTree) -> PyTree:
    """Return `tree` with its floating arrays in `param_dtype`.

    Args:
      tree: any tree; integers, keys, Python numbers and objects are returned as they are.

    >>> import jax.numpy as jnp, mpjax
    >>> mpjax.Policy.parse("bfloat16").cast_to_param({"w": jnp.ones(2), "step": 3})
    {'step': 3, 'w': Array([1, 1], dtype=bfloat16)}
    """
    return _cast(tree, self.param_dtype)

  def cast_to_compute(self, tree: PyTree) -> PyTree:
    """Return `tree` with its floating arrays in `compute_dtype`.

    Args:
      tree: as for `cast_to_param`.
    """
    return _cast(tree, self.compute_dtype)

  def cast_to_output(self, tree: PyTree) -> PyTree:
    """Return `tree` with its floating arrays in `output_dtype`; unchanged if that is None.

    Args:
      tree: as for `cast_to_param`.
    """
    return tree if self.output_dtype is None else _cast(tree, self.output_dtype)


PolicyLike: TypeAlias = str | Policy
"""The argument of each public call that takes a policy."""


def parse_policy(policy: PolicyLike, where: str, example: str | None = None) -> Policy:
  """Returns the policy of an argument of a public call, see `Policy.parse`.

  Args:
    policy: the argument.
    where: the public call and the argument, for errors.
    example: the fix in the error for a string that resembles no preset.
  """
  if isinstance(policy, Policy):
    return policy
  if not isinstance(policy, str):
    # `jnp.bfloat16` has an attribute `dtype`. NumPy's scalar types, such as `np.float16`, have a
    # descriptor of that name instead.
    is_scalar_type = isinstance(policy, type) and issubclass(policy, np.generic)
    dtype = np.dtype(policy) if is_scalar_type else getattr(policy, "dtype", policy)
    name = dtype.name if isinstance(dtype, np.dtype) else "bfloat16"
    raise MpjaxTypeError(
      where,
      expected=_EXPECTED,
      got=in_one_line(policy),
      fix=f'Pass a string, such as "{_MIXED.get(name, name)}", or a mpjax.Policy.',
    )
  name = policy.strip()
  dtype = NAMES.get(name.lower(), name)
  # "bfloat16" is a preset with one dtype for all. The short "bf16" means "mixed_bfloat16".
  if name.lower() not in _PRESETS:
    name = _MIXED.get(dtype, dtype)
  items = _PRESETS.get(name, name)
  if "=" in items:
    return Policy(**_parse_items(items, policy, where))
  meant = _presets_like(name)
  if meant:
    fix = f"Did you mean {alternatives(meant)}?"
  elif example is not None:
    fix = example
  else:
    fix = 'Write "mixed_bfloat16", or dtypes, as in "params=f32,compute=bf16".'
  raise MpjaxValueError(where, expected=_EXPECTED, got=repr(policy), fix=fix)


def shortest_text(policy: Policy) -> str:
  """Returns the name of the preset that a policy equals, or its items if there is none."""
  presets = {items: name for name, items in _PRESETS.items()}
  return presets.get(str(policy), str(policy))


_EXPECTED = (
  f"a preset ({', '.join(map(repr, _PRESETS))}; 'bf16', 'fp16' and 'half' are short) "
  "or 'params=...,compute=...,output=...'"
)


def _parse_items(items: str, policy: str, where: str) -> dict[str, str]:
  """Returns the values of "key=value" items, separated by commas, by the fields of a policy."""
  fields: dict[str, str] = {}
  for position, item in enumerate(items.split(","), start=1):
    key, _, value = (part.strip() for part in item.partition("="))
    field = _KEYS.get(key)
    # Each branch but the last is an error, with its own fix.
    if not value:
      fix = "Write every item as key=dtype, with one comma between items."
    elif field is None:
      fix = f"Did you mean {alternatives(nearest(key, _KEYS))}?"
    elif field in fields:
      fix = f"{field} is given twice; keep one."
    else:
      fields[field] = value
      continue
    got = f"{item.strip()!r} as item {position} of {policy!r}"
    raise MpjaxValueError(where, expected=_EXPECTED, got=got, fix=fix)
  return fields


_WORDS = {
  **{"fp8": "float8", "e4m3": "float8", "e5m2": "float8", "e4m3fn": "float8", "fp4": "nvfp4"},
  **{"tf32": "float32", "amp": "mixed", "o1": "mixed", "o2": "mixed", "true": ""},
}
"""Words of other libraries. "bf16-true" of Lightning means one dtype for all, a preset as well."""


def _presets_like(name: str) -> list[str]:
  """Returns the presets that a name may mean, such as "bf16-mixed" of Lightning."""
  lower = f"f{name}" if name.startswith("16-") else name.lower()  # "16-mixed" of Lightning.
  words = {_WORDS.get(word, NAMES.get(word, word)) for word in re.split("[-_]", lower)} - {""}
  presets = [preset for preset in _PRESETS if words and words <= {*preset.split("_")}]
  # "mixed" alone says no dtype.
  if words == {"mixed"}:
    return presets
  return presets[:1] or nearest(lower, _PRESETS, least=0.5)


def _cast(tree: PyTree, dtype: DType) -> PyTree:
  """Returns a tree with its floating arrays in a dtype, as arrays of JAX."""

  def leaf(x: Leaf) -> Leaf:
    # NumPy arrays become arrays of JAX even if they have the dtype already.
    is_numpy = isinstance(x, (np.ndarray, np.generic)) and is_floating(x)
    return jnp.asarray(cast_leaf(x, dtype)) if is_numpy else cast_leaf(x, dtype)

  return jax.tree.map(leaf, tree)
