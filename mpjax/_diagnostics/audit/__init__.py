"""`audit`: which precision each operation of a function has, and what brought float32 in."""

from mpjax._diagnostics.audit.audit_report import AuditReport
from mpjax._diagnostics.audit.transform import audit

__all__ = ["AuditReport", "audit"]
