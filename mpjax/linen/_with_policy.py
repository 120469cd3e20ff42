"""`with_policy`: a Linen model that runs under a policy."""

from collections.abc import Iterable

import flax.linen as nn

from mpjax._core.errors import MpjaxTypeError, kind_of
from mpjax._core.frameworks import not_a_model
from mpjax._policy.policy import PolicyLike
from mpjax._policy.rules import Rule, parse_config
from mpjax.linen._policy_module import PolicyModule, with_policy_of


def with_policy(
  model: nn.Module,
  policy: PolicyLike | None,
  rules: Iterable[Rule] = (),
  *,
  unmatched: str = "raise",
) -> PolicyModule:
  """Run an unmodified Linen model under a policy, as `mpjax.with_policy` does.

  Args:
    model: a module; it is not changed. It may be bound, as are submodules in a compact method.
    policy: as for `mpjax.with_policy`, and so are the others.
    rules: tried in order for each module; the first that matches wins.
    unmatched: what `init` does about a rule that picks out no module.

  Returns:
    An instance of the model's class, with the same fields, methods and tree of variables. Its
    method `convert` prepares these variables for inference.

  Raises:
    MpjaxTypeError: `model` is not a Linen module, or is wrapped already.

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
  >>> model = mpjax.linen.with_policy(nn.Dense(2), "mixed_bfloat16")
  >>> model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]["kernel"].dtype
  dtype('float32')
  """
  where = "mpjax.with_policy"
  if isinstance(model, PolicyModule):
    got = f"{kind_of(model)}, which is under a policy already"
    fix = "Wrap the plain model once. Of nested policies only the innermost counts."
  elif not isinstance(model, nn.Module):
    got, fix = not_a_model(model)
  else:
    return with_policy_of(model, parse_config(where, policy, rules, unmatched=unmatched))
  raise MpjaxTypeError(f"{where}(model)", expected="a flax.linen.Module", got=got, fix=fix)
