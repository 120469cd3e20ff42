"""Caches of functions of jaxprs and of types."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from jax.core import ShapedArray
from jax.extend.core import Jaxpr

R = TypeVar("R")


def cached_per_jaxpr(fun: Callable[..., R]) -> Callable[..., R]:
  """Returns a function of a jaxpr and a key that keeps its results as long as the jaxpr lives."""
  # Weak keys: the cache must not keep jaxprs alive, which hold constants of models. A jaxpr equals
  # only itself, so the lookup is by identity and fast.
  caches: weakref.WeakKeyDictionary[Jaxpr, dict[Any, R]] = weakref.WeakKeyDictionary()

  @functools.wraps(fun)
  def remembering(jaxpr: Jaxpr, *key: Any) -> R:
    results = caches.setdefault(jaxpr, {})
    if key not in results:
      results[key] = fun(jaxpr, *key)
    return results[key]

  return remembering


def remembered_off_mesh(fun: Callable[..., R]) -> Callable[..., R]:
  """Returns a function of types and other keys that keeps its results for types off a mesh."""
  remembering = functools.lru_cache(maxsize=1024)(fun)

  @functools.wraps(fun)
  def call(*args: Any, **kwargs: Any) -> R:
    # On a mesh the result also depends on the context, which is not part of the key.
    on_mesh = any(isinstance(x, ShapedArray) and not x.sharding.mesh.empty for x in args)
    return (fun if on_mesh else remembering)(*args, **kwargs)

  return call
