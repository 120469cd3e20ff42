"""What `audit`, `find_nonfinite`, `ranges` and `tune` return.

>>> import jax.numpy as jnp, mpjax
>>> isinstance(mpjax.audit(jnp.sin)(1.0), mpjax.reports.AuditReport)
True
"""

from mpjax._diagnostics.audit.audit_report import AuditReport
from mpjax._diagnostics.nonfinite.find import NonfiniteReport
from mpjax._diagnostics.ranges.ranges_report import GroupRanges, RangesReport
from mpjax._diagnostics.tune.tune_report import TuneReport

__all__ = ["AuditReport", "GroupRanges", "NonfiniteReport", "RangesReport", "TuneReport"]
