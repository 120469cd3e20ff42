"""Mixed precision for any JAX function, by lists of operations."""

from mpjax._autocast.boundary import Boundary, InDtype, NotTraceable, check_returned
from mpjax._autocast.scopes import at_rest, leaving, region_of
from mpjax._autocast.transform import autocast, with_settings
from mpjax._autocast.values import Settings

__all__ = [
  "Boundary",
  "InDtype",
  "NotTraceable",
  "Settings",
  "at_rest",
  "autocast",
  "check_returned",
  "leaving",
  "region_of",
  "with_settings",
]
