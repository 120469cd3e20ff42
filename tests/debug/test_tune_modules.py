import jax
import jax.numpy as jnp
import numpy as np

from mpjax._debug.tune_modules import modules_of, rows_of, streams_of
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.steps import body_of
from tests.debug.losses_to_tune import X


def test_a_row_has_the_gradients_of_what_is_inside_too():
  w, flops = np.arange(1.0, 9), {"net": 0, "net/a": 6, "net/b": 2}
  pairs = {"net/a": [(w, 1.01 * w)], "net/emb": [(w, w)]}  # A table is no row of its own.
  net, a = rows_of(flops, {"net": 0.1}, pairs, {"net", "net/a"})
  np.testing.assert_allclose([net.gradient, a.gradient], [0.01 / np.sqrt(2), 0.01], rtol=1e-4)
  assert net[:2] + net[3:5] == ("net", 0.1, 0, True)
  assert (a.path, np.isnan(a.forward), *a[3:5]) == ("net/a", True, 0.75, False)


def test_a_residual_stream_adds_a_value_and_what_modules_inside_compute_from_it():
  def layer(name, x):
    with jax.named_scope(name):
      return jnp.tanh(x)

  def model(x, bias):
    with jax.named_scope("residual"):
      x = x + layer("a", 2 * x)
    with jax.named_scope("gated"):
      x = jax.nn.silu(layer("gate", x)) * layer("up", x)
    with jax.named_scope("sum"):  # Neither is computed from the other.
      x = layer("a", x) + layer("b", x)
    with jax.named_scope("biased"):
      x = layer("a", x) + bias
    with jax.named_scope("polynomial"):  # No module is inside.
      return x + x**2

  graph = Graph(jax.make_jaxpr(model)(X, X))
  assert streams_of(graph) == {"residual"}


def test_modules_with_their_flops_forward_and_backward():
  def loss(w, x):
    with jax.named_scope("outer"):
      y = x @ w
      with jax.named_scope("inner"):
        y = jnp.einsum("ij,jk->ik", y, w)
      y = jax.lax.scan(lambda c, _: (c @ w, None), y, None, 3)[0]
    return jnp.sum(y)

  args = jnp.ones((4, 4)), jnp.ones((2, 4))
  flops = modules_of(body_of(jax.make_jaxpr(jax.value_and_grad(loss))(*args)))
  one = 2 * 2 * 4 * 4
  # The gradient by `x` is not needed.
  assert flops["outer/inner"] == 3 * one
  assert flops["outer"] == 2 * one + 3 * 3 * one
  assert set(flops) == {"outer", "outer/inner", ""}
  assert flops[""] == 0
