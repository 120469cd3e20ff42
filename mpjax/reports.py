"""The results of `audit`, `compare`, `find_nonfinite`, `ranges`, `sensitivity` and `tune`.

>>> import jax.numpy as jnp, mpjax
>>> isinstance(mpjax.audit(jnp.sin)(1.0), mpjax.reports.AuditReport)
True
"""

from mpjax._diagnose.audit.report import AuditReport
from mpjax._diagnose.compare.report import CompareReport
from mpjax._diagnose.nonfinite.report import NonfiniteReport
from mpjax._diagnose.ranges.report import GroupRanges, RangesReport
from mpjax._diagnose.sensitivity.report import SensitivityReport
from mpjax._diagnose.tune.report import TuneReport

__all__ = ["AuditReport", "CompareReport", "GroupRanges", "NonfiniteReport", "RangesReport"]
__all__ += ["SensitivityReport", "TuneReport"]
