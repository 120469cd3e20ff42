"""The hint for a name that mpjax lacks: what replaces that of another library, or similar names."""

import contextlib
from collections.abc import Sequence

from mpjax._core.errors import MpjaxError, nearest
from mpjax._policy.policy import Policy, shortest_text

_REPLACEMENTS: dict[str, tuple[str, ...]] = {
  "mpjax.loss_scaling(optimizer)": (
    *("DynamicScale", "DynamicScaler", "DynamicScalerState", "GradScaler", "LossScaleOptimizer"),
    *("LossScaler", "Scaler", "ShardedGradScaler"),
  ),
  "mpjax.DynamicLossScale()": ("DynamicLossScaling",),
  "mpjax.StaticLossScale(1024)": ("StaticLossScaling",),
  "mpjax.NoLossScale()": ("NoOpLossScale", "NoOpLossScaling"),
  "mpjax.SkipNonfinite()": ("apply_if_finite", "skip_not_finite"),
  "mpjax.scaled(loss_fn, optimizer)": ("scale", "scale_loss"),
  "jax.value_and_grad(mpjax.scaled(loss_fn, optimizer))": (
    *("filter_grad", "filter_value_and_grad", "grad", "unscale", "unscale_gradients"),
    "value_and_grad",
  ),
  "mpjax.step_applied(optimizer)": ("all_finite",),
  "mpjax.keep_if_skipped(optimizer, new, old)": ("select_tree",),
  'mpjax.with_policy(model, "mixed_bfloat16")': (
    *("DTypePolicy", "amp", "cast_function", "initialize", "set_dtype_policy"),
    *("set_global_dtype_policy", "set_global_policy", "set_policy", "use_policy"),
  ),
  'mpjax.with_policy(model, "mixed_float8")': ("fp8_autocast",),
  'mpjax.autocast(fn, "mixed_bfloat16")': ("autocast_policy", "custom_bwd", "custom_fwd"),
  'mpjax.Policy.parse("mixed_bfloat16")': ("get_policy",),
  'mpjax.Policy.parse("mixed_bfloat16").cast_to_compute(tree)': (
    *("cast", "cast_to_bfloat16", "cast_to_compute", "cast_to_float16", "cast_to_half"),
    *("cast_to_half_precision", "cast_tree"),
  ),
  "mpjax.full_precision(fn)": ("cast_to_full", "disable_autocast", "force_full_precision"),
}
"""Names of jmp, mpx, jaxamp, Flax, optax, PyTorch, Apex and Keras, by what replaces them."""


def _plain(name: str) -> str:
  """Returns a name as it is compared: `grad_scaler` is `GradScaler`."""
  return name.rpartition(".")[2].replace("_", "").lower()


_BY_NAME = {_plain(name): code for code, names in _REPLACEMENTS.items() for name in names}


def hint(name: str, own: Sequence[str]) -> str:
  """Returns what a user may have meant by a name that the module `mpjax` lacks.

  Args:
    name: the name.
    own: the names that there are, such as "scaled" and "states.set_loss_scale".

  >>> hint("grad_scaler", [])
  'write mpjax.loss_scaling(optimizer)'
  """
  plain = _plain(name)
  # A name of mpjax in another spelling, or in a submodule, comes before those of other libraries.
  codes = [f"mpjax.{each}" for each in own if _plain(each) == plain]
  if plain in _BY_NAME:
    codes.append(_BY_NAME[plain])
  with contextlib.suppress(MpjaxError):
    codes.append(f'mpjax.with_policy(model, "{shortest_text(Policy.parse(name))}")')
  return f"write {codes[0]}" if codes else f"the nearest are {', '.join(nearest(name, own))}"
