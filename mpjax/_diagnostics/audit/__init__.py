"""`audit`: which precision each operation of a function has, and what brought float32 in."""

from mpjax._diagnostics.audit.transform import Audit, audit

__all__ = ["Audit", "audit"]
