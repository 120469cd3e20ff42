"""Programs of diagnostics, compiled so that each cast rounds."""

from collections.abc import Callable
from typing import Any

import jax

from mpjax._core.types import Function


def compiled_as_written(fn: Function, *, runs_often: bool = False) -> Callable[..., Any]:
  """Returns a function that is compiled when it is called, and in which each cast rounds.

  Args:
    fn: the function.
    runs_often: whether it has loops whose run takes longer than some compilation.
  """
  # XLA may leave out a cast to float16 and back, and with it the rounding and the overflow.
  options: dict[str, str | bool | int] = {"xla_allow_excess_precision": False}
  if jax.default_backend() == "cpu":
    # On a CPU, LLVM takes half of the compilation time. Its first level makes loops three times as
    # fast, and the others add nothing.
    options |= {
      "xla_backend_optimization_level": int(runs_often),
      "xla_llvm_disable_expensive_passes": True,
    }
  return jax.jit(fn, compiler_options=options)
