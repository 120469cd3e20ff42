"""The results of `audit`, `compare`, `find_nonfinite`, `ranges`, `sensitivity` and `tune`.

>>> import jax.numpy as jnp, mpjax
>>> isinstance(mpjax.audit(jnp.sin)(1.0), mpjax.reports.AuditReport)
True
"""

from mpjax._debug.audit import AuditReport
from mpjax._debug.compare_report import CompareReport
from mpjax._debug.nonfinite_report import NonfiniteReport
from mpjax._debug.ranges_report import GroupRanges, RangesReport
from mpjax._debug.sensitivity_report import SensitivityReport
from mpjax._debug.tune_report import TuneReport

__all__ = ["AuditReport", "CompareReport", "GroupRanges", "NonfiniteReport", "RangesReport"]
__all__ += ["SensitivityReport", "TuneReport"]
