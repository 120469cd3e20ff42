"""The second call of a method that is traced: what Flax sorted is in its own order again."""

import flax.linen as nn
import jax.numpy as jnp

from mpjax.linen._repeated_call import TracedCall, in_order


class Holds(nn.Module):
  layers: dict[str, nn.Module]


def holds(features):
  return Holds({"b": nn.Dense(features), "a": nn.Dense(features)})


def test_the_fields_of_a_copy_have_the_order_of_the_original():
  module, copy = holds(2), Holds({"a": nn.Dense(2), "b": nn.Dense(2)})
  sorted_layers = dict(copy.layers)
  in_order(copy, module)
  assert list(copy.layers) == ["b", "a"]
  assert all(copy.layers[name] is sorted_layers[name] for name in "ab")


def test_arguments_without_modules_are_those_of_the_first_call():
  first, kwargs = ({"b": jnp.ones(1), "a": jnp.ones(1)},), {"train": True}
  call = TracedCall(holds(2), first, kwargs)
  assert call.arguments((jnp.zeros(1),), {}) == (first, kwargs)


def test_modules_among_the_arguments_are_the_copies_in_the_order_of_the_first_call():
  copies = {"a": nn.Dense(2), "b": nn.Dense(2)}
  call = TracedCall(holds(2), ({"b": nn.Dense(2), "a": nn.Dense(2)},), {})
  (found,), kwargs = call.arguments((copies,), {})
  assert list(found) == ["b", "a"]
  assert all(found[name] is copies[name] for name in "ab")
  assert kwargs == {}


def test_arguments_of_another_structure_stay_as_they_came():
  call, args = TracedCall(holds(2), (nn.Dense(2),), {}), (nn.Dense(2), jnp.ones(1))
  assert call.arguments(args, {}) == (args, {})
