"""Where equations keep their jaxprs, on each supported version of JAX."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Primitive

from mpjax._jaxprs.inner_jaxprs import (
  closed_over,
  donated,
  inner_jaxprs,
  is_object,
  opened,
  with_inner,
)
from mpjax._jaxprs.primitives import HIGHER_ORDER
from mpjax._jaxprs.walk import walk
from tests.jaxprs.test_walk import NESTED, s

W, X = s(3, 3), s(5, 3)


def read(eqn):
  """The jaxprs of an equation that this version can read."""
  found = inner_jaxprs(eqn)
  assert found is not None
  return found


def only(fun, *args, name):
  """The first equation of a primitive in the program of a function."""
  program = jax.make_jaxpr(fun)(*args)
  return next(v.eqn for v in walk(program) if v.eqn.primitive.name == name)


def scanned(w, start, xs):
  """One constant, two values carried, one input a step."""

  def step(carry, x):
    total, count = carry
    return (jnp.tanh(total @ w + x), count + 1), total

  return lax.scan(step, (start, 0), xs)


def scan_parts(eqn):
  """The shapes of the constants, of the carry, and of one step's inputs."""
  (body,) = read(eqn)
  shapes = [v.aval.shape for v in body.jaxpr.invars]
  carry = body.carry
  return shapes[: carry.start], shapes[carry.start : carry.stop], shapes[carry.stop :]


def test_parts_of_a_scan():
  eqn = only(scanned, W, s(3), X, name="scan")
  assert scan_parts(eqn) == ([(3, 3)], [(3,), ()], [(3,)])
  (body,) = read(eqn)
  assert body.times == 5
  assert body.operands == (0, 1, 2, 3)
  assert body.returns
  only_inputs = only(lambda x: lax.map(jnp.sin, x), X, name="scan")
  assert scan_parts(only_inputs) == ([], [], [(3,)])


def test_parts_of_a_scan_that_jax_wrote():
  # The backward pass: its constants, carry and inputs come from JAX's own bookkeeping.
  def loss(w, start, xs):
    return jnp.sum(scanned(w, start, xs)[0][0])

  program = jax.make_jaxpr(jax.grad(loss))(W, s(3), X)
  eqns = [v.eqn for v in walk(program) if v.eqn.primitive.name == "scan"]
  assert len(eqns) == 2
  consts, carry, _ = scan_parts(eqns[1])
  assert (3, 3) in consts
  # The gradients of the carry and of the constant are carried; no step may change their shapes.
  assert sorted(carry)[-2:] == [(3,), (3, 3)]
  for eqn in eqns:
    (body,) = read(eqn)
    before = [v.aval for v in body.jaxpr.invars][body.carry.start : body.carry.stop]
    after = [v.aval for v in body.jaxpr.outvars][: len(body.carry)]
    assert [(a.shape, a.dtype) for a in before] == [(a.shape, a.dtype) for a in after]


def test_parts_of_a_while_loop():
  def fun(a, b, x):
    return lax.while_loop(lambda c: c.sum() < a.sum(), lambda c: c @ b + c, x)

  eqn = only(fun, s(2), W, s(3), name="while")
  test, body = read(eqn)
  assert [eqn.invars[i].aval.shape for i in test.operands or ()] == [(2,), (3,)]
  assert [eqn.invars[i].aval.shape for i in body.operands or ()] == [(3, 3), (3,)]
  assert (test.carry, body.carry) == (range(0), range(1, 2))
  assert (test.returns, body.returns) == (False, True)
  assert test.times is body.times is None


def test_parts_of_a_cond():
  eqn = only(lambda x: lax.cond(x[0] > 0, jnp.sin, lambda y: -y, x), s(3), name="cond")
  no, yes = read(eqn)
  assert [e.primitive.name for e in no.jaxpr.eqns] == ["neg"]
  assert [e.primitive.name for e in yes.jaxpr.eqns] == ["sin"]
  assert no.operands == yes.operands == (1,)


@pytest.mark.parametrize("name", NESTED)
def test_every_operand_that_is_read_has_the_type_that_is_expected_inside(name):
  # An independent check of the positions: shapes, but for the axis of a scan or of a device.
  seen = 0
  for visit in walk(jax.make_jaxpr(lambda x: NESTED[name][0](x))(s(4, 4))):
    eqn = visit.eqn
    for inner in read(eqn):
      assert isinstance(opened(inner.program).eqns, list | tuple)
      for place, var in zip(inner.operands or (), inner.jaxpr.invars, strict=False):
        seen += 1
        given = eqn.invars[place].aval
        assert given.dtype == var.aval.dtype
        if eqn.primitive.name not in ("scan", "shard_map"):
          assert given.shape == var.aval.shape
  # Until jax 0.11 what was traced before is written out.
  assert seen or name in ("plain", "traced", "custom_linear_solve")


def doubled(c):
  return 2 * c


