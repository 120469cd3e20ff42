"""`Policy`: the dtypes in which parameters are stored, used in computation and returned."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, check_call, nearest, shortened
from mpjax._core.trees import cast_leaf, is_floating
from mpjax._core.types import HALF_NAMES, DType, DTypeLike, Leaf, PyTree
from mpjax._policy.dtypes import NAMES, MatmulPrecision, parse_dtype, parse_precision, written
from mpjax._policy.float8 import parse_recipe

_PRESETS = {
  **{name: f"p={name},c={name},o={name}" for name in ("float32", "float64", *HALF_NAMES)},
  "mixed_bfloat16": "p=float32,c=bfloat16,o=float32",
  "mixed_float16": "p=float32,c=float16,o=float32",
  "mixed_float8": "p=float32,c=bfloat16,o=float32,matmul=float8",
}
"""The mixed ones output float32, so that the loss is computed in it."""

_MIXED = {name: f"mixed_{name}" for name in HALF_NAMES}

_AS_STRING = (
  'Write mpjax.Policy.parse("mixed_bfloat16"), or dtypes by keyword: '
  "mpjax.Policy(compute_dtype='bfloat16')."
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
  """The dtypes of a module: of its parameters, of its computation, of its results. Hashable.

  Args:
    param_dtype: the dtype parameters are stored in.
    compute_dtype: the dtype of matmuls and convolutions.
    output_dtype: the dtype of results where the policy begins (the root call, or the outermost
      module that a rule picked); None for what was computed.
    weight_grad_dtype: the dtype that gradients of a layer's kernel and bias are computed and added
      up in, on one device or on many; None for that of the matmuls of the layer.
    precision: how exactly matmuls and convolutions multiply, where the model itself says nothing:
      "default", "high", "highest" (float32 as float32), or a `jax.lax.DotAlgorithmPreset` or its
      name. None: what `jax_default_matmul_precision` says.
    matmul: a `mpjax.Float8` (or its text, such as "float8"): matmuls of parameters that are large
      enough multiply in float8, forward and backward; or a recipe of your own, see docs/float8.md.

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
    needed = {"param_dtype": param_dtype, "compute_dtype": compute_dtype}
    values = {"output_dtype": output_dtype, "weight_grad_dtype": weight_grad_dtype, **needed}
    for name, value in values.items():
      where = f"mpjax.Policy({name}=...)"
      dtype = None if value is None and name not in needed else parse_dtype(value, where)
      if dtype is not None and dtype.itemsize == 1 and name != "param_dtype":
        raise MpjaxTypeError(
          where,
          expected="a dtype that XLA promotes and adds in, such as 'bfloat16'",
          got=dtype.name,
          fix="8-bit formats need a scale for each tensor; here they can only be stored.",
        )
      vars(self)[name] = dtype
    wide, compute = self.weight_grad_dtype, self.compute_dtype
    if self.param_dtype == "float64" != compute:
      raise MpjaxValueError(
        "mpjax.Policy(param_dtype=...)",
        expected="float64 parameters with compute_dtype='float64'",
        got=f"float64 with compute_dtype={compute.name}",
        fix="JAX multiplies float64 parameters in float64. Store them in float32.",
      )
    if wide is not None and wide != compute and not 4 <= wide.itemsize > compute.itemsize:
      raise MpjaxValueError(
        "mpjax.Policy(weight_grad_dtype=...)",
        expected="float32 or float64, wider than the compute dtype, or the compute dtype itself",
        got=f"{wide.name} with compute_dtype={compute.name}",
        fix="Write 'float32' beside a narrower compute dtype, and leave it out otherwise.",
      )
    vars(self).update(
      precision=None if precision is None else parse_precision(precision, compute, wide),
      matmul=None if matmul is None else parse_recipe(matmul, compute, "mpjax.Policy(matmul=...)"),
    )

  @classmethod
  def parse(cls, policy: "PolicyLike") -> "Policy":
    """Returns the policy that a string names; a `Policy` is returned as it is.

    Args:
      policy: a preset, "float32", "float64", "bfloat16", "float16" (all dtypes are that one),
        "mixed_bfloat16", "mixed_float16" (float32 parameters and output; "bf16", "fp16" and "half"
        are short for them) or "mixed_float8"; or dtypes by key, "params=float32,compute=float16" or
        "c=f16", to which weight_grad=, precision= and matmul= may be added.

    >>> import mpjax
    >>> mpjax.Policy.parse("c=bf16").output_dtype is None
    True
    """
    return parse_policy(policy, "mpjax.Policy.parse(policy)")

  def __str__(self) -> str:
    texts: dict[str, object] = {}
    for key, name in _KEYS.items():
      value = getattr(self, name)
      if value is not None and len(key) > 1:
        is_dtype = name.endswith("_dtype")  # A recipe of a user's may have another name too.
        texts[key] = value.name if is_dtype else written(value) if name == "precision" else value
    return ",".join(f"{key}={text}" for key, text in texts.items())

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
      tree: as for `cast_to_param`.
    """
    return _cast(tree, self.compute_dtype)

  def cast_to_output(self, tree: PyTree) -> PyTree:
    """Returns `tree` with its floating arrays in `output_dtype`; as it is where that is None.

    Args:
      tree: as for `cast_to_param`.
    """
    return tree if self.output_dtype is None else _cast(tree, self.output_dtype)


PolicyLike: TypeAlias = str | Policy
"""Everywhere a policy is taken, a string is too."""


def parse_policy(policy: PolicyLike, where: str, example: str | None = None) -> Policy:
  """Returns the policy that an argument of the public call `where` says, see `Policy.parse`.

  `example` is what to write instead of something that is nothing like a preset.
  """
  presets = f"a preset ({', '.join(map(repr, _PRESETS))}; 'bf16', 'fp16' and 'half' are short)"
  expected = f"{presets} or 'params=...,compute=...,output=...'"
  if isinstance(policy, Policy):
    return policy
  if not isinstance(policy, str):
    scalar = isinstance(policy, type) and issubclass(policy, np.generic)
    dtype = np.dtype(policy) if scalar else getattr(policy, "dtype", policy)
    name = dtype.name if isinstance(dtype, np.dtype) else "bfloat16"
    meant = _MIXED.get(name, name)
    got = shortened(" ".join(repr(policy).split()), 80)
    fix = f'Pass a string, such as "{meant}", or a mpjax.Policy.'
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  name = policy.strip()
  if (short := name.lower()) in NAMES.keys() - _PRESETS.keys():  # of a dtype
    name = _MIXED.get(NAMES[short], NAMES[short])
  name = _PRESETS.get(name, name)
  fields: dict[str, str] = {}
  for position, item in enumerate(name.split(","), start=1):
    key, _, value = (part.strip() for part in item.partition("="))
    got, near, fix = f"{item.strip()!r} as item {position} of {policy!r}", nearest(key, _KEYS), ""
    if "=" not in name:
      # By "bf16-mixed" and "16-true" Lightning means "mixed_bfloat16" and "float16".
      lower = f"f{name}" if name.startswith("16-") else name.lower().replace("fp8", "float8")
      words = {NAMES.get(word, word) for word in lower.split("-")} - {"true"}
      meant = [preset for preset in _PRESETS if words <= {*preset.split("_")}]
      near = meant[:1] if words != {"mixed"} else meant
      got, near = repr(policy), near or nearest(lower, _PRESETS, least=0.5)
      fix = example or 'Write "mixed_bfloat16", or dtypes, as in "params=f32,compute=bf16".'
    elif not value:
      near, fix = [], "Write every item as key=dtype, with one comma between items."
    elif _KEYS.get(key) in fields:
      near, fix = [], f"{_KEYS[key]} is given twice; keep one."
    elif key in _KEYS:
      fields[_KEYS[key]] = value
      continue
    if near:
      fix = f"Did you mean {' or '.join(map(repr, near))}?"
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return Policy(**fields)


def _cast(tree: PyTree, dtype: DType) -> PyTree:
  def leaf(x: Leaf) -> Leaf:
    is_numpy = isinstance(x, (np.ndarray, np.generic)) and is_floating(x)
    return jnp.asarray(cast_leaf(x, dtype)) if is_numpy else cast_leaf(x, dtype)

  return jax.tree.map(leaf, tree)
