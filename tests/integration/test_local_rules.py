"""The precision of a value depends on its operands; consumers only widen it.

The properties hold for random programs, `tests/random_programs.py`. They are read from jaxprs by
`tests/dataflow.py`, and numbers are compared bit for bit, computed one operation at a time.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given

import mpjax
from tests import dataflow, programs
from tests import random_programs as rp

# Programs mix booleans, integers and floats, as users' do.
pytestmark = [
  pytest.mark.standard_promotion,
  # Programs may solve systems of activations, which warns.
  pytest.mark.filterwarnings("ignore:mpjax. .* takes the result of low-precision:UserWarning"),
]

POLICIES = pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
BFLOAT16 = "mixed_bfloat16"

WAYS = {
  "function": lambda fun: fun,
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "scope": lambda fun: jax.named_scope("part")(fun),
}
"""What may be around a part of a program and changes no number."""


def under(program: Any, policy: str = BFLOAT16) -> Any:
  """Returns a function of inputs and parameters under a policy."""
  return mpjax.autocast(program, policy, data_argnums=0)


def traced(fun: Any) -> Any:
  """Returns the jaxpr of a function of inputs and parameters."""
  return jax.make_jaxpr(fun)(rp.DATA, rp.PARAMS)


def flow_of(program: Any, policy: str = BFLOAT16) -> dataflow.Flow:
  return dataflow.flow(traced(under(program, policy)))


def computed(fun: Any, *args: Any) -> list[bytes]:
  """Returns the bits of the results of a function, computed one operation at a time."""
  return programs.bits(dataflow.evaluate(jax.make_jaxpr(fun)(*args), jax.tree.leaves(args)))


def gradient(fun: Any) -> Any:
  """Returns the gradient of the sum of all results by all arguments."""

  def total(*args):
    return sum(jnp.sum(out) for out in fun(*args))

  return lambda *args: jax.grad(total, argnums=tuple(range(len(args))))(*args)


# A matmul depends on its operands.


def operand_dtypes(found: dataflow.Flow) -> list[tuple[str, ...]]:
  return [tuple(v.dtype for v in matmul.operands) for matmul in found.matmuls()]


def assert_same_matmuls(before: rp.Program, after: rp.Program, policy: str = BFLOAT16) -> None:
  expected = operand_dtypes(flow_of(before, policy))
  assert operand_dtypes(flow_of(after, policy))[: len(expected)] == expected


@pytest.mark.slow
@POLICIES
@given(pair=rp.extensions())
def test_no_consumer_changes_the_operands_of_a_matmul(policy, pair):
  assert_same_matmuls(*pair, policy)


def behind_moves_and_biases(value: dataflow.Value) -> bool:
  """Whether a value has elements of an operand, or its sum with a bias or difference to one."""
  if value.name not in ("add", "sub"):
    return value.moves or value.name == "select_n"
  return value.operands[0] is not value.operands[1] and any(map(dataflow.is_bias, value.operands))


def reaches_output(found: dataflow.Flow, matmul: dataflow.Value) -> bool:
  return not dataflow.ahead([matmul], behind_moves_and_biases).isdisjoint(found.outputs)


def is_gram(matmul: dataflow.Value) -> bool:
  """Whether a matmul multiplies a value by itself."""
  sources = [
    {v for v in dataflow.behind([operand], lambda v: v.moves) if not v.moves}
    for operand in matmul.operands
  ]
  return sources[0] == sources[1]


def wide_inside(found: dataflow.Flow) -> list[dataflow.Value]:
  """Returns the low-precision matmuls that return float32 without an output that asks for it."""
  return [
    v
    for v in found.matmuls()
    if v.width == 16 and v.dtype == "float32" and not (is_gram(v) or reaches_output(found, v))
  ]


@pytest.mark.slow
@POLICIES
@given(pair=rp.extensions())
def test_a_matmul_returns_float32_for_an_output_alone(policy, pair):
  assert wide_inside(flow_of(pair[1], policy)) == []


@given(pair=rp.extensions())
def test_without_a_float32_output_a_matmul_returns_the_compute_dtype(pair):
  results = [v for v in flow_of(pair[1], "p=f32,c=bf16").matmuls() if v.width == 16]
  assert [v for v in results if v.dtype == "float32" and not is_gram(v)] == []


# Consumers only widen.


def narrowed(before: dataflow.Flow, after: dataflow.Flow) -> list[str]:
  """Returns the operations that run in fewer bits in the second program."""
  old, new = dataflow.widths(before), dataflow.widths(after)
  names = {key: value.name for value, key in dataflow.keys(before).items()}
  return [
    f"{names[key]}: {old[key]} bits, then {new[key]}"
    for key in old
    if key in new and new[key] < old[key]
  ]


@POLICIES
@given(pair=rp.extensions())
def test_no_consumer_narrows_a_value(policy, pair):
  before, after = (flow_of(program, policy) for program in pair)
  assert narrowed(before, after) == []


@POLICIES
@given(pair=rp.extensions())
def test_no_consumer_narrows_an_output(policy, pair):
  before, after = ([*map(dataflow.computed_width, flow_of(p, policy).outputs)] for p in pair)
  assert all(new >= old for old, new in zip(before, after, strict=False))


# Calls and closures change no bit.


@pytest.mark.slow
@POLICIES
@pytest.mark.parametrize("way", WAYS)
@given(part=rp.parts())
def test_a_call_changes_no_bit(policy, way, part):
  program, start, stop = part
  whole = computed(under(program, policy), rp.DATA, rp.PARAMS)
  split = program.with_part(start, stop, WAYS[way])
  assert computed(under(split, policy), rp.DATA, rp.PARAMS) == whole


# Cotangents of a value that float32 and low-precision operations use, and of an input.
MIXED_USES = rp.program("r1 = rx @ sw\nr2 = -r1\nr3 = r2 * vb\nreturn r3, r2")
INPUT_USES = rp.program("r1 = rx @ sw\nr2 = (rx @ r1.T) @ rx\nreturn r2")


@POLICIES
@pytest.mark.parametrize("part", [(MIXED_USES, 1, 3), (INPUT_USES, 0, 1)], ids=["mixed", "input"])
def test_a_call_changes_no_operation_of_the_gradient(policy, part):
  # Cotangents are added in another order, which changes last bits. Of an activation that is used
  # in a call and beside it they may be summed in low precision: see docs/limits.md.
  program, start, stop = part
  split = program.with_part(start, stop, jax.jit)
  each = [traced(gradient(under(fun, policy))) for fun in (program, split)]
  whole, parted = (dataflow.operations(dataflow.flow(made)) for made in each)
  assert whole - parted == parted - whole


@pytest.mark.slow
@POLICIES
@given(program=rp.programs())
def test_jit_around_the_call_changes_no_bit(policy, program):
  outside, inside = jax.jit(under(program, policy)), under(jax.jit(program), policy)
  plain = computed(under(program, policy), rp.DATA, rp.PARAMS)
  assert computed(outside, rp.DATA, rp.PARAMS) == plain
  assert computed(inside, rp.DATA, rp.PARAMS) == plain


@pytest.mark.slow
@example(program=MIXED_USES)
@given(program=rp.programs())
def test_jit_around_the_call_changes_no_bit_of_the_gradient(program):
  if program.differentiable:
    outside, inside = jax.jit(under(program)), under(jax.jit(program))
    plain = computed(gradient(under(program)), rp.DATA, rp.PARAMS)
    assert computed(gradient(outside), rp.DATA, rp.PARAMS) == plain
    assert computed(gradient(inside), rp.DATA, rp.PARAMS) == plain


def closing(program: rp.Program, policy: str, names: tuple[str, ...] = rp.PARAMETERS) -> Any:
  """Returns the program under a policy; it closes over the named parameters."""

  def fun(data, params):
    closed = {name: params[name] for name in names}
    passed = {name: x for name, x in params.items() if name not in closed}
    return under(lambda data, passed: program(data, passed | closed), policy)(data, passed)

  return fun


@pytest.mark.slow
@POLICIES
@given(program=rp.programs())
def test_closing_over_a_traced_parameter_changes_no_bit(policy, program):
  passed = computed(under(program, policy), rp.DATA, rp.PARAMS)
  assert computed(closing(program, policy), rp.DATA, rp.PARAMS) == passed


@pytest.mark.slow
@POLICIES
@given(program=rp.programs())
def test_closing_over_a_concrete_parameter_changes_no_bit(policy, program):
  passed = computed(under(program, policy), rp.DATA, rp.PARAMS)
  assert computed(lambda data: closing(program, policy)(data, rp.PARAMS), rp.DATA) == passed


@pytest.mark.slow
@given(program=rp.programs())
def test_closing_over_a_parameter_changes_no_bit_of_the_gradient(program):
  if program.differentiable:
    passed = computed(gradient(under(program)), rp.DATA, rp.PARAMS)
    for names in (rp.PARAMETERS[:1], rp.PARAMETERS):
      closed = closing(program, BFLOAT16, names)
      assert computed(gradient(closed), rp.DATA, rp.PARAMS) == passed


# Inputs and parameters.


def lowers(value: dataflow.Value) -> bool:
  """Whether a value is a cast of a float32 one to the compute dtype."""
  return value.name in dataflow.CASTS and value.width == 16 and value.operands[0].dtype == "float32"


def users(found: dataflow.Flow, value: dataflow.Value) -> list[str]:
  """Returns the names of what uses a value, directly or behind moves, matmuls aside."""
  moved = dataflow.ahead([value], lambda v: v.moves)
  names = [c.name for v in moved for c in v.consumers if not (c.moves or c.is_matmul)]
  return names + ["output" for v in found.outputs if v in moved]


def rounded_inputs(found: dataflow.Flow, inputs: list[dataflow.Value]) -> list[str]:
  """Returns what uses an input in low precision, other than a matmul."""
  kinds = dataflow.kinds(found, inputs)
  rounded = [v for v in found.live() if lowers(v) and kinds[v.operands[0]] == dataflow.INPUT]
  return [name for value in rounded for name in users(found, value)]


@POLICIES
@given(program=rp.programs())
def test_an_input_is_rounded_for_matmuls_alone(policy, program):
  found = flow_of(program, policy)
  assert rounded_inputs(found, found.arguments[: len(rp.INPUTS)]) == []


class Model(nn.Module):
  """A program as a Linen module."""

  program: rp.Program

  @nn.compact
  def __call__(self, data):
    params = {name: self.param(name, lambda _, x: x, x) for name, x in rp.PARAMS.items()}
    return self.program(data, params)


def in_module(program: rp.Program, policy: str = BFLOAT16) -> dataflow.Flow:
  model = mpjax.with_policy(Model(program), policy)
  return dataflow.flow(traced(lambda data, params: model.apply({"params": params}, data)))


@POLICIES
@given(program=rp.programs())
def test_an_input_of_a_module_is_rounded_for_matmuls_alone(policy, program):
  found = in_module(program, policy)
  inputs = [*found.arguments[: len(rp.INPUTS)], *found.constants]
  assert rounded_inputs(found, inputs) == []


def low_sums(found: dataflow.Flow, gradients: list[dataflow.Value]) -> list[str]:
  """Returns the low-precision sums of cotangents that only moves separate from a gradient."""
  path = dataflow.behind(gradients, lambda v: v.moves or v.name in ("add_any", "carry"))
  return [str(v.aval) for v in path if v.name == "add_any" and v.width < 32]


@POLICIES
@given(program=rp.programs())
def test_gradients_are_summed_in_float32(policy, program):
  if program.differentiable:
    found = dataflow.flow(traced(gradient(under(program, policy))))
    assert low_sums(found, found.outputs[len(rp.INPUTS) :]) == []


# The output of a matmul.

LOGITS = """
  r1 = jnp.tanh(rx @ su)
  r2 = r1 @ sw + vb
