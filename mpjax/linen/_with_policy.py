"""`with_policy` and `policy_scope`: the two ways to put a policy onto Linen models."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import flax.linen as nn

from mpjax._core.active import ScopeToken, in_region, leave_scope
from mpjax._core.errors import MpjaxRuntimeError, MpjaxTypeError, kind_of
from mpjax._core.frameworks import not_a_model
from mpjax._core.policy import PolicyLike
from mpjax._core.policy_config import PolicyConfig, parse_config
from mpjax._core.rules import Rule
from mpjax.linen._context import begin, current
from mpjax.linen._intercept import enter_scope
from mpjax.linen._policy_module import BoundPolicyModule, PolicyModule

F = TypeVar("F", bound=Callable[..., Any])


def with_policy(
  model: nn.Module,
  policy: PolicyLike | None,
  rules: Iterable[Rule] = (),
  *,
  unmatched: str = "raise",
) -> PolicyModule:
  """Returns an unmodified Linen model that runs under a policy.

  Parameters keep the policy's `param_dtype`. Matmuls and convolutions run in the `compute_dtype`;
  exponentials, logarithms, sums, norms' statistics and softmax run in float32, also in the model's
  own code. Float32 arguments, constants and state stay float32 until a matmul; parameters take the
  dtype of what they meet. The variables are the same tree as the model's own.

  Args:
    model: an unbound module; it is not changed.
    policy: a `mpjax.Policy` or its string ("mixed_bfloat16"); None leaves every module as it is
      but for those that rules pick out.
    rules: tried in order for each module; the first that matches wins.
    unmatched: "raise", "warn" or "ignore": what `init` and `tabulate` do about a rule that picks
      out no module.

  Returns:
    A frozen, hashable object with the model's `init`, `init_with_output`, `lazy_init`, `apply`,
    `bind` and `tabulate`, and with `convert` for inference.

  Raises:
    MpjaxTypeError: `model` is not an unbound Linen module, is wrapped already, or rules
      have the wrong type.
    MpjaxValueError: an unknown policy, or a value of an argument that is not listed.

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
  >>> model = mpjax.linen.with_policy(nn.Dense(2), "mixed_bfloat16")
  >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
  >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((1, 3))).dtype
  (dtype('float32'), dtype('float32'))
  """
  where = "mpjax.with_policy"
  if isinstance(model, (PolicyModule, BoundPolicyModule)):
    got = f"{kind_of(model)}, which is under a policy already"
    fix = "Wrap the plain model once; of nested policies only the innermost would count."
  elif not isinstance(model, nn.Module):
    got, fix = not_a_model(model)
  elif model.scope is not None:
    got = f"one that is bound at {'/'.join(model.path)!r}"
    fix = "Wrap the root model, and give submodules their policy by rules."
  else:
    config = parse_config(where, policy, rules, unmatched=unmatched)
    return PolicyModule(model, config)
  raise MpjaxTypeError(f"{where}(model)", expected="an unbound flax.linen.Module", got=got, fix=fix)


def policy_scope(
  policy: PolicyLike | None, rules: Iterable[Rule] = ()
) -> contextlib.AbstractContextManager[None]:
  """Runs every Linen model called inside under a policy: for code that never shows its `.apply`.

  The scope belongs to the thread that enters it, and to every function that is traced or called
  inside: `jax.jit` traces once for each policy. Rule paths are relative to each root call.

  Args:
    policy: as for `with_policy`.
    rules: as for `with_policy`; a rule that picks out nothing is never an error here.

  Returns:
    A context manager, for `with`; also a decorator. It can be entered repeatedly.

  Raises:
    MpjaxTypeError: rules of the wrong type.
    MpjaxValueError: an unknown policy, or a value of an argument that is not listed.
    MpjaxRuntimeError: entered by a module that is running under a policy.

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
  >>> model = nn.Dense(2)
  >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
  >>> with mpjax.linen.policy_scope("bfloat16"):
  ...   print(model.apply(variables, jnp.ones((1, 3))).dtype)
  bfloat16
  """
  where = "mpjax.policy_scope"
  return _Scope(parse_config(where, policy, rules, unmatched="ignore"))


class _Scope(contextlib.ContextDecorator):
  """A scope, which can be entered repeatedly: one after the other, nested, in several threads."""

  def __init__(self, config: PolicyConfig) -> None:
    self._config = config
    self._entered: list[ScopeToken] = []
    self._used = False

  def __call__(self, func: F) -> F:
    self._used = True
    return super().__call__(func)

  def __del__(self) -> None:
    if not self._used:
      warnings.warn(
        "mpjax.policy_scope(policy) was never entered: models run without that policy. Write "
        "with mpjax.policy_scope(policy): and call them inside.",
        UserWarning,
        stacklevel=2,
      )

  def __enter__(self) -> None:
    self._used = True
    active = current()
    if in_region():  # Nothing to make active: `full_precision` is stronger.
      token = ScopeToken(None, contextlib.ExitStack())
    elif active is None or not active.entered:
      token = enter_scope(begin(self._config))
    else:
      raise MpjaxRuntimeError(
        "mpjax.policy_scope(policy)",
        expected="to be entered outside of a forward pass",
        got=f"a module that is running already, under the policy {str(active.policy)!r}",
        fix="Pick submodules out with mpjax.Rule, or apply a model of its own, wrapped by "
        "mpjax.with_policy.",
      )
    self._entered.append(token)

  def __exit__(self, *exception: object) -> None:
    here = threading.get_ident()
    last = next((x for x in reversed(self._entered) if x.thread == here), self._entered[-1])
    self._entered.remove(last)
    leave_scope(last)
