"""The table by module."""

import jax
import jax.numpy as jnp

import mpjax

HALF = jax.ShapeDtypeStruct((8, 8), "bfloat16")
WIDE = jax.ShapeDtypeStruct((8, 8), "float32")


def stack(w, x):
  for number in range(3):
    with jax.named_scope(f"layer_{number}"):
      x = jnp.tanh(x @ w)
  with jax.named_scope("head"):
    return x @ w


def test_modules_that_differ_in_their_number_are_one_row():
  rows = mpjax.audit(stack)(HALF, HALF).modules
  assert [(row.path, row.modules) for row in rows] == [("layer_*", 3), ("head", 1)]
  assert rows[0].flops == {"bfloat16": 3 * 2 * 8**3}
  assert rows[0].activations == ("bfloat16",)
  assert rows[0].parameters == ("bfloat16",)


def test_one_that_has_another_dtype_is_not():
  def fn(w, x):
    with jax.named_scope("layer_3"):
      x = jnp.matmul(x.astype("float32"), w.astype("float32"), precision="highest").astype(x.dtype)
    return stack(w, x)

  rows = {row.path: row for row in mpjax.audit(fn)(HALF, HALF).modules}
  assert rows["layer_3"].flops == {"float32": 2 * 8**3}
  assert rows["layer_*"].modules == 3


def test_an_input_is_no_parameter():
  def fn(params, x):
    with jax.named_scope("dense"):
      return x @ params["kernel"].astype(x.dtype)

  (row,) = mpjax.audit(fn)({"kernel": WIDE}, HALF).modules
  assert row.parameters == ("float32",)


def test_gradients_are_of_the_backward_pass():
  def loss(w, x):
    return stack(w, x).astype("float32").sum()

  rows = {row.path: row for row in mpjax.audit(jax.value_and_grad(loss))(HALF, HALF).modules}
  assert rows["head"].gradients[0] == "bfloat16"
  assert sum(sum(row.flops.values()) for row in rows.values()) == (4 + 4 + 3) * 2 * 8**3


def test_what_has_no_matmul_is_no_row():
  def fn(x):
    with jax.named_scope("norm"):
      x = x * 2
    with jax.named_scope("dense"):
      return x @ x

  assert [row.path for row in mpjax.audit(fn)(WIDE).modules] == ["dense"]