"""


@POLICIES
def test_logits_are_the_float32_sum_of_their_matmul(policy):
  found = flow_of(rp.program(LOGITS + "return r2"), policy)
  assert [v.dtype for v in found.matmuls()] == [policy.removeprefix("mixed_"), "float32"]
  assert [*map(dataflow.computed_width, found.outputs)] == [32]


# Masks, slopes, scalars.


BOTH = pytest.mark.parametrize("read", [flow_of, in_module], ids=["function", "module"])


NUMBERS = (
  *(
    "jnp.where(rx > 0, 1., 0.)",
    "(rx > 0) * 0.3",
    "(1. - (rx > 0).astype(jnp.float32)) * 0.5",
    "(rx > 0) * ((rx < 1) * 1.)",
  ),
  *("jax.random.normal(jax.random.key(0), (4, 8))", "jnp.sin(jnp.ones((4, 8)))", "jnp.eye(8)[:4]"),
  "jax.random.bernoulli(jax.random.key(0), 0.5, (4, 8)) / 0.5",
  "jax.nn.one_hot(jnp.argmax(rx, -1), 8) * 2",
)
"""Masks, random numbers and literals, and what is computed from them."""


def around_mask(mask: str) -> rp.Program:
  return rp.program(f"r1 = rx @ sw\nr2 = {mask}\nr3 = jnp.tanh(r1 * r2) @ su\nreturn r3")


def dtypes_between(found: dataflow.Flow) -> set[str]:
  """Returns the dtypes of the arrays that are computed from the first matmul, up to the last."""
  first, *_, last = found.matmuls()
  between = dataflow.ahead([first], lambda v: v is not last)
  return {v.dtype for v in between if v.aval.shape == (4, 8)} - {"bool"}


@BOTH
@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_decide_no_dtype(read, text):
  assert dtypes_between(read(around_mask(text))) == {"bfloat16"}


@BOTH
def test_an_input_decides_a_dtype(read):
  assert dtypes_between(read(around_mask("rx"))) == {"bfloat16", "float32"}


@pytest.mark.parametrize(("most", "dtype"), [(6, "float16"), (100_000, "float32")])
def test_an_integer_literal_that_is_passed_to_a_jit_is_a_number(most, dtype):
  fun = mpjax.autocast(lambda w, x: jnp.clip(x @ w, 0, most) @ w, "float16")
  made = jax.make_jaxpr(fun)(rp.PARAMS["sw"], rp.DATA["rx"])
  assert programs.dtypes_of(made, "min") == {dtype}


def test_a_counter_that_starts_as_a_literal_is_an_input():
  def fun(w, x):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.maximum(h @ w, i), x @ w)

  made = jax.make_jaxpr(mpjax.autocast(fun))(rp.PARAMS["sw"], rp.DATA["rx"])
  assert programs.dtypes_of(made, "max") == {"float32"}


def test_integers_in_a_module_are_inputs():
  found = in_module(around_mask("jnp.argsort(rx, -1).astype(jnp.float32)"))
  assert "float32" in dtypes_between(found)


SLOPED = {
  "leaky_relu": "jax.nn.leaky_relu(r1)",
  "with an array of a slope": "jax.nn.leaky_relu(r1, jnp.float32(0.01))",
  "in a jit": "scaled_in_jit(r1, 0.01)",
  "by hand": "jnp.where(r1 > 0, r1, 0.01 * r1)",
}


def sloped(name: str) -> rp.Program:
  return rp.program(f"r1 = rx @ sw\nr2 = {SLOPED[name]}\nr3 = r2 @ su\nreturn r3")


@BOTH
@pytest.mark.parametrize("name", SLOPED)
def test_a_slope_makes_no_float32(read, name):
  assert dtypes_between(read(sloped(name))) == {"bfloat16"}


# Frozen weights.

FROZEN = [rp.JAX_TABLE, rp.JAX_TABLE.T]
ADAPTERS = [{"down": jnp.ones((8, 2)), "up": jnp.zeros((2, 8))} for _ in FROZEN]
ROWS = jnp.ones((64, 8))


def adapted(adapters: Any, x: Any, dtype: Any = jnp.float32) -> Any:
  """Two layers with low-rank adapters, which close over their frozen weights."""
  x = x.astype(dtype)
  for weight, adapter in zip(FROZEN, adapters, strict=True):
    down, up = adapter["down"].astype(dtype), adapter["up"].astype(dtype)
    x = jax.nn.relu(x @ weight.astype(dtype) + (x @ down) @ up)
  return x.astype(jnp.float32)


def test_low_rank_adapters_save_as_much_as_by_hand():
  by_hand = programs.residual_bytes(lambda a: adapted(a, ROWS, jnp.bfloat16), ADAPTERS)
  assert programs.residual_bytes(lambda a: mpjax.autocast(adapted)(a, ROWS), ADAPTERS) <= by_hand


def test_all_matmuls_with_frozen_weights_are_in_low_precision():
  fun = jax.grad(lambda a: jnp.sum(mpjax.autocast(adapted)(a, ROWS)))
  assert programs.half_share(jax.make_jaxpr(fun)(ADAPTERS)) == 1


def test_eager_is_bit_equal_to_the_jaxpr():
  fun = under(rp.program(LOGITS + "return r2, r1"))
  eager = programs.bits(fun(rp.DATA, rp.PARAMS))
  assert eager == computed(jax.jit(fun), rp.DATA, rp.PARAMS)


@pytest.mark.parametrize("way", ["argument", "closed over", "literal"])
def test_a_scalar_decides_no_dtype(way):
  scale = jnp.float32(0.3)
  fun = {
    "argument": lambda w, s, x: jnp.tanh((x @ w) * s) @ w,
    "closed over": lambda w, s, x: jnp.tanh((x @ w) * scale) @ w,
    "literal": lambda w, s, x: jnp.tanh((x @ w) * 0.3) @ w,
  }[way]
  made = jax.make_jaxpr(mpjax.autocast(fun))(rp.PARAMS["sw"], scale, rp.DATA["rx"])
  assert programs.dtypes_of(made, "tanh") == {"bfloat16"}
