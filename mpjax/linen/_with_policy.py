"""`with_policy`: a Linen model that runs under a policy.

It is an instance of a subclass of the model's class, see docs/design/linen.md.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import flax.linen as nn
import jax
from flax.core import FrozenDict
from flax.core.scope import CollectionFilter

from mpjax._autocast.module_calls import in_compute_dtype
from mpjax._core.errors import MpjaxTypeError, kind_of
from mpjax._core.frameworks import not_a_model
from mpjax._core.leaves import node_paths
from mpjax._core.trees import mapped
from mpjax._core.types import Args, Class, Function, Kwargs, Params, PyTree, Variables
from mpjax._io.used_dtypes import store_as_used
from mpjax._policy.active import outside_policies
from mpjax._policy.policy import PolicyLike
from mpjax._policy.rules import ModuleRecord, PolicyConfig, Rule, parse_config
from mpjax.linen._active import LinenActive, begin, current
from mpjax.linen._initialize import abstract
from mpjax.linen._intercept import activate, applied, under

# A subclass inherits from this class and from the user's. As a subclass of `nn.Module`, this one
# would be a dataclass without fields, and hide the constructor of the user's class.
_Module = nn.Module if TYPE_CHECKING else object

Keys: TypeAlias = jax.Array | dict[str, jax.Array]
"""What `nn.Module.init` takes: one random key, or one for each name."""


def with_policy(
  model: nn.Module,
  policy: PolicyLike | None,
  rules: Iterable[Rule] = (),
  *,
  unmatched: str = "raise",
) -> "PolicyModule":
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
    config = parse_config(where, policy, rules, unmatched=unmatched)
    if model.scope is None:
      return _with_class(model, policy_class(type(model), config))
    return _shown(model, config, model.path)
  raise MpjaxTypeError(f"{where}(model)", expected="a flax.linen.Module", got=got, fix=fix)


# The subclass, and models of it


@functools.cache
def policy_class(cls: Any, config: PolicyConfig) -> Any:
  """Returns the subclass of a class of models that runs under a policy."""
  # Cached, because models of two classes are never equal, and a new class is another key in each
  # cache of JAX. The policy is an attribute of the class, so it is no field of the model.
  names: dict[str, object] = {
    # Flax names submodules after their class, and error messages name it.
    "__module__": cls.__module__,
    "__qualname__": cls.__qualname__,
    "__doc__": cls.__doc__,
    _CLASS: cls,
    _CONFIG: config,
  }
  # The default of a field may be a function, such as an activation.
  others = {*_OF_ALL, *(field.name for field in dataclasses.fields(cls))}
  for name, own in inspect.getmembers_static(cls):
    is_special = name.startswith("__") and name != "__call__"
    if inspect.isfunction(own) and not is_special and name not in others:
      names[name] = _method(own)
  return type(cls)(cls.__name__, (PolicyModule, cls), names)


_CLASS, _CONFIG = "_class_of_user", "_policy_config"
"""Attributes of the subclasses: the class of the user's model, and the policy."""

_ROOT = "_root_of_policy"
"""The attribute with the path to which the paths of rules are relative. A module without it is that
root itself."""

_SHOWN = "_shown_under_policy"
"""The attribute in which a copy of a submodule holds that submodule."""


class _Empty(nn.Module):
  """A module without fields."""


_OF_ALL = frozenset(dir(_Empty(parent=None)))
"""The attributes of all modules, which have nothing to run under a policy."""


def _with_class(model: nn.Module, cls: Any) -> Any:
  """Returns an unbound model of another class with the same attributes."""
  # The constructor would run the user's `__post_init__` on what it has computed already.
  new = object.__new__(cls)
  vars(new).update({**vars(model), "scope": None})
  object.__setattr__(new, "parent", None)
  nn.Module.__post_init__(new)
  return new


def _shown(module: nn.Module, config: PolicyConfig, root: tuple[str, ...]) -> Any:
  """Returns a copy of a bound module that runs under a policy; paths of rules begin at `root`."""
  copy = object.__new__(policy_class(type(module), config))
  vars(copy).update({**vars(module), _ROOT: root, _SHOWN: module})
  return copy


