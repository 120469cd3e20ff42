"""`with_policy` and `policy_scope`: the two ways to put a policy onto Linen models."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
from flax.core import FrozenDict

from mpjax._adapter import Adapter
from mpjax._errors import MpjaxRuntimeError, MpjaxTypeError, MpjaxValueError, message
from mpjax._full_precision import ACTIVE
from mpjax._op_lists import OpLists
from mpjax._policy import PolicyLike
from mpjax._rules import Rule, unmatched_error
from mpjax._tree import cast_leaf, is_floating
from mpjax._types import PyTree
from mpjax.linen._context import OFF, Given, Visits, begin, give, with_ops
from mpjax.linen._intercept import activate, hold
from mpjax.linen._params import COLLECTIONS, strip


def with_policy(
  model: nn.Module,
  policy: PolicyLike | None,
  rules: Iterable[Rule] = (),
  *,
  defaults: Iterable[Rule] | None = None,
  adapters: Mapping[type[nn.Module], Adapter] | None = None,
  ops: Literal["float32"] | OpLists | None = None,
  unmatched: str = "raise",
) -> "PolicyModule":
  """Returns an unmodified Linen model that runs under a policy.

  Parameters keep the policy's `param_dtype`; each module's inputs, its parameters where they are
  used, and its `dtype` field are in its `compute_dtype`. Norms' statistics and attention's
  softmax stay in float32. The variables are the same tree as the model's own.

  Args:
    model: an unbound module; it is not changed.
    policy: a `mpjax.Policy` or its string ("mixed_bfloat16"); None leaves every module as it is
      but for those that rules pick out.
    rules: tried in order for each module; the first that matches wins.
    defaults: tried after `rules`; `mpjax.default_rules()` if None.
    adapters: what is known about single classes, added to `mpjax.linen.default_adapters()`.
    ops: "float32" computes in float32 what the modules' own code does in half though it should
      not: the exponentials, logarithms and sums of `mpjax.OpLists().float32`, and differences that
      only these read. The rest of the program stays as it is. An edited `OpLists` counts by its
      float32 part. float16 overflows where bfloat16 does not: advisable there.
    unmatched: "raise", "warn" or "ignore": what `init` and `tabulate` do about a rule that picks
      out no module.

  Returns:
    A frozen, hashable object with the model's `init`, `init_with_output`, `lazy_init`, `apply`,
    `bind` and `tabulate`.

  Raises:
    MpjaxTypeError: `model` is not an unbound Linen module, is wrapped already, or rules or
      adapters have the wrong type.
    MpjaxValueError: an unknown policy, or a value of an argument that is not listed.

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
  >>> model = mpjax.linen.with_policy(nn.Dense(2), "mixed_bfloat16")
  >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
  >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((1, 3))).dtype
  (dtype('float32'), dtype('float32'))
  """
  where = "mpjax.linen.with_policy"
  expected = "an unbound flax.linen.Module"
  if isinstance(model, (PolicyModule, BoundPolicyModule)):
    got = f"a model that is wrapped already ({model!r})"
    fix = "Wrap the plain model once; of nested policies only the innermost would count."
    raise MpjaxTypeError(message(f"{where}(model)", expected=expected, got=got, fix=fix))
  if not isinstance(model, nn.Module):
    got = f"the class {model.__name__}" if isinstance(model, type) else repr(type(model))
    fix = "Pass an instance, such as with_policy(MyModel(features=8), ...)."
    raise MpjaxTypeError(message(f"{where}(model)", expected=expected, got=got, fix=fix))
  if model.scope is not None:
    got = f"one that is bound at {'/'.join(model.path)!r}"
    fix = "Wrap the root model, and give submodules their policy by rules."
    raise MpjaxTypeError(message(f"{where}(model)", expected=expected, got=got, fix=fix))
  given = give(
    where, policy, rules, defaults=defaults, adapters=adapters, ops=ops, unmatched=unmatched
  )
  return PolicyModule(model, given)


def policy_scope(
  policy: PolicyLike | None,
  rules: Iterable[Rule] = (),
  *,
  defaults: Iterable[Rule] | None = None,
  adapters: Mapping[type[nn.Module], Adapter] | None = None,
  ops: None = None,
  unmatched: str = "raise",
) -> contextlib.AbstractContextManager[None]:
  """Runs every Linen model called inside under a policy: for code that never shows its `.apply`.

  The scope belongs to the thread that enters it, and to every function that is traced or called
  inside: `jax.jit` keeps a program for each policy. Rule paths are relative to each root call.

  Args:
    policy: as for `with_policy`.
    rules: as for `with_policy`; a rule that picks out nothing is never an error here.
    defaults: as for `with_policy`.
    adapters: as for `with_policy`.
    ops: only None: the programs of calls inside are not this scope's to rewrite.
    unmatched: accepted as for `with_policy`.

  Raises:
    MpjaxTypeError: rules or adapters of the wrong type.
    MpjaxValueError: an unknown policy, or a value of an argument that is not listed.
    MpjaxRuntimeError: entered by a module that is running under a policy.

  >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
  >>> model = nn.Dense(2)
  >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
  >>> with mpjax.linen.policy_scope("bfloat16"):
  ...   print(model.apply(variables, jnp.ones((1, 3))).dtype)
  bfloat16
  """
  where = "mpjax.linen.policy_scope"
  if ops is not None:
    fix = "Wrap the model: mpjax.linen.with_policy(model, policy, ops=...)."
    raise MpjaxValueError(message(f"{where}(ops=...)", expected="None", got=repr(ops), fix=fix))
  given = give(
    where, policy, rules, defaults=defaults, adapters=adapters, ops=None, unmatched=unmatched
  )
  return _scope(given)


@contextlib.contextmanager
def _scope(given: Given) -> Generator[None]:
  """Enters a scope, which a module may not do while it is running."""
  active = ACTIVE.value
  if active is not None and active.entered:
    raise MpjaxRuntimeError(
      message(
        "mpjax.linen.policy_scope(policy)",
        expected="to be entered outside of a forward pass",
        got=f"a module that is running already, under the policy {str(active.policy)!r}",
        fix="Pick submodules out with mpjax.Rule, or apply a model of its own, wrapped by "
        "mpjax.linen.with_policy.",
      )
    )
  with hold(begin(given)):
    yield


@dataclasses.dataclass(frozen=True, repr=False)
class PolicyModule:
  """A Linen model under a policy, as `with_policy` returns it."""

  module: nn.Module
  given: Given

  def apply(self, variables: Any, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
    """Calls the model's `apply` under the policy; same arguments, same results.

    Args:
      variables: the model's variables, in any floating dtype.
      *args: arguments of the method.
      mutable: which collections are returned changed, as for `nn.Module.apply`.
      **kwargs: further arguments of `nn.Module.apply` and of the method.
    """
    with activate(begin(self.given)):
      call = with_ops(self.given, lambda *a, **kw: strip(self.module.apply(*a, **kw)))
      return call(variables, *args, mutable=mutable, **kwargs)

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
    """Returns the model's output under the policy, and what `init` returns.

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
    call = with_ops(self.given, functools.partial(self._init_under_policy, None))
    outputs, _ = call(rngs, *args, **kwargs)
    return outputs, self._merge(self._plain_init(rngs, *args, **kwargs), ours)

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
    with activate(begin(self.given, visits)):
      ours = jax.eval_shape(lambda: self.module.lazy_init(rngs, *args, **kwargs))
    self._check_rules(visits)
    with activate(OFF):
      return self._merge(self.module.lazy_init(rngs, *args, **kwargs), ours)

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
    with activate(begin(self.given, visits)):
      table = self.module.tabulate(rngs, *args, **kwargs)
    self._check_rules(visits)
    return table

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
    return f"with_policy({self.module!r}, {_shown(self.given)})"

  def _not_a_submodule(self, call: str) -> MpjaxTypeError:
    return MpjaxTypeError(
      message(
        f"{type(self.module).__name__} under mpjax.linen.with_policy: {call}",
        expected="a call of apply, init or bind on the wrapped root model",
        got="a wrapped model used as a submodule, or called without variables",
        fix="Wrap the root, pick submodules out with mpjax.Rule, call model.apply(variables, x).",
      )
    )

  def _plain_init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    with activate(OFF):
      return self.module.init(rngs, *args, **kwargs)

  def _traced_init(self, visits: Visits, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the shapes and dtypes of the variables under the policy.

    The record of modules passed keeps every cached program out: it is only ever there in a trace.
    """
    try:
      _, ours = jax.eval_shape(lambda: self._init_under_policy(visits, rngs, *args, **kwargs))
    except jax.errors.JAXTypeError:
      # The model looks at values while it is initialised: let it.
      _, ours = self._init_under_policy(visits, rngs, *args, **kwargs)
    return ours

  def _init_under_policy(
    self, visits: Visits | None, rngs: Any, *args: Any, **kwargs: Any
  ) -> tuple[Any, Any]:
    with activate(begin(self.given, visits)):
      return strip(self.module.init_with_output(rngs, *args, **kwargs))

  def _check_rules(self, visits: Visits) -> None:
    """Looks for rules that picked out none of the modules passed."""
    if self.given.unmatched == "ignore":
      return
    for rule in self.given.rules:
      if rule not in visits.matched:
        error = unmatched_error(rule, tuple(visits.classes), tuple(visits.classes.values()))
        if self.given.unmatched == "raise":
          raise error
        warnings.warn(str(error), stacklevel=3)

  def _merge(self, plain: Any, ours: Any) -> Any:
    """Returns the variables that the model makes without a policy, in the dtypes that it sets.

    Those are the dtypes of parameters, of caches, and of what `perturb` adds to activations.
    """
    cast = {
      col: _cast_like(plain[col], ours[col])
      for col in (*COLLECTIONS, "perturbations")
      if col in plain and jax.tree.structure(plain[col]) == jax.tree.structure(ours.get(col))
    }
    return plain.copy(cast) if isinstance(plain, FrozenDict) else {**plain, **cast}


def _cast_like(tree: PyTree, dtypes: PyTree) -> PyTree:
  return jax.tree.map(lambda x, d: cast_leaf(x, d.dtype) if is_floating(x) else x, tree, dtypes)


def _shown(given: Given) -> str:
  policy = None if given.policy is None else str(given.policy)
  return f"{policy!r}" + (f", rules={list(given.rules)!r}" if given.rules else "")


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
    return PolicyModule(module, self._given), variables

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._under_policy(self._module)(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    with activate(begin(self._given)):
      found = getattr(self._module, name)
    return self._wrap(found)

  def __repr__(self) -> str:
    return f"with_policy({self._module!r}, {_shown(self._given)})"

  def _under_policy(self, fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
      with activate(begin(self._given)):
        return strip(with_ops(self._given, fun)(*args, **kwargs))

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
