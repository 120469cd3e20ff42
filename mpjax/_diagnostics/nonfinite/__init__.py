"""Finding the first value of a function that is not finite."""

from mpjax._diagnostics.nonfinite.find import find_nonfinite
from mpjax._diagnostics.nonfinite.report import NonfiniteReport

__all__ = ["NonfiniteReport", "find_nonfinite"]
