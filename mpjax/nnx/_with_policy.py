"""`with_policy`: a view of an NNX model that runs under a policy; and `convert` of such a view."""

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from flax import nnx

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, kind_of
from mpjax._core.frameworks import not_a_model
from mpjax._core.types import KeyPath, Params, PyTree
from mpjax._io.used_dtypes import store_as_used
from mpjax._policy.policy import PolicyLike
from mpjax._policy.rules import (
  ModulePolicy,
  ModuleRecord,
  Rule,
  parse_config,
  policy_text,
  resolve_policy,
)
from mpjax.nnx._graph import (
  CONTAINERS,
  HOLD_METHODS,
  is_node,
  is_tree,
  orders_of,
  parts_of,
  put_in_order,
  rebound,
)
from mpjax.nnx._link import LINK, Link, is_view, resolved_policy
from mpjax.nnx._view_classes import view_class

M = TypeVar("M", bound=nnx.Module)


def with_policy(
  model: M,
  policy: PolicyLike | None,
  rules: Iterable[Rule] = (),
  *,
  unmatched: str = "raise",
) -> M:
  """Create a view of an NNX model that runs under a policy.

  The modules of the view hold the variables of the model. A view owns no array. Create it once, or
  in each step.

  Args:
    model: an NNX module.
    policy: as for `mpjax.with_policy`. Its `output_dtype` is that of the outermost method.
    rules: the first rule that matches a module wins. A path consists of attributes and indices:
      "blocks/0/attention".
    unmatched: "raise", "warn" or "ignore", for a rule that matches no module.

  Returns:
    The view. Its modules are instances of subclasses of the model's classes. It sees later values
    of variables, and no other later changes of the model. A call of the view after `model.eval()`
    is an error.

  Raises:
    MpjaxTypeError: `model` is no plain NNX module.
    MpjaxValueError: a variable was created with `ref=True` or `hijax=True`.
    UnmatchedRuleError: a rule picks out no module, with `unmatched="raise"`.

  >>> import jax.numpy as jnp, mpjax
  >>> from flax import nnx
  >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  >>> view = mpjax.nnx.with_policy(model, "c=bf16")
  >>> view(jnp.ones((1, 3))).dtype, view.kernel is model.kernel, model.kernel.dtype
  (dtype(bfloat16), True, dtype('float32'))
  """
  _check_model(model)
  config = parse_config("mpjax.with_policy", policy, rules, unmatched=unmatched)
  record = ModuleRecord(config)
  # 1. New objects that hold the same variables, with attributes in the user's order.
  view = nnx.clone(model, variables=False, graph=True)
  put_in_order(parts_of(view)[0], orders_of(parts_of(model)[0]))
  modules, copies = _modules(model), _modules(view)
  # 2. Each module of the view gets the class of its policy. Modules of a view inside of the model
  # have one already.
  policies: dict[KeyPath, ModulePolicy] = {}
  for path, module in modules.items():
    if is_view(module):
      continue
    text, copy = _text(path), copies[path]
    record.note(module, text)
    # The policy of the innermost module around, which comes before those inside of it. A path also
    # has lists and dicts in it.
    outer = (path[:length] for length in range(len(path) - 1, -1, -1))
    around = next((policies[each] for each in outer if each in policies), None)
    around = ModulePolicy(config.policy) if around is None else around
    own = vars(module).get("policy")
    policies[path] = resolve_policy(config, module, text, own, around, all_matches=True)
    # This avoids NNX's checks and the hooks of the class.
    cls = view_class(type(copy), is_tree(copy), policies[path])
    object.__setattr__(copy, "__class__", cls)
  # 3. NNX has not copied what is static to it.
  counterparts = {id(module): copies[path] for path, module in modules.items()}
  for path, module in modules.items():
    copy = copies[path]
    for name, value in vars(module).items():
      # A method in an attribute is bound to the user's module, and would run without the policy.
      if isinstance(value, HOLD_METHODS):
        object.__setattr__(copy, name, rebound(value, counterparts))
      # Share a list or dict without modules, or a module of Linen: changes that a call makes in it
      # must reach the user's module.
      elif isinstance(value, (list, dict, nnx.bridge.ToNNX)) and not any(
        map(_is_module, jax.tree.leaves(value, is_leaf=is_node))
      ):
        object.__setattr__(copy, name, value)
    # A link in an `nnx.List` would be one of its items.
    if not isinstance(module, CONTAINERS):
      nnx.Pytree.__setattr__(copy, LINK, nnx.data(Link(_text(path), copy, module)))
  record.check("of the model", 2)
  return view


def _text(path: KeyPath) -> str:
  """Returns a path as rules and errors write it."""
  return "/".join(map(str, path))


