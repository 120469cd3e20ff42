"""The checks that the wrappers of optimizers share."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax._errors import MpjaxTypeError, MpjaxValueError, message
from mpjax._tree import is_array_like, is_inexact
from mpjax._types import PyTree


def check_inner(inner: Any, where: str) -> optax.GradientTransformationExtraArgs:
  """Returns `inner`, made to take extra arguments; raises if it is no optax transformation."""
  if not isinstance(inner, optax.GradientTransformation):
    raise MpjaxTypeError(
      message(
        where,
        expected="an optax.GradientTransformation",
        got=f"a {type(inner).__name__}",
        fix="Pass an optimizer such as optax.adamw(1e-3); of optax.MultiSteps its "
        "gradient_transformation().",
      )
    )
  return optax.with_extra_args_support(inner)


def check_state(state: Any, kind: type[Any], where: str) -> None:
  """Raises unless `state` is a `kind`, which `init` of the same transformation makes."""
  if not isinstance(state, kind):
    raise MpjaxTypeError(
      message(
        where,
        expected="the state that init made",
        got=f"a {type(state).__name__}",
        fix="Pass the opt_state of this very transformation; restore checkpoints into the "
        "structure of tx.init(params).",
      )
    )


def check_params(params: PyTree, where: str) -> None:
  """Raises if `update` was not given the parameters."""
  if params is None:
    raise MpjaxValueError(
      message(
        where,
        expected="the parameters as the third argument of update",
        got="None",
        fix="Write tx.update(grads, opt_state, params).",
      )
    )


def refuse_integers(params: PyTree, where: str) -> None:
  """Raises if a leaf of `params` is an array that cannot be trained."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  found = [
    f"{jnp.result_type(x)} at {jax.tree_util.keystr(path) or 'the root'}"
    for path, x in leaves
    if is_array_like(x) and not is_inexact(x)
  ]
  if found:
    raise MpjaxTypeError(
      message(
        where,
        expected="floating parameters",
        got="; ".join(found),
        fix="Keep counters, tables of integers and keys out of params (in model_state, say), or "
        "wrap with optax.masked.",
      )
    )
