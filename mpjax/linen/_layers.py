"""What is known of Linen's layers and of their state: the one file to change for another layer."""

from collections.abc import Mapping

import flax.linen as nn

from mpjax._jaxprs.module_calls import Layers
from mpjax._jaxprs.traced_calls import StateKind

STATE: Mapping[str, StateKind] = {
  "params": StateKind(neutral=True, stored="param_dtype"),
  # Zeros, there to be differentiated by: their gradient is that of what they are added to.
  "perturbations": StateKind(neutral=True, stored="computed"),
  "cache": StateKind(stored="computed"),
}
"""Collections by name; one that is not here decides dtypes, and is stored as its code declares."""

ITERATES: tuple[type[nn.Module], ...] = (nn.SpectralNorm,)
"""Layers that start each step from their own last result, which would drift where it is rounded:
their own operations are in float32."""

TABLES: tuple[type[nn.Module], ...] = (nn.Embed,)
"""Layers whose rows are looked up, which a matmul in float8 would move more than others: their own
matmuls, `attend`, stay in the compute dtype."""


RESULTS = Layers(
  rounded=(
    *(nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.ConvLocal, nn.ConvTranspose, nn.Embed),
    *(nn.BatchNorm, nn.GroupNorm, nn.InstanceNorm, nn.LayerNorm, nn.RMSNorm),
    nn.MultiHeadDotProductAttention,
  ),
  as_given=(nn.Dropout,),
)
"""Layers whose results do not stay held in float32, as the state of a recurrent cell does."""


def neutral_collections() -> tuple[str, ...]:
  """Returns the collections that take the dtype of what they meet."""
  return tuple(name for name, kind in STATE.items() if kind.neutral)


def stored_as(stored: str) -> tuple[str, ...]:
  """Returns the collections whose new entries have a dtype that `StateKind.stored` names."""
  return tuple(name for name, kind in STATE.items() if kind.stored == stored)
