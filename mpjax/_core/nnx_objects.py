"""Whether a value is of Flax NNX. By names: NNX need not be installed."""


def is_nnx_variable(x: object) -> bool:
  """Whether `x` is a variable."""
  return hasattr(type(x), "get_raw_value")


def is_nnx_object(x: object) -> bool:
  """Whether `x` is a module, a container, a variable or another object with variables."""
  # It may be a tree to JAX, but writes to a mapped copy are lost.
  names = (c.__module__ for c in type(x).__mro__ if c.__name__ in ("Pytree", "Variable"))
  return any(name.startswith("flax.nnx.") for name in names)


def is_of_nnx(x: object) -> bool:
  """Whether `x` is anything of NNX: an object, but also a `GraphDef` or an `nnx.State`."""
  # Subclasses of users are in their own modules, so look at the base classes.
  return any(c.__module__.startswith("flax.nnx.") for c in type(x).__mro__)