class PolicyModule(_Module):
  """A Linen model under a policy: an instance of a subclass of the model's class.

  It has the fields and methods of the model, so it can be cloned, bound and pickled. It can also be
  a submodule of another model, in which paths of its rules are relative to it. Two such models are
  equal if their fields and their policies are.

  >>> import flax.linen as nn, mpjax
  >>> model = mpjax.with_policy(nn.Dense(2), "mixed_bfloat16")
  >>> isinstance(model, nn.Dense), isinstance(model, mpjax.linen.PolicyModule), model.features
  (True, True, 2)
  """

  def __init_subclass__(cls, **kwargs: Any) -> None:
    # The class of the model is a dataclass already, whose methods Flax has wrapped. Hooks of users
    # may put each class into a table, or ask for keywords.
    pass

  # A user's `__eq__` does not know of policies, and JAX would take what it compiled under another.
  def __eq__(self, other: object) -> bool:
    if isinstance(other, nn.Module) and type(other) is not type(self):
      return False
    return super().__eq__(other)

  def __hash__(self) -> int:
    return super().__hash__()

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
    # paths here, too. Only `__call__` is expected to pass all modules: other methods call some.
    config, plain = _config_of(self), _plain(self)
    rules = tuple(rule for rule in config.rules if rule.path is not None)
    checks = rules and config.unmatched != "ignore" and kwargs.get("method") is None
    met = None
    if checks:
      met = ModuleRecord(dataclasses.replace(config, rules=rules, unmatched="warn"))
    with under(config, met=met) as state:
      # Inside of a trace of mpjax, the call is rewritten with that trace. A policy may also cast
      # nothing.
      if state is None or state.tracing or not config.rewrites:
        outputs = plain.apply(variables, *args, **kwargs)
      else:
        outputs = applied(plain, state, variables, args, kwargs)
    if met is not None and met.classes and isinstance(variables, Mapping):
      # A path that has variables is not misspelt. A module without variables may be left out by
      # this call, so this is a warning and no error.
      met.note_paths(set().union(*map(node_paths, variables.values())))
      note = "If the module is one that this call leaves out (only training calls it), it is fine."
      met.check("that this call met or that have variables", 2, note=note)
    return outputs

  def init(self, rngs: Keys, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the model's own initial variables, parameters cast to the policy's `param_dtype`.

    A rule that picks out no module is an UnmatchedRuleError (with `unmatched="raise"`).

    Args:
      rngs: as for `nn.Module.init`.
      *args: arguments of the method.
      **kwargs: further arguments of `nn.Module.init` and of the method.
    """
    return _initialized(_config_of(self), _plain(self).init, rngs, args, kwargs)

  def init_with_output(
    self, rngs: Keys, *args: Any, **kwargs: Any
  ) -> tuple[PyTree, dict[str, Any]]:
    """Return the model's output, cast to `output_dtype`, and the variables of `init`.

    The output is computed in float32, as everything in `init` is, except in modules that raise in
    float32.

    Args:
      rngs: as for `init`, and so are the others.
      *args: arguments of the method.
      **kwargs: further arguments.
    """
    config, module = _config_of(self), _plain(self)
    return _initialized(config, module.init_with_output, rngs, args, kwargs, traced=module.init)

  def lazy_init(self, rngs: Keys, *args: Any, **kwargs: Any) -> Any:
    """Return the variables of `init` from abstract inputs, as `nn.Module.lazy_init` does.

    Args:
      rngs: as for `init`, and so are the others.
      *args: arguments of the method, arrays or `jax.ShapeDtypeStruct`.
      **kwargs: further arguments.
    """
    return _initialized(_config_of(self), _plain(self).lazy_init, rngs, args, kwargs)

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

  def clone(self, **updates: Any) -> Self:
    """Return the model with other fields, under the same policy.

    Args:
      **updates: fields of the model.
    """
    # The fields of a bound model are submodules. Inside of its policy they are read as they are.
    with _beginning(self) if _begins(self) else contextlib.nullcontext():
      new = super().clone(**updates)
    # A lifted transform calls a clone that is bound at the same path.
    if _ROOT in vars(self) and new.scope is not None:
      vars(new)[_ROOT] = vars(self)[_ROOT]
    return new

  def _try_setup(self, shallow: bool = False) -> None:
    shown = vars(self).get(_SHOWN)
    if shown is None:
      super()._try_setup(shallow)
    else:  # `setup` runs once, and gives its attributes to the submodule and all copies.
      shown._try_setup(shallow)
      vars(self).update(vars(shown))

  def __getattribute__(self, name: str) -> Any:
    if name in _OF_ALL or not _begins(self):
      return super().__getattribute__(name)
    # Looking up an attribute may run `setup` or a property.
    with _beginning(self):
      attribute = super().__getattribute__(name)
    return _all_under_policy(self, attribute)

  def __getattr__(self, name: str) -> Any:
    with _beginning(self) if _begins(self) else contextlib.nullcontext():
      attribute = super().__getattr__(name)
    return _all_under_policy(self, attribute) if _begins(self) else attribute

  def __reduce__(self) -> tuple[object, ...]:
    # Pickle finds classes by name, and this one has the name of the user's class.
    cls = type(self)
    if _CLASS in vars(cls):
      return _new_of_class, (vars(cls)[_CLASS], _config_of(self)), self.__getstate__()
    return object.__new__, (cls,), self.__getstate__()

  def __repr__(self) -> str:
    return f"with_policy({super().__repr__()}, {_config_of(self)})"


# A bound model, which is called or read outside of its policy


def _method(own: Function) -> Function:
  """Returns a method that runs under the policy of its module."""

  @functools.wraps(own)
  def method(self: nn.Module, *args: Any, **kwargs: Any) -> PyTree:
    # `apply(..., method=model.encode)` calls the function with the plain model.
    if not (isinstance(self, PolicyModule) and _begins(self)):
      return own(self, *args, **kwargs)
    with _beginning(self, is_call=own.__name__ == "__call__"):
      outputs = own(self, *args, **kwargs)
    if (shown := vars(self).get(_SHOWN)) is not None:
      # After a call, Flax gives a module a scope in which its submodules can be made again.
      vars(shown)["scope"] = vars(self)["scope"]
    return _all_under_policy(self, outputs)

  return method


def _begins(module: "PolicyModule") -> bool:
  """Whether a bound module is used by code that does not run under its policy."""
  if vars(module).get("scope") is None or outside_policies():
    return False
  state = vars(module)["_state"]
  if state.in_setup or not state.is_initialized:  # Flax reads fields, and stores them again.
    return False
  active = current()
  if active is None or active.config != _config_of(module):
    return True
  return active.root_path != _root_of(module)


@contextlib.contextmanager
def _beginning(module: "PolicyModule", is_call: bool = False) -> Generator[None]:
  """Makes the policy of a bound module active."""
  config, root = _config_of(module), _root_of(module)
  # The `init` of a model around calls all modules of this one, so its rules can be checked.
  checks = is_call and root == module.path and module.is_initializing()
  record = ModuleRecord(config) if checks and config.rules else None
  with under(config, root_path=root, record=record):
    yield
  if record is not None:
    record.check("that init passed", 4)


def _all_under_policy(module: PolicyModule, tree: PyTree) -> PyTree:
  """Returns a tree with copies of its submodules that run under the policy of a module."""

  def leaf(x: Any) -> Any:
    if not isinstance(x, nn.Module) or isinstance(x, PolicyModule) or x.scope is None:
      return x
    # The paths of rules begin at the root, which the submodule does not have when it is unbound.
    return _shown(x, dataclasses.replace(_config_of(module), unmatched="ignore"), _root_of(module))

  return mapped(leaf, tree)


# Functions and no methods: a user's class may have methods of these names.


def _config_of(module: PolicyModule) -> PolicyConfig:
  return getattr(type(module), _CONFIG)


def _root_of(module: PolicyModule) -> tuple[str, ...]:
  """Returns the path to which those of the rules of a bound module are relative."""
  attributes = vars(module)
  return attributes.get(_ROOT, attributes["scope"].path)


def _plain(module: PolicyModule) -> nn.Module:
  """Returns the model without the policy, unbound."""
  cls = type(module)
  if _CLASS not in vars(cls):  # The user's class does not have what the subclass adds.
    raise MpjaxTypeError(
      "mpjax.with_policy(model)",
      expected="a model of the class that with_policy made, as a root",
      got=f"one of {cls.__name__}, which a transform such as nn.remat, or a class statement, made "
      "from that class",
      fix="Put the policy around it: mpjax.with_policy(nn.remat(Model)(...), policy).",
    )
  return _with_class(module, vars(cls)[_CLASS])


def _initialized(
  config: PolicyConfig,
  init: Function,
  rngs: Keys,
  args: Args,
  kwargs: Kwargs,
  traced: Function | None = None,
) -> PyTree:
  """Returns the result of a method that initialises, after a check of the rules.

  The check traces `traced` instead, if the method also returns an output: that may have a type
  which JAX does not know.
  """

  def started(call: Function, state: LinenActive) -> PyTree:
    with activate(state):
      return call()

  # Both begin anew for each attempt: a module that raised has left variables behind.
  run, check = (functools.partial(fn, rngs, *args, **kwargs) for fn in (init, traced or init))
  # While a record is active, JAX finds no function that was compiled before, so all modules are
  # called. It must be active in this abstract trace only, or nothing would ever be reused.
  record = ModuleRecord(config)
  if config.rules:
    checked = functools.partial(started, functools.partial(abstract, check))
    in_compute_dtype(checked, begin(config, record=record))
  record.check("that init passed", 3)
  return in_compute_dtype(functools.partial(started, run), begin(config))


def _with_params(variables: Variables, params: Params) -> Variables:
  new = {"params": params} if "params" in variables else {}
  # A FrozenDict stays one. It is another tree to JAX than a dict.
  return variables.copy(new) if isinstance(variables, FrozenDict) else {**variables, **new}


def _new_of_class(cls: Class, config: PolicyConfig) -> PolicyModule:
  return object.__new__(policy_class(cls, config))
