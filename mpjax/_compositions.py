"""What puts the parts together: `with_policy`, `value_and_grad`, `opt_level`."""

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from mpjax._autocast import autocast
from mpjax._core.errors import MpjaxTypeError, check_call, check_choice
from mpjax._core.frameworks import framework_of, holds_linen_module, not_a_model
from mpjax._core.types import HALF_NAMES, DTypeLike, Grads, PyTree
from mpjax._jaxpr.op_lists import OpLists
from mpjax._optim.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from mpjax._optim.value_and_grad import value_and_grad as plain_value_and_grad
from mpjax._policy.dtypes import hardware_of, parse_dtype
from mpjax._policy.policy import Policy, PolicyLike
from mpjax._policy.rules import Rule, is_flax_norm

T = TypeVar("T")


@check_call("mpjax.with_policy(model)", fix='Write mpjax.with_policy(model, "mixed_bfloat16").')
def with_policy(
  model: T,
  policy: PolicyLike | None,
  rules: Iterable[Rule] = (),
  *,
  unmatched: str = "raise",
  ops: OpLists | None = None,
  data_argnums: int | Sequence[int] = (),
) -> T:
  """Returns a model or a function that runs in the dtypes of a policy; it is not changed itself.

  Matmuls and convolutions run in the policy's `compute_dtype`; exponentials, sums, softmax and
  norms' statistics in float32. Parameters are cast where they are used.

  Args:
    model: a Linen module, an NNX module, or a function of arrays (of Haiku `transformed.apply`, of
      Equinox the function that calls the model).
    policy: a `mpjax.Policy` or its string ("mixed_bfloat16"); None leaves everything as it is but
      for what rules pick out.
    rules: tried in order for each module; the first that matches wins. For a function their paths
      are those of `jax.named_scope`.
    unmatched: "raise", "warn" or "ignore", for a model with a rule that picks out no module.
    ops: for a function, as for `mpjax.autocast`.
    data_argnums: for a function, as for `mpjax.autocast`.

  Returns:
    Of a Linen module a `mpjax.linen.PolicyModule`, which has its `init` and `apply`; of an NNX
    module a view that has its variables, see `mpjax.nnx.with_policy`; of a function a function of
    the same signature.

  Raises:
    MpjaxTypeError: not a model or function, or one that has a policy already; a wrong option.
    MpjaxValueError: an unknown policy, or a value of an argument that is not listed.
    UnmatchedRuleError: a rule picked out nothing, where that is seen.

  >>> import flax.linen as nn, jax.numpy as jnp, mpjax
  >>> mpjax.with_policy(lambda w, x: x @ w, "c=bf16")(jnp.ones((3, 2)), jnp.ones((1, 3))).dtype
  dtype('float32')
  >>> model = mpjax.with_policy(nn.Dense(2, use_bias=False), "c=bf16")
  >>> model.apply({"params": {"kernel": jnp.ones((3, 2))}}, jnp.ones((1, 3))).dtype
  dtype(bfloat16)
  """
  framework = framework_of(model)
  where, fix = "mpjax.with_policy(model)", "They are for functions; a model has no use for them."
  if not isinstance(model, type) and framework in ("Linen", "NNX"):
    if ops is None and data_argnums == ():
      adapter = importlib.import_module(f"mpjax.{framework.lower()}")
      return adapter.with_policy(model, policy, rules, unmatched=unmatched)
    expected, got = f"no ops= and no data_argnums= for a model of {framework}", "them"
  elif holds_linen_module(model):
    expected = "a model of Linen or NNX, or a function of arrays"
    got = f"a {type(model).__name__} around a Linen module"
    fix = "Call it inside mpjax.policy_scope(policy)."
  elif isinstance(model, type) or framework is not None or not callable(model):
    expected = "a model of Linen or NNX, or a function of arrays"
    got, fix = not_a_model(model)
  elif unmatched == "raise":
    policy = "float32" if policy is None else policy
    function: Any = autocast(model, policy, ops=ops, rules=rules, data_argnums=data_argnums)
    return function
  else:
    expected, got = "no unmatched= for a function", repr(unmatched)
    fix = "A rule that no named scope matches is an error when the function is called."
  raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)


@functools.wraps(plain_value_and_grad)
def value_and_grad(*args: Any, **options: Any) -> Callable[..., tuple[PyTree, Grads]]:
  state = args[1] if len(args) > 1 else options.get("opt_state")
  if framework_of(options.get("optimizer", state)) == "NNX":
    options = {"optimizer" if key == "opt_state" else key: x for key, x in options.items()}
    return importlib.import_module("mpjax.nnx").value_and_grad(*args, **options)
  return plain_value_and_grad(*args, **options)


