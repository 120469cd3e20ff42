import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._diagnose.call import Call
from mpjax._diagnose.compare import run as compare_run
from mpjax._diagnose.compare.run import load, record, save
from tests.errors import refused

WIDTH, LAYERS = 4, 6


@pytest.fixture(scope="module")
def arguments():
  ws = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 2
  return ws, jax.random.normal(jax.random.key(1), (3, WIDTH))


def scanned(at=-1, remat=False, reverse=False):
  """Returns a loss that scans over layers, one of which rounds what it returns."""

  def body(x, layer):
    w, i = layer
    with jax.named_scope("layer"):
      y = jnp.tanh(x @ w)
      y = jnp.where(i == at, jax.lax.reduce_precision(y, 8, 7), y)
    return y, None

  def loss_fn(ws, x):
    one = jax.checkpoint(body) if remat else body
    x, _ = jax.lax.scan(one, x, (ws, jnp.arange(len(ws))), reverse=reverse)
    return jnp.mean(x**2)

  return loss_fn


def unrolled(ws, x, taps):
  outputs = []
  for w, tap in zip(ws, taps, strict=True):
    x = jnp.tanh(x @ w) + tap
    outputs.append(x)
  return jnp.mean(x**2), outputs


def run_of(fn, *args):
  return record(fn, Call(args, {}), "fn")


