"""Kernels, which are traced in the dtypes of their operands and cannot be rewritten afterwards.

A kernel is a `pallas_call`, an FFI call or the like. It runs in low precision if its operands were
in low precision when it was traced: because the module casts them by its own `dtype`, or because
`low_precision` or a rule says so.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from mpjax._autocast.scopes import OWN_DTYPE, mark_of, scope_of
from mpjax._core.frameworks import check_function
from mpjax._core.trees import cast_arrays
from mpjax._core.types import FLOAT32, HALVES, DType, P
from mpjax._core.wrappers import wraps
from mpjax._jaxpr.primitives import Holds
from mpjax._jaxpr.reader import dtype_of
from mpjax._jaxpr.steps import body_of
from mpjax._policy.active import ACTIVE, AUTOCAST, Active, Region
from mpjax._policy.rules import low_dtype_of

R = TypeVar("R")


def low_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Run a function in the compute dtype as it is written.

  Under a policy or `mpjax.autocast`, floating arguments are cast to the compute dtype, and no
  operation inside is rewritten. A kernel such as `jax.experimental.pallas.ops.gpu.attention.mha`
  is then traced in low precision. Without a policy, or in float32, it is `fn`. Rules of `autocast`
  for named scopes do not change the dtype. The counterpart is `mpjax.full_precision`.

  Args:
    fn: any function of trees of arrays. Arrays that it closes over are not cast.

  Returns:
    A function with the signature of `fn`. Its results have the dtypes that `fn` gives them.

  Raises:
    MpjaxTypeError: `fn` is not a function.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> kernel = mpjax.low_precision(lambda x: jnp.exp(x).sum())
  >>> jaxpr = jax.make_jaxpr(mpjax.autocast(kernel))(jnp.ones(4))
  >>> [eqn.invars[0].aval.dtype.name for eqn in jaxpr.eqns if eqn.primitive.name == "exp"]
  ['bfloat16']
  """
  check_function(fn, "mpjax.low_precision(fn)", "Pass it: mpjax.low_precision(kernel)(q, k, v).")

  @wraps(fn)
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    dtype = _low_dtype()
    if dtype is None:
      return fn(*args, **kwargs)
    args, kwargs = cast_arrays((args, kwargs), dtype)
    # Modules inside run as they are, too.
    inside = type(ACTIVE.value or Active())(outside_policies=True, in_low_precision=True)
    mark = mark_of(Region(None, called_in=dtype))
    with jax.named_scope(mark), ACTIVE(inside), AUTOCAST(None):
      return fn(*args, **kwargs)

  return wrapped


def _low_dtype() -> DType | None:
  """Returns the low-precision compute dtype of the code that is being traced; None for none."""
  state = ACTIVE.value
  # Inside modules the innermost region decides. `full_precision` and `low_precision` have none.
  if state is not None and (state.outside_policies or state.region is not None):
    region = None if state.outside_policies else state.region
    return None if region is None else low_dtype_of(region.policy)
  return AUTOCAST.value if AUTOCAST.value in HALVES else None


class KernelInFloat32(Exception):
  """A kernel gets float32 where the module alone would give it low precision.

  Attributes:
    classes: the names of the classes of such modules.
  """

  def __init__(self, classes: frozenset[str]) -> None:
    super().__init__(classes)
    self.classes = classes


def check_kernels(program: ClosedJaxpr, kept: frozenset[str]) -> None:
  """Raises KernelInFloat32 if a kernel gets float32 in a module whose own `dtype` was replaced.

  Args:
    program: the jaxpr of a call of modules.
    kept: the names of classes for which that was known when it was traced.
  """
  classes: set[str] = set()
  for step in body_of(program).every_step():
    if step.holds is not Holds.KERNEL or FLOAT32 not in map(dtype_of, step.eqn.invars):
      continue
    # The mark is in the scopes of the kernel, or of a jitted function or a loop around it. The
    # innermost one counts.
    for each in step.enclosing():
      marks = [x for x in scope_of(each.eqn.source_info.name_stack) if x.startswith(OWN_DTYPE)]
      if marks:
        classes.add(marks[-1].removeprefix(OWN_DTYPE))
        break
  if not classes <= kept:
    raise KernelInFloat32(frozenset(classes - kept))
