"""`with_policy` for models of Linen and NNX, and for functions."""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from mpjax._autocast.autocast import autocast
from mpjax._core.errors import MpjaxTypeError, check_call
from mpjax._core.frameworks import framework_of, holds_linen_module, not_a_model
from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.policy import PolicyLike
from mpjax._policy.rules import Rule

T = TypeVar("T")


_EXPECTED = "a flax.linen.Module, a flax.nnx.Module or a function of arrays"


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
  """Wrap a model or a function so that it runs in the dtypes of a policy.

  Matmuls and convolutions run in the policy's `compute_dtype`. Exponentials, sums, softmax and the
  statistics of norms run in float32. Parameters are cast where they are used.

  Args:
    model: a Linen module, an NNX module, or a function of arrays. For Haiku pass
      `transformed.apply`, for Equinox a function that calls the model.
    policy: a `mpjax.Policy` or its string ("mixed_bfloat16"). With None only rules apply, and
      without rules the model computes as it is written, so that a flag can switch the policy off.
    rules: the first rule that matches a module wins. For a function their paths are those of
      `jax.named_scope`.
    unmatched: "raise", "warn" or "ignore", for a rule of a model that matches no module.
    ops: for a function, as for `mpjax.autocast`.
    data_argnums: for a function, as for `mpjax.autocast`.

  Returns:
    For a Linen module, an instance of its class that is also a `mpjax.linen.PolicyModule`, so it
    can be passed wherever the module can. For an NNX module, a view of its variables, see
    `mpjax.nnx.with_policy`. For a function, a function of the same signature.

  Raises:
    MpjaxTypeError: not a model or function, or one that has a policy already; a wrong option.
    MpjaxValueError: an unknown policy, or a value of an argument that is not listed.
    UnmatchedRuleError: a rule matches nothing, if all modules are known.

  >>> import jax.numpy as jnp, mpjax
  >>> from flax import nnx
  >>> net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  >>> mpjax.with_policy(net, "mixed_bfloat16")(jnp.ones((1, 3))).dtype
  dtype('float32')
  >>> mpjax.with_policy(net, "bfloat16")(jnp.ones((1, 3))).dtype  # its output_dtype
  dtype(bfloat16)
  >>> matmul = mpjax.with_policy(jnp.dot, "bfloat16")
  >>> matmul(jnp.ones((1, 3)), jnp.ones((3, 2))).dtype  # functions return their own dtypes
  dtype('float32')
  """
  framework = framework_of(model)
  where = "mpjax.with_policy(model)"
  # Flax is imported only for a model of Flax. The class of a model is no model.
  if not isinstance(model, type) and framework in ("Linen", "NNX"):
    if ops is None and data_argnums == ():
      adapter = importlib.import_module(f"mpjax.{framework.lower()}")
      return adapter.with_policy(model, policy, rules, unmatched=unmatched)
    expected = f"no ops= and no data_argnums= for a Flax {framework} model"
    got = f"ops={ops!r}, data_argnums={data_argnums!r}"
    fix = "Leave them out: they are for functions."
  # A Flax model of Hugging Face holds a Linen module, which only a scope reaches.
  elif holds_linen_module(model):
    expected = _EXPECTED
    got = f"a {type(model).__name__} around a Linen module"
    fix = "Call it inside mpjax.policy_scope(policy)."
  elif isinstance(model, type) or framework is not None or not callable(model):
    expected = _EXPECTED
    got, fix = not_a_model(model)
  # A function has no list of modules to match rules against before it runs.
  elif unmatched == "raise":
    # Unlike None, "float32" has an output dtype. So a result that is a matmul under a rule is its
    # float32 sum.
    policy = "float32" if policy is None else policy
    function: Any = autocast(model, policy, ops=ops, rules=rules, data_argnums=data_argnums)
    return function
  else:
    expected = "no unmatched= for a function"
    got = repr(unmatched)
    fix = "Leave it out: a rule that no named scope matches is an error when the function runs."
  raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
