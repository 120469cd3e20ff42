"""Functions that no traced program can stand for, and those that look like it."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._jaxprs.autocast import NotTraceable, traceable


class Holds:
  """No tree to JAX."""

  def __init__(self, *content):
    self.content = content


def recursive(x):
  holds = Holds(x)
  holds.itself = holds
  return holds


RETURNED = {
  "array": (lambda x: x, True),
  "tree": (lambda x: {"a": [x, (x, None)]}, True),
  "others": (lambda x: ("text", 1, str, types, object(), nn.relu, Holds("text", jnp.sum)), True),
  "NumPy": (lambda x: Holds(np.ones(2)), True),
  "object": (Holds, False),
  "object in object": (lambda x: Holds(Holds({"a": x})), False),
  "object that holds itself": (recursive, False),
  "set": (lambda x: Holds({Holds(x)}), False),
  "function": (lambda x: functools.partial(lambda: x), False),
  "generator": (lambda x: (x for _ in range(1)), False),
  "generator in object": (lambda x: Holds(x for _ in range(1)), False),
}


@pytest.mark.parametrize(("fn", "fits"), RETURNED.values(), ids=RETURNED)
def test_what_is_returned(fn, fits):
  def call(x):
    if fits:
      traceable(fn)(x)
    else:
      with pytest.raises(NotTraceable, match="with arrays in it, which is no tree"):
        traceable(fn)(x)

  jax.eval_shape(call, jnp.ones(2))


def test_a_function_that_is_not_defined_yet():
  def fn():
    def first():
      return second()  # pyright: ignore[reportUndefinedVariable]

    return first
    second = None

  assert traceable(fn)().__name__ == "first"


def add(notes, x):
  notes["x"] = x


def replace(notes, x):
  notes["old"] = x


def put_back(notes, x):
  notes["new"] = x
  del notes["new"]


@pytest.mark.parametrize(
  ("fn", "fits"), [(add, False), (replace, False), (put_back, True)], ids=["add", "replace", "back"]
)
def test_what_is_changed(fn, fits):
  notes = {"old": jnp.ones(2)}
  if fits:
    assert traceable(fn)(notes, 1) is None
  else:
    with pytest.raises(NotTraceable, match="changes an argument in place"):
      traceable(fn)(notes, 1)


def test_it_is_called_what_the_function_is():
  assert traceable(add).__name__ == "add"
