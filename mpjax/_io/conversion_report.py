"""`conversion_report`: what the conversion of parameters saved, and what it cost."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, listed
from mpjax._core.frameworks import framework_of
from mpjax._core.paths import check_leaves, is_key, leaf_paths, path_text
from mpjax._core.trees import is_array_like, is_floating, tree_differences
from mpjax._core.types import DType, Function, Leaf, PyTree
from mpjax._jaxprs.count import tree_bytes
from mpjax._jaxprs.used_dtypes import ties


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
  before: DType
  after: DType
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
      left = heading in ("leaf", "shape")
      found.add_column(heading, justify="left" if left else "right", overflow="fold")
    for leaf in self.leaves:
      dtypes = f"{leaf.before} → {leaf.after}"
      shape = "x".join(map(str, leaf.shape)) or "scalar"
      found.add_row(leaf.path, shape, dtypes, f"{leaf.error:.1e}", f"{leaf.lost:,}")
    return found

  def __str__(self) -> str:
    console = Console(width=100, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
      console.print(self)
    return capture.get()

  def _summary(self) -> str:
    saved = self.bytes_saved / max(self.bytes_before, 1)
    text = f"{self.bytes_before:,} bytes → {self.bytes_after:,} ({saved:.1%} saved)"
    return text if self.output_error is None else f"{text}, output error {self.output_error:.1e}"


def conversion_report(
  before: PyTree, after: PyTree, fn: Function | None = None, *args: PyTree
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
    MpjaxValueError: the trees differ in more than dtypes; `fn` returns nothing to compare.
    MpjaxTypeError: `fn` is no function; an array is traced or abstract; a Linen model instead
      of its parameters.

  >>> import jax.numpy as jnp, mpjax
  >>> params = {"kernel": jnp.linspace(0, 1, 6).reshape(3, 2)}
  >>> half = mpjax.convert(params, "bfloat16")
  >>> report = mpjax.conversion_report(params, half, lambda p, x: x @ p["kernel"], jnp.ones((1, 3)))
  >>> report.bytes_saved, 0 < report.output_error < 2**-8
  (12, True)
  """
  _check_report(before, after, fn)
  leaves = zip(leaf_paths(before), jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  changed = [(p, x, y) for p, x, y in leaves if is_floating(x) and x.dtype != y.dtype]
  return ConversionReport(
    leaves=tuple(_leaf_report("/".join(place), x, y) for place, x, y in changed),
    bytes_before=_bytes(before),
    bytes_after=_bytes(after),
    output_error=None if fn is None else _largest_error(fn(before, *args), fn(after, *args)),
  )


def _check_report(before: PyTree, after: PyTree, fn: object) -> None:
  where = "mpjax.conversion_report(before, after)"
  if framework_of(before) == "Linen":
    raise MpjaxTypeError(
      where,
      expected="the parameters of a model, before and after a conversion",
      got=f"a model of Linen ({type(before).__name__}), which holds none",
      fix="Pass variables, and what model.convert(variables, x) returned.",
    )
  problems = tree_differences(before, after, dtypes=False)
  if problems:
    raise MpjaxValueError(
      where,
      expected="two trees that differ in dtypes only",
      got=listed(problems),
      fix="Pass what was converted, and what the conversion returned.",
    )
  for tree in (before, after):
    arrays = {path_text(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}
    kept = {path: x for path, x in arrays.items() if hasattr(x, "dtype")}
    check_leaves(kept, where, abstract=False)
  if fn is not None and not callable(fn):
    raise MpjaxTypeError(
      "mpjax.conversion_report(fn=...)",
      expected="a function of a tree and of the arguments after it",
      got=repr(type(fn)),
      fix="Write conversion_report(before, after, model.apply, x).",
    )


def _leaf_report(path: str, x: Leaf, y: Leaf) -> LeafReport:
  lost = int(jnp.sum((x != 0) & (y == 0)))
  return LeafReport(path, tuple(x.shape), x.dtype, y.dtype, _error(x, y), lost)


def _error(x: Leaf, y: Leaf) -> float:
  """Returns the largest difference, divided by the largest absolute value of `x`."""
  wide = np.complex128 if jnp.iscomplexobj(x) or jnp.iscomplexobj(y) else np.float64
  x, y = (np.asarray(each).astype(wide) for each in (x, y))
  same = (x == y) | (np.isnan(x) & np.isnan(y))
  if same.all():
    return 0.0
  with np.errstate(divide="ignore", invalid="ignore"):
    found = np.max(np.abs(x - y)[~same]) / np.max(np.abs(x)[np.isfinite(x)], initial=0)
  return math.inf if np.isnan(found) else float(found)


def _largest_error(before: PyTree, after: PyTree) -> float:
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  errors = [_error(x, y) for x, y in pairs if _is_number(x) and _is_number(y)]
  if errors:
    return max(errors)
  raise MpjaxValueError(
    "mpjax.conversion_report(fn=...)",
    expected="a function that returns arrays or numbers",
    got=f"one that returns {jax.tree.structure(before)}",
    fix="Return what is to be compared, such as the logits.",
  )


def _is_number(x: Leaf) -> bool:
  return is_array_like(x) and not is_key(jnp.result_type(x))


def _bytes(tree: PyTree) -> int:
  """Returns the bytes of a tree; an array at two paths takes them once."""
  leaves = jax.tree.leaves(tree)
  return tree_bytes([leaves[same[0]] for same in ties(leaves)])
