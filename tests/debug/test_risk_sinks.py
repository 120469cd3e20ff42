import jax
import jax.numpy as jnp
import pytest

from tests.debug.found_risks import WEIGHT, kinds, risks

pytestmark = pytest.mark.standard_promotion


@pytest.mark.parametrize("fn", [jnp.sin, jnp.cos, jnp.arccos])
def test_an_angle(fn):
  assert kinds(lambda w, x: fn(x @ w)) == ["angle"]
  assert kinds(lambda w, x: fn(jnp.tanh(x @ w))) == []
  assert kinds(lambda w, x: (x @ w) * fn(x)) == []


def test_an_index_or_an_integer():
  assert kinds(lambda w, x: w[(x @ w).astype(int)]) == ["index"]
  assert kinds(lambda w, x: jnp.floor(jnp.clip(x @ w, 0, 7)).astype("int32")) == ["index"]
  assert kinds(lambda w, x: (x @ w) % 1.0) == ["index"]
  assert kinds(lambda w, x: x @ w - jnp.floor(x @ w)) == []


def test_a_print_is_no_sink():
  def fn(w, x):
    y = x @ w
    jax.debug.print("{}", y)
    return jnp.sin(y)

  assert kinds(fn) == ["angle"]


def test_the_remainder_of_a_period():
  def wrapped(w, x):
    p = x @ w
    return p - jnp.round(p / 3) * 3

  assert kinds(wrapped) == ["index"]


def test_quantized_values_and_choices_are_no_indices():
  assert kinds(lambda w, x: jnp.round(x @ w).astype("int8")) == []
  assert kinds(lambda w, x: jnp.argmax(x @ w, -1)) == []
  assert kinds(lambda w, x: jax.nn.one_hot(jax.lax.top_k(x @ w, 2)[1], 8)) == []
  assert kinds(lambda w, x: (x @ w > 0).astype(int)) == []


def test_a_comparison_with_an_order_of_the_same_value():
  def winners(w, x):
    h = x @ w
    return jnp.where(h == h.max(-1, keepdims=True), h, 0)

  def largest(w, x):
    p = jax.nn.softmax(x @ w)
    return p * (p >= jax.lax.top_k(p, 2)[0][:, -1:])

  assert kinds(winners) == ["comparison"]
  assert kinds(largest) == ["comparison"]
  assert kinds(lambda w, x: jax.nn.relu(x @ w)) == []
  assert kinds(lambda w, x: jnp.where(x @ w > 0.5, x @ w, 0)) == []
  # Its derivative compares with the maximum, too.
  assert kinds(jax.grad(lambda w, x: jnp.max(x @ w, axis=-1).sum())) == []


def test_a_complex_exponential():
  assert kinds(lambda w, x: jnp.exp(1j * (x @ w))) == ["complex exponential"]
  assert kinds(lambda w, x: jnp.exp(x @ w)) == []


@pytest.mark.parametrize(
  "fn", [jnp.linalg.cholesky, jnp.linalg.inv, jnp.linalg.eigh, jnp.linalg.qr]
)
def test_linear_algebra(fn):
  def solved(w, x):
    h = jnp.tanh(x @ w)
    return fn(h @ h.T + jnp.eye(4))

  with pytest.warns(UserWarning, match="takes the result of low-precision matmuls"):
    found = risks(solved)
  assert {x.kind for x in found} == {"linear algebra"}
  assert {x.cure for x in found} == {
    "return mpjax.full_precision(lambda: fn(h @ h.T + jnp.eye(4)))()"
  }
  assert kinds(lambda w: fn(w + jnp.eye(8)), WEIGHT) == []


def test_a_difference_of_squares():
  def distance(w, x):
    h = x @ w
    return jnp.sqrt((h * h).sum(-1)[:, None] - 2 * h @ h.T + (h * h).sum(-1)[None])

  def negated(w, x):
    h = x @ w
    return jnp.sqrt((-2 * h) @ h.T + ((h * h).sum(-1)[:, None] + (h * h).sum(-1)[None]))

  def of_negatives(combine):
    def distance(w, x):
      h = x @ w
      squares = (h * h).sum(-1)
      return jnp.sqrt(combine(squares[:, None] + squares[None], 2 * ((-h) @ (-h).T)))

    return distance

  def kernel(w, x):
    h = jnp.tanh(x @ w)
    return jnp.exp(2 * h @ h.T - (h * h).sum(-1)[:, None] - (h * h).sum(-1)[None])

  def codebook(w, x):
    h = x @ w
    return jnp.argmin((h * h).sum(-1)[:, None] - 2 * h @ w.T + (w * w).sum(-1)[None], axis=-1)

  assert kinds(distance) == ["difference"]
  assert kinds(kernel) == ["difference"]
  assert kinds(codebook) == ["difference"]
  assert kinds(negated) == ["difference"]
  # Two negative factors have a positive product.
  assert kinds(of_negatives(jnp.subtract)) == ["difference"]
  assert kinds(of_negatives(jnp.add)) == []
  # Both sides have the same roundings.
  assert kinds(lambda w, x: jnp.var(x @ w, axis=-1)) == []
  assert kinds(lambda w, x: ((x @ w) ** 2).mean(-1) - (x @ w).mean(-1) ** 2) == []
  # A residual, and a loss.
  assert kinds(lambda w, x: x - x @ w) == []
  assert kinds(lambda w, x: ((x - x @ w) ** 2).mean()) == []


def test_a_denominator_in_float16():
  def ratio(w, x):
    return x / (x @ w + 1e-6)

  assert kinds(ratio, policy="mixed_float16") == ["denominator"]
  assert kinds(ratio) == []
  attended = lambda w, x: jax.nn.softmax((x @ w) @ x.T / jnp.sqrt(jnp.float32(8)))  # noqa: E731
  assert kinds(attended, policy="mixed_float16") == []
  assert kinds(lambda w, x: (x @ w) / (x @ w).sum(), policy="mixed_float16") == []


def test_a_mask_that_selects_from_a_table():
  table = jnp.linspace(0, 999.4937, 8)
  assert kinds(lambda i: jax.nn.one_hot(i, 8) @ table, jnp.array([1, 2])) == ["lookup"]
  assert kinds(lambda i: table[i], jnp.array([1, 2])) == []
  # Activations have been rounded before.
  dispatch = lambda w, i: jax.nn.one_hot(i, 8) @ jnp.tanh(w @ w)  # noqa: E731
  assert kinds(dispatch, WEIGHT, jnp.array([1, 2])) == []
