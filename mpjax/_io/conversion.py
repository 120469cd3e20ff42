"""`convert`: parameters for inference, in low precision, by the paths in their tree."""

from collections.abc import Iterable, Mapping, Sequence

import jax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, listed
from mpjax._core.leaves import Path, leaf_paths
from mpjax._core.trees import is_floating
from mpjax._core.types import FLOAT32, DType, Leaf, Params
from mpjax._jaxpr.used_dtypes import cast_leaves
from mpjax._optim.trees import differentiated
from mpjax._policy.policy import PolicyLike, parse_policy
from mpjax._policy.rules import ModuleRecord, Rule, first_match, parse_config

_WHERE = "mpjax.convert"

_SCALES = frozenset({"scale", "gamma"})
_BESIDE = frozenset({"bias", "offset", "beta", "mean", "var", "moving_mean", "moving_var"})
"""What Flax, Haiku and older code call the arrays of a norm: its scale, and what goes with it."""


def convert(
  params: Params, policy: PolicyLike, rules: Iterable[Rule] = (), *, unmatched: str = "raise"
) -> Params:
  """Returns parameters for inference: floating leaves in the compute dtype of a policy.

  The parameters of norms stay in float32. A tree does not say which they are: a node counts as a
  norm if its arrays have the names of one ("scale" and "bias", "gamma" and "beta", …), or if they
  are vectors and "norm" is in its own name. `with_policy(model, policy).convert(variables, *args)`
  knows better, since it looks at what the model does with each leaf. Arrays in float8 stay, too.

  With "float32" it is the way back: low-precision parameters as a float32 checkpoint.

  Args:
    params: any tree of arrays, abstract ones too; `nnx.state(model)` of an NNX model. Of a dict
      with "params" in it, the variables of a Linen model, the other collections stay as they are.
    policy: a `mpjax.Policy` or its string; only its `compute_dtype` counts.
    rules: `Rule("float32", path="decoder/head")` for a leaf, or a node and all in it; the first
      that matches wins, the innermost node counts, and both go before what is said of norms.
      `Rule(None, path=...)` leaves what is there as it is. Only rules with a path.
    unmatched: "raise", "warn" or "ignore": what to do about a rule that matches nothing.

  Returns:
    A tree of the same structure and shardings. Leaves of no floating dtype are the same objects,
    an array with two paths (tied weights) stays one, in the wider dtype if they differ.

  Raises:
    MpjaxTypeError: rules of the wrong type; a model or an entire training state for `params`.
    MpjaxValueError: an unknown policy or `unmatched`; a rule without a path; a finite value the
      new dtype cannot hold (under `jit` nobody can see that: it becomes inf).
    UnmatchedRuleError: a rule matches nothing in the tree (with `unmatched="raise"`).

  >>> import jax, jax.numpy as jnp, mpjax
  >>> params = {"layer": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
  ...           "norm": {"scale": jnp.ones(2)}, "head": {"kernel": jnp.ones((2, 1))}}
  >>> half = mpjax.convert(params, "bfloat16", [mpjax.Rule("float32", path="head")])
  >>> half["layer"]["kernel"].dtype, half["norm"]["scale"].dtype, half["head"]["kernel"].dtype
  (dtype(bfloat16), dtype('float32'), dtype('float32'))
  >>> [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (params, half)]
  [40, 28]
  """
  base = parse_policy(policy, f"{_WHERE}(policy)")
  config = parse_config(_WHERE, base, rules, unmatched=unmatched)
  wrong = [repr(rule) for rule in config.rules if rule.path is None]
  if wrong:
    raise MpjaxValueError(
      f"{_WHERE}(rules=...)",
      expected="rules with path=",
      got=listed(wrong),
      fix="Such rules need mpjax.with_policy(model, policy, rules).convert(variables, *args).",
    )
  # With other collections of a Linen model; a State of NNX may have an attribute of that name.
  of_linen = (isinstance(params, dict) or hasattr(params, "unfreeze")) and "params" in params
  _check_params(params["params"] if of_linen else params)
  leaves = jax.tree.leaves(params)
  paths: list[Path | None] = list(leaf_paths(params))
  if of_linen:
    paths = [path[1:] if path and path[0] == "params" else None for path in paths]
  ours = {path: x for path, x in zip(paths, leaves, strict=True) if path is not None}
  nodes = sorted({"/".join(path[:n]) for path in ours for n in range(len(path) + 1)})
  record = ModuleRecord(config)
  record.note_paths(nodes)
  record.check("in the tree", 2, kind="node")
  norms = _norms(ours)
  dtypes = [
    None if path is None else _dtype(base.compute_dtype, config.rules, path, x, path[:-1] in norms)
    for path, x in zip(paths, leaves, strict=True)
  ]
  return cast_leaves(params, dtypes, f"{_WHERE}(params)")


