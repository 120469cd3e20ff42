"""Which library a model comes from, and which function of ours takes it.

Models are known by the public classes that they inherit from, by name: nothing is imported for it.
"""

from mpjax._core.errors import MpjaxTypeError

_BASES = {
  ("flax.linen", "Module"): "Linen",
  ("mpjax.linen", "PolicyModule"): "Linen",
  ("flax.nnx", "Module"): "NNX",
  ("equinox", "Module"): "Equinox",
  ("haiku", "Module"): "Haiku",
  ("haiku", "Transformed"): "Haiku",
  ("haiku", "TransformedWithState"): "Haiku",
  ("haiku", "MultiTransformed"): "Haiku",
  ("haiku", "MultiTransformedWithState"): "Haiku",
}
"""The library, by the package and the name of a class that its models inherit from."""

_WAYS = {
  "Linen": 'Use mpjax.linen.with_policy(model, "mixed_bfloat16").',
  "NNX": 'Use mpjax.nnx.with_policy(model, "mixed_bfloat16").',
  "Equinox": 'Use mpjax.autocast(loss_fn, "mixed_bfloat16") on the function that calls the model.',
  "Haiku": 'Use mpjax.autocast(transformed.apply, "mixed_bfloat16"), on the pure function.',
}


def framework_of(x: object) -> str | None:
  """Returns "Linen", "NNX", "Equinox" or "Haiku" for a model or its class, None for others."""
  for base in (x if isinstance(x, type) else type(x)).__mro__:
    for (package, name), framework in _BASES.items():
      if base.__name__ == name and f"{base.__module__}.".startswith(f"{package}."):
        return framework
  return None


def not_a_model(x: object, framework: str, example: str) -> tuple[str, str]:
  """Returns what `x` is and what to do with it, where a model of `framework` was expected.

  `example` creates one.
  """
  found = framework_of(x)
  name = x.__name__ if isinstance(x, type) else type(x).__name__
  instance = f"Pass an instance, such as with_policy({example}, ...)."
  if isinstance(x, type):
    got = f"the class {name}"
    return (got, instance) if found in (None, framework) else (f"{got} of {found}", _WAYS[found])
  if found is not None:
    return f"a model of {found} ({name})", _WAYS[found]
  if callable(x):
    instance += ' For a function of arrays use mpjax.autocast(fn, "mixed_bfloat16").'
  return repr(type(x)), instance


def check_no_linen_model(fn: object, where: str) -> None:
  """Raises for a Linen model instead of a function: it cannot be called without variables."""
  if framework_of(fn) != "Linen" or isinstance(fn, type):
    return
  if getattr(fn, "scope", None) is None and getattr(fn, "parent", None) is None:
    raise MpjaxTypeError(
      where,
      expected="a function of arrays",
      got=f"a model of Linen ({type(fn).__name__}) without its variables",
      fix="Pass model.apply. For a policy on its modules: "
      'mpjax.linen.with_policy(model, "mixed_bfloat16").',
    )
