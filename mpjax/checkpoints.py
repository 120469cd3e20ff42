"""Saving a training state in any file format, and restoring it as the target has it.

>>> import jax.numpy as jnp, mpjax
>>> arrays = mpjax.checkpoints.to_arrays({"w": jnp.ones(2)})
"""

from mpjax._io.checkpoints import restore_like, to_arrays

__all__ = ["restore_like", "to_arrays"]
