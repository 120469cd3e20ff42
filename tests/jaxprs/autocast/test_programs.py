"""Whole programs under autocast: every product in half, every sum in float32, gradients in bounds.

One program, traced and compiled once for each half type, is what all tests of it look at.
"""

import functools
from typing import Any, NamedTuple

import jax
import pytest

import mpjax
from tests import programs
from tests.jaxprs.autocast import checks
from tests.jaxprs.autocast.programs import PROGRAMS, model

# As people run them: dtypes and ranks are promoted in every other line of other libraries.
pytestmark = pytest.mark.standard_promotion

BOUNDS = {"bfloat16": 1.6e-2, "float16": 2e-3}
SCALE = {"bfloat16": 1.0, "float16": 2.0**10}
BOTH = pytest.mark.parametrize("half", BOUNDS, scope="module")
ALL = pytest.mark.parametrize("name", PROGRAMS, scope="module")
DIFFERENTIATED = [name for name, program in PROGRAMS.items() if program.backward]


class Ran(NamedTuple):
  """One program under autocast.

  Fields:
    forward: its jaxpr.
    whole: the jaxpr with gradients; the same one where none are taken.
    outputs, grads: what came out; gradients without the scale of the loss.
    traces: how often its function was traced for both, each being called twice.
  """

  forward: Any
  whole: Any
  outputs: Any
  grads: Any
  traces: int


def bound(name: str, half: str) -> float:
  return BOUNDS[half] * (2 if PROGRAMS[name].attention else 1)


def with_gradients(name: str, fun: Any, scale: float = 1.0) -> Any:
  """Returns `(params, batch) -> (outputs, gradients)`, whose loss is scaled while it is inside."""

  def scaled(params, batch):
    loss, outputs = fun(params, batch)
    return loss * scale, (loss, outputs)

  def both(params, batch):
    if not PROGRAMS[name].backward:
      return fun(params, batch), ()
    grads, outputs = jax.grad(scaled, has_aux=True)(params, batch)
    return outputs, jax.tree.map(lambda g: g / scale, grads)

  return both


@functools.cache
def ran(name: str, half: str) -> Ran:
  fun, params, batch = model(name)
  counted = checks.Counted(fun)
  cast = mpjax.autocast(counted, f"mixed_{half}")
  forward = jax.jit(cast)
  whole = programs.jitted(with_gradients(name, cast, SCALE[half]))
  for _ in range(2):
    jaxpr = forward.trace(params, batch).jaxpr
    outputs, grads = jax.block_until_ready(whole(params, batch))
  return Ran(jaxpr, whole.trace(params, batch).jaxpr, outputs, grads, counted.calls)


@functools.cache
def in_float32(name: str) -> Any:
  fun, params, batch = model(name)
  return programs.run(with_gradients(name, fun), params, batch)


@BOTH
@ALL
def test_every_product_is_in_half(name, half):
  found = ran(name, half)
  assert checks.halves(found.forward, half) == []
  assert checks.halves(found.whole, half) == []
  assert programs.half_share(found.whole) == 1


@BOTH
@ALL
def test_the_float32_list_runs_in_float32(name, half):
  assert checks.halves_of_float32(ran(name, half).forward) == []


@BOTH
@ALL
def test_no_sum_is_in_half_forward_and_backward(name, half):
  assert checks.sums(ran(name, half).whole) == []


@BOTH
@ALL
def test_no_cast_is_wasted(name, half):
  """No value is cast to half twice, or there and back; for casts to float32 see `wasted_casts`."""
  assert checks.wasted_casts(ran(name, half).forward) == []


@BOTH
@ALL
def test_outputs_and_gradients_have_the_types_that_they_have_without(name, half):
  found, plain = ran(name, half), in_float32(name)
  got, want = (
    jax.tree.map(lambda x: (x.dtype, x.shape), tree)
    for tree in ((found.outputs, found.grads), plain)
  )
  assert got == want


@pytest.mark.case("I15")
@BOTH
@ALL
def test_outputs_and_gradients_are_as_near_to_float32_as_their_type_allows(name, half):
  found, (outputs, grads) = ran(name, half), in_float32(name)
  assert programs.error(found.outputs, outputs) <= bound(name, half)
  if PROGRAMS[name].backward:
    assert programs.error(found.grads, grads) <= bound(name, half)


@BOTH
@ALL
def test_a_program_is_traced_once(name, half):
  # Once for `jit(autocast(f))`, once for that with gradients, however often they are called.
  assert ran(name, half).traces == 2


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_autocast_of_a_gradient_has_its_sums_in_float32_too(name):
  fun, params, batch = model(name)
  cast = mpjax.autocast(with_gradients(name, fun), "bfloat16")
  found = jax.make_jaxpr(cast)(params, batch)
  assert checks.halves(found, "bfloat16") == []
  assert checks.halves_of_float32(found) == []
  types = [(v.aval.dtype, v.aval.shape) for v in found.jaxpr.outvars]
  assert types == [(x.dtype, x.shape) for x in jax.tree.leaves(in_float32(name))]


@ALL
def test_a_float32_policy_changes_nothing(name):
  fun = model(name).fun
  assert mpjax.autocast(fun, "float32") is fun


def test_attention_is_the_same_with_either_rule():
  # Of the programs themselves: what a user writes as a derivative has to be one.
  blocks, whole = in_float32("custom_vjp_attention"), in_float32("custom_jvp_attention")
  assert programs.error(blocks, whole) < 1e-5
