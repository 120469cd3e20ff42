"""What an audit found, as data."""

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from mpjax._core.dtypes import is_float8, is_low_precision
from mpjax._core.rules import Rule
from mpjax._diagnostics.audit.compiled_text import Kernel
from mpjax._diagnostics.audit.costs import Collective, Misfit, OpaqueKernel, RoundTrips
from mpjax._diagnostics.audit.float8 import Float8Matmul
from mpjax._diagnostics.audit.leaks import Leak, OnPurpose
from mpjax._diagnostics.audit.modules import ModuleRow
from mpjax._diagnostics.audit.risks import Risk
from mpjax._jaxprs.locations import Direction


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Findings:
  """What an audit found; `AuditReport` describes the fields."""

  flops: Mapping[tuple[Direction, str], int]
  tf32_flops: int
  operations: Mapping[str, int]
  residual_bytes: Mapping[str, int]
  leaks: tuple[Leak, ...]
  on_purpose: tuple[OnPurpose, ...]
  risks: tuple[Risk, ...]
  modules: tuple[ModuleRow, ...]
  misfits: tuple[Misfit, ...]
  collectives: tuple[Collective, ...]
  round_trips: RoundTrips
  float8: tuple[Float8Matmul, ...]
  opaque: tuple[OpaqueKernel, ...]
  rules: Mapping[Rule, int]
  hidden_rules: Mapping[Rule, int]
  kernels: tuple[Kernel, ...]
  certain: bool
  scaled: bool

  @property
  def half_share(self) -> float:
    """The share of the matmuls' FLOPs in low precision, float8 included; NaN without matmuls."""
    return self._share(lambda dtype: is_low_precision(jnp.dtype(dtype)))

  @property
  def float8_share(self) -> float:
    """The share of the matmuls' FLOPs in float8; NaN without matmuls."""
    return self._share(lambda dtype: is_float8(jnp.dtype(dtype)))

  def _share(self, counts: Callable[[str], bool]) -> float:
    total = sum(self.flops.values())
    found = sum(n for (_, dtype), n in self.flops.items() if counts(dtype))
    return found / total if total else float("nan")
