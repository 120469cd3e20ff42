"""`PolicyModule`: a Linen model under a policy, with the methods of the model that users call."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import FrozenDict

from mpjax._core.active import in_region
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.paths import places
from mpjax._core.policy_config import Given, check_matched
from mpjax._core.rules import Rule, unmatched_error
from mpjax._core.trees import cast_leaf, map_arrays
from mpjax._core.types import PyTree
from mpjax._jaxprs.used_dtypes import store_as_used
from mpjax.linen._context import OFF, Visits, begin, shown
from mpjax.linen._initialize import COMPUTED, cast_like
from mpjax.linen._intercept import activate
from mpjax.linen._outermost import applied


@dataclasses.dataclass(frozen=True, repr=False)
class PolicyModule:
  """A Linen model under a policy, as `with_policy` returns it.

  Other attributes are those of the model: fields of its own that are called `module` or `given` are
  `wrapped.module.module` and `wrapped.module.given`.

  Args:
    module: the unmodified model.
    given: the policy and the rules.

  >>> import flax.linen as nn, mpjax
  >>> model = mpjax.linen.with_policy(nn.Dense(2), "mixed_bfloat16")
  >>> isinstance(model, mpjax.linen.PolicyModule), type(model.module).__name__
  (True, 'Dense')
  """

  module: nn.Module
  given: Given
  _checked: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)

  def apply(self, variables: Any, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
    """Calls the model's `apply` under the policy; same arguments, same results.

    The first call (of `__call__`) warns of a rule whose path is none of the modules that it met or
    that have variables, unless the model was wrapped with `unmatched="ignore"`.

    Args:
      variables: the model's variables, in any floating dtype.
      *args: arguments of the method.
      mutable: which collections are returned changed, as for `nn.Module.apply`.
      **kwargs: further arguments of `nn.Module.apply` and of the method.
    """
    if kwargs.get("method") is not None or self.given.unmatched == "ignore" or self._checked:
      return self._apply(None, variables, *args, mutable=mutable, **kwargs)
    met: set[str] = set()
    outputs = self._apply(None, variables, *args, mutable=mutable, met=met, **kwargs)
    object.__setattr__(self, "_checked", True)
    if met and isinstance(variables, Mapping):
      self._warn_unmatched(met | set().union(*map(_nodes, variables.values())))
    return outputs

  def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the model's own initial variables, parameters cast to the policy's `param_dtype`.

    A decode cache comes in the dtype that the model gives it under the policy; all other
    collections are the model's own.

    Args:
      rngs: as for `nn.Module.init`.
      *args: arguments of the method.
      **kwargs: further arguments of `nn.Module.init` and of the method.

    Raises:
      UnmatchedRuleError: a rule picked out no module (with `unmatched="raise"`).
    """
    visits = Visits()
    ours = self._traced_init(visits, rngs, *args, **kwargs)
    self._check_rules(visits)
    return self._merge(self._plain_init(rngs, *args, **kwargs), ours)

  def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns the model's output, and what `init` returns.

    Nothing is computed in low precision: the output is that of float32, in the policy's
    `output_dtype`.

    Args:
      rngs: as for `nn.Module.init_with_output`.
      *args: arguments of the method.
      **kwargs: further arguments of `nn.Module.init_with_output` and of the method.

    Raises:
      UnmatchedRuleError: a rule picked out no module (with `unmatched="raise"`).
    """
    visits = Visits()
    ours = self._traced_init(visits, rngs, *args, **kwargs)
    self._check_rules(visits)
    with activate(OFF):
      outputs, plain = self.module.init_with_output(rngs, *args, **kwargs)
    dtype = visits.output_dtype
    if dtype is not None and not in_region():
      outputs = map_arrays(lambda x: cast_leaf(x, dtype), outputs)
    return outputs, self._merge(plain, ours)

  def lazy_init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what `init` returns, from abstract inputs, as `nn.Module.lazy_init` does.

    Args:
      rngs: as for `nn.Module.lazy_init`.
      *args: arguments of the method, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: further arguments of `nn.Module.lazy_init` and of the method.

    Raises:
      UnmatchedRuleError: a rule picked out no module (with `unmatched="raise"`).
    """
    visits = Visits()
    lazy = functools.partial(self.module.lazy_init, rngs, *args, **kwargs)
    ours = jax.eval_shape(lambda: self._casting(visits, lazy))
    self._check_rules(visits)
    with activate(OFF):
      return self._merge(lazy(), ours)

  def bind(self, variables: Any, *args: Any, **kwargs: Any) -> "BoundPolicyModule":
    """Returns the model bound to variables: its methods and submodules run under the policy.

    Args:
      variables: the model's variables.
      *args: not used, as in `nn.Module.bind`.
      **kwargs: `rngs` and `mutable`, as for `nn.Module.bind`.
    """
    return BoundPolicyModule(self.module.bind(variables, *args, **kwargs), self.given)

  def tabulate(self, rngs: Any, *args: Any, **kwargs: Any) -> str:
    """Returns the model's own table, with inputs and outputs in the dtypes of the policy.

    Args:
      rngs: as for `nn.Module.tabulate`.
      *args: arguments of the method.
      **kwargs: further arguments of `nn.Module.tabulate` and of the method.

    Raises:
      UnmatchedRuleError: a rule picked out no module (with `unmatched="raise"`).
    """
    visits = Visits()
    table = self._casting(visits, lambda: self.module.tabulate(rngs, *args, **kwargs))
    self._check_rules(visits)
    return table

  def convert(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns variables for inference: in half what is only ever used in half.

    The program of `apply(variables, *args, **kwargs)` says so: a parameter that it does nothing
    with but round it to one half dtype is stored in that dtype, and the program computes the
    same. One that any operation uses in float32 (a norm's scale, the kernel of a layer under a
    float32 rule, a table that two modules share, one of them in float32) stays as it is, and so do
    parameters that the call does not use, and all other collections. Rows of a table are only
    moved: the table goes by what they are rounded to.

    Under `jit` XLA may leave a rounding out where it pleases (`xla_allow_excess_precision`, on
    CPUs): of parameters stored in float32, not of those that are rounded already. With that option
    off the results are the same to the bit.

    MXNet converts its symbols for inference by the same rule.

    Args:
      variables: the model's variables, arrays or `jax.ShapeDtypeStruct`.
      *args: arguments of the method, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: further arguments of `apply`.

    Raises:
      MpjaxTypeError: `variables` is not a mapping of collections with "params" in it.
      MpjaxValueError: a finite value that the half dtype cannot hold.
      UnmatchedRuleError: a rule picked out no module that the call passed, nor by its path one
        that has parameters (with `unmatched="raise"`); not checked if a `method` is named.

    >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
    >>> model = mpjax.linen.with_policy(nn.Sequential([nn.Dense(2), nn.LayerNorm()]), "c=bf16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> half = model.convert(variables, jnp.ones((1, 3)))["params"]
    >>> half["layers_0"]["kernel"].dtype, half["layers_1"]["scale"].dtype
    (dtype(bfloat16), dtype('float32'))
    """
    where = "mpjax.linen.with_policy(model, policy).convert(variables)"
    if not isinstance(variables, Mapping) or (variables and "params" not in variables):
      got = f"keys {', '.join(map(repr, variables))}" if isinstance(variables, Mapping) else None
      raise MpjaxTypeError(
        where,
        expected="the variables of the model, a mapping with 'params' in it",
        got=got or f"a {type(variables).__name__}",
        fix='Write model.convert({"params": params}, x).',
      )
    visits = Visits()

    def call(params: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
      return self._apply(visits, _with_params(variables, params), *args, **kwargs)

    params = variables.get("params", {})
    new = store_as_used(call, params, (variables, *args), kwargs, where)
    if kwargs.get("method") is None:
      visits.matched |= self._rules_about(params)
      self._check_rules(visits, "that this call passed")
    return _with_params(variables, new)

  def clone(self, **updates: Any) -> "PolicyModule":
    """Returns the model with other fields, under the same policy.

    Args:
      **updates: fields of the model.

    Raises:
      MpjaxTypeError: a `parent` is given: a wrapped model is no submodule.
    """
    if updates.get("parent") is not None:
      raise self._not_a_submodule("clone(parent=...)")
    return PolicyModule(self.module.clone(**updates), self.given)

  copy = clone

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    raise self._not_a_submodule("__call__(...)")

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__") or name in ("module", "given"):
      raise AttributeError(name)
    return getattr(self.module, name)

  def __repr__(self) -> str:
    return f"with_policy({self.module!r}, {shown(self.given)})"

  def _not_a_submodule(self, call: str) -> MpjaxTypeError:
    return MpjaxTypeError(
      f"{type(self.module).__name__} under mpjax.linen.with_policy: {call}",
      expected="a call of apply, init or bind on the wrapped root model",
      got="a wrapped model used as a submodule, or called without variables",
      fix="Wrap the root, pick submodules out with mpjax.Rule, call model.apply(variables, x).",
    )

  def _apply(
    self, visits: Visits | None, *args: Any, met: set[str] | None = None, **kwargs: Any
  ) -> Any:
    if in_region():
      return self.module.apply(*args, **kwargs)
    state = begin(self.given, visits, met)
    with activate(state):
      if state.tracing or not self.given.low:
        return self.module.apply(*args, **kwargs)
      return applied(self.module, state, activate, args[0], args[1:], kwargs)

  def _plain_init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    with activate(OFF):
      return self.module.init(rngs, *args, **kwargs)

  def _traced_init(self, visits: Visits, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the shapes and dtypes of the variables under the policy.

    The record of modules passed keeps every cached program out: it is only ever there in a trace.
    """

    # The output is not used here, and may not be a JAX type.
    def variables() -> Any:
      return self._casting(visits, lambda: self.module.init_with_output(rngs, *args, **kwargs)[1])

    try:
      return jax.eval_shape(variables)
    except jax.errors.JAXTypeError:
      return variables()  # The model looks at values while it is initialised: let it.

  def _casting(self, visits: Visits, call: Callable[[], Any]) -> Any:
    """Returns what a call does in which modules compute in their compute dtype, not only say it.

    Nothing else tells the dtype of a cache. A loop that carries float32 raises then: what it meets
    in `apply` is float32 too, and so it is here.
    """
    state = begin(self.given, visits)
    try:
      with activate(dataclasses.replace(state, cast=True)):
        return call()
    except jax.errors.JAXTypeError:
      raise
    except Exception:
      with activate(state):
        return call()

  def _rules_about(self, params: PyTree) -> set[Rule]:
    """Returns the rules whose path has parameters, also of a module that only training calls."""
    nodes = _nodes(params)
    rules = (rule for rule in self.given.rules if rule.path is not None)
    return {rule for rule in rules if any(rule.matches(None, node) for node in nodes)}

  def _warn_unmatched(self, paths: set[str]) -> None:
    """Warns of rules with a path that is none of `paths`.

    It is no error: a module without variables may be there that this call had no use for.
    """
    for rule in self.given.rules:
      if rule.path is not None and not any(rule.matches(None, path) for path in paths):
        origin = "that this call met or that have variables"
        text = f"{unmatched_error(rule, tuple(paths), (), origin=origin)} {_MAY_BE_RIGHT}"
        warnings.warn(text, stacklevel=3)

  def _check_rules(self, visits: Visits, origin: str = "that init passed") -> None:
    """Looks for rules that picked out none of the modules passed."""
    check_matched(self.given, visits.matched, visits.classes, origin, 3)

  def _merge(self, plain: Any, ours: Any) -> Any:
    """Returns the variables that the model makes without a policy, in the dtypes that it sets.

    Those are the dtypes of parameters, of caches, and of what `perturb` adds to activations.
    """
    cast = {c: cast_like(plain[c], ours.get(c)) for c in ("params", *COMPUTED) if c in plain}
    return _updated(plain, {col: tree for col, tree in cast.items() if tree is not None})


_MAY_BE_RIGHT = (
  "If the module is one that this call leaves out (only training calls it), it is fine."
)


def _nodes(collection: PyTree) -> set[str]:
  """Returns the paths of the modules that have variables in a collection, and of those around."""
  return {"/".join(name[:n]) for name in places(collection) for n in range(len(name))}


def _with_params(variables: Any, params: Any) -> Any:
  return _updated(variables, {"params": params} if "params" in variables else {})


def _updated(variables: Any, collections: Mapping[str, Any]) -> Any:
  """Returns variables with other collections, in a mapping of the same kind."""
  frozen = isinstance(variables, FrozenDict)
  return variables.copy(collections) if frozen else {**variables, **collections}


class BoundPolicyModule:
  """A Linen model bound to variables, or one of its submodules, under a policy."""

  def __init__(self, module: nn.Module, given: Given) -> None:
    self._module, self._given = module, given

  @property
  def variables(self) -> Any:
    """The variables as they are stored."""
    return self._module.variables

  def unbind(self) -> tuple[PolicyModule, Any]:
    """Returns the model without its variables, under the same policy, and the variables."""
    module, variables = self._module.unbind()
    model = PolicyModule(module, self._given)
    if self._module.path:  # The paths of rules begin at the root, which is elsewhere.
      object.__setattr__(model, "_checked", True)
    return model, variables

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._under_policy(self._module)(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    with activate(begin(self._given)):
      found = getattr(self._module, name)
    return self._wrap(found)

  def __repr__(self) -> str:
    return f"with_policy({self._module!r}, {shown(self._given)})"

  def _under_policy(self, fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
      if in_region():
        return fun(*args, **kwargs)
      with activate(begin(self._given)):
        return fun(*args, **kwargs)

    return call

  def _wrap(self, found: Any) -> Any:
    """Returns an attribute so that what is called on it runs under the policy."""
    if isinstance(found, nn.Module):
      return BoundPolicyModule(found, self._given)
    if isinstance(found, (tuple, list)) and any(map(_holds_modules, found)):
      return type(found)(self._wrap(x) for x in found)
    if isinstance(found, Mapping) and any(map(_holds_modules, found.values())):
      return {key: self._wrap(x) for key, x in found.items()}
    return self._under_policy(found) if callable(found) else found


def _holds_modules(x: Any) -> bool:
  return isinstance(x, (nn.Module, tuple, list, Mapping))
