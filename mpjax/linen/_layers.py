"""What is known of Linen's layers and of their state: the one file to change for another layer."""

from collections.abc import Mapping

import flax.linen as nn

from mpjax._autocast.module_calls import Layers, StateKind

STATE: Mapping[str, StateKind] = {
  "params": StateKind(neutral=True, stored="param_dtype"),
  # Zeros, there to be differentiated by: their gradient is that of what they are added to.
  "perturbations": StateKind(neutral=True, stored="computed"),
  "cache": StateKind(stored="computed"),
}
"""Collections by name; one that is not here decides dtypes, and is stored as its code declares."""

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