def _check_params(params: object) -> None:
  """Raises for what has parameters in it and is no tree of them."""
  # Nodes whose classes are of optax or mpjax are states of optimizers, but for MaskedNode (without
  # fields) and LookaheadParams (parameters); other training states have an `opt_state`.
  is_tree = lambda x: getattr(x, "_fields", None) == () or differentiated(x) is not x  # noqa: E731
  is_own = lambda x: type(x).__module__.split(".")[0] in ("mpjax", "optax") and not is_tree(x)  # noqa: E731
  is_state = lambda x: is_own(x) or (hasattr(x, "opt_state") and not isinstance(x, Mapping))  # noqa: E731
  nnx = any(c.__module__.startswith("flax.nnx.") for c in type(params).__mro__)
  if nnx and not isinstance(params, Mapping):
    got = f"the NNX module {type(params).__name__}"
    fix = "Pass nnx.state(model), or write mpjax.nnx.convert(view, *inputs)."
  elif hasattr(params, "apply") and hasattr(params, "init"):
    got = f"a model ({type(params).__name__})"
    fix = "Pass its variables, or write with_policy(model, policy).convert(variables, *inputs)."
  elif states := [x for x in jax.tree.leaves(params, is_leaf=is_state) if is_state(x)]:
    got = f"a training state: there is a {type(states[0]).__name__} in it"
    fix = "Pass state.params: the optimizer's state is not for inference."
  else:
    return
  raise MpjaxTypeError(f"{_WHERE}(params)", expected="a tree of parameters", got=got, fix=fix)


def _norms(leaves: Mapping[Path, Leaf]) -> set[Path]:
  """Returns the paths of the nodes that seem to be norms, by the leaves right inside them."""
  inside: dict[Path, dict[str, int]] = {}
  for path, x in leaves.items():
    if len(path) > 1 and is_floating(x):
      inside.setdefault(path[:-1], {})[path[-1]] = x.ndim
  norms = set()
  for node, ranks in inside.items():
    # By its name, and by the names and ranks of its arrays. Ranks say little: those of layers that
    # were scanned over are stacked.
    names, vectors = set(ranks), max(ranks.values()) <= 1
    if names & _SCALES and names <= _SCALES | _BESIDE:
      is_norm = True
    elif "norm" in node[-1].lower():
      is_norm = names <= _SCALES | _BESIDE | {"weight"} or vectors
    else:
      is_norm = len(names) > 1 and names <= _BESIDE | {"weight"} and vectors
    if is_norm:
      norms.add(node)
  return norms


def _dtype(base: DType, rules: Sequence[Rule], path: Path, x: Leaf, in_norm: bool) -> DType | None:
  """Returns what a leaf becomes; None leaves it as it is."""
  for n in range(len(path), -1, -1):
    rule = first_match(rules, None, "/".join(path[:n]))
    if rule is not None:
      return None if rule.policy is None else rule.policy.compute_dtype
  if is_floating(x) and x.dtype.itemsize == 1:
    return None  # It was quantised on purpose, and has a scale somewhere.
  return FLOAT32 if in_norm else base
