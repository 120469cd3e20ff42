"""The call of the optimizer in a training step, and the errors if they do not fit."""

from collections.abc import Callable

import jax
import optax

from mpjax._core.errors import REFUSALS, MpjaxError, MpjaxTypeError, listed
from mpjax._core.trees import check_alike, tree_differences
from mpjax._core.types import Grads, OptState, Params, PyTree, Updates
from mpjax._optim.step.train_state import TrainState
from mpjax._optim.wrapper_checks import refuse_other_state

_TX = "mpjax.make_train_step(tx)"
_STEP = f"{_TX}: step(state)"


def checked_update(
  tx: optax.GradientTransformationExtraArgs,
  update: Callable[..., tuple[PyTree, OptState]],
  grads: Grads,
  state: TrainState,
  **extra: PyTree,
) -> tuple[PyTree, OptState]:
  """Calls `update` of `tx`, and raises if it fails or returns another kind of state."""
  try:
    result, opt_state = update(grads, state.opt_state, state.params, **extra)
  # These explain themselves: ours, and reads of a traced value in the user's code.
  except (MpjaxError, jax.errors.JAXTypeError):
    raise
  except REFUSALS as error:
    # The likely cause is a state of another optimizer. Else, `tx` wants arguments that no step has.
    refuse_other_state(tx, state.params, state.opt_state, _STEP, error)
    got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise _needs_more(got) from error
  # An optimizer without a state, such as sgd, passes on any state, so a wrong one raises nothing.
  refuse_other_state(tx, state.params, state.opt_state, _STEP, None)
  # A skipped step selects between both states, and a loop carries them. Both need equal types.
  check_alike(
    opt_state,
    state.opt_state,
    f"{_TX}: the state of the optimizer",
    expected="the structure, shapes and dtypes that it had before the step",
    fix="Parameters stored in low precision need mpjax.master_weights, or a loss scale other "
    "than NoLossScale, for their moments to be float32.",
  )
  return result, opt_state


def check_updates_fit(params: Params, updates: Updates) -> None:
  """Raises unless updates have the tree and the shapes of the parameters."""
  # optax broadcasts updates to larger shapes, and so would change the parameters' shapes silently.
  problems = tree_differences(params, updates, dtypes=False)
  if problems:
    raise _needs_more(f"updates with {listed(problems)}")


def _needs_more(got: str) -> MpjaxTypeError:
  """Returns the error for an optimizer that the step cannot call."""
  return MpjaxTypeError(
    f"{_TX}: tx.update",
    expected="an optimizer that needs the parameters, the gradients of the mean loss and "
    "value=, and no more",
    got=got,
    fix="Call line searches, SAM in opaque mode, dpsgd and lookahead in a loop of your own: "
    "jax.value_and_grad(mpjax.scaled(loss_fn, opt_state)), and tx.update.",
  )
