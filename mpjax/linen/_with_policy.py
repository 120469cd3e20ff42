"""`with_policy`: a Linen model that runs under a policy."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import flax.linen as nn
import jax
from flax.core import FrozenDict
from flax.core.scope import CollectionFilter

from mpjax._core.errors import MpjaxTypeError, kind_of
from mpjax._core.frameworks import not_a_model
from mpjax._core.leaves import node_paths
from mpjax._core.trees import mapped
from mpjax._core.types import Args, Function, Kwargs, Params, PyTree, Variables
from mpjax._jaxpr.used_dtypes import store_as_used
from mpjax._policy.policy import PolicyLike
from mpjax._policy.rules import ModuleRecord, PolicyConfig, Rule, parse_config
from mpjax.linen._active import begin
from mpjax.linen._initialize import abstract
from mpjax.linen._intercept import activate, under
from mpjax.linen._outermost import applied

Keys: TypeAlias = jax.Array | dict[str, jax.Array]
"""What `nn.Module.init` takes: one random key, or one for each name."""


@dataclasses.dataclass(frozen=True, repr=False)
class PolicyModule:
  """A Linen model under a policy, frozen and hashable. Other attributes are the model's.

  Args:
    module: the unmodified model.
    given: the policy and the rules.

  >>> import flax.linen as nn, mpjax
  >>> isinstance(mpjax.with_policy(nn.Dense(2), "mixed_bfloat16"), mpjax.linen.PolicyModule)
  True
  """

  module: nn.Module
  given: PolicyConfig

  def apply(
    self, variables: Variables, *args: Any, mutable: CollectionFilter = False, **kwargs: Any
  ) -> PyTree:
    """Return the result of the model's `apply` under the policy, in its output dtype.

    A call of `__call__` warns of a rule whose path matches no called module and no module with
    variables, unless the model was wrapped with `unmatched="ignore"`.

    Args:
      variables: the model's variables, in any floating dtype.
      *args: arguments of the method.
      mutable: which collections are returned changed, as for `nn.Module.apply`.
      **kwargs: further arguments of `nn.Module.apply` and of the method.
    """
    kwargs["mutable"] = mutable
    # `init` checks all rules, but variables from a checkpoint need no `init`. So look for misspelt
    # paths here, too.
    rules = tuple(rule for rule in self.given.rules if rule.path is not None)
    # Only `__call__` is expected to pass all modules. Other methods call some of them.
    if not rules or self.given.unmatched == "ignore" or kwargs.get("method") is not None:
      return self._apply(under(self.given), variables, args, kwargs)
    met = ModuleRecord(dataclasses.replace(self.given, rules=rules, unmatched="warn"))
    outputs = self._apply(under(self.given, met=met), variables, args, kwargs)
    if met.classes and isinstance(variables, Mapping):
      # A path that has variables is not misspelt. A module without variables may be left out by
      # this call, so this is a warning and no error.
      met.note_paths(set().union(*map(node_paths, variables.values())))
      note = "If the module is one that this call leaves out (only training calls it), it is fine."
      met.check("that this call met or that have variables", 2, note=note)
    return outputs

  def init(self, rngs: Keys, *args: Any, **kwargs: Any) -> Variables:
    """Return the model's own initial variables, parameters cast to the policy's `param_dtype`.

    A rule that picks out no module is an UnmatchedRuleError (with `unmatched="raise"`).

    Args:
      rngs: as for `nn.Module.init`.
      *args: arguments of the method.
      **kwargs: further arguments of `nn.Module.init` and of the method.
    """
    return self._initialized(self.module.init, rngs, args, kwargs)

  def init_with_output(self, rngs: Keys, *args: Any, **kwargs: Any) -> tuple[PyTree, Variables]:
    """Return the model's output, computed in float32 and cast to `output_dtype`, and `init`.

    Args:
      rngs: as for `init`, and so are the others.
      *args: arguments of the method.
      **kwargs: further arguments.
    """
    module = self.module
    return self._initialized(module.init_with_output, rngs, args, kwargs, traced=module.init)

  def lazy_init(self, rngs: Keys, *args: Any, **kwargs: Any) -> Variables:
    """Return the variables of `init` from abstract inputs, as `nn.Module.lazy_init` does.

    Args:
      rngs: as for `init`, and so are the others.
      *args: arguments of the method, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: further arguments.
    """
    return self._initialized(self.module.lazy_init, rngs, args, kwargs)

  def bind(self, variables: Variables, *args: Any, **kwargs: Any) -> "BoundPolicyModule":
    """Return the model bound to variables: its methods and submodules run under the policy.

    Args:
      variables: as for `nn.Module.bind`, and so are the others.
      *args: not used.
      **kwargs: `rngs` and `mutable`.
    """
    return BoundPolicyModule(self.module.bind(variables, *args, **kwargs), self.given)

  def convert(self, variables: Variables, *args: Any, **kwargs: Any) -> Variables:
    """Return variables for inference, with parameters in the low precision in which they are used.

    A parameter that `apply(variables, *args, **kwargs)` only rounds to one 16-bit dtype is stored
    in that dtype. Other parameters and other collections stay as they are.

    Args:
      variables: the model's variables, arrays or `jax.ShapeDtypeStruct`.
      *args: arguments of the method, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: further arguments of `apply`.

    Raises:
      MpjaxTypeError: `variables` is not a mapping of collections with "params" in it.
      MpjaxValueError: a finite value that the 16-bit dtype cannot hold.

    >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
    >>> model = mpjax.with_policy(nn.Sequential([nn.Dense(2), nn.LayerNorm()]), "c=bf16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
    >>> half = model.convert(variables, jnp.ones((1, 8)))["params"]
    >>> half["layers_0"]["kernel"].dtype, half["layers_1"]["scale"].dtype
    (dtype(bfloat16), dtype('float32'))
    """
    where = "mpjax.with_policy(model, policy).convert(variables)"
    if not isinstance(variables, Mapping) or (variables and "params" not in variables):
      # Users often pass the parameters alone, whose keys show the mistake.
      keys = f" with {', '.join(map(repr, variables))}" if isinstance(variables, Mapping) else ""
      expected, got = "the variables, a mapping with 'params' in it", kind_of(variables) + keys
      fix = 'Write model.convert({"params": params}, x).'
      raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)

    def call(params: Params, variables: Variables, *args: Any, **kwargs: Any) -> PyTree:
      return self.apply(_with_params(variables, params), *args, **kwargs)

    new = store_as_used(call, variables.get("params", {}), (variables, *args), kwargs, where)
    return _with_params(variables, new)

  def clone(self, **updates: Any) -> "PolicyModule":
    """Return the model with other fields, under the same policy.

    Args:
      **updates: fields of the model.
    """
    return PolicyModule(self.module.clone(**updates), self.given)

  copy = clone

  def __call__(self, *args: object, **kwargs: object) -> NoReturn:
    where = f"{type(self.module).__name__} under mpjax.with_policy: __call__(...)"
    expected = "a call of apply, init or bind on the wrapped root model"
    got = "a wrapped model used as a submodule, or called without variables"
    fix = "Wrap the root, pick submodules out with mpjax.Rule, call model.apply(variables, x)."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)

  def __getattr__(self, name: str) -> Any:
    # While it is copied or unpickled, the object has no `module` yet: this would call itself for
    # ever.
    if name.startswith("__") or name in ("module", "given"):
      raise AttributeError(name)
    return getattr(self.module, name)

  def __repr__(self) -> str:
    return f"with_policy({self.module!r}, {self.given})"

  def _apply(self, activated: Any, variables: Variables, args: Args, kwargs: Kwargs) -> PyTree:
    with activated as state:
      # Inside of a trace of mpjax, the call is rewritten with that trace. A policy may also cast
      # nothing.
      if state is None or state.tracing or not self.given.rewrites:
        return self.module.apply(variables, *args, **kwargs)
      return applied(self.module, state, activate, variables, args, kwargs)

  def _initialized(
    self, init: Function, rngs: Keys, args: Args, kwargs: Kwargs, traced: Function | None = None
  ) -> PyTree:
    """Returns the result of a method that initialises, after a check of the rules.

    The check traces `traced` instead, if the method also returns an output: that may have a type
    which JAX does not know.
    """
    # While a record is active, JAX finds no function that was compiled before, so all modules are
    # called. It must be active in this abstract trace only, or nothing would ever be reused.
    record = ModuleRecord(self.given)
    if self.given.rules:
      with activate(begin(self.given, record=record)):
        abstract(functools.partial(traced or init, rngs, *args, **kwargs))
    record.check("that init passed", 3)
    with activate(begin(self.given)):
      return init(rngs, *args, **kwargs)


def _with_params(variables: Variables, params: Params) -> Variables:
  new = {"params": params} if "params" in variables else {}
  # A FrozenDict stays one. It is another tree to JAX than a dict.
  return variables.copy(new) if isinstance(variables, FrozenDict) else {**variables, **new}


class BoundPolicyModule:
  """A Linen model bound to variables, or one of its submodules, under a policy."""

  def __init__(self, module: nn.Module, config: PolicyConfig) -> None:
    self._module, self._config = module, config

  def unbind(self) -> tuple[PolicyModule, Variables]:
    """Returns the model without its variables, under the same policy, and the variables."""
    module, variables = self._module.unbind()
    # The paths of rules begin at the root, which an unbound submodule does not have.
    unmatched = "ignore" if self._module.path else self._config.unmatched
    return PolicyModule(module, dataclasses.replace(self._config, unmatched=unmatched)), variables

  def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
    with under(self._config):
      return self._module(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    # Looking up a method may run `setup`, whose submodules take their `dtype` from the policy.
    with under(self._config):
      attribute = getattr(self._module, name)
    return mapped(self._wrapped, attribute)

  def _wrapped(self, x: Any) -> object:
    """Returns an attribute of the model, with modules and methods that run under the policy."""
    if isinstance(x, nn.Module):
      return BoundPolicyModule(x, self._config)
    return under(self._config)(x) if callable(x) and not isinstance(x, type) else x


def with_policy(
  model: nn.Module,
  policy: PolicyLike | None,
  rules: Iterable[Rule] = (),
  *,
  unmatched: str = "raise",
) -> PolicyModule:
  """Run an unmodified Linen model under a policy, as `mpjax.with_policy` does.

  Args:
    model: an unbound module; it is not changed.
    policy: as for `mpjax.with_policy`, and so are the others.
    rules: tried in order for each module; the first that matches wins.
    unmatched: what `init` does about a rule that picks out no module.

  Returns:
    A model with the same methods, and the same tree of variables, for which it has `convert`.

  Raises:
    MpjaxTypeError: `model` is not an unbound Linen module, or is wrapped already.

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
  >>> model = mpjax.linen.with_policy(nn.Dense(2), "mixed_bfloat16")
  >>> model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]["kernel"].dtype
  dtype('float32')
  """
  where = "mpjax.with_policy"
  if isinstance(model, (PolicyModule, BoundPolicyModule)):
    got = f"{kind_of(model)}, which is under a policy already"
    fix = "Wrap the plain model once. Of nested policies only the innermost counts."
  elif not isinstance(model, nn.Module):
    got, fix = not_a_model(model)
  elif model.scope is not None:
    got = f"one that is bound at {'/'.join(model.path)!r}"
    fix = "Wrap the root model and then bind that; give submodules their policy by rules."
  else:
    return PolicyModule(model, parse_config(where, policy, rules, unmatched=unmatched))
  raise MpjaxTypeError(f"{where}(model)", expected="an unbound flax.linen.Module", got=got, fix=fix)
