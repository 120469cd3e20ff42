"""Programs inside of rarer primitives, and of primitives that nobody knows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir

import mpjax
from mpjax._jaxprs.autocast.transform import rewrite_closed
from mpjax._jaxprs.autocast.values import Kind, Settings
from tests import programs
from tests.jaxprs.autocast.rig import matmuls

HALF = "bfloat16"
X = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 3)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((3, 3)), jnp.float32)


def test_custom_vmap_keeps_its_rule():
  batches = []

  @jax.custom_batching.custom_vmap
  def layer(x, w):
    return jnp.tanh(x @ w)

  @layer.def_vmap
  def _(size, batched, x, w):
    batches.append((size, batched))
    return jnp.tanh(x.reshape(-1, 3) @ w).reshape(x.shape), True

  fn = mpjax.autocast(lambda x, w: 2 * layer(x, w), HALF)
  mapped = jax.vmap(fn, (0, None))
  by_hand = 2 * jnp.tanh(X.astype(HALF) @ W.astype(HALF))
  np.testing.assert_array_equal(mapped(X, W), by_hand.astype(jnp.float32))
  assert set(map(str, batches)) == {str((5, [True, False]))}
  assert matmuls(mapped, X, W) == [(HALF, HALF)]
  assert all(d == (HALF, HALF) for d in matmuls(jax.grad(lambda w: mapped(X, w).sum()), W))


def double(x_ref, y_ref):
  y_ref[...] = x_ref[...] + x_ref[...]


LEFT = {
  "composite": jax.lax.composite(lambda x, w: x @ w, "test.op"),
  "pallas_call": lambda x, w: pallas.pallas_call(
    double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
  )(x),
}


@pytest.mark.case("B075")
@pytest.mark.parametrize("name", LEFT)
def test_a_kernel_has_the_types_that_it_expects(name):
  def around(x, w):
    return LEFT[name](x @ w, w) @ w

  cast = mpjax.autocast(around, HALF)
  program = jax.make_jaxpr(cast)(X[0], W)
  (call,) = (eqn for eqn in program.eqns if eqn.primitive.name == name)
  assert {str(v.aval.dtype) for v in (*call.invars, *call.outvars)} == {"float32"}
  found = programs.products(program)
  assert {p.dtypes for p in found} == {(HALF, HALF)}
  assert len(found) == (3 if name == "composite" else 2)
  assert programs.error(programs.run(cast, X[0], W), around(X[0], W)) <= 1.6e-2


@pytest.fixture(scope="module")
def stranger():
  """A primitive with a program that no version of JAX has."""
  primitive = Primitive("test_stranger")
  primitive.multiple_results = True
  primitive.def_abstract_eval(lambda *avals, program: program.out_avals)
  primitive.def_impl(lambda *args, program: jax.core.eval_jaxpr(program.jaxpr, (), *args))
  lower = mlir.lower_fun(
    lambda *args, program: jax.core.eval_jaxpr(program.jaxpr, (), *args), multiple_results=True
  )
  mlir.register_lowering(primitive, lower)
  return primitive


@pytest.mark.case("B075")
def test_a_stranger_runs_as_it_was_traced_and_is_reported(stranger):
  inner = jax.make_jaxpr(lambda x, w: x @ w)(X[0], W)

  def fn(x, w):
    return stranger.bind(x @ w, w, program=inner)[0] @ w

  cast = mpjax.autocast(fn, HALF)
  with pytest.warns(UserWarning, match="'test_stranger' holds a jaxpr in its .*'program'"):
    program = jax.make_jaxpr(cast)(X[0], W)
  first, call, last = (
    e for e in program.eqns if e.primitive.name in ("dot_general", stranger.name)
  )
  assert [str(v.aval.dtype) for v in call.invars] == ["float32"] * 2
  assert str(first.outvars[0].aval.dtype) == str(last.outvars[0].aval.dtype) == HALF
  found = jax.jit(cast)(X[0], W)  # JAX still has the program.
  np.testing.assert_allclose(found, X[0] @ W @ W @ W, rtol=0.1, atol=0.1)


@pytest.mark.case("B075")
def test_a_stranger_has_the_setting_for_the_whole_process(stranger):
  def fn(x, w):
    return stranger.bind(x, w, program=jax.make_jaxpr(jnp.dot)(x, w))[0] @ w

  highest = (jax.lax.Precision.HIGHEST,) * 2
  with jax.default_matmul_precision("highest"), pytest.warns(UserWarning, match="test_stranger"):
    program = jax.make_jaxpr(mpjax.autocast(fn, HALF))(X[0], W)
  call, last = (e for e in program.eqns if e.primitive.name in ("dot_general", stranger.name))
  assert [e.params["precision"] for e in call.params["program"].eqns] == [highest]
  assert last.params["precision"] is None


@pytest.mark.case("B075")
def test_checkpoint_of_a_later_jax_runs_as_it_was_traced_and_is_reported(set_flag):
  set_flag("jax_remat3", True)  # There it is an object.

  def fn(x, w):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x) @ w

  cast = mpjax.autocast(fn)
  with pytest.warns(UserWarning, match="'call_hi_primitive' holds a jaxpr"):
    found = cast(X[0], W)
  np.testing.assert_allclose(found, fn(X[0], W), rtol=0.05, atol=0.05)
  with pytest.warns(UserWarning, match="call_hi_primitive"):
    program = jax.make_jaxpr(cast)(X[0], W)
  assert [p.dtypes for p in programs.products(program)] == [("bfloat16", "bfloat16")]
  # What the user leaves alone on purpose is no news.
  mpjax.autocast(mpjax.full_precision(fn))(X[0], W)


@pytest.mark.case("B075")
def test_a_scan_of_a_later_jax_is_no_key_error():
  # An equation whose parameters this version cannot read, under a name that it knows.
  program = jax.make_jaxpr(lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, length=2)[0])
  eqns = program(X[0], W).eqns
  odd = eqns[-1].replace(params={**eqns[-1].params, "ft_in": None, "jaxpr": None})
  jaxpr = program(X[0], W).jaxpr.replace(eqns=[*eqns[:-1], odd])
  settings = Settings(policy=mpjax.Policy(compute_dtype="bfloat16"), ops=mpjax.OpLists())
  closed = ClosedJaxpr(jaxpr, ())
  ins = (Kind(np.dtype("float32"), neutral=True),) * len(jaxpr.invars)
  with pytest.warns(UserWarning, match="'scan' holds a jaxpr in its parameters"):
    new = rewrite_closed(closed, settings, "here", ins)
  assert new.eqns[-1].params == odd.params