LEVELS = ("O0", "O1", "O2", "O3", "auto")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptLevel:
  """What one level asks for: values to pass on; `dataclasses.replace` changes one.

  Args:
    policy: for `mpjax.with_policy` and `mpjax.autocast`.
    rules: for both, too, with `unmatched="ignore"`.
    ops: for `mpjax.autocast`; None where the level needs no operation lists.
    loss_scale: for `mpjax.loss_scaling`.
    master_weights: whether the optimizer belongs in `mpjax.master_weights`.

  >>> import mpjax
  >>> mpjax.opt_level("O2", "float16").master_weights
  True
  """

  policy: Policy
  rules: tuple[Rule, ...] = ()
  ops: OpLists | None = None
  loss_scale: LossScale
  master_weights: bool = False

  def __str__(self) -> str:
    texts = {"policy": str(self.policy), "rules": ", ".join(map(repr, self.rules)) or "none"}
    return "\n".join(f"{name:<14}  {texts.get(name, repr(x))}" for name, x in vars(self).items())


def opt_level(level: str, dtype: DTypeLike | None = None) -> OptLevel:
  """Returns the settings that go by the name of a level of Apex and MindSpore; docs/levels.md.

  - "O0": float32 throughout.
  - "O1": float32 parameters, and operations in 16 bits or float32 by operation lists: for
    `mpjax.autocast`.
  - "O2": parameters and computation in 16 bits, but for norms, with float32 master weights.
  - "O3": everything in 16 bits, norms and all, as a limit to compare the speed of the others with.
  - "auto": O1 in the 16-bit dtype that the first device of `jax.devices()` has units for, or O0.

  float16 comes with a loss scale. In every level a model returns float32.

  Args:
    level: one of the above.
    dtype: "float16" or "bfloat16", the latter unless given; "auto" warns where the device has no
      units for it.

  Raises:
    MpjaxValueError: an unknown level, or a dtype other than float16 and bfloat16.

  >>> import mpjax
  >>> print(mpjax.opt_level("O1", "float16").policy)
  params=float32,compute=float16,output=float32
  """
  where = "mpjax.opt_level"
  check_choice(level, LEVELS, f"{where}(level)")
  half = None if dtype is None else parse_dtype(dtype, f"{where}(dtype)").name
  if half is not None:
    check_choice(half, HALF_NAMES, f"{where}(dtype)")
  if level == "auto":
    device = jax.devices()[0]
    level, half = _for_device(device.platform, getattr(device, "compute_capability", None), half)
  half = half or "bfloat16"
  dynamic: LossScale = DynamicLossScale() if half == "float16" else NoLossScale()
  if level == "O0":
    return OptLevel(policy=Policy(), loss_scale=NoLossScale())
  if level == "O1":
    return OptLevel(policy=Policy.parse(f"mixed_{half}"), ops=OpLists(), loss_scale=dynamic)
  policy = Policy(param_dtype=half, compute_dtype=half, output_dtype="float32")
  if level == "O2":
    # Flax's norms reduce in float32 whatever they compute in: only their storage is at stake.
    norms = Rule(Policy(compute_dtype=half), where=is_flax_norm)
    return OptLevel(policy=policy, rules=(norms,), loss_scale=dynamic, master_weights=True)
  # Apex does not scale here. A scale of 1 still skips the steps that float16 overflows in.
  static = StaticLossScale(1) if half == "float16" else NoLossScale()
  return OptLevel(policy=policy, loss_scale=static)


def _for_device(platform: str, capability: Any, half: str | None) -> tuple[str, str | None]:
  """Returns the level and the 16-bit dtype for a device; the latter may be `half`."""
  native = tuple(x for x in hardware_of(platform, capability).dtypes if x in HALF_NAMES)
  if half is None:
    return ("O1", native[0]) if native else ("O0", None)
  if half not in native:
    kind = f"{platform} {capability}" if capability else platform
    fix = f"{native[0]} is fast on it" if native else "float32 is as fast on it, as far as is known"
    # Python shows a warning once for the line that it comes from: here, once in a process.
    warnings.warn(
      f"mpjax.opt_level: {half} saves memory but no time on this device ({kind}); {fix}.",
      UserWarning,
      stacklevel=1,
    )
  return "O1", half