def views_of(tree: PyTree, policy: PolicyLike | None, rules: Iterable[Rule]) -> PyTree:
  """Returns a tree with views in place of the models in it."""

  def is_plain(x: Any) -> bool:
    return isinstance(x, nnx.Module) and _is_module(x) and not is_view(x)

  # A tree may have several models, and a rule may be about one of them. So unmatched rules are
  # fine.
  view = functools.partial(with_policy, policy=policy, rules=rules, unmatched="ignore")
  return jax.tree.map(lambda x: view(x) if is_plain(x) else x, tree, is_leaf=is_plain)


def _check_model(model: Any) -> None:
  """Raises unless `with_policy` can make a view of `model`."""
  where = "mpjax.with_policy(model)"
  if is_view(model):
    policy = policy_text(resolved_policy(model).policy)
    got = f"a view already ({type(model).__name__} under {policy})"
    fix = "Call it as it is. For another policy make a view of the plain model."
  elif isinstance(model, nnx.bridge.ToNNX):
    got = f"a Linen module ({type(model.to_nnx__module).__name__}) inside nnx.bridge.ToNNX"
    fix = "Call it inside mpjax.policy_scope(policy)."
  elif not isinstance(model, nnx.Module):
    got, fix = not_a_model(model)
  else:
    # A view calls copies of a model with tracers as values. Writes to the copy of a variable that
    # is a reference, or an object of JAX, would be lost.
    for path, x in nnx.iter_graph(model, graph=True):
      # Flags are in the metadata, also if `nnx.var_defaults` has set them.
      modes = x.get_metadata() if isinstance(x, nnx.Variable) else {}
      mode = next((mode for mode in ("ref", "hijax") if modes.get(mode)), None)
      if mode is not None:
        raise MpjaxValueError(
          where,
          expected="variables that hold arrays",
          got=f"{_text(path)}, a variable with {mode}=True",
          fix=f"Create the model without nnx.var_defaults({mode}=True), or in "
          f"`with nnx.var_defaults({mode}=False):` where a flag of Flax makes it the default.",
        )
    return
  raise MpjaxTypeError(where, expected="a flax.nnx.Module", got=got, fix=fix)


def _modules(model: nnx.Module) -> dict[KeyPath, nnx.Pytree]:
  """Returns the modules of a model by path, outer ones first. A shared module has one path."""
  # `iter_graph` yields inner modules first. Policies are inherited from outside.
  modules = [(path, node) for path, node in nnx.iter_graph(model, graph=True) if _is_module(node)]
  return dict(sorted(modules, key=lambda each: len(each[0])))


def _is_module(node: object) -> bool:
  """Whether a node runs under a policy: a module, or an object of a class of the user's own."""
  # A Linen module inside of `ToNNX` reads its parameters itself, so `policy_scope` is for it.
  is_linen = isinstance(node, nnx.bridge.ToNNX)
  users = isinstance(node, nnx.Pytree) and type(node).__module__.split(".")[0] != "flax"
  return not is_linen and (isinstance(node, nnx.Module) or users)


def convert(view: M, *args: Any, method: str = "__call__", **kwargs: Any) -> M:
  """Copy a view for inference, with parameters in the compute dtype.

  A parameter is cast if the call only casts it to that dtype, see
  `mpjax.linen.PolicyModule.convert`.

  Args:
    view: the result of `mpjax.with_policy`. It does not change.
    args: the arguments of the call, arrays or `jax.ShapeDtypeStruct`.
    method: the name of the called method. Its casts decide for all methods.
    kwargs: further arguments.

  Returns:
    A view of the same class with variables of its own, for inference.

  Raises:
    MpjaxTypeError: `view` is no view.

  >>> import jax.numpy as jnp, mpjax
  >>> from flax import nnx
  >>> view = mpjax.with_policy(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
  >>> mpjax.nnx.convert(view, jnp.ones((1, 8))).kernel.dtype
  dtype(bfloat16)
  """
  if not is_view(view):
    where, expected = "mpjax.nnx.convert(view)", "a view that mpjax.with_policy returned"
    fix = "Write convert(with_policy(model, policy), *inputs): the policy says what is cast."
    raise MpjaxTypeError(where, expected=expected, got=kind_of(view), fix=fix)
  # The view as a pure function of its parameters, which `store_as_used` traces.
  graphdef, params, rest = nnx.split(view, nnx.Param, ...)

  def call(params: Params, *args: Any, **kwargs: Any) -> PyTree:
    # A copy for each call: tracers must not be written to the variables of the view.
    return getattr(nnx.merge(graphdef, params, rest, copy=True), method)(*args, **kwargs)

  new = store_as_used(call, params, args, kwargs, "mpjax.nnx.convert(view)")
  return nnx.merge(graphdef, new, rest, copy=True)
