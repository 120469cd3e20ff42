"""Mixed precision for any JAX function: a dtype for each operation."""

from mpjax._autocast.boundary import Boundary, InDtype, NotTraceable, check_returned
from mpjax._autocast.kernels import low_precision
from mpjax._autocast.scopes import end_of_layer, end_of_policy, region_of
from mpjax._autocast.settings import Settings
from mpjax._autocast.transform import autocast, with_settings

__all__ = [
  "Boundary",
  "InDtype",
  "NotTraceable",
  "Settings",
  "autocast",
  "check_returned",
  "end_of_layer",
  "end_of_policy",
  "low_precision",
  "region_of",
  "with_settings",
]
