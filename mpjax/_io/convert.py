"""`convert`: casts parameters for inference, by their paths in a tree."""

from collections.abc import Iterable, Mapping, Sequence

import jax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, listed
from mpjax._core.frameworks import is_of_nnx
from mpjax._core.leaves import Path, leaf_paths
from mpjax._core.trees import is_floating
from mpjax._core.types import FLOAT32, DType, Leaf, Params
from mpjax._io.used_dtypes import cast_leaves
from mpjax._optim.optimizer_trees import differentiated
from mpjax._policy.policy import PolicyLike, parse_policy
from mpjax._policy.rules import (
  ModuleRecord,
  Rule,
  first_match,
  parse_config,
  with_enclosing,
)

_WHERE = "mpjax.convert"

_SCALES = frozenset({"scale", "gamma"})
_BESIDE = frozenset({"bias", "offset", "beta", "mean", "var", "moving_mean", "moving_var"})
"""Names of the arrays of a norm in Flax, Haiku and older code: its scale, and those beside it."""


def convert(
  params: Params, policy: PolicyLike, rules: Iterable[Rule] = (), *, unmatched: str = "raise"
) -> Params:
  """Cast parameters to the compute dtype of a policy, for inference.

  The parameters of norms stay in float32, and float8 arrays do not change. Norms are found by the
  names of their arrays, such as "scale" and "bias" or "gamma" and "beta". A node with "norm" in its
  name is one too, if its arrays are vectors. `with_policy(model, policy).convert(variables, *args)`
  is more exact, because it reads the operations on each leaf.

  With "float32" it converts low-precision parameters back for a float32 checkpoint.

  Args:
    params: any tree of arrays, abstract ones too; `nnx.state(model)` of an NNX model. In the
      variables of a Linen model, only the collection "params" is cast.
    policy: a `mpjax.Policy` or its string. Only its `compute_dtype` counts.
    rules: rules with a path, such as `Rule("float32", path="decoder/head")`. A path names a leaf,
      or a node with all leaves inside. The rule of the innermost node wins, and the first of
      several rules for one node. `Rule(None, path=...)` does not cast. Rules apply to norms too.
    unmatched: "raise", "warn" or "ignore", for a rule that matches nothing.

  Returns:
    A tree of the same structure and shardings. Leaves that are not floating are the same objects.
    An array with two paths (tied weights) stays one array, in the wider dtype if they differ.

  Raises:
    MpjaxTypeError: rules of the wrong type; a model or an entire training state for `params`.
    MpjaxValueError: an unknown policy or `unmatched`; a rule without a path; a finite value that
      the new dtype cannot hold (under `jit` it becomes inf).
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
  # Check the arguments before any array is cast.
  base = parse_policy(policy, f"{_WHERE}(policy)")
  config = parse_config(_WHERE, base, rules, unmatched=unmatched)
  # A rule for a class of modules cannot match, because a tree of arrays has no modules.
  wrong = [repr(rule) for rule in config.rules if rule.path is None]
  if wrong:
    raise MpjaxValueError(
      f"{_WHERE}(rules=...)",
      expected="rules with path=",
      got=listed(wrong),
      fix="Such rules need mpjax.with_policy(model, policy, rules).convert(variables, *args).",
    )
  # The variables of a Linen model are a dict. An `nnx.State` may have an attribute of that name.
  is_dict = isinstance(params, dict) or hasattr(params, "unfreeze")
  has_collections = is_dict and "params" in params
  _refuse_models(params["params"] if has_collections else params)
  # Rules and names of norms refer to paths within the parameters. Other collections have none:
  # batch statistics stay in float32.
  paths: list[Path | None] = [*leaf_paths(params)]
  if has_collections:
    paths = [path[1:] if path and path[0] == "params" else None for path in paths]
  leaves = jax.tree.leaves(params)
  by_path = {path: x for path, x in zip(paths, leaves, strict=True) if path is not None}
  record = ModuleRecord(config)
  # A rule may name a node, so the paths above each leaf count as well.
  record.note_paths(sorted(with_enclosing("/".join(path) for path in by_path)))
  record.check("in the tree", 2, kind="node")
  # A norm is known by the names of several leaves, so all leaves are needed first.
  norms = _norms(by_path)
  dtypes: list[DType | None] = []
  for path, x in zip(paths, leaves, strict=True):
    if path is None:
      dtypes.append(None)
    else:
      # The parent of a leaf is the node that may be a norm.
      default = FLOAT32 if path[:-1] in norms else base.compute_dtype
      dtypes.append(_dtype(x, path, config.rules, default))
  return cast_leaves(params, dtypes, f"{_WHERE}(params)")


def _refuse_models(params: object) -> None:
  """Raises if `params` is a model or a training state instead of a tree of parameters."""
  # An `nnx.State` is a mapping, and a tree of parameters.
  if is_of_nnx(params) and not isinstance(params, Mapping):
    got = f"the NNX module {type(params).__name__}"
    fix = "Pass nnx.state(model), or write mpjax.nnx.convert(view, *inputs)."
  # Linen and Haiku have both methods.
  elif hasattr(params, "apply") and hasattr(params, "init"):
    got = f"a model ({type(params).__name__})"
    fix = "Pass its variables, or write with_policy(model, policy).convert(variables, *inputs)."
  elif states := [x for x in jax.tree.leaves(params, is_leaf=_is_state) if _is_state(x)]:
    got = f"a training state: there is a {type(states[0]).__name__} in it"
    fix = "Pass state.params: the optimizer's state is not for inference."
  else:
    return
  raise MpjaxTypeError(f"{_WHERE}(params)", expected="a tree of parameters", got=got, fix=fix)


def _is_state(x: object) -> bool:
  """Whether a node is the state of an optimizer, or a training state that holds one."""
  # `flax.training.TrainState` is known by its field. A dict may have such a key.
  if hasattr(x, "opt_state") and not isinstance(x, Mapping):
    return True
  # Two classes of optax are in trees of parameters: `MaskedNode`, which has no fields, and
  # `LookaheadParams`.
  is_in_params = getattr(x, "_fields", None) == () or differentiated(x) is not x
  return type(x).__module__.partition(".")[0] in ("mpjax", "optax") and not is_in_params


def _norms(leaves: Mapping[Path, Leaf]) -> set[Path]:
  """Returns the paths of the nodes that seem to be norms, by the leaves right inside them."""
  ranks: dict[Path, dict[str, int]] = {}
  for path, x in leaves.items():
    # A tree that is one array has no names.
    if path and is_floating(x):
      ranks.setdefault(path[:-1], {})[path[-1]] = x.ndim
  # The root has no name, but its arrays may be those of a norm.
  return {node for node, of_node in ranks.items() if _is_norm("".join(node[-1:]), of_node)}


def _is_norm(name: str, ranks: Mapping[str, int]) -> bool:
  """Whether a node seems to be a norm, by its name and by the names and ranks of its arrays."""
  names = set(ranks)
  if names & _SCALES and names <= _SCALES | _BESIDE:
    # Ranks do not count: arrays of layers that were scanned over are stacked.
    return True
  # A dense layer has a "weight" of two axes, and a norm one of one axis.
  are_vectors = max(ranks.values()) <= 1
  if "norm" in name.lower():
    return are_vectors or names <= _SCALES | _BESIDE | {"weight"}
  return are_vectors and len(names) > 1 and names <= _BESIDE | {"weight"}


def _dtype(x: Leaf, path: Path, rules: Sequence[Rule], default: DType) -> DType | None:
  """Returns the dtype to which a leaf is cast, `default` without a rule; None leaves it."""
  # From the leaf outwards: the rule of the innermost node wins.
  for n in range(len(path), -1, -1):
    rule = first_match(rules, None, "/".join(path[:n]))
    if rule is not None:
      return None if rule.policy is None else rule.policy.compute_dtype
  if is_floating(x) and x.dtype.itemsize == 1:
    return None  # It was quantised on purpose, and its scale is elsewhere.
  return default
