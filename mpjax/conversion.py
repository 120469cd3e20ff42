"""`convert`: parameters for inference, in half; `conversion_report`: what that saved, and cost."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mpjax._errors import MpjaxValueError, listed, message
from mpjax._jaxpr import tree_bytes
from mpjax._named_arrays import path_text
from mpjax._policy import Policy, PolicyLike
from mpjax._rules import Rule, first_match, parse_rules, parse_unmatched, unmatched_error
from mpjax._storage import cast_leaves, ties
from mpjax._tree import is_floating, tree_differences
from mpjax._types import PyTree

_WHERE = "mpjax.convert"

_Place: TypeAlias = tuple[str, ...]
"""The names on the way to a leaf or a node."""

_NAMES_IN_NORMS = frozenset(
  {"scale", "bias", "weight", "gamma", "beta", "offset", "mean", "var", "moving_mean", "moving_var"}
)
"""What Flax, Haiku, Equinox and older code call the arrays of a norm."""


def convert(
  params: PyTree, policy: PolicyLike, rules: Iterable[Rule] = (), *, unmatched: str = "raise"
) -> PyTree:
  """Returns parameters for inference: floating leaves in the compute dtype of a policy.

  The parameters of norms stay in float32. A tree does not say which they are: a node counts as a
  norm if it holds nothing but vectors and its name has "norm" in it or theirs are a norm's ("scale"
  and "bias", "gamma" and "beta", …). `with_policy(model, policy).convert(variables, *args)` knows
  better, since it looks at what the model does with each leaf.

  With "float32" it is the way back: half parameters as a float32 checkpoint.

  MXNet's `convert_model` is where excluded names and exceptions come from.

  Args:
    params: any tree of arrays, abstract ones too. Of a dict with "params" in it, the variables
      of a Linen model, the other collections stay as they are.
    policy: a `mpjax.Policy` or its string; only its `compute_dtype` counts.
    rules: `Rule("float32", path="decoder/head")` for a leaf, or a node and all in it; the first
      that matches wins, the innermost place counts, and both go before what is said of norms.
      `Rule(None, path=...)` leaves what is there as it is. Only rules with a path.
    unmatched: "raise", "warn" or "ignore": what to do about a rule that matches nothing.

  Returns:
    A tree of the same structure. Leaves without a floating dtype are the same objects, an array
    that is at two places (tied weights) stays one, in the wider dtype if they differ, and all
    keep their shardings.

  Raises:
    MpjaxTypeError: rules of the wrong type.
    MpjaxValueError: an unknown policy; a rule without a path; a finite value that the new dtype
      cannot hold; a value of `unmatched` that is not listed.
    UnmatchedRuleError: a rule matches nothing in the tree (with `unmatched="raise"`).

  >>> import jax.numpy as jnp, mpjax
  >>> params = {"layer": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
  ...           "norm": {"scale": jnp.ones(2)}, "head": {"kernel": jnp.ones((2, 1))}}
  >>> half = mpjax.convert(params, "bfloat16", [mpjax.Rule("float32", path="head")])
  >>> half["layer"]["kernel"].dtype, half["norm"]["scale"].dtype, half["head"]["kernel"].dtype
  (dtype(bfloat16), dtype('float32'), dtype('float32'))
  """
  base = Policy.parse(policy)
  given = _parse_rules(rules)
  paths = jax.tree_util.tree_leaves_with_path(params)
  places = [_names(path) for path, _ in paths]
  if isinstance(params, Mapping) and "params" in params:
    places = [place[1:] if place[0] == "params" else None for place in places]
  ours = {place: x for place, (_, x) in zip(places, paths, strict=True) if place is not None}
  _check_rules(given, ours, unmatched)
  norms = _norms(ours)
  dtypes = [None if p is None else _dtype(base, given, p, p[:-1] in norms) for p in places]
  return cast_leaves(params, dtypes, f"{_WHERE}(params)")


def _parse_rules(rules: Any) -> tuple[Rule, ...]:
  given = parse_rules(rules, f"{_WHERE}(rules=...)")
  wrong = [repr(rule) for rule in given if rule.path is None]
  if wrong:
    raise MpjaxValueError(
      message(
        f"{_WHERE}(rules=...)",
        expected="rules with path=",
        got=listed(wrong),
        fix="A tree knows no modules: write mpjax.linen.with_policy(model, policy, rules)"
        ".convert(variables, *args), or mpjax.nnx.convert.",
      )
    )
  return given


def _names(path: Sequence[Any]) -> _Place:
  """Returns the names on the way to a leaf, but for those of what a box holds.

  `nnx.State` holds variables and a partitioned Linen model boxes, whose array is an attribute.
  """
  names = tuple(path_text((key,)) for key in path)
  boxed = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value"
  return names[:-1] if boxed else names


def _norms(leaves: Mapping[_Place, Any]) -> set[_Place]:
  """Returns the places of the nodes that seem to be norms, by the leaves right inside them."""
  inside: dict[_Place, dict[str, int]] = {}
  for place, x in leaves.items():
    if len(place) > 1 and is_floating(x):
      inside.setdefault(place[:-1], {})[place[-1]] = x.ndim
  return {node for node, ranks in inside.items() if _is_norm(node[-1], ranks)}


def _is_norm(name: str, ranks: Mapping[str, int]) -> bool:
  """Whether a node is a norm, by its name and by the names and ranks of its arrays."""
  if "scale" in ranks and set(ranks) <= {"scale", "bias"}:
    return True  # Of any rank: layers that were scanned over are stacked.
  known = "norm" in name.lower() or (len(ranks) > 1 and set(ranks) <= _NAMES_IN_NORMS)
  return known and max(ranks.values()) <= 1


def _dtype(
  base: Policy, rules: Sequence[Rule], place: _Place, in_norm: bool
) -> np.dtype[Any] | None:
  """Returns what a leaf becomes; None leaves it as it is."""
  for n in range(len(place), -1, -1):
    rule = first_match(rules, None, "/".join(place[:n]))
    if rule is not None:
      return None if rule.policy is None else rule.policy.compute_dtype
  return np.dtype("float32") if in_norm else base.compute_dtype


def _check_rules(rules: Sequence[Rule], leaves: Iterable[_Place], unmatched: str) -> None:
  if parse_unmatched(unmatched, _WHERE) == "ignore":
    return
  places = sorted({"/".join(place[:n]) for place in leaves for n in range(len(place) + 1)})
  for rule in rules:
    if not any(first_match((rule,), None, place) for place in places):
      error = unmatched_error(rule, places, (), kind="node", origin="in the tree")
      if unmatched == "raise":
        raise error
      warnings.warn(str(error), stacklevel=3)


class LeafReport(NamedTuple):
  """What became of one leaf.

  Args:
    path: where it is, its names joined by "/".
    shape: of the array.
    before: its dtype before.
    after: its dtype after.
    error: the largest difference, divided by the largest absolute value before.
    lost: how many numbers that were not 0 are 0 now.

  >>> import jax.numpy as jnp, mpjax
  >>> before = {"w": jnp.array([1.0, 1e-9])}
  >>> leaf, = mpjax.conversion_report(before, mpjax.convert(before, "float16")).leaves
  >>> leaf.path, leaf.shape, leaf.before, leaf.after, leaf.lost
  ('w', (2,), dtype('float32'), dtype('float16'), 1)
  """

  path: str
  shape: tuple[int, ...]
  before: np.dtype[Any]
  after: np.dtype[Any]
  error: float
  lost: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionReport:
  """What a conversion saved, and what it changed; it prints as a table.

  Args:
    leaves: the floating leaves whose dtype changed.
    bytes_before: of all arrays, each counted once.
    bytes_after: the same after.
    output_error: the largest difference in what the function returns, divided by the largest
      absolute value in it; inf if something finite is not; None without a function.

  >>> import jax.numpy as jnp, mpjax
  >>> before = {"w": jnp.ones(3)}
  >>> report = mpjax.conversion_report(before, mpjax.convert(before, "float16"))
  >>> report.bytes_before, report.bytes_after, report.output_error
  (12, 6, None)
  """

  leaves: tuple[LeafReport, ...]
  bytes_before: int
  bytes_after: int
  output_error: float | None

  @property
  def bytes_saved(self) -> int:
    """The difference."""
    return self.bytes_before - self.bytes_after

  def __rich__(self) -> Table:
    found = Table(title=self._summary(), title_justify="left")
    for heading in ("leaf", "shape", "dtype", "rounding error", "lost to 0"):
      found.add_column(heading, justify="left" if heading in ("leaf", "shape") else "right")
    for leaf in self.leaves:
      dtypes = f"{leaf.before} → {leaf.after}"
      shape = "x".join(map(str, leaf.shape)) or "scalar"
      found.add_row(leaf.path, shape, dtypes, f"{leaf.error:.1e}", f"{leaf.lost:,}")
    return found

  def __str__(self) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
      console.print(self)
    return capture.get()

  def _summary(self) -> str:
    saved = self.bytes_saved / max(self.bytes_before, 1)
    text = f"{self.bytes_before:,} bytes → {self.bytes_after:,} ({saved:.1%} saved)"
    return text if self.output_error is None else f"{text}, output error {self.output_error:.1e}"


def conversion_report(
  before: PyTree, after: PyTree, fn: Callable[..., Any] | None = None, *args: Any
) -> ConversionReport:
  """Compares parameters with what they were converted to: bytes, rounding, and the outputs.

  Args:
    before: the tree that was converted.
    after: what came of it, a tree of the same structure.
    fn: what the outputs are compared of: `fn(before, *args)` and `fn(after, *args)`.
    args: further arguments of `fn`.

  Returns:
    A frozen report; `print` shows it as a table.

  Raises:
    MpjaxValueError: the trees differ in more than dtypes.

  >>> import jax.numpy as jnp, mpjax
  >>> params = {"kernel": jnp.linspace(0, 1, 6).reshape(3, 2)}
  >>> half = mpjax.convert(params, "bfloat16")
  >>> report = mpjax.conversion_report(params, half, lambda p, x: x @ p["kernel"], jnp.ones((1, 3)))
  >>> report.bytes_saved, 0 < report.output_error < 2**-8
  (12, True)
  """
  where = "mpjax.conversion_report(before, after)"
  problems = tree_differences(before, after, dtypes=False)
  if problems:
    raise MpjaxValueError(
      message(
        where,
        expected="two trees that differ in dtypes only",
        got=listed(problems),
        fix="Pass what was converted, and what the conversion returned.",
      )
    )
  paths = jax.tree_util.tree_leaves_with_path(before)
  pairs = zip(paths, jax.tree.leaves(after), strict=True)
  changed = [(path, x, y) for (path, x), y in pairs if is_floating(x) and x.dtype != y.dtype]
  return ConversionReport(
    leaves=tuple(_leaf_report("/".join(_names(path)), x, y) for path, x, y in changed),
    bytes_before=_bytes(before),
    bytes_after=_bytes(after),
    output_error=None if fn is None else _largest_error(fn(before, *args), fn(after, *args)),
  )


def _leaf_report(path: str, x: Any, y: Any) -> LeafReport:
  lost = int(jnp.sum((x != 0) & (y == 0)))
  return LeafReport(path, tuple(x.shape), x.dtype, y.dtype, _error(x, y), lost)


def _error(x: Any, y: Any) -> float:
  """Returns the largest difference, divided by the largest absolute value of `x`."""
  wide = max(x.dtype, y.dtype, np.dtype("float32"), key=lambda dtype: dtype.itemsize)
  x, y = jnp.asarray(x, wide), jnp.asarray(y, wide)
  same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
  largest = jnp.max(jnp.where(same, 0, jnp.abs(x - y)), initial=0)
  size = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)
  found = float(jnp.where(largest == 0, 0, largest / size))
  return math.inf if math.isnan(found) else found


def _largest_error(before: PyTree, after: PyTree) -> float:
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  return max((_error(x, y) for x, y in pairs if is_floating(x)), default=0.0)


def _bytes(tree: PyTree) -> int:
  """Returns the bytes of a tree; an array at two places takes them once."""
  leaves = jax.tree.leaves(tree)
  return tree_bytes([leaves[same[0]] for same in ties(leaves)])
