"""Tables of NNX's layers and of their state: a new layer is added here."""

from collections.abc import Mapping

from flax import nnx

from mpjax._core.types import Leaf
from mpjax._policy.layers import Layers, StateKind

STATE: Mapping[type[nnx.Variable[Leaf]], StateKind] = {
  nnx.Param: StateKind(is_parameter=True, dtype_rule="param_dtype"),
  # Zeros, whose gradient is that of the activation to which they are added.
  nnx.Perturbation: StateKind(is_parameter=True),
}
"""Variables by class; the first class that fits counts. Others are inputs, as arguments are.

A variable that a call creates keeps its dtype, unless it is stored in the `param_dtype`. NNX has no
`init` that could be computed under a policy, so that no row is "computed"."""

LAYERS = Layers(
  rounded=(
    *(nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.Embed),
    *(nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm),
    *(nnx.MultiHeadAttention, nnx.LoRA, nnx.LoRALinear),
  ),
  as_given=(nnx.Dropout,),
  iterates=(nnx.SpectralNorm,),
  tables=(nnx.Embed,),
)

METHODS = ("__call__", "attend")
"""Methods in which the layers of NNX compute; their other methods set them up."""

OUTSIDE = ("sow", "perturb", "initialize_carry")
"""Methods that run without the policy. Two only store values, and the first carry of a cell has the
dtype in which it is stored."""

MODES = ("deterministic", "use_running_average")
"""Flags that `train()` and `eval()` of NNX set."""


def state_kind(variable: object) -> StateKind:
  """Returns how a variable is treated; other objects are inputs."""
  return next((kind for cls, kind in STATE.items() if isinstance(variable, cls)), StateKind())
