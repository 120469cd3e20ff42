"""Mixed precision for any JAX function, by lists of operations."""

from mpjax._autocast._transform import autocast, float32_operations

__all__ = ["autocast", "float32_operations"]
