"""Saving a training state in any file format, and restoring it as the target has it.

>>> import jax.numpy as jnp, mpjax
>>> arrays = mpjax.checkpoints.to_arrays({"w": jnp.ones(2)})
"""

from mpjax._io.arrays import to_arrays
from mpjax._io.restore import restore_like

__all__ = ["restore_like", "to_arrays"]
