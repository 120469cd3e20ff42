"""The training steps that a GPU is measured with: one model in ten ways.

All begin from the same float32 parameters and compute the same update. `none`, of the versions of
loss scaling, is `policy`: the same step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import by_hand
import jax
import jax.numpy as jnp
import training_steps
from flax.training import dynamic_scale
from flax.traverse_util import flatten_dict, unflatten_dict
from models import SIZES, Case, fused_attention

import mpjax

HALVES = {
  **{"resnet": "float16", "gpt": "bfloat16", "mlp": "bfloat16"},
  **{"lstm": "float16", "wide": "bfloat16", "after": "bfloat16", "experts": "bfloat16"},
}
"""The low precision of each model, in the order of their measurement."""

IN_PYTORCH = ("resnet", "gpt", "mlp", "lstm", "wide")
"""Those that `torch_models.py` has as well."""

SCALE = 2.0**15
"""Where every loss scale begins: PyTorch's too."""

NAMES = (
  *("float32 highest", "TF32", "by hand", "by hand, float32 logits", "policy", "autocast"),
  *("static", "dynamic", "flax DynamicScale", "float8"),
)
LEADERS = ("float32 highest", "TF32", "policy", "float8")
"""Compiled before the others. What the autotuner chose for them it need not choose again, and so
does not choose differently, for the versions with the same matmuls."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Version:
  """A training step.

  Fields:
    step: `(state, *batch) -> (state, loss)`.
    begin: `(params, rest) -> state`.
    precision: of float32 matmuls; see `jax.default_matmul_precision`.
  """

  step: Callable[..., Any]
  begin: Callable[[Any, Any], Any]
  precision: str | None = None

  def context(self) -> AbstractContextManager[Any]:
    """Returns what the step is traced under."""
    return jax.default_matmul_precision(self.precision) if self.precision else nullcontext()


def attention_here(device: Any) -> str:
  """Returns the best attention for low precision: cuDNN's from NVIDIA's Ampere on."""
  capability = getattr(device, "compute_capability", "0.0")
  return "cudnn" if device.platform == "gpu" and _number(capability) >= (8, 0) else "xla"


def _number(capability: Any) -> tuple[int, ...]:
  parts = str(capability).split(".")
  return tuple(int(part) for part in parts) if all(p.isdigit() for p in parts) else (0,)


def versions(case: Case, half: str, attention: str = "xla") -> dict[str, Version]:
  """Returns every one of `NAMES`.

  Args:
    case: of `models.SIZES`.
    half: the low precision.
    attention: "cudnn" or "xla", for versions whose attention has operands in low precision. Those
      in float32 have XLA's: cuDNN has none.
  """

  def model(implementation: str, dtype: Any = None, cast_to: Any = None) -> Any:
    made = case.make(dtype)
    if not hasattr(made, "attention"):
      return made
    fused = functools.partial(fused_attention, implementation=implementation, cast_to=cast_to)
    return made.clone(attention=fused)

  plain = model(attention)  # What a policy gets.
  policy = mpjax.Policy.parse(f"mixed_{half}")
  by_policy = mpjax.with_policy(plain, policy).apply
  by_float8 = mpjax.with_policy(plain, dataclasses.replace(policy, matmul=mpjax.Float8())).apply
  float32 = model("xla").apply
  low = model(attention, jnp.dtype(half).type).apply
  traced = functools.partial(training_steps.loss_fn, model(attention, cast_to=half).apply)
  autocast = functools.partial(training_steps.step_of, mpjax.autocast(traced, half))

  def begin(params: Any, rest: Any) -> Any:
    return params, rest, training_steps.optimizer().init(params)

  def unscaled(apply: Any, precision: str | None = None) -> Version:
    step = functools.partial(training_steps.plain_step, apply)
    return Version(step=step, begin=begin, precision=precision)

  def scaled(scale: Any) -> Version:
    tx = mpjax.loss_scaling(training_steps.optimizer(), scale)
    step = functools.partial(training_steps.mpjax_step, tx, by_policy)
    return Version(step=step, begin=lambda params, rest: (params, rest, tx.init(params)))

  def with_flax_scale(params: Any, rest: Any) -> Any:
    # Arrays from the start: Flax's own Python numbers would cost a second compilation.
    fresh = dynamic_scale.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(SCALE))
    return begin(params, rest), fresh

  found = (
    unscaled(float32, "highest"),
    unscaled(float32, "default"),
    unscaled(low),
    unscaled(by_hand.intercepted(low, by_hand.float32_logits, case.classes)),
    unscaled(by_policy),
    Version(step=autocast, begin=begin),
    scaled(mpjax.StaticLossScale(SCALE)),
    scaled(mpjax.DynamicLossScale(init_scale=SCALE)),
    Version(step=functools.partial(training_steps.flax_step, by_policy), begin=with_flax_scale),
    unscaled(by_float8),
  )
  return dict(zip(NAMES, found, strict=True))


def shapes(case: Case) -> Any:
  """Returns shapes of the model's variables, without a device."""
  return jax.eval_shape(lambda x: case.make().init(jax.random.key(0), x), case.inputs)


def described(model: str, size: str, half: str) -> dict[str, Any]:
  """Returns what another framework needs to have the same model, as JSON."""
  case = SIZES[size][model]
  made = case.make()
  fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.init}
  left_out = ("parent", "name", "dtype", "attention", "norm", "norm_first", "embedded")
  flat: Any = flatten_dict(dict(shapes(case)), sep="/")
  return {
    "kind": type(made).__name__,
    "fields": {name: value for name, value in fields.items() if name not in left_out},
    "half": half,
    "shapes": {name: list(x.shape) for name, x in flat.items()},
    "batch": {
      "inputs": list(case.inputs.shape),
      "integers": bool(jnp.issubdtype(case.inputs.dtype, jnp.integer)),
      "classes": case.classes,
      "outputs": list(case.outputs),
    },
  }


def tree(flat: Mapping[str, Any]) -> tuple[Any, Any]:
  """Returns parameters and the other collections, from arrays by path."""
  rest = dict(unflatten_dict(dict(flat), sep="/"))
  params = rest.pop("params")
  return params, rest


def float8_matmuls(version: Version, state: Any, batch: Any) -> int:
  """Returns how many matmuls of a step are in float8."""
  found = mpjax.audit(version.step)(state, *batch).formats
  return sum(not matmul.reason for matmul in found)