def layer_of(run):
  (call,) = (call for call in run.calls if call.path == "layer")
  return call


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_values_and_cotangents_of_each_iteration(arguments, remat):
  run = run_of(scanned(remat=remat), *arguments)
  (output,) = layer_of(run).outputs
  ws, x = arguments
  taps = jnp.zeros((LAYERS, *x.shape))
  gradient = jax.value_and_grad(unrolled, argnums=(0, 2), has_aux=True)
  (_, outputs), (weights, cotangents) = gradient(ws, x, taps)
  np.testing.assert_allclose(run.arrays[output.key], outputs, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(run.arrays[output.cotangent], cotangents, rtol=1e-4, atol=1e-7)
  (each,) = run.gradients
  assert (each.path, each.stacked) == ("layer", 1)
  np.testing.assert_allclose(run.arrays[each.key], weights, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("remat", "reverse"), [(False, True), (True, False)])
def test_the_iteration_that_rounds_is_found(arguments, remat, reverse):
  fns = (scanned(at, remat, reverse) for at in (4, -1))
  report = mpjax.compare(*fns)(*arguments)
  assert (report.first.path, report.first.iteration) == ("layer", (4,))
  rows = [row for row in report.rows if row.path == "layer"]
  assert [row.output > 0 for row in rows] == [False] * (1 if reverse else 4) + [True] * (
    LAYERS - (1 if reverse else 4)
  )
  assert all(row.gradient > 1e-5 for row in rows)


@pytest.mark.parametrize(
  "mask",
  [
    lambda h: jax.nn.one_hot(jnp.arange(len(h)) % WIDTH, WIDTH),
    lambda h: (h > 0).astype(h.dtype),
    lambda h: jnp.argsort(h).astype(h.dtype),
  ],
  ids=["one_hot", "comparison", "integers"],
)
def test_casts_of_masks_and_integers_leave_a_loss_its_gradients(arguments, mask):
  ws, x = arguments

  def loss_fn(w):
    h = x @ w
    m = mask(h)
    return jnp.mean(m * h)

  run = run_of(loss_fn, ws[0])
  assert run.note == ""
  (gradient,) = run.gradients
  np.testing.assert_allclose(run.arrays[gradient.key], jax.grad(loss_fn)(ws[0]), rtol=1e-5)


@pytest.mark.slow
def test_large_arrays_are_sampled(monkeypatch):
  wide = jax.random.normal(jax.random.key(2), (LAYERS, 64, 64)) / 8
  x = jax.random.normal(jax.random.key(3), (32, 64))
  exact = mpjax.compare(scanned(), policy="mixed_bfloat16")(wide, x)
  monkeypatch.setattr("mpjax._diagnose.compare.modules.MOST", 2**12)
  monkeypatch.setattr(compare_run, "MOST", 2**12)
  run = run_of(scanned(), wide, x)
  (output,) = layer_of(run).outputs
  assert output.shape == x.shape
  kept, sizes = run.arrays[output.key], (2**12 // LAYERS, x.size)
  assert kept.shape[0] == LAYERS
  assert sizes[0] // 2 < kept.shape[1] <= sizes[0]
  assert run.arrays[output.cotangent].shape == kept.shape
  assert run.arrays[run.gradients[0].key].shape[0] == LAYERS
  sampled = mpjax.compare(scanned(), policy="mixed_bfloat16")(wide, x)
  for row, same in zip(sampled.rows, exact.rows, strict=True):
    np.testing.assert_allclose(row[3:7], same[3:7], rtol=0.2)


def test_functions_with_derivatives_of_their_own_keep_them():
  @jax.custom_vjp
  def straight(x):
    return jnp.round(x)

  straight.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (2 * g,))

  def loss_fn(w, x):
    with jax.named_scope("a"):
      y = x * w
    with jax.named_scope("b"):
      return jnp.sum(jax.nn.relu(straight(y)))

  w, x = jnp.ones(3), jnp.asarray([1.2, 2.3, -1.0])
  run = run_of(loss_fn, w, x)
  np.testing.assert_array_equal(run.arrays[run.calls[0].outputs[0].cotangent], [2, 2, 0])
  np.testing.assert_array_equal(run.arrays[run.gradients[0].key], jax.grad(loss_fn)(w, x))


def test_casts_are_as_they_are_written():
  def fn(x):
    with jax.named_scope("a"):
      product = x.astype(jnp.bfloat16) * jnp.bfloat16(1 + 2.0**-7)
      x = product.astype(jnp.float32)
    return x * 1

  x = jnp.asarray([1 + 2.0**-10, 3.0])
  run = run_of(fn, x)
  # 3.0234375 is no number of bfloat16.
  np.testing.assert_array_equal(run.arrays[run.calls[0].outputs[0].key], [1.0078125, 3.03125])


def test_only_the_parameters_of_a_model_are_differentiated():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(WIDTH)(x)
      return nn.BatchNorm(use_running_average=True)(x)

  net, x = Net(), jnp.ones((3, WIDTH))
  variables = net.init(jax.random.key(0), x)
  run = run_of(lambda v, x: jnp.mean(net.apply(v, x) ** 2), variables, x)
  leaves = [each.leaf.removeprefix("args[0]/params/") for each in run.gradients]
  assert sorted(leaves) == [
    "BatchNorm_0/bias",
    "BatchNorm_0/scale",
    "Dense_0/bias",
    "Dense_0/kernel",
  ]
  assert {each.path for each in run.gradients} == {"Net/Dense_0", "Net/BatchNorm_0"}


def test_a_saved_run_is_read_as_it_was(arguments, tmp_path):
  run = run_of(scanned(), *arguments)
  save(run, tmp_path / "run")
  again = load(tmp_path / "run", "here")
  assert again._replace(arrays={}) == run._replace(arrays={})
  assert again.arrays.keys() == run.arrays.keys()
  for key, x in run.arrays.items():
    np.testing.assert_array_equal(again.arrays[key], x)


def write_array(path):
  with open(path, "wb") as file:
    np.save(file, np.ones(2))


def write_objects(path):
  with open(path, "wb") as file:
    np.savez(file, x=np.asarray([{}], object))


@pytest.mark.parametrize("write", [write_array, write_objects, lambda path: path.write_text("x")])
def test_a_file_of_something_else_is_an_error(write, tmp_path):
  write(tmp_path / "run")
  with refused(ValueError, "here", "a file that CompareReport.save wrote", "run'", "again"):
    load(tmp_path / "run", "here")
  with pytest.raises(FileNotFoundError):
    load(tmp_path / "none", "here")
