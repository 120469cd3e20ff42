"""The report of `mpjax.ranges`: exponents by module, as text, HTML, JSON and a picture."""

import collections
import dataclasses
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from mpjax._core.types import NumpyArray
from mpjax._diagnose.report import Report, Section, amount, percent, power

RangeKind: TypeAlias = Literal[
  "activations", "gradients", "float32", "parameters", "optimizer state", "updates"
]
"""Kinds of numbers. "gradients" are results of the backward pass, "float32" stays in float32."""

KINDS: Sequence[RangeKind] = (
  "activations",
  "gradients",
  "parameters",
  "optimizer state",
  "updates",
)

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes for which losses are counted."""

HEADROOM = 8.0
"""How many times the largest number in float16 may grow before it overflows. It is larger in other
batches, and as weights grow. Each doubling takes one of the 40 exponents from small numbers."""

LARGEST = 65504.0
"""The largest number of float16."""

_CURE = (
  "Parameters in 16 bits: store them in float32, keep float32 masters (tx = "
  "mpjax.master_weights(tx)), or round stochastically (mpjax.apply_updates(..., "
  'rounding="stochastic", key=key)). In float32: the updates are too small for it.'
)


@dataclasses.dataclass(eq=False)
class GroupRanges:
  """The numbers of one kind in one module, or of one leaf of the arguments.

  Args:
    kind: "activations", "gradients", "parameters", "optimizer state" or "updates"; "float32" for
      what a policy leaves in float32.
    path: the module (named scopes joined by "/"), or the path of the leaf.
    exponents: how many finite nonzero numbers have which exponent, `floor(log2(|x|))`.
    zero: how many are zero.
    inf: how many are inf or -inf.
    nan: how many are NaN.
    lost: for each dtype, how many finite numbers become "zero" or "subnormal", or "overflow" there.
    lost_updates: of updates, how many are not zero and change nothing.
    largest: the largest finite magnitude.
    first_nonfinite: how many arrays of results were counted before the first one here with an inf
      or NaN, in the order of execution; 0 for an argument, None where all numbers are finite.

  >>> import jax.numpy as jnp, mpjax
  >>> x = jnp.zeros(16).at[:3].set([1.0, 1.5, 2.0**-30])
  >>> report = mpjax.ranges(jnp.dot)(jnp.eye(16), x)
  >>> group = report.of("activations")[0]
  >>> group.exponents, group.zero, group.lost["float16"]["zero"]
  (Counter({0: 2, -30: 1}), 13, 1)
  """

  kind: RangeKind
  path: str
  exponents: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
  zero: int = 0
  inf: int = 0
  nan: int = 0
  lost: dict[str, collections.Counter[str]] = dataclasses.field(
    default_factory=lambda: {name: collections.Counter() for name in FORMATS}
  )
  lost_updates: int = 0
  largest: float = 0.0
  first_nonfinite: int | None = None

  @property
  def nonzero(self) -> int:
    """How many are finite and not zero."""
    return sum(self.exponents.values())

  @property
  def total(self) -> int:
    """How many numbers there are."""
    return self.nonzero + self.zero + self.inf + self.nan

  def lost_share(self, dtype: str) -> float:
    """Returns the share of the finite nonzero numbers that become 0 or overflow in a dtype.

    Args:
      dtype: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".

    Returns:
      From 0 to 1; NaN where there is no such number.
    """
    # Subnormal numbers lose bits, but remain different from 0.
    fates = self.lost[dtype]
    return _share(fates["zero"] + fates["overflow"], self.nonzero)


class Rescaled(NamedTuple):
  """Gradients at a smaller loss scale than the one in use, at which some overflowed.

  Fields:
    loss_scale: the smaller scale.
    gradients: the gradients at that scale, by module.
  """

  loss_scale: float
  gradients: tuple[GroupRanges, ...]


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class RangesReport(Report):
  """The counts of the exponents of a function, see `mpjax.ranges`.

  Args:
    name: the name of the function.
    groups: the counts, a row for each kind and module.
    loss_scale_in_use: the scale of `mpjax.scaled`, which the gradients carry; None without one.
    rescaled: if gradients overflowed at that scale, the gradients at a smaller one, from which
      `loss_scale` is computed.

  >>> import jax.numpy as jnp, mpjax
  >>> x = jnp.tile(jnp.asarray([1.0, 2.0**-30]), 8)
  >>> report = mpjax.ranges(lambda w, x: jnp.sum(x * (w @ x)))(jnp.eye(16), x)
  >>> report.loss_scale, report.lost_gradients(1.0)
  (4096.0, 0.5)
  """

  name: str
  groups: tuple[GroupRanges, ...]
  loss_scale_in_use: float | None
  rescaled: Rescaled | None = None

  def of(self, kind: RangeKind) -> tuple[GroupRanges, ...]:
    """Returns the groups of one kind that are not empty, in the order of the function.

    Args:
      kind: one of the kinds of `GroupRanges`.

    Returns:
      A tuple.
    """
    return tuple(group for group in self.groups if group.kind == kind and group.total)

  @property
  def lost_updates(self) -> float:
    """The share of the nonzero updates that change nothing; NaN where nothing is updated."""
    updates = self.of("updates")
    return _share(sum(g.lost_updates for g in updates), sum(g.nonzero for g in updates))

  @property
  def loss_scale(self) -> float | None:
    """The loss scale that would serve float16, a power of two from 1 to 2^24.

    The largest gradient, times 8 for worse steps to come, stays below 65504. None where there is
    no gradient but 0.
    """
    # The logarithm of 0 does not exist.
    if not self._largest:
      return None
    # Gradients are unscaled at 1, and `DynamicLossScale` ends at 2^24.
    return 2.0 ** min(max(math.floor(math.log2(LARGEST / HEADROOM / self._largest)), 0), 24)

  @property
  def _measured(self) -> Rescaled:
    """The gradients from which `loss_scale` is computed, and the scale that they carry."""
    if self.rescaled is not None:
      return self.rescaled
    return Rescaled(self.loss_scale_in_use or 1.0, self.of("gradients"))

  @property
  def _largest(self) -> float:
    """The largest gradient, without the loss scale."""
    scale, gradients = self._measured
    return max((g.largest for g in gradients), default=0.0) / scale

  def lost_gradients(self, loss_scale: float) -> float:
    """Returns the share of the nonzero gradients below 2**-25, or from 2**16 on, at a loss scale.

    Args:
      loss_scale: a power of two.

    Returns:
      From 0 to 1; NaN where all gradients are zero.
    """
    scale, gradients = self._measured
    # Another scale shifts all exponents. A number below half of 2^-24, the smallest subnormal,
    # becomes 0.
    moved = math.log2(loss_scale / scale)
    lost = sum(n for g in gradients for e, n in g.exponents.items() if not -25 <= e + moved < 16)
    return _share(lost, sum(g.nonzero for g in gradients))

  def plot(self, path: str | None = None) -> Any:
    """Draws a heat map of exponents by module, with the range of float16.

    Args:
      path: a file to write, such as "ranges.png"; None writes none.

    Returns:
      The figure of matplotlib.

    Raises:
      ImportError: matplotlib is not installed.
    """
    # Matplotlib is optional and slow to import.
    plt = importlib.import_module("matplotlib.pyplot")
    rows = [(kind, group) for kind in KINDS for group in self.of(kind)]
    rows = rows[:: len(rows) // 80 + 1]  # As many as can be read, evenly from all.
    low = min([e for _, group in rows for e in group.exponents] + [-26])
    high = max([e for _, group in rows for e in group.exponents] + [16]) + 1
    # NaN leaves the cell of an exponent without numbers white.
    shares: NumpyArray = np.full((len(rows), high - low), np.nan)
    for share, (_, group) in zip(shares, rows, strict=True):
      for exponent, count in group.exponents.items():
        share[exponent - low] = count / group.nonzero
    size = (10, 1.5 + 0.22 * len(rows))
    figure, axis = plt.subplots(figsize=size, layout="constrained", facecolor="white")
    # Shares span several orders of magnitude.
    norm = importlib.import_module("matplotlib.colors").LogNorm(1e-5, 1)
    # A mesh of n columns has n + 1 edges. Rows are centered at their number, as the labels are.
    edges = np.arange(low, high + 1), np.arange(len(rows) + 1) - 0.5
    image = axis.pcolormesh(*edges, shares, norm=norm, cmap="YlGnBu", edgecolors="white")
    for exponent, what in zip((-24, -14, 16), ("smallest", "smallest normal", "end"), strict=True):
      axis.axvline(exponent, color="C3", linewidth=1.1)
      axis.text(exponent, -0.6, f"float16: {what}", fontsize=7, color="C3", rotation=20)
    labels = [f"{kind}: {(group.path or '(no scope)')[-38:]}" for kind, group in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=7.5)
    # The first row of the report is at the top.
    axis.invert_yaxis()
    axis.set_xlabel("exponent of |x|: a number in column e is from $2^e$ to $2^{e+1}$")
    figure.colorbar(image, label="share of the row's nonzero numbers")
    figure.suptitle(f"Ranges of {self.name}", x=0.01, ha="left", weight="bold")
    if path is not None:
      figure.savefig(path, dpi=150)
    # A notebook would show an open figure twice: at the end of the cell, and as its result.
    plt.close(figure)
    return figure

  def sections(self) -> list[Section]:
    # The parameters that lose most are first.
    lossy = [(_share(g.lost_updates, g.nonzero), g) for g in self.of("updates") if g.lost_updates]
    lossy.sort(key=lambda each: -each[0])
    counts = ((g.path, g.total, g.zero, g.lost_updates, share) for share, g in lossy)
    updates = [(path, *map(amount, some), percent(share)) for path, *some, share in counts]
    columns = "parameter, updates, zero, lost, of nonzero"
    cure = [_CURE] if updates else []
    lost = Section.cut("Updates that change nothing", columns, updates, cure)
    return [self._headline(), *self._nonfinite(), lost, *map(self._losses, KINDS)]

  def _nonfinite(self) -> Iterator[Section]:
    """Yields the groups that are not finite, in the order of their first inf or NaN, and advice."""
    # The first module that is not finite is the likely cause of the others.
    groups = [(g.first_nonfinite or 0, g) for g in self.groups if g.inf or g.nan]
    # The sort is stable, so arguments keep their order at 0.
    groups.sort(key=lambda each: each[0])
    rows = [(g.path or "(no scope)", g.kind, str(g.inf), str(g.nan)) for _, g in groups]
    columns = "module, numbers, inf, NaN"
    yield Section.cut("Not finite, in the order of execution", columns, rows)
    if rows:
      cause = f"mpjax.find_nonfinite({self.name})(*args) says where it begins, casts included."
      yield Section(lines=(cause,))

  def _headline(self) -> Section:
    lines: list[str] = []
    # NaN means that the function updates nothing, so there is no line.
    if self.lost_updates == 0:
      lines.append("No update rounds away.")
    elif not math.isnan(self.lost_updates):
      lines.append(
        f"{percent(self.lost_updates)} of the updates change nothing: they round away when they "
        "are added to the parameters as these are stored."
      )
    if (scale := self.loss_scale) is not None:
      # The scale has a lower limit of 1, at which a gradient may still overflow.
      room = f"stays {LARGEST / (self._largest * scale):.0f} times below {LARGEST:.0f}"
      if self._largest * scale > LARGEST:
        room = f"overflows: float16 ends at {LARGEST:.0f}"
      others = f"without a loss scale {percent(self.lost_gradients(1.0))}"
      if (used := self.loss_scale_in_use) is not None:
        others += f", with {power(used)}, the one in use, {percent(self.lost_gradients(used))}"
      ends = ", where mpjax.DynamicLossScale ends" if scale == 2.0**24 else ""
      lines.append(
        f"Loss scale for float16: {power(scale)}{ends}. The largest gradient, {self._largest:.3g}, "
        f"{room}, and {percent(self.lost_gradients(scale))} of the gradients are lost; {others}."
      )
    elif self._measured.gradients:
      lines.append("No loss scale for float16 is proposed: every gradient is 0, inf or NaN.")
    # Numbers that stay in float32 lose nothing, so they have no table.
    stay = sum(g.total for g in self.of("float32"))
    lines.append(
      f"{amount(sum(g.total for g in self.groups) - stay)} numbers were counted; {amount(stay)} "
      "others, such as those of softmax, masks and the loss, stay in float32 under a policy."
    )
    return Section(title=f"Ranges of {self.name}", lines=tuple(lines))

  def _losses(self, kind: RangeKind) -> Section:
    """Returns the groups that lose something in float16 or bfloat16: in 8 bits all lose much."""
    # Rows without losses in 16 bits would hide the rows with losses.
    lossy = [g for g in self.of(kind) if g.lost_share("float16") + g.lost_share("bfloat16") > 0]
    rows = [
      (
        *(g.path or "(no scope)", amount(g.total), percent(_share(g.zero, g.total))),
        f"{min(g.exponents)}…{max(g.exponents)}",
        *(percent(g.lost_share(name)) for name in FORMATS),
      )
      for g in sorted(lossy, key=lambda g: -g.lost_share("float16"))
    ]
    # State and parameters are leaves of the arguments.
    what = "module" if kind in ("activations", "gradients") else "leaf"
    names = ", ".join(name.removeprefix("float8_")[:8] for name in FORMATS)
    title = f"{kind.capitalize()} by {what}: exponents, and the share that becomes 0 or overflows"
    return Section.cut(title, f"{what}, values, zero, 2^, {names}", rows)


def _share(part: int, total: int) -> float:
  return part / total if total else math.nan
