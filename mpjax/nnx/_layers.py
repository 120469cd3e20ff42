"""What is known of NNX's layers and of their state: the one file to change for another layer."""

from collections.abc import Mapping

from flax import nnx

from mpjax._autocast.module_calls import Layers, StateKind
from mpjax._core.types import Leaf

STATE: Mapping[type[nnx.Variable[Leaf]], StateKind] = {
  nnx.Param: StateKind(neutral=True, stored="param_dtype"),
  # Zeros, there to be differentiated by: their gradient is that of what they are added to.
  nnx.Perturbation: StateKind(neutral=True),
}
"""Variables by class, the first that fits; one that is not here decides dtypes, as arguments do.

With `stored="param_dtype"` one that is created in a call has that dtype, else the one that it was
created in. NNX has no `init` that could be computed under a policy."""

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
"""What the layers of NNX compute with; their other methods set them up."""

OUTSIDE = ("sow", "perturb", "initialize_carry")
"""Methods that no policy enters: two note values, and what a cell starts with, learned or
not, is in the dtype it is stored in."""

MODES = ("deterministic", "use_running_average")
"""What `train()` and `eval()` of NNX set. Other flags are a module's own business."""


def kind_of(variable: object) -> StateKind:
  return next((kind for cls, kind in STATE.items() if isinstance(variable, cls)), StateKind())
