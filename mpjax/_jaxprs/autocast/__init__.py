"""Mixed precision for any JAX function, by lists of operations."""

from mpjax._jaxprs.autocast.marks import at_rest, leaving, mark, region_of
from mpjax._jaxprs.autocast.traceable import NotTraceable, traceable, tree_leaves
from mpjax._jaxprs.autocast.traced import Interface, with_settings
from mpjax._jaxprs.autocast.transform import autocast
from mpjax._jaxprs.autocast.values import Settings

__all__ = [
  "Interface",
  "NotTraceable",
  "Settings",
  "at_rest",
  "autocast",
  "leaving",
  "mark",
  "region_of",
  "traceable",
  "tree_leaves",
  "with_settings",
]
