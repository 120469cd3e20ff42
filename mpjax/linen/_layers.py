"""Tables of Linen's layers and of their state: a new layer is added here."""

from collections.abc import Mapping

import flax.linen as nn

from mpjax._policy.layers import Layers, StateKind

STATE: Mapping[str, StateKind] = {
  "params": StateKind(is_parameter=True, dtype_rule="param_dtype"),
  # Zeros that are added to an activation. Their gradient is that of the activation.
  "perturbations": StateKind(is_parameter=True, dtype_rule="computed"),
  "cache": StateKind(dtype_rule="computed"),
}
"""Collections by name. Others are inputs, stored in the dtype that their code declares."""

LAYERS = Layers(
  rounded=(
    *(nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.ConvLocal, nn.ConvTranspose, nn.Embed),
    *(nn.BatchNorm, nn.GroupNorm, nn.InstanceNorm, nn.LayerNorm, nn.RMSNorm),
    nn.MultiHeadDotProductAttention,
  ),
  as_given=(nn.Dropout,),
  iterates=(nn.SpectralNorm,),
  tables=(nn.Embed,),
)


def collections_with(**kinds: object) -> tuple[str, ...]:
  """Returns the collections whose `StateKind` has these fields."""
  return tuple(col for col, kind in STATE.items() if kinds.items() <= vars(kind).items())
