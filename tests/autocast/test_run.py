"""Running a rewritten program: written out, or as one call where JAX is tracing."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._autocast import run as running
from tests import programs
from tests.autocast.rig import rewritten, with_vjp

W = jnp.eye(8)
X = jnp.arange(16.0).reshape(2, 8)


def long(x):
  # A hundred operations on what half types hold exactly.
  for _ in range(50):
    x = -(x @ W)
  return x, x.sum(), x.astype("float16"), x > 0


def names(fun, *args):
  return [eqn.primitive.name for eqn in jax.make_jaxpr(fun)(*args).eqns]


def test_a_short_program_is_written_out_and_a_long_one_is_one_call():
  assert "jit" not in names(mpjax.autocast(lambda x: jnp.tanh(x @ W)), X)
  program = jax.make_jaxpr(mpjax.autocast(long))(X)
  (eqn,) = program.eqns
  assert (eqn.primitive.name, eqn.params["name"]) == ("jit", "long")
  plain = jax.eval_shape(long, X)
  found = [(v.aval.dtype, v.aval.shape) for v in program.jaxpr.outvars]
  assert found == [(x.dtype, x.shape) for x in plain]
  assert {p.dtypes for p in programs.products(program)} == {("bfloat16", "bfloat16")}


@pytest.mark.slow
def test_a_gradient_outside_of_jit_on_an_explicit_mesh_of_one_device():
  kind = jax.sharding.AxisType.Explicit
  mesh = jax.make_mesh((1,), ("data",), (kind,), devices=jax.devices()[:1])
  x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
  weight = jax.device_put(W, jax.NamedSharding(mesh, jax.P()))

  def loss(w, x):
    return jnp.sum(jax.nn.softmax(jnp.where(x > 3, x @ w, -1e9)) * x)

  with jax.set_mesh(mesh):
    found, wanted = jax.grad(mpjax.autocast(loss))(weight, x), jax.grad(loss)(weight, x)
  np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.slow
def test_values_are_the_same_however_it_is_run():
  cast = mpjax.autocast(long)
  want = programs.bits(long(X))
  for way in (cast, jax.jit(cast), lambda x: jax.tree.map(lambda y: y[0], jax.vmap(cast)(x[None]))):
    assert programs.bits(way(X)) == want
  for around in (jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jit):
    found = around(lambda x: cast(x)[1])(X)
    np.testing.assert_array_equal(found, X.sum() if around is jax.jit else jnp.ones((2, 8)))


def test_without_a_trace_around_it_no_call_is_made(monkeypatch):
  # A derivative is not a program: what is differentiated is run as it would be without.
  calls = []
  called = running.called
  monkeypatch.setattr(running, "called", lambda *a: calls.append(a) or called(*a))
  cast = mpjax.autocast(long)
  cast(X)
  jax.grad(lambda x: cast(x)[1])(X)
  assert calls == []
  jax.make_jaxpr(cast)(X)
  assert len(calls) == 1


def test_constants_are_operands_of_the_call():
  table = jnp.full((8, 8), 2.0)

  def outer(x, y):
    def inner(x):
      for _ in range(70):
        x = x + y
      return x @ table

    return mpjax.autocast(inner)(x)

  program = jax.make_jaxpr(outer)(X, X)
  (eqn,) = program.eqns
  assert len(eqn.invars) == 3
  want = (71 * np.asarray(X)).sum(1, keepdims=True) * 2 * np.ones((1, 8))
  got = programs.run(outer, X, X)
  # The one rounding, of the product's operand and of its result.
  np.testing.assert_allclose(got, want, rtol=2**-7)
  grads = programs.run(jax.grad(lambda x, y: outer(x, y).sum(), (0, 1)), X, X)
  np.testing.assert_array_equal(grads[0], np.full((2, 8), 16.0))
  np.testing.assert_array_equal(grads[1], np.full((2, 8), 1120.0))


@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_results_are_arrays_and_have_the_types_that_they_have_without(outside):
  # A constant result is a literal of the program, which JAX keeps as a number of its own class.
  def loss(w):
    aux = {
      "weak": jnp.asarray(0.5),
      "number": jnp.float32(3),
      "count": jnp.int32(7),
      "flag": jnp.asarray(True),
      "matrix": jnp.zeros((2, 2)),
    }
    seen.append(aux["number"].shape)
    return (w @ w).sum(), aux

  seen = []
  _, want = loss(W)
  (_, aux), _ = outside(jax.value_and_grad(mpjax.autocast(loss), has_aux=True))(W)
  for name, x in aux.items():
    assert isinstance(x, jax.Array), name
    assert jax.typeof(x) == jax.typeof(want[name]), name
    np.testing.assert_array_equal(x, want[name])
  assert seen == [()] * 2
  cast = mpjax.autocast(lambda x: jnp.float32(3))
  assert jax.jit(lambda x: cast(x).astype("int32").at[...].add(1))(X) == 4


def test_a_result_in_low_precision_has_no_weak_type():
  weak = jnp.full((8, 8), 0.5)
  fun = rewritten(lambda w: (w @ w, w * 2), modules=True, results=lambda outputs: outputs)
  found = [(str(x.dtype), x.weak_type) for x in fun(weak)]
  assert found == [("bfloat16", False), ("float32", True)]


# What repeats is differentiated once.


def layers(x, w, between=lambda x: x, scope=jax.named_scope):
  """Six layers, of which the last is like none of the others."""
  for number in range(6):
    with scope(f"layer_{number}"):
      x = between(jnp.sin(x @ w) * (3.0 if number == 5 else 2.0))
  return x.sum()


@pytest.mark.parametrize("scope", [jax.named_scope, contextlib.nullcontext], ids=["scopes", "none"])
def test_layers_alike_are_differentiated_once(scope):
  seen = programs.Derivatives()
  cast = mpjax.autocast(functools.partial(layers, between=seen.of, scope=scope))
  jax.jit(jax.grad(cast)).trace(X, W)
  assert seen.count == 2  # Of five layers that are alike, and of the last.
  seen.count = 0
  jax.grad(cast)(X, W)
  assert seen.count == 6  # Nothing is compiled that would not be without.


def twice(x, w):
  """Parts with other operands, random numbers, functions with rules, loops, constants, effects."""
  key = jax.random.key(0)
  for number in range(3):
    with jax.named_scope(f"layer_{number}"):
      x = jax.nn.gelu(jax.nn.relu(x @ w) - w[:1]) + jax.random.normal(key, x.shape)
      x = jax.lax.fori_loop(0, 2, lambda _, x: x * w[:1], x + jnp.arange(8.0)[None])
      jax.debug.callback(lambda x: None, x)
    with jax.named_scope("tail"):
      x = (x - x.mean(0, keepdims=True)) * (1.0 + number // 2)
  return x.sum()


TRANSFORMS = {
  "grad": (jax.grad, X),
  "jacfwd": (jax.jacfwd, X),
  "hessian": (jax.hessian, X),
  "vmap": (lambda f: jax.vmap(f, in_axes=(0, None)), X[None]),
  "vmap(grad)": (lambda f: jax.vmap(jax.grad(f), in_axes=(0, None)), X[None]),
}


@pytest.mark.parametrize(("transform", "x"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_layers_that_are_differentiated_once_give_the_same_program(transform, x, monkeypatch):
  def lowered():
    made = jax.jit(transform(mpjax.autocast(twice))).lower(x, W)
    names = re.findall(r'loc\("(jit[^"]*)"', made.as_text(debug_info=True))
    # The scopes: of second derivatives JAX notes fewer of the transformations around a part.
    return made.as_text(), {re.sub(r"(vmap|jvp|transpose)\(|\)", "", name) for name in names}

  shared = lowered()
  assert any("layer_2" in name for name in shared[1])
  monkeypatch.setattr(running, "comes_from_program", lambda x: False)
  assert shared == lowered()


def test_an_audit_differentiates_layers_alike_once():
  seen = programs.Derivatives()
  cast = mpjax.autocast(functools.partial(layers, between=seen.of))
  mpjax.audit(jax.grad(cast))(X, W)
  assert seen.count == 1  # The factor of the last layer is another call.


def on_two_lines(x, w):
  """Equal operations in one scope, on lines of their own."""
  for _ in range(3):
    x = jnp.sin(x @ w) * (x @ w).astype("int32").astype("float32")
    x = jnp.sin(x @ w) * (x @ w).astype("int32").astype("float32")
  return x.sum()


@pytest.mark.parametrize(("transform", "x"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_an_audit_shows_each_line_of_what_is_differentiated_once(transform, x, monkeypatch):
  def audited():
    return mpjax.audit(transform(mpjax.autocast(on_two_lines)))(x, W)

  shared = audited()
  assert len({row.source for row in shared.lossy}) == 2
  monkeypatch.setattr(running, "comes_from_program", lambda x: False)
  assert shared.to_json() == audited().to_json()


# Second derivatives, which `vmap` maps over examples.


def hessians(fun, forward):
  """Returns a function of (w, x, v): second derivatives by `v`; `forward` allows forward mode."""

  def all_of(w, x, v):
    def of_v(v):
      return fun(w, x, v)

    gradient = jax.grad(of_v)
    reverse = jax.jacrev(gradient)(v), jax.grad(lambda v: jnp.vdot(gradient(v), v))(v)
    if not forward:
      return reverse
    modes = jax.hessian(of_v)(v), jax.jacrev(jax.jacfwd(of_v))(v), jax.jacfwd(jax.jacfwd(of_v))(v)
    return (*reverse, *modes, jax.jvp(gradient, (v,), (v,))[1])

  return all_of


TWICE = {
  "matmuls": lambda w, x, v: jnp.sum(jnp.tanh(x @ w @ v)),
  "powers": lambda w, x, v: jnp.sum(jax.nn.gelu(x @ (w * v[None])) @ w),
  "custom_jvp": lambda w, x, v: jnp.sum(jax.nn.silu(x @ (w * v[None])) @ w),
  "custom_vjp": lambda w, x, v: jnp.sum(with_vjp(lambda y, w: jnp.sin(y) @ w)(x * v[None], w)),
  "axes": lambda w, x, v: jnp.sum(
    jnp.einsum("km,npk->mnp", x * v[None], w[:, :, None] * v[None, None, :4]) ** 2
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
  "inside", [True, False], ids=["autocast of hessian", "hessian of autocast"]
)
@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_of_mapped_examples(name, inside, outside):
  keys = jax.random.split(jax.random.key(0), 3)
  args = [
    jax.random.normal(k, s) / 3 for k, s in zip(keys, [(2, 8, 8), (2, 4, 8), (2, 8)], strict=True)
  ]
  plain, forward = TWICE[name], name != "custom_vjp"
  if inside:
    ours = mpjax.autocast(hessians(plain, forward))
  else:
    ours = hessians(mpjax.autocast(plain), forward)
  found, want = outside(jax.vmap(ours))(*args), jax.jit(jax.vmap(hessians(plain, forward)))(*args)
  for a, b in zip(found, want, strict=True):
    assert programs.error(a, b) < 0.1
