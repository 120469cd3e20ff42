"""`full_precision`: a function that runs as it was written, whatever is in force around it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from mpjax._frameworks import check_no_linen_model
from mpjax._tree import cast_leaf, is_half, map_arrays

P = ParamSpec("P")
R = TypeVar("R")

SCOPE = "mpjax.full_precision"
"""The named scope by which autocast knows the region."""

# The one mechanism JAX has for a value that is part of every jit cache key; it is local to the
# thread and restored when its `with` block is left.
ACTIVE = jax.make_user_context(None)
"""The state of the policy in force in this thread, or None. A state has a property `on` (a policy
is in force), `tracing` (what runs is being traced, and will be rewritten), and a method `outside`,
which returns the state inside of `full_precision`."""


@dataclasses.dataclass(frozen=True)
class Region:
  """The state inside of `full_precision` where no policy was in force around it.

  Fields:
    in_region: always True. The states of Linen and NNX have it as well.
    on: always False: no policy is in force.
    given: always None, as are the two that follow: what a Linen module looks at.
    held: always None.
    entered: always False.
    tracing: always False.
    region: always "".
  """

  in_region: bool = True
  on: bool = False
  given: None = None
  held: None = None
  entered: bool = False
  tracing: bool = False
  region: str = ""

  def outside(self) -> "Region":
    """Returns the state itself."""
    return self


def in_region() -> bool:
  """Whether this runs inside of `full_precision`, where no policy and no autocast begins."""
  return ACTIVE.value is not None and ACTIVE.value.in_region


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Returns `fn` as a region that neither autocast nor a policy enters.

  Under `mpjax.autocast` everything inside runs in the dtypes in which it is written. Under a policy
  the modules called inside run without it, and half arrays among the arguments come in as float32.
  A policy or an autocast that is given inside does not begin either: `full_precision(view)(x)` and
  `full_precision(autocast(f))(x)` run as the model and `f` do. As a decorator it marks a loss, a
  numerically delicate layer, a physical simulation; the results are float32, and what reads them
  decides anew.

  NNX modules and variables among the arguments are passed as they are, and so are containers that
  hold nothing in half: what `fn` writes to them stays.

  It does what PyTorch's `custom_fwd(cast_inputs=torch.float32)` is for.

  Args:
    fn: any function of trees of arrays.

  Returns:
    A function with the signature of `fn`.

  Raises:
    MpjaxTypeError: `fn` is a Linen model without variables.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> @mpjax.full_precision
  ... def precise(x, w):
  ...   return x @ w
  >>> fn = mpjax.autocast(lambda x, w: precise(jnp.tanh(x @ w), w))
  >>> program = jax.make_jaxpr(fn)(jnp.ones((2, 2)), jnp.ones((2, 2)))
  >>> [str(e.outvars[0].aval.dtype) for e in program.eqns if e.primitive.name == "dot_general"]
  ['bfloat16', 'float32']
  """
  check_no_linen_model(fn, "mpjax.full_precision(fn)")
  call: Callable[..., R] = fn

  @functools.wraps(fn)
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    around = ACTIVE.value
    given, named = (args, kwargs)
    if around is not None and around.on:
      given = tuple(map_arrays(_widen, x) for x in args)
      named = {name: map_arrays(_widen, x) for name, x in kwargs.items()}
    with jax.named_scope(SCOPE), ACTIVE(Region() if around is None else around.outside()):
      return call(*given, **named)

  return wrapped


def _widen(x: Any) -> Any:
  return cast_leaf(x, jnp.float32) if is_half(x) else x
