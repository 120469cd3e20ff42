"""A jaxpr as one graph: values go into inner jaxprs and come out of them."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.reader import inner_jaxprs
from tests.autocast.rig import with_jvp, with_vjp

X = jnp.ones((4, 4))


def graph(fn, *args):
  return Graph(jax.make_jaxpr(fn)(*args), [f"x{i}" for i in range(len(args))])


def named(found, name):
  return [each for each in found.computing() if each.name == name]


def ancestors(value, seen=()):
  """All values that a value is computed from."""
  known = set(seen)
  pending = [value]
  while pending:
    value = pending.pop()
    if value not in known:
      known.add(value)
      pending += value.made_by.operands if value.made_by else []
  return known


def check_call(wrap):
  call = wrap(lambda x, y: jnp.sin(x) + y)
  found = graph(lambda x, y: jnp.cos(call(x, y)), X, X)
  (sin,), (cos,), (add,) = (named(found, each) for each in ("sin", "cos", "add"))
  assert sin.operands == [found.arguments[0]]
  assert add.operands == [sin.results[0], found.arguments[1]]
  assert cos.operands == add.results
  assert found.results == cos.results
  assert found.arguments[1].consumers == [add]


def test_values_pass_through_calls():
  check_call(jax.jit)
  check_call(jax.checkpoint)
  check_call(with_jvp)
  check_call(with_vjp)
  check_call(lambda f: jax.jit(jax.checkpoint(jax.jit(f))))


def test_what_a_scan_carries_comes_from_its_start_and_from_each_iteration():
  def fn(start, xs):
    return jax.lax.scan(lambda c, x: (jnp.sin(c) + x, jnp.cos(c)), start, xs)

  found = graph(fn, X[0], X)
  (sin,), (add,) = named(found, "sin"), named(found, "add")
  (carried,) = sin.operands
  assert carried.made_by.joins == "carry"
  assert carried.made_by.operands == [found.arguments[0], add.results[0]]
  assert sin.times == 4
  assert sin.step.certain
  last, stacked = found.results
  assert found.arguments[0] in ancestors(last)
  assert stacked.aval.shape == (4, 4)
  assert named(found, "cos")[0].results[0] in ancestors(stacked)


def test_branches_join_and_while_loops_have_a_condition_and_a_body():
  found = graph(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x), True, X)
  (sin,), (cos,) = named(found, "sin"), named(found, "cos")
  (result,) = found.results
  assert result.made_by.joins == "leave"
  assert set(result.made_by.operands) == {sin.results[0], cos.results[0]}
  assert not sin.step.certain
  found = graph(
    lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: c + jnp.sin(c), x), X
  )
  (sin,), (less,) = named(found, "sin"), named(found, "lt")
  assert found.arguments[0] in ancestors(sin.operands[0])
  assert found.arguments[0] in ancestors(less.results[0])
  assert not sin.step.certain
  assert sin.times == 1


def test_a_constant_that_is_traced_is_unknown():
  found = []

  def outer(factor):
    found.append(graph(lambda x: x * factor, X))
    return factor

  jax.jit(outer)(2.0)
  jax.grad(outer)(2.0)
  for each in found:
    operands = [v for operation in each.operations for v in operation.operands]
    (constant,) = [v for v in operands if v.kind == "constant"]
    assert (constant.label, constant.data) == ("float32[]", None)


def test_constants_and_numbers():
  table = np.arange(16, dtype=np.float32).reshape(4, 4)
  found = graph(lambda x: x * 2.5 + table, X)
  (mul,), (add,) = named(found, "mul"), named(found, "add")
  number, constant = mul.operands[1], add.operands[1]
  assert (number.kind, number.label) == ("literal", "2.5")
  assert (constant.kind, constant.label) == ("constant", "float32[4,4]")
  assert (constant.size, constant.nbytes) == (16, 64)
  # Keys are no numbers.
  found = graph(lambda key: jax.random.uniform(key, (2,)), jax.random.key(0))
  assert all(each.results for each in found.computing())


def test_keys_lead_to_the_equations():
  def fn(x):
    y, _ = jax.lax.scan(lambda c, _: (jax.jit(jnp.sin)(c) @ c, None), x, length=2)
    return jax.lax.cond(x[0, 0] > 0, jnp.cos, jnp.tanh, y)

  program = jax.make_jaxpr(fn)(X)
  for each in Graph(program).operations:
    eqn = program.jaxpr.eqns[each.step.key[0]]
    for inner, number in zip(each.step.key[1::2], each.step.key[2::2], strict=True):
      eqn = (inner_jaxprs(eqn) or ())[inner].jaxpr.eqns[number]
    assert eqn is each.eqn


def test_what_nothing_reads_is_not_used():
  def fn(x):
    jnp.sin(x @ x)
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: c + 1, x)

  found = graph(fn, X)
  assert {each.name for each in found.computing() if not each.used} == {"dot_general", "sin"}
  assert list(found.matmuls()) == []


def test_widths_and_the_dtype_of_a_matmul():
  dtypes = ["float8_e4m3fn", "bfloat16", "float16", "float32", "int32", "bool"]
  avals = [jax.ShapeDtypeStruct((2, 2), dtype) for dtype in dtypes]
  found = Graph(jax.make_jaxpr(lambda *xs: xs)(*avals), dtypes).arguments
  assert [v.is_low for v in found] == [True, True, True, False, False, False]
  assert [v.is_wide for v in found] == [False, False, False, True, False, False]
  for lhs, rhs, dtype in ((1, 1, "bfloat16"), (1, 3, "float32"), (3, 2, "float32"), (4, 4, None)):
    program = jax.make_jaxpr(lambda a, b: jax.lax.dot(a, b, preferred_element_type=a.dtype))
    (dot,) = Graph(program(avals[lhs], avals[rhs])).computing()
    assert dot.matmul_dtype == dtype