REPLACED = {
  "jit": jax.jit(doubled),
  "remat": jax.checkpoint(doubled),
  "composite": lax.composite(doubled, name="mpjax.doubled"),
  "scan": lambda x: lax.scan(lambda c, _: (doubled(c), None), x, length=5)[0],
  "cond": lambda x: lax.cond(x[0] > 0, lambda c: c, doubled, x),
  "while": lambda x: lax.while_loop(lambda c: jnp.sum(c) < 100, doubled, x),
}


@pytest.mark.parametrize(
  ("name", "want"),
  [("jit", 9), ("remat", 9), ("composite", 9), ("scan", 3**6), ("cond", 9), ("while", 243)],
)
def test_an_equation_with_other_jaxprs_runs_them(name, want):
  # Where it doubled or kept a number, it is multiplied by three.
  program = jax.make_jaxpr(REPLACED[name])(s(1))
  *before, eqn = program.jaxpr.eqns
  tripled = jax.make_jaxpr(lambda c: 3 * c)(s(1))
  made = [tripled if inner.returns else inner.program for inner in read(eqn)]
  new = eqn.replace(params=with_inner(eqn, made))
  changed = program.jaxpr.replace(eqns=[*before, new])
  (got,) = eval_jaxpr(changed, program.consts, jnp.full(1, 3.0))
  assert got == want


def test_each_higher_order_primitive_of_the_table_was_met():
  # All but those that this jax does not make, or has by another name.
  met = {
    visit.eqn.primitive.name
    for fun, _, _ in NESTED.values()
    for visit in walk(jax.make_jaxpr(lambda x, fun=fun: fun(x))(s(4, 4)))
  }
  assert {"remat2", "checkpoint"} & met
  old, new = (
    {"call", "closed_call", "checkpoint"},
    {"eval_jaxpr", "program_order", "call_hi_primitive"},
  )
  assert HIGHER_ORDER - met <= old | new | {"remat2"}


def test_parts_of_equations_that_are_functions():
  donating = only(lambda x, y: jax.jit(jnp.add, donate_argnums=1)(x, y), s(3), s(3), name="jit")
  assert donated(donating) == (False, True)
  plain = only(jax.checkpoint(jnp.sin), s(3), name="remat2")
  assert donated(plain) == (False,)

  def closing(w, x):
    @jax.custom_vjp
    def f(x):
      return x @ w

    f.defvjp(lambda x: (x @ w, None), lambda _, g: (g @ w.T,))
    return f(x)

  assert closed_over(only(closing, W, s(3), name="custom_vjp_call")) == 1
  assert closed_over(only(NESTED["custom_vjp"][0], s(4, 4), name="custom_vjp_call")) == 0


def of_params(name, **params):
  """Returns an equation of a primitive that has these parameters in a newer JAX."""
  odd = Primitive(name)
  odd.def_abstract_eval(lambda x, **_: x)
  return only(lambda x: odd.bind(x, **params), s(3), name=name)


def test_a_primitive_of_another_library_is_not_known():
  inner = jax.make_jaxpr(jnp.sin)(s(3))
  assert inner_jaxprs(of_params("odd_call", deep=((1, (inner,)),))) is None
  assert inner_jaxprs(of_params("odd_call", deep=((1, ()),))) == ()


class CustomRoot:
  """As JAX calls the object that holds a search for a root."""


def test_of_the_objects_of_jax_only_the_search_for_a_root_is_left_alone_on_purpose():
  root, other = (of_params("call_hi_primitive", _prim=each) for each in (CustomRoot(), "remat"))
  assert inner_jaxprs(root) == ()
  assert inner_jaxprs(other) is None
  assert is_object(root)
  assert not is_object(only(jax.jit(jnp.sin), s(3), name="sin"))


def test_a_jaxpr_of_as_many_inputs_or_outputs_alone_does_not_fit():
  eqn = only(jax.checkpoint(lambda x, y: x + y), s(3), s(3), name="remat2")
  for fun, args in (
    (lambda x, y: (x, y), (s(3), s(3))),
    (lambda x: x, (s(3),)),
  ):
    changed = {**eqn.params, "jaxpr": jax.make_jaxpr(fun)(*args).jaxpr}
    assert inner_jaxprs(eqn.replace(params=changed)) is None
  assert inner_jaxprs(eqn) is not None


@pytest.mark.parametrize(
  "params",
  [
    lambda p: {k: v for k, v in p.items() if k not in ("num_consts", "ft_in")},
    lambda p: {**{k: v for k, v in p.items() if k != "ft_in"}, "num_consts": 7, "num_carry": 1},
    lambda p: {**p, "ft_in": object()},
    lambda p: {k: v for k, v in p.items() if k != "length"},
    lambda p: {**p, "jaxpr": jax.make_jaxpr(jnp.sin)(s(3))},
  ],
  ids=["no numbers", "wrong numbers", "another tree", "no length", "another jaxpr"],
)
def test_parameters_of_a_newer_jax_are_not_known_and_no_key_error(params):
  eqn = only(scanned, W, s(3), X, name="scan")
  changed = params(dict(eqn.params))
  if changed.get("num_consts") == 7:  # Numbers that do not fit are found only by their operands.
    changed["jaxpr"] = jax.make_jaxpr(jnp.sin)(s(3))
  assert inner_jaxprs(eqn.replace(params=changed)) is None
