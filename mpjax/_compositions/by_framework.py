"""`with_policy`, `policy_scope` and `value_and_grad`, which choose by the framework of a model."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from mpjax._core.errors import MpjaxTypeError, check_call
from mpjax._core.frameworks import framework_of, not_a_model
from mpjax._core.policy import PolicyLike
from mpjax._core.rules import Rule
from mpjax._core.types import Grads, PyTree
from mpjax._jaxprs.autocast import autocast
from mpjax._jaxprs.op_lists import OpLists
from mpjax.transforms import value_and_grad as of_a_state

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


def policy_scope(
  policy: PolicyLike | None, rules: Iterable[Rule] = ()
) -> contextlib.AbstractContextManager[None]:
  """Runs every Linen model called inside under a policy: for code that never shows its `.apply`.

  The scope belongs to the thread that enters it, and to every function that is traced or called
  inside: `jax.jit` traces once for each policy. Flax's NNX has no hook for calls: give
  `mpjax.with_policy(model, policy)` to the code that calls an NNX model.

  Args:
    policy: as for `with_policy`.
    rules: as for `with_policy`, with paths relative to each root; a rule that picks out nothing is
      never an error here.

  Returns:
    A context manager, for `with`; also a decorator. It can be entered repeatedly, but not by a
    module that is running under a policy (MpjaxRuntimeError).

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
  >>> variables = nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 3)))
  >>> with mpjax.policy_scope("c=bf16"):
  ...   nn.Dense(2).apply(variables, jnp.ones((1, 3))).dtype
  dtype(bfloat16)
  """
  return importlib.import_module("mpjax.linen").policy_scope(policy, rules)


@functools.wraps(of_a_state)
def value_and_grad(*args: Any, **options: Any) -> Callable[..., tuple[PyTree, Grads]]:
  state = args[1] if len(args) > 1 else options.get("opt_state")
  if framework_of(options.get("optimizer", state)) == "NNX":
    options = {"optimizer" if key == "opt_state" else key: x for key, x in options.items()}
    return importlib.import_module("mpjax.nnx").value_and_grad(*args, **options)
  return of_a_state(*args, **options)
