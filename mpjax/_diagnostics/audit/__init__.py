"""`audit`: which precision each operation of a function has, and what brought float32 in."""

from mpjax._diagnostics.audit.transform import AuditReport, audit

__all__ = ["AuditReport", "audit"]
