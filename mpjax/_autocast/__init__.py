"""Mixed precision for any JAX function, by lists of operations."""

from mpjax._autocast._marks import leaving, mark, region_of
from mpjax._autocast._traceable import NotTraceable, traceable, tree_leaves
from mpjax._autocast._traced import Interface, with_settings
from mpjax._autocast._transform import autocast
from mpjax._autocast._values import Settings

__all__ = [
  "Interface",
  "NotTraceable",
  "Settings",
  "autocast",
  "leaving",
  "mark",
  "region_of",
  "traceable",
  "tree_leaves",
  "with_settings",
]
