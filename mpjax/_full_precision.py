"""`full_precision`: a function that runs as it was written, whatever is in force around it."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from mpjax._tree import cast_leaf, is_half

P = ParamSpec("P")
R = TypeVar("R")

SCOPE = "mpjax.full_precision"
"""The named scope by which autocast knows the region."""

# The one mechanism JAX has for a value that is part of every jit cache key; it is local to the
# thread and restored when its `with` block is left.
ACTIVE = jax.make_user_context(None)
"""The state of the policy in force in this thread, or None. A state has a method `off`, which
returns the state that switches it off, or None if it is off already."""


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Returns `fn` as a region that neither autocast nor a policy enters.

  Under `mpjax.autocast` everything inside runs in the dtypes in which it is written. Under a policy
  the modules called inside run without it, and half arrays among the arguments come in as float32.
  Where nothing is in force, nothing changes. As a decorator it marks a loss, a numerically delicate
  layer, a physical simulation; the results are float32, and what reads them decides anew.

  It does what PyTorch's `custom_fwd(cast_inputs=torch.float32)` is for.

  Args:
    fn: any function of trees of arrays.

  Returns:
    A function with the signature of `fn`.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> @mpjax.full_precision
  ... def precise(x, w):
  ...   return x @ w
  >>> fn = mpjax.autocast(lambda x, w: precise(jnp.tanh(x @ w), w))
  >>> program = jax.make_jaxpr(fn)(jnp.ones((2, 2)), jnp.ones((2, 2)))
  >>> [str(e.outvars[0].aval.dtype) for e in program.eqns if e.primitive.name == "dot_general"]
  ['bfloat16', 'float32']
  """
  call: Callable[..., R] = fn

  @functools.wraps(fn)
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    off = None if ACTIVE.value is None else ACTIVE.value.off()
    with jax.named_scope(SCOPE):
      if off is None:
        return fn(*args, **kwargs)
      wide: Any = jax.tree.map(_widen, (args, kwargs))
      with ACTIVE(off):
        return call(*wide[0], **wide[1])

  return wrapped


def _widen(x: Any) -> Any:
  return cast_leaf(x, jnp.float32) if is_half(x) else x
