"""Which library a model comes from, by the names of classes: nothing is imported for it."""

import inspect
import sys

import jax

from mpjax._core.errors import MpjaxTypeError, kind_of
from mpjax._core.types import Leaf

_CLASSES = {
  "Linen": ("flax.linen.Module",),
  "NNX": ("flax.nnx.Module", "flax.nnx.Optimizer"),
  "Equinox": ("equinox.Module",),
  "Haiku": (
    *("haiku.Module", "haiku.Transformed", "haiku.TransformedWithState"),
    *("haiku.MultiTransformed", "haiku.MultiTransformedWithState"),
  ),
}
"""The public classes that the models of a library inherit from."""

_CALL = 'mpjax.with_policy({}, "mixed_bfloat16")'

# Modules of these libraries cannot have policies of their own, but functions that call them can.
_WAYS = {
  "Equinox": f"Use {_CALL.format('loss_fn')} on the function that calls the model.",
  "Haiku": f"Use {_CALL.format('transformed.apply')}, on the pure function.",
}


def framework_of(x: object) -> str | None:
  """Returns "Linen", "NNX", "Equinox" or "Haiku" for a model or its class, None for others."""
  framework, _ = _framework_and_class(x)
  return framework


def _framework_and_class(x: object) -> tuple[str | None, str]:
  """Returns the framework of a model, and the class in `_CLASSES` that it inherits from."""
  # Libraries define a class in some private module below the package that exports it.
  for base in (x if isinstance(x, type) else type(x)).__mro__:
    for framework, classes in _CLASSES.items():
      for cls in classes:
        package, _, name = cls.rpartition(".")
        if base.__name__ == name and f"{base.__module__}.".startswith(f"{package}."):
          return framework, cls
  return None, ""


def kind_of_model(x: object) -> str:
  """Returns what a model is, for errors: "an equinox.Module (MLP)", "a flax.nnx.Optimizer"."""
  _, base = _framework_and_class(x)
  name = x.__name__ if isinstance(x, type) else type(x).__name__
  article = "an" if base[0] in "aeiou" else "a"
  is_base = base.rpartition(".")[2] == name
  return f"{article} {base}" if is_base else f"{article} {base} ({name})"


def holds_linen_module(x: object) -> bool:
  """Whether an object calls a Linen module of its own, as the Flax models of Hugging Face do."""
  is_object = framework_of(x) is None and not inspect.isroutine(x) and not isinstance(x, type)
  # Read attributes statically: a property may compute something. Hugging Face has one for
  # `_module`.
  held = (inspect.getattr_static(x, name, None) for name in ("module", "_module"))
  return is_object and "Linen" in map(framework_of, held)


def is_nnx_variable(x: object) -> bool:
  """Whether `x` is a variable of Flax NNX."""
  return hasattr(type(x), "get_raw_value")


def is_nnx_object(x: object) -> bool:
  """Whether `x` is a module, a container, a variable or another object with variables of NNX."""
  # It may be a tree to JAX, but writes to a mapped copy are lost.
  names = (c.__module__ for c in type(x).__mro__ if c.__name__ in ("Pytree", "Variable"))
  return any(name.startswith("flax.nnx.") for name in names)


def is_of_nnx(x: object) -> bool:
  """Whether `x` is anything of NNX: an object, but also a `GraphDef` or an `nnx.State`."""
  # Subclasses of users are in their own modules, so look at the base classes.
  return any(c.__module__.startswith("flax.nnx.") for c in type(x).__mro__)


def haiku_state() -> list[Leaf]:
  """Returns parameters, state and random keys of the `hk.transform` that runs; [] outside of one.

  A Haiku module keeps them there, not in its arguments and results.
  """
  haiku = sys.modules.get("haiku")
  if haiku is None:
    return []
  try:
    params, state = haiku.get_params(), haiku.get_current_state()
    return jax.tree.leaves((params, state, haiku.maybe_get_rng_sequence_state()))
  except ValueError:  # Haiku is imported, but no transform runs.
    return []


def not_a_model(x: object) -> tuple[str, str]:
  """Describes an `x` that was given in place of a Flax model, and returns a fix."""
  library = framework_of(x)
  # A class was given in place of an instance. Those of other libraries get the fix of their
  # library.
  if isinstance(x, type) and library in (None, "Linen", "NNX"):
    return f"the class {x.__name__}", f"Pass an instance: {_CALL.format(f'{x.__name__}(...)')}."
  if library is not None:
    return kind_of_model(x), _WAYS.get(library, f"Use {_CALL.format('model')}.")
  fix = f"Write {_CALL.format('model')}, or for a function of arrays {_CALL.format('fn')}."
  return kind_of(x), fix


def check_function(fn: object, where: str, fix: str) -> None:
  """Raises MpjaxTypeError unless `fn` is a function of arrays that JAX can trace."""
  expected, compiled = "a function of arrays", isinstance(fn, jax.stages.Compiled)
  if compiled or not callable(fn):
    got = "a compiled one" if compiled else kind_of(fn)
    raise MpjaxTypeError(where, expected=f"{expected} that JAX can trace", got=got, fix=fix)
  # A bound module can be called, and so can one with a parent. An unbound root has no variables.
  is_model = framework_of(fn) == "Linen" and not isinstance(fn, type)
  if is_model and getattr(fn, "scope", None) is None and getattr(fn, "parent", None) is None:
    got = f"{kind_of_model(fn)}, which is called through apply"
    fix = f"Pass model.apply. For a policy on its modules: {_CALL.format('model')}."
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
